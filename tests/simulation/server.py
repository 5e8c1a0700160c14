"""A simulated server: the shipped DenseServer, and the work of the server's process and connections around it.

Thin on purpose. Not covered: two reader threads inside one state machine at once (calls run one after another, in every
order of arrival), and the rate at which parts of checkpoints are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psctl.errors import ConnectionFailed
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.membership_messages import (
    CountUntil,
    LostWorkerClocks,
    Members,
    Reassign,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
    WorkerGone,
)
from psctl.job.training_messages import Decision, Join, Leave, MemberReady, Welcome
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.dense.shard_state import Terms
from psctl.ps.outputs import HeldPushes, Instruction, LeadMoved, ReplicaCaughtUp, SaveSlices, ToServer, ToWorker
from psctl.ps.permits import PARAMETERS
from psctl.ps.snapshot import ShardLoading, by_parameter, wanted_slices
from psctl.types import Address, Assignment, Member, ServerAt
from tests.simulation.kernel import Broken, Process, Task, Until
from tests.simulation.links import Links
from tests.simulation.network import End, Network


class Server:
    """One server process; the handler of its connection to the coordinator."""

    def __init__(self, process: Process, network: Network, coordinator: Address) -> None:
        self.process, self._network = process, network
        self.connections = Desk(self)
        self.links = Links(process, network, self.connections, lambda at: at.rank < process.member.rank)
        self.machine: DenseServer | None = None
        self._coordinator: End | None = None
        self._welcome: Welcome | None = None
        self._decision: Decision | None = None
        self._early: list[Any] = []
        self._loadings: list[tuple[ShardLoading, int]] = []
        self._loaded = False
        self._address = network.listen(process, self.connections, PARAMETERS.union, self.connections.allow)
        network.dial(process, coordinator, Member("coordinator", 0), self, lambda why: process.end(1))
        process.spawn(self._main())

    def _main(self) -> Task:
        yield Until("the coordinator", lambda: self._coordinator is not None)
        assert self._coordinator is not None
        self._coordinator.send(Join(1))
        self._coordinator.send(MemberReady(self._address))
        yield Until("the decision", lambda: self._decision is not None and self._welcome is not None)
        decision, welcome = self._decision, self._welcome
        assert decision is not None and welcome is not None
        base = decision.resume.step if decision.resume else 0
        terms = Terms(decision.layout, welcome.world, decision.update, base, decision.staleness, hosts=decision.hosts)
        restored = decision.resume is not None and decision.update == "server"
        self.machine = DenseServer(terms, decision.shards, self.process.member.rank, restored=restored)
        self.connections.open()
        self._told(decision.assignment)
        for message in self._early:
            self._member(message)
        self._early.clear()
        if restored and decision.resume is not None:
            yield from self._load(self.machine, by_parameter(decision.resume.tensors))

    def _load(self, machine: DenseServer, saved: Any) -> Task:
        """Ask for the slices of what is led here, wait until they are here, hand them over."""
        wanted = {
            index: wanted_slices(machine.terms.layout, machine.shards[index].held, saved) for index in machine.leading
        }
        loadings = {index: ShardLoading(slices) for index, slices in wanted.items()}
        self._loadings = [(loadings[index], at) for index, slices in wanted.items() for at in range(len(slices))]
        self.tell(LoadWanted(0, [want.slice for slices in wanted.values() for want in slices]))
        yield Until("the checkpoint's end", lambda: self._loaded)
        self.connections.follow(machine.on_loaded(loadings))

    def save(self, save: SaveSlices) -> None:
        """Stream a part of a checkpoint to the coordinator."""
        self.tell(SaveBegin(save.step, [copied.slice for copied in save.copied]))
        for index, copied in enumerate(save.copied):
            if self._coordinator is not None and len(copied.data):
                self._coordinator.send(SavePart(save.step, index, 0), copied.data)
        self.tell(SaveEnd(save.step))

    def tell(self, message: Any) -> None:
        """Send a message to the coordinator."""
        if self._coordinator is not None:
            self._coordinator.send(message)

    def _told(self, assignment: Assignment) -> None:
        self.links.assigned(assignment.servers)
        self.connections.assigned(assignment)

    def _member(self, message: Any) -> None:
        """Do what the coordinator says of who takes part."""
        match message:
            case Reassign(assignment=assignment):
                self._told(assignment)
            case WorkerGone(rank=rank, incarnation=incarnation):
                self.connections.gone(rank, incarnation)
            case CountUntil(rank=rank, clock=clock):
                self.connections.follow(self._machine.count_until(rank, clock))
            case Members(clock=clock, ranks=ranks):
                self.connections.follow(self._machine.set_members(clock, ranks))

    # ---- the coordinator's handler -----------------------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        self._coordinator = peer

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        if not isinstance(message, LoadPart):
            return None
        loading, at = self._loadings[message.index]
        return loading.buffer_of(at)[message.offset : message.offset + size]

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        match message:
            case LoadEnd():
                self._loaded = True
            case Welcome():
                self._welcome = message
            case Decision():
                self._decision = message
            case Reassign() | WorkerGone() | CountUntil() | Members():
                if self.machine is None:
                    self._early.append(message)  # it waits for the decision
                else:
                    self._member(message)
            case Leave():
                self.process.end(0)
            case _:
                pass

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        self.process.end(1)

    @property
    def _machine(self) -> DenseServer:
        assert self.machine is not None
        return self.machine


class Desk:
    """The handler of all connections of workers and servers, as server/dense_connections.py."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._peers: dict[tuple[str, int], End] = {}
        self._early: list[End] = []
        self._newest: dict[tuple[str, int], int] = {}
        self._alive: set[Member] | None = None
        self._epoch = -1
        self._incarnation: dict[int, int] = {}  # of the worker that HeldOf is about

    def open(self) -> None:
        """There is a machine: let those in that came early."""
        for peer in self._early:
            peer.hold(False)
            self._let_in(peer)
        self._early.clear()

    def allow(self, member: Member) -> str | None:
        """Return why a member may not connect, None when it may."""
        who = (member.role, member.rank)
        if member.incarnation < self._newest.get(who, 0):
            return f"incarnation {member.incarnation} of {member} is replaced"
        known = who in self._newest and member.incarnation == self._newest[who]
        if member.role == "server" and self._alive is not None and known and member not in self._alive:
            return f"{member} was declared lost"
        return None

    # ---- who takes part --------------------------------------------------------------------------------------------

    def assigned(self, assignment: Assignment) -> None:
        """Take in a new assignment."""
        if assignment.epoch <= self._epoch:
            return
        self._epoch = assignment.epoch
        self._alive = {Member("server", at.rank, at.incarnation) for at in assignment.servers}
        for member in self._alive:
            self._newest[member.role, member.rank] = member.incarnation
        for who, peer in list(self._peers.items()):
            if who[0] == "server" and peer.member not in self._alive:
                self._dismiss(peer)
        ranks = {at.rank for at in assignment.servers}
        self.follow(self._machine.on_assignment(assignment.epoch, assignment.chains, assignment.copies, ranks))

    def gone(self, rank: int, incarnation: int) -> None:
        """An incarnation of a worker is dead: it and older ones are refused; what is held of it is told."""
        who = ("worker", rank)
        self._newest[who] = max(self._newest.get(who, 0), incarnation + 1)
        peer = self._peers.get(who)
        if peer is not None and peer.member.incarnation <= incarnation:
            self._dismiss(peer)
        self._incarnation[rank] = incarnation
        if self._server.machine is not None:
            self.follow(self._machine.on_worker_lost(rank))

    def _dismiss(self, peer: End) -> None:
        peer.drop("you were declared lost")
        self._lost(peer)

    # ---- the handler, also of what the links dialled ---------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        if self._server.machine is None:
            peer.hold(True)
            self._early.append(peer)
        else:
            self._let_in(peer)

    def up(self, at: ServerAt, peer: End) -> None:
        self.on_connected(peer)

    def down(self, at: ServerAt) -> None:
        peer = self._peers.get(("server", at.rank))
        if peer is not None and not peer.open:
            self._lost(peer)

    def unreachable(self, at: ServerAt, why: str) -> None:
        self._server.tell(ServerUnreachable(at.rank, at.incarnation, why))

    def _let_in(self, peer: End) -> None:
        who = (peer.member.role, peer.member.rank)
        former = self._peers.get(who)
        if former is not None:
            former.drop("you connected again")
            self._lost(former)
        if not peer.open:
            return
        if self.allow(peer.member) is not None:
            peer.drop("you are dead")
            return
        self._peers[who] = peer
        machine = self._machine
        self.follow(machine.on_worker_connected(who[1]) if who[0] == "worker" else machine.on_server_connected(who[1]))

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return self._placed(peer.member, message, size) if self._speaks(peer) else None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self._speaks(peer):
            self._taken(peer.member, message, 0 if payload is None else len(payload))

    def place_from(self, at: ServerAt, message: Any, size: int) -> memoryview | None:
        return self._placed(Member("server", at.rank), message, size)

    def received_from(self, at: ServerAt, message: Any, size: int) -> None:
        self._taken(Member("server", at.rank), message, size)

    def _speaks(self, peer: End) -> bool:
        return self._peers.get((peer.member.role, peer.member.rank)) is peer

    def _placed(self, member: Member, message: Any, size: int) -> memoryview | None:
        if member.role == "worker":
            return self._machine.receive_buffer_for(member.rank, message, size)
        return self._machine.replica_buffer_for(member.rank, message, size)

    def _taken(self, member: Member, message: Any, size: int) -> None:
        if member.role == "worker":
            self.follow(self._machine.on_worker_message(member.rank, message, size))
        else:
            self.follow(self._machine.on_server_message(member.rank, message, size))

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        self._lost(peer)

    def _lost(self, peer: End) -> None:
        who = (peer.member.role, peer.member.rank)
        if self._peers.get(who) is peer:
            del self._peers[who]
            if self._server.machine is not None and who[0] == "worker":
                self._machine.on_worker_disconnected(who[1])

    # ---- instructions ------------------------------------------------------------------------------------------------

    def follow(self, instructions: Sequence[Instruction]) -> None:
        """Do what the machine said. Who is not connected misses his message."""
        for instruction in instructions:
            match instruction:
                case ToWorker(rank=rank, message=message, payload=payload):
                    peer = self._peers.get(("worker", rank))
                case ToServer(server=server, message=message, payload=payload):
                    peer = self._peers.get(("server", server))
                case ReplicaCaughtUp(epoch=epoch, shard=shard, server=server):
                    self._server.tell(ShardCaughtUp(epoch, shard, server))
                    continue
                case LeadMoved(epoch=epoch, shard=shard):
                    self._server.tell(ShardHandedOver(epoch, shard))
                    continue
                case HeldPushes():
                    report = LostWorkerClocks(
                        instruction.rank, self._incarnation[instruction.rank], instruction.clocks,
                        instruction.versions, instruction.rank_state_clock, instruction.separate_clocks,
                    )  # fmt: skip
                    self._server.tell(report)
                    continue
                case SaveSlices():
                    self._server.save(instruction)
                    continue
                case _:
                    raise Broken("shell", f"the simulator does not carry out {type(instruction).__name__}")
            if peer is not None:
                peer.send(message, payload)

    @property
    def _machine(self) -> DenseServer:
        assert self._server.machine is not None
        return self._server.machine
