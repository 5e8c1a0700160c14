"""A file says by its keys whether it is a cluster or a job."""

from __future__ import annotations

import pytest

from psctl.errors import InvalidFile
from psctl.spec.cluster import ClusterSpec
from psctl.spec.job import JobSpec
from psctl.spec.kinds import kind_of, load
from psctl.spec.nearest import did_you_mean, nearest


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("name: x\nhosts: [a]", "cluster"),
        ("version: 1\nname: x\nscript: t.py", "job"),
        ("name: x\nmodule: a.b\nworkers: 2", "job"),
        ("name: x\nhostss: [a]", "cluster"),
        ("name: x\nscirpt: t.py", "job"),
        ("ssh: {}", "cluster"),
    ],
)
def test_the_kind_is_recognised_by_the_keys(text: str, kind: str) -> None:
    assert kind_of(text, "f.yaml") == kind


@pytest.mark.parametrize("text", ["", "name: x", "[a]", "foo: 1", "version: 1"])
def test_a_file_that_is_neither_is_reported(text: str) -> None:
    with pytest.raises(InvalidFile, match="neither a cluster file nor a job file"):
        kind_of(text, "f.yaml")


def test_either_kind_is_loaded() -> None:
    assert isinstance(load("name: x\nhosts: [a]", "f"), ClusterSpec)
    assert isinstance(load("name: x\nscript: t.py", "f"), JobSpec)


def test_the_nearest_name_ignores_case_and_dashes() -> None:
    assert nearest("Stratgy", ("strategy", "size")) == "strategy"
    assert nearest("halving_doubling", ("halving-doubling", "ring")) == "halving-doubling"
    assert nearest("compr", ("compression", "period")) == "compression"
    assert nearest("zebra", ("strategy", "size")) is None
    assert did_you_mean("rign", ("ring", "tree")) == ', did you mean "ring"?'
    assert did_you_mean("zebra", ("ring",)) == ""
