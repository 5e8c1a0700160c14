"""Groups from inside to outside."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.algorithms.islands import Level, hierarchy, islands, ranks
from psctl.topology.graph import ClusterGraph, Device, HostGraph, HostNode, Link
from tests.topology.fabrics import behind_switch, dgx1v, named, nvswitch


def pairs_of_nvlink() -> HostGraph:
    """Eight GPUs in pairs by NVLink; two pairs a PCIe switch; a switch and a processor a NUMA node."""
    devices = [Device(f"CPU{at}", "cpu", at) for at in range(2)]
    devices += [Device(f"SW{at}", "switch", at, "PCIe switch") for at in range(2)]
    devices += [Device(f"GPU{at}", "gpu", at // 4) for at in range(8)]
    links = [Link(f"GPU{at}", f"GPU{at + 1}", "NV4", 100e9, switched=False) for at in (0, 2, 4, 6)]
    links += [Link(f"GPU{at}", f"SW{at // 4}", "PCIe", 16e9) for at in range(8)]
    links += [Link(f"SW{at}", f"CPU{at}", "PCIe", 16e9) for at in range(2)] + [Link("CPU0", "CPU1", "SMP", 40e9)]
    return HostGraph(tuple(devices), tuple(links))


def alone(graph: HostGraph) -> ClusterGraph:
    return ClusterGraph((HostNode("box", graph),))


def gpus(*numbers: int) -> tuple[str, ...]:
    return tuple(f"GPU{number}" for number in numbers)


def test_levels_nest_from_nvlink_pairs_to_switches() -> None:
    assert hierarchy(alone(pairs_of_nvlink())) == (
        Level("nvlink", (gpus(0, 1), gpus(2, 3), gpus(4, 5), gpus(6, 7))),
        Level("pcie", (gpus(0, 1, 2, 3), gpus(4, 5, 6, 7))),
    )


def test_what_divides_nothing_is_left_out() -> None:
    assert hierarchy(alone(behind_switch(4))) == ()
    assert hierarchy(alone(nvswitch(8))) == ()
    assert hierarchy(alone(dgx1v())) == ()  # one island of NVLink spans switches and processors


def test_each_kind_of_group_can_be_requested_all_the_same() -> None:
    assert islands(dgx1v()) == (named(8),)
    assert islands(dgx1v(), "pcie") == (gpus(0, 1), gpus(2, 3), gpus(4, 5), gpus(6, 7))
    assert islands(dgx1v(), "numa") == (gpus(0, 1, 2, 3), gpus(4, 5, 6, 7))
    assert islands(nvswitch(4)) == (named(4),) and islands(nvswitch(4), "host") == (named(4),)
    assert islands(nvswitch(4), "pcie") == tuple((gpu,) for gpu in named(4))
    assert islands(HostGraph()) == () == islands(HostGraph(), "host")


def test_switches_behind_a_switch_are_two_levels() -> None:
    devices = [Device("CPU0", "cpu", 0), *(Device(f"SW{at}", "switch") for at in range(6))]
    devices += [Device(ident, "gpu") for ident in named(8)]
    links = [Link(f"GPU{at}", f"SW{at // 2}", "PCIe", 16e9) for at in range(8)]
    links += [Link(f"SW{at}", f"SW{4 + at // 2}", "PCIe", 16e9) for at in range(4)]
    links += [Link(f"SW{at}", "CPU0", "PCIe", 16e9) for at in (4, 5)]
    assert [level.groups for level in hierarchy(alone(HostGraph(tuple(devices), tuple(links))))] == [
        (gpus(0, 1), gpus(2, 3), gpus(4, 5), gpus(6, 7)),
        (gpus(0, 1, 2, 3), gpus(4, 5, 6, 7)),
    ]


def test_the_processor_at_the_end_of_the_slots_replaces_a_missing_node() -> None:
    devices = (Device("CPU0", "cpu"), Device("CPU1", "cpu"), *(Device(ident, "gpu") for ident in named(4)))
    links = [Link(f"GPU{at}", f"CPU{at % 2}", "PCIe", 16e9) for at in range(4)] + [Link("CPU0", "CPU1", "SMP", 20e9)]
    assert islands(HostGraph(devices, tuple(links)), "numa") == (gpus(0, 2), gpus(1, 3))


def test_hosts_and_racks() -> None:
    hosts = tuple(HostNode(f"h{at}", behind_switch(2), {"rack": f"r{at // 2}"}) for at in range(4))
    each = tuple((f"h{at}/GPU0", f"h{at}/GPU1") for at in range(4))
    assert hierarchy(ClusterGraph(hosts)) == (
        Level("host", each),
        Level("rack", ((*each[0], *each[1]), (*each[2], *each[3]))),
    )


def test_hosts_without_gpus_are_ranks_and_racks_group_them() -> None:
    hosts = tuple(HostNode(f"h{at}", HostGraph(), {"rack": "ab"[at % 2]}) for at in range(4))
    assert ranks(ClusterGraph(hosts)) == ("h0", "h1", "h2", "h3")
    assert hierarchy(ClusterGraph(hosts)) == (Level("rack", (("h0", "h2"), ("h1", "h3"))),)
    bare = ClusterGraph(tuple(HostNode(f"h{at}", HostGraph()) for at in range(4)))
    assert hierarchy(bare) == ()


def test_a_host_that_only_serves_has_no_ranks() -> None:
    cluster = ClusterGraph((HostNode("a", nvswitch(2)), HostNode("b", nvswitch(2), roles=("server",))))
    assert ranks(cluster) == ("a/GPU0", "a/GPU1")
    assert all(not ident.startswith("b") for level in hierarchy(cluster) for group in level.groups for ident in group)


@given(st.lists(st.tuples(st.sampled_from(["r0", "r1", ""]), st.integers(0, 3)), min_size=1, max_size=5))
def test_every_level_holds_each_rank_once_and_whole_groups_of_the_level_inside(rows: list[tuple[str, int]]) -> None:
    cluster = ClusterGraph(
        tuple(
            HostNode(
                f"h{at}", pairs_of_nvlink() if gpus_ == 3 else behind_switch(gpus_), {"rack": rack} if rack else {}
            )
            for at, (rack, gpus_) in enumerate(rows)
        )
    )
    inner: tuple[tuple[str, ...], ...] = tuple((rank,) for rank in ranks(cluster))
    for level in hierarchy(cluster):
        assert sorted(ident for group in level.groups for ident in group) == sorted(ranks(cluster))
        assert 1 < len(level.groups) < len(inner)
        assert all(sum(set(small) <= set(group) for group in level.groups) == 1 for small in inner)
        inner = level.groups
