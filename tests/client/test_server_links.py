"""Connections to servers that come and go: dialled, made again, dropped, and told of once when nobody answers."""

from __future__ import annotations

import threading

from psctl.client.server_links import Links
from psctl.clock import SystemClock
from psctl.errors import PeerLost
from psctl.types import Address, ServerAt


def until(condition, seconds: float = 10.0) -> None:
    clock = SystemClock()
    end = clock.now() + seconds
    while not condition():
        assert clock.now() < end, "it never came true"
        clock.sleep(0.002)


class Wire:
    """A connection that a test ends by hand."""

    bytes_sent = bytes_received = 5

    def __init__(self, town: Town, at: ServerAt) -> None:
        self.town, self.at, self.sent, self.closed = town, at, [], ""

    def send(self, message, payload=None, *, urgent=False) -> None:
        self.sent.append(message)

    def flush(self, timeout) -> None:
        pass

    def close(self, reason="") -> None:
        self.closed = reason
        self.town.links.down(self.at, self, PeerLost(reason))

    def join(self, timeout=None) -> bool:
        return True


class Town:
    """Servers that answer, or do not."""

    def __init__(self, *silent: int) -> None:
        self.silent, self.wires, self.unreachable = set(silent), [], []
        self.dialled = threading.Semaphore(0)
        self.links = Links(self.dial, lambda at, error: self.unreachable.append((at.rank, error.message)))

    def dial(self, at: ServerAt) -> None:
        self.dialled.release()
        if at.rank in self.silent:
            raise PeerLost(f"nobody at {at.address}")
        wire = Wire(self, at)
        self.wires.append(wire)
        assert self.links.up(at, wire)

    def of(self, rank: int) -> Wire:
        return next(wire for wire in reversed(self.wires) if wire.at.rank == rank)


def at(rank: int, incarnation: int = 0) -> ServerAt:
    return ServerAt(rank, incarnation, Address("memory", rank + 1))


def test_a_connection_that_breaks_is_made_again_and_its_bytes_still_count():
    town = Town()
    town.links.assigned([at(0), at(1)])
    until(lambda: len(town.wires) == 2 and all(town.links.serves(wire.at, wire) for wire in town.wires))
    broken = town.of(1)
    town.links.down(broken.at, broken, PeerLost("cut"))
    until(lambda: len(town.wires) == 3 and town.links.serves(at(1), town.of(1)))
    town.links.send(1, "hello")
    assert (broken.sent, town.of(1).sent) == ([], ["hello"])
    assert town.links.error(1) is None
    assert town.links.bytes_moved == 30
    assert not town.unreachable
    town.links.close("over", 1.0)


def test_a_connection_that_comes_up_soon_after_it_was_dialled_is_dialled_once():
    town = Town()
    town.links.assigned([at(0)])
    until(lambda: town.wires and town.links.serves(at(0), town.of(0)))
    made: list[Wire] = []
    town.links._dial = lambda where: made.append(Wire(town, where))  # made, but its handler has not called `up` yet
    town.links.down(at(0), town.of(0), PeerLost("cut"))
    until(lambda: made)
    SystemClock().sleep(0.05)  # the error of the connection before it still stands: no reason to dial again
    assert town.links.error(0).message == "cut"
    assert town.links.up(at(0), made[0])
    assert len(made) == 1
    assert town.links.error(0) is None
    town.links.close("over", 1.0)


def test_who_does_not_answer_is_told_of_once_and_dialled_until_nobody_wants_him():
    town = Town(1)
    town.links.assigned([at(1)])
    for _ in range(3):
        assert town.dialled.acquire(timeout=10)
    assert town.unreachable == [(1, "nobody at memory:2")]
    assert "nobody at" in town.links.error(1).message
    town.links.send(1, "dropped")
    town.links.assigned([at(0)])
    until(lambda: town.wires and town.links.serves(at(0), town.of(0)))
    assert town.links.error(1) is None
    town.links.close("over", 1.0)


def test_an_assignment_drops_the_dead_incarnation_and_dials_the_new_one():
    town = Town()
    town.links.assigned([at(0)])
    until(lambda: town.wires and town.links.serves(at(0), town.of(0)))
    old = town.of(0)
    town.links.assigned([at(0, 1)])
    until(lambda: len(town.wires) == 2 and town.links.serves(at(0, 1), town.of(0)))
    assert old.closed == "it is not of the newest assignment"
    assert town.of(0).at.incarnation == 1
    assert not town.links.up(at(0), Wire(town, at(0)))  # the dead one comes back: nobody wants it
    assert not town.links.serves(at(0), old)
    assert town.links.serves(at(0, 1), town.of(0))
    town.links.close("over", 1.0)
    assert town.of(0).closed == "over"
