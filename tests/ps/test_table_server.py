"""Tables: each update is applied once and visible as its consistency model requires, under any order and loss."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from psctl.errors import MessageRefused, ProtocolError, UsageError
from psctl.ps.table_messages import BagCounts, ReadSection, RowOptimizerSpec, UpdateSection
from psctl.ps.tables.client.calls_in_flight import ReadPart, pooled_route, result
from psctl.ps.tables.client.table_client_state import TableClient
from psctl.ps.tables.row_bags import RowBags
from psctl.ps.tables.server.client_sessions import ClientSession
from psctl.ps.tables.table_bytes import decode_entry, decode_shards, encode_entry, encode_shards
from psctl.ps.tables.table_packing import PayloadReader
from psctl.ps.tables.table_state import FOREVER, TableEntry, TableShard, last_sequence_at
from tests.ps.table_world import Functions, World, spec

CLOCKS = 4


def test_pushes_are_summed_over_workers_and_servers() -> None:
    world = World(workers=3, servers=2)
    keys = np.arange(0, 100, 7)
    for rank in range(3):
        world.push(rank, spec(), keys, np.arange(len(keys)) + rank)
    world.run()
    assert world.pull(0, spec(), keys).flatten().tolist() == [3 * n + 3 for n in range(len(keys))]
    assert {len(machine.shards_here) for machine in world.servers.values()} == {2}


def test_absent_keys_read_as_zero_or_their_initial_value() -> None:
    functions = Functions(square=lambda keys, width: (keys * keys).double()[:, None].expand(-1, width))
    world = World(functions=functions)
    assert world.pull(0, spec(), [1, 2]).tolist() == [[0.0], [0.0]]
    starts = spec("t", (2, 2), initial=1.5)
    assert world.pull(0, starts, [0]).tolist() == [[1.5] * 4]
    world.push(0, starts, [0], [1.0, 2.0, 3.0, 4.0])
    assert world.pull(1, starts, [0]).tolist() == [[2.5, 3.5, 4.5, 5.5]]
    world = World(functions=functions)
    squares = spec(initial="mine:square")
    world.push(0, squares, [3], [1.0])
    assert world.pull(1, squares, [2, 3]).flatten().tolist() == [4.0, 10.0]


def test_an_absent_key_without_initial_value_takes_the_first_push() -> None:
    world = World()
    least = spec(reduce="min")
    world.push(0, least, [1], [5.0])
    world.push(1, least, [1], [7.0])
    world.run()
    assert world.pull(0, least, [1, 2]).flatten().tolist() == [5.0, 0.0]


def test_mean_and_argmin_store_their_extra_integers() -> None:
    world = World(workers=3, staleness=1)
    mean, best = spec("m", reduce="mean"), spec("b", reduce="argmin")
    for rank, value in enumerate([1.0, 2.0, 6.0]):
        world.push(rank, mean, [0], [value])
        world.push(rank, best, [0], [10 - value], index=[rank + 70])
    world.run()
    assert world.pull(0, mean, [0]).item() == 3.0
    read = world.begin(1, best, [0])
    world.run()
    lanes = result(read.wants[0])[1]
    assert lanes.values.item() == 4.0
    assert lanes.extra is not None
    assert lanes.extra.item() == 72


def test_a_range_returns_existing_rows_and_own_pushes() -> None:
    world = World(staleness=0)
    world.push(0, spec(), [3, 50, 900], [1.0, 2.0, 3.0])
    world.clock(0)
    world.clock(1)
    world.run()
    world.push(0, spec(), [4, 50], [10.0, 20.0])
    read = world.begin(0, spec(), range(100))
    world.run()
    keys, lanes = result(read.wants[0])
    assert keys.tolist() == [3, 4, 50]
    assert lanes.values.flatten().tolist() == [1.0, 10.0, 22.0]
    assert world.pull(1, spec(), [50]).item() == 2.0


def test_the_users_function_is_applied_to_the_sum_of_a_clock() -> None:
    functions = Functions(sgd=lambda held, pushed: held - 0.5 * pushed)
    world = World(staleness=0, functions=functions)
    w = spec("w", (3,), apply="mine:sgd")
    world.push(0, w, [0], [1.0, 1.0, 1.0], what="start")
    for rank in range(2):
        world.push(rank, w, [0], [2.0, 4.0, 6.0])
    world.run()
    assert world.pull(1, w, [0]).tolist() == [[0.0, -1.0, -2.0]]  # own push alone, laid over
    for rank in range(2):
        world.clock(rank)
    world.run()
    assert world.pull(0, w, [0]).tolist() == [[-1.0, -3.0, -5.0]]


def test_start_sets_absent_rows_once() -> None:
    world = World()
    w = spec("w", (2,))
    world.push(0, w, [0], [1.0, 2.0], what="start")
    world.push(1, w, [0], [5.0, 6.0], what="start")
    world.run()
    assert world.pull(0, w, [0]).tolist() == [[1.0, 2.0]]


def test_a_function_runs_on_the_servers_of_its_rows() -> None:
    world = World(functions=Functions(shrink=lambda keys, rows, by: rows * by * (keys[:, None] > 1)))
    world.push(0, spec(), [1, 2, 3], [1.0, 2.0, 3.0])
    client = world.clients[0]
    for route in (None, client.routes.route_of("", np.array([3]))):
        for change in client.prepare_call(client.kinds[""], route, "mine:shrink", {"by": 2.0}, world.ticket()):
            world.put(0, client.send_change(change, 0))
    world.run()
    assert world.pull(1, spec(), [1, 2, 3]).flatten().tolist() == [0.0, 4.0, 12.0]


def test_a_conflicting_declaration_is_refused_with_both_values() -> None:
    world = World()
    world.push(0, spec(), [1], [1.0])
    world.run()
    world.push(1, spec(reduce="max"), [1], [1.0])
    world.run()
    refused = world.clients[1].refused
    assert refused is not None
    assert "'sum'" in refused.reason
    assert "'max'" in refused.reason
    with pytest.raises(UsageError, match="reduce"):
        world.clients[0].resolve_kind(spec(reduce="max"))


def test_an_error_of_a_function_is_sent_to_all_workers() -> None:
    def fails(held, pushed):
        raise ValueError("no such luck")

    world = World(functions=Functions(fails=fails))
    world.push(0, spec(apply="mine:fails"), [1], [1.0])
    world.run()
    assert all(client.refused is not None and "no such luck" in client.refused.reason for client in world.clients)


def test_key_lists_are_sent_once_and_again_when_a_server_lacks_them() -> None:
    world = World(servers=1)
    keys = np.arange(1000)
    world.push(0, spec(), keys, torch.ones(1000))
    world.run()
    first, world.bytes = world.bytes, 0
    world.push(0, spec(), keys, torch.ones(1000))
    world.run()
    assert first - world.bytes > 8 * 1000 - 200
    world.servers[0].stores["s"].sessions[0].lists.__init__()
    for _ in range(3):
        world.push(0, spec(), keys, torch.ones(1000))
        world.push(0, spec(), [5], [1.0])  # its key list is unknown: it must not overtake
    assert world.pull(0, spec(), keys).flatten().tolist() == [8.0 if key == 5 else 5.0 for key in range(1000)]
    assert world.clients[0].outstanding.bytes_in_flight == 0


def test_key_lists_with_an_equal_beginning_are_distinguished() -> None:
    world = World(servers=1, shards=1)
    one, other = np.arange(1000), np.append(np.arange(999), 5000)
    world.push(0, spec(), one, torch.ones(1000))
    world.push(0, spec(), other, torch.ones(1000))
    world.run()
    assert world.pull(0, spec(), [998, 999, 5000]).flatten().tolist() == [2.0, 1.0, 1.0]


def test_a_large_update_is_sent_in_several_messages() -> None:
    world = World(servers=2)
    rows = 132
    table = spec("", (64 * 1024,), "float32")
    values = torch.ones(rows, 64 * 1024)
    ticket = world.push(0, table, np.arange(rows), values)
    world.run()
    assert ticket in world.clients[0].finished
    assert world.pull(1, table, np.arange(rows)).sum().item() == values.sum().item()


def tagged(world: World, seed: int, cuts: int) -> None:
    """Run worker w adding 1 to place (w, c) of one row in its clock c, in random order, over two tables.

    Each read is checked: every update at most once, all that the model guarantees, and its own always.
    """
    numbers, workers = random.Random(seed), len(world.clients)
    width, s = workers * CLOCKS, world.store.staleness
    tables = [spec("a", (width,)), spec("b", (width,))]
    clocks = [0] * workers
    pushed = [[0, 0] for _ in range(workers)]  # pushes to each table that worker w has made
    left = cuts
    while min(clocks) < CLOCKS:
        if left and numbers.random() < 0.05:
            left -= 1
            world.cut(numbers.randrange(workers), numbers.choice(list(world.servers)))
        for _ in range(numbers.randrange(6)):
            world.step()
        rank = numbers.choice([rank for rank in range(workers) if clocks[rank] < CLOCKS])
        clock, client = clocks[rank], world.clients[rank]
        if client.lagging_shards():
            for _ in range(10):
                world.step()
            continue
        for at in numbers.sample(range(2), 2):
            if pushed[rank][at] == clock:
                world.push(rank, tables[at], [0], torch.eye(width)[rank * CLOCKS + clock], place=clock)
                pushed[rank][at] += 1
            seen = world.pull(rank, tables[at], [0]).view(workers, CLOCKS)
            assert seen.max() <= 1, "an update was applied twice"
            for other in range(workers):
                mine = other == rank
                assert (seen[other, pushed[other][at] :] == 0).all()
                promised = pushed[rank][at] if mine else 0 if s is None else max(0, clock - s)
                assert (seen[other, :promised] == 1).all(), f"worker {rank} at {clock} misses updates of {other}"
                if s == 0 and not mine:
                    assert (seen[other, clock:] == 0).all(), "bsp shows what is not finished"
        clocks[rank] += 1
        world.clock(rank, place=clocks[rank])
        if s is not None:
            assert max(clocks) - min(clocks) <= s + 1  # one of them stands in clock()
    world.run()
    for rank in range(workers):
        world.join(rank)  # with a cache that is empty: what it had read may be s clocks old
        for table in tables:
            assert world.pull(rank, table, [0]).flatten().tolist() == [1.0] * width


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("staleness", [None, 0, 1, 3], ids=["asp", "bsp", "ssp1", "ssp3"])
def test_reads_see_each_update_as_the_consistency_model_requires(staleness: int | None, eager: bool) -> None:
    for seed in range(4):
        numbers = random.Random(seed)
        world = World(workers=3, staleness=staleness, eager=eager, random=numbers)
        tagged(world, seed, cuts=0 if seed % 2 else 6)


def play(staleness: int, seed: int) -> list[int]:
    """Run float sums that round differently in each order; return the last reads of all workers, as bits."""
    numbers = random.Random(seed)
    world = World(workers=3, staleness=staleness, random=numbers)
    for clock in range(4):
        for rank in numbers.sample(range(3), 3):
            world.push(rank, spec(dtype="float32"), [1, 2], torch.tensor([0.1, 1e7]) * (rank + clock + 1), place=clock)
            world.clock(rank, place=clock + 1)
        world.run()
    return world.pull(0, spec(dtype="float32"), [1, 2]).view(torch.int32).flatten().tolist()


def test_bsp_is_bitwise_repeatable_in_any_message_order() -> None:
    assert len({tuple(play(0, seed)) for seed in range(10)}) == 1


def test_eager_reads_are_newer_and_lazy_reads_send_fewer_bytes() -> None:
    moved, ages = {}, {}
    keys = np.arange(64)
    for eager in (False, True):
        world = World(workers=2, servers=1, staleness=3, eager=eager)
        age = 0.0
        for clock in range(12):
            for rank in range(2):
                world.push(rank, spec(), keys, torch.ones(64), place=clock)
                age += 2 * clock - world.pull(rank, spec(), keys)[0].item()
                world.clock(rank, place=clock + 1)
            world.run()
        moved[eager], ages[eager] = world.bytes, age
    assert moved[False] < moved[True]
    assert ages[True] < ages[False]


def test_the_fastest_worker_waits_for_the_slowest_and_not_for_one_that_left() -> None:
    world = World(workers=2, staleness=1)
    world.clock(0)
    world.run()
    assert not world.clients[0].lagging_shards()
    world.clock(0)
    world.run()
    assert world.clients[0].leaders_of(world.clients[0].lagging_shards()) == {0, 1}
    world.put(0, [world.clients[0].wait_query(0)])
    world.run()
    assert world.clients[0].wait_reasons == {0: [1]}
    world.put(1, world.clients[1].leave(0, world.ticket()))
    world.run()
    assert not world.clients[0].lagging_shards()
    assert world.clients[1].clock == FOREVER


def test_a_read_is_answered_when_all_workers_have_finished_its_clock() -> None:
    world = World(workers=2, staleness=0)
    world.push(1, spec(), [1], [1.0])
    world.run()
    world.clock(0)
    read = world.begin(0, spec(), [1])  # without waiting in clock()
    world.run()
    assert not world.done(0, read)
    world.clock(1)
    world.run()
    assert world.done(0, read)
    assert result(read.wants[0])[1].values.item() == 1.0


def test_only_the_groups_clocks_count() -> None:
    world = World(workers=3, staleness=0, group=(0, 1))
    world.push(0, spec(), [1], [1.0])
    world.clock(0)
    world.clock(1)
    world.run()
    assert world.pull(2, spec(), [1]).item() == 1.0


def test_a_replayed_step_of_a_new_incarnation_counts_once() -> None:
    world = World()
    world.push(0, spec(), [1], [1.0], place=4)
    world.push(0, spec(), [1], [10.0], place=4)
    world.run()
    world.join(0)
    for value in (1.0, 10.0, 100.0):  # the replayed step repeats its pushes and continues
        world.push(0, spec(), [1], [value], place=4)
    world.push(0, spec(), [1], [1000.0], place=5)
    world.run()
    assert world.pull(1, spec(), [1]).item() == 1111.0


def test_a_replacement_resumes_at_the_clock_of_the_lost_worker() -> None:
    world = World(workers=2, staleness=0)
    for rank in range(2):
        world.push(rank, spec(), [1], [1.0], place=1)
        world.clock(rank, place=1)
    world.run()
    world.push(0, spec(), [1], [10.0], place=2)
    world.clock(0, place=2)
    world.run()
    again = world.join(0)  # it is lost in the step of place 2, after its clock; the step is replayed
    world.run()
    assert again.clock == 2
    world.push(0, spec(), [1], [10.0], place=2)
    world.clock(0, place=2)
    world.run()
    assert again.clock == 2
    world.push(1, spec(), [1], [100.0], place=2)
    world.clock(1, place=2)
    world.run()
    assert [client.lagging_shards() for client in world.clients] == [set(), set()]
    assert world.pull(0, spec(), [1]).item() == 112.0


def test_a_shard_equals_its_entries_and_its_snapshot() -> None:
    world = World(workers=2, servers=1, shards=1, staleness=0)
    for clock in range(3):
        for rank in range(2):
            world.push(rank, spec(reduce="mean"), [clock, 7, 2**60 + rank], [0.1, 0.2, 0.3], place=clock)
            world.push(rank, spec("w", (2,)), [0], [rank + 0.1, 3.0], place=clock)
            if (clock, rank) != (2, 1):
                world.clock(rank, place=clock)
    world.run()
    shard = world.servers[0].shards_here[0].state.stores["s"]
    held = encode_shards([shard])
    (copy,) = decode_shards(held, lambda spec: TableShard(spec, world.functions))
    assert encode_shards([copy]) == held
    for each in (shard, copy):
        for entry in [entry for entries in each.staged[2].values() for entry in entries]:
            assert encode_entry(decode_entry(encode_entry(entry), each.kind)) == encode_entry(entry)
        each.apply(TableEntry(1, 1 << 41, 3, [], "clock"))
    assert encode_shards([copy]) == encode_shards([shard])
    assert copy.clock == 3


@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_acknowledged_updates_survive_the_loss_of_a_server(staleness: int | None) -> None:
    for seed in range(6):
        numbers = random.Random(seed)
        world = World(workers=2, servers=3, staleness=staleness, replicas=1, random=numbers)
        world.run()
        for turn in range(6):
            for rank in range(2):
                world.push(rank, spec(), np.arange(20), torch.ones(20), place=turn)
            for _ in range(numbers.randrange(40)):
                world.step()
            if turn == 2:
                world.kill(0)
                chains = [[rank for rank in chain if rank] for chain in ([0, 1], [1, 2], [2, 0], [0, 1])]
                world.assign(chains)
            for rank in range(2):
                world.clock(rank, place=turn + 1)
        world.run()
        assert all(client.outstanding.bytes_in_flight == 0 for client in world.clients)
        assert world.pull(0, spec(), np.arange(20)).flatten().tolist() == [12.0] * 20


@pytest.mark.parametrize(
    ("replicas", "counts", "sums"), [(0, FOREVER, 3.0), (1, last_sequence_at(0), 3.0), (1, -1, 2.0)]
)
def test_a_removed_worker_delays_no_other(replicas: int, counts: int, sums: float) -> None:
    world = World(workers=3, staleness=0, replicas=replicas)
    for rank in range(3):
        world.push(rank, spec(), [1], [1.0])
    world.clock(0)
    world.clock(1)
    world.mark(0, 1, place=2)
    world.push(0, spec(), [1], [10.0], place=2)
    world.run()
    assert world.clients[0].lagging_shards()
    for rank, machine in world.servers.items():
        machine.on_worker_disconnected(2)
        world.follow(rank, machine.remove_workers({2: counts}))
    world.mark(1, 1, place=2)
    world.run()
    assert not world.clients[0].lagging_shards()
    assert world.clients[0].outstanding.bytes_in_flight == 0
    assert world.pull(1, spec(), [1]).item() == sums


def test_pushes_of_a_lost_worker_after_the_cut_are_dropped_on_all_replicas() -> None:
    world = World(workers=2, staleness=0, replicas=1, shards=4)
    keys = np.arange(16)
    for place in (1, 2, 3):  # its clock spans three places of the run, of which the first two count
        world.push(1, spec(), keys, torch.full((16,), 10.0**place), place=place)
    world.push(0, spec(), keys, torch.ones(16), place=1)
    world.clock(0, place=1)
    world.run()
    for rank, machine in world.servers.items():
        machine.on_worker_disconnected(1)
        world.follow(rank, machine.remove_workers({1: last_sequence_at(2)}))
    world.run()
    world.kill(0)
    world.assign([[1]] * 4)
    world.run()
    assert world.pull(0, spec(), keys).flatten().tolist() == [111.0] * 16


def test_a_later_primary_keeps_removed_workers_removed() -> None:
    world = World(workers=2, replicas=1)
    world.mark(0, 1, place=1)
    world.run()
    for server in world.servers:
        world.cut(0, server)
    world.run()
    world.put(0, world.clients[0].leave(2, world.ticket()))
    world.run()
    world.kill(0)
    world.assign([[1]] * 4)
    world.run()
    world.mark(1, 1, place=1)
    world.mark(1, 2, place=2)
    world.push(1, spec(), [1], [1.0], place=3)
    world.run()
    assert world.clients[1].outstanding.bytes_in_flight == 0, "it waits for the mark of a worker that has left"


def test_a_reopened_store_takes_part_again() -> None:
    world = World(workers=2, replicas=1)
    world.push(0, spec(), [1], [1.0], place=1)
    world.put(0, world.clients[0].leave(1, world.ticket()))
    world.run()
    before = world.clients[0]
    world.clients[0] = again = TableClient(world.store, 0, world.functions, before.last_sequence)
    for server in world.servers:
        world.cut(0, server)
    world.run()
    assert again.is_open
    world.push(0, spec(), [1], [10.0], place=1)
    world.mark(1, 1, place=2)
    world.push(1, spec(), [1], [100.0], place=3)
    world.run()
    assert world.clients[1].outstanding.bytes_in_flight, "it waits for the mark of the reopened store"
    world.mark(0, 1, place=2)
    world.run()
    assert not world.clients[1].outstanding.bytes_in_flight
    assert world.pull(0, spec(), [1]).item() == 111.0


def begin_early(world: World, rank: int, table, keys):
    """Begin to read the rows of the next clock; return the read."""
    client = world.clients[rank]
    route = client.routes.route_of(table.name, np.asarray(keys, dtype=np.int64))
    read, outs = client.start_read([(client.resolve_kind(table), route)], world.ticket(), ahead=1)
    world.put(rank, outs)
    return read


def pushed_by_all(world: World, table, keys, value: float, place: int) -> None:
    for rank in range(2):
        world.push(rank, table, keys, torch.full((len(keys),), value), place=place)


SGD = RowOptimizerSpec("sgd", {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0})


@pytest.mark.parametrize("table", [spec(), spec(optimizer=SGD)])
@pytest.mark.parametrize("loses", [False, True])
def test_an_early_read_brings_rows_before_their_clock_and_changed_ones_again(table, loses: bool) -> None:
    keys = np.arange(200)
    for seed in range(10):
        world = World(workers=2, servers=3, staleness=0, replicas=1, random=random.Random(seed))
        pushed_by_all(world, table, keys[:100], 1.0, 1)
        for rank in range(2):
            world.clock(rank, place=1)
        world.run()
        read = begin_early(world, 0, table, keys)
        world.run()
        assert not world.done(0, read), "the clock goes on"
        sign = -1.0 if table.optimizer is not None else 1.0
        assert (read.wants[0].array[:100] == 2 * sign).all(), "they were sent before it ends"
        assert not read.wants[0].present[100:].any()
        if loses:
            world.kill(1)
            world.assign([[rank for rank in chain if rank != 1] for chain in ([0, 1], [1, 2], [2, 0], [0, 1])])
        before = world.bytes
        pushed_by_all(world, table, [3, 150], 5.0, 2)
        for rank in range(2):
            world.clock(rank, place=2)
        world.run()
        assert world.done(0, read)
        values = result(read.wants[0])[1].values.flatten()
        expected = torch.zeros(200)
        expected[:100] = 2 * sign
        expected[[3, 150]] += 10 * sign
        assert torch.equal(values, expected)
        assert loses or world.bytes - before < 2500, "what has not changed is not sent again"
        assert torch.equal(world.pull(1, table, keys).flatten(), expected)


def test_an_early_read_of_rows_that_may_leave_is_sent_once() -> None:
    table = spec(capacity=4 << 30, expire=1 << 29)  # more than a Count
    world = World(workers=2, servers=1, staleness=0)
    pushed_by_all(world, table, [1, 2], 1.0, 1)
    for rank in range(2):
        world.clock(rank, place=1)
    world.run()
    read = begin_early(world, 0, table, [1, 2])
    world.run()
    assert not read.wants[0].present.any()
    for rank in range(2):
        world.clock(rank, place=2)
    world.run()
    assert world.done(0, read) and result(read.wants[0])[1].values.flatten().tolist() == [2.0, 2.0]


def test_an_answer_with_rows_that_were_not_requested_is_refused() -> None:
    part = ReadPart(ReadSection(0, "", 3), np.array([5, 1, 9]), b"", None, np.array([10, 11, 12]))
    assert part.at_of(np.array([9, 5])).tolist() == [12, 10]
    for wrong in ([6], [10], [0]):
        with pytest.raises(ProtocolError, match="not requested"):
            part.at_of(np.array(wrong))


@pytest.mark.parametrize("loses", [False, True])
def test_sums_of_bags_survive_the_loss_of_a_server(loses: bool) -> None:
    table = spec(shape=(2,), optimizer=SGD, initial=0.5)
    keys, bags = (
        np.arange(60),
        RowBags(np.tile(np.arange(60, dtype=np.int32), 2), np.array([70, 0, 50], dtype=np.int32)),
    )
    gradients = torch.tensor([[1.0, 2.0], [7.0, 7.0], [3.0, 5.0]], dtype=torch.float64)
    for seed in range(10):
        world = World(workers=2, servers=3, staleness=0, replicas=1, random=random.Random(seed))
        client = world.clients[0]
        route = pooled_route(client.resolve_kind(table), client.routes.route_of("", keys), bags)
        read, outs = client.start_sums(route, world.ticket())
        world.put(0, outs)
        for _ in range(seed * 2):
            world.step()
        if loses:
            world.kill(1)
            world.assign([[rank for rank in chain if rank != 1] for chain in ([0, 1], [1, 2], [2, 0], [0, 1])])
        world.run()
        assert world.done(0, read)
        assert read.wants[0].total().tolist() == [[35.0] * 2, [0.0] * 2, [25.0] * 2], "of start values"
        for change in client.prepare_sums(route, gradients, world.ticket()):
            world.put(0, client.send_change(change, 1))
        for rank in range(2):
            world.clock(rank, place=1)
        world.run()
        expected = (
            0.5
            - torch.cat([gradients[:1].expand(60, 2)])
            - torch.where(torch.arange(60)[:, None] < 10, gradients[0], gradients[2])
        )
        assert torch.equal(world.pull(1, table, keys), expected)
        read, outs = client.start_sums(route, world.ticket())
        world.put(0, outs)
        world.run()
        torch.testing.assert_close(read.wants[0].total(), bags.sums(expected))


@pytest.mark.parametrize(
    ("places", "lengths", "counts"),
    [([3], [1], (1, 1)), ([-1], [1], (1, 1)), ([0, 1], [1], (1, 2)), ([0, 1], [3, -1], (2, 2)), ([0], [1, 1], (2, 1))],
)
def test_bags_that_do_not_fit_their_keys_are_refused(places, lengths, counts) -> None:
    payload = b"".join(
        np.pad(np.array(each, dtype=np.int32), (0, len(each) % 2)).tobytes() for each in (places, lengths)
    )
    with pytest.raises(MessageRefused, match="do not fit"):
        RowBags.read(PayloadReader(memoryview(payload)), BagCounts(*counts), 3)


def test_gradients_of_bags_are_refused_for_a_table_without_an_optimizer() -> None:
    session = ClientSession(0, 0, -1)
    for table, what in ((spec(), "push"), (spec(optimizer=SGD), "start")):
        section = UpdateSection(0, "", 1, what, spec=table, bags=BagCounts(1, 1))
        with pytest.raises(MessageRefused, match="no optimizer of rows"):
            session.read_part(section, PayloadReader(memoryview(bytearray(64))), Functions())
