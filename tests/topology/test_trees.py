"""Packed trees: they span, fit the links, and reach the bound, which brute force confirms."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings

from psctl.topology.algorithms.direct_links import DirectLinks, direct_links
from psctl.topology.algorithms.rings import rings
from psctl.topology.algorithms.strength import strength
from psctl.topology.algorithms.trees import TreePacking, all_reduce
from tests.desktop_time import desktop_seconds
from tests.hypothesis_profile import examples
from tests.reference.tree_packing import broadcast, limited
from tests.topology.fabrics import DGX1V, XGMI16, complete, cube, dgx1v, mesh, meshes, nvswitch, part, partitions


def check(found: TreePacking, net: DirectLinks, directed: bool = False) -> None:
    """Each tree spans from its root outwards; no link carries more than its units."""
    load: Counter[tuple[str, str]] = Counter()
    for tree in found.trees:
        reached = [tree.root]
        for parent, child in tree.edges:
            assert parent in reached and child not in reached
            reached.append(child)
            load[(parent, child) if directed else tuple(sorted((parent, child)))] += tree.weight
        assert sorted(reached) == sorted(net.nodes) and tree.weight > 0 and tree.depth >= 1
    room = {}
    for a, b, units in net.links:
        room[net.nodes[a], net.nodes[b]] = room[net.nodes[b], net.nodes[a]] = units
    assert all(weight <= room[pair] for pair, weight in load.items())
    assert found.total == sum(tree.weight for tree in found.trees)
    if found.trees:
        assert sum(found.shares) == pytest.approx(1)


def weakest(net: DirectLinks) -> Fraction:
    """The least of E(P) / (|P|-1), by all partitions."""
    least = []
    for parts in partitions(range(len(net.nodes))):
        if len(parts) > 1:
            label = {node: at for at, group in enumerate(parts) for node in group}
            across = sum(units for a, b, units in net.links if label[a] != label[b])
            least.append(Fraction(across, len(parts) - 1))
    return min(least)


def least_cut(net: DirectLinks, root: int) -> int:
    """The least units that leave a set that holds the root, by all sets."""
    rest = [node for node in range(len(net.nodes)) if node != root]
    cuts = []
    for size in range(len(rest)):
        for more in itertools.combinations(rest, size):
            inside = {root, *more}
            cuts.append(sum(units for a, b, units in net.links if (a in inside) != (b in inside)))
    return min(cuts)


def test_the_hybrid_cube_mesh_carries_24_sevenths_and_broadcasts_six() -> None:
    net = direct_links(dgx1v())
    found = all_reduce(net)
    check(found, net)
    assert found.total == found.bound == Fraction(24, 7) and found.unit == 25e9
    assert len(found.trees) <= 11
    for root in net.nodes:
        spread = broadcast(net, root)
        check(spread, net, directed=True)
        assert spread.total == spread.bound == 6 and {tree.root for tree in spread.trees} == {root}
        assert len(spread.trees) <= 6


def test_every_connected_subset_of_the_hybrid_cube_mesh_reaches_its_bound() -> None:
    seen: Counter[int] = Counter()
    for count in range(2, 9):
        for ids in itertools.combinations(range(8), count):
            net = part(DGX1V, ids)
            found = all_reduce(net)
            check(found, net)
            if not net.connected:
                assert found.trees == () and found.bound == 0
                continue
            seen[count] += 1
            assert found.total == found.bound == weakest(net)
            if count > 2:
                # An all-reduce over rings of width W both ways moves p / (2(p-1)) of 2W units.
                assert found.total >= Fraction(2 * rings(net).width * count, 2 * (count - 1))
            spread = broadcast(net, net.nodes[0])
            check(spread, net, directed=True)
            assert spread.total == spread.bound == least_cut(net, 0)
    assert seen == {2: 16, 3: 32, 4: 56, 5: 56, 6: 28, 7: 8, 8: 1}


@settings(max_examples=examples(150))
@given(meshes(2, 6))
def test_any_graph_reaches_the_bound_of_brute_force(net: DirectLinks) -> None:
    found, spread = all_reduce(net), broadcast(net, net.nodes[-1])
    check(found, net)
    check(spread, net, directed=True)
    assert found.total == found.bound == weakest(net)
    assert spread.total == spread.bound == least_cut(net, len(net.nodes) - 1)
    assert len(found.trees) <= 2 * len(net.links)


@settings(max_examples=examples(50))
@given(meshes(2, 7))
def test_the_strength_comes_with_a_partition_that_shows_it(net: DirectLinks) -> None:
    least, parts = strength(net)
    assert sorted(node for group in parts for node in group) == list(range(len(net.nodes)))
    label = {node: at for at, group in enumerate(parts) for node in group}
    across = sum(units for a, b, units in net.links if label[a] != label[b])
    assert least == Fraction(across, len(parts) - 1) == weakest(net)


@settings(max_examples=examples(30))
@given(meshes(8, 12))
def test_larger_graphs_meet_their_bound_from_both_sides(net: DirectLinks) -> None:
    """Packing and partition bound each other: equal means both are right."""
    found = all_reduce(net)
    check(found, net)
    assert found.total == found.bound == strength(net)[0]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 6])
def test_fewer_trees_on_request(most: int) -> None:
    net = mesh(8, DGX1V)
    found = limited(net, most)
    check(found, net)
    assert 1 <= len(found.trees) <= most
    assert found.bound == Fraction(24, 7) > found.total >= min(3, most)


def test_wide_links_make_heavy_trees_and_not_many() -> None:
    for units in (1, 12, 60):
        net = mesh(8, ((a, b, n * units) for a, b, n in DGX1V))
        assert len(all_reduce(net).trees) <= 11 and len(broadcast(net, "GPU0").trees) <= 6


def test_a_switch_or_no_links_packs_nothing() -> None:
    assert all_reduce(direct_links(nvswitch(8))).trees == ()
    assert broadcast(direct_links(nvswitch(8)), "GPU0").trees == ()
    assert all_reduce(DirectLinks(("GPU0",))).trees == ()


@pytest.mark.parametrize(
    ("net", "bound"),
    [
        (cube(), Fraction(32, 15)),
        (mesh(16, XGMI16), Fraction(24, 7)),
        (complete(16, 2), Fraction(16)),
        (mesh(16, ((a, b, 1 + (a * b) % 3) for a, b in itertools.combinations(range(16), 2) if (a + b) % 4)), 0),
    ],
)
def test_sixteen_gpus_take_no_time(net: DirectLinks, bound: Fraction) -> None:
    start = time.process_time()
    found = all_reduce(net)
    spread = broadcast(net, net.nodes[0])
    assert desktop_seconds(time.process_time() - start) < 3
    check(found, net)
    check(spread, net, directed=True)
    assert found.total == found.bound and (not bound or bound == found.bound)
    assert spread.total == spread.bound
