"""What `links:` says stands above what was probed, and switches that it names come to be."""

from __future__ import annotations

from psctl.topology.graph import Between
from psctl.topology.host.link_overrides import LinkOverride, apply_overrides

G = 125e6
LABELS = {"a": {"rack": "r1"}, "b": {"rack": "r1"}, "c": {"rack": "r2"}, "d": {"rack": "r2"}}


def star(*hosts: str) -> list[Between]:
    return [Between(host, "network", G, 1e-4, measured=True, via="eth0") for host in hosts]


def rows(edges: tuple[Between, ...]) -> set[tuple[str, str, float | None]]:
    return {(edge.a, edge.b, edge.bandwidth) for edge in edges}


def test_nothing_written_changes_nothing() -> None:
    assert apply_overrides(star("a", "b"), [], LABELS) == tuple(star("a", "b"))


def test_two_racks_get_switches_and_the_trunk_between_them() -> None:
    found = apply_overrides(star(*LABELS), [LinkOverride("r1", "r2", 10 * G, 5e-5)], LABELS)
    assert rows(found) == {("a", "r1", G), ("b", "r1", G), ("c", "r2", G), ("d", "r2", G), ("r1", "r2", 10 * G)}
    trunk = found[-1]
    assert (trunk.latency, trunk.measured) == (5e-5, False)
    assert all(edge.measured and edge.via == "eth0" for edge in found if edge.a in LABELS)


def test_hosts_of_no_rack_stay_where_they_were_and_racks_stay_joined_to_them() -> None:
    labels = {**LABELS, "e": {}}
    found = apply_overrides(star(*labels), [LinkOverride("r1", "r2", G / 2)], labels)
    assert rows(found) >= {("e", "network", G), ("r1", "r2", G / 2), ("r1", "network", None), ("r2", "network", None)}


def test_a_measured_trunk_is_replaced_and_keeps_the_latency_that_is_not_written() -> None:
    racks = [Between("a", "r1", G), Between("c", "r2", G), Between("r1", "r2", G / 2, 3e-5, measured=True)]
    found = apply_overrides(racks, [LinkOverride("r2", "r1", G / 4)], LABELS)
    assert found[-1] == Between("r1", "r2", G / 4, 3e-5)
    assert len(found) == 3


def test_a_link_between_two_hosts_is_a_cable_of_their_own() -> None:
    found = apply_overrides(star(*LABELS), [LinkOverride("a", "c", 10 * G, 1e-6)], LABELS)
    assert found == (*star(*LABELS), Between("a", "c", 10 * G, 1e-6))


def test_a_link_of_a_host_to_its_own_rack_is_its_port() -> None:
    found = apply_overrides(star(*LABELS), [LinkOverride("r1", "r2", G), LinkOverride("a", "r1", G / 10)], LABELS)
    assert ("a", "r1", G / 10) in rows(found)
    assert len([edge for edge in found if edge.a == "a"]) == 1
