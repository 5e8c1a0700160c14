"""Checkpoints of tables: all updates up to the cut and none after it, on any number of shards."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from psctl.ps.outputs import LoadTables, SaveSlices
from psctl.ps.tables.server.saved_tables import hashes, wanted
from psctl.types import TensorSlice
from tests.ps.table_world import Functions, World, spec

KEYS = np.arange(40)


def saved(world: World, step: int) -> dict[str, tuple[TensorSlice, bytes]]:
    """Save the parts of all servers; return the checkpoint's tensors by name."""
    for rank, machine in world.servers.items():
        world.follow(rank, machine.request_checkpoint(step))
    world.run()
    parts = [output for _, output in world.reports if isinstance(output, SaveSlices) and output.step == step]
    assert len(parts) == len(world.servers)
    found = [copied for part in parts for copied in part.copied]
    assert len({copied.slice.name for copied in found}) == len(found)
    return {copied.slice.name: (copied.slice, bytes(copied.data)) for copied in found}


def restored(tensors: dict[str, tuple[TensorSlice, bytes]], **options) -> World:
    """Return a world with servers that load a checkpoint."""
    world = World(**options, begins=True)
    for rank, output in list(world.reports):
        assert isinstance(output, LoadTables)
        names = [each.name for each in wanted([each for each, _ in tensors.values()], output.shard, world.store.shards)]
        found = {
            name: torch.frombuffer(bytearray(data), dtype=getattr(torch, where.dtype)).reshape(where.shape)
            if data
            else torch.empty(where.shape, dtype=getattr(torch, where.dtype))
            for name, (where, data) in tensors.items()
            if name in names
        }
        world.follow(rank, world.servers[rank].on_loaded(output.shard, found))
    world.reports.clear()
    world.run()
    return world


def test_a_shard_requests_its_state_once_whatever_connects_meanwhile() -> None:
    world = World(workers=1, servers=3, replicas=1, begins=True)
    asked = [output.shard for _, output in world.reports if isinstance(output, LoadTables)]
    assert sorted(asked) == list(range(world.store.shards))
    for rank, machine in world.servers.items():
        for other in world.servers.keys() - {rank}:
            machine.on_server_disconnected(other)
            assert not [each for each in machine.on_server_connected(other) if isinstance(each, LoadTables)]


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_a_checkpoint_has_all_updates_before_the_mark_and_none_after(staleness: int | None, replicas: int) -> None:
    for seed in range(4):
        numbers = random.Random(seed)
        world = World(workers=3, servers=2, staleness=staleness, replicas=replicas, random=numbers)
        world.run()
        for step in range(1, 5):
            for rank in numbers.sample(range(3), 3):
                world.push(rank, spec(), KEYS, torch.full((40,), float(10**step)), place=2 * step)
                world.push(rank, spec("m", (3,), reduce="mean"), [0], [1.0, rank, step], place=2 * step)
                world.clock(rank, place=2 * step)
                if step == 2:
                    world.mark(rank, 2, place=2 * step)
                for _ in range(numbers.randrange(10)):
                    world.step()
        checkpoint = saved(world, 2)
        assert world.pull(0, spec(), KEYS)[0].item() == 3 * 11110 or staleness is not None
        again = restored(checkpoint, workers=2, servers=3, shards=5, staleness=staleness)
        assert again.pull(1, spec(), KEYS).flatten().tolist() == [330.0] * 40
        assert again.pull(0, spec("m", (3,), reduce="mean"), [0]).flatten().tolist() == [1.0, 1.0, 1.5]
        for rank in range(2):  # training continues
            again.push(rank, spec(), KEYS, torch.ones(40), place=6)
            again.clock(rank, place=6)
        again.run()
        again.join(1)  # what it had read may be s clocks old
        assert again.pull(1, spec(), KEYS).flatten().tolist() == [332.0] * 40


@pytest.mark.parametrize("replicas", [0, 1])
def test_one_worker_ends_a_clock_and_marks_for_all_that_have_pushed(replicas: int) -> None:
    for seed in range(6):
        numbers = random.Random(seed)
        world = World(workers=3, servers=2, staleness=0, replicas=replicas, random=numbers)
        for rank in range(3):
            world.push(rank, spec(), KEYS, torch.ones(40), place=2)
        world.run()
        ahead = numbers.randrange(3)  # the others may be lost: they neither end the clock nor mark
        world.clock(ahead, place=2, common=True)
        world.mark(ahead, 1, place=2, common=True)
        world.push(ahead, spec(), KEYS, torch.full((40,), 10.0), place=4)
        world.run()
        assert restored(saved(world, 1)).pull(0, spec(), KEYS).flatten().tolist() == [3.0] * 40
        late = (ahead + 1) % 3
        world.clock(late, place=2, common=True)  # changes nothing
        world.mark(late, 1, place=2, common=True)
        world.push(late, spec(), KEYS, torch.full((40,), 100.0), place=4)
        world.run()
        world.clock(late, place=4, common=True)
        assert world.pull(late, spec(), KEYS).flatten().tolist() == [113.0] * 40


def test_updates_that_wait_for_a_clock_are_in_the_checkpoint() -> None:
    functions = Functions(double=lambda keys, rows: rows * 2)
    world = World(workers=2, staleness=0, functions=functions)
    for rank in range(2):
        world.push(rank, spec(), KEYS, torch.ones(40), place=2)
        client = world.clients[rank]
        for change in client.prepare_call(client.kinds[""], None, "mine:double", {}, world.ticket()) if rank else ():
            world.put(rank, client.send_change(change, 2))
        world.mark(rank, 1, place=2)
    world.run()
    again = restored(saved(world, 1), workers=2, servers=1, shards=1, staleness=0, functions=functions)
    assert again.pull(0, spec(), KEYS)[0].item() == 0.0
    for rank in range(2):
        again.clock(rank, place=3)
    again.run()
    assert again.pull(0, spec(), KEYS).flatten().tolist() == [4.0] * 40


def test_workers_that_left_or_open_later_do_not_delay_a_checkpoint() -> None:
    world = World(workers=2)
    world.run()
    world.push(0, spec(), KEYS, torch.ones(40), place=2)
    world.push(1, spec(), KEYS, torch.ones(40), place=2)
    world.put(1, world.clients[1].leave(2, world.ticket()))
    world.mark(0, 1, place=2)
    world.push(0, spec(), KEYS, torch.ones(40), place=4)
    world.run()
    assert restored(saved(world, 1), workers=1).pull(0, spec(), KEYS)[0].item() == 2.0
    world.put(0, world.clients[0].leave(4, world.ticket()))
    world.run()
    assert restored(saved(world, 2), workers=1).pull(0, spec(), KEYS)[0].item() == 3.0


def test_shards_are_ranges_of_hash_values_without_gaps() -> None:
    for shards in (1, 3, 8, 52):
        cuts = [hashes(shard, shards) for shard in range(shards)]
        assert [cut.start for cut in cuts[1:]] == [cut.stop for cut in cuts[:-1]]
        assert (cuts[0].start, cuts[-1].stop) == (0, 1 << 31)
        for shard, cut in enumerate(cuts):
            for value in (cut.start, cut.stop - 1):
                assert value * shards >> 31 == shard
