"""`python -m psctl.server.main`: runs one server process.

The process listens, joins the coordinator, reports its address, receives its shards with the decision, loads them from
the checkpoint when the job continues from one, and serves workers (dense_connections.py) until the coordinator sends
Leave or is lost. A separate thread streams the parts of checkpoints to the coordinator, at the pace of the network,
while training continues.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from psctl.client.model_layout import terms_of
from psctl.client.server_connections import Dial
from psctl.client.shared_buffers import SharedBuffers, SharedRows
from psctl.errors import CheckpointCorrupt, ConnectionFailed, PsctlError
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.job_permits import COORDINATION
from psctl.job.membership_messages import (
    CountUntil,
    LostWorkerClocks,
    Members,
    MembersSet,
    ProtocolViolation,
    Reassign,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
    WorkerGone,
)
from psctl.job.message import JobMessage
from psctl.job.training_messages import Decision, Heartbeat, Join, Leave, MemberReady, Welcome
from psctl.permits import Permits
from psctl.process import lifeline
from psctl.process.certificate_renewal import CertificateRenewer
from psctl.process.coordinator_connection import CoordinatorConnection, MemberConnection
from psctl.process.leader_file import CoordinatorAddress
from psctl.process.process_orders import ProcessOrders, read_orders
from psctl.process.rejected_connections import RejectionLog
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.messages import PART
from psctl.ps.outputs import HeldPushes, LeadMoved, ReplicaCaughtUp, SaveSlices
from psctl.ps.permits import PARAMETERS, TABLES
from psctl.ps.pieces import torch_dtype
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.server_optimizers import scalars
from psctl.ps.snapshot import WantedSlice, by_parameter, check_shapes, shard_loadings, wanted_slices
from psctl.server.dense_connections import DenseConnections, DenseReport
from psctl.server.peer_connections import PeerConnections
from psctl.server.table_connections import TableConnections
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import PeerConnection
from psctl.transport.shared_memory import inherited
from psctl.types import Address, Member, ServerAt

BEAT = 1.0
"""Seconds between two heartbeats to the coordinator."""

QUEUED = 8 << 20
"""Bytes of a checkpoint part that may be queued at once, so that heartbeats and answers are not delayed."""

T = TypeVar("T")

Membership = Reassign | WorkerGone | CountUntil | Members
"""Messages of the coordinator about the members of the job."""


class Server:
    """One server of a job, and the handler of its connection to the coordinator.

    Args:
        me: this server.
        dial: connects to other servers; None: there are none.
        sharing: memory that workers of this host read, and theirs; None: all bytes are sent.
        make_tables: makes the tables, given where their parts of checkpoints go; None: this server has none.
    """

    def __init__(
        self, me: Member, dial: Dial | None = None, sharing: SharedBuffers | None = None,
        make_tables: Callable[[Callable[[SaveSlices], None]], TableConnections] | None = None,
    ) -> None:  # fmt: skip
        self.me = me
        self.tables = make_tables(self._save_tables_later) if make_tables is not None else None
        self.dense = DenseConnections(me, self._save_later, self._report, sharing, dial, self._report_unreachable)
        self._early: list[Membership] = []  # arrived before the decision
        self._gone: dict[int, int] = {}  # worker -> its lost incarnation
        self.state: DenseServer | None = None
        self._changed = threading.Condition()
        self._coordinator: MemberConnection | None = None
        self._welcome: Welcome | None = None
        self._decision: Decision | None = None
        self._ending: str | None = None
        self._failed = False
        self._loading: ReceivedSlices | None = None
        self._load_end: LoadEnd | None = None
        self._saves: queue.SimpleQueue[tuple[SaveSlices, bool] | None] = (
            queue.SimpleQueue()
        )  # True: of tables; None: the end

    # ---- the main thread -----------------------------------------------------------------------------------------

    def run(self, coordinator: MemberConnection, address: Address) -> int:
        """Serve the job until it ends.

        Args:
            coordinator: the connection to it; this object is its handler.
            address: where workers and other servers reach this server.

        Returns:
            The exit status: 0 after Leave, 1 when the coordinator was lost or a checkpoint could not be read.
        """
        self._coordinator = coordinator
        coordinator.send(Join(os.getpid()))
        welcome = self._wait_for(lambda: self._welcome)
        coordinator.send(MemberReady(address))
        threading.Thread(target=self._stream_saves, name="saves", daemon=True).start()
        decision = self._wait_for(lambda: self._decision)
        if welcome is not None and decision is not None:
            try:
                self._serve(decision, welcome.world)
            except PsctlError as error:
                self._end(f"{self.me}: {error.message}", failed=True)
        self.dense.close(self._ending or "")
        self._saves.put(None)
        if self._failed:
            print(f"psctl: {self.me} ends: {self._ending}", file=sys.stderr, flush=True)
        return 1 if self._failed else 0

    def _serve(self, decision: Decision, world: int) -> None:
        if decision.layout.scalars != scalars():  # torch asks its default dtype when it makes an optimizer's numbers
            torch.set_default_dtype(torch_dtype(decision.layout.scalars))
        terms = terms_of(decision, world)
        resume = decision.resume
        restored = resume is not None and bool(resume.checkpoint) and decision.update == "server"
        sharing = self.dense.sharing
        state = self.dense.make_shards(
            lambda guard: DenseServer(terms, decision.shards, self.me.rank, guard, sharing, restored=restored),
            len(decision.shards),
        )
        self.dense.assign(decision.assignment)
        with self._changed:
            self.state, early, self._early = state, self._early, []
        for message in early:
            self._on_membership(message)
        own = [index for index, owner in enumerate(decision.assignment.owners) if owner == self.me.rank]
        if (
            restored and resume is not None and own
        ):  # one that joins later owns none: the checkpoint may be deleted by then
            saved = by_parameter(resume.tensors)
            check_shapes(decision.layout, saved, resume.checkpoint)
            wanted = {index: wanted_slices(decision.layout, state.shards[index].held, saved) for index in own}
            self._load(state, wanted, resume.checkpoint)
        self._wait_for(lambda: None)

    def _load(self, state: DenseServer, wanted: dict[int, list[WantedSlice]], checkpoint: str) -> None:
        """Ask for the slices, wait until they have arrived, and load them into the shards."""
        self._loading, shards = shard_loadings(wanted)
        assert self._coordinator is not None
        self._coordinator.send(LoadWanted(0, self._loading.slices))
        end = self._wait_for(lambda: self._load_end)
        if end is None:
            return
        if end.problem:
            raise CheckpointCorrupt(f"{checkpoint}: {end.problem}", where=checkpoint)
        self._loading = None
        self.dense.follow(state.on_loaded(shards))

    def _wait_for(self, found: Callable[[], T | None]) -> T | None:
        """Return the first result of `found` that is not None, sending heartbeats meanwhile; None at the end."""
        while True:
            with self._changed:
                if self._ending is None and (value := found()) is not None:
                    return value
                if self._ending is None:
                    self._changed.wait(BEAT)
                if self._ending is not None:
                    return None
            if self._coordinator is not None:  # without the lock, which its reader needs to receive
                self._coordinator.send(Heartbeat(self._step(), self._doing()))

    def _step(self) -> int:
        return self.state.version if self.state is not None else 0

    def _doing(self) -> str:
        if self.state is None:
            return "waiting for the plan"
        return "loading" if self._loading is not None else "serving"

    def _end(self, reason: str, *, failed: bool) -> None:
        with self._changed:
            if self._ending is None:
                self._ending, self._failed = reason, failed
            self._changed.notify_all()

    # ---- members of the job --------------------------------------------------------------------------------------

    def _on_membership(self, message: Membership) -> None:
        state = self.state
        assert state is not None, "messages that arrive before the decision wait for it"
        match message:
            case Reassign():
                self.dense.assign(message.assignment)
            case WorkerGone():
                self._gone[message.rank] = message.incarnation
                self.dense.end_worker(message.rank, message.incarnation)
                self.dense.follow(state.on_worker_lost(message.rank))
            case CountUntil():
                self.dense.follow(state.count_until(message.rank, message.clock))
            case Members():
                self.dense.follow(state.set_members(message.clock, message.ranks))
                if message.ticket and self._coordinator is not None:
                    self._coordinator.send(MembersSet(message.ticket))

    def _report(self, report: DenseReport) -> None:
        """Send the coordinator a report of the connections or the shards."""
        assert self._coordinator is not None, "there was a decision"
        match report:
            case ProtocolViolation():
                print(f"psctl: {self.me} refused {report.member}: {report.reason}", file=sys.stderr, flush=True)
                self._coordinator.send(report)
            case ReplicaCaughtUp():
                self._coordinator.send(ShardCaughtUp(report.epoch, report.shard, report.server))
            case LeadMoved():
                self._coordinator.send(ShardHandedOver(report.epoch, report.shard))
            case HeldPushes():
                incarnation = self._gone[report.rank]
                held = LostWorkerClocks(
                    report.rank, incarnation, report.clocks, report.versions, report.rank_state_clock,
                    report.separate_clocks,
                )  # fmt: skip
                self._coordinator.send(held)

    def _report_unreachable(self, at: ServerAt, error: ConnectionFailed) -> None:
        if self._coordinator is not None:
            self._coordinator.send(ServerUnreachable(at.rank, at.incarnation, error.message))

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save_later(self, save: SaveSlices) -> None:
        self._saves.put((save, False))

    def _save_tables_later(self, save: SaveSlices) -> None:
        self._saves.put((save, True))

    def _stream_saves(self) -> None:
        while self._stream_next():
            pass

    def _stream_next(self) -> bool:
        """Send the next part of a checkpoint; return whether more follow. Nothing refers to it afterwards."""
        next_one = self._saves.get()
        if next_one is None:
            return False
        save, of_tables = next_one
        assert self._coordinator is not None
        try:
            stream_save(self._coordinator, save, tables=of_tables)
        except ConnectionFailed as error:
            self._end(error.message, failed=True)
            return False
        return True

    # ---- the handler: the coordinator connection's reader thread -------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Do nothing: `run` sends the first message."""

    def receive_buffer_for(self, peer: PeerConnection, message: JobMessage, size: int) -> memoryview | None:
        """Return the part of the tensor into which loaded bytes are received."""
        if isinstance(message, LoadPart) and message.ticket and self.tables is not None:
            return self.tables.load_buffer_for(message, size)
        loading = self._loading
        if not isinstance(message, LoadPart) or loading is None:
            return None
        return loading.part(message.index, message.offset, size)

    def on_message(self, peer: PeerConnection, message: JobMessage, payload: memoryview | None) -> None:
        """Process a message of the coordinator."""
        try:
            if self.tables is not None and self.tables.on_coordinator_message(message):
                return
        except ConnectionFailed as error:
            self._end(error.message, failed=True)
            return
        if isinstance(message, Membership):
            with self._changed:
                early = self.state is None
                if early:
                    self._early.append(message)
            if not early:
                self._on_membership(message)
            return
        with self._changed:
            match message:
                case Welcome():
                    self._welcome = message
                    if self.tables is not None and self._coordinator is not None:
                        self.tables.set_coordinator(self._coordinator.send, message.world)
                case Decision():
                    self._decision = message
                case LoadEnd():
                    self._load_end = message
                case Leave():
                    self._end(f"ended by the coordinator: {message.reason}", failed=False)
                case _:
                    pass  # the bytes of LoadPart are where `receive_buffer_for` put them; the rest is for workers
            self._changed.notify_all()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """End: without a coordinator no message would end this server."""
        self._end(f"the coordinator is lost: {error.message}", failed=True)


def stream_save(coordinator: MemberConnection, save: SaveSlices, *, tables: bool = False) -> None:
    """Send a server's part of a checkpoint to the coordinator, at the pace of the network.

    Raises:
        ConnectionFailed: the coordinator is lost.
    """
    coordinator.send(SaveBegin(save.step, [copied.slice for copied in save.copied], tables=tables, base=save.base))
    queued = 0
    for index, copied in enumerate(save.copied):
        for offset in range(0, len(copied.data), PART):
            part = copied.data[offset : offset + PART]
            coordinator.send(SavePart(save.step, index, offset, tables), part)
            queued += len(part)
            if queued >= QUEUED:
                coordinator.flush()
                queued = 0
    coordinator.send(SaveEnd(save.step, tables))


def serve(orders: ProcessOrders) -> int:
    """Run the server that the orders describe; return the exit status."""
    credentials = Credentials(
        orders.job, orders.member, orders.authority, orders.certificate, orders.key, orders.preauth_secret
    )
    turned_away = RejectionLog(str(orders.member))

    def accept(kinds: Permits, connections: PeerConnections) -> Address:
        allow = connections.allow
        made = Acceptor(
            orders.bind,
            orders.ports,
            credentials,
            kinds,
            connections,
            allow,
            orders.congestion,
            refused=turned_away,
            sealed=orders.sealed,
        )
        closing.callback(made.close)
        return made.address

    def dialler(kinds: Permits) -> Dial:
        return lambda member, at, handler: dial(
            at, credentials, member, kinds, handler, congestion=orders.congestion, sealed=orders.sealed
        )

    def make_tables(save: Callable[[SaveSlices], None]) -> TableConnections:
        memory = SharedRows(segments)
        return TableConnections(
            orders.member, dialler(TABLES), lambda tables: accept(TABLES, tables), save, memory, orders.folder
        )

    segments = inherited(orders.member, orders.segments)
    server = Server(orders.member, dialler(PARAMETERS), SharedBuffers(segments), make_tables)
    with ExitStack() as closing:
        address = accept(PARAMETERS, server.dense)
        renewing = CertificateRenewer(credentials, server, print)
        at = CoordinatorAddress(orders.coordinator, Path(orders.leader_dir) if orders.leader_dir else None)
        coordinator = CoordinatorConnection(
            renewing,
            lambda connection: dial(
                at.get(), credentials, "coordinator", COORDINATION, connection, congestion=orders.congestion
            ),
            address=at,
        )
        status = server.run(coordinator, address)
        if server.tables is not None:
            server.tables.close("the server ends")
        coordinator.close("the server ends")
        coordinator.join(5.0)
        return status


def main() -> int:
    """Run one server; its orders are in memory (sealed_memory.py)."""
    lifeline.arm()
    lifeline.hide_memory()
    orders = read_orders()
    if orders is None:
        print("psctl: a server is started by psctl's agent, not by hand", file=sys.stderr)
        return 2
    # Reader threads are the parallelism: one sums while the next receives. More threads a sum would fight over cores.
    torch.set_num_threads(1)
    try:
        return serve(orders)
    except PsctlError as error:
        print(f"psctl: {orders.member}: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
