"""Rings: the seeds' machine, closed forms, whatever graph against brute force."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from hypothesis import given, settings

from psctl.topology.algorithms.cycles import hamiltonian
from psctl.topology.algorithms.direct_links import DirectLinks, direct_links
from psctl.topology.algorithms.rings import DeviceRing, RingPacking, rings
from psctl.topology.graph import Device, HostGraph, Link
from tests.desktop_time import desktop_seconds
from tests.hypothesis_profile import examples
from tests.topology.fabrics import (
    DGX1V,
    XGMI16,
    behind_switch,
    complete,
    cube,
    dgx1v,
    mesh,
    meshes,
    named,
    nvswitch,
    part,
)

SEEDS = ((0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 5, 2, 4, 7, 1, 6))
"""The textbook's two rings, its GPUs 1 to 8 as 0 to 7: the first over double links, the second over single ones."""


def used(found: RingPacking, nodes: tuple[str, ...]) -> Counter[tuple[int, int]]:
    """Units over each pair; every ring must visit all devices once and begin at the first."""
    units: Counter[tuple[int, int]] = Counter()
    for ring in found.rings:
        assert sorted(ring.order) == sorted(nodes) and ring.order[0] == nodes[0] and ring.width > 0
        at = [nodes.index(ident) for ident in ring.order]
        assert at[1] <= at[-1]
        for a, b in itertools.pairwise([*at, at[0]] if len(at) > 2 else at):
            units[min(a, b), max(a, b)] += ring.width
    return units


def check(found: RingPacking, net: DirectLinks) -> None:
    units = used(found, net.nodes)
    room = {(a, b): count for a, b, count in net.links}
    assert all(count <= room.get(pair, 0) for pair, count in units.items())
    assert found.width <= found.bound
    assert len({ring.order for ring in found.rings}) == len(found.rings)
    if found.rings:
        assert sum(found.shares) == pytest.approx(1)


def widest(net: DirectLinks) -> int:
    """The widest sum of rings, by trying everything."""
    count = len(net.nodes)
    start = {(a, b): n for a, b, n in net.links}
    cycles = [(0, *rest) for rest in itertools.permutations(range(1, count)) if rest[0] < rest[-1]]
    ways = [[(min(pair), max(pair)) for pair in itertools.pairwise((*cycle, 0))] for cycle in cycles]

    def best(left: dict[tuple[int, int], int], at: int) -> int:
        top = 0
        for index in range(at, len(ways)):
            if all(left.get(pair, 0) > 0 for pair in ways[index]):
                less = {pair: n - (pair in ways[index]) for pair, n in left.items()}
                top = max(top, 1 + best(less, index))
        return top

    return best(start, 0)


def test_the_hybrid_cube_mesh_is_a_double_and_a_single_ring_over_all_24_links() -> None:
    found = rings(direct_links(dgx1v()))
    assert found.rings == (
        DeviceRing(("GPU0", "GPU3", "GPU2", "GPU1", "GPU5", "GPU6", "GPU7", "GPU4"), 2),
        DeviceRing(("GPU0", "GPU1", "GPU3", "GPU7", "GPU5", "GPU4", "GPU6", "GPU2"), 1),
    )
    assert found.exact and found.bound == 3 and found.unit == 25e9
    assert found.shares == (2 / 3, 1 / 3)
    assert used(found, named(8)) == Counter({(a, b): n for a, b, n in DGX1V})


def test_the_two_rings_are_those_of_the_textbook_under_other_names() -> None:
    """Some renaming carries the first ring onto the first, the second onto the second."""
    own = [[int(ident[3:]) for ident in ring.order] for ring in rings(mesh(8, DGX1V)).rings]
    second = {frozenset(pair) for pair in itertools.pairwise([*own[1], own[1][0]])}
    fits = 0
    for turn, way in itertools.product(range(8), (1, -1)):
        name = {SEEDS[0][place]: own[0][(turn + way * place) % 8] for place in range(8)}
        fits += {frozenset((name[a], name[b])) for a, b in itertools.pairwise([*SEEDS[1], SEEDS[1][0]])} == second
    assert fits == 4


def test_subsets_of_the_hybrid_cube_mesh() -> None:
    """With 3 GPUs only the triangles have a ring; with 7, every subset has."""
    with_ring = Counter()
    for count in range(3, 9):
        for ids in itertools.combinations(range(8), count):
            net = part(DGX1V, ids)
            found = rings(net)
            assert found.exact
            check(found, net)
            with_ring[count] += bool(found.rings)
            if count < 6:
                assert found.width == widest(net)
    assert with_ring == {3: 8, 4: 8, 5: 24, 6: 28, 7: 8, 8: 1}


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("count", range(3, 17))
def test_complete_graphs_are_filled_as_far_as_half_links_allow(count: int, units: int) -> None:
    net = complete(count, units)
    found = rings(net)
    check(found, net)
    assert found.exact and found.width == (count - 1) * units // 2 == found.bound


@settings(max_examples=examples(150))
@given(meshes(3, 6))
def test_as_wide_as_brute_force(net: DirectLinks) -> None:
    found = rings(net)
    check(found, net)
    assert found.exact and found.width == widest(net)


def test_few_wide_rings_rather_than_many_narrow_ones() -> None:
    assert [ring.width for ring in rings(cube(4)).rings] == [4, 4]


def test_a_graph_without_a_ring_gives_none_and_an_exact_reason() -> None:
    star = mesh(4, [(0, 1, 2), (0, 2, 2), (0, 3, 2)])
    petersen = [(i, (i + 1) % 5, 1) for i in range(5)] + [(i, i + 5, 1) for i in range(5)]
    petersen += [(5 + i, 5 + (i + 2) % 5, 1) for i in range(5)]
    for net in (star, mesh(10, ((min(a, b), max(a, b), n) for a, b, n in petersen))):
        found = rings(net)
        assert found.rings == () and found.exact and found.shares == ()
    assert rings(mesh(4, [(0, 1, 1), (2, 3, 1)])).rings == ()
    assert rings(DirectLinks(("GPU0",))).rings == ()


def test_two_gpus_are_one_ring_over_all_their_links() -> None:
    found = rings(mesh(2, [(0, 1, 12)]))
    assert found.rings == (DeviceRing(("GPU0", "GPU1"), 12),) and found.exact


def test_on_a_switch_there_is_one_ring_in_device_order() -> None:
    found = rings(direct_links(nvswitch(16)))
    assert found.switched and found.exact
    assert found.rings == (DeviceRing(named(16), 1),) and found.unit == 300e9


def test_pcie_is_no_wire() -> None:
    assert direct_links(behind_switch(4)).links == () and direct_links(behind_switch(4)).ports == ()
    assert rings(direct_links(behind_switch(4))).rings == ()


def test_units_follow_the_widest_common_measure_of_bundles_without_a_number() -> None:
    devices = tuple(Device(ident, "gpu") for ident in named(3))
    rates = {("GPU0", "GPU1"): 200e9, ("GPU1", "GPU2"): 98e9, ("GPU2", "GPU0"): 50e9}
    net = direct_links(HostGraph(devices, tuple(Link(a, b, "xGMI", rate) for (a, b), rate in rates.items())))
    assert net.links == ((0, 1, 4), (0, 2, 1), (1, 2, 2)) and net.unit == 50e9


def test_links_of_unknown_rate_still_make_rings() -> None:
    devices = tuple(Device(ident, "gpu") for ident in named(3))
    pairs = itertools.combinations(named(3), 2)
    net = direct_links(HostGraph(devices, tuple(Link(a, b, "NV2", switched=False) for a, b in pairs)))
    assert rings(net).rings == (DeviceRing(named(3), 2),) and rings(net).unit == 0.0


@pytest.mark.parametrize(
    ("net", "width"),
    [
        (cube(), 2),
        (mesh(16, XGMI16), 3),
        (mesh(16, [*DGX1V, *((a + 8, b + 8, n) for a, b, n in DGX1V), *((i, i + 8, 1) for i in range(8))]), 3),
        (mesh(16, ((a, b, 1 + (a * b) % 3) for a, b in itertools.combinations(range(16), 2) if (a + b) % 4)), 5),
    ],
)
def test_sixteen_gpus_take_no_time(net: DirectLinks, width: int) -> None:
    start = time.process_time()
    found = rings(net)
    assert desktop_seconds(time.process_time() - start) < 3
    check(found, net)
    assert found.width == width


def test_each_cycle_is_listed_once() -> None:
    """(p-1)!/2 in complete graphs, 6 in the cube, 1344 in the hypercube of 16."""
    three = mesh(8, ((a, a ^ 1 << k, 1) for a in range(8) for k in range(3) if a < a ^ 1 << k))
    for net, count in ((complete(4, 1), 3), (complete(7, 2), 360), (three, 6), (cube(), 1344)):
        cycles, all_ = hamiltonian(net.units(), 1_000_000)
        assert all_ and len(cycles) == count == len({frozenset(zip(c, (*c[1:], 0), strict=True)) for c in cycles})


def test_out_of_steps_is_reported() -> None:
    found = rings(cube(), listed=50, tried=50)
    check(found, cube())
    assert not found.exact and found.width < found.bound == 2
