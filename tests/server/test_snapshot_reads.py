"""Readers outside the job: they see updates that are on all replicas, and change no state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psctl.job.table_server_messages import ReadRows, ReadWanted
from psctl.ps.outputs import ToWorker
from psctl.ps.tables.server.read_answers import READERS
from psctl.server.snapshot_reads import AT_ONCE, SnapshotReads
from tests.ps.table_world import World, spec

W = spec("w", (3,), "float32")
ROWS = spec("", (2,), "float64")


def look(world: World, server: int, names=(), keys=(), store="s") -> list[tuple[ReadRows, bytes]]:
    """Query one server; return its immediate answers."""
    outputs = SnapshotReads(world.servers[server]).on_read(ReadWanted(1, store, list(names), list(keys)))
    return answers_of(world, server, outputs)


def answers_of(world: World, server: int, outputs) -> list[tuple[ReadRows, bytes]]:
    """Return the answers to readers; execute the other outputs."""
    mine = [each for each in outputs if isinstance(each, ToWorker) and each.rank == READERS]
    world.follow(server, [each for each in outputs if each not in mine])
    return [(each.message, bytes(each.payload or b"")) for each in mine]


def values(answers: list[tuple[ReadRows, bytes]]) -> dict[tuple[str, int], list[float]]:
    """Return answers by (table, key)."""
    found = {}
    for seen, payload in answers:
        at = 0
        for row in seen.rows:
            for key in row.keys:
                array = np.frombuffer(payload, row.sent, row.width, at)
                at += array.nbytes
                found[row.table, key] = array.tolist()
        assert at == len(payload)
    return found


@pytest.fixture
def behind() -> World:
    """Return a world in which the replica of server 0 lacks an update."""
    world = World(workers=1, servers=2, replicas=1)
    world.run()
    world.push(0, ROWS, list(range(32)), torch.ones(32, 2))
    while not any(
        slot.version > slot.chain.acknowledged for slot in world.servers[0].shards_here.values() if slot.leads
    ):
        assert world.step()
    return world


def test_a_reader_reads_named_and_integer_keys_over_all_servers() -> None:
    world = World(servers=2)
    world.push(0, W, [0], [1.0, 2.0, 3.0])
    world.push(1, ROWS, [4, 5, 6], torch.arange(6.0).view(3, 2))
    world.run()
    answers = [each for server in (0, 1) for each in look(world, server, ["w"], [4, 6, 99])]
    assert values(answers) == {("w", 0): [1.0, 2.0, 3.0], ("", 4): [0.0, 1.0], ("", 6): [4.0, 5.0]}
    assert sorted(shard for seen, _ in answers for shard in seen.led) == [0, 1, 2, 3]
    listed = [seen for server in (0, 1) for seen, _ in look(world, server)]
    assert {table.name for seen in listed for table in seen.tables} == {"w", ""}
    assert all(seen.stores == ["s"] and not seen.rows for seen in listed)


def test_rows_are_answered_only_when_all_replicas_have_them(behind: World) -> None:
    assert look(behind, 0, keys=range(32)) == [], "the replica has not all of it"
    answers = []
    plain = behind.follow
    behind.follow = lambda server, outputs: (
        answers.extend((each.message, bytes(each.payload)) for each in outputs if is_reader(each)),
        plain(server, [each for each in outputs if not is_reader(each)]),
    )
    behind.run()
    assert len(answers) == 1
    assert all(value == [1.0, 1.0] for value in values(answers).values())
    assert len(values(answers)) > 0


def is_reader(each) -> bool:
    return isinstance(each, ToWorker) and each.rank == READERS


def test_under_bsp_a_reader_sees_whole_clocks_only() -> None:
    world = World(workers=2, servers=1, staleness=0)
    world.push(0, W, [0], [1.0, 1.0, 1.0])
    world.clock(0)
    world.run()
    assert values(look(world, 0, ["w"])) == {}, "worker 1 has not ended the clock"
    world.push(1, W, [0], [1.0, 1.0, 1.0])
    world.clock(1)
    world.run()
    assert values(look(world, 0, ["w"])) == {("w", 0): [2.0, 2.0, 2.0]}


def test_a_reader_changes_no_version_and_no_session() -> None:
    world = World(servers=1)
    world.push(0, W, [0], [1.0, 2.0, 3.0])
    world.run()
    machine = world.servers[0]
    before = {shard: slot.version for shard, slot in machine.shards_here.items()}
    look(world, 0, ["w", "nothing"], [1], store="s")
    look(world, 0, ["w"], store="no such store")
    assert {shard: slot.version for shard, slot in machine.shards_here.items()} == before
    assert list(machine.stores) == ["s"]
    assert sorted(machine.stores["s"].sessions) == [0, 1]


def test_too_long_answers_are_refused_and_torch_only_dtypes_are_widened() -> None:
    world = World(servers=1)
    world.push(0, spec("long", (200_000,), "float32"), range_of(200_000), torch.zeros(4 * 65536))
    world.push(0, spec("half", (2,), "bfloat16"), [0], [1.5, 2.5])
    world.push(0, spec("flag", (2,), "bool", reduce="logical-or"), [0], torch.tensor([True, False]))
    world.run()
    assert [seen.problem for seen, _ in look(world, 0, ["long"])] == ["large"]
    assert values(look(world, 0, ["flag"])) == {("flag", 0): [1, 0]}
    assert values(look(world, 0, ["half"])) == {("half", 0): [1.5, 2.5]}


def range_of(elements: int) -> list[int]:
    return list(range(-(-elements // 65536)))


def test_the_number_of_waiting_readers_is_bounded(behind: World) -> None:
    for _ in range(AT_ONCE + 3):
        assert look(behind, 0, keys=[1]) == []
    queue = behind.servers[0].held_answers
    assert [each.message.problem for each in queue.queued(READERS)] == [""] * AT_ONCE + ["busy"] * 3
    behind.assign([[1, 0], [1, 0], [1, 0], [1, 0]])
    kept = queue.queued(READERS)
    assert not [each for each in kept if each.message.rows], "rows of a shard are withdrawn when another server leads"
