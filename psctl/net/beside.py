"""A line between two processes of one host: records over a Unix socket, and memory that the other end may read.

Theory. What processes of one host tell each other crosses no wire, so nothing is sealed: who is at the other end was
proven when the line was made, and the kernel lets nobody in between. A line carries records of a fixed head, some with
bytes behind them and some with a memory's descriptor. It never waits: what the socket does not take is queued, and goes
when the socket has room, which its owner learns from `poll`.
Memory is a memfd that its owner alone can write: it is sealed against a new writable map and against another size
before anybody gets its descriptor, so no reader can change it, nor make it end under another reader's hands. It is gone
with the last process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import socket
import struct
from collections import deque
from pathlib import Path
from typing import NamedTuple

from psctl.errors import ConnectionFailed, PeerLost, ProtocolError

PIECE, LENT, DONE, MEMORY, BYE = range(1, 6)
"""Kinds of records: bytes behind the head; bytes that lie in a memory; they were read there; a memory; goodbye."""

HEAD = struct.Struct("<BxHIQQ")
HELLO = struct.Struct("<I16s")
SECRET = 16
"""Bytes of the secret by which an end of a line shows that it is of the job."""

ROOM = 128 << 10
"""Bytes taken in at once; records with more bytes behind them get a place of their own."""

SEALS = 0x0001 | 0x0002 | 0x0004 | 0x0010
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE: Linux 5.1."""
ADD_SEALS = 1033  # F_ADD_SEALS

LONGEST = 1 << 40
"""Bytes behind one head, and bytes of one memory, beyond which a record is damaged."""


class Record(NamedTuple):
    """One record. `data` are the bytes behind it, a memory for MEMORY; `tag`, `first`, `second` are its kind's."""

    kind: int
    memory: int
    tag: int
    first: int
    second: int
    data: bytearray | mmap.mmap | None = None


class Line:
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
        self._queue: deque[tuple[memoryview, int | None, bool]] = deque()  # with a descriptor; the last of its record
        self._room = bytearray(ROOM)
        self._filled = 0
        self._descriptors: deque[int] = deque()
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
        self, kind: int, memory: int = 0, tag: int = 0, first: int = 0, second: int = 0,
        data: memoryview | None = None, descriptor: int | None = None,
    ) -> int:  # fmt: skip
        """Send a record, or queue what does not go at once; returns its number: it has left when `left` says so.

        Args:
            data: the bytes behind it (PIECE, BYE); not copied.
            descriptor: of a memory.
        """
        head = HEAD.pack(kind, memory, tag, first, second)
        self.sent += 1
        self.bytes_sent += HEAD.size + (len(data) if data is not None else 0)
        self._queue.append((memoryview(head), descriptor, data is None))
        if data is not None:
            self._queue.append((data, None, True))
        if len(self._queue) <= 2:
            self.flush()
        return self.sent

    def flush(self) -> None:
        """Send what the socket takes now."""
        queue = self._queue
        while queue and not self.ended:
            parts, descriptor = [queue[0][0]], queue[0][1]
            if len(queue) > 1 and queue[1][1] is None:
                parts.append(queue[1][0])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, "little"))] if descriptor else []
            try:
                count = self._socket.sendmsg(parts, ancillary, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error)
                return
            self._took(count)

    def _took(self, count: int) -> None:
        while count:
            data, _, last = self._queue[0]
            if count < len(data):
                self._queue[0] = (data[count:], None, last)
                return
            count -= len(data)
            self.left += last
            self._queue.popleft()
        while self._queue and not self._queue[0][0]:  # no bytes behind a head
            self.left += self._queue.popleft()[2]

    # ---- in ------------------------------------------------------------------------------------------------------

    def receive(self) -> list[Record]:
        """Return the records that have come; never waits. At the end `ended` says why.

        Raises:
            ProtocolError: what came is no record.
        """
        try:
            if self._long is not None:
                return self._receive_long(*self._long)
            room = memoryview(self._room)[self._filled :]
            count, ancillary, _, _ = self._socket.recvmsg_into([room], socket.CMSG_SPACE(4 * 8))
        except BlockingIOError:
            return []
        except OSError as error:
            self._end(error)
            return []
        for _, _, data in ancillary:
            self._descriptors.extend(
                int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data) // 4 * 4, 4)
            )
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
            record = Record._make((*HEAD.unpack_from(room, at), None))
            behind = record.first if record.kind in (PIECE, BYE) else 0
            if behind > LONGEST or record.second > LONGEST or not PIECE <= record.kind <= BYE:
                raise ProtocolError(f"{self.name}: sent what is no record")
            at += HEAD.size
            if record.kind == MEMORY:
                record = record._replace(data=self._map(record.first))
            elif behind:
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

    def _map(self, size: int) -> mmap.mmap:
        if not self._descriptors:
            raise ProtocolError(f"{self.name}: sent no descriptor of a memory")
        return map_memory(self._descriptors.popleft(), size, self.name)

    # ---- the end -------------------------------------------------------------------------------------------------

    def bye(self, reason: str) -> None:
        """Say goodbye, where that is possible at once."""
        data = memoryview(reason.encode()[:1000])
        self.send(BYE, first=len(data), data=data)

    def shutdown(self) -> None:
        """End both directions; what the socket has taken still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _end(self, error: OSError) -> None:
        gone = isinstance(error, ConnectionError)
        self.ended = self.ended or ("its process ended" if gone else error.strerror or str(error))


# ---- memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """Memory of ours that others on this host may read; all zero at first.

    Args:
        size: bytes, at least 1.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("psctl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        self.map = mmap.mmap(self.descriptor, size)
        fcntl.fcntl(self.descriptor, ADD_SEALS, SEALS)


def map_memory(descriptor: int, size: int, whose: str) -> mmap.mmap:
    """Map another's memory to read it; takes the descriptor over.

    Raises:
        ProtocolError: it is smaller than was said, or its owner could make it so.
    """
    try:
        if not 0 < size <= os.fstat(descriptor).st_size:
            raise ProtocolError(f"{whose}: its memory is smaller than it said")
        if fcntl.fcntl(descriptor, ADD_SEALS + 1) & SEALS != SEALS:
            raise ProtocolError(f"{whose}: its memory is not sealed, so it may end while it is read")
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


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
