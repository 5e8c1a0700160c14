"""Channels between two workers of one host: records over a Unix socket, which name bytes in shared memory.

Records within a host cross no wire, so they are not sealed: both ends proved themselves when the channel was made, and
the kernel lets no other process in between. A record has a fixed head; some are followed by bytes. A channel never
blocks: bytes that the socket does not take are queued and sent when it has space, which its owner learns from a poll.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError
from psctl.job.training_messages import WorkerAt
from psctl.transport.protocol import preauth
from psctl.types import Member

PIECE, SHARED, DONE, BYE = range(1, 5)
"""Kinds of records: bytes after the head; bytes in a segment; those bytes were read; the end."""

HEAD = struct.Struct("<BxxxIIQQ")
RANK = struct.Struct("<I")
"""The connecting worker's rank, before its proof."""

TOGETHER = 64
"""Parts of records that one call passes to the socket."""

BUFFER = 128 << 10
"""Bytes received at once; longer records get a buffer of their own."""

LONGEST = 1 << 40
"""Bytes after a head beyond which a record is invalid."""


class Record(NamedTuple):
    """One record. `size` bytes follow it (PIECE, BYE), or are in a segment from `offset` on (SHARED)."""

    kind: int
    tag: int
    segment: int
    offset: int
    size: int
    data: bytearray | None = None


class UnixChannel:
    """One end of a channel. Not for two threads at once.

    Args:
        connected: the socket.
        name: of the other end, for messages.
    """

    def __init__(self, connected: socket.socket, name: str) -> None:
        connected.setblocking(False)
        self.name = name
        self.ended = ""
        """Why the channel ended; "" while it has not."""
        self._refused = False  # a send has failed
        self.sent = 0
        """Records that were passed to `send`."""
        self.written = 0
        """Records that the socket has taken."""
        self.bytes_sent = self.bytes_received = 0
        self._socket = connected
        self._queue: deque[tuple[memoryview, bool]] = deque()  # and whether it is the last of its record
        self._buffer = bytearray(BUFFER)
        self._filled = 0
        self._long: tuple[Record, memoryview] | None = None  # a record whose bytes are arriving, and where they go

    def fileno(self) -> int:
        """Return the socket's descriptor, to poll."""
        return self._socket.fileno()

    @property
    def has_queued(self) -> bool:
        """Return whether records are queued that the socket has not taken."""
        return bool(self._queue)

    # ---- out -----------------------------------------------------------------------------------------------------

    def send(
        self, kind: int, tag: int = 0, segment: int = 0, offset: int = 0, size: int = 0, data: memoryview | None = None
    ) -> int:
        """Send a record, or queue what the socket does not take; returns its number, which `written` reaches later.

        Args:
            data: the `size` bytes after the head (PIECE, BYE); not copied.
        """
        head = HEAD.pack(kind, tag, segment, offset, size)
        self.sent += 1
        self.bytes_sent += HEAD.size + (size if data is not None else 0)
        if self._refused:
            return self.sent
        idle = not self._queue
        self._queue.append((memoryview(head), not data))
        if data:
            self._queue.append((data, True))
        if idle:
            self.flush()
        return self.sent

    def flush(self) -> None:
        """Send queued bytes that the socket takes now."""
        while self._queue and not self.ended:
            try:
                count = self._socket.sendmsg([data for data, _ in islice(self._queue, TOGETHER)])
            except BlockingIOError:
                return
            except OSError:
                self._queue.clear()
                self._refused = True  # `receive` finds the end, after the peer's reason for it
                return
            self._advance(count)

    def _advance(self, count: int) -> None:
        while count:
            data, last = self._queue.popleft()
            if count < len(data):
                self._queue.appendleft((data[count:], last))
                return
            count -= len(data)
            self.written += last

    # ---- in ------------------------------------------------------------------------------------------------------

    def receive(self) -> list[Record]:
        """Return the records that have arrived; never blocks. `ended` is set at the end.

        Raises:
            ProtocolError: the bytes are not a record.
        """
        try:
            if self._long is not None:
                return self._receive_long(*self._long)
            count = self._socket.recv_into(memoryview(self._buffer)[self._filled :])
        except BlockingIOError:
            return []
        except OSError as error:
            self._end(error)
            return []
        if not count:
            self.ended = self.ended or "its process ended"
            return []
        self._filled += count
        self.bytes_received += count
        return self._records()

    def _receive_long(self, record: Record, rest: memoryview) -> list[Record]:
        count = self._socket.recv_into(rest)
        if not count:
            self.ended = self.ended or "its process ended"
            return []
        self.bytes_received += count
        if count < len(rest):
            self._long = record, rest[count:]
            return []
        self._long = None
        return [record]

    def _records(self) -> list[Record]:
        found, at, buffer = [], 0, memoryview(self._buffer)
        while self._filled - at >= HEAD.size and self._long is None:
            record = Record(*HEAD.unpack_from(buffer, at))
            following = record.size if record.kind in (PIECE, BYE) else 0
            if following > LONGEST or not PIECE <= record.kind <= BYE:
                raise ProtocolError(f"{self.name}: sent an invalid record")
            at += HEAD.size
            if following:
                data = bytearray(following)
                have = min(following, self._filled - at)
                data[:have] = buffer[at : at + have]
                at += have
                record = record._replace(data=data)
                if have < following:
                    self._long = record, memoryview(data)[have:]
                    break
            found.append(record)
        rest = self._filled - at
        if at and rest:
            self._buffer[:rest] = self._buffer[at : self._filled]
        self._filled = rest
        return found

    # ---- the end -------------------------------------------------------------------------------------------------

    def send_bye(self, reason: str) -> None:
        """Send the reason of the end."""
        data = memoryview(reason.encode()[:1000])
        self.send(BYE, size=len(data), data=data)

    def shutdown(self) -> None:
        """End both directions; bytes that the socket has taken still arrive."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _end(self, error: OSError) -> None:
        gone = isinstance(error, ConnectionError)
        self.ended = self.ended or ("its process ended" if gone else error.strerror or str(error))


class ChannelListener:
    """Accepts and makes channels between the workers of one host.

    Each worker listens in a folder that only this user can enter, under its rank and incarnation, and passes its secret
    to the other workers of its host through the coordinator. Both ends prove themselves by the preauth challenge
    (transport/protocol/preauth.py): the connecting end with the secret of the listening end, and the reverse.

    Args:
        folder: the same for all processes of this host.
        me: this worker.
        purpose: keeps the sockets of different uses apart.
    """

    def __init__(self, folder: Path, me: Member, purpose: str) -> None:
        self._folder, self._me, self._purpose = folder, me, purpose
        self._path = folder / self._name(me.rank, me.incarnation)
        self.secret = os.urandom(preauth.SECRET)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            with _short_path(folder) as short:
                self._socket.bind(f"{short}/{self._path.name}")
            self._path.chmod(0o600)
            self._socket.listen(256)
        except BaseException:
            self._socket.close()
            raise

    def _name(self, rank: int, incarnation: int) -> str:
        return f"worker-{rank}-{incarnation}.{self._purpose}"

    def connect(self, other: WorkerAt, timeout: float) -> UnixChannel:
        """Connect to another worker of this host within `timeout` seconds.

        Raises:
            PeerLost: it does not listen, or the listening process does not have this worker's secret.
        """
        name = self._name(other.rank, other.incarnation)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(timeout)
            with _short_path(self._folder) as short:
                made.connect(f"{short}/{name}")
            greeting = _receive_exactly(made, preauth.GREETING)
            made.sendall(RANK.pack(self._me.rank) + preauth.answer(other.secret.hex(), greeting))
            if not preauth.is_answer(self.secret.hex(), greeting, _receive_exactly(made, preauth.ANSWER)):
                raise PeerLost(f"{name}: the process that listens there is not of this job", where=name)
            return UnixChannel(made, f"worker/{other.rank}")
        except OSError as error:
            made.close()
            raise PeerLost(f"{name}: {error.strerror or error}", where=name) from error
        except BaseException:
            made.close()
            raise

    def accept(
        self, known: Callable[[], Iterable[WorkerAt]], timeout: float, patience: float | None = None
    ) -> tuple[WorkerAt, UnixChannel]:
        """Accept a connection of a known worker.

        Args:
            known: returns the workers that may connect, once a connection has arrived.
            timeout: seconds for the proofs.
            patience: seconds to wait for a connection; None: until the listener is closed.

        Raises:
            TimeoutError: no connection arrived within `patience`.
            OSError: the listener was closed, or descriptors are short.
            ConnectionFailed: the other end is not a known worker; others may still connect.
        """
        self._socket.settimeout(patience)
        connected, _ = self._socket.accept()
        try:
            connected.settimeout(timeout)
            greeting = preauth.greet()
            connected.sendall(greeting)
            (rank,) = RANK.unpack(_receive_exactly(connected, RANK.size))
            proof = _receive_exactly(connected, preauth.ANSWER)
            other = next((each for each in known() if each.rank == rank), None)
            if other is None or not preauth.is_answer(self.secret.hex(), greeting, proof):
                raise ConnectionFailed("a process that is not of this job connected")
            connected.sendall(preauth.answer(other.secret.hex(), greeting))
            return other, UnixChannel(connected, f"worker/{rank}")
        except OSError as error:
            connected.close()
            raise ConnectionFailed(f"the connecting process ended: {error.strerror or error}") from error
        except BaseException:
            connected.close()
            raise

    def shutdown(self) -> None:
        """Wake a thread in `accept`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _receive_exactly(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise ConnectionResetError("connection reset")
        data += part
    return data


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder: the address of a Unix socket has at most 107 bytes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
