"""`python -m psctl.server.main`: one server process, from its orders to its end.

It listens, joins the coordinator, says where it listens, learns from the decision which shards are its own, loads them
from the checkpoint when the job goes on from one, and serves workers (dense_connections.py) until it is told to
leave or the
coordinator is lost. Its parts of checkpoints are streamed to the coordinator by a thread of their own, at the pace at
which the network takes them, while training goes on.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from psctl.client.model_layout import terms_of
from psctl.client.server_links import Links, named
from psctl.client.shared_buffers import SharedBuffers, SharedRows
from psctl.errors import CheckpointCorrupt, ConnectionFailed, PsctlError
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted
from psctl.job.job_permits import COORDINATION
from psctl.job.membership_messages import (
    CountUntil,
    LostWorkerClocks,
    Members,
    ProtocolViolation,
    Reassign,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
    WorkerGone,
)
from psctl.job.training_messages import Decision, Heartbeat, Join, Leave, MemberReady, Welcome
from psctl.process import lifeline
from psctl.process.certificate_renewal import CertificateRenewer
from psctl.process.process_orders import ProcessOrders, read_orders
from psctl.process.rejected_connections import RejectionLog
from psctl.ps.dense.server.dense_server import ServerMind
from psctl.ps.outputs import CaughtUp, HandedOver, Held, Save
from psctl.ps.permits import PARAMETERS, TABLES
from psctl.ps.pieces import torch_dtype
from psctl.ps.server_optimizers import scalars, warm_up
from psctl.ps.snapshot import Loading, Wanted, by_parameter, check_shapes, wanted_slices
from psctl.server.checkpoint_stream import Coordinator, stream_save
from psctl.server.dense_connections import Desk, Fellow, Report
from psctl.server.table_connections import TableDesk
from psctl.server.table_service import TablePart
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import PeerConnection
from psctl.transport.shared_memory import inherited
from psctl.types import Address, Assignment, Member, ServerAt

BEAT = 1.0
"""Seconds between two signs of life to the coordinator."""

Membership = Reassign | WorkerGone | CountUntil | Members
"""What the coordinator says of who takes part."""


class Server:
    """One server of a job, and the handler of its connection to the coordinator.

    Args:
        me: which server this is.
        listen: has its tables listen, and returns where; None: it holds none.
        dial: connects to another server's tables.
        sharing, memory: what workers of this host read, and theirs: of parameters, of tables; None: bytes are sent.
        folder: the job's code on this host, from which tables import users' functions.
    """

    def __init__(
        self, me: Member, listen: Callable[[TableDesk], Address] | None = None,
        dial: Callable[[Member, Address, Any], Any] | None = None, sharing: SharedBuffers | None = None,
        memory: Any = None, folder: str = "",
    ) -> None:  # fmt: skip
        self.me = me
        save = self._save_tables_later
        self.tables = (
            TablePart(me, listen, dial, save, memory, folder) if listen is not None and dial is not None else None
        )
        self.desk = Desk(me, self._save_later, self._report, sharing)
        self._links: Links | None = None
        self._early: list[Membership] = []  # said before there was a decision
        self._gone: dict[int, int] = {}  # worker -> its incarnation that is dead
        self.mind: ServerMind | None = None
        self._changed = threading.Condition()
        self._coordinator: Coordinator | None = None
        self._welcome: Welcome | None = None
        self._decision: Decision | None = None
        self._ending: str | None = None
        self._failed = False
        self._loadings: list[tuple[int, int, Loading]] = []  # for each wanted slice: shard, index in it, where
        self._load_end: LoadEnd | None = None
        self._saves: queue.SimpleQueue[tuple[Save, bool] | None] = queue.SimpleQueue()  # True: of tables; None: the end

    # ---- the main thread -----------------------------------------------------------------------------------------

    def run(
        self, coordinator: Coordinator, address: Address, dial: Callable[[Member, Address, Any], Any] | None = None
    ) -> int:
        """Take part in the job to its end.

        Args:
            coordinator: the connection to it; this object is its handler.
            address: where workers and other servers reach this server.
            dial: connects to another server, told its name, its address and the handler; None: there is no other.

        Returns:
            The exit status: 0 when told to leave, 1 when the coordinator was lost or a checkpoint could not be read.
        """
        self._coordinator = coordinator
        if dial is not None:
            self._links = Links(lambda at: dial(named(at), at.address, self._fellow(at)), self._unreachable)
        coordinator.send(Join(os.getpid()))
        welcome = self._wait_for(lambda: self._welcome)
        if joins := welcome is not None and welcome.training:
            warm_up()  # who says that it listens is filled at once, and training waits for who is slow to be filled
        coordinator.send(MemberReady(address))
        if not joins:
            warm_up()  # while the workers' scripts load, and not when they wait for start values
        threading.Thread(target=self._stream_saves, name="saves", daemon=True).start()
        decision = self._wait_for(lambda: self._decision)
        if welcome is not None and decision is not None:
            try:
                self._serve(decision, welcome.world)
            except PsctlError as error:
                self._end(f"{self.me}: {error.message}", failed=True)
        if self._links is not None:
            self._links.close(self._ending or "", BEAT)
        self.desk.close(self._ending or "")
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
        mind = self.desk.open(
            lambda guard: ServerMind(terms, decision.shards, self.me.rank, guard, self.desk.sharing, restored=restored),
            len(decision.shards),
        )
        self._assign(decision.assignment)
        with self._changed:
            self.mind, early, self._early = mind, self._early, []
        for message in early:
            self._member(message)
        own = [index for index, owner in enumerate(decision.assignment.owners) if owner == self.me.rank]
        if restored and resume is not None and own:  # who joins later owns none: the checkpoint may be gone by then
            saved = by_parameter(resume.tensors)
            check_shapes(decision.layout, saved, resume.checkpoint)
            wanted = {index: wanted_slices(decision.layout, mind.shards[index].held, saved) for index in own}
            self._load(mind, wanted, resume.checkpoint)
        self._wait_for(lambda: None)

    def _load(self, mind: ServerMind, wanted: dict[int, list[Wanted]], checkpoint: str) -> None:
        """Ask for the slices, wait until they are here, hand them to the mind."""
        loadings = {index: Loading(slices) for index, slices in wanted.items()}
        self._loadings = [(shard, at, loadings[shard]) for shard, slices in wanted.items() for at in range(len(slices))]
        slices = [want.slice for found in wanted.values() for want in found]
        assert self._coordinator is not None
        self._coordinator.send(LoadWanted(0, slices))
        end = self._wait_for(lambda: self._load_end)
        if end is None:
            return
        if end.problem:
            raise CheckpointCorrupt(f"{checkpoint}: {end.problem}", where=checkpoint)
        self._loadings = []
        self.desk.follow(mind.loaded(loadings))

    def _wait_for(self, found: Callable[[], Any]) -> Any:
        """Return what `found` finds, sending beats while it is None; None when the server is to end."""
        with self._changed:
            while self._ending is None:
                value = found()
                if value is not None:
                    return value
                self._changed.wait(BEAT)
                if self._coordinator is not None and self._ending is None:
                    self._coordinator.send(Heartbeat(self._step(), self._doing()), urgent=True)
        return None

    def _step(self) -> int:
        return self.mind.version if self.mind is not None else 0

    def _doing(self) -> str:
        if self.mind is None:
            return "waiting for the plan"
        return "loading" if self._loadings else "serving"

    def _end(self, reason: str, *, failed: bool) -> None:
        with self._changed:
            if self._ending is None:
                self._ending, self._failed = reason, failed
            self._changed.notify_all()

    # ---- who takes part ------------------------------------------------------------------------------------------

    def _assign(self, assignment: Assignment) -> None:
        self.desk.assigned(assignment)
        if self._links is not None:  # of two servers the one with the higher rank dials
            self._links.assigned([at for at in assignment.servers if at.rank < self.me.rank])

    def _member(self, message: Membership) -> None:
        """Do what the coordinator says of who takes part."""
        mind = self.mind
        assert mind is not None, "what comes before the decision waits for it"
        match message:
            case Reassign():
                self._assign(message.assignment)
            case WorkerGone():
                self._gone[message.rank] = message.incarnation
                self.desk.gone(message.rank, message.incarnation)
                self.desk.follow(mind.gone(message.rank))
            case CountUntil():
                self.desk.follow(mind.count_until(message.rank, message.clock))
            case Members():
                self.desk.follow(mind.members(message.clock, message.ranks))

    def _report(self, what: Report) -> None:
        """Tell the coordinator what the desk has to say to it."""
        assert self._coordinator is not None, "there was a decision"
        match what:
            case ProtocolViolation():
                print(f"psctl: {self.me} refused {what.member}: {what.reason}", file=sys.stderr, flush=True)
                self._coordinator.send(what)
            case CaughtUp():
                self._coordinator.send(ShardCaughtUp(what.epoch, what.shard, what.server))
            case HandedOver():
                self._coordinator.send(ShardHandedOver(what.epoch, what.shard))
            case Held():
                incarnation = self._gone[what.rank]
                said = LostWorkerClocks(what.rank, incarnation, what.clocks, what.versions, what.aside, what.apart)
                self._coordinator.send(said)

    def _fellow(self, at: ServerAt) -> Fellow:
        assert self._links is not None, "it is they who dial"
        return Fellow(self.desk, self._links, at)

    def _unreachable(self, at: ServerAt, error: ConnectionFailed) -> None:
        if self._coordinator is not None:
            self._coordinator.send(ServerUnreachable(at.rank, at.incarnation, error.message))

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _save_later(self, save: Save) -> None:
        self._saves.put((save, False))

    def _save_tables_later(self, save: Save) -> None:
        self._saves.put((save, True))

    def _stream_saves(self) -> None:
        for save, of_tables in iter(self._saves.get, None):
            assert self._coordinator is not None
            try:
                stream_save(self._coordinator, save, tables=of_tables)
            except ConnectionFailed as error:
                self._end(error.message, failed=True)
                return

    # ---- the handler: the coordinator connection's reader thread -------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Nothing to do: `run` speaks first."""

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Loaded bytes go straight to where they are wanted."""
        if isinstance(message, LoadPart) and message.ticket and self.tables is not None:
            return self.tables.place(message, size)
        if not isinstance(message, LoadPart) or not 0 <= message.index < len(self._loadings):
            return None
        _, at, loading = self._loadings[message.index]
        whole = loading.place(at)
        if message.offset < 0 or message.offset + size > len(whole):
            return None
        return whole[message.offset : message.offset + size]

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Take in what the coordinator says."""
        try:
            if self.tables is not None and self.tables.heard(message):
                return
        except ConnectionFailed as error:
            self._end(error.message, failed=True)
            return
        if isinstance(message, Membership):
            with self._changed:
                early = self.mind is None
                if early:
                    self._early.append(message)
            if not early:
                self._member(message)
            return
        with self._changed:
            match message:
                case Welcome():
                    self._welcome = message
                    if self.tables is not None and self._coordinator is not None:
                        self.tables.speak(self._coordinator.send, message.world)
                case Decision():
                    self._decision = message
                case LoadEnd():
                    self._load_end = message
                case Leave():
                    self._end(f"told to leave: {message.reason}", failed=False)
                case _:
                    pass  # LoadPart stands where `place` said; the rest is for workers
            self._changed.notify_all()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Without a coordinator nobody would say when to stop."""
        self._end(f"the coordinator is lost: {error.message}", failed=True)


def serve(orders: ProcessOrders) -> int:
    """Be the server that the orders name; return the exit status."""
    who = Credentials(orders.job, orders.member, orders.authority, orders.certificate, orders.key, orders.knock)
    turned_away = RejectionLog(str(orders.member))

    def allow_tables(member: Member) -> str | None:
        assert server.tables is not None, "it has some"
        return server.desk.allow_worker(member) if member.role != "server" else server.tables.desk.allow_server(member)

    def accept(kinds: Any, desk: Desk | TableDesk) -> Address:
        allow = server.desk.allow if desk is server.desk else allow_tables
        made = Acceptor(orders.bind, orders.ports, who, kinds, desk, allow, orders.congestion, refused=turned_away)
        closing.callback(made.close)
        return made.address

    def dialler(kinds: Any) -> Callable[[Member, Address, Any], Any]:
        return lambda member, at, handler: dial(at, who, member, kinds, handler, congestion=orders.congestion)

    segments = inherited(orders.member, orders.segments)
    own, memory = SharedBuffers(segments), SharedRows(segments)
    server = Server(orders.member, lambda desk: accept(TABLES, desk), dialler(TABLES), own, memory, orders.folder)
    with ExitStack() as closing:
        address = accept(PARAMETERS, server.desk)
        renewing = CertificateRenewer(who, server, print)
        coordinator = dial(orders.coordinator, who, "coordinator", COORDINATION, renewing, congestion=orders.congestion)
        status = server.run(coordinator, address, dialler(PARAMETERS))
        if server.tables is not None:
            server.tables.desk.close("the server ends")
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
