"""What every stream must do: one conformance test that tcp and memory both pass; then what is tcp's own."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from psctl.errors import ConnectionFailed, PortTaken, UsageError
from psctl.transport import tcp_stream
from psctl.transport.stream import Listener, Stream
from psctl.types import Address
from tests.helpers.memory_stream import MemoryNetwork

Make = Callable[[], tuple[Stream, Stream, Listener]]


def make_tcp() -> tuple[Stream, Stream, Listener]:
    listener = tcp_stream.listen("127.0.0.1", None)
    dialled = tcp_stream.connect(listener.address, 5)
    return dialled, listener.accept(), listener


def make_memory() -> tuple[Stream, Stream, Listener]:
    network = MemoryNetwork()
    listener = network.listen("here", None)
    dialled = network.connect(listener.address)
    return dialled, listener.accept(), listener


def read(stream: Stream, count: int) -> bytes:
    buffer = bytearray(count)
    have = 0
    while have < count and (some := stream.receive_into(memoryview(buffer)[have:])):
        have += some
    return bytes(buffer[:have])


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start `call` in a thread; return a function that waits for it and gives its result or raises its error."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append((True, call()))
        except OSError as error:
            outcome.append((False, error))

    thread = threading.Thread(target=body)
    thread.start()

    def wait() -> Any:
        thread.join(10)
        fine, value = outcome[0]
        if not fine:
            raise value
        return value

    return wait


def check_stream(make: Make) -> None:
    """Check everything that Connection and Peer rely on."""
    # Bytes arrive, all and in order, both ways; a sent buffer may be reused.
    a, b, listener = make()
    data = bytearray(os.urandom(3 << 20))
    sent = bytes(data)
    reading = in_thread(lambda: read(b, len(sent)))
    a.send(memoryview(data))
    data[:] = bytes(len(data))
    assert reading() == sent
    b.send(memoryview(b"back"))
    assert read(a, 4) == b"back"
    assert (a.in_flight(), b.in_flight()) == (0, 0)
    # Both have just sent and received; an end may allow more silence.
    assert (a.silence, b.silence) == (5.0, 5.0)
    a.tolerate(30.0)
    assert a.silence == 30.0
    assert max(a.silent_for(), b.silent_for()) < 2
    assert isinstance(a.name, str)
    assert a.name
    assert a.window >= 16 << 10

    # What the window promises is taken without a reader, and not for ever.
    assert a.send_now(memoryview(bytes(1000)))
    a.send(memoryview(bytes(a.window - 1000)))
    while a.send_now(memoryview(bytes(1 << 20))):
        pass
    a.limit(0.05)
    with pytest.raises(TimeoutError) as told:
        a.send(memoryview(bytes(64 << 20)))
    assert told.value.errno is None
    a.close()
    b.close()

    # A wait has a limit when asked for one.
    listener.close()
    a, b, listener = make()
    a.limit(0.05)
    with pytest.raises(TimeoutError) as told:
        read(a, 1)
    assert told.value.errno is None

    # The end of the stream comes behind the last byte; afterwards sending fails.
    assert not a.arrives(0.01)
    arriving = in_thread(lambda: a.arrives(10))
    b.send(memoryview(b"the end"))
    assert arriving()
    b.shutdown()
    b.shutdown()
    a.limit(None)
    assert read(a, 100) == b"the end"
    assert a.arrives(10)
    assert a.receive_into(memoryview(bytearray(1))) == 0
    with pytest.raises(ConnectionError):  # noqa: PT012
        for _ in range(100):
            a.send(memoryview(bytes(1 << 20)))
    a.close()
    b.close()
    listener.close()

    # Shutting down wakes who receives, who sends, and who accepts.
    a, b, listener = make()
    receiving = in_thread(lambda: a.receive_into(memoryview(bytearray(1))))
    a.shutdown()
    assert receiving() == 0
    a.close()
    b.close()
    accepting = in_thread(listener.accept)
    listener.close()
    with pytest.raises(OSError) as told:  # noqa: PT011  any will do
        accepting()
    a, b, listener = make()
    while a.send_now(memoryview(bytes(1 << 16))):
        pass
    sending = in_thread(lambda: a.send(memoryview(bytes(64 << 20))))
    a.shutdown()
    with pytest.raises(ConnectionError):
        sending()
    a.close()
    b.close()
    listener.close()

    # A stream comes a second time when it has what was asked of it, or has ended; not when it is forgotten.
    a, b, listener = make()
    assert listener.accept(0.0) is None
    listener.await_bytes(b, 4)
    a.send(memoryview(b"one"))
    assert listener.accept(0.05) is None
    a.send(memoryview(b"more"))
    assert listener.accept(5) is b
    assert listener.accept(0.0) is None
    assert read(b, 7) == b"onemore"
    listener.await_bytes(b, 4)
    listener.forget(b)
    a.send(memoryview(b"many"))
    assert listener.accept(0.05) is None
    assert read(b, 4) == b"many"
    listener.await_bytes(b, 4)
    a.shutdown()
    assert listener.accept(5) is b
    assert b.receive_into(memoryview(bytearray(1))) == 0
    for one in (a, b, listener):
        one.close()


@pytest.mark.parametrize("make", [make_tcp, make_memory], ids=["tcp", "memory"])
def test_every_stream_conforms(make: Make) -> None:
    check_stream(make)


def test_a_listener_takes_a_port_of_its_range_and_names_the_range_when_it_is_full() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    ports = (first, first + 2)
    taken = []
    try:
        while len(taken) < 3:
            taken.append(tcp_stream.listen("127.0.0.1", ports))
            assert ports[0] <= taken[-1].address.port <= ports[1]
    except PortTaken:
        pass  # another process holds one of them; the range is full just the same
    with pytest.raises(PortTaken, match=f"no free port on 127.0.0.1 in {first}-{first + 2}: all 3 are in use"):
        tcp_stream.listen("127.0.0.1", ports)
    for listener in taken:
        listener.close()


def test_an_address_of_another_machine_is_refused_with_its_name() -> None:
    with pytest.raises(ConnectionFailed, match=r"cannot listen on 192.0.2.1 port 0: Cannot assign"):
        tcp_stream.listen("192.0.2.1", None)


def test_an_unknown_congestion_control_is_refused_with_those_that_are_allowed() -> None:
    with pytest.raises(UsageError, match=r"network.congestion: nonsense: the system refuses it .*; it allows .*reno"):
        tcp_stream.listen("127.0.0.1", None, "nonsense")


def congestion(stream: Any) -> bytes:
    """Return the name of a stream's congestion control."""
    with socket.socket(fileno=os.dup(stream.number)) as same:
        return same.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_congestion_control_reaches_both_ends() -> None:
    listener = tcp_stream.listen("127.0.0.1", None, "reno")
    dialled = tcp_stream.connect(listener.address, 5, "reno")
    accepted = listener.accept()
    for stream in (dialled, accepted):
        assert congestion(stream) == b"reno"
        stream.close()
    listener.close()


def test_left_to_itself_a_near_connection_never_runs_bbr() -> None:
    listener = tcp_stream.listen("127.0.0.1", None)
    dialled = tcp_stream.connect(listener.address, 5)
    accepted = listener.accept()
    for stream in (dialled, accepted):
        assert congestion(stream) != b"bbr"
        stream.close()
    listener.close()


def test_a_client_that_left_before_accept_is_no_error_of_the_listener() -> None:
    listener = tcp_stream.listen("127.0.0.1", None)
    for _ in range(3):
        with socket.create_connection((listener.address.host, listener.address.port), 5) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    dialled = tcp_stream.connect(listener.address, 5)
    accepted = listener.accept(5)
    assert accepted is not None
    dialled.send(memoryview(b"me"))
    assert read(accepted, 2) == b"me"
    for one in (dialled, accepted, listener):
        one.close()


def test_a_missing_listener_is_an_error_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", probe.getsockname()[1])
        with pytest.raises(ConnectionRefusedError):
            tcp_stream.connect(address, 5)


def test_what_may_wait_in_the_kernel_follows_the_rate_in_steps_and_within_bounds() -> None:
    assert [tcp_stream.may_wait(rate) for rate in (0, 25_000_000, 125_000_000)] == [128 << 10] * 3
    assert tcp_stream.may_wait(400_000_000) == 512 << 10
    assert tcp_stream.may_wait(10**12) == 2 << 20


def test_a_writer_of_much_data_to_a_near_reader_is_woken_less_often() -> None:
    """On loopback the limit is more than it began with after some MiB, so fewer wake-ups let a frame in."""
    listener = tcp_stream.listen("127.0.0.1", None)
    a = tcp_stream.connect(listener.address, 5)
    b = listener.accept()
    data = memoryview(bytearray(1 << 20))

    def limit() -> int:
        with socket.socket(fileno=os.dup(a.number)) as same:
            return same.getsockopt(socket.IPPROTO_TCP, tcp_stream.NOTSENT_LOWAT)

    assert limit() == tcp_stream.UNSENT
    reading = in_thread(lambda: read(b, 64 << 20))
    for _ in range(64):
        a.send(data)
    reading()
    found = limit()
    for stream in (a, b, listener):
        stream.close()
    assert found > tcp_stream.UNSENT, "loopback takes far more than 128 MB/s, whatever else the machine does"
