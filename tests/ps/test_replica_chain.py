"""One shard's chain on a few servers, with messages delivered by the test: reported and kept entries."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from psctl.errors import ProtocolError
from psctl.ps.messages import Forward, StateCopy
from psctl.ps.outputs import LeadMoved, ReplicaCaughtUp, ToServer
from psctl.ps.replication.replica_chain import ReplicaChain
from tests.ps.log import Log


class Servers:
    """Chains of some servers; messages between two of them are delivered in order, unless one is in `deaf`."""

    def __init__(self, count: int, window: int = 1) -> None:
        self.alive = set(range(count))
        self.logs = [Log() for _ in range(count)]
        self.chains = [
            ReplicaChain(0, me, log, lambda other: other in self.alive, window=window, staged=log)
            for me, log in enumerate(self.logs)
        ]
        self.outputs: list[ReplicaCaughtUp | LeadMoved] = []
        self.deaf: set[int] = set()  # servers that receive no messages for now
        self._mail: deque[tuple[int, ToServer]] = deque()

    def assigned(self, epoch: int, chain: list[int], copies: tuple[int, ...] = ()) -> None:
        for me in sorted(self.alive):
            self.follow(me, self.chains[me].on_assignment(epoch, chain, copies, self.alive.__contains__))

    def begin(self, leader: int) -> None:
        self.logs[leader].version = 0
        self.follow(leader, self.chains[leader].on_first_version())
        self.deliver()

    def put(self, leader: int, number: int) -> None:
        payload = memoryview(msgspec.msgpack.encode((0, number)))
        version = self.logs[leader].version
        assert version is not None
        self.logs[leader].apply(b"", payload, kept=True)
        self.follow(leader, self.chains[leader].append(version, b"", payload))

    def die(self, server: int) -> None:
        self.alive.discard(server)
        self._mail = deque(letter for letter in self._mail if server not in (letter[0], letter[1].server))

    def follow(self, source: int, outputs: Any) -> None:
        for output in outputs:
            if isinstance(output, ToServer):
                self._mail.append((source, output))
            else:
                self.outputs.append(output)

    def deliver(self) -> None:
        kept: deque[tuple[int, ToServer]] = deque()
        while self._mail:
            source, output = self._mail.popleft()
            chain, size = self.chains[output.server], 0 if output.payload is None else len(output.payload)
            if output.server in self.deaf:
                kept.append((source, output))
                continue
            if output.payload is not None:
                place = chain.receive_buffer_for(source, output.message, size)
                if place is not None:
                    place[:] = output.payload
            self.follow(output.server, chain.on_message(source, output.message, size))
        self._mail = kept

    def numbers(self, server: int) -> list[int]:
        return [number for _, number in self.logs[server].entries]


def test_an_entry_is_acknowledged_when_the_tail_has_it() -> None:
    servers = Servers(3)
    servers.assigned(1, [0, 1, 2])
    servers.begin(0)
    servers.deaf = {2}
    servers.put(0, 0)
    servers.deliver()
    assert servers.numbers(1) == [0]
    assert servers.chains[0].acknowledged == 0
    assert not servers.chains[0].may_append
    servers.deaf.clear()
    servers.deliver()
    assert servers.chains[0].acknowledged == 1
    assert servers.numbers(2) == [0]


def test_a_filled_server_reports_it_and_becomes_primary_by_transfer() -> None:
    servers = Servers(2)
    servers.assigned(1, [0])
    servers.begin(0)
    servers.put(0, 0)
    servers.assigned(2, [0], (1,))
    servers.deliver()
    assert servers.outputs == [ReplicaCaughtUp(2, 0, 1)]
    servers.assigned(3, [1])
    servers.deliver()
    assert servers.outputs[1:] == [LeadMoved(3, 0)]
    assert (servers.chains[0].role, servers.chains[1].role) == ("none", "primary")
    assert servers.numbers(1) == [0]


def test_a_former_primary_leads_again_after_the_loss_of_its_successor() -> None:
    servers = Servers(3)
    servers.assigned(1, [0, 1, 2])
    servers.begin(0)
    servers.put(0, 0)
    servers.deliver()
    assert servers.chains[0].acknowledged == 1
    servers.deaf = {1}
    servers.put(0, 1)  # on 0 alone
    servers.assigned(2, [1, 2, 0])
    servers.deliver()
    servers.die(1)
    servers.deaf.clear()
    servers.assigned(3, [2, 0])  # 2 leads without the second entry, so what 0 has is void
    servers.deaf = {2}
    servers.deliver()
    servers.deaf = {0}
    servers.follow(2, servers.chains[2].on_server_connected(0))
    servers.deliver()
    servers.deaf = {2}
    servers.deliver()
    assert servers.chains[0].role == "member"
    assert not servers.chains[0].settled  # it reports that it has nothing
    servers.die(2)  # before it copied to 0
    servers.assigned(4, [0])
    assert servers.chains[0].leads
    assert servers.chains[0].acknowledged == len(servers.numbers(0)) >= 1


def test_a_new_primary_makes_no_entry_before_all_members_have_reported() -> None:
    servers = Servers(4, window=8)
    servers.assigned(1, [0, 1, 2, 3])
    servers.begin(0)
    servers.put(0, 0)
    servers.deliver()
    servers.deaf = {1}  # 0 puts what the next of the chain never hears
    servers.put(0, 1)
    servers.die(0)
    servers.deaf.clear()
    for me in (1, 2):
        servers.follow(me, servers.chains[me].on_assignment(2, [1, 2, 3], (), servers.alive.__contains__))
    servers.deliver()
    assert not servers.chains[1].may_append, "3 may have what only the dead one gave it"
    servers.follow(3, servers.chains[3].on_assignment(2, [1, 2, 3], (), servers.alive.__contains__))
    servers.deliver()
    assert servers.chains[1].may_append


def test_an_unexpected_copy_cancels_the_copy_before() -> None:
    servers = Servers(2)
    chain = servers.chains[1]
    servers.assigned(1, [1])
    servers.begin(1)
    place = chain.receive_buffer_for(0, StateCopy(0, 0, 2, b"", "a"), 8)  # by an assignment that is not known here yet
    assert place is not None
    servers.assigned(2, [0], (1,))
    assert chain.role == "demoting"
    chain.on_server_disconnected(0)
    assert chain.receive_buffer_for(0, StateCopy(0, 0, 2, b"", "b"), 4) is None


def test_an_unacknowledged_version_of_a_lost_primary_is_overwritten_by_a_copy() -> None:
    servers = Servers(4, window=4)
    servers.assigned(1, [0, 1, 2])
    servers.deliver()
    servers.deaf = {1}  # the start values of the primary reach no other server
    servers.begin(0)
    servers.put(0, 7)
    servers.put(0, 8)
    servers.assigned(2, [0, 1, 2], (3,))
    servers.deliver()
    assert servers.numbers(3) == [7, 8]
    servers.die(0)
    servers.deaf.clear()
    servers.assigned(3, [1, 2, 3])
    servers.deliver()
    servers.alive.discard(2)  # not connected yet
    servers.begin(1)
    servers.put(1, 5)
    servers.put(1, 6)
    servers.alive.add(2)
    servers.follow(1, servers.chains[1].on_server_connected(2))
    servers.deliver()
    assert [servers.numbers(server) for server in (1, 2, 3)] == [[5, 6]] * 3
    assert servers.chains[1].settled


@pytest.mark.parametrize("ends", ["arrives", "is lost with its connection"])
def test_the_buffer_of_a_dropped_entry_is_not_reused_while_bytes_arrive_in_it(ends: str) -> None:
    servers = Servers(3)
    servers.assigned(1, [0, 2, 1])
    servers.begin(0)
    follower, log, late = servers.chains[1], servers.logs[1], Forward(0, 0, 1, b"")
    assert follower.receive_buffer_for(2, late, 4) is not None
    servers.assigned(2, [0, 1], (2,))  # it was sent under an older assignment
    payload = msgspec.msgpack.encode((0, 7))
    follower.receive_buffer_for(0, Forward(0, 0, 2, b""), len(payload))[:] = payload
    follower.on_message(0, Forward(0, 0, 2, b""), len(payload))
    assert log.entries == [(0, 7)]
    assert log.rooms == 2, "bytes may still arrive in the other buffer"
    if ends == "arrives":
        follower.on_message(2, late, 4)
    else:
        follower.on_server_disconnected(2)
    assert log.rooms == 1
    assert log.entries == [(0, 7)]


def test_a_too_large_announced_size_is_refused_before_memory_is_allocated() -> None:
    servers = Servers(2)
    servers.assigned(1, [0, 1])
    servers.begin(0)
    chain, most = servers.chains[1], Log.copy_limit
    with pytest.raises(ProtocolError, match=f"server/0, shard 0: an entry of {most + 1} bytes"):
        chain.receive_buffer_for(0, Forward(0, 5, 1, b""), most + 1)  # not even the next one
    with pytest.raises(ProtocolError, match=f"a copy of {most + 1} bytes"):
        chain.receive_buffer_for(0, StateCopy(0, 0, 2, b"", "a"), most + 1)
