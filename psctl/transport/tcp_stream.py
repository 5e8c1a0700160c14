"""TCP streams: a peer that is long silent is an error; the window is a size that the socket's buffer really holds."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import select
import socket
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from psctl.errors import ConnectionFailed, PortTaken, UsageError
from psctl.transport.protocol.frames import Bytes
from psctl.transport.stream import SILENCE, Stream
from psctl.types import Address

BUFFER = 8 << 20
"""Bytes of receive buffer to request; the kernel doubles the number for its bookkeeping and reports the double."""
SHARE = 4
"""The window is the kernel's reported buffer divided by this: half is bookkeeping, half of the rest is reserve."""
RCVBUFFORCE = 33  # SO_RCVBUFFORCE, not in the socket module
BBR_FROM = 5_000
"""Microseconds of round-trip time from which `congestion: auto` keeps BBR where it is the system's default. Below it
reno is used: the shares of several BBR streams to one receiver differ by a factor of two and more, and a sum waits for
the slowest (4 workers and 4 servers, 200 Mbit/s, both directions busy: 1.4 times the wire's time, reno 1.05)."""
NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT, not in the socket module
UNSENT = 128 << 10
"""Smallest limit of unsent bytes in the kernel's buffer. Urgent messages and credit overtake others only before they
are in that buffer. Without a limit it holds megabytes: when both directions are busy, each waits for credit that is
queued behind the other's data."""
MOST_UNSENT = 2 << 20
"""Largest limit of unsent bytes in the kernel's buffer."""
TURN = 0.002
"""Seconds of sending at the current rate for which unsent bytes may be buffered. The writer wakes each time that the
limit admits more bytes: a limit of 128 KiB costs several wake-ups per frame at 1 GB/s."""
LOOK = 4 << 20
"""Bytes sent between two measurements of the rate."""
LUMP = 128 << 10
"""Missing bytes of a frame from which on a reader sleeps until all have arrived: one wake-up in place of eight."""
THIN_LINEAR = 16  # TCP_THIN_LINEAR_TIMEOUTS: small streams do not double their first six attempts
TCP_INFO_DATA, TCP_INFO_ACK = 52, 56  # offsets of tcpi_last_data_recv and tcpi_last_ack_recv, 4 bytes each
TCP_INFO_RTT = 68  # offset of tcpi_rtt, 4 bytes, in the result of TCP_INFO
TCP_INFO_RATE = 160  # offset of tcpi_delivery_rate, 8 bytes
RTO_MAX_MS = 44  # TCP_RTO_MAX_MS, not in the socket module; Linux 6.15
RETRY = 1000
"""Milliseconds between two retransmissions, at most. By default they double: 0.2, 0.6, 1.4, 3.0, 6.2 s, so after a link
failure of 3 s no retransmission would be made before SILENCE is over."""
BACKLOG = 256
LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept(2) that mean a lack of system resources, not a fault of the connection."""


class TcpStream:
    """A connected TCP socket.

    Args:
        connected: the socket, blocking.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.name = _text(connected.getpeername())
        self.window = connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // SHARE
        self.silence = SILENCE
        self._least = 1  # SO_RCVLOWAT
        self._unsent = UNSENT  # TCP_NOTSENT_LOWAT
        self._until_look = LOOK
        self._arrives = select.poll()
        self._arrives.register(connected, select.POLLIN)

    def tolerate(self, silence: float) -> None:
        self.silence = silence
        with contextlib.suppress(OSError):  # closed
            _tolerate(self._socket, silence)

    def silent_for(self) -> float:
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_ACK + 4)
        except OSError:  # closed
            return 0.0
        times = (int.from_bytes(info[at : at + 4], sys.byteorder) for at in (TCP_INFO_DATA, TCP_INFO_ACK))
        return min(times) / 1000

    def send(self, data: memoryview) -> None:
        self._socket.sendall(data)
        self._count(len(data))

    def send_parts(self, parts: Sequence[Bytes]) -> int:
        left, total = deque(memoryview(part) for part in parts), 0
        while left:
            count = self._socket.sendmsg(left)
            total += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]
        self._count(total)
        return total

    def _count(self, sent: int) -> None:
        self._until_look -= sent
        if self._until_look <= 0:
            self._until_look = LOOK
            self._follow_rate()

    def _follow_rate(self) -> None:
        """Set the limit of unsent bytes in the kernel for the rate at which the peer received the last bytes."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RATE + 8)
        unsent = may_wait(int.from_bytes(info[TCP_INFO_RATE:], sys.byteorder))  # an older kernel reports none: 0
        if unsent != self._unsent:
            self._socket.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, unsent)
            self._unsent = unsent

    def send_now(self, data: memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def in_flight(self) -> int:
        try:
            return int.from_bytes(fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except (OSError, ValueError):  # closed
            return 0

    @property
    def number(self) -> int:
        """Its descriptor."""
        return self._socket.fileno()

    def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        while least >= LUMP:  # sleep in poll: a recv that has received a part is not woken for the rest alone
            self.wake_at(least)
            self._arrives.poll()
            with contextlib.suppress(BlockingIOError):
                return self._socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
        if self._least != 1:
            self.wake_at(1)
        return self._socket.recv_into(buffer)

    def arrives(self, seconds: float) -> bool:
        if self._least != 1:
            self.wake_at(1)
        return bool(self._arrives.poll(1000 * seconds))

    def wake_at(self, least: int) -> None:
        """Have the kernel wake a waiting reader only when `least` bytes have arrived, or the end."""
        if least != self._least:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def limit(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # the connection may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TcpListener:
    """A listening TCP socket."""

    def __init__(self, listening: socket.socket, congestion: str) -> None:
        self._socket = listening
        self._congestion = congestion
        host, port = listening.getsockname()[:2]
        self.address = Address(host, port)
        listening.setblocking(False)
        self._arrives = select.poll()
        self._arrives.register(listening, select.POLLIN)
        self._awaited: dict[int, TcpStream] = {}  # by descriptor
        self._ending = threading.Lock()
        self._waiting = False
        self._closed = False

    def accept(self, seconds: float | None = None) -> TcpStream | None:
        with self._ending:
            self._waiting = not self._closed
        try:
            return self._next(None if seconds is None else time.monotonic() + seconds)
        finally:
            with self._ending:  # closed meanwhile: `close` has kept the descriptor open for this thread's poll
                self._waiting = False
                if self._closed:
                    self._socket.close()

    def _next(self, deadline: float | None) -> TcpStream | None:
        while not self._closed:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            there = self._arrives.poll(None if left is None else math.ceil(left))
            if not there:
                return None
            awaited = next((self._awaited[number] for number, _ in there if number in self._awaited), None)
            if awaited is not None:
                self.forget(awaited)
                return awaited
            with contextlib.suppress(BlockingIOError):  # the connection has ended already
                if (found := self._accept_one()) is not None:
                    return found
        raise OSError(errno.EINVAL, "the listener was closed")

    def await_bytes(self, stream: Stream, least: int) -> None:
        assert isinstance(stream, TcpStream), "a stream of this listener"
        stream.wake_at(least)
        self._awaited[stream.number] = stream
        self._arrives.register(stream.number, select.POLLIN)

    def forget(self, stream: Stream) -> None:
        assert isinstance(stream, TcpStream), "a stream of this listener"
        self._arrives.unregister(stream.number)
        del self._awaited[stream.number]

    def _accept_one(self) -> TcpStream | None:
        """Accept the next connection; None when it has ended already."""
        connected, _ = self._socket.accept()
        try:
            connected.setblocking(True)
            _quicken(connected)
            if self._congestion == "auto":
                _leave_bbr(connected)
            return TcpStream(connected)
        except OSError as error:
            connected.close()
            if error.errno in LACKING:
                raise
            return None
        except BaseException:
            connected.close()
            raise

    def close(self) -> None:
        with self._ending:
            self._closed = True
            with contextlib.suppress(OSError):  # wakes accept()
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._waiting:
                self._socket.close()


def connect(address: Address, timeout: float, congestion: str = "auto") -> TcpStream:
    """Connect to `address` within `timeout` seconds.

    Raises:
        OSError: the connection is refused, there is no route, or no answer in time.
        UsageError: the system refuses this congestion control.
    """
    made = socket.socket(_family(address.host), socket.SOCK_STREAM)
    try:
        _prepare(made, congestion)
        _quicken(made)
        made.settimeout(timeout)
        made.connect((address.host, address.port))
        made.settimeout(None)
        if congestion == "auto":
            _leave_bbr(made)
        return TcpStream(made)
    except BaseException:
        made.close()
        raise


def listen(host: str, ports: tuple[int, int] | None, congestion: str = "auto") -> TcpListener:
    """Listen on `host` (numeric; never all addresses), on the first free port of the inclusive range, or on any.

    Raises:
        PortTaken: no port of the range is free.
        ConnectionFailed: the address is not of this machine.
        UsageError: the system refuses this congestion control.
    """
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        made = socket.socket(_family(host), socket.SOCK_STREAM)
        try:
            _prepare(made, congestion)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(BACKLOG)
            return TcpListener(made, congestion)
        except OSError as error:
            made.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConnectionFailed(f"cannot listen on {host} port {port}: {error.strerror}", where=host) from error
        except BaseException:
            made.close()
            raise
    raise PortTaken(
        f"no free port on {host} in {first}-{last}: all {last - first + 1} are in use",
        hint=f"see which processes use them with `ss -ltnp`, or widen network.ports ({first}-{last})",
        where=host,
    )


def may_wait(rate: int) -> int:
    """Return the limit of unsent bytes in the kernel at a rate in bytes/s; in steps of a factor 2, as rates vary."""
    unsent = UNSENT
    while unsent < MOST_UNSENT and 2 * unsent <= rate * TURN:
        unsent *= 2
    return unsent


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _text(name: tuple[object, ...]) -> str:
    return f"[{name[0]}]:{name[1]}" if ":" in str(name[0]) else f"{name[0]}:{name[1]}"


def _prepare(made: socket.socket, congestion: str) -> None:
    """Set the options that must be set before TCP's handshake (buffers fix its window scale); accepted sockets inherit
    them."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    with contextlib.suppress(PermissionError):  # beyond net.core.rmem_max only with CAP_NET_ADMIN
        made.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, BUFFER)
    if congestion == "auto":
        return
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
        names = ", ".join(allowed.read_text().split()) if allowed.exists() else "unknown"
        raise UsageError(
            f"network.congestion: {congestion}: the system refuses it ({error.strerror}); it allows {names}",
            hint="choose one of these or `auto`, or let an administrator allow it",
        ) from error


def _quicken(made: socket.socket) -> None:
    """Send small messages at once, and detect a peer that vanishes, also on an idle connection."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (NOTSENT_LOWAT, UNSENT),
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    _tolerate(made, SILENCE)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((RTO_MAX_MS, RETRY), (THIN_LINEAR, 1)):
        with contextlib.suppress(OSError):  # older kernel: a link failure of over 3 s may end the connection
            made.setsockopt(socket.IPPROTO_TCP, option, value)


def _tolerate(made: socket.socket, silence: float) -> None:
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(127, max(1, round(silence) - 1)))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence))


def _leave_bbr(made: socket.socket) -> None:
    """Use reno in place of a default BBR when the peer is near; see BBR_FROM."""
    if made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") != b"bbr":
        return
    info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RTT + 4)
    if int.from_bytes(info[TCP_INFO_RTT:], sys.byteorder) < BBR_FROM:
        with contextlib.suppress(OSError):  # not allowed here: BBR works too, only slower
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
