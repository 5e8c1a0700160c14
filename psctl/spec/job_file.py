"""Reads job.yaml, with the keys that a command line replaces, and refuses what cannot be combined."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from psctl.errors import UsageError
from psctl.spec import yaml_nodes
from psctl.spec.cluster import ClusterSpec
from psctl.spec.decode import Decoder, raise_all
from psctl.spec.job import JobSpec
from psctl.spec.job_contradictions import CONTRADICTIONS


def load_job(text: str, source: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job file.

    Args:
        text: the text of the file.
        source: its name, for messages.
        overrides: `key=value` of --set, such as "sync.strategy=ps"; they replace keys of the file.

    Raises:
        InvalidFile: malformed or contradictory; the user's fault, with file:line:column, or the --set.
        UsageError: an override that is no key=value.
    """
    decoder = Decoder({"cluster file": ClusterSpec})
    node = yaml_nodes.parse(text, source, decoder.problems)
    for override in overrides:
        node = _override(node, override)
    spec = decoder.make(node, JobSpec)
    for keys, contradictions in CONTRADICTIONS.items():
        if decoder.sound(*keys):
            for path, message, hint in contradictions(spec):
                decoder.refuse(path, message, hint)
    raise_all(decoder.problems)
    return msgspec.structs.replace(spec, source=source)


def _override(node: yaml_nodes.Node, override: str) -> yaml_nodes.Node:
    """Return the file with one key replaced or added, with the sections that it needs."""
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key.strip()):
        raise UsageError(
            f"--set {override}: expected key=value",
            "such as --set sync.strategy=ps; every key: psctl validate --schema",
        )
    where = f"--set {override}"
    return _put(node, key.strip().split("."), yaml_nodes.parse_value(value, where), where)


def _put(node: yaml_nodes.Node | None, path: list[str], value: yaml_nodes.Node, where: str) -> yaml_nodes.Node:
    if not path:
        return value
    below = node if isinstance(node, yaml_nodes.Mapping) else yaml_nodes.Mapping((), where)
    return below.put(path[0], _put(below.get(path[0]), path[1:], value, where), where)
