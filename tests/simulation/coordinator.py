"""A simulated coordinator and its agents: the shipped state machine of the job, whose instructions it carries out.

Thin on purpose. What is not covered: the event log's file, checkpoint files (parts are kept in memory), the plan's
choice (always ps, with the scenario's servers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psctl.coordinator.state import instructions
from psctl.coordinator.state.instructions import Connected, ConnectionLost, Input, MessageReceived, Tick
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.errors import ConnectionFailed
from psctl.job import events
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted, SaveBegin, SavePart
from psctl.job.job_permits import COORDINATION
from psctl.job.membership_messages import CountUntil, Members, Reassign, ShardHandedOver
from psctl.job.process_messages import (
    EndProcesses,
    JobFinished,
    ProcessExited,
    ProcessFailure,
    ProcessStarted,
    Register,
    StartProcess,
    StopProcesses,
)
from psctl.job.training_messages import Decision, Go, Resume
from psctl.ps.shards import cut, sizes
from psctl.types import Address, Member, TensorSlice
from tests.helpers.memory_checkpoints import MemoryCheckpoint, read_slice
from tests.simulation.kernel import Broken, Process, World
from tests.simulation.network import End, Network
from tests.simulation.scenario import Scenario, order

TICK = 0.1

ME = Member("coordinator", 0)

GRACE = 5.0


class Coordinator:
    """The coordinator's process; the handler of everyone's connections to it."""

    def __init__(self, process: Process, network: Network, scenario: Scenario, resume: Resume | None) -> None:
        self.process, self._network, self._scenario = process, network, scenario
        self._peers: dict[Member, End] = {}
        self.events: list[Any] = []
        self.status = ""
        self.losses = 0
        self.on_go: Callable[[], None] = lambda: None
        self.on_cut: Callable[[int, int], None] = lambda rank, clock: None
        self._cut: set[tuple[int, int]] = set()
        self.on_members: Callable[[int, list[int]], None] = lambda clock, ranks: None
        self.on_restart: Callable[[int], None] = lambda step: None
        self.disk = Disk()
        self._chains: list[list[int]] = []
        self._handing: set[int] = set()
        self.machine = JobStateMachine(order(scenario), GRACE, resume, 0.0, 1000.0)

        def allow(member: Member) -> str | None:
            return self.machine.why_not_expected(member) or None

        self.address = network.listen(process, self, COORDINATION.union, allow)
        self._carry_out(self.machine.start(0.0))
        self._world.after(TICK, self._tick)

    @property
    def _world(self) -> World:
        return self.process.world

    @property
    def over(self) -> bool:
        return self.status != ""

    def chains(self) -> list[list[int]]:
        """Return the newest assignment's chains, empty where a hand-over is under way."""
        return [[] if shard in self._handing else chain for shard, chain in enumerate(self._chains)]

    # ---- the handler -----------------------------------------------------------------------------------------------

    def on_connected(self, peer: End) -> None:
        self._peers[peer.member] = peer
        self._happens(Connected(peer.member))

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        match message:
            case SavePart():
                self.disk.part(peer.member, message, payload)
                return
            case SaveBegin():
                self.disk.begin(peer.member, message)
            case ShardHandedOver(shard=shard):
                self._handing.discard(shard)
            case LoadWanted(ticket=ticket, slices=slices):
                for index, wanted in enumerate(slices):
                    peer.send(LoadPart(ticket, index, 0), self.disk.read(wanted))
                peer.send(LoadEnd(ticket))
                return
        self._happens(MessageReceived(peer.member, message))

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        if self._peers.get(peer.member) is peer:
            del self._peers[peer.member]
            self._happens(ConnectionLost(peer.member, error.message))

    def _tick(self) -> None:
        if self.process.alive and not self.over:
            self._world.after(TICK, self._tick)
            self._happens(Tick())

    def _happens(self, happening: Input) -> None:
        self._carry_out(self.machine.handle(happening, self._world.now))

    # ---- instructions ------------------------------------------------------------------------------------------------

    def _carry_out(self, found: list[instructions.Instruction]) -> None:
        for instruction in found:
            self._do(instruction)

    def _do(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.AppendEvent(event=event):
                self.events.append(event)
                self.losses += isinstance(event, events.WorkerLost | events.ServerLost)
                self._world.say(lambda: f"event: {event}")
            case instructions.SendMessage(member=member, message=message):
                self._tell(member, message)
            case instructions.StartMember():
                one = instruction
                start = StartProcess(one.member, one.world, one.local_rank, one.environment, "", "", "")
                self._tell(Member("agent", one.host), start)
            case instructions.MakePlan(order=now):
                able = [index for index, host in enumerate(now.hosts) if host.may_serve]
                servers = [host if host in able else able[0] for host in self._scenario.servers]
                event = events.Planned(
                    time=0, size=8, world=1, chosen="ps", reason="asked", decided=True, candidates=[]
                )
                self._world.after(
                    0.0, self._happens, instructions.PlanMade("ps", self._scenario.update, servers, event)
                )
            case instructions.MakeShards(layout=layout, servers=servers):
                shards = cut(layout, servers, self._scenario.cut_bytes)
                self._world.after(0.0, self._happens, instructions.ShardsMade(shards, sizes(shards)))
            case instructions.CommitCheckpoint(step=step):
                self.disk.commit(step)
                written = instructions.CheckpointCommitted(step, f"digits-1@{step}")
                self._world.after(self._world.random.random() * 0.05, self._happens, written)
            case instructions.DiscardCheckpoint(step=step):
                self.disk.parts.pop(step, None)
            case instructions.FindRestorable():
                found = instructions.RestorableFound(self.disk.newest())
                self.on_restart(found.resume.step if found.resume else 0)
                self._world.after(self._world.random.random() * 0.05, self._happens, found)
            case instructions.CloseCoordinator(status=status):
                self.status = status
                for host in range(self._scenario.hosts):
                    self._tell(Member("agent", host), JobFinished(status))
            case _:
                raise Broken("shell", f"the simulator does not carry out {type(instruction).__name__} yet")

    def _tell(self, member: Member, message: Any) -> None:
        if isinstance(message, Go):
            self.on_go()
        if isinstance(message, Decision | Reassign):
            chains = message.assignment.chains
            moved = [now[:1] != before[:1] for now, before in zip(chains, self._chains, strict=False)]
            self._handing |= {shard for shard, one in enumerate(moved) if one}
            self._chains = chains
        if isinstance(message, CountUntil) and (message.rank, message.incarnation) not in self._cut:
            self._cut.add((message.rank, message.incarnation))
            if message.incarnation >= 0:  # else it is said to a server that joins, once more
                self.on_cut(message.rank, message.clock)
        if isinstance(message, Members):
            self.on_members(message.clock, message.ranks)
        peer = self._peers.get(member)
        if peer is not None:
            peer.send(message, urgent=True)


class Disk:
    """Checkpoints, in memory."""

    def __init__(self) -> None:
        self.parts: dict[int, MemoryCheckpoint] = {}
        self._whole: dict[int, MemoryCheckpoint] = {}

    def begin(self, source: Member, message: SaveBegin) -> None:
        self.parts.setdefault(message.step, MemoryCheckpoint(message.step)).begin(source, message)

    def part(self, source: Member, message: SavePart, payload: memoryview | None) -> None:
        found = self.parts.get(message.step)
        if found is not None and payload is not None and (source, message.tables) in found.slices:
            found.write(source, message, payload)

    def commit(self, step: int) -> None:
        self._whole[step] = self.parts.pop(step)

    def newest(self) -> Resume | None:
        """Return where to go on, None for the start."""
        self.parts.clear()
        return self._whole[max(self._whole)].resume("digits-1") if self._whole else None

    def read(self, wanted: TensorSlice) -> bytes:
        return read_slice(self._whole[max(self._whole)].tensors, wanted)


class Agent:
    """One host's agent: starts processes, tells of their ends, stops them."""

    def __init__(
        self, process: Process, network: Network, coordinator: Address, make: Callable[[Member, int], Process | None]
    ) -> None:
        self.process, self._make = process, make
        self._end: End | None = None
        self._children: dict[Member, Process] = {}
        network.dial(process, coordinator, ME, self, lambda why: process.end(1))

    def on_connected(self, peer: End) -> None:
        self._end = peer
        peer.send(Register(f"h{self.process.host}", 1, 4, 1 << 30, 0))

    def receive_buffer_for(self, peer: End, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        world = self.process.world
        match message:
            case StartProcess(member=member):
                world.after(world.random.random() * 0.02, self._start, member)
            case StopProcesses():
                for child in list(self._children.values()):
                    world.after(world.random.random() * 0.02, child.end, -15)
            case EndProcesses(members=members):
                for member in members:
                    if member in self._children:
                        world.after(world.random.random() * 0.02, self._children[member].end, -15)
            case _:
                pass

    def on_connection_lost(self, peer: End, error: ConnectionFailed) -> None:
        for child in list(self._children.values()):
            child.end(-9)

    def _start(self, member: Member) -> None:
        if not self.process.alive:
            return
        child = self._make(member, self.process.host)
        if child is not None:
            child.on_end = self._ended
            self._children[member] = child
            self._say(ProcessStarted(member, 1))

    def _ended(self, child: Process, status: int) -> None:
        if self.process.alive:
            self.process.world.after(self.process.world.random.random() * 0.05, self._told, child, status)

    def _told(self, child: Process, status: int) -> None:
        failure = None
        if status != 0:
            how = f"killed by signal {-status}" if status < 0 else "ConnectionFailed"
            code = "" if status < 0 else "connection-failed"
            now = self.process.world.now
            failure = ProcessFailure(str(child.member), f"h{child.host}", status, now, 0, how, [], [], code)
        if self.process.alive:
            self._say(ProcessExited(child.member, status, failure))

    def _say(self, message: Any) -> None:
        if self._end is not None:
            self._end.send(message)
