"""How a schedule's messages travel: a seam with one maker for each way to move bytes between ranks.

A channel moves a contiguous piece of a tensor to the same place of another rank's. What is sent to a peer with a tag
meets what that peer receives with it, in the order in which both were posted. Posting never waits; what was posted is
waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

NOBODY_SENDS = (1 << 31) - 1
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
    """What was posted."""

    def wait(self) -> Any:
        """Return when the piece may be used again (sent) or is there (received).

        Raises:
            RuntimeError: the peer is gone; the job's end, told by whoever watches processes.
        """


class LentPiece(Protocol):
    """A piece of a peer that lies where this process can read it."""

    owed: bool
    """Its owner waits until it is released."""

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return it as a vector, which must not be written."""

    def release(self) -> None:
        """Let its owner overwrite it."""


class VectorExchange(Protocol):
    """A place where ranks put short vectors for each other."""

    def exchange(self, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Put a vector, and return all others', by rank; they stay as they are until the next one is put.

        Raises:
            RuntimeError: a rank is gone.
        """


class Channel(Protocol):
    """Moves pieces of tensors between ranks; may be called from several threads (the nodes of one process)."""

    ahead: bool
    """Receives may be posted before their turn; otherwise a step's messages are posted together."""

    def lends(self, peer: int) -> bool:
        """Whether a peer's pieces are read where they lie: they are borrowed, nothing is posted for them."""

    def borrow(self, peer: int, tag: int) -> LentPiece:
        """Wait for the next piece of a peer with this tag; to be given back.

        Raises:
            RuntimeError: the peer is gone.
        """

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        """Post these together; returns one pending for each, those of sends first."""

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        """Wait until the first `size` bytes of a piece that is received are there, or all of it.

        Returns:
            whether all of it is there; it is not to be waited for again then.
        """

    def board(self, size: int) -> VectorExchange | None:
        """Return where all ranks put vectors of so many bytes for each other to read; the same answer on every rank."""

    def abort(self, reason: str) -> None:
        """End every wait, here and at the peers, with an error; nothing can travel afterwards."""


class Delivers:
    """What channels share that bring every piece into its receiver's own memory."""

    def arrived(self, pending: PendingTransfer, size: int) -> bool:
        pending.wait()
        return True

    def board(self, size: int) -> VectorExchange | None:
        return None

    def lends(self, peer: int) -> bool:
        return False

    def borrow(self, peer: int, tag: int) -> LentPiece:
        raise AssertionError("nothing is lent here")


class EngineChannel(Delivers):
    """The engine's point-to-point operations on tensors of the CPU (Gloo).

    Args:
        group: a process group of its own, so that tags meet nobody else's.
        nodes: of the schedule, where it has helpers behind the ranks: rank 0's process plays them.
    """

    ahead = True

    def __init__(self, group: Any, nodes: int = 0) -> None:
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
        # Gloo has no abort that ends a wait. A wait that runs out closes all connections of its group, which does.
        world = dist.get_world_size(self._group)
        other = self._peers[(dist.get_rank(self._group) + 1) % world]
        if world > 1:
            try:
                never = dist.irecv(torch.empty(1), other, group=self._group, tag=NOBODY_SENDS)
                _posted(never).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return  # as meant; or the connections were closed before


class BatchChannel(Delivers):
    """The engine's point-to-point operations, a step's in one batch: what NCCL wants of tensors on GPUs.

    NCCL knows no tags, it matches what two ranks post in its order; and it runs nothing of a batch before the whole of
    it was posted. Waiting makes the current stream wait, never the host.

    Args:
        group: a process group of its own.
    """

    ahead = False

    def __init__(self, group: Any) -> None:
        self._group = group
        self._peers = dist.get_process_group_ranks(group)

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        asked = [(dist.isend, one) for one in sends] + [(dist.irecv, one) for one in receives]
        if not asked:
            return []
        together = _Together(
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


class _Together:
    """The works of one batch; NCCL has one for all."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        while self._works:
            self._works[-1].wait()
            self._works.pop()


def _posted(work: Any) -> Any:
    assert work is not None, "this process is a member of the group"
    return work
