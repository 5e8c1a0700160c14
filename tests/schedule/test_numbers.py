"""Steps and bytes of every algorithm equal those of the literature."""

from __future__ import annotations

from math import ceil, floor, log2

import pytest

from psctl.schedule.algorithms import catalog, collectives, parameter_server, ring, sharded, trees
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.schedule import Schedule
from tests.helpers.reference_player import sums_everywhere
from tests.reference import barriers

WORLDS = [2, 3, 4, 5, 6, 7, 8, 12, 16, 24]


def received(schedule: Schedule) -> list[float]:
    total, found = sum(schedule.shares), [0.0] * schedule.nodes
    for one in schedule.transfers:
        found[one.destination] += schedule.shares[one.chunk] / total
    return found


@pytest.mark.parametrize("p", WORLDS)
def test_steps_and_bytes_of_all_reduce(p: int) -> None:
    lg, low, even = ceil(log2(p)), floor(log2(p)), 2 * (p - 1) / p
    rows = {
        "root": (2, p - 1),
        "cpu": (2, 1),
        "sharded": (2, even),
        "one-shot": (1, p - 1),
        "chain": (2 * (p - 1), 2 if p > 2 else 1),
        "ring": (2 * (p - 1), even),
        "bidirectional-ring": (2 * (p - 1), even),
        "tree": (2 * lg, None),
        "recursive-doubling": (low if p == 1 << low else low + 2, None),
        "halving-doubling": (2 * low if p == 1 << low else 2 * low + 2, even if p == 1 << low else None),
    }
    for name, (steps, most) in rows.items():
        schedule = catalog.build(name, p)
        assert schedule.steps == steps, name
        if most is not None:
            assert max(schedule.sent(1.0)[:p]) == pytest.approx(most), name
    for name in ("ring", "bidirectional-ring", "sharded"):
        schedule = catalog.build(name, p)
        assert schedule.sent(1.0) == pytest.approx([even] * p) and received(schedule) == pytest.approx([even] * p)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 12, 24])
def test_folding_sends_two_vectors_at_most(p: int) -> None:
    """2(p'-1)/p' + 1 vectors leave a rank that folds another (p' is the power of two below); the table has one more."""
    core = 1 << floor(log2(p))
    assert max(catalog.build("halving-doubling", p).sent(1.0)) == pytest.approx(2 * (core - 1) / core + 1)
    assert max(catalog.build("recursive-doubling", p).sent(1.0)) == floor(log2(p)) + 1


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("p", [2, 3, 8, 9])
def test_pipelines_take_as_many_steps_as_hops_and_chunks(p: int, k: int) -> None:
    assert catalog.build("pipelined-chain", p, ScheduleOptions(chunks=k)).steps == 2 * (p - 1) + k - 1
    assert (
        collectives.build("broadcast", p, "pipelined-chain", options=ScheduleOptions(chunks=k)).steps == p - 1 + k - 1
    )
    assert collectives.build("reduce", p, "pipelined-chain", options=ScheduleOptions(chunks=k)).steps == p - 1 + k - 1
    depth = floor(log2(p))
    assert catalog.build("pipelined-tree", p, ScheduleOptions(chunks=k)).steps == 2 * depth + k - 1


@pytest.mark.parametrize("p", WORLDS)
def test_steps_of_the_other_collectives(p: int) -> None:
    lg = ceil(log2(p))
    rows = [
        ("broadcast", "tree", lg), ("scatter", "tree", lg), ("gather", "tree", lg), ("reduce", "tree", lg),
        ("broadcast", "ring", lg + p - 1), ("all-gather", "ring", p - 1), ("all-gather", "recursive-doubling", lg),
        ("reduce-scatter", "ring", p - 1), ("reduce-scatter", "recursive-doubling", lg), ("all-to-all", "ring", p - 1),
        ("all-to-all", "recursive-doubling", lg), ("all-to-all", "sharded", 1),
    ]  # fmt: skip
    for collective, algorithm, steps in rows:
        assert collectives.build(collective, p, algorithm).steps == steps, (collective, algorithm)
    for barrier, steps in {"dissemination": lg, "token-ring": 2 * p, "root": 2, "all-to-all": 1}.items():
        assert barriers.build(barrier, p).steps == steps, barrier
    for algorithm in ("ring", "sharded", "recursive-doubling"):
        for collective in ("all-gather", "reduce-scatter"):
            sent = collectives.build(collective, p, algorithm).sent(1.0)
            assert sent == pytest.approx([(p - 1) / p] * p), (collective, algorithm)
    assert max(collectives.build("scatter", p, "tree").sent(1.0)) == pytest.approx((p - 1) / p)


@pytest.mark.parametrize("p", [4, 8, 16])
def test_bruck_moves_half_of_all_chunks_in_every_step(p: int) -> None:
    schedule = collectives.build("all-to-all", p, "recursive-doubling")
    for _, transfers in schedule.by_step():
        for rank in range(p):
            assert sum(one.source == rank for one in transfers) == p // 2


def test_senders_of_a_tree_double_in_every_round() -> None:
    for p, counts in [(8, [1, 2, 4]), (16, [1, 2, 4, 8])]:
        schedule = collectives.build("broadcast", p, "tree")
        assert [len({one.source for one in transfers}) for _, transfers in schedule.by_step()] == counts


def test_a_ring_of_five_moves_chunks_as_in_the_literature() -> None:
    """GPU i sends chunk i first and receives chunk i - 1; after the first lap chunk i + 1 is complete at i."""
    schedule = ring.ring(5)
    by_step = dict(schedule.by_step())
    for step in range(4):
        sends = {one.source: one.chunk for one in by_step[step]}
        gets = {one.destination: one.chunk for one in by_step[step]}
        assert sends == {i: (i - step) % 5 for i in range(5)}
        assert gets == {i: (i - 1 - step) % 5 for i in range(5)}
        assert all(one.action == "reduce" and one.destination == (one.source + 1) % 5 for one in by_step[step])
    assert {one.source: one.chunk for one in by_step[4]} == {i: (i + 1) % 5 for i in range(5)}
    assert all(one.action == "copy" for step in range(4, 8) for one in by_step[step])


def test_every_step_of_a_ring_keeps_every_link_busy() -> None:
    for pieces in (1, 3):
        for _, transfers in ring.ring(7, pieces=pieces).by_step():
            assert sorted(one.source for one in transfers) == list(range(7))


def test_both_directions_halve_the_bytes_of_each_link() -> None:
    one_way, both = ring.ring(6), ring.bidirectional(6)
    load = {}
    for schedule in (one_way, both):
        for one in schedule.transfers:
            key = (schedule.name, one.source, one.destination)
            load[key] = load.get(key, 0.0) + schedule.shares[one.chunk] / sum(schedule.shares)
    assert load["ring", 0, 1] == pytest.approx(2 * 5 / 6) and ("ring", 1, 0) not in load
    assert load["bidirectional-ring", 0, 1] == load["bidirectional-ring", 1, 0] == pytest.approx(5 / 6)
    lanes = {
        (one.source < one.destination, one.lane) for one in both.transfers if {one.source, one.destination} == {2, 3}
    }
    assert lanes == {(True, 0), (False, 1)}


def test_two_rings_of_a_dgx1_load_each_link_equally() -> None:
    """The document's rings: double links round 1-2-...-8, single ones round 1-4-6-3-5-8-2-7; 14/48 N on every link."""
    double, single = (0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 5, 2, 4, 7, 1, 6)
    schedule = catalog.build("multi-ring", 8, ScheduleOptions(rings=((double, 2), (single, 1))))
    load: dict[tuple[int, int], float] = {}
    for one in schedule.transfers:
        pair = (one.source, one.destination)
        load[pair] = load.get(pair, 0.0) + schedule.shares[one.chunk] / sum(schedule.shares)
    links = {pair: 2 if (pair[1] - pair[0]) % 8 in (1, 7) else 1 for pair in load}
    assert len(load) == 32 and sum(links.values()) == 48
    assert {round(load[pair] / links[pair], 12) for pair in load} == {round(14 / 48, 12)}
    assert catalog.build("multi-ring", 8, ScheduleOptions(rings=((double, 2), (single, 1)))).params["weights"] == [2, 1]


@pytest.mark.parametrize("p", range(2, 130))
def test_no_rank_is_an_inner_node_of_both_trees(p: int) -> None:
    inside = [{parent for parent, _ in edges} for _, edges, _ in trees.double_trees(p)]
    assert inside[0] & inside[1] == (set() if p % 2 == 0 else {0})
    depth = [_depth(root, {child: parent for parent, child in edges}) for root, edges, _ in trees.double_trees(p)]
    assert max(depth) <= ceil(log2(p)) + 1


def _depth(root: int, parents: dict[int, int]) -> int:
    def depth(node: int) -> int:
        return 0 if node == root else 1 + depth(parents[node])

    return max(map(depth, parents))


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_double_tree_sends_two_vectors_at_most(p: int) -> None:
    schedule = catalog.build("double-tree", p, ScheduleOptions(chunks=4))
    assert max(schedule.sent(1.0)) <= 2 and max(received(schedule)) <= 2


def test_a_slow_rank_without_a_share_sends_once_and_receives_once() -> None:
    schedule = sharded.sharded(4, (1, 1, 1, 0), pieces=8)
    assert schedule.sent(1.0)[3] == pytest.approx(1) and received(schedule)[3] == pytest.approx(1)
    assert schedule.sent(1.0)[0] == pytest.approx(5 / 3)
    assert schedule.steps == 9, "eight pieces in, the ninth step only back"
    both = {(one.action, one.source == 3) for one in dict(schedule.by_step())[4] if 3 in (one.source, one.destination)}
    assert both == {("reduce", True), ("copy", False)}, "in the middle it sends and gets at once"
    lanes = [{one.lane for one in schedule.transfers if one.action == action} for action in ("reduce", "copy")]
    assert not lanes[0] & lanes[1], "what comes back never waits behind what goes out"


def test_racks_carry_one_vector_each_way_between_them() -> None:
    """Two racks of two: each rack sends S over the link between them, for every algorithm inside."""
    for inner in ("ring", "sharded", "halving-doubling", "root", "tree", "chain"):
        for outer in ("ring", "recursive-doubling", "sharded", "tree", "double-tree"):
            chosen = ScheduleOptions(groups=((0, 1), (2, 3)), inner=inner, outer=outer, pieces=3)
            schedule = catalog.build("hierarchical", 4, chosen)
            out = [0.0, 0.0]
            for one in schedule.transfers:
                if one.source // 2 != one.destination // 2:
                    out[one.source // 2] += schedule.shares[one.chunk] / sum(schedule.shares)
            assert out == pytest.approx([1, 1]), (inner, outer)


@pytest.mark.parametrize("inside", [1, 2, 4])
def test_bytes_between_hosts_do_not_grow_with_the_ranks_inside(inside: int) -> None:
    groups = tuple(tuple(range(first, first + inside)) for first in range(0, 4 * inside, inside))
    schedule = catalog.build("hierarchical", 4 * inside, ScheduleOptions(groups=groups))
    out = sum(
        schedule.shares[one.chunk] / sum(schedule.shares)
        for one in schedule.transfers
        if one.source < inside <= one.destination
    )
    assert out == pytest.approx(2 * 3 / 4)


def test_levels_of_pieces_overlap_and_their_lanes_differ() -> None:
    chosen = ScheduleOptions(groups=((0, 1), (2, 3)), pieces=4)
    schedule = catalog.build("hierarchical", 4, chosen)
    levels: dict[int, set[str]] = {}
    lanes: dict[str, set[int]] = {"in": set(), "across": set(), "back": set()}
    for one in schedule.transfers:
        across = one.source // 2 != one.destination // 2
        level = "across" if across else ("in" if one.action == "reduce" else "back")
        lanes[level].add(one.lane)
        levels.setdefault(one.step, set()).add(level)
    assert any(len(found) == 3 for found in levels.values()), "three pieces are under way at three levels"
    assert not lanes["in"] & lanes["across"] and not lanes["in"] & lanes["back"] and not lanes["across"] & lanes["back"]


def test_three_levels_are_hierarchical_twice() -> None:
    across = ScheduleOptions(groups=((0, 1), (2, 3)), pieces=2)
    groups = tuple((first, first + 1) for first in range(0, 8, 2))
    chosen = ScheduleOptions(groups=groups, outer="hierarchical", across=across, pieces=3)
    schedule = catalog.build("hierarchical", 8, chosen)
    assert sums_everywhere(8, len(schedule.shares), schedule.transfers)


@pytest.mark.parametrize(
    ("k", "time"), [(0, 1.75), (1, 1.6), (2, 28 / 19), (4, 14 / 11), (8, 1.0)]
)  # fmt: skip
def test_the_split_of_bytes_between_gpu_and_cpu_machines(k: int, time: float) -> None:
    """Each link is equally busy: t B = 2n(n-1)/(n² + kn - 2k) N at every machine (BytePS, theorem 1)."""
    n = 8
    schedule = catalog.build("ps", n, ScheduleOptions(helpers=k))
    sent, got = schedule.sent(1.0), received(schedule)
    assert sent[:n] == pytest.approx([time] * n) and got[:n] == pytest.approx([time] * n)
    assert sent[n:] == pytest.approx([time] * k) and got[n:] == pytest.approx([time] * k)
    assert schedule.nodes == n + k


def test_helpers_beyond_the_number_of_ranks_only_share_load() -> None:
    assert parameter_server.balanced_shares(4, 6) == (tuple(range(4, 10)), (1,) * 6)
    assert parameter_server.balanced_shares(4, 0) == ((0, 1, 2, 3), (4,) * 4)
    assert parameter_server.balanced_shares(1, 3) == ((0,), (1,))


def test_dedicated_servers_add_in_the_order_of_the_ranks() -> None:
    schedule = parameter_server.parameter_server(3, (3, 4), pieces=1)
    assert schedule.sent(1.0) == (1.0, 1.0, 1.0, 1.5, 1.5)
    pushes = [one for one in schedule.transfers if one.action == "reduce"]
    assert {one.step for one in pushes} == {0} and [one.source for one in pushes if one.destination == 3] == [0, 1, 2]
    for ends in ("source", "destination"):
        assert len({(getattr(one, ends), one.lane) for one in pushes}) == len(pushes), "no lane is used twice at an end"


def test_each_tree_and_each_direction_has_lanes_of_its_own() -> None:
    for name, count in [("pipelined-chain", 1), ("pipelined-tree", 1), ("double-tree", 2)]:
        schedule = catalog.build(name, 8, ScheduleOptions(chunks=3))
        lanes: dict[tuple[int, str], set[int]] = {}
        for one in schedule.transfers:
            lanes.setdefault((one.chunk // 3, one.action), set()).add(one.lane)
        assert len(lanes) == 2 * count and sum(map(len, lanes.values())) == len(set().union(*lanes.values()))


def test_concurrent_transfers_of_a_rank_have_separate_lanes() -> None:
    star_of_five = ScheduleOptions(trees=((0, tuple((0, rank) for rank in range(1, 5)), 1),), chunks=1)
    for name, chosen in [
        ("sharded", ScheduleOptions()),
        ("one-shot", ScheduleOptions()),
        ("packed-trees", star_of_five),
    ]:
        schedule = catalog.build(name, 5, chosen)
        for _, transfers in schedule.by_step():
            for ends in ("source", "destination"):
                assert len({(getattr(one, ends), one.lane) for one in transfers}) == len(transfers), name


def test_pieces_of_a_ring_keep_their_order_in_both_laps() -> None:
    for _, transfers in ring.ring(4, pieces=3).by_step():
        assert {one.chunk % 3 for one in transfers} == {transfers[0].step % 3}


def test_different_lanes_are_different_messages() -> None:
    assert len(ring.bidirectional(2).messages()) == 8 and len(ring.ring(2).messages()) == 4


def test_chunks_of_one_step_and_lane_are_one_message() -> None:
    schedule = catalog.build("halving-doubling", 8)
    messages = schedule.messages()
    assert len(messages) == 8 * 6, "one for each rank and step"
    assert [len(one.chunks) for one in messages if one.source == 0] == [4, 2, 1, 1, 2, 4]
    assert all(one.chunks == tuple(range(one.chunks[0], one.chunks[0] + len(one.chunks))) for one in messages)
    assert sum(len(one.chunks) for one in messages) == len(schedule.transfers)


def test_paced_shards_send_and_receive_one_chunk_a_step() -> None:
    schedule = sharded.sharded(6, paced=True)
    assert schedule.steps == 10
    for _, transfers in schedule.by_step():
        assert sorted(one.source for one in transfers) == sorted(one.destination for one in transfers) == list(range(6))


def test_the_order_of_a_ring_changes_its_transfers() -> None:
    """Proof, prediction and execution read one object: here the bytes, by rank, follow the ring's order."""
    plain, turned = ring.ring(4), ring.ring(4, order=(0, 2, 1, 3))
    pairs = [{(one.source, one.destination) for one in given.transfers} for given in (plain, turned)]
    assert pairs == [{(0, 1), (1, 2), (2, 3), (3, 0)}, {(0, 2), (2, 1), (1, 3), (3, 0)}]
