"""A line between two processes of one host: records over a Unix socket, which say what lies where in shared memory.

Theory. What processes of one host tell each other crosses no wire, so nothing is sealed: who is at the other end was
proven when the line was made, and the kernel lets nobody in between. A line carries records of a fixed head, some with
bytes behind them. It never waits: what the socket does not take is queued, and goes when the socket has room, which its
owner learns from a poll.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
from collections import deque
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError

PIECE, LENT, DONE, BYE = range(1, 5)
"""Kinds of records: bytes behind the head; bytes that lie in a segment; they were read there; goodbye."""

HEAD = struct.Struct("<BxxxIIQQ")
HELLO = struct.Struct("<I16s")
SECRET = 16
"""Bytes of the secret by which an end of a line shows that it is of the job."""

TOGETHER = 64
"""Pieces of records that one call hands to the socket."""

ROOM = 128 << 10
"""Bytes taken in at once; records with more bytes behind them get a place of their own."""

SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0010
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE: Linux 5.1."""
ADD_SEALS = 1033  # F_ADD_SEALS

LONGEST = 1 << 40
"""Bytes behind one head beyond which a record is damaged."""


class Record(NamedTuple):
    """One record. `size` bytes lie behind it (PIECE, BYE), or in a segment from `offset` on (LENT)."""

    kind: int
    tag: int
    segment: int
    offset: int
    size: int
    data: bytearray | None = None


class UnixChannel:
    """One end. Not for two threads at once.

    Args:
        connected: the socket, from `meet` or `answer`.
        name: of the other end, for messages.
    """

    def __init__(self, connected: socket.socket, name: str) -> None:
        connected.setblocking(False)
        self.name = name
        self.ended = ""
        """Why nothing more comes; "" while something may."""
        self.sent = self.left = 0
        """Records that were sent, and that the socket has taken."""
        self.bytes_sent = 0
        self._socket = connected
        self._queue: deque[tuple[memoryview, bool]] = deque()  # and whether it is the last of its record
        self._room = bytearray(ROOM)
        self._filled = 0
        self._long: tuple[Record, memoryview] | None = None  # a record whose bytes are coming, and where they go

    def fileno(self) -> int:
        """Return the socket's descriptor, to poll."""
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """Is something queued that the socket has not taken?"""
        return bool(self._queue)

    # ---- out -----------------------------------------------------------------------------------------------------

    def send(
        self, kind: int, tag: int = 0, segment: int = 0, offset: int = 0, size: int = 0, data: memoryview | None = None
    ) -> int:
        """Send a record, or queue what does not go at once; returns its number: it has left when `left` says so.

        Args:
            data: the bytes behind it (PIECE, BYE), `size` of them; not copied.
        """
        head = HEAD.pack(kind, tag, segment, offset, size)
        self.sent += 1
        self.bytes_sent += HEAD.size + (size if data is not None else 0)
        idle = not self._queue
        self._queue.append((memoryview(head), not data))
        if data:
            self._queue.append((data, True))
        if idle:
            self.flush()
        return self.sent

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._queue and not self.ended:
            try:
                count = self._socket.sendmsg([data for data, _ in islice(self._queue, TOGETHER)])
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error)
                return
            self._took(count)

    def _took(self, count: int) -> None:
        while count:
            data, last = self._queue.popleft()
            if count < len(data):
                self._queue.appendleft((data[count:], last))
                return
            count -= len(data)
            self.left += last

    # ---- in ------------------------------------------------------------------------------------------------------

    def receive(self) -> list[Record]:
        """Return the records that have come; never waits. At the end `ended` says why.

        Raises:
            ProtocolError: what came is no record.
        """
        try:
            if self._long is not None:
                return self._receive_long(*self._long)
            count = self._socket.recv_into(memoryview(self._room)[self._filled :])
        except BlockingIOError:
            return []
        except OSError as error:
            self._end(error)
            return []
        if not count:
            self.ended = self.ended or "its process ended"
            return []
        self._filled += count
        return self._records()

    def _receive_long(self, record: Record, place: memoryview) -> list[Record]:
        count = self._socket.recv_into(place)
        if not count:
            self.ended = self.ended or "its process ended"
            return []
        if count < len(place):
            self._long = record, place[count:]
            return []
        self._long = None
        return [record]

    def _records(self) -> list[Record]:
        found, at, room = [], 0, memoryview(self._room)
        while self._filled - at >= HEAD.size and self._long is None:
            record = Record(*HEAD.unpack_from(room, at))
            behind = record.size if record.kind in (PIECE, BYE) else 0
            if behind > LONGEST or not PIECE <= record.kind <= BYE:
                raise ProtocolError(f"{self.name}: sent what is no record")
            at += HEAD.size
            if behind:
                data = bytearray(behind)
                have = min(behind, self._filled - at)
                data[:have] = room[at : at + have]
                at += have
                record = record._replace(data=data)
                if have < behind:
                    self._long = record, memoryview(data)[have:]
                    break
            found.append(record)
        rest = self._filled - at
        if at and rest:
            self._room[:rest] = self._room[at : self._filled]
        self._filled = rest
        return found

    # ---- the end -------------------------------------------------------------------------------------------------

    def bye(self, reason: str) -> None:
        """Say goodbye, where that is possible at once."""
        data = memoryview(reason.encode()[:1000])
        self.send(BYE, size=len(data), data=data)

    def shutdown(self) -> None:
        """End both directions; what the socket has taken still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def _end(self, error: OSError) -> None:
        gone = isinstance(error, ConnectionError)
        self.ended = self.ended or ("its process ended" if gone else error.strerror or str(error))


# ---- how two ends meet -----------------------------------------------------------------------------------------------


def listen(folder: Path, name: str) -> socket.socket:
    """Listen in a folder that this user alone can enter."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        (folder / name).unlink(missing_ok=True)
        with _Short(folder) as short:
            made.bind(f"{short}/{name}")
        (folder / name).chmod(0o600)
        made.listen(256)
    except BaseException:
        made.close()
        raise
    return made


def meet(folder: Path, name: str, me: int, mine: bytes, theirs: bytes, timeout: float) -> socket.socket:
    """Connect to who listens as `name` in the folder.

    Args:
        me: our number.
        mine: our secret, which the other end shows us.
        theirs: its secret.
        timeout: seconds.

    Raises:
        PeerLost: nobody listens there, or who does has not our secret.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout)
        with _Short(folder) as short:
            made.connect(f"{short}/{name}")
        made.sendall(HELLO.pack(me, theirs))
        if not hmac.compare_digest(_exactly(made, SECRET), mine):
            raise PeerLost(f"{name}: who listens there is not of this job", where=name)
        return made
    except OSError as error:
        made.close()
        raise PeerLost(f"{name}: {error.strerror or error}", where=name) from error
    except BaseException:
        made.close()
        raise


def answer(connected: socket.socket, mine: bytes, secrets: dict[int, bytes], timeout: float) -> int:
    """Find out who connected, and show that we are who was meant; returns its number.

    Args:
        mine: our secret.
        secrets: of those who may come.
        timeout: seconds.

    Raises:
        ConnectionFailed: it is none of them.
    """
    try:
        connected.settimeout(timeout)
        number, shown = HELLO.unpack(_exactly(connected, HELLO.size))
        if number not in secrets or not hmac.compare_digest(shown, mine):
            raise ConnectionFailed("a process that is not of this job connected")
        connected.sendall(secrets[number])
        return int(number)
    except OSError as error:
        raise ConnectionFailed(f"who connected left: {error.strerror or error}") from error


def _exactly(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise ConnectionResetError("connection reset")
        data += part
    return data


class _Short:
    """A short path of a folder: an address of a Unix socket has at most 107 bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
