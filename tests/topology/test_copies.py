"""Measured copies stand in place of nominal figures, on the very pairs that were measured."""

from __future__ import annotations

from psctl.topology.graph import Device, HostGraph, Link
from psctl.topology.host.host_graph import with_copies

GRAPH = HostGraph(
    devices=(Device("GPU0", "gpu"), Device("GPU1", "gpu"), Device("CPU0", "cpu"), Device("SW0", "switch")),
    links=(
        Link("GPU0", "GPU1", "PIX", 16e9), Link("GPU0", "SW0", "PCIe", 16e9, derived=True),
        Link("GPU1", "SW0", "PCIe", 16e9, derived=True),
    ),
)  # fmt: skip


def copy(a: str, b: str, rate: float) -> Link:
    return Link(a, b, "copy", rate, 8e-6, measured=True)


def test_a_relation_takes_what_its_pair_was_measured_to_carry() -> None:
    found = with_copies(GRAPH, [copy("GPU1", "GPU0", 12e9)])
    assert found.links[0] == Link("GPU0", "GPU1", "PIX", 12e9, 8e-6, measured=True)
    assert found.links[1:] == GRAPH.links[1:]


def test_a_pair_without_a_word_gets_a_relation_and_no_cable() -> None:
    found = with_copies(GRAPH, [copy("CPU0", "GPU0", 11e9), copy("GPU0", "GPU7", 11e9)])
    assert found.links == (*GRAPH.links, copy("CPU0", "GPU0", 11e9))
    assert not found.links[-1].edge


def test_direct_nvlinks_are_measured_as_the_cable_that_they_are() -> None:
    graph = HostGraph(GRAPH.devices, (Link("GPU0", "GPU1", "NV2", 50e9, switched=False),))
    found = with_copies(graph, [copy("GPU0", "GPU1", 48e9)])
    assert found.edges == (Link("GPU0", "GPU1", "NV2", 48e9, 8e-6, switched=False, measured=True),)
