"""The data plane of collectives on the CPU: Unix channels and shared memory in a host, TCP streams between hosts.

Within a host long pieces are not copied. Vectors are in memory that all processes of the host can read (`buffer`); a
send is a record with a location, and the receiver sums or copies from there and returns the piece by another record. So
a schedule's reduce reads each operand once, where its owner wrote it. Short pieces are sent inside the record: copies
cost less than the record that returns a piece. Between hosts pieces are sent in parts over a TCP stream, and each
part is received into the buffer that was posted for it.

A waiting thread serves all peers: one thread polls all channels, handles all records that arrive and sends queued ones,
whatever it waits for. So no sender is blocked by a receiver that waits for another process, and the data plane
deadlocks only if the schedule does.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from psctl.collectives.channel import UNUSED_TAG, Parcel, PendingTransfer
from psctl.collectives.shm_exchange import SLOT, ShmExchange, exchange_size, is_supported
from psctl.collectives.stream_pieces import HostStreams, PostedPiece
from psctl.errors import PeerLost, ProtocolError
from psctl.ps.pieces import bytes_view
from psctl.transport.shared_memory import SharedAllocator
from psctl.transport.unix_channel import BYE, DONE, PIECE, SHARED, Record, UnixChannel
from psctl.types import Member, PeerBytes

INLINE = 64 << 10
"""Bytes of a piece up to which it is sent inside its record. Recursive doubling of 64 KB by four ranks: 0.12 ms, and
0.35 ms with pieces that are read in place."""

CLOSE_TIMEOUT = 5.0
"""Seconds for which `close` waits until queued data is sent."""

RETIRE_TIMEOUT = 20.0
"""Seconds for which `retire` waits for the threads of streams."""

EXCHANGE = UNUSED_TAG - 1
"""The tag of the record in which rank 0 sends the exchange's location."""

T = TypeVar("T")


class PlaneMemory:
    """The vectors of one process; they outlast a data plane, whose successor sums them again.

    Args:
        shared: memory that processes of this host can read.
    """

    def __init__(self, shared: SharedAllocator) -> None:
        self.shared = shared
        self._buffers: dict[int, memoryview] = {}  # shared ones, by address

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a vector of zeros, in memory that other processes of this host can read if that is possible."""
        size = length * dtype.itemsize
        part = self.shared.allocate(size, zeroed=True) if size else None
        if part is None:
            return torch.zeros(length, dtype=dtype)
        made = torch.frombuffer(part, dtype=dtype)
        self._buffers[made.data_ptr()] = part
        return made

    def release(self, buffers: Sequence[torch.Tensor]) -> None:
        """Release buffers that are not used any more."""
        for each in buffers:
            part = self._buffers.pop(each.data_ptr(), None)
            if part is not None:
                self.shared.release(part)


class DataPlane:
    """One process's end of the data plane; a `Channel`. May be called from several threads.

    Args:
        me: the rank of this process.
        world: number of ranks; rank 0's process also runs the nodes after them, a schedule's helpers.
        channels: to processes of this host, by rank.
        memory: of this process's vectors.
        members: the other processes of this host, by rank.
        streams: to processes of other hosts.
        hosts: the number of each rank's host.
    """

    posts_ahead = True

    def __init__(
        self,
        me: int,
        world: int,
        channels: Mapping[int, UnixChannel],
        memory: PlaneMemory,
        members: Mapping[int, Member],
        streams: HostStreams | None = None,
        hosts: Sequence[int] = (),
    ) -> None:
        self.me, self.hosts = me, hosts
        self._world = world
        self._channels = dict(channels)
        self._host_streams = streams
        self.memory = memory
        self._shared = memory.shared
        self._members = members
        self._changed = streams.changed if streams is not None else threading.Condition()
        self._arrived: dict[tuple[int, int], deque[ArrivedPiece]] = {}
        self._offered: dict[tuple[int, int], int] = {}  # (peer, tag) -> pieces that the peer reads in place
        self._returned: dict[tuple[int, int], int] = {}  # of these, how many were returned
        self._broken = ""
        self._awaited: list[Collection[int]] = []  # ranks that threads wait for now
        self._polling = False
        self._exchange: ShmExchange | None = None
        self._exchange_tried = not is_supported() or len(self._channels) != world - 1
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not closed by `close`: another thread may be about to write it, when the number may be another file's.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._by_descriptor = {channel.fileno(): rank for rank, channel in self._channels.items()}
        self._events = dict.fromkeys(self._by_descriptor, select.EPOLLIN)
        for descriptor, events in self._events.items():
            self._poll.register(descriptor, events)
        if streams is not None:
            streams.begin(self._wake_poller)

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a vector of zeros, in memory that other processes of this host can read if that is possible."""
        return self.memory.buffer(length, dtype) if self._members else torch.zeros(length, dtype=dtype)

    def _process(self, node: int) -> int:
        return node if node < self._world else 0

    # ---- the channel ---------------------------------------------------------------------------------------------

    def reads_in_place(self, peer: int) -> bool:
        return self._process(peer) in self._channels

    def next_piece(self, peer: int, tag: int) -> ArrivedPiece:
        key = self._process(peer), tag
        arrived = self._arrived

        def look() -> ArrivedPiece | None:
            found = arrived.get(key)
            return found.popleft() if found else None

        return self._until(look, key[:1])

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        with self._changed:
            if self._broken:
                raise RuntimeError(self._broken)
            return [self._send(one) for one in sends] + [self._expect(one) for one in receives]

    def _send(self, one: Parcel) -> PendingTransfer:
        peer = self._process(one.peer)
        channel = self._channels.get(peer)
        if channel is None:
            assert self._host_streams is not None, "there are streams to ranks of other hosts"
            return self._on_stream(peer, self._host_streams.send(peer, one.tag, bytes_view(one.piece)))
        size = one.piece.nbytes
        where = self._shared.locate(one.piece.data_ptr(), size) if size > INLINE else None
        if where is None:
            number = channel.send(PIECE, one.tag, size=size, data=bytes_view(one.piece))
            self._watch(channel)
            return PlaneTransfer(partial(self._await_written, peer, number))
        key = peer, one.tag
        self._offered[key] = self._offered.get(key, 0) + 1
        channel.send(SHARED, one.tag, *where, size)
        self._watch(channel)
        return PlaneTransfer(partial(self._await_returned, key, self._offered[key]))

    def _expect(self, one: Parcel) -> PendingTransfer:
        peer = self._process(one.peer)
        assert self._host_streams is not None, "pieces of this host are read in place, not received"
        return self._on_stream(peer, self._host_streams.expect(peer, one.tag, bytes_view(one.piece)))

    def _on_stream(self, peer: int, piece: PostedPiece) -> PlaneTransfer:
        return PlaneTransfer(lambda: self._until(lambda: piece.done, (peer,)), (peer, piece))

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        assert isinstance(pending, PlaneTransfer), "posted here"
        assert pending.stream is not None, "pieces of this host are read in place, not received"
        peer, piece = pending.stream

        def look() -> bool:
            has_arrived = piece.done or piece.at >= size
            piece.wanted = piece.size if has_arrived else size  # no wake-up for the other bytes
            return has_arrived

        self._until(look, (peer,))
        return piece.done

    def swap(self, piece: torch.Tensor, peers: Collection[int], tag: int) -> dict[int, torch.Tensor]:
        far = {peer: torch.empty_like(piece) for peer in peers if peer not in self._channels}
        pending = self.post(
            [Parcel(piece, peer, tag) for peer in peers], [Parcel(each, peer, tag) for peer, each in far.items()]
        )
        posted = dict(zip(far, pending[len(peers) :], strict=True))
        found: dict[int, torch.Tensor] = {}
        left = set(peers)

        def look() -> bool:
            for peer in tuple(left):
                arrived = self._arrived.get((peer, tag))
                if peer in far and _is_done(posted[peer]):
                    found[peer] = far[peer]
                elif arrived:
                    found[peer] = arrived.popleft().read(piece.dtype)
                else:
                    continue
                left.remove(peer)
            return not left

        self._until(look, left)
        for each in pending[: len(peers)]:
            each.wait()
        return found

    def exchange_for(self, size: int) -> ShmExchange | None:
        if not 0 < size <= SLOT:
            return None
        if not self._exchange_tried:
            self._exchange_tried = True
            memory = self._exchange_memory()
            self._exchange = None if memory is None else ShmExchange(memory, self.me, self._world, self._check_peers)
        return self._exchange

    def _exchange_memory(self) -> torch.Tensor | None:
        """Return the exchange's memory, which rank 0 shares with all; None when the host has no shared memory."""
        if self.me:
            piece = self.next_piece(0, EXCHANGE)
            return piece.read(torch.uint8) if piece.is_awaited else None
        memory = self.buffer(exchange_size(self._world), torch.uint8)
        is_shared = self._shared.locate(memory.data_ptr(), memory.nbytes) is not None
        self.post([Parcel(memory if is_shared else memory[:1], peer, EXCHANGE) for peer in self._channels], ())
        return memory if is_shared else None

    def _check_peers(self) -> None:
        """Handle records that have arrived; raise RuntimeError when a process of this host has ended."""
        with self._changed:
            if not self._polling:
                self._poll_once(0.0)
            if self._broken:
                raise RuntimeError(self._broken)
            for peer, channel in self._channels.items():
                if channel.ended:
                    raise RuntimeError(f"worker/{peer}: {channel.ended}")

    def abort(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            for channel in self._channels.values():
                channel.send_bye(reason)
                channel.shutdown()
            self._changed.notify_all()
        if self._host_streams is not None:
            self._host_streams.close(reason, 0.0)
        self._wake_poller()

    def retire(self, reason: str) -> None:
        """Abort, and return when nothing reads or writes this process's vectors any more, which another plane may use.

        No thread may wait here any more.

        Raises:
            PeerLost: the thread of a stream did not end in time.
        """
        self.abort(reason)
        if self._host_streams is not None and not self._host_streams.join(RETIRE_TIMEOUT):
            raise PeerLost(f"a stream of the data plane did not end within {RETIRE_TIMEOUT:g} s: {reason}")
        self._release()

    def close(self) -> None:
        """Close all connections after queued data is sent; no thread may wait here any more."""
        for rank, channel in self._channels.items():
            channel.send_bye("it has finished")
            timer = threading.Timer(CLOSE_TIMEOUT, channel.shutdown)
            timer.start()
            try:
                self._until(lambda channel=channel: not channel.has_queued or bool(channel.ended), (rank,))  # type: ignore[misc]
            except RuntimeError:
                pass  # the peer has closed its end
            finally:
                timer.cancel()
        self._broken = self._broken or "closed"
        if self._host_streams is not None:
            self._host_streams.close("done", CLOSE_TIMEOUT)
        self._release()

    def _release(self) -> None:
        with self._changed:  # another thread may be in `abort`
            for channel in self._channels.values():
                channel.close()
            self._poll.close()

    @property
    def bytes_by_peer(self) -> dict[str, PeerBytes]:
        """Bytes over streams and channels, by worker; pieces that are read in place do not count."""
        streams = self._host_streams.bytes_by_peer if self._host_streams is not None else {}
        channels = {
            f"worker/{rank}": PeerBytes(channel.bytes_sent, channel.bytes_received)
            for rank, channel in self._channels.items()
        }
        return {**streams, **channels}

    # ---- waiting -------------------------------------------------------------------------------------------------

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that a thread of this process waits for now."""
        exchange = self._exchange.missing_ranks if self._exchange is not None else ()
        with self._changed:
            awaited = {rank for ranks in self._awaited for rank in ranks}
        return tuple(sorted((awaited | set(exchange)) - {self.me}))

    def _await_returned(self, key: tuple[int, int], count: int) -> None:
        """Wait until the peer has returned `count` of the pieces offered with this tag."""
        self._until(lambda: self._returned.get(key, 0) >= count, key[:1])

    def _await_written(self, peer: int, number: int) -> None:
        """Wait until a channel's record has been sent."""
        channel = self._channels[peer]
        if channel.written < number:
            self._until(lambda: channel.written >= number, (peer,))

    def _return_piece(self, peer: int, tag: int) -> None:
        """Return a piece that was read in place to its owner, which may then overwrite it."""
        with self._changed:
            channel = self._channels[peer]
            channel.send(DONE, tag)
            self._watch(channel)

    def _until(self, look: Callable[[], T | None], peers: Collection[int]) -> T:
        """Wait for a true result of `look`, which depends on `peers`; handle all records that arrive meanwhile."""
        with self._changed:
            if found := look():
                return found
            self._awaited.append(peers)
            try:
                while not (found := look()):
                    if self._broken:
                        raise RuntimeError(self._broken)
                    for peer in peers:
                        if why := self._end_reason(peer):
                            raise RuntimeError(f"worker/{peer}: {why}")
                    if not self._channels or self._polling:
                        self._changed.wait()
                    else:
                        self._poll_once()
                return found
            finally:
                self._awaited.remove(peers)

    def _end_reason(self, peer: int) -> str:
        channel = self._channels.get(peer)
        if channel is not None:
            return channel.ended
        return self._host_streams.end_reason(peer) if self._host_streams is not None else ""

    def _poll_once(self, timeout: float | None = None) -> None:
        """Wait for events of all channels, at most `timeout` seconds, without the lock; then handle them."""
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
            channel = self._channels[peer]
            if event & select.EPOLLOUT:
                channel.flush()
            if event & ~select.EPOLLOUT:
                for record in channel.receive():
                    self._on_record(peer, record)
            self._watch(channel)
        self._changed.notify_all()

    def _on_record(self, peer: int, record: Record) -> None:
        key = peer, record.tag
        if record.kind == PIECE:
            assert record.data is not None, "a piece has data"
            self._arrived.setdefault(key, deque()).append(ArrivedPiece(record.data, None))
        elif record.kind == SHARED:
            data = self._shared.read(self._members[peer], record.segment, record.offset, record.size)
            if data is None:
                what = f"worker/{peer}: holds no segment {record.segment} on this host"
                raise ProtocolError(what, where=f"worker/{peer}")
            self._arrived.setdefault(key, deque()).append(ArrivedPiece(data, lambda: self._return_piece(*key)))
        elif record.kind == DONE:
            self._returned[key] = self._returned.get(key, 0) + 1
        elif record.kind == BYE:
            self._channels[peer].ended = (record.data or b"").decode(errors="replace") or "it has ended"

    def _watch(self, channel: UnixChannel) -> None:
        """Set the events that are polled of a channel, from its state."""
        events = 0 if channel.ended else select.EPOLLIN
        if channel.has_queued and not channel.ended:
            events |= select.EPOLLOUT
        descriptor = channel.fileno()
        if self._events[descriptor] == events:
            return
        self._events[descriptor] = events
        if channel.ended:
            self._poll.unregister(descriptor)
        else:
            self._poll.modify(descriptor, events)
            self._wake_poller()

    def _wake_poller(self) -> None:
        """Wake the thread that polls, if there is one, for an event that is not of a channel."""
        if self._polling:
            os.eventfd_write(self._wake, 1)


class ArrivedPiece:
    """A piece that has arrived: bytes to read, and to return to their owner.

    Args:
        data: the bytes, read-only.
        on_release: returns the piece; None: this process owns it.
    """

    __slots__ = ("_data", "_on_release", "is_awaited")

    def __init__(self, data: memoryview | bytearray, on_release: Callable[[], None] | None) -> None:
        self._data = data
        self._on_release = on_release
        self.is_awaited = on_release is not None

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the piece as a vector."""
        return torch.frombuffer(self._data, dtype=dtype)

    def release(self) -> None:
        """Return the piece to its owner, which may overwrite it then."""
        if self._on_release is not None:
            self._on_release()


def _is_done(transfer: PendingTransfer) -> bool:
    """Whether a piece that was expected from a stream has arrived."""
    assert isinstance(transfer, PlaneTransfer), "posted here"
    assert transfer.stream is not None, "it comes from another host"
    return transfer.stream[1].done


class PlaneTransfer:
    """A posted transfer.

    Args:
        wait: returns when the piece may be overwritten, or has arrived.
        stream: of a TCP stream: the peer and the piece.
    """

    __slots__ = ("stream", "wait")

    def __init__(self, wait: Callable[[], object], stream: tuple[int, PostedPiece] | None = None) -> None:
        self.wait, self.stream = wait, stream
