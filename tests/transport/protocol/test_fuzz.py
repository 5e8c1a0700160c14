"""A fuzzer of the connection in each of its states: bytes of a true peer, changed at random, and bytes from nowhere.

Whatever comes: nothing but ProtocolError, nothing after it, nothing delivered that the true peer did not say, in its
order, and never more memory than one frame takes. `make soak` tries other examples each time.
"""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.transport.protocol.connection import ConnectionState, Joined, Named
from psctl.transport.protocol.connection_messages import Long
from psctl.transport.protocol.frames import FRAME_HEADER, MAX_HEADER, MAX_PAYLOAD, MAX_PIECE, PREFIX
from psctl.transport.protocol.message_assembly import Received
from psctl.transport.protocol.send_queue import control
from psctl.types import Member

ONE_FRAME = FRAME_HEADER + MAX_PIECE + (64 << 10) + (64 << 10)
"""Bytes of the receive buffer when it holds the largest frame."""

some = settings(deadline=None, max_examples=500 if os.environ.get("HYPOTHESIS_PROFILE") == "search" else 12)

place = st.integers(0, 1 << 20)
change = st.one_of(
    st.tuples(st.just("flip"), place, st.integers(0, 7)),
    st.tuples(st.just("insert"), place, st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("drop"), place, st.integers(1, 400)),
    st.tuples(st.just("repeat"), place, st.integers(1, 400)),
    st.tuples(st.just("swap"), place, st.integers(1, 400)),
    st.tuples(st.just("cut"), place, st.none()),
)


def changed(data: bytes, changes: list[Any]) -> bytes:
    """Return `data` with the changes made, one after the other."""
    for what, at, more in changes:
        at %= max(1, len(data))
        match what:
            case "flip" if data:
                data = data[:at] + bytes([data[at] ^ 1 << more]) + data[at + 1 :]
            case "insert":
                data = data[:at] + more + data[at:]
            case "drop":
                data = data[:at] + data[at + more :]
            case "repeat":
                data = data[: at + more] + data[at:]
            case "swap":
                data = data[at : at + more] + data[:at] + data[at + more :]
            case "cut":
                data = data[:at]
    return data


def feed(end: Any, data: bytes, size: int) -> None:
    """Feed an end; it may refuse, in no other way than this."""
    try:
        end.feed(data, size)
    except ProtocolError:
        assert end.connection.state is ConnectionState.ENDED
        assert end.connection.next_event() is None
        before = list(end.events)
        end.receive(b"more" * 10)
        assert end.connection.next_event() is None
        assert end.events == before
    else:
        assert len(end.connection.space()[0]) <= ONE_FRAME


@pytest.mark.parametrize("stage", ["hello", "certificate and keys"])
@some
@given(changes=st.lists(change, min_size=1, max_size=4), size=st.integers(1, 3000))
def test_a_changed_handshake_is_refused_or_waited_for(wire: Any, stage: str, changes: list[Any], size: int) -> None:
    worker, server = wire.ends()
    hello = worker.step()
    if stage == "hello":
        feed(server, changed(hello, changes), size)
    else:
        rest = worker.feed(server.feed(hello))
        feed(server, changed(rest, changes), size)
    assert [event for event in server.events if event not in (Named(Member("worker", 3, 2)), Joined(1 << 20))] == []


@some
@given(changes=st.lists(change, min_size=1, max_size=4), size=st.integers(1, 3000), rekey=st.sampled_from([2, 1 << 16]))
def test_changed_frames_deliver_no_more_than_what_was_said(wire: Any, changes: Any, size: int, rekey: int) -> None:
    worker, server = wire.joined(rekey=rekey)
    said = [(wire.Note("one"), b"payload"), (wire.Note("two"), None), (wire.Note("three"), bytes(20_000))]
    said.append((wire.Note("in pieces"), bytes(600_000)))
    frames = b"".join(worker.frames(*said))
    data = changed(frames, changes)
    feed(server, data, size)
    true = [Received(message, payload) for message, payload in said]
    assert server.events == true[: len(server.events)]
    assert len(server.events) < len(true) or data.startswith(frames), "what was changed is not delivered"


@some
@given(data=st.binary(max_size=500), prefix=st.tuples(*[st.integers(0, 255)] + [st.integers(0, 0xFFFFFFFF)] * 2))
def test_random_frames_are_refused_before_memory_is_taken(wire: Any, data: bytes, prefix: tuple[int, int, int]) -> None:
    _, server = wire.joined()
    feed(server, PREFIX.pack(*prefix) + data, 1 << 30)
    assert server.events == []


@some
@given(header=st.integers(1, MAX_HEADER), payload=st.integers(0, MAX_PAYLOAD), small=st.binary(min_size=1, max_size=9))
def test_an_announced_long_message_takes_memory_only_as_it_arrives(
    wire: Any, header: int, payload: int, small: bytes
) -> None:
    worker, server = wire.joined()
    announcement, rest = worker.seal(control(Long(header, payload))), PREFIX.pack(3, 0, len(small)) + small
    tracemalloc.start()
    try:
        with contextlib.suppress(ProtocolError):
            server.feed(announcement + rest)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
