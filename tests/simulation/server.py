"""A simulated server: the shipped DenseServer, and the work of the server's process and connections around it.

Not covered: two reader threads in one state machine at once (calls run one after another, in every order of arrival),
and the rate at which parts of checkpoints are sent.
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
    MembersSet,
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
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.snapshot import by_parameter, shard_loadings, wanted_slices
from psctl.types import Address, Assignment, Member, ServerAt
from tests.simulation.kernel import Process, Task, Until, Violation
from tests.simulation.network import End, Network
from tests.simulation.server_connections import ServerConnections


class Server:
    """One server process; the handler of its connection to the coordinator."""

    def __init__(self, process: Process, network: Network, coordinator: Address) -> None:
        self.process, self._network = process, network
        self.connections = PeerHandler(self)
        self.servers = ServerConnections(process, network, self.connections, lambda at: at.rank < process.member.rank)
        self.machine: DenseServer | None = None
        self._coordinator: End | None = None
        self._welcome: Welcome | None = None
        self._decision: Decision | None = None
        self._waiting: list[Any] = []
        self._loading = ReceivedSlices()
        self._loaded = False
        self._address = network.listen(process, self.connections, PARAMETERS.union, self.connections.allow)
        network.dial(process, coordinator, Member("coordinator", 0), self, lambda why: process.end(1))
        process.spawn(self._run())

    def _run(self) -> Task:
        yield Until("the coordinator", lambda: self._coordinator is not None)
        assert self._coordinator is not None
        self._coordinator.send(Join(1))
        self._coordinator.send(MemberReady(self._address))
        yield Until("the decision", lambda: self._decision is not None and self._welcome is not None)
        decision, welcome = self._decision, self._welcome
        assert decision is not None and welcome is not None
        base = decision.resume.step if decision.resume else 0
        terms = Terms(
            decision.layout, welcome.world, decision.update, base, decision.staleness, hosts=decision.hosts,
            in_backward=(1.0 if decision.servers_apart else 0.5) * decision.step_in_backward,
        )  # fmt: skip
        restored = decision.resume is not None and decision.update == "server"
        self.machine = DenseServer(terms, decision.shards, self.process.member.rank, restored=restored)
        self.connections.admit_waiting()
        self._on_assignment(decision.assignment)
        for message in self._waiting:
            self._on_membership(message)
        self._waiting.clear()
        if restored and decision.resume is not None:
            yield from self._load(self.machine, by_parameter(decision.resume.tensors))

    def _load(self, machine: DenseServer, saved: Any) -> Task:
        """Request the slices of the shards led here from the checkpoint, and load them."""
        wanted = {
            index: wanted_slices(machine.terms.layout, machine.shards[index].held, saved) for index in machine.leading
        }
        self._loading, shards = shard_loadings(wanted)
        self.send_to_coordinator(LoadWanted(0, self._loading.slices))
        yield Until("the checkpoint's end", lambda: self._loaded)
        self.connections.carry_out(machine.on_loaded(shards))

    def save(self, save: SaveSlices) -> None:
        """Send a part of a checkpoint to the coordinator."""
        self.send_to_coordinator(SaveBegin(save.step, [copied.slice for copied in save.copied]))
        for index, copied in enumerate(save.copied):
            if self._coordinator is not None and len(copied.data):
                self._coordinator.send(SavePart(save.step, index, 0), copied.data)
        self.send_to_coordinator(SaveEnd(save.step))

    def send_to_coordinator(self, message: Any) -> None:
        """Send a message to the coordinator."""
        if self._coordinator is not None:
            self._coordinator.send(message)

    def _on_assignment(self, assignment: Assignment) -> None:
        self.servers.set_servers(assignment.servers)
        self.connections.on_assignment(assignment)

    def _on_membership(self, message: Any) -> None:
        """Handle a message on assignments and members."""
        match message:
            case Reassign(assignment=assignment):
                self._on_assignment(assignment)
            case WorkerGone(rank=rank, incarnation=incarnation):
                self.connections.on_worker_lost(rank, incarnation)
            case CountUntil(rank=rank, clock=clock):
                self.connections.carry_out(self._machine.count_until(rank, clock))
            case Members(clock=clock, ranks=ranks):
                self.connections.carry_out(self._machine.set_members(clock, ranks))
                if message.ticket:
                    self.send_to_coordinator(MembersSet(message.ticket))

    # ---- the coordinator's handler -----------------------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        self._coordinator = peer

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        if not isinstance(message, LoadPart):
            return None
        return self._loading.part(message.index, message.offset, size)

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
                    self._waiting.append(message)  # until the decision
                else:
                    self._on_membership(message)
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


class PeerHandler:
    """The handler of all connections of workers and servers: psctl/server/dense_connections.py without its threads."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._peers: dict[tuple[str, int], End] = {}
        self._waiting: list[End] = []
        self._incarnations: dict[tuple[str, int], int] = {}
        self._alive: set[Member] | None = None
        self._epoch = -1
        self._incarnation: dict[int, int] = {}  # by rank: the lost worker whose pushes are reported

    def admit_waiting(self) -> None:
        """Admit the connections that came before the decision."""
        for peer in self._waiting:
            peer.hold(False)
            self._admit(peer)
        self._waiting.clear()

    def allow(self, member: Member) -> str | None:
        """Return the reason for which a member may not connect, or None."""
        key = (member.role, member.rank)
        if member.incarnation < self._incarnations.get(key, 0):
            return f"incarnation {member.incarnation} of {member} is replaced"
        known = key in self._incarnations and member.incarnation == self._incarnations[key]
        if member.role == "server" and self._alive is not None and known and member not in self._alive:
            return f"{member} was declared lost"
        return None

    # ---- members ---------------------------------------------------------------------------------------------------

    def on_assignment(self, assignment: Assignment) -> None:
        """Take a new assignment."""
        if assignment.epoch <= self._epoch:
            return
        self._epoch = assignment.epoch
        self._alive = {Member("server", at.rank, at.incarnation) for at in assignment.servers}
        for member in self._alive:
            self._incarnations[member.role, member.rank] = member.incarnation
        for key, peer in list(self._peers.items()):
            if key[0] == "server" and peer.member not in self._alive:
                self._disconnect(peer)
        ranks = {at.rank for at in assignment.servers}
        self.carry_out(self._machine.on_assignment(assignment.epoch, assignment.chains, assignment.copies, ranks))

    def on_worker_lost(self, rank: int, incarnation: int) -> None:
        """Refuse this and older incarnations of a lost worker, and report its pushes."""
        key = ("worker", rank)
        self._incarnations[key] = max(self._incarnations.get(key, 0), incarnation + 1)
        peer = self._peers.get(key)
        if peer is not None and peer.member.incarnation <= incarnation:
            self._disconnect(peer)
        self._incarnation[rank] = incarnation
        if self._server.machine is not None:
            self.carry_out(self._machine.on_worker_lost(rank))

    def _disconnect(self, peer: End) -> None:
        peer.drop("you were declared lost")
        self._remove(peer)

    # ---- the handler, also of dialled connections ------------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        if self._server.machine is None:
            peer.hold(True)
            self._waiting.append(peer)
        else:
            self._admit(peer)

    def on_server_connected(self, at: ServerAt, peer: End) -> None:
        self.on_connected(peer)

    def on_server_disconnected(self, at: ServerAt) -> None:
        peer = self._peers.get(("server", at.rank))
        if peer is not None and not peer.open:
            self._remove(peer)

    def on_server_unreachable(self, at: ServerAt, why: str) -> None:
        self._server.send_to_coordinator(ServerUnreachable(at.rank, at.incarnation, why))

    def _admit(self, peer: End) -> None:
        key = (peer.member.role, peer.member.rank)
        former = self._peers.get(key)
        if former is not None:
            former.drop("you connected again")
            self._remove(former)
        if not peer.open:
            return
        if self.allow(peer.member) is not None:
            peer.drop("you are dead")
            return
        self._peers[key] = peer
        machine = self._machine
        self.carry_out(
            machine.on_worker_connected(key[1]) if key[0] == "worker" else machine.on_server_connected(key[1])
        )

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return self._buffer_for(peer.member, message, size) if self._is_current(peer) else None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if self._is_current(peer):
            self._handle(peer.member, message, 0 if payload is None else len(payload))

    def server_buffer_for(self, at: ServerAt, message: Any, size: int) -> memoryview | None:
        return self._buffer_for(Member("server", at.rank), message, size)

    def on_server_message_from(self, at: ServerAt, message: Any, size: int) -> None:
        self._handle(Member("server", at.rank), message, size)

    def _is_current(self, peer: End) -> bool:
        return self._peers.get((peer.member.role, peer.member.rank)) is peer

    def _buffer_for(self, member: Member, message: Any, size: int) -> memoryview | None:
        if member.role == "worker":
            return self._machine.receive_buffer_for(member.rank, message, size)
        return self._machine.replica_buffer_for(member.rank, message, size)

    def _handle(self, member: Member, message: Any, size: int) -> None:
        if member.role == "worker":
            self.carry_out(self._machine.on_worker_message(member.rank, message, size))
        else:
            self.carry_out(self._machine.on_server_message(member.rank, message, size))

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        self._remove(peer)

    def _remove(self, peer: End) -> None:
        key = (peer.member.role, peer.member.rank)
        if self._peers.get(key) is peer:
            del self._peers[key]
            if self._server.machine is not None and key[0] == "worker":
                self._machine.on_worker_disconnected(key[1])

    # ---- instructions ------------------------------------------------------------------------------------------------

    def carry_out(self, instructions: Sequence[Instruction]) -> None:
        """Carry out the machine's instructions. A message to a member without a connection is dropped."""
        for instruction in instructions:
            match instruction:
                case ToWorker(rank=rank, message=message, payload=payload):
                    peer = self._peers.get(("worker", rank))
                case ToServer(server=server, message=message, payload=payload):
                    peer = self._peers.get(("server", server))
                case ReplicaCaughtUp(epoch=epoch, shard=shard, server=server):
                    self._server.send_to_coordinator(ShardCaughtUp(epoch, shard, server))
                    continue
                case LeadMoved(epoch=epoch, shard=shard):
                    self._server.send_to_coordinator(ShardHandedOver(epoch, shard))
                    continue
                case HeldPushes():
                    report = LostWorkerClocks(
                        instruction.rank, self._incarnation[instruction.rank], instruction.clocks,
                        instruction.versions, instruction.rank_state_clock, instruction.separate_clocks,
                    )  # fmt: skip
                    self._server.send_to_coordinator(report)
                    continue
                case SaveSlices():
                    self._server.save(instruction)
                    continue
                case _:
                    raise Violation("simulator", f"{type(instruction).__name__} is not carried out")
            if peer is not None:
                peer.send(message, payload)

    @property
    def _machine(self) -> DenseServer:
        assert self._server.machine is not None
        return self._server.machine
