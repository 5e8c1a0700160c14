"""Reads of all parameters at one step: against servers that train, fail and move, with every order of messages."""

from __future__ import annotations

from collections import deque
from functools import cache

import pytest
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.client.parameter_reads import WIDEST, ParameterReads
from psctl.ps.messages import Leads, RankStateRead, ReadRankState, ReadShards, ShardRead
from psctl.ps.outputs import ToReader, ToServer
from psctl.ps.shards import sizes
from tests.ps.world import SHARDS, World

CLOCKS = 6


@cache
def reference(clocks: int) -> bytes:
    """The bytes of all shards after so many clocks, which no order of messages changes."""
    world = World(0, 2, 2, clocks)
    world.run()
    return b"".join(bytes(world.servers[world.chains[s.index][0]].shards[s.index].state.values.numpy()) for s in SHARDS)


class ReadWorld(World):
    """A world with one reader, which reads all shards at one version again and again."""

    def __init__(self, seed: int, servers: int, *, deaf: bool = False, **more: int) -> None:
        self.deaf = deaf
        self.reads = ParameterReads(sizes(SHARDS))
        self.found: list[tuple[int, bytes]] = []
        self.attempts = 0
        super().__init__(seed, servers, 2, CLOCKS, **more)
        for server in sorted(self.servers):
            self.join(server)
        self.ask(0)

    def join(self, server: int) -> None:
        """Make the reader's connection to a server anew."""
        self.queues.pop((("r", 0), ("s", server)), None)
        self.queues.pop((("s", server), ("r", 0)), None)
        self.reads.on_disconnected(server)
        self.servers[server].on_reader_disconnected(0)
        self.follow(server, self.servers[server].on_reader_connected(0))

    def ask(self, version: int) -> None:
        self.attempts += 1
        self.put(self.reads.begin(range(len(SHARDS)), version))

    def put(self, outs: list[ToServer]) -> None:
        for one in outs:
            if one.server in self.servers:
                self.queues.setdefault((("r", 0), ("s", one.server)), deque()).append((one.message, one.payload))

    def follow(self, server: int, instructions: list[object]) -> None:
        for one in instructions:
            if isinstance(one, ToReader):
                self.queues.setdefault((("s", server), ("r", 0)), deque()).append((one.message, one.payload))
            else:
                super().follow(server, [one])

    def kill(self, server: int) -> None:
        super().kill(server)
        self.reads.on_disconnected(server)

    def add(self, server: int, shards: list[int]) -> None:
        super().add(server, shards)
        self.join(server)

    def deliver(self, key) -> None:
        (kind, sender), (to, receiver) = key
        if kind != "r" and to != "r":
            super().deliver(key)
            return
        if self.deaf:
            del self.queues[key]
            return
        message, payload = self.queues[key].popleft()
        if not self.queues[key]:
            del self.queues[key]
        if kind == "r":
            self.follow(receiver, self.servers[receiver].on_reader_message(0, message))
        elif isinstance(message, Leads):
            self.put(self.reads.on_leads(sender, message))
        else:
            place = self.reads.receive_buffer_for(sender, message, len(payload))
            if place is not None:
                place[:] = payload
            self.reads.on_answer(sender, message, len(payload))
            if self.reads.is_complete:
                self.take()

    def take(self) -> None:
        """Check a complete attempt, and begin the next one."""
        if self.reads.differ_by():
            self.ask(self.reads.next_version())
            return
        (version,) = set(self.reads.versions.values())
        self.reads.accept()
        self.found.append((version, b"".join(bytes(self.reads.values[s.index]) for s in SHARDS)))
        assert set(self.reads.clocks.values()) == {version}
        if version < CLOCKS:
            self.ask(version + 1)


def check(world: ReadWorld) -> None:
    """Run to the end; the final values are read as well, as `TrainingEnded` has a reader do."""
    world.run()
    if not world.found or world.found[-1][0] < CLOCKS:
        world.ask(0)
        world.run()
    versions = [version for version, _ in world.found]
    assert versions == sorted(set(versions))
    assert versions[-1] == CLOCKS
    for version, values in world.found:
        assert values == reference(version), f"version {version}"


@pytest.mark.parametrize("seed", range(40))
def test_every_read_is_of_one_step(seed: int) -> None:
    check(ReadWorld(seed, 3, replicas=seed % 3))


@pytest.mark.parametrize("seed", range(40))
def test_reads_go_on_when_connections_break_and_servers_fail(seed: int) -> None:
    world = ReadWorld(seed, 4, replicas=2)
    for _ in range(2):
        world.run(steps=world.random.randrange(200))
        world.join(world.random.choice(sorted(world.servers)))
        world.run(steps=world.random.randrange(100))
        world.kill(world.random.choice(sorted(world.servers)))
    check(world)


@pytest.mark.parametrize("seed", range(20))
def test_reads_follow_shards_that_move(seed: int) -> None:
    world = ReadWorld(seed, 2, replicas=seed % 2)
    world.run(steps=world.random.randrange(200))
    world.add(2, [0, 1])
    world.run(until=lambda: world.caught_up(2))
    world.move(2)
    check(world)


def test_a_reader_holds_nothing_up() -> None:
    """Servers whose reader never takes a message train to the end, with the values of an undisturbed run."""
    world = ReadWorld(3, 2, deaf=True)
    world.run()
    assert not world.found
    assert torch.equal(world.values(), torch.frombuffer(bytearray(reference(CLOCKS)), dtype=torch.float32))


def test_margins_are_doubled_until_versions_agree() -> None:
    reads = ParameterReads([4, 4])
    reads.on_leads(0, Leads(0, [0, 1]))
    asked = []
    version = 0
    for newest in (10, 20, 40, 80):
        ticket = reads.begin([0, 1], version)[0].message.ticket
        for shard in (0, 1):
            answer = ShardRead(ticket, shard, newest + shard, newest)
            reads.receive_buffer_for(0, answer, 4)
            reads.on_answer(0, answer, 4)
        assert reads.is_complete
        assert reads.differ_by() == 1
        version = reads.next_version()
        asked.append(version - newest - 1)
    assert asked == [1, 2, 4, 8]
    for _ in range(20):
        reads.next_version()
    assert reads.next_version() - max(reads.versions.values()) == WIDEST


def test_answers_of_an_earlier_attempt_are_dropped() -> None:
    reads = ParameterReads([4])
    reads.on_leads(0, Leads(0, [0]))
    first = reads.begin([0], 0)[0].message.ticket
    second = reads.begin([0], 3)[0].message.ticket
    late = ShardRead(first, 0, 1, 1)
    assert reads.receive_buffer_for(0, late, 4) is None
    reads.on_answer(0, late, 4)
    assert not reads.is_complete
    assert second != first


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (lambda ticket: ShardRead(ticket, 0, 1, 1), 8),
        (lambda ticket: ShardRead(ticket, 1, 1, 1), 4),
        (lambda ticket: ShardRead(ticket, 7, 1, 1), 4),
    ],
    ids=["size", "not asked for", "no shard"],
)
def test_a_server_that_lies_is_refused(message, size: int) -> None:
    reads = ParameterReads([4, 4])
    reads.on_leads(0, Leads(0, [0, 1]))
    ticket = reads.begin([0], 0)[0].message.ticket
    with pytest.raises(ProtocolError, match="server/0"):
        reads.receive_buffer_for(0, message(ticket), size)
    with pytest.raises(ProtocolError, match="server/0"):
        reads.on_answer(0, message(ticket), size)
    with pytest.raises(ProtocolError, match="leads shard 2"):
        reads.on_leads(0, Leads(0, [2]))


def test_the_state_of_rank_0_is_asked_for_again_at_another_primary() -> None:
    reads = ParameterReads([4])
    assert reads.begin_state(5) == []
    (first,) = reads.on_leads(0, Leads(0, [0]))
    assert isinstance(first.message, ReadRankState) and (first.server, first.message.clock) == (0, 5)
    reads.on_disconnected(0)
    (again,) = reads.on_leads(1, Leads(1, [0]))
    answer = RankStateRead(again.message.ticket, 5)
    place = reads.receive_buffer_for(1, answer, 3)
    assert place is not None
    place[:] = b"abc"
    reads.on_answer(1, answer, 3)
    assert reads.rank_state == (5, b"abc")
    assert all(not isinstance(one.message, ReadRankState) for one in reads.on_leads(1, Leads(1, [0])))


def test_a_reader_that_names_no_shard_breaks_the_protocol() -> None:
    world = World(0, 2, 2, 1)
    with pytest.raises(ProtocolError, match="reader/0 named shard 99"):
        world.servers[0].on_reader_message(0, ReadShards(1, [99], 0))
