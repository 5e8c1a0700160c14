"""No accepted key is read by nothing: the schema is walked, and the program's own text is searched for each reader.

A key is read where the program says `section.key`, such as `network.congestion`. Keys of which this version takes only
the default are left out. What is read into an agent's orders must be read there again, by the rooms that run the job.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl import orders
from psctl.spec import cluster, job
from psctl.spec.decode import fields_of, sections_in
from psctl.spec.fields import Section

PACKAGE = Path(orders.__file__).parent
ONE_VALUE = {
    (job.JobSpec, "version"), (cluster.ClusterSpec, "version"),
}  # fmt: skip
"""Keys of which this version takes only what is the default."""
CALLED: dict[type[Any], set[str]] = {
    cluster.ClusterSpec: {"spec", "cluster"}, cluster.HostSpec: {"host", "hosts", "entry"}, cluster.SshSpec: {"ssh"},
    cluster.LinkSpec: {"link"},
    cluster.NetworkSpec: {"network"}, cluster.RuntimeSpec: {"runtime"}, job.JobSpec: {"job", "spec", "wanted"},
    job.SyncSpec: {"sync"}, job.TopK: {"topk"}, job.Filter: {"each"}, job.Ssp: {"consistency"},
    job.KeepBest: {"keep_best", "best"},
    job.CheckpointSpec: {"checkpoint"}, job.TimeoutSpec: {"timeouts"},
    job.MetricsSpec: {"metrics"}, job.RestartSpec: {"restart"}, job.LogsSpec: {"logs"},
    job.LoaderSpec: {"loader"}, job.PerHost: {"workers", "servers"}, job.Elastic: {"workers", "elastic"},
    orders.JobOrder: {"order", "job", "orders", "_order", "_orders"},
    orders.CheckpointOrder: {"checkpoint", "keep", "policy", "when"},
}  # fmt: skip
"""How the program names a value of each kind where it reads it."""


def sections() -> set[type[Section]]:
    """Every group of keys that this version can accept, from the two files down."""
    found: set[type[Section]] = set()
    left: list[type[Section]] = [cluster.ClusterSpec, cluster.HostSpec, cluster.LinkSpec, job.JobSpec]
    while left:
        one = left.pop()
        found.add(one)
        for field in fields_of(one):
            left += [below for below in sections_in(field.kind) if below not in found]
    return found


def name_of(node: ast.expr) -> str:
    """Return the last word of `a.b.word` or `word[0]`."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def reads(rooms: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """Every (name, key) of a `name.key` that these rooms read."""
    found = set()
    for room in rooms:
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add((name_of(node.value), node.attr))
    return frozenset(found)


def keys() -> Iterator[tuple[type[Section], str]]:
    for section in sorted(sections(), key=lambda one: one.__name__):
        for field in fields_of(section):
            if (section, field.name) not in ONE_VALUE:
                yield section, field.name


@pytest.mark.parametrize(
    ("section", "key"), list(keys()), ids=lambda one: one if isinstance(one, str) else one.__name__
)
def test_every_accepted_key_is_read_by_the_program(section: type[Section], key: str) -> None:
    found = reads(("cli", "launch", "remote", "plan", "topology"))
    if section in (job.TopK, job.Filter) or key in ("compression", "filters"):  # spec makes one value of them
        assert ("sync", "compressed") in found
        found = reads(("spec",))
        assert any((name, key) in found for name in (*CALLED[section], "self")), f"{section.__name__}.{key}"
        return
    assert any((name, key) in found for name in CALLED[section]), f"{section.__name__}.{key} is read by nothing"


@pytest.mark.parametrize("kind", [orders.JobOrder, orders.CheckpointOrder])
def test_every_order_is_read_by_the_rooms_that_run_the_job(kind: type[msgspec.Struct]) -> None:
    found = reads(
        ("agent", "coordinator", "server", "worker", "sync", "client", "process", "job", "plan", "checkpoint")
    )
    unread = [
        field.name
        for field in msgspec.structs.fields(kind)
        if not any((name, field.name) in found for name in CALLED[kind])
    ]
    assert unread == []
