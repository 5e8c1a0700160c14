"""Frames without seals (`network.encryption: off`): however they are cut, long payloads arrive where they belong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.transport.protocol.connection import ConnectionState, Ended
from psctl.transport.protocol.frames import DIRECT, FIRST, MESSAGE, PIECE, PREFIX, WHOLE
from psctl.transport.protocol.message_assembly import Received
from psctl.transport.protocol.send_queue import NOTHING, framed
from tests.hypothesis_profile import examples

encode = msgspec.msgpack.encode
NOTE = encode({"type": "Note", "text": "x"})
LONG = bytes(range(256)) * 400
"""More than an open frame copies, and in pieces where the window is 64 KiB."""


def carry(worker: Any, server: Any, size: int) -> None:
    """Send all that is queued, in parts of `size` bytes."""
    while worker.outbox.pending:
        worker.outbox.add_credit(owed) if (owed := server.connection.owed()) else None
        server.feed(b"".join(worker.seal(frame) for frame in worker.outbox.take()), size)


@pytest.mark.parametrize("size", [1 << 30, 1, 997, 20_000], ids=["whole", "byte by byte", "in parts", "in large parts"])
@pytest.mark.parametrize("window", [64 << 10, 4 << 20], ids=["in pieces", "in one frame"])
def test_long_payloads_arrive_in_their_place(wire: Any, size: int, window: int) -> None:
    worker, server = wire.joined(window=window, sealed=False)
    place = bytearray(len(LONG))
    server.place = lambda message, count: memoryview(place) if message.text == "placed" else None
    for text, payload in (("placed", LONG), ("short", b"abc"), ("anywhere", LONG[::-1]), ("none", b"")):
        worker.outbox.add(text, encode(wire.Note(text)), memoryview(payload), urgent=False)
    carry(worker, server, size)
    found = [(event.message.text, event.payload) for event in server.events]
    assert found == [("placed", LONG), ("short", b"abc"), ("anywhere", LONG[::-1]), ("none", None)]
    assert bytes(place) == LONG


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(st.integers(0, 3 * DIRECT) | st.just(300_000), max_size=6),
    cuts=st.lists(st.integers(1, 40_000), min_size=1, max_size=20),
)
def test_whatever_is_sent_arrives_however_it_is_cut(wire: Any, sizes: list[int], cuts: list[int]) -> None:
    worker, server = wire.joined(window=4 << 20, sealed=False)
    payloads = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    data = b"".join(worker.frames(*((wire.Note(str(at)), each) for at, each in enumerate(payloads))))
    turn = 0
    while data:
        cut = cuts[turn % len(cuts)]
        server.feed(data[:cut])
        data, turn = data[cut:], turn + 1
    assert server.events == [Received(wire.Note(str(at)), each or None) for at, each in enumerate(payloads)]


@settings(max_examples=examples(100))
@given(data=st.binary(min_size=1, max_size=300))
def test_any_bytes_end_the_connection_or_wait_for_more(wire: Any, data: bytes) -> None:
    server = wire.joined(sealed=False)[1]
    try:
        server.feed(data)
    except ProtocolError:
        assert server.connection.state is ConnectionState.ENDED
    assert server.events == []


def test_an_urgent_message_passes_between_pieces(wire: Any) -> None:
    worker, server = wire.joined(window=64 << 10, sealed=False)
    worker.outbox.add("long", encode(wire.Note("long")), memoryview(LONG), urgent=False)
    server.feed(b"".join(worker.seal(frame) for frame in worker.outbox.take()))
    worker.outbox.add("now", encode(wire.Note("now")), NOTHING, urgent=True)
    carry(worker, server, 777)
    assert [(event.message.text, event.payload) for event in server.events] == [("now", None), ("long", LONG)]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([framed(PIECE, b"", memoryview(LONG[: 2 * DIRECT]))], "a piece of no message"),
        (
            [
                framed(FIRST, WHOLE.pack(2 * DIRECT) + NOTE, memoryview(LONG[:DIRECT])),
                framed(PIECE, b"", memoryview(LONG[: 2 * DIRECT])),
            ],
            "longer than what is missing",
        ),
        ([framed(MESSAGE, b"nonsense", memoryview(LONG[: 2 * DIRECT]))], "unknown message"),
    ],
    ids=["no message", "too long", "nonsense"],
)  # fmt: skip
@pytest.mark.parametrize("size", [1 << 30, 1000], ids=["whole", "in thousands"])
def test_a_lie_ends_the_connection_before_its_payload_is_kept(wire: Any, frames: Any, reason: str, size: int) -> None:
    worker, server = wire.joined(sealed=False)
    with pytest.raises(ProtocolError, match=reason):
        server.feed(b"".join(worker.seal(frame) for frame in frames), size)
    assert server.events == []


def test_the_end_within_a_payload_is_a_cut(wire: Any) -> None:
    worker, server = wire.joined(window=4 << 20, sealed=False)
    (frame,) = worker.frames((wire.Note("long"), LONG))
    server.feed(frame[: PREFIX.size + 5000])
    server.connection.space()
    server.connection.add_received(0)
    server.step()
    assert server.events == [Ended(cut=True)]


@pytest.mark.parametrize("sealed", [True, False])
def test_ends_that_differ_refuse_each_other(wire: Any, sealed: bool) -> None:
    worker, _ = wire.ends(sealed=sealed)
    _, server = wire.ends(sealed=not sealed)
    with pytest.raises(ProtocolError, match=r"encrypts? its frames"):
        wire.shake(worker, server)


def test_open_frames_are_readable_and_shorter(wire: Any) -> None:
    worker, _ = wire.joined(sealed=False)
    (frame,) = worker.frames((wire.Note("hello"), LONG[:1000]))
    assert LONG[:1000] in frame
    assert len(frame) == PREFIX.size + len(encode(wire.Note("hello"))) + 1000
