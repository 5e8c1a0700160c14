"""Workers of one host beside each other: memory that all of them read, and lines between them.

As client/host_connections.py and client/host_aggregation.py, without their threads and secrets; the coordinator's
word of who
listens brings lines up. Servers of the host read nothing where it lies: what goes to them goes together too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from psctl.errors import ConnectionFailed
from psctl.job.training_messages import WorkerAt
from psctl.ps.dense.buffer_allocator import BufferAllocator
from psctl.ps.messages import BetweenPeers, SharedRange
from psctl.ps.pieces import bytes_view
from psctl.types import Member
from tests.simulation.kernel import Process
from tests.simulation.network import End, Network

PAUSE = 0.05
"""Seconds between two attempts to reach a worker."""

ATTEMPTS = 100


class Memory(BufferAllocator):
    """Buffers of one worker that others of its host read."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._network.memory.append(torch.zeros(count, dtype=dtype))
        return self._network.memory[-1]

    def place_on_host(self, tensor: torch.Tensor) -> SharedRange | None:
        for number, whole in enumerate(self._network.memory):
            offset, size = tensor.data_ptr() - whole.data_ptr(), tensor.numel() * tensor.element_size()
            if offset >= 0 and offset + size <= whole.numel() * whole.element_size():
                return SharedRange(number, offset, size)
        return None

    def read(self, at: SharedRange) -> memoryview:
        """Return what another one says lies there."""
        return bytes_view(self._network.memory[at.segment])[at.offset : at.offset + at.size]


class User(Protocol):
    """Whose lines they are."""

    def line_up(self, rank: int) -> None: ...
    def line_down(self, rank: int) -> None: ...
    def beside(self, rank: int, message: Any) -> None: ...


class Lines:
    """One worker's lines to others of its host; the handler of their connections."""

    def __init__(self, process: Process, network: Network, user: User) -> None:
        self.process, self._network, self._user = process, network, user
        self._known: dict[int, Member] = {}
        self._lines: dict[int, End] = {}
        self._closed = False
        network.doors[process.member] = network.listen(process, self, BetweenPeers, self._allow)

    def told(self, workers: Sequence[WorkerAt]) -> None:
        """Take in who of this host listens; the higher rank dials."""
        for each in workers:
            member = Member("worker", each.rank, each.incarnation)
            if member != self._known.get(each.rank) and each.rank != self.process.member.rank:
                self._known[each.rank] = member
                if each.rank < self.process.member.rank:
                    self._dial(member, ATTEMPTS)

    def send(self, rank: int, message: Any) -> None:
        """Queue a message; nothing where there is no line."""
        if rank in self._lines:
            self._lines[rank].send(message)

    def close(self) -> None:
        """End all; what was queued leaves first."""
        self._closed = True
        for line in self._lines.values():
            line.close("it has finished")

    def _allow(self, member: Member) -> str | None:
        return None if self._known.get(member.rank) == member and not self._closed else "a stranger"

    def _dial(self, member: Member, attempts: int) -> None:
        def failed(why: str) -> None:
            if attempts > 1 and self._known[member.rank] == member and not self._closed:
                again = [member, attempts - 1]
                self._network.world.after(PAUSE, lambda: self._dial(*again) if self.process.alive else None)

        self._network.dial(self.process, self._network.doors[member], member, self, failed)

    def on_connected(self, peer: End) -> None:
        rank = peer.member.rank
        former = self._lines.pop(rank, None)
        if former is not None:
            former.drop("there is another line")
            self._user.line_down(rank)
        self._lines[rank] = peer
        self._user.line_up(rank)

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self._lines.get(peer.member.rank) is peer:
            self._user.beside(peer.member.rank, message)

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self._lines.get(peer.member.rank) is peer:
            del self._lines[peer.member.rank]
            if not self._closed:
                self._user.line_down(peer.member.rank)
