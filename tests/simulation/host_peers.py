"""Connections and shared memory between the workers of one host, and connections between those of one rack.

Simulates psctl/client/{host,rack}_connections.py and host_aggregation.py without their threads and secrets. Payloads to
servers are always sent, never shared.
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

RETRY_DELAY = 0.05
"""Seconds between two attempts to reach a worker."""

DIAL_ATTEMPTS = 100


class SharedMemory(BufferAllocator):
    """One worker's buffers in the memory that workers of a host share."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._network.shared_memory.append(torch.zeros(count, dtype=dtype))
        return self._network.shared_memory[-1]

    def place_on_host(self, tensor: torch.Tensor) -> SharedRange | None:
        for number, whole in enumerate(self._network.shared_memory):
            offset, size = tensor.data_ptr() - whole.data_ptr(), tensor.numel() * tensor.element_size()
            if offset >= 0 and offset + size <= whole.numel() * whole.element_size():
                return SharedRange(number, offset, size)
        return None

    def read(self, at: SharedRange) -> memoryview:
        """Return the bytes at a place that another worker has sent."""
        return bytes_view(self._network.shared_memory[at.segment])[at.offset : at.offset + at.size]


class HostPeersUser(Protocol):
    """The owner of the connections."""

    def on_peer_connected(self, rank: int) -> None: ...
    def on_peer_disconnected(self, rank: int) -> None: ...
    def on_peer_message(self, rank: int, message: Any, payload: memoryview | None) -> None: ...


class HostPeers:
    """One worker's connections to the others of its host; the handler of these connections."""

    def __init__(self, process: Process, network: Network, user: HostPeersUser) -> None:
        self.process, self._network, self._user = process, network, user
        self._expected: dict[int, Member] = {}
        self._connections: dict[int, End] = {}
        self._closed = False
        network.peer_addresses[process.member] = network.listen(process, self, BetweenPeers, self._allow)

    def set_peers(self, workers: Sequence[WorkerAt]) -> None:
        """Connect to the workers of this host that listen; the higher rank dials."""
        for each in workers:
            member = Member("worker", each.rank, each.incarnation)
            if member != self._expected.get(each.rank) and each.rank != self.process.member.rank:
                self._expected[each.rank] = member
                if each.rank < self.process.member.rank:
                    self._dial(member, DIAL_ATTEMPTS)

    def send(self, rank: int, message: Any, payload: memoryview | None = None) -> None:
        """Queue a message; it is dropped if there is no connection."""
        if rank in self._connections:
            self._connections[rank].send(message, payload)

    def close(self) -> None:
        """Close all connections after the queued messages are sent."""
        self._closed = True
        for connection in self._connections.values():
            connection.close("it has finished")

    def _allow(self, member: Member) -> str | None:
        return None if self._expected.get(member.rank) == member and not self._closed else "a stranger"

    def _dial(self, member: Member, attempts: int) -> None:
        def failed(why: str) -> None:
            if attempts > 1 and self._expected[member.rank] == member and not self._closed:
                again = [member, attempts - 1]
                self._network.world.after(RETRY_DELAY, lambda: self._dial(*again) if self.process.alive else None)

        self._network.dial(self.process, self._network.peer_addresses[member], member, self, failed)

    def on_connected(self, peer: End) -> None:
        rank = peer.member.rank
        former = self._connections.pop(rank, None)
        if former is not None:
            former.drop("there is another connection")
            self._user.on_peer_disconnected(rank)
        self._connections[rank] = peer
        self._user.on_peer_connected(rank)

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return bytes_view(torch.empty(size, dtype=torch.uint8))  # aligned, as in psctl/client/rack_connections.py

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self._connections.get(peer.member.rank) is peer:
            self._user.on_peer_message(peer.member.rank, message, payload)

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self._connections.get(peer.member.rank) is peer:
            del self._connections[peer.member.rank]
            if not self._closed:
                self._user.on_peer_disconnected(peer.member.rank)
