"""How a schedule's messages travel: a seam with one maker for each way to move bytes between ranks.

A channel moves a contiguous piece of a tensor to the same place of another rank's. Both ends call it in the same order
for one (peer, lane), with the same tag; different lanes and peers run at once, each from a thread of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Channel(Protocol):
    """Moves pieces of tensors between ranks; safe to use from several threads."""

    def send(self, piece: torch.Tensor, peer: int, tag: int) -> None:
        """Send; returns when the piece may be written again.

        Raises:
            RuntimeError: the peer is gone; the job's end, told by whoever watches processes.
        """

    def receive(self, piece: torch.Tensor, peer: int, tag: int) -> None:
        """Receive into the piece; returns when it is there. Errors as `send`."""


class EngineChannel:
    """The engine's point-to-point operations on tensors of the CPU (Gloo).

    Args:
        group: a process group of its own, so that tags meet nobody else's.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        # Ranks of a schedule are ranks of the group; the engine counts in those of the world.
        self._peers = dist.get_process_group_ranks(group)

    def send(self, piece: torch.Tensor, peer: int, tag: int) -> None:
        _done(dist.isend(piece, self._peers[peer], group=self._group, tag=tag))

    def receive(self, piece: torch.Tensor, peer: int, tag: int) -> None:
        _done(dist.irecv(piece, self._peers[peer], group=self._group, tag=tag))


def _done(work: Any) -> None:
    assert work is not None, "this process is a member of the group"
    work.wait()
