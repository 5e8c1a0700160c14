"""Pieces over sealed streams that come before anybody asked for them: right, and never more than has a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from psctl.collectives import player as players
from psctl.collectives import stream_pieces
from psctl.collectives.allreduce_backends import ScheduleAllReduce
from psctl.collectives.data_plane import DataPlane, PlaneMemory
from psctl.collectives.player import SPAN, SchedulePlayer
from psctl.collectives.rank_program import make_program
from psctl.collectives.stream_pieces import PART, HostStreams, PiecePart, PlaneKinds
from psctl.errors import TimedOut
from psctl.ps.pieces import bytes_view
from psctl.schedule.algorithms import catalog
from psctl.transport.shared_memory import SegmentClient, SharedAllocator
from psctl.types import Member
from tests.collectives.test_data_plane import NAMES
from tests.helpers.credentials import credentials
from tests.helpers.data_planes import DataPlanes, streams
from tests.helpers.memory_stream import MemoryNetwork
from tests.helpers.running import until
from tests.schedule.test_all_reduce import options

WINDOW = 64 << 10
PIECE = 40_000
MANY = 50


class Two:
    """Two ends, of rank 0 and of rank 1, each with the lock that waiting and reader threads share."""

    def __init__(self) -> None:
        self.ends = streams([0, 1], MemoryNetwork(window=WINDOW, silence=0.2))
        self.changed = [end.changed for end in self.ends]

    def peer(self, rank: int) -> Any:
        """Return what rank `rank` sends to the other by."""
        return self.ends[rank].peers[1 - rank]

    def send(self, tag: int, data: bytes) -> None:
        with self.changed[0]:
            self.ends[0].send(1, tag, memoryview(bytearray(data)))

    def expect(self, tag: int, size: int, of: int = 0) -> Callable[[], bytes]:
        """Have the other rank expect a piece of rank `of`; returns what waits for it."""
        place, me = memoryview(bytearray(size)), 1 - of
        with self.changed[me]:
            posted = self.ends[me].expect(of, tag, place)

        def wait() -> bytes:
            with self.changed[me]:
                assert self.changed[me].wait_for(lambda: posted.done or self.ends[me].end_reason(of), 10)
                assert posted.done, self.ends[me].end_reason(of)
            return bytes(place)

        return wait

    def why(self, end: HostStreams) -> str:
        """Wait until a stream has ended; return why."""
        rank = self.ends.index(end)
        with self.changed[rank]:
            assert self.changed[rank].wait_for(lambda: end.end_reason(1 - rank), 10)
        return end.end_reason(1 - rank)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    for end in made.ends:
        end.close("done", 0.0)
        for peer in end.peers.values():
            assert peer.join(10)


def test_a_sender_stops_until_a_receiver_waits(two: Two) -> None:
    data = [bytes([number]) * PIECE for number in range(MANY)]
    for each in data:
        two.send(7, each)
    with pytest.raises(TimedOut):
        two.peer(0).flush(0.5)
    assert two.peer(0).pending() >= MANY * PIECE - WINDOW - PIECE, "more has left than a window and a part"
    assert [two.expect(7, PIECE)() for _ in data] == data
    two.peer(0).flush(10)


def test_short_pieces_are_not_free_of_charge(two: Two) -> None:
    for _ in range(5000):
        two.send(7, b"x")
    with pytest.raises(TimedOut):
        two.peer(0).flush(0.5)
    kept = sum(len(posted.kept) for posted in two.ends[1]._early[0, 7])
    assert kept <= WINDOW // 512, "each costs a window its frame at least"
    assert b"".join(two.expect(7, 1)() for _ in range(5000)) == b"x" * 5000


def test_a_place_may_be_posted_while_its_piece_is_coming(two: Two) -> None:
    data = bytes(range(256)) * (3 * PART // 256)
    two.send(3, data)
    with pytest.raises(TimedOut):  # some lies aside, some is half there, some has not left
        two.peer(0).flush(0.2)
    assert two.expect(3, len(data))() == data
    later = two.expect(3, 1000)
    two.send(3, bytes(1000))
    assert later() == bytes(1000)


def test_the_size_that_a_peer_announces_takes_no_memory(two: Two) -> None:
    two.peer(0).send(PiecePart(1, 0, 1 << 60, 1), b"little")
    two.send(2, b"behind it")
    assert two.expect(2, 9)() == b"behind it"
    with pytest.raises(RuntimeError, match="worker/0 sent a piece of 1152921504606846976 bytes, expected 6"):
        two.expect(1, 6)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([(0, 100, 10), (20, 100, 10)], "bytes 20 to 30 of a piece of 100, which are not the next bytes"),
        ([(0, 100, 10), (0, 100, 10)], "bytes 0 to 10 of a piece of 100, which are not the next bytes"),
        ([(0, 100, 10), (10, 99, 10)], "bytes 10 to 20 of a piece of 99, which are not the next bytes"),
        ([(0, 100, 101)], "bytes 0 to 101 of a piece of 100, which are not the next bytes"),
        ([(5, 100, 10)], "bytes 5 to 15 of a piece of 100, which are not the next bytes"),
        ([(0, 2 * PART, PART + 1)], "more than 524288"),
        ([(0, 100, 0)], "an empty part"),
    ],
)
def test_parts_that_do_not_follow_each_other_end_the_stream(
    two: Two, parts: list[tuple[int, int, int]], why: str
) -> None:
    for offset, size, length in parts:
        two.peer(0).send(PiecePart(1, offset, size, 0), bytes(length))
    assert why in two.why(two.ends[1])


def test_what_has_come_is_summed_while_the_rest_is_on_its_way(two: Two) -> None:
    span = SPAN // 8
    schedule = catalog.build("one-shot", 2)
    step = make_program(schedule, 1).steps[0]
    vector, coming = torch.arange(3 * span), torch.full((3 * span,), 7)
    data = bytes_view(coming)
    two.expect(step.out[0].tag, data.nbytes, of=1)
    memory = PlaneMemory(SharedAllocator(SegmentClient(Member("worker", 1), None)))
    plane = DataPlane(1, 2, {}, memory, {}, two.ends[1])
    two.changed[1] = plane._changed
    player = threading.Thread(target=SchedulePlayer(schedule, 1, plane).play, args=(vector,))
    player.start()

    def send(first: int, last: int) -> None:
        for offset in range(first * SPAN, last * SPAN, PART):
            part = PiecePart(step.into[0].tag, offset, data.nbytes, 0)
            two.peer(0).send(part, data[offset : offset + PART])

    send(0, 1)
    deadline = time.monotonic() + 10
    while vector[span - 1] != span + 6:
        assert time.monotonic() < deadline, "it waits for the rest"
    assert vector[span] == span
    send(1, 3)
    player.join(10)
    assert torch.equal(vector, torch.arange(3 * span) + 7)


@pytest.mark.parametrize("name", [*NAMES, "ps", "cpu"])
def test_no_schedule_waits_in_a_circle_where_windows_are_narrow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vector after vector of many windows, so pieces come early everywhere, and are summed as they come; helpers' share
    rank 0's streams."""
    monkeypatch.setattr(stream_pieces, "PART", 4096)
    monkeypatch.setattr(players, "SPAN", 1024)
    world, length = 4, 30_001
    schedule = catalog.build(name, world, options(world, pieces=2))
    expected = sum(torch.arange(length) * (rank + 1) for rank in range(world))

    def play(rank: int) -> list[torch.Tensor]:
        played = ScheduleAllReduce(schedule, torch.device("cpu"), cast.planes[rank], shared=True)
        vectors = [torch.arange(length) * (rank + 1) for _ in range(3)]
        for vector in vectors:
            played.play(vector)
        played.close()
        return vectors

    with DataPlanes(list(range(world)), window=16 << 10) as cast:
        found: dict[int, list[torch.Tensor]] = {}
        assert cast.all(lambda rank: found.update({rank: play(rank)})) == [None] * world
        assert all(torch.equal(vector, expected) for vectors in found.values() for vector in vectors)


def test_messages_may_arrive_while_the_plane_of_their_streams_is_made() -> None:
    """The peer may have connected to all before this process has, and sends."""
    me, other, made = Member("worker", 0), Member("worker", 1), []
    end = HostStreams()

    class Early:
        member = other

        def withhold_credit(self, size: int) -> None:
            made.append(DataPlane(0, 2, {}, PlaneMemory(SharedAllocator(SegmentClient(me, None), 64)), {}, end))

        def release_credit(self, size: int) -> None:
            pass

        def close(self, reason: str) -> None:
            pass

        def join(self, timeout: float) -> bool:
            return True

    peer: Any = Early()
    end.on_connected(peer)
    message = PiecePart(3, 0, 5, 1)
    assert end.receive_buffer_for(peer, message, 5) is not None
    end.on_message(peer, message, memoryview(b"early"))
    place = bytearray(5)
    with end.changed:
        assert end.expect(1, 3, memoryview(place)).done
    assert place == b"early"
    made[0].retire("the test ends")


def test_a_stream_that_is_made_after_the_close_is_closed() -> None:
    """Its handshake ended while this process gave up connecting: the peer must not take itself as connected."""
    network = MemoryNetwork(silence=0.2)
    ends = [HostStreams(), HostStreams()]
    acceptor = network.acceptor(credentials(Member("worker", 0)), PlaneKinds, ends[0])
    ends[0].close("it could not connect to all", 0.0)
    network.dial(acceptor.address, credentials(Member("worker", 1)), Member("worker", 0), PlaneKinds, ends[1], 20.0)
    until(lambda: "it could not connect to all" in ends[1].end_reason(0), 10)
    acceptor.close()
    ends[1].close("the test ends", 0.0)
    assert all(end.join(10) for end in ends)
