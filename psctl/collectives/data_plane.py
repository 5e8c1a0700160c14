"""psctl's own data plane for collectives on the CPU: lines and shared memory inside a host, sealed streams between.

Theory. Within a host nothing long is sent. Vectors lie in memory that all processes of the host may read (`buffer`), a
send is a record that says where, and the receiver sums or copies straight from there and says when it has. So a
schedule's reduce reads each operand once, where its owner wrote it. Short pieces travel in the record itself: copies
cost less than the word that a piece may be overwritten. Between hosts pieces travel in parts over a sealed stream,
each straight into the place that was posted for it.

Who waits looks after everyone: one thread polls all lines, takes in all that comes and sends what was queued, whatever
it is that it waits for itself. So no sender is held up by a receiver that waits for somebody else, and nothing here can
wait in a circle that the schedule has not.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from psctl.collectives.channel import UNUSED_TAG, Parcel, PendingTransfer
from psctl.collectives.sealed_pieces import SealedStreams
from psctl.collectives.shm_exchange import SLOT, ShmExchange, possible, room
from psctl.errors import ProtocolError
from psctl.ps.pieces import bytes_view
from psctl.transport.shared_allocator import SharedAllocator
from psctl.transport.unix_channel import BYE, DONE, LENT, PIECE, Record, UnixChannel
from psctl.types import Member

INLINE = 64 << 10
"""Bytes of a piece up to which it travels in its record. Recursive doubling of 64 KB by four ranks: 0.12 ms so, 0.35 ms
lent and given back."""

GOODBYE = 5.0
"""Seconds that a goodbye waits for what others have not taken yet."""

BOARD = UNUSED_TAG - 1
"""The tag with which rank 0 says where the board lies."""

T = TypeVar("T")


class DataPlane:
    """One process's end of it; a `Channel`. May be called from several threads.

    Args:
        me: the rank of this process.
        lines: to processes of this host, by rank.
        shared: memory that processes of this host may read.
        members: the other processes of this host, by rank.
        sealed: streams to processes of other hosts.
        world: number of ranks; rank 0's process plays the nodes behind them, a schedule's helpers.
    """

    ahead = True

    def __init__(
        self,
        me: int,
        world: int,
        lines: Mapping[int, UnixChannel],
        shared: SharedAllocator,
        members: Mapping[int, Member],
        sealed: SealedStreams | None = None,
    ) -> None:
        self.me, self._world = me, world
        self._lines, self._sealed = dict(lines), sealed
        self._shared, self._members = shared, members
        self._buffers: dict[int, memoryview] = {}  # shared ones, by address
        self._changed = threading.Condition()  # entered again where a stream's writer is the sender itself
        self._arrived: dict[tuple[int, int], deque[BorrowedPiece]] = {}
        self._lent: dict[tuple[int, int], int] = {}  # (peer, tag) -> pieces that were lent
        self._returned: dict[tuple[int, int], int] = {}  # of these, how many were given back
        self._broken = ""
        self._awaited: list[int] = []  # by the threads that wait now
        self._polling = False
        self._board: ShmExchange | None = None
        self._board_asked = not possible() or len(self._lines) != world - 1
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._by_descriptor = {line.fileno(): rank for rank, line in self._lines.items()}
        self._events = dict.fromkeys(self._by_descriptor, select.EPOLLIN)
        for descriptor, events in self._events.items():
            self._poll.register(descriptor, events)
        if sealed is not None:
            sealed.begin(self._changed, self._awake)

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a vector of zeros that other processes of this host read where it is, if they can."""
        size = length * dtype.itemsize
        part = self._shared.allocate(size, zeroed=True) if size and self._members else None
        if part is None:
            return torch.zeros(length, dtype=dtype)
        made = torch.frombuffer(part, dtype=dtype)
        self._buffers[made.data_ptr()] = part
        return made

    def release(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take back buffers that nothing uses any more."""
        for each in buffers:
            part = self._buffers.pop(each.data_ptr(), None)
            if part is not None:
                self._shared.release(part)

    def _process(self, node: int) -> int:
        return node if node < self._world else 0

    # ---- the channel ---------------------------------------------------------------------------------------------

    def lends(self, peer: int) -> bool:
        return self._process(peer) in self._lines

    def borrow(self, peer: int, tag: int) -> BorrowedPiece:
        key = self._process(peer), tag
        arrived = self._arrived

        def look() -> BorrowedPiece | None:
            found = arrived.get(key)
            return found.popleft() if found else None

        return self._until(look, key[0])

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        with self._changed:
            if self._broken:
                raise RuntimeError(self._broken)
            return [self._send(one) for one in sends] + [self._expect(one) for one in receives]

    def _send(self, one: Parcel) -> PendingTransfer:
        peer = self._process(one.peer)
        line = self._lines.get(peer)
        if line is None:
            assert self._sealed is not None, "a rank of another host"
            return _Sealing(self, peer, self._sealed.send(peer, one.tag, bytes_view(one.piece)))
        size = one.piece.nbytes
        where = self._shared.locate(one.piece.data_ptr(), size) if size > INLINE else None
        if where is None:
            number = line.send(PIECE, one.tag, size=size, data=bytes_view(one.piece))
            self._watch(line)
            return _Leaving(self, peer, number)
        key = peer, one.tag
        self._lent[key] = self._lent.get(key, 0) + 1
        line.send(LENT, one.tag, *where, size)
        self._watch(line)
        return _Lent(self, key, self._lent[key])

    def _expect(self, one: Parcel) -> PendingTransfer:
        peer = self._process(one.peer)
        assert self._sealed is not None, "what is lent is borrowed, not received"
        return _Sealing(self, peer, self._sealed.expect(peer, one.tag, bytes_view(one.piece)))

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        assert isinstance(pending, _Sealing), "what is lent is borrowed, not received"
        return pending.await_first(size)

    def board(self, size: int) -> ShmExchange | None:
        if not 0 < size <= SLOT:
            return None
        if not self._board_asked:
            self._board_asked = True
            memory = self._board_memory()
            self._board = None if memory is None else ShmExchange(memory, self.me, self._world, self._look)
        return self._board

    def _board_memory(self) -> torch.Tensor | None:
        """Return what rank 0 lends everyone; None where the host has no memory to share."""
        if self.me:
            loan = self.borrow(0, BOARD)
            return loan.read(torch.uint8) if loan.owed else None
        memory = self.buffer(room(self._world), torch.uint8)
        there = self._shared.locate(memory.data_ptr(), memory.nbytes) is not None
        self.post([Parcel(memory if there else memory[:1], peer, BOARD) for peer in self._lines], ())
        return memory if there else None

    def _look(self) -> None:
        """Take in what has come; raise when a process is gone."""
        with self._changed:
            if not self._polling:
                self._take_in(0.0)
            if self._broken:
                raise RuntimeError(self._broken)
            for peer, line in self._lines.items():
                if line.ended:
                    raise RuntimeError(f"worker/{peer}: {line.ended}")

    def abort(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            for line in self._lines.values():
                line.send_bye(reason)
                line.shutdown()
            self._changed.notify_all()
        if self._sealed is not None:
            self._sealed.close(reason, 0.0)
        self._awake()

    def close(self) -> None:
        """Leave: what was sent still arrives. Nobody waits here any more."""
        for rank, line in self._lines.items():
            line.send_bye("it has finished")
            with_time = threading.Timer(GOODBYE, line.shutdown)
            with_time.start()
            try:
                self._until(lambda line=line: True if not line.has_queued or line.ended else None, rank)  # type: ignore[misc]
            except RuntimeError:
                pass  # it left first
            finally:
                with_time.cancel()
        self._broken = self._broken or "closed"
        if self._sealed is not None:
            self._sealed.close("done", GOODBYE)
        for line in self._lines.values():
            line.close()
        self._poll.close()
        os.close(self._wake)

    @property
    def bytes_moved(self) -> int:
        """Bytes that were sent and received over streams, and sent over lines; what is lent does not move."""
        streams = self._sealed.bytes_moved if self._sealed is not None else 0
        return streams + sum(line.bytes_sent for line in self._lines.values())

    # ---- waiting -------------------------------------------------------------------------------------------------

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that a thread of this process waits for now."""
        board = self._board.behind if self._board is not None else ()
        return tuple({*self._awaited, *board} - {self.me})

    def returned(self, key: tuple[int, int], count: int) -> None:
        """Wait until so many of the pieces that were lent were given back."""
        self._until(lambda: True if self._returned.get(key, 0) >= count else None, key[0])

    def has_left(self, peer: int, number: int) -> None:
        """Wait until a line's record has left."""
        line = self._lines[peer]
        if line.written < number:
            self._until(lambda: True if line.written >= number else None, peer)

    def give_back(self, peer: int, tag: int) -> None:
        """Say that what was lent may be overwritten."""
        with self._changed:
            line = self._lines[peer]
            line.send(DONE, tag)
            self._watch(line)

    def _until(self, look: Callable[[], T | None], peer: int) -> T:
        """Wait for something that `peer` brings, and take in what comes meanwhile."""
        with self._changed:
            if (found := look()) is not None:
                return found
            self._awaited.append(peer)
            try:
                while (found := look()) is None:
                    if self._broken:
                        raise RuntimeError(self._broken)
                    if why := self._gone(peer):
                        raise RuntimeError(f"worker/{peer}: {why}")
                    if not self._lines or self._polling:
                        self._changed.wait()
                    else:
                        self._take_in()
                return found
            finally:
                self._awaited.remove(peer)

    def _gone(self, peer: int) -> str:
        line = self._lines.get(peer)
        if line is not None:
            return line.ended
        return self._sealed.gone(peer) if self._sealed is not None else ""

    def _take_in(self, timeout: float | None = None) -> None:
        """Wait for whatever comes, at most so many seconds (None: for ever), with the lock given up meanwhile."""
        self._polling = True
        self._changed.release()
        try:
            ready = self._poll.poll(timeout)
        finally:
            self._changed.acquire()
            self._polling = False
        for descriptor, event in ready:
            if descriptor == self._wake:
                os.read(self._wake, 8)
                continue
            peer = self._by_descriptor[descriptor]
            line = self._lines[peer]
            if event & select.EPOLLOUT:
                line.flush()
            if event & ~select.EPOLLOUT:
                for record in line.receive():
                    self._took(peer, record)
            self._watch(line)
        self._changed.notify_all()

    def _took(self, peer: int, record: Record) -> None:
        key = peer, record.tag
        if record.kind == PIECE:
            assert record.data is not None, "no piece is empty"
            self._arrived.setdefault(key, deque()).append(BorrowedPiece(record.data, None))
        elif record.kind == LENT:
            lent = self._shared.read(self._members[peer], record.segment, record.offset, record.size)
            if lent is None:
                what = f"worker/{peer}: holds no segment {record.segment} on this host"
                raise ProtocolError(what, where=f"worker/{peer}")
            self._arrived.setdefault(key, deque()).append(BorrowedPiece(lent, lambda: self.give_back(*key)))
        elif record.kind == DONE:
            self._returned[key] = self._returned.get(key, 0) + 1
        elif record.kind == BYE:
            self._lines[peer].ended = (record.data or b"").decode(errors="replace") or "it has left"

    def _watch(self, line: UnixChannel) -> None:
        """Poll a line for what it still has to do."""
        events = 0 if line.ended else select.EPOLLIN
        if line.has_queued and not line.ended:
            events |= select.EPOLLOUT
        descriptor = line.fileno()
        if self._events[descriptor] == events:
            return
        self._events[descriptor] = events
        if line.ended:
            self._poll.unregister(descriptor)
        else:
            self._poll.modify(descriptor, events)
            self._awake()

    def _awake(self) -> None:
        """Wake who polls, if anybody does: something is there that is not of a line."""
        if self._polling:
            os.eventfd_write(self._wake, 1)


class BorrowedPiece:
    """A piece that has come: bytes to be read, and given back.

    Args:
        data: of bytes; not to be written.
        back: gives it back; None: it is ours.
    """

    __slots__ = ("_back", "_data", "owed")

    def __init__(self, data: memoryview | bytearray, back: Callable[[], None] | None) -> None:
        self._data, self._back, self.owed = data, back, back is not None

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return it as a vector."""
        return torch.frombuffer(self._data, dtype=dtype)

    def release(self) -> None:
        """Let its owner overwrite it."""
        if self._back is not None:
            self._back()


class _Lent:
    """A piece that others read where it lies."""

    __slots__ = ("_count", "_key", "_plane")

    def __init__(self, plane: DataPlane, key: tuple[int, int], count: int) -> None:
        self._plane, self._key, self._count = plane, key, count

    def wait(self) -> None:
        self._plane.returned(self._key, self._count)


class _Leaving:
    """A piece inside a record."""

    __slots__ = ("_number", "_peer", "_plane")

    def __init__(self, plane: DataPlane, peer: int, number: int) -> None:
        self._plane, self._peer, self._number = plane, peer, number

    def wait(self) -> None:
        self._plane.has_left(self._peer, self._number)


class _Sealing:
    """A piece on a sealed stream, either way."""

    __slots__ = ("_done", "_peer", "_plane")

    def __init__(self, plane: DataPlane, peer: int, done: Any) -> None:
        self._plane, self._peer, self._done = plane, peer, done

    def wait(self) -> None:
        self._plane._until(lambda: True if self._done.over else None, self._peer)

    def await_first(self, size: int) -> bool:
        """Wait for the first bytes of a piece that comes; return whether all are there."""
        done = self._done

        def look() -> bool | None:
            there = done.over or done.at >= size
            done.wanted = done.size if there else size  # what comes meanwhile wakes nobody
            return True if there else None

        self._plane._until(look, self._peer)
        return bool(done.over)
