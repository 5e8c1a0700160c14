"""Connections to servers: dialled, made again, dropped, and reported once when a server is unreachable."""

from __future__ import annotations

import itertools
import threading

import pytest

from psctl.client.server_connections import ServerConnections, member_of
from psctl.clock import SystemClock
from psctl.errors import PeerLost, ProtocolError
from psctl.types import Address, Member, ServerAt
from tests.helpers.running import until


class Wire:
    """A connection that a test ends by hand."""

    bytes_sent = bytes_received = 5

    def __init__(self, town: Town, at: ServerAt) -> None:
        self.town, self.at, self.sent, self.closed = town, at, [], ""
        self.member = member_of(at)

    def send(self, message, payload=None, *, urgent=False) -> None:
        self.sent.append(message)

    def flush(self, timeout) -> None:
        pass

    def close(self, reason="") -> None:
        self.closed = reason
        self.town.links.on_connection_lost(self, PeerLost(reason))

    def join(self, timeout=None) -> bool:
        return True


class Town:
    """Servers that accept connections, or do not."""

    def __init__(self, *silent: int) -> None:
        self.silent, self.wires, self.unreachable = set(silent), [], []
        self.dialled = threading.Semaphore(0)
        self.used: list[str] = []
        self.links = ServerConnections(
            lambda *to: self.dial(*to), self, lambda at, error: self.unreachable.append((at.rank, error.message))
        )

    def dial(self, member: Member, address: Address, handler) -> None:
        self.dialled.release()
        if member.rank in self.silent:
            raise PeerLost(f"no server at {address}")
        wire = Wire(self, ServerAt(member.rank, member.incarnation, address))
        self.wires.append(wire)
        handler.on_connected(wire)

    # ---- the user of the connections ----

    receive_buffer_for = on_message = staticmethod(lambda *_: None)

    def on_connected(self, wire: Wire) -> None:
        assert self.links.is_in_use(wire)
        self.used.append(f"up {wire.at.rank}")

    def on_connection_lost(self, wire: Wire, error: PeerLost) -> None:
        self.used.append(f"down {wire.at.rank}")

    def of(self, rank: int) -> Wire:
        return next(wire for wire in reversed(self.wires) if wire.at.rank == rank)


def at(rank: int, incarnation: int = 0) -> ServerAt:
    return ServerAt(rank, incarnation, Address("memory", rank + 1))


def test_a_broken_connection_is_made_again_and_its_bytes_stay_counted():
    town = Town()
    town.links.assign([at(0), at(1)])
    until(lambda: len(town.wires) == 2 and all(town.links.is_in_use(wire) for wire in town.wires))
    broken = town.of(1)
    town.links.on_connection_lost(broken, PeerLost("cut"))
    until(lambda: len(town.wires) == 3 and town.links.is_in_use(town.of(1)))
    town.links.send(1, "hello")
    assert (broken.sent, town.of(1).sent) == ([], ["hello"])
    assert town.links.error(1) is None
    assert sorted(town.used) == ["down 1", "up 0", "up 1", "up 1"]
    assert sum(map(sum, town.links.bytes_by_peer.values())) == 30
    assert not town.unreachable
    town.links.close("over", 1.0)


def test_a_connection_that_is_made_soon_is_dialled_once():
    town = Town()
    town.links.assign([at(0)])
    until(lambda: town.wires and town.links.is_in_use(town.of(0)))
    made: list[Wire] = []
    town.dial = lambda *_: made.append(Wire(town, at(0)))  # made, but `on_connected` was not called yet
    town.links.on_connection_lost(town.of(0), PeerLost("cut"))
    until(lambda: made)
    SystemClock().sleep(0.05)  # the error of the connection before it still stands: no reason to dial again
    assert town.links.error(0).message == "cut"
    town.links.on_connected(made[0])
    assert len(made) == 1
    assert town.links.error(0) is None
    town.links.close("over", 1.0)


def test_a_server_that_accepts_and_ends_each_connection_is_dialled_after_growing_pauses():
    town = Town()
    ended: list[float] = []

    def dial(member: Member, address: Address, handler: ServerConnections) -> None:
        wire = Wire(town, at(0))
        handler.on_connected(wire)
        ended.append(SystemClock().now())
        handler.on_connection_lost(wire, PeerLost("accepted and closed"))

    town.dial = dial
    town.links.assign([at(0)])
    until(lambda: len(ended) >= 5)
    pauses = [after - before for before, after in itertools.pairwise(ended)]
    assert all(pause >= 0.9 * 0.05 * 2**number for number, pause in enumerate(pauses)), pauses
    town.links.close("over", 1.0)


def test_an_unreachable_server_is_reported_once_and_dialled_until_it_is_unassigned():
    town = Town(1)
    town.links.assign([at(1)])
    for _ in range(3):
        assert town.dialled.acquire(timeout=10)
    assert town.unreachable == [(1, "no server at memory:2")]
    assert "no server at" in town.links.error(1).message
    town.links.send(1, "dropped")
    town.links.assign([at(0)])
    until(lambda: town.wires and town.links.is_in_use(town.of(0)))
    assert town.links.error(1) is None
    town.links.close("over", 1.0)


def test_an_assignment_drops_the_lost_incarnation_and_dials_the_new_one():
    town = Town()
    town.links.assign([at(0)])
    until(lambda: town.wires and town.links.is_in_use(town.of(0)))
    old = town.of(0)
    town.links.assign([at(0, 1)])
    until(lambda: len(town.wires) == 2 and town.links.is_in_use(town.of(0)))
    assert old.closed == "it is not of the newest assignment"
    assert town.of(0).at.incarnation == 1
    with pytest.raises(ProtocolError, match="not of the newest assignment"):
        town.links.on_connected(Wire(town, at(0)))  # the lost incarnation connects again
    assert not town.links.is_in_use(old)
    assert town.links.is_in_use(town.of(0))
    town.links.close("over", 1.0)
    assert town.of(0).closed == "over"


def test_the_bytes_of_a_connection_count_while_it_is_being_dropped():
    town, counted = Town(), []
    town.links.assign([at(0)])
    until(lambda: town.wires and town.links.is_in_use(town.of(0)))
    dropped = town.of(0)
    close = dropped.close
    dropped.close = lambda reason="": (counted.append(sum(map(sum, town.links.bytes_by_peer.values()))), close(reason))
    town.links.assign([])
    assert counted == [10], "a report that is made now must not fall behind the one before"
    assert sum(map(sum, town.links.bytes_by_peer.values())) == 10
    town.links.close("over", 1.0)
