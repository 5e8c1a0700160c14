"""Channels, which move pieces of tensors between ranks: the protocol, the engine's channels, and one inside a process.

A channel moves a contiguous piece of a tensor to the same place of another rank's tensor. A piece sent to a peer with a
tag is matched with the receive that the peer posted with this tag, in the order of posting. Posting never waits; a
posted transfer is waited for.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

UNUSED_TAG = (1 << 31) - 1
"""A tag that no message has."""


class Parcel:
    """A piece to be sent to, or received from, a peer.

    Args:
        piece: contiguous.
        peer: a node of the schedule.
        tag: the number of its message.
    """

    __slots__ = ("peer", "piece", "tag")

    def __init__(self, piece: torch.Tensor, peer: int, tag: int) -> None:
        self.piece, self.peer, self.tag = piece, peer, tag


class PendingTransfer(Protocol):
    """A posted transfer."""

    def wait(self) -> object:
        """Return when the piece was sent and may be overwritten, or is received.

        Raises:
            RuntimeError: the peer is lost; its agent reports why.
        """


class PeerPiece(Protocol):
    """A piece of a peer in memory that this process can read."""

    is_awaited: bool
    """Whether its owner waits until it is released."""

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the piece as a vector, which must not be written."""

    def release(self) -> None:
        """Let its owner overwrite it."""


class VectorExchange(Protocol):
    """Exchanges short vectors between all ranks."""

    def exchange(self, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Publish a vector, and return all others', by rank; they do not change until the next exchange.

        Raises:
            RuntimeError: a rank is lost.
        """


class Channel(Protocol):
    """Moves pieces of tensors between ranks; may be called from several threads (the nodes of one process)."""

    posts_ahead: bool
    """Whether receives of later steps may be posted; otherwise a step's messages are posted together."""

    def reads_in_place(self, peer: int) -> bool:
        """Return whether pieces of a peer are read in its memory: by `next_piece`, without posting a receive."""

    def next_piece(self, peer: int, tag: int) -> PeerPiece:
        """Wait for the next piece of a peer with this tag; to be released.

        Raises:
            RuntimeError: the peer is lost.
        """

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        """Post these together; returns one pending for each, those of sends first."""

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        """Wait until the first `size` bytes of a piece that is received are there, or all of it.

        Returns:
            whether all of it is there; it is not to be waited for again then.
        """

    def exchange_for(self, size: int) -> VectorExchange | None:
        """Return an exchange for vectors of `size` bytes, or None; the same answer on every rank."""

    def swap(self, piece: torch.Tensor, peers: Collection[int], tag: int) -> dict[int, torch.Tensor]:
        """Send a short piece to each of these peers; return theirs, of the same size, by peer.

        Raises:
            RuntimeError: one of them is lost.
        """

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Peers that a thread waits for now, as far as they are known."""

    def abort(self, reason: str) -> None:
        """End every wait, here and at the peers, with an error; the channel cannot be used afterwards."""


class ReceivingChannel(ABC):
    """Base class of channels that deliver every piece into its receiver's own memory."""

    posts_ahead: bool
    waits_for: tuple[int, ...] = ()

    @abstractmethod
    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]: ...

    def swap(self, piece: torch.Tensor, peers: Collection[int], tag: int) -> dict[int, torch.Tensor]:
        found = {peer: torch.empty_like(piece) for peer in peers}
        pending = self.post(
            [Parcel(piece, peer, tag) for peer in peers], [Parcel(each, peer, tag) for peer, each in found.items()]
        )
        left = list(peers)
        try:
            for peer, each in zip(peers, pending[len(found) :], strict=True):
                self.waits_for = tuple(left)
                each.wait()
                left.remove(peer)
            for each in pending[: len(found)]:
                each.wait()
        finally:
            self.waits_for = ()
        return found

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        pending.wait()
        return True

    def exchange_for(self, size: int) -> VectorExchange | None:
        return None

    def reads_in_place(self, peer: int) -> bool:
        return False

    def next_piece(self, peer: int, tag: int) -> PeerPiece:
        raise AssertionError("no piece is read in place here")


class EngineChannel(ReceivingChannel):
    """The engine's point-to-point operations on tensors of the CPU (Gloo).

    Args:
        group: a process group of its own, so that tags do not match other messages.
        nodes: of the schedule, where it has helpers behind the ranks: rank 0's process plays them.
    """

    posts_ahead = True

    def __init__(self, group: dist.ProcessGroup, nodes: int = 0) -> None:
        self._group = group
        # Ranks of a schedule are ranks of the group; the engine counts in those of the world.
        ranks = dist.get_process_group_ranks(group)
        self._peers = [*ranks, *ranks[:1] * (nodes - len(ranks))]

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        # Receives first: a sender whose receiver has posted sends without asking.
        coming = [dist.irecv(one.piece, self._peers[one.peer], group=self._group, tag=one.tag) for one in receives]
        leaving = [dist.isend(one.piece, self._peers[one.peer], group=self._group, tag=one.tag) for one in sends]
        return [_posted(work) for work in leaving + coming]

    def abort(self, reason: str) -> None:
        # Gloo has no abort that ends a wait, but a wait that times out closes all connections of its group.
        world = dist.get_world_size(self._group)
        other = self._peers[(dist.get_rank(self._group) + 1) % world]
        if world > 1:
            try:
                never = dist.irecv(torch.empty(1), other, group=self._group, tag=UNUSED_TAG)
                _posted(never).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return  # the intended error, or the connections were closed already


class BatchChannel(ReceivingChannel):
    """The engine's point-to-point operations, a step's in one batch: the form that NCCL requires on GPUs.

    NCCL has no tags: it matches the operations of two ranks in their order, and runs nothing of a batch before all of
    it was posted. Waiting makes the current stream wait, never the host.

    Args:
        group: a process group of its own.
        ranks: of the peers, in the engine's numbers; None: those of the group, in its order.
    """

    posts_ahead = False

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        self._group = group
        self._peers = list(ranks) if ranks is not None else dist.get_process_group_ranks(group)

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        asked = [(dist.isend, one) for one in sends] + [(dist.irecv, one) for one in receives]
        if not asked:
            return []
        together = _BatchWork(
            dist.batch_isend_irecv(
                [
                    dist.P2POp(what, one.piece, self._peers[one.peer], group=self._group, tag=one.tag)
                    for what, one in asked
                ]
            )
        )
        return [together] * len(asked)

    def abort(self, reason: str) -> None:
        self._group.abort()


class _BatchWork:
    """The works of one batch; NCCL has one for all."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        while self._works:
            self._works[-1].wait()
            self._works.pop()


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is a member of the group"
    return work


class LocalExchange:
    """Transfers between nodes of one process: copied when both ends have posted."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._posted: dict[tuple[int, int, int, bool], deque[LocalTransfer]] = {}
        self._ended = False

    def post(self, source: int, destination: int, tag: int, piece: torch.Tensor, *, sends: bool) -> LocalTransfer:
        """Post one end."""
        with self._changed:
            others = self._posted.get((source, destination, tag, not sends))
            if others:
                other = others.popleft()
                first, second = (piece, other.piece) if sends else (other.piece, piece)
                second.copy_(first)
                other.done = True
                self._changed.notify_all()
                return LocalTransfer(self, piece, done=True)
            mine = LocalTransfer(self, piece, done=self._ended)
            self._posted.setdefault((source, destination, tag, sends), deque()).append(mine)
            return mine

    def wait(self, copy: LocalTransfer) -> None:
        """Return when the piece is copied."""
        with self._changed:
            self._changed.wait_for(lambda: copy.done or self._ended)
            if self._ended:
                raise RuntimeError("another node of this process lost a peer")

    def abort(self) -> None:
        """End every wait with an error."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class LocalTransfer:
    """One end of a transfer inside a process."""

    def __init__(self, inside: LocalExchange, piece: torch.Tensor, *, done: bool) -> None:
        self._inside, self.piece, self.done = inside, piece, done

    def wait(self) -> None:
        """Return when the piece is copied."""
        self._inside.wait(self)


class LocalChannel:
    """The channel of a node whose process has other nodes too.

    Args:
        node: of this channel.
        here: the nodes of this process.
        inside: moves pieces between these.
        outside: moves the other pieces.
    """

    posts_ahead = True

    def __init__(self, node: int, here: Sequence[int], inside: LocalExchange, outside: Channel) -> None:
        self._node, self._here, self._inside, self._outside = node, set(here), inside, outside

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        return [
            *(self._one(each, sends=True) for each in sends),
            *(self._one(each, sends=False) for each in receives),
        ]

    def _one(self, each: Parcel, *, sends: bool) -> PendingTransfer:
        if each.peer not in self._here:
            return self._outside.post([each] if sends else [], [] if sends else [each])[0]
        source, destination = (self._node, each.peer) if sends else (each.peer, self._node)
        return self._inside.post(source, destination, each.tag, each.piece, sends=sends)

    def reads_in_place(self, peer: int) -> bool:
        return peer not in self._here and self._outside.reads_in_place(peer)

    def next_piece(self, peer: int, tag: int) -> PeerPiece:
        return self._outside.next_piece(peer, tag)

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        if not isinstance(pending, LocalTransfer):
            return self._outside.arrived(pending, size)
        pending.wait()
        return True

    def exchange_for(self, size: int) -> VectorExchange | None:
        return None

    def swap(self, piece: torch.Tensor, peers: Collection[int], tag: int) -> dict[int, torch.Tensor]:
        raise AssertionError("nodes of one process play schedules only")

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self._outside.waits_for

    def abort(self, reason: str) -> None:
        self._inside.abort()
        self._outside.abort(reason)
