"""Applies `links:` of a cluster file to the probed links; the file takes precedence.

An end is a host or the value of a label, which stands for the switch of the hosts with that label. A new switch is
created: its hosts are moved to it, and a cable of unknown rate joins it to their former switch, unless no host is left
there. A link between two hosts is a separate cable.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from psctl.topology.graph import Between, components


class LinkOverride(msgspec.Struct, frozen=True):
    """One entry of `links:`. `bandwidth` is payload bytes/s, `latency` seconds one way, None where not given."""

    a: str
    b: str
    bandwidth: float
    latency: float | None = None


def apply_overrides(
    between: Sequence[Between], overrides: Sequence[LinkOverride], labels: Mapping[str, Mapping[str, str]]
) -> tuple[Between, ...]:
    """Return the cables, probed ones replaced by those of the file.

    Args:
        between: the probed or nominal cables.
        overrides: `links:` of the cluster file.
        labels: the labels of every host, {} for hosts without labels.
    """
    edges = list(between)
    for end in dict.fromkeys(end for each in overrides for end in (each.a, each.b)):
        if end not in labels:
            edges = _gathered(edges, end, [host for host, own in labels.items() if end in own.values()])
    for each in overrides:
        ends = {each.a, each.b}
        old = next((edge for edge in edges if {edge.a, edge.b} == ends), Between(each.a, each.b))
        new = msgspec.structs.replace(
            old, bandwidth=each.bandwidth, latency=old.latency if each.latency is None else each.latency, measured=False
        )
        edges = [edge for edge in edges if edge is not old] + [new]
    return tuple(_pruned(edges, set(labels)))


def _gathered(edges: list[Between], switch: str, members: Sequence[str]) -> list[Between]:
    """Connect hosts to a switch of their own, unless the switch exists already."""
    if any(switch in (edge.a, edge.b) for edge in edges):
        return edges
    moved = [edge for edge in edges if edge.a in members]
    above = dict.fromkeys(edge.b for edge in moved)
    kept = [edge for edge in edges if edge not in moved]
    return [*kept, *(msgspec.structs.replace(edge, b=switch) for edge in moved), *(Between(switch, b) for b in above)]


def _pruned(edges: list[Between], hosts: set[str]) -> list[Between]:
    """Omit switches that only join others by cables of unknown rate, where the others are joined without them."""
    for switch in dict.fromkeys(edge.b for edge in edges if edge.bandwidth is None and edge.a not in hosts):
        rest = [edge for edge in edges if switch not in (edge.a, edge.b)]
        own = [edge for edge in edges if switch in (edge.a, edge.b)]
        ends = {end for edge in own for end in (edge.a, edge.b)} - {switch}
        if not ends & hosts and all(edge.bandwidth is None for edge in own) and _joined(rest, ends):
            edges = rest
    return edges


def _joined(edges: Sequence[Between], ends: set[str]) -> bool:
    """Return whether all these nodes are connected."""
    pairs = [(edge.a, edge.b) for edge in edges]
    return any(ends <= set(group) for group in components(itertools.chain(ends, *pairs), pairs))
