"""Batches of pushes and reads of single rows: each counts as if it had been sent alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psctl.ps.table_messages import Fetch, Update
from psctl.ps.tables.client.single_key_batches import BATCH_BYTES, PushBatch
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.row_index import rounds
from psctl.ps.tables.table_kinds import TableKind
from tests.ps.table_world import Functions, World, spec


def in_flight(world: World, kind: type) -> list:
    """Return the messages of a kind in flight to servers."""
    name = f'"{kind.__name__}"'.replace('"', "")
    return [1 for queue in world.links.values() for encoded, _ in queue if name.encode() in encoded]


def test_the_first_push_is_sent_immediately_and_later_ones_as_one_message() -> None:
    world = World(workers=1, servers=1)
    world.run()
    tickets = [world.push_one(0, spec(), key, 1.0) for key in (3, 1, 3, 2)]
    assert len(in_flight(world, Update)) == 1
    world.step()  # the first is taken in, and Done is on its way
    assert world.clients[0].finished == []
    world.step()
    assert world.clients[0].finished == tickets[:1]
    assert len(in_flight(world, Update)) == 1
    world.run()
    assert world.clients[0].finished == tickets
    assert world.pull(0, spec(), [1, 2, 3]).flatten().tolist() == [1, 1, 2]


def test_a_full_batch_is_sent_immediately() -> None:
    world = World(workers=1, servers=1)
    world.run()
    wide = spec(shape=(1024,), dtype="float32")
    for key in range(1 + BATCH_BYTES // 4096):
        world.push_one(0, wide, key, torch.ones(1024))
    assert len(in_flight(world, Update)) == 2


def test_reads_of_one_row_are_batched_and_answered_separately() -> None:
    world = World(workers=1, servers=1)
    keys = [5, 9, 5, 2]
    for key in keys:
        world.push_one(0, spec(), key, float(key))
    world.run()
    tickets = [world.begin_one(0, spec(), key) for key in keys]
    assert len(in_flight(world, Fetch)) == 1
    world.run()
    assert [float(world.clients[0].rows[ticket]) for ticket in tickets] == [10, 9, 10, 2]


def test_clocks_marks_and_reads_follow_earlier_pushes() -> None:
    for staleness in (None, 0, 1):
        world = World(workers=1, servers=2, staleness=staleness)
        world.run()
        for key in range(8):
            world.push_one(0, spec(), key, 1.0)
        if staleness is not None:
            world.clock(0)
        world.mark(0, 4)
        world.push_one(0, spec(), 0, 1.0)
        assert world.pull(0, spec(), np.arange(8)).flatten().tolist() == [2, *[1] * 7]


def test_a_batch_belongs_to_the_clock_of_its_pushes() -> None:
    world = World(workers=2, servers=1, staleness=0)
    world.run()
    for key in (1, 2, 3):
        world.push_one(0, spec(), key, 1.0)
    world.clock(0)
    world.push_one(0, spec(), 1, 10.0)
    world.push_one(0, spec(), 1, 10.0)
    world.clock(1)
    world.run()
    assert world.pull(1, spec(), [1, 2, 3]).flatten().tolist() == [1, 1, 1]
    assert world.pull(0, spec(), [1, 2, 3]).flatten().tolist() == [21, 1, 1]


@pytest.mark.parametrize("received", range(6))
def test_a_replayed_step_with_other_batches_applies_each_push_once(received: int) -> None:
    world = World(workers=1, servers=1, shards=2)
    world.run()
    keys = [4, 7, 4, 1, 7, 4]
    for key in keys[:received]:
        world.push_one(0, spec(), key, 1.0, place=1)
    world.run()
    world.join(0)
    for key in keys:  # the first one's group is itself, the others are one
        world.push_one(0, spec(), key, 1.0, place=1)
    assert world.pull(0, spec(), [1, 4, 7]).flatten().tolist() == [1, 3, 2]


def after(held: torch.Tensor, pushed: torch.Tensor) -> torch.Tensor:
    return 10 * held + pushed


@pytest.mark.parametrize(
    ("more", "right"),
    [
        ({}, 6.0),
        ({"reduce": "min"}, 1.0),
        ({"reduce": "mean"}, 2.0),
        ({"apply": "mine:after"}, 213.0),
        ({"initial": 100.0}, 106.0),
    ],
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_repeated_pushes_to_one_key_are_applied_in_order(more: dict, right: float, dtype: str) -> None:
    world = World(workers=1, servers=1, functions=Functions(after=after))
    world.run()
    table = spec(dtype=dtype, **more)
    world.push_one(0, table, 8, 2.0)
    world.push_one(0, table, 9, 5.0)
    for value in (1.0, 3.0):
        world.push_one(0, table, 8, value)
    world.run()
    found = world.begin_one(0, table, 8)
    world.run()
    assert float(world.clients[0].rows[found]) == torch.tensor(right).to(getattr(torch, dtype))


def test_replicas_hold_batches_and_the_next_primary_continues_with_them() -> None:
    world = World(workers=1, servers=2, replicas=1)
    world.run()
    for key in (1, 2, 1, 3):
        world.push_one(0, spec(), key, 1.0)
    for _ in range(9):
        world.step()
    world.kill(0)
    world.assign([[1] for _ in range(4)])
    world.run()
    assert world.pull(0, spec(), [1, 2, 3]).flatten().tolist() == [2, 1, 1]


def test_rounds_have_each_key_once_and_in_order() -> None:
    assert [each.tolist() for each in rounds(np.array([1, 1, 1, 4, 7, 7]))] == [[0, 3, 4], [1, 5], [2]]
    assert [each.tolist() for each in rounds(np.array([1, 2]))] == [[0, 1]]
    assert list(rounds(np.array([], dtype=np.int64))) == []


def test_of_a_repeated_batch_only_new_pushes_are_added_to_reads() -> None:
    kind = TableKind(spec(), Functions())
    pushes = PushBatch(lambda size: np.empty(size, dtype=np.uint8))
    for number, (key, value) in enumerate([(4, 1.0), (7, 2.0), (4, 4.0), (4, 8.0)]):
        pushes.add(kind, key, Lanes(torch.tensor([[value]], dtype=torch.float64)), number, number)
    shards, owns, tickets, _ = pushes.take_all(np.zeros(1, dtype=np.int64), 0, {0: 1})
    assert tickets == [0, 1, 2, 3]
    assert [piece.section.count for piece in shards[0]] == [4]  # the server drops what it has
    assert [(own.keys.tolist(), own.lanes.values.flatten().tolist()) for own in owns] == [([4], [4.0]), ([4], [8.0])]
