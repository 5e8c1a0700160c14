"""A server's tables: connections of workers and other servers, and the coordinator's messages about tables.

These connections are separate from the dense connections: a script that opens no store has none. All reader threads
call one state machine (TableServer) under one lock and queue its answers under the same lock, so that answers are sent
in the order in which they were made. Payloads are received without a lock: a worker's payload into its own buffer, an
entry for a replica into the buffer that the state machine returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from psctl.client.malloc_settings import keep_freed_memory
from psctl.client.server_connections import Dial
from psctl.client.shared_buffers import SharedRows
from psctl.errors import ConnectionFailed, ProtocolError
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted
from psctl.job.examples import step_mark
from psctl.job.membership_messages import (
    CountUntil,
    Members,
    ProtocolViolation,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
    WorkerGone,
)
from psctl.job.message import JobMessage
from psctl.job.table_server_messages import (
    ReadRows,
    ReadWanted,
    ServeTables,
    TablesAssigned,
    TablesReady,
    TablesSave,
    TablesSaved,
)
from psctl.permits import WireMessage
from psctl.process.user_functions import JobFunctions
from psctl.ps.messages import SharedMemoryOffer
from psctl.ps.outputs import LeadMoved, LoadTables, ReplicaCaughtUp, SaveSlices, ToServer, ToWorker
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.table_messages import AnswersRead, ReadKeys, TableBetween, TableFromWorker
from psctl.ps.tables.server.read_answers import READERS
from psctl.ps.tables.server.saved_tables import wanted
from psctl.ps.tables.server.table_server import TableOutput, TableServer
from psctl.ps.tables.table_packing import allocate_private
from psctl.ps.tables.table_state import FOREVER, last_sequence_at
from psctl.server.live_reads import LiveReads, as_sent
from psctl.server.peer_connections import PeerConnections
from psctl.server.snapshot_reads import SnapshotReads
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Address, Member, ServerAt, TensorSlice


class SendToCoordinator(Protocol):
    """Sends a message to the coordinator, with its payload if it has one."""

    def __call__(self, message: JobMessage, payload: memoryview | None = None, /) -> object: ...


FIRST_TICKET = 1
"""Ticket of the first table shard that is loaded; smaller tickets are for dense parameters."""


class TableConnections(PeerConnections):
    """Dispatches messages of workers, other servers and the coordinator to the state machine of the tables.

    Args:
        me: this server.
        dial: connects to another server's tables.
        listen: listens for connections of workers and servers, and returns where; None: the caller does.
        save: called with this server's part of a checkpoint; must not block.
        memory: memory that workers of this host read, and theirs; None: all bytes are sent.
        folder: the job's code on this host, from which users' functions are imported.
    """

    def __init__(
        self, me: Member, dial: Dial, listen: Callable[[PeerConnections], Address] | None = None,
        save: Callable[[SaveSlices], object] = lambda part: None, memory: SharedRows | None = None, folder: str = "",
    ) -> None:  # fmt: skip
        super().__init__(me, self._report_violation, dial, self._report_unreachable)
        self._listen, self._save, self._memory, self._folder = listen, save, memory, folder
        self._send_to_coordinator: SendToCoordinator = lambda *message: None
        self._state: TableServer | None = None
        self.unread: dict[int, deque[memoryview]] = {}  # by worker: answers in shared memory that it may be reading
        self._answers_read: dict[int, int] = {}  # by worker: number of these answers that it has read
        self._saved: list[TensorSlice] = []
        self._loading: dict[int, ReceivedSlices] = {}  # by ticket
        self._shards, self._full_every = 0, 1
        self._world: set[int] = set()
        self._last: dict[int, int] = {}  # by lost worker: the last sequence that counts
        self._gone: dict[int, int] = {}  # the same, of the workers that are not replaced

    # ---- the coordinator: its connection's reader thread ---------------------------------------------------------

    def set_coordinator(self, send: SendToCoordinator, world: int) -> None:
        """Set how messages reach the coordinator, and the number of workers."""
        self._send_to_coordinator, self._world = send, set(range(world))

    def on_coordinator_message(self, message: JobMessage) -> bool:
        """Process a message of the coordinator; returns False when it is not about tables alone."""
        match message:
            case ServeTables():
                self._full_every = message.full_every
                assert self._listen is not None, "only servers with tables receive this"
                self._send_to_coordinator(TablesReady(self._listen(self)))
            case TablesAssigned():
                self.assign(message)
            case TablesSave():
                self._run(lambda state: state.request_checkpoint(message.step))
            case TablesSaved():
                with self._lock:
                    if self._state is not None:
                        self._state.on_saved(message.step)
            case ReadWanted():
                self._read(message)
            case LoadEnd() if message.ticket >= FIRST_TICKET:
                self._loaded(message)
            case WorkerGone():
                self.end_worker(message.rank, message.incarnation)
                return False
            case CountUntil():
                self._last[message.rank] = last_sequence_at(step_mark(message.clock + 1, inside=False))
                return False
            case Members():
                self._gone = {rank: self._last.get(rank, FOREVER) for rank in self._world - set(message.ranks)}
                self._run(lambda state: state.remove_workers(self._gone))
                return False
            case _:
                return False
        return True

    def assign(self, message: TablesAssigned) -> None:
        """Adopt a new assignment of shards; one that is not newer than the newest changes nothing."""
        new = message.assignment
        if not self.accept_members(new.epoch, new.servers):
            return
        self._shards, self._saved = len(new.chains), self._saved or message.saved
        with self._lock:
            if self._state is None:
                keep_freed_memory()
                allocate = allocate_private if self._memory is None else self._memory.allocate
                self._state = TableServer(
                    self.me.rank, JobFunctions(self._folder), len(new.chains), allocate, self._full_every
                )
            alive = [at.rank for at in new.servers]
            self._follow(self._state.on_assignment(new.epoch, new.chains, new.copies, alive))
            if message.begins:
                self._follow(self._state.start_shards(restored=bool(message.saved)))
            if self._gone:  # a server that joins late was sent their loss before
                self._follow(self._state.remove_workers(self._gone))
        self.open(new.servers)

    def end_worker(self, rank: int, incarnation: int) -> None:
        """As PeerConnections; also free the memory that the lost worker was reading. Its pushes stay."""
        super().end_worker(rank, incarnation)
        with self._lock:
            if ("worker", rank) not in self.peers:
                self.unread.pop(rank, None)

    def allow(self, member: Member) -> str | None:
        """As PeerConnections; of servers only those of the newest assignment of tables may connect."""
        if member.role == "server" and member not in (self._servers or ()):
            return f"{member} of incarnation {member.incarnation} is not of the newest assignment of tables"
        return super().allow(member)

    def load_buffer_for(self, message: LoadPart, size: int) -> memoryview | None:
        """Return where loaded bytes go."""
        loading = self._loading.get(message.ticket)
        return loading.part(message.index, message.offset, size) if loading is not None else None

    def _loaded(self, message: LoadEnd) -> None:
        loading = self._loading.pop(message.ticket)
        if message.problem:
            raise ConnectionFailed(f"the tables of the checkpoint could not be read: {message.problem}")
        if loading.missing:
            raise ConnectionFailed(f"the tables of the checkpoint came without {loading.missing} of their bytes")
        self._run(lambda state: state.on_loaded(message.ticket - FIRST_TICKET, loading.by_name()))

    def _read(self, wanted: ReadWanted) -> None:
        """Answer a reader outside the job."""
        with self._lock:
            if self._state is None or self._closed:
                self._send_to_coordinator(ReadRows(wanted.ticket, wanted.host, -1, 0, [], [], [], []))
            else:
                self._follow(SnapshotReads(self._state).on_read(wanted))

    def _run(self, step: Callable[[TableServer], Sequence[TableOutput]]) -> None:
        with self._lock:
            if self._state is not None:
                self._follow(step(self._state))

    def _report_violation(self, violation: ProtocolViolation) -> None:
        self._send_to_coordinator(violation)

    def _report_unreachable(self, at: ServerAt, error: ConnectionFailed) -> None:
        self._send_to_coordinator(ServerUnreachable(at.rank, at.incarnation, error.message))

    # ---- the handler: called on each connection's reader thread --------------------------------------------------

    def start_session(self, peer: PeerConnection) -> None:
        rank = peer.member.rank
        with self._lock:
            self.use(peer)
            assert self._state is not None, "connections are used from the first assignment on"
            if peer.member.role == "server":
                self._follow(self._state.on_server_connected(rank))
            elif peer.member.role == "worker":  # one that connects again reads no answer of its former connection
                self.unread[rank], self._answers_read[rank] = deque(), 0
                self._state.on_worker_disconnected(rank)

    def end_session(self, peer: PeerConnection) -> None:
        """Forget a connection; keep the messages that arrived on it, and the memory that a worker may be reading."""
        if self._memory is not None:
            self._memory.forget(peer.member)
        with self._lock:
            if self._state is None or self._closed:
                return
            if peer.member.role == "server":
                self._follow(self._state.on_server_disconnected(peer.member.rank))
            elif peer.member.role == "worker":
                self._state.on_worker_disconnected(peer.member.rank)

    def receive_buffer_for(self, peer: PeerConnection, message: WireMessage, size: int) -> memoryview | None:
        # the casts: ps/permits.py admits these messages of this role only
        if peer.member.role in ("worker", "reader"):
            return allocate_private(size).data
        with self._lock:
            return self._state_for(peer).replica_buffer_for(peer.member.rank, cast(TableBetween, message), size)

    def on_message(self, peer: PeerConnection, message: WireMessage, payload: memoryview | None) -> None:
        size = 0 if payload is None else len(payload)
        if peer.member.role == "server":
            with self._lock:
                self._follow(
                    self._state_for(peer).on_server_message(peer.member.rank, cast(TableBetween, message), size)
                )
            return
        if isinstance(message, ReadKeys):
            with self._lock:
                found = LiveReads(self._state_for(peer)).on_read(peer.member.rank, message, payload or memoryview(b""))
                self._follow(found)
            return
        shared = self._memory.find_shared_bytes(peer, message) if self._memory is not None else None
        if isinstance(message, SharedMemoryOffer):
            return
        if isinstance(message, AnswersRead):
            self._free_read_answers(peer.member.rank, message.answers)
            return
        data = shared or payload or memoryview(b"")
        with self._lock:
            self._follow(
                self._state_for(peer).on_worker_message(peer.member.rank, cast(TableFromWorker, message), data)
            )

    def _state_for(self, peer: PeerConnection) -> TableServer:
        if self._state is None or self._closed or self.peers.get((peer.member.role, peer.member.rank)) is not peer:
            raise ProtocolError(f"{peer.member} has another connection, or this server ends")
        return self._state

    def _free_read_answers(self, worker: int, answers: int) -> None:
        """Free the answers in shared memory that a worker has read; `answers` counts those of this connection."""
        with self._lock:
            held = self.unread.get(worker, deque())
            more = answers - self._answers_read.get(worker, 0)
            if not 0 <= more <= len(held):
                raise ProtocolError(f"worker/{worker} reports {more} answers as read, of {len(held)} that it can read")
            self._answers_read[worker] = answers
            for _ in range(more):
                held.popleft()

    def _follow(self, outputs: Sequence[TableOutput]) -> None:
        """Execute the state machine's outputs; messages to a member without a connection are made again later."""
        for output in outputs:
            match output:
                case ToWorker() if output.rank == READERS:
                    self._send_to_coordinator(cast(ReadRows, output.message), output.payload)
                case ToWorker() if output.rank < READERS:
                    shown = as_sent(output)
                    peer = self.peers.get(("reader", shown.rank))
                    if peer is not None:
                        peer.send(shown.message, shown.payload)
                case ToWorker():
                    peer = self.peers.get(("worker", output.rank))
                    if peer is not None:
                        self._send(peer, output)
                case ToServer():
                    peer = self.peers.get(("server", output.server))
                    if peer is not None:
                        peer.send(output.message, output.payload)
                case ReplicaCaughtUp():
                    self._send_to_coordinator(ShardCaughtUp(output.epoch, output.shard, output.server, tables=True))
                case LeadMoved():
                    self._send_to_coordinator(ShardHandedOver(output.epoch, output.shard, tables=True))
                case SaveSlices():
                    self._save(output)
                case LoadTables():
                    ticket, slices = output.shard + FIRST_TICKET, wanted(self._saved, output.shard, self._shards)
                    if ticket not in self._loading:  # the answer to an earlier request is on its way
                        self._loading[ticket] = ReceivedSlices(slices)
                        self._send_to_coordinator(LoadWanted(ticket, slices))

    def _send(self, peer: PeerConnection, output: ToWorker) -> None:
        shared = None
        if self._memory is not None:
            shared = self._memory.share(output.rank, output.message, output.payload)
        if shared is not None and output.payload is not None:
            self.unread[output.rank].append(output.payload)
            peer.send(shared)
        else:
            peer.send(output.message, output.payload)
