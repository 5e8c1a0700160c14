"""The connection without a socket: fed whole, byte by byte, with trailing data; and all that a bad peer can try."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.transport.protocol.authority import make_authority
from psctl.transport.protocol.connection import ConnectionState, Credited, Ended, Joined, Left, Named
from psctl.transport.protocol.connection_messages import Bye, Credit, Long
from psctl.transport.protocol.frames import FIRST, MAX_PAYLOAD, MAX_PIECE, MESSAGE, PIECE, PREFIX, WHOLE
from psctl.transport.protocol.message_assembly import Received
from psctl.transport.protocol.send_queue import NOTHING, Frame, control, framed
from psctl.types import Member
from tests.hypothesis_profile import examples

encode = msgspec.msgpack.Encoder().encode
GREETING = encode({"type": "Note", "text": "hello"})


@pytest.mark.parametrize("size", [1 << 30, 1, 7], ids=["whole", "byte by byte", "in sevens"])
def test_both_ends_name_each_other_and_join(wire: Any, size: int) -> None:
    worker, server = wire.ends()
    wire.shake(worker, server, size)
    assert worker.events == [Named(Member("server", 0)), Joined(1 << 20)]
    assert server.events == [Named(Member("worker", 3, 2)), Joined(1 << 20)]


@pytest.mark.parametrize("size", [1 << 30, 1, 7], ids=["whole", "byte by byte", "in sevens"])
def test_frames_arrive_however_they_are_cut(wire: Any, size: int) -> None:
    worker, server = wire.joined()
    frames = worker.frames((wire.Note("one"), b"payload"), (wire.Note("two"), None), (wire.Note("three"), bytes(3000)))
    server.feed(b"".join(frames), size)
    assert server.events == [
        Received(wire.Note("one"), b"payload"),
        Received(wire.Note("two"), None),
        Received(wire.Note("three"), bytes(3000)),
    ]


def test_frames_may_stand_right_behind_the_last_record_of_tls(wire: Any) -> None:
    worker, server = wire.ends()
    to_worker = server.feed(worker.step())
    to_server = worker.feed(to_worker)  # Finished and the worker's keys
    to_worker = server.feed(to_server)  # the server's keys: the server has joined and may send frames at once
    assert server.events[-1] == Joined(1 << 20)
    to_worker += server.note("right behind") + server.note("and another")
    worker.feed(to_worker)
    assert worker.events[1:] == [
        Joined(1 << 20),
        Received(wire.Note("right behind"), None),
        Received(wire.Note("and another"), None),
    ]


def test_nothing_is_read_before_the_decision(wire: Any) -> None:
    worker, server = wire.ends()
    connection = server.connection
    to_worker = server.feed(worker.step())
    server.receive(worker.feed(to_worker))
    assert connection.next_event() == Named(Member("worker", 3, 2))
    assert connection.next_event() is None
    assert connection.state is ConnectionState.NAMED
    connection.accept()
    assert connection.next_event() == Joined(1 << 20)


def test_a_refusal_carries_its_reason(wire: Any) -> None:
    worker, server = wire.ends()
    server.refusal = "incarnation 2 is older than 3"
    with pytest.raises(ProtocolError, match="it refused us: incarnation 2 is older than 3"):
        wire.shake(worker, server)
    assert worker.connection.state is ConnectionState.ENDED
    assert server.connection.state is ConnectionState.ENDED


def test_the_authority_of_another_job_is_not_trusted(wire: Any) -> None:
    worker, server = wire.ends(other=make_authority("digits-1", time.time()))
    with pytest.raises(ProtocolError, match="certificate is not of this job's authority"):
        wire.shake(worker, server)


def test_keys_for_another_or_echoed_are_refused(wire: Any) -> None:
    worker, server = wire.ends(random=lambda count: bytes(count))
    with pytest.raises(ProtocolError, match="or are ours"):
        wire.shake(worker, server)


def test_a_payload_goes_to_the_buffer_of_place(wire: Any) -> None:
    worker, server = wire.joined()
    landing = bytearray(5000)
    asked = []

    def place(message: Any, size: int) -> memoryview:
        asked.append((message, size))
        return memoryview(landing)[1000 : 1000 + size]

    server.place = place
    server.feed(b"".join(worker.frames((wire.Note("here"), b"\x07" * 3000))))
    assert asked == [(wire.Note("here"), 3000)]
    assert landing == bytes(1000) + b"\x07" * 3000 + bytes(1000)


def test_a_place_of_the_wrong_size_is_our_own_mistake(wire: Any) -> None:
    worker, server = wire.joined()
    server.place = lambda message, size: memoryview(bytearray(size - 1))
    with pytest.raises(AssertionError, match="receive_buffer_for\\(\\) returned 9 bytes for a payload of 10"):
        server.feed(b"".join(worker.frames((wire.Note("x"), bytes(10)))))


@pytest.mark.parametrize("size", [1 << 30, 1000], ids=["whole", "in thousands"])
def test_long_messages_travel_in_pieces(wire: Any, size: int) -> None:
    worker, server = wire.joined(window=64 << 10)
    text, data = "x" * 100_000, bytes(range(256)) * 2000
    frames = worker.frames((wire.Note(text), data), (wire.Note("next"), None))
    assert sum(map(len, frames)) < 64 << 10, "no more than the window before there is credit"
    for _ in range(100):
        server.feed(b"".join(frames), size)
        if not (owed := server.connection.owed()):
            break
        worker.outbox.add_credit(owed)
        frames = worker.frames()
    assert server.events == [Received(wire.Note(text), data), Received(wire.Note("next"), None)]


def test_what_is_kept_is_given_no_credit_until_it_is_let_go(wire: Any) -> None:
    worker, server = wire.joined(window=64 << 10)
    server.feed(b"".join(worker.frames((wire.Note("one"), bytes(10_000)), (wire.Note("two"), bytes(20_000)))))
    server.connection.kept += 20_000
    first = server.connection.owed()
    assert 10_000 < first < 12_000
    assert server.connection.owed() == 0
    server.connection.kept += 5_000  # more than was read since: nothing is taken back, what is read next is not given
    server.feed(b"".join(worker.frames((wire.Note("three"), bytes(4_000)))))
    assert server.connection.owed() == 0
    server.connection.kept = 0
    assert 24_000 < server.connection.owed() < 26_000
    assert server.connection.unpaid == 0


def test_more_than_there_is_credit_for_ends_the_connection(wire: Any) -> None:
    worker, server = wire.joined(window=64 << 10)
    for _ in range(3):
        server.feed(worker.seal(framed(MESSAGE, encode(wire.Note("x")), memoryview(bytes(20_000)))))
    server.connection.owed()
    for _ in range(3):
        server.feed(worker.seal(framed(MESSAGE, encode(wire.Note("x")), memoryview(bytes(20_000)))))
    check_ends(
        server,
        worker.seal(framed(MESSAGE, encode(wire.Note("x")), memoryview(bytes(20_000)))),
        "more than the 65536 bytes that it had credit for",
    )


def test_credit_and_goodbye_are_events_and_nothing_comes_after(wire: Any) -> None:
    worker, server = wire.joined()
    bye = worker.seal(control(Credit(12))) + worker.seal(control(Bye("done"))) + worker.note("ghost")
    server.feed(bye)
    assert server.events == [Credited(12), Left("done")]
    assert server.connection.state is ConnectionState.ENDED


def test_the_end_of_the_stream_shows_whether_something_was_cut(wire: Any) -> None:
    for cut in (0, 5):
        worker, server = wire.joined()
        frame = worker.note("whole") + worker.note("cut")[:cut]
        server.feed(frame)
        server.connection.space()
        server.connection.add_received(0)
        server.step()
        assert server.events == [Received(wire.Note("whole"), None), Ended(cut=cut > 0)]


def test_keys_change_after_so_many_frames_without_a_word(wire: Any) -> None:
    worker, server = wire.joined(rekey=4)
    for number in range(30):
        server.feed(b"".join(worker.frames((wire.Note(str(number)), b"x"))))
    assert [event.message.text for event in server.events] == [str(number) for number in range(30)]


# ---- bad peers -------------------------------------------------------------------------------------------------------


def check_ends(end: Any, data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        end.feed(data)
    assert end.connection.state is ConnectionState.ENDED
    assert end.connection.next_event() is None


def test_a_replayed_a_left_out_and_a_reordered_frame_end_the_connection(wire: Any) -> None:
    worker, server = wire.joined()
    frame = worker.note("pay 10")
    check_ends(server, frame + frame, "fails its check")
    assert server.events == [Received(wire.Note("pay 10"), None)]
    worker, server = wire.joined()
    first, second = worker.note("first"), worker.note("second")
    check_ends(server, second + first, "fails its check")
    assert server.events == []


def test_a_frame_of_another_connection_or_sent_back_ends_it(wire: Any) -> None:
    worker, server = wire.joined()
    check_ends(worker, worker.note("mirror"), "fails its check")
    other_worker, _ = wire.joined()
    check_ends(server, other_worker.note("elsewhere"), "fails its check")


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (PREFIX.pack(0, 1, 1), "unknown kind 0"),
        (PREFIX.pack(9, 1, 1), "unknown kind 9"),
        (PREFIX.pack(MESSAGE, 65_537, 0), "oversized frame"),
        (PREFIX.pack(MESSAGE, 1, MAX_PIECE + 1), "oversized frame"),
        (PREFIX.pack(FIRST, 4, 10), "frame of kind 4 with 4 bytes of header"),
        (PREFIX.pack(FIRST, 10, 0), "frame of kind 4 with 10 bytes of header, 0 of payload"),
        (PREFIX.pack(MESSAGE, 0xFFFFFFFF, 0xFFFFFFFF), "oversized frame"),
        (PREFIX.pack(MESSAGE, 0, 10), "frame of kind 1 with 0 bytes of header"),
        (PREFIX.pack(PIECE, 0, 0), "frame of kind 3 with 0 bytes of header, 0 of payload"),
        (PREFIX.pack(PIECE, 10, 10), "frame of kind 3 with 10 bytes of header"),
        (PREFIX.pack(2, 10, 10), "frame of kind 2"),
    ],
)
def test_a_bad_prefix_ends_the_connection_before_any_memory_is_taken(wire: Any, prefix: bytes, reason: str) -> None:
    _, server = wire.joined()
    check_ends(server, prefix, reason)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (framed(MESSAGE, b"\xc1", NOTHING), "an unknown message"),
        (framed(MESSAGE, b"\x81\xa4type\xa4Nope", NOTHING), "an unknown message"),
        (framed(MESSAGE, b"\x91" * 60_000, NOTHING), "an unknown message"),
        (framed(2, b"\x81\xa4type\xa4Nope", NOTHING), "an unknown control frame"),
        (framed(PIECE, b"", memoryview(b"x")), "a piece of no message"),
        (control(Long((16 << 20) + 1, 0)), "announced 16777217 bytes of header"),
        (control(Long(0, 10)), "announced 0 bytes"),
        (control(Long(1, MAX_PAYLOAD + 1)), "of payload"),
        (framed(FIRST, WHOLE.pack(5) + GREETING, memoryview(b"12345")), "announced 5 bytes of payload and sent 5"),
        (framed(FIRST, WHOLE.pack(MAX_PAYLOAD + 1) + GREETING, memoryview(b"1")), f"announced {MAX_PAYLOAD + 1} bytes"),
        (framed(FIRST, WHOLE.pack(9) + b"\xc1", memoryview(b"1")), "an unknown message"),
        (control(Long(-1, 0)), "announced -1"),
    ],
)
def test_a_member_that_speaks_nonsense_is_ended_with_a_reason(wire: Any, frame: Frame, reason: str) -> None:
    worker, server = wire.joined()
    check_ends(server, worker.seal(frame), reason)


def test_pieces_must_fit_what_was_announced(wire: Any) -> None:
    piece = framed(PIECE, b"", memoryview(bytes(11)))
    worker, server = wire.joined()
    check_ends(server, worker.seal(control(Long(10, 0))) + worker.seal(piece), "longer than what is missing")
    worker, server = wire.joined()
    check_ends(server, worker.seal(control(Long(20, 0))) + worker.seal(control(Long(20, 0))), "inside another")
    first = framed(FIRST, WHOLE.pack(20) + GREETING, memoryview(bytes(10)))
    worker, server = wire.joined()
    check_ends(server, worker.seal(first) + worker.seal(piece), "longer than what is missing")
    worker, server = wire.joined()
    check_ends(server, worker.seal(first) + worker.seal(first), "inside another")
    assert server.events == []


def test_what_is_urgent_and_short_passes_between_the_pieces_of_something_long(wire: Any) -> None:
    worker, server = wire.joined(window=64 << 10)
    data = bytes(range(256)) * 1000
    worker.outbox.add("long", encode(wire.Note("long")), memoryview(data), urgent=False)
    server.feed(b"".join(worker.seal(frame) for frame in worker.outbox.take()))
    worker.outbox.add("now", encode(wire.Note("now")), NOTHING, urgent=True)
    worker.outbox.add("longer", encode(wire.Note("longer")), memoryview(data), urgent=True)
    while worker.outbox.pending:
        worker.outbox.add_credit(server.connection.owed())
        server.feed(b"".join(worker.seal(frame) for frame in worker.outbox.take()))
    found = [(event.message.text, event.payload) for event in server.events]
    assert found == [("now", None), ("long", data), ("longer", data)]


@settings(max_examples=examples(60))
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_ends_the_connection_or_is_still_waited_for(wire: Any, place: int, bit: int) -> None:
    worker, server = wire.joined()
    good = worker.frames((wire.Note("fine"), None), (wire.Note("hello"), bytes(200)))
    data = bytearray(b"".join(good) + worker.note("after") + bytes(2_000_000))
    place %= len(data) - 2_000_000
    data[place] ^= 1 << bit
    with pytest.raises(ProtocolError):
        server.feed(bytes(data))
    for event in server.events:
        assert event in (
            Received(wire.Note("fine"), None),
            Received(wire.Note("hello"), bytes(200)),
            Received(wire.Note("after"), None),
        )


@settings(max_examples=examples(100))
@given(data=st.binary(min_size=1, max_size=300), opened=st.booleans())
def test_any_bytes_end_the_connection_or_wait_for_more(wire: Any, data: bytes, opened: bool) -> None:
    server = wire.joined()[1] if opened else wire.ends()[1]
    try:
        server.feed(data)
    except ProtocolError:
        assert server.connection.state is ConnectionState.ENDED
    assert server.events == []


@settings(max_examples=examples(30))
@given(
    messages=st.lists(st.tuples(st.text(max_size=300), st.none() | st.binary(min_size=1, max_size=3000)), max_size=8),
    cuts=st.lists(st.integers(1, 2000), min_size=1, max_size=20),
)
def test_whatever_is_sent_arrives_however_it_is_cut(wire: Any, messages: list[Any], cuts: list[int]) -> None:
    worker, server = wire.joined()
    data = b"".join(worker.frames(*((wire.Note(text), payload) for text, payload in messages)))
    turn = 0
    while data:
        cut = cuts[turn % len(cuts)]
        server.feed(data[:cut])
        data, turn = data[cut:], turn + 1
    assert server.events == [Received(wire.Note(text), payload) for text, payload in messages]


def test_an_unauthenticated_peer_gets_no_more_than_64_kib(wire: Any) -> None:
    _, server = wire.ends()
    change = b"\x14\x03\x03\x00\x01\x01"  # change_cipher_spec, which TLS 1.3 ignores
    hello = wire.ends()[0].step()
    with pytest.raises(ProtocolError):
        server.feed(hello + change * 20_000)


def test_anything_but_keys_inside_tls_is_refused(wire: Any) -> None:
    impostor, server = wire.ends()
    impostor.connection.accept = lambda: impostor.connection._tls.write(b"not keys")
    check_ends(server, impostor.feed(server.feed(impostor.step())), "it sent no keys")


def test_two_records_of_keys_are_one_too_many(wire: Any) -> None:
    worker, server = wire.ends()
    to_server = worker.feed(server.feed(worker.step()))
    worker.connection._tls.write(b"more TLS where frames begin")
    check_ends(server, to_server + worker.connection.outgoing(), "unknown kind 23")
