"""Drivers of a job's state machine: pass it inputs in order, and carry out its instructions.

Every test in which a coordinator takes part, simulated, in threads or over TCP, takes the coordinator's messages from
here, so a change of the protocol is made in psctl/ alone. What is not covered: the event log's file, checkpoint files
(parts are kept in memory), the choice of the plan.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from psctl.coordinator.state import checkpoints, instructions
from psctl.coordinator.state.instructions import (
    Connected,
    ConnectionLost,
    Input,
    Instruction,
    MessageReceived,
    PlanMade,
    SendMessage,
    ShardsMade,
    Tick,
)
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.errors import ConnectionFailed
from psctl.job import events
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.job_permits import COORDINATION
from psctl.job.membership_messages import CountUntil
from psctl.job.message import JobMessage
from psctl.job.process_messages import JobFinished, ProcessExited, ProcessFailure, ProcessStarted, Register
from psctl.job.training_messages import Join, Prepare, Resume, StartBegin, StartEnd, StartPart
from psctl.orders import JobOrder
from psctl.ps.shards import cut, sizes
from psctl.types import Layout, Member
from tests.helpers.memory_checkpoints import MemoryCheckpoint, MemoryDisk

ME = Member("coordinator", 0)

GRACE = 5.0
"""Seconds between TERM and KILL."""

WALL = 1000.0
"""Seconds since the epoch at time 0."""


_PERMITTED = {role: set(COORDINATION.to(role)["coordinator"]) for role in ("agent", "server", "worker", "reader")}


def check_permitted(instruction: SendMessage) -> None:
    """Check that the receiver admits the message: else it would end its connection and itself."""
    kind, role = type(instruction.message), instruction.member.role
    assert kind in _PERMITTED[role], f"the coordinator sends {kind.__name__} to a {role}, which refuses it"


class StateMachineDriver:
    """A job's state machine. A subclass has the clock and carries out instructions.

    Inputs may come on any thread, also while instructions are carried out; they are handled one after another.
    """

    def __init__(self, order: JobOrder, resume: Resume | None = None) -> None:
        self.machine = JobStateMachine(order, GRACE, resume, self.time(), WALL)
        self._inputs: deque[Input] = deque()
        self._lock, self._busy = threading.RLock(), False

    def time(self) -> float:
        """Return seconds of a monotonic clock."""
        raise NotImplementedError

    def carry_out(self, instruction: Instruction) -> None:
        """Carry out an instruction."""
        raise NotImplementedError

    def begin(self) -> list[Instruction]:
        """Begin the job; return the first instructions."""
        with self._alone():
            return self._carry_all_out(self.machine.start(self.time()))

    def handle(self, *inputs: Input) -> list[Instruction]:
        """Handle inputs; return the resulting instructions (none while other inputs are handled)."""
        with self._lock:
            self._inputs.extend(inputs)
            new: list[Instruction] = []
            if not self._busy:
                with self._alone():
                    while self._inputs:
                        new += self._carry_all_out(self.machine.handle(self._inputs.popleft(), self.time()))
            return new

    def _carry_all_out(self, found: list[Instruction]) -> list[Instruction]:
        for instruction in found:
            if isinstance(instruction, SendMessage):
                check_permitted(instruction)
            self.carry_out(instruction)
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def receive(self, member: Member, message: JobMessage) -> list[Instruction]:
        """Handle a message of a member."""
        return self.handle(MessageReceived(member, message))

    # ---- actions of agents and processes ----

    def agent_of(self, member: Member) -> Member:
        """Return the agent that starts a process."""
        return Member("agent", self.machine.job.ranks[member].host)

    def register(self) -> None:
        """All agents register."""
        for index in range(len(self.machine.job.order.hosts)):
            self.receive(Member("agent", index), Register())

    def joins(self, member: Member, agent: Member | None = None) -> list[Instruction]:
        """A process starts, connects and joins."""
        new = self.receive(agent or self.agent_of(member), ProcessStarted(member, 300))
        return [*new, *self.handle(Connected(member)), *self.receive(member, Join(300))]

    def prepares(self, worker: Member, layout: Layout) -> list[Instruction]:
        """A worker joins and prepares its model."""
        return [*self.joins(worker), *self.receive(worker, Prepare(layout, ()))]

    def exits(
        self, member: Member, status: int = 0, exception: str = "", code: str = "", agent: Member | None = None
    ) -> list[Instruction]:
        """A process ends; `agent` reports it, by default that of its host."""
        failure = None
        if status:
            text = exception or f"status {status}"
            failure = ProcessFailure(str(member), "h", status, 0.0, 0, text, code=code)
        agent = agent or self.agent_of(member)
        new = self.handle(ConnectionLost(member, "closed"))
        return [*new, *self.receive(agent, ProcessExited(member, status, failure))]

    def killed(self, member: Member, agent: Member | None = None) -> list[Instruction]:
        """A process is killed."""
        return self.exits(member, -9, "killed by signal 9 (SIGKILL)", agent=agent)


class CoordinatorDriver(StateMachineDriver):
    """The coordinator of a job, whose instructions are carried out: it is the handler of all members' connections.

    A subclass starts processes.

    Args:
        order: the job.
        servers: the host of each server that the plan has.
        shard_bytes: the size of a shard.
        checkpoint: the checkpoint that the job resumes from.
    """

    part_bytes = 1000
    """Bytes of a part of a checkpoint that is sent."""
    factors: tuple[str, ...] = ()
    """Weights whose gradients a collective sends as factors."""
    start: Any = None
    """The broadcast of start values; None: a sum."""
    options: Mapping[str, object] = MappingProxyType({})
    """Of the strategy's schedule."""
    racks: tuple[str, ...] = ()
    """The rack of each host, where gradients are summed by rack."""

    def __init__(
        self, order: JobOrder, servers: Sequence[int], shard_bytes: int, checkpoint: MemoryCheckpoint | None = None
    ) -> None:
        self.disk = MemoryDisk(order.name, checkpoint)
        self.peers: dict[Member, Any] = {}
        self.events: list[Any] = []
        self.status = ""
        """How the job ended; "" until then."""
        self.cuts: dict[Member, int] = {}
        """By lost worker: its last clock that counts."""
        self.load_problem = ""
        """Why slices of the checkpoint cannot be read."""
        self._servers, self._shard_bytes = servers, shard_bytes
        super().__init__(order, checkpoint.resume(order.name) if checkpoint is not None else None)

    # ---- overridden by subclasses ----

    def start_member(self, start: instructions.StartMember) -> None:
        """Start a process; by default do nothing."""

    def answer(self, given: Input, seconds: float = 0.0) -> None:
        """Handle the answer to an instruction, within `seconds`; by default at once."""
        self.handle(given)

    def make_plan(self, wanted: instructions.MakePlan) -> PlanMade:
        """Return the plan: the order's strategy, with the given servers."""
        order = wanted.order
        event = events.Planned(
            time=0, size=8, world=1, chosen=order.strategy, reason="asked", decided=True, candidates=[]
        )
        if order.strategy != "ps":
            update = "sharded" if order.update == "sharded" else "worker"
            return PlanMade(
                order.strategy, update, [], event, options=dict(self.options), factors=self.factors, start=self.start
            )
        update = "server" if wanted.layout.optimizer and order.period == 1 else "worker"
        able = [index for index, host in enumerate(order.hosts) if host.may_serve]
        servers = [host if host in able else able[0] for host in self._servers]
        update = update if order.update == "auto" else order.update
        return PlanMade("ps", update, servers, event, racks=self.racks)

    # ---- the handler of connections ----

    def on_connected(self, peer: Any) -> None:
        """A member is connected."""
        self.peers[peer.member] = peer
        self.handle(Connected(peer.member))

    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None:
        """Return None: payloads are copied."""
        return None

    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        """Keep parts of checkpoints, send slices of them, relay start values; pass the rest to the state machine."""
        member = peer.member
        match message:
            case SavePart():
                self.disk.write(member, message, payload)
                return
            case StartBegin() | StartPart() | StartEnd():
                for other in [each for each in self.peers if each.role == "worker" and each != member]:
                    self.peers[other].send(message, payload)
                return
            case LoadWanted():
                self._load(peer, message)
                return
            case SaveBegin():
                self.disk.begin(member, message)
            case SaveEnd():
                self.disk.end(member, message)
        self.receive(member, message)

    def on_connection_lost(self, peer: Any, error: ConnectionFailed) -> None:
        """A connection ended; one that the member has replaced is ignored."""
        if self.peers.get(peer.member) is peer:
            del self.peers[peer.member]
            self.handle(ConnectionLost(peer.member, error.message))

    def _load(self, peer: Any, wanted: LoadWanted) -> None:
        for index, piece in enumerate(wanted.slices if not self.load_problem else ()):
            data = self.disk.read(piece)
            for offset in range(0, max(1, len(data)), self.part_bytes):
                peer.send(LoadPart(wanted.ticket, index, offset), data[offset : offset + self.part_bytes])
        peer.send(LoadEnd(wanted.ticket, self.load_problem))

    # ---- instructions ----

    def carry_out(self, instruction: Instruction) -> None:
        """Carry out an instruction."""
        match instruction:
            case instructions.AppendEvent(event=event):
                self.events.append(event)
            case instructions.SendMessage(member=member, message=message):
                self.send(member, message)
            case instructions.StartMember():
                self.start_member(instruction)
            case instructions.MakePlan():
                self.answer(self.make_plan(instruction))
            case instructions.PlanAgain(wanted=wanted):
                self.answer(instructions.PlanRemade(self.make_plan(wanted)))
            case instructions.PlanCollectives():
                # Without choices of a plan, workers take the usual algorithms.
                self.answer(instructions.CollectivesPlanned(self.machine.job.division.world, []))
            case instructions.MakeShards(layout=layout, servers=servers):
                shards = cut(layout, servers, self._shard_bytes)
                self.answer(ShardsMade(shards, sizes(shards)))
            case instructions.CommitCheckpoint(step=step, streams=streams):
                self.disk.commit(step, streams)
                self.answer(instructions.CheckpointCommitted(step, f"{self.disk.job}@{step}"), 0.05)
            case instructions.DiscardCheckpoint(step=step):
                self.disk.discard(step)
            case instructions.FindRestorable():
                self.answer(instructions.RestorableFound(self.disk.newest()), 0.05)
            case instructions.CloseCoordinator(status=status):
                self.status = status
                for host in range(len(self.machine.job.order.hosts)):
                    self.send(Member("agent", host), JobFinished(status))
            case instructions.CloseConnection(member=member, reason=reason):
                assert member not in self.machine.job.refused, f"{member} is refused: {reason}"
                self.close_connection(member, reason)
            case _:
                raise AssertionError(f"tests do not carry out {type(instruction).__name__} yet")

    def close_connection(self, member: Member, reason: str) -> None:
        """Close the connection of a member of a lost host."""
        if member in self.peers:
            self.peers[member].close(reason)

    def send(self, member: Member, message: JobMessage) -> None:
        """Send a message to a member, if it is connected."""
        if isinstance(message, CountUntil) and message.incarnation >= 0:  # else it is for a server that joins
            self.cuts.setdefault(Member("worker", message.rank, message.incarnation), message.clock)
        peer = self.peers.get(member)
        if peer is not None:
            peer.send(message, urgent=True)

    # ---- called by tests ----

    def propose(self, *, save: bool = True, stop: bool = False) -> None:
        """Ask all workers for a common step, as a stop, a scaling or the passing of time does."""
        with self._lock:
            checkpoints.propose_step(self.machine.job, save, stop)
            self.handle(Tick())

    def aim(self, chains: Sequence[Sequence[int]]) -> None:
        """Move shards to these chains."""
        with self._lock:
            placement = self.machine.job.shards.placement
            assert placement is not None, "shards are placed with the decision"
            placement.move_to([list(chain) for chain in chains])
            self.handle(Tick())
