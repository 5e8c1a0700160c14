"""Reads parameters from the job's servers, all of one step or at most so many steps apart.

Connections' threads receive the values; the script's thread waits for them on the session's condition.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import torch

from psctl.client.server_connections import Dial, ServerConnections, Unreachable
from psctl.errors import ConnectionFailed
from psctl.permits import WireMessage
from psctl.ps.dense.client.parameter_reads import ParameterReads
from psctl.ps.messages import Leads, RankStateRead, ShardRead
from psctl.ps.outputs import ToServer
from psctl.ps.pieces import torch_dtype
from psctl.ps.shards import sizes
from psctl.reader.reader_session import ReaderSession
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Assignment, Shard

LOOK = 0.5
"""Seconds between two looks whether training stands still, while a version is awaited."""


class ReadValues(msgspec.Struct, frozen=True):
    """The values of shards: a flat tensor by shard; `step`: all workers' steps before it are in all of them."""

    step: int
    newest: int  # version
    tensors: dict[int, torch.Tensor]


class ParameterReader:
    """Reads shards; also the handler of the connections to servers.

    Args:
        session: with the coordinator.
        shards: all shards of the job.
        dial: connects to a server.
        unreachable: called for a server that could not be reached.
    """

    def __init__(
        self, session: ReaderSession, shards: Sequence[Shard], dial: Dial, unreachable: Unreachable
    ) -> None:  # fmt: skip
        self._session, self._shards = session, shards
        self._reads = ParameterReads(sizes(shards))
        self._connections = ServerConnections(dial, self, unreachable)
        self._epoch = -1

    def assign(self, assignment: Assignment) -> None:
        """Keep connections to the servers of the newest assignment."""
        with self._session.changed:
            if assignment.epoch <= self._epoch:
                return
            self._epoch = assignment.epoch
        self._connections.assign(assignment.servers)

    def read(self, wanted: Collection[int], spread: int | None, after: int, every: int = 1) -> ReadValues | None:
        """Read shards, at a version that is `every` newer than `after`, or at the last one when training has ended.

        Args:
            wanted: the shards.
            spread: versions by which they may differ; None: any.
            after: -1: the newest version, at once.
            every: versions.

        Returns:
            Their values; None where training has ended and there is no newer version.
        """
        reads, changed = self._reads, self._session.changed
        version = 0 if after < 0 else after + every
        while True:
            with changed:
                final = self._session.has_training_ended
                outs = reads.begin(wanted, 0 if final else version)
            self._send(outs)
            with changed:
                while not reads.is_complete and self._session.has_training_ended == final:
                    changed.wait(LOOK)
                if not reads.is_complete:
                    continue  # training has ended: no later version comes
                if spread is not None and reads.differ_by() > spread:
                    version = reads.next_version()
                    continue
                reads.accept()
                newest = max(reads.versions.values(), default=0)
                if newest <= after:
                    return None
                return ReadValues(min(reads.clocks.values(), default=0), newest, self._tensors())

    def read_rank_state(self, step: int) -> tuple[int, bytes]:
        """Return rank 0's state at a step, or the newest one that there is, and its step; -1 and nothing: none."""
        with self._session.changed:
            outs = self._reads.begin_state(step)
        self._send(outs)
        with self._session.changed:
            while self._reads.rank_state is None:
                self._session.changed.wait(LOOK)
            return self._reads.rank_state

    def close(self, reason: str) -> None:
        """End all connections."""
        self._connections.close(reason, 1.0)

    def _tensors(self) -> dict[int, torch.Tensor]:
        return {
            shard: torch.frombuffer(data, dtype=torch_dtype(self._shards[shard].dtype))
            if data
            else torch.empty(0, dtype=torch_dtype(self._shards[shard].dtype))
            for shard, data in self._reads.values.items()
        }

    def _send(self, outs: Sequence[ToServer]) -> None:
        for out in outs:
            self._connections.send(out.server, out.message)

    # ---- the handler: each connection's reader thread ----------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Do nothing: the server announces the shards that it leads."""

    def receive_buffer_for(self, peer: PeerConnection, message: WireMessage, size: int) -> memoryview | None:
        """Return where a payload goes."""
        if not isinstance(message, ShardRead | RankStateRead):
            return None
        with self._session.changed:
            return self._reads.receive_buffer_for(peer.member.rank, message, size)

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        """Handle a server's message."""
        outs: list[ToServer] = []
        with self._session.changed:
            match message:
                case Leads():
                    outs = self._reads.on_leads(peer.member.rank, message)
                case ShardRead() | RankStateRead():
                    self._reads.on_answer(peer.member.rank, message, len(payload) if payload is not None else 0)
                case _:
                    pass  # it is for workers
            self._session.changed.notify_all()
        self._send(outs)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Forget what a server led; it is dialled again."""
        with self._session.changed:
            self._reads.on_disconnected(peer.member.rank)
