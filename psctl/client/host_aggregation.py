"""Sums of the gradients of a host's or a rack's workers, of which one worker pushes each sum.

The state machine decides which gradients are summed together (ps/dense/client/host_collection.py). A separate thread
computes the sum without a lock, from the memory of the contributing workers, concurrently with backward and with the
sending of other bytes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from psctl.client.shared_buffers import SharedBuffers
from psctl.errors import ProtocolError
from psctl.job.training_messages import WorkerAt, WorkerListens, WorkersAt
from psctl.ps.dense.client.dense_client_state import ClientOutput, DenseClient
from psctl.ps.dense.client.host_collection import HostSumTask, ToPeer
from psctl.ps.dense.host_sums import host_sum
from psctl.ps.messages import BetweenPeers, HostPush
from psctl.types import Address, Member

LAST_SUM = 5.0
"""Seconds that `close` waits for a sum in progress."""


class GroupConnections(Protocol):
    """Connections to the other workers of the group."""

    secret: bytes
    address: Address | None

    def connect(self, workers: Sequence[WorkerAt]) -> None: ...
    def send(self, rank: int, message: BetweenPeers, payload: memoryview | None = None) -> None: ...
    def close(self) -> None: ...


class HostAggregation:
    """One worker's part of the sums of its host or rack. `follow` and `on_workers` may be called by any thread.

    Args:
        me: this worker.
        connections: makes the connections; given this object, which handles their messages.
        sharing: memory of this process and of the host's others.
    """

    def __init__(
        self, me: Member, connections: Callable[[HostAggregation], GroupConnections], sharing: SharedBuffers
    ) -> None:  # fmt: skip
        self._me, self._connect, self._sharing = me, connections, sharing
        self._gathers: queue.SimpleQueue[HostSumTask | None] = queue.SimpleQueue()

    def start(
        self,
        state: DenseClient,
        call: Callable[[Callable[[], Sequence[ClientOutput]]], None],
        report: Callable[[WorkerListens], object],
    ) -> None:
        """Listen for the other workers, and report that to the coordinator.

        Args:
            state: the state machine that messages of other workers go to.
            call: calls a function under the lock of the state machine, and executes the outputs that it returns.
            report: sends a message to the coordinator.
        """
        self._state, self._call = state, call
        self._thread = threading.Thread(target=self._sum, name="psctl host sums", daemon=True)
        self._thread.start()
        self._connections = self._connect(self)
        report(WorkerListens(self._connections.address, self._connections.secret))

    def on_workers(self, message: WorkersAt) -> None:
        """Connect to the listening workers of this group."""
        self._connections.connect([each for each in message.workers if each.rank != self._me.rank])

    def follow(self, instruction: ToPeer | HostSumTask) -> None:
        """Execute an output of the state machine; never blocks."""
        if isinstance(instruction, ToPeer):
            self._connections.send(instruction.rank, instruction.message, instruction.payload)
        else:
            self._gathers.put(instruction)

    def close(self) -> None:
        """End connections and sums."""
        self._connections.close()
        self._gathers.put(None)
        self._thread.join(LAST_SUM)

    def _sum(self) -> None:
        held = self._state.held
        while (gather := self._gathers.get()) is not None:
            present = host_sum(gather.into, held[gather.shard], gather.parts)
            self._call(lambda gather=gather, present=present: self._state.on_host_sum(gather, present))  # type: ignore[misc]

    # ---- the connections: their reading threads --------------------------------------------------------------------

    def on_connected(self, member: Member) -> None:
        self._call(lambda: self._state.on_peer_connected(member.rank))

    def on_message(self, member: Member, message: BetweenPeers) -> None:
        data = None
        if isinstance(message, HostPush) and message.at is not None:
            try:
                data = self._sharing.read(member, message.at)
            except ProtocolError:
                data = None  # that worker pushes alone
        self.on_bytes(member, message, data)

    def on_bytes(self, member: Member, message: BetweenPeers, data: memoryview | None) -> None:
        """Handle a message whose bytes, if it has some, are here."""
        self._call(lambda: self._state.on_peer_message(member.rank, message, data))

    def on_connection_lost(self, member: Member) -> None:
        self._call(lambda: self._state.on_peer_disconnected(member.rank))
        self._sharing.forget(member)
