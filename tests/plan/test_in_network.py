"""Sums in InfiniBand switches: a row to compare with, where every host has such ports."""

from __future__ import annotations

import msgspec
import pytest

from psctl.plan.in_network import in_network
from psctl.plan.plan_input import plan_input_of_cluster
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode


def cluster(*kinds: str, rates: tuple[float | None, ...] = (1e9, 2e9, 1e9)) -> ClusterGraph:
    pairs = enumerate(zip(kinds, rates, strict=True))
    found = tuple(Between(f"h{at}", "switch", rate, 2e-6, type=kind) for at, (kind, rate) in pairs)
    return ClusterGraph(tuple(HostNode(f"h{at}", HostGraph()) for at in range(len(kinds))), found)


def test_each_host_sends_its_vector_once() -> None:
    found = in_network(plan_input_of_cluster(cluster(*["InfiniBand"] * 3)), 1e9)
    assert found is not None
    assert found.seconds == pytest.approx(1.0, rel=1e-4)
    assert found.bytes_per_host == 1e9
    assert "SHArP" in found.source
    assert "cannot deploy" in found.why_not


def test_two_ports_of_a_host_carry_half_each() -> None:
    one = cluster(*["InfiniBand"] * 3)
    both = msgspec.structs.replace(one, between=one.between * 2)
    assert in_network(plan_input_of_cluster(both), 1e9).seconds == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("kinds", [["Ethernet"] * 3, ["InfiniBand", "InfiniBand", "Ethernet"]])
def test_without_infiniband_everywhere_there_is_no_row(kinds) -> None:
    assert in_network(plan_input_of_cluster(cluster(*kinds)), 1e9) is None


def test_an_unknown_rate_gives_no_row() -> None:
    found = cluster(*["InfiniBand"] * 3, rates=(1e9, None, 1e9))
    assert in_network(plan_input_of_cluster(found), 1e9) is None


def test_one_host_has_no_switch_between() -> None:
    assert in_network(plan_input_of_cluster(cluster(*["InfiniBand"] * 3), 1), 1e9) is None
