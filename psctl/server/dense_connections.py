"""A server's connections for dense parameters: dispatches messages to the state machine and sends its answers.

Locking rule. Each connection has its own reader thread, and all of them call one state machine (DenseServer). It guards
each shard, and the ledger of step orders, with a separate lock. The sum, the optimizer's step and the queueing of the
answers run under the shard's lock, so that messages about a shard are sent in the order in which they were made. The
thread that receives the last missing piece does the work; other threads continue with other shards. Step orders affect
all shards and are processed one at a time. Locks are acquired in the order steps, shard, ledger, peers. Bytes are
received into staging buffers without a lock. No thread waits for the network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

from psctl.client.server_connections import Dial, Unreachable
from psctl.client.shared_buffers import SharedBuffers, private_buffers
from psctl.errors import ProtocolError
from psctl.job.membership_messages import ProtocolViolation
from psctl.permits import WireMessage
from psctl.ps.dense.server.dense_server import LEDGER, DenseServer
from psctl.ps.messages import BetweenServers, FromReader, FromWorker, SharedMemoryOffer, Step, StepInBackward
from psctl.ps.outputs import (
    HeldPushes,
    Instruction,
    LeadMoved,
    ReplicaCaughtUp,
    SaveSlices,
    ToReader,
    ToServer,
    ToWorker,
)
from psctl.server.peer_connections import MemberKey, PeerConnections
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Assignment, Member, Role

DenseReport = ReplicaCaughtUp | LeadMoved | HeldPushes | ProtocolViolation
"""A message for the coordinator."""


class ShardLocks(dict[int, AbstractContextManager[object]]):
    """A lock for each shard of the job, and for LEDGER."""

    def __missing__(self, shard: int) -> AbstractContextManager[object]:
        """Return a new lock for a number that is no shard of the job: the state machine refuses the message."""
        return threading.Lock()


class DenseConnections(PeerConnections):
    """Dispatches messages of workers and other servers to the state machine of the shards.

    Args:
        me: this server.
        save: called with a checkpoint part, on the thread that completed it; must not block.
        report: called with each report for the coordinator.
        sharing: memory that workers of this host read, and theirs; None: all bytes are sent.
        dial, unreachable: as PeerConnections has them.
    """

    def __init__(
        self, me: Member, save: Callable[[SaveSlices], None], report: Callable[[DenseReport], None],
        sharing: SharedBuffers | None, dial: Dial | None, unreachable: Unreachable,
    ) -> None:  # fmt: skip
        super().__init__(me, report, dial, unreachable)
        self._report: Callable[[DenseReport], None] = report
        self.sharing = sharing or private_buffers(me)
        self._save = save
        self._state: DenseServer
        self._steps = threading.Lock()
        self._locks = ShardLocks()

    def make_shards(
        self, make: Callable[[Callable[[int], AbstractContextManager[object]]], DenseServer], shards: int
    ) -> DenseServer:
        """Make the state machine with the locks of this object; the first assignment opens the connections.

        Args:
            make: called with the state machine's `guard`.
            shards: how many the job has.
        """
        self._locks.update((index, threading.RLock()) for index in (LEDGER, *range(shards)))
        self._state = make(self._locks.__getitem__)
        return self._state

    def assign(self, assignment: Assignment) -> None:
        """Adopt a new assignment; one that is not newer than the newest changes nothing."""
        if self.accept_members(assignment.epoch, assignment.servers):
            ranks = {at.rank for at in assignment.servers}
            self.follow(self._state.on_assignment(assignment.epoch, assignment.chains, assignment.copies, ranks))
            self.open(assignment.servers)

    def follow(self, instructions: Sequence[Instruction]) -> None:
        """Execute the state machine's outputs; messages to a member without a connection are made again later."""
        for instruction in instructions:
            match instruction:
                case ToWorker():
                    peer = self.peers.get(("worker", instruction.rank))
                case ToReader():
                    peer = self.peers.get(("reader", instruction.rank))
                case ToServer():
                    peer = self.peers.get(("server", instruction.server))
                case SaveSlices():
                    self._save(instruction)
                    continue
                case ReplicaCaughtUp() | LeadMoved() | HeldPushes():
                    self._report(instruction)
                    continue
            if peer is not None:
                peer.send(instruction.message, instruction.payload)

    # ---- the handler: called on each connection's reader thread --------------------------------------------------

    def start_session(self, peer: PeerConnection) -> None:
        self.use(peer)
        connected: dict[Role, Callable[[int], list[Instruction]]] = {
            "worker": self._state.on_worker_connected,
            "server": self._state.on_server_connected,
            "reader": self._state.on_reader_connected,
        }
        self.follow(connected[peer.member.role](peer.member.rank))

    def end_session(self, peer: PeerConnection) -> None:
        role, rank = peer.member.role, peer.member.rank
        if role == "worker":
            self.sharing.forget(peer.member)
            self._state.on_worker_disconnected(rank)
        elif role == "reader":
            self._state.on_reader_disconnected(rank)
        else:
            self.follow(self._state.on_server_disconnected(rank))

    def receive_buffer_for(self, peer: PeerConnection, message: WireMessage, size: int) -> memoryview | None:
        role, rank = self._key_of(peer)
        # the casts: ps/permits.py admits these messages of this role only
        if role == "worker":
            return self._state.receive_buffer_for(rank, cast(FromWorker, message), size)
        if role == "reader":
            raise ProtocolError(f"reader/{rank}: {type(message).__name__} with a payload", where=f"reader/{rank}")
        return self._state.replica_buffer_for(rank, cast(BetweenServers, message), size)

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        role, rank = self._key_of(peer)
        if role == "reader":
            self._on_read(rank, cast(FromReader, message))
            return
        size = 0 if payload is None else len(payload)
        shared = self.sharing.find_shared_bytes(peer, message)
        if isinstance(message, SharedMemoryOffer):
            return
        with self._in_order(message):
            if role == "worker":
                self.follow(self._state.on_worker_message(rank, cast(FromWorker, message), size, shared))
            else:
                self.follow(self._state.on_server_message(rank, cast(BetweenServers, message), size))

    def _on_read(self, reader: int, message: FromReader) -> None:
        """Answer a reader; answers about different shards may be sent in any order."""
        self.follow(self._state.on_reader_message(reader, message))

    def _in_order(self, message: WireMessage) -> AbstractContextManager[object]:
        """Return the lock to hold from the arrival of a message until all resulting messages are queued."""
        if isinstance(message, Step | StepInBackward):
            return self._steps
        shard = getattr(message, "shard", None)
        return nullcontext() if shard is None else self._locks[shard]

    def _key_of(self, peer: PeerConnection) -> MemberKey:
        """Return a member whose connection is in use."""
        key = peer.member.role, peer.member.rank
        if self.peers.get(key) is not peer or self._closed:
            raise ProtocolError(f"{peer.member} has another connection, or this server ends")
        return key
