"""A simulated coordinator and its agents, which run the shipped state machine of the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psctl.coordinator.state import instructions, joining_workers
from psctl.coordinator.state.instructions import Input, Instruction, Tick
from psctl.coordinator.state.sum_order import Groups
from psctl.errors import ConnectionFailed
from psctl.job import events
from psctl.job.job_permits import COORDINATION
from psctl.job.membership_messages import CountUntil, Members, Reassign, ShardHandedOver
from psctl.job.message import JobMessage
from psctl.job.process_messages import (
    EndProcesses,
    ProcessExited,
    ProcessFailure,
    ProcessStarted,
    Register,
    ScaleWanted,
    StartProcess,
    StopProcesses,
)
from psctl.job.training_messages import Decision, Go
from psctl.types import Address, Member
from tests.helpers.state_machine_driver import ME, CoordinatorDriver
from tests.simulation.kernel import Process, World
from tests.simulation.network import End, Network
from tests.simulation.scenario import Scenario, order

TICK_INTERVAL = 0.1


class Coordinator(CoordinatorDriver):
    """The coordinator's process: it carries out the state machine's instructions."""

    part_bytes = 1 << 30  # every slice is one part

    def __init__(self, process: Process, network: Network, scenario: Scenario) -> None:
        self.process, self._scenario = process, scenario
        self.losses = 0
        self.racks = scenario.racks
        self.on_go: Callable[[], None] = lambda: None
        self.on_cut: Callable[[int, int], None] = lambda rank, clock: None
        self.on_members: Callable[[int, list[int]], None] = lambda clock, ranks: None
        self.on_restart: Callable[[int], None] = lambda step: None
        self.on_start: Callable[[int, Groups], None] = lambda world, groups: None
        self._chains: list[list[int]] = []
        self._transferring: set[int] = set()
        super().__init__(order(scenario), scenario.servers, scenario.shard_bytes)

        def allow(member: Member) -> str | None:
            return self.machine.why_not_expected(member) or None

        self.address = network.listen(process, self, COORDINATION.union, allow)
        self.begin()
        self._world.after(TICK_INTERVAL, self._on_tick)

    @property
    def _world(self) -> World:
        return self.process.world

    @property
    def over(self) -> bool:
        return self.status != ""

    def time(self) -> float:
        return self._world.now

    def chains(self) -> list[list[int]]:
        """Return the chains of the newest assignment, empty for shards that are being handed over."""
        return [[] if shard in self._transferring else chain for shard, chain in enumerate(self._chains)]

    def scale(self, workers: int) -> None:
        """Request another number of workers, if that needs no restart of all."""
        if joining_workers.may_change(self.machine.job):
            self.receive(Member("agent", 0), ScaleWanted(1, workers, None))

    def on_message(self, peer: End, message: Any, payload: memoryview | None) -> None:
        if isinstance(message, ShardHandedOver):
            self._transferring.discard(message.shard)
        super().on_message(peer, message, payload)

    def _on_tick(self) -> None:
        if self.process.alive and not self.over:
            self._world.after(TICK_INTERVAL, self._on_tick)
            self.handle(Tick())

    # ---- instructions ------------------------------------------------------------------------------------------------

    def answer(self, given: Input, seconds: float = 0.0) -> None:
        if isinstance(given, instructions.RestorableFound):
            self.on_restart(given.resume.step if given.resume else 0)
        self._world.after(self._world.random.random() * seconds if seconds else 0.0, self.handle, given)

    def start_member(self, start: instructions.StartMember) -> None:
        found = StartProcess(start.member, start.world, start.local_rank, start.environment, "", "", "")
        self.send(Member("agent", start.host), found)

    def carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, instructions.AppendEvent):
            event = instruction.event
            self.losses += isinstance(event, events.WorkerLost | events.ServerLost)
            self._world.log(lambda: f"event: {event}")
        super().carry_out(instruction)

    def close_connection(self, member: Member, reason: str) -> None:
        if member in self.peers:
            self.peers[member].drop(reason)

    def send(self, member: Member, message: JobMessage) -> None:
        if isinstance(message, Go):
            self.on_go()
        if isinstance(message, Decision):
            self.on_start(self.machine.job.division.world, message.hosts)
        if isinstance(message, Decision | Reassign):
            chains = message.assignment.chains
            moved = [now[:1] != before[:1] for now, before in zip(chains, self._chains, strict=False)]
            self._transferring |= {shard for shard, one in enumerate(moved) if one}
            self._chains = chains
        if isinstance(message, CountUntil) and message.incarnation >= 0:
            known = Member("worker", message.rank, message.incarnation) in self.cuts
            if not known:
                self.on_cut(message.rank, message.clock)
        if isinstance(message, Members):
            self.on_members(message.clock, message.ranks)
        super().send(member, message)


class Agent:
    """The agent of one host: starts processes, reports their exits, stops them."""

    def __init__(
        self,
        process: Process,
        network: Network,
        coordinator: Address,
        start_process: Callable[[Member, int], Process | None],
    ) -> None:
        self.process, self._start_process = process, start_process
        self._end: End | None = None
        self._children: dict[Member, Process] = {}
        network.dial(process, coordinator, ME, self, lambda why: process.end(1))

    def on_connected(self, peer: End) -> None:
        self._end = peer
        peer.send(Register())

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
        child = self._start_process(member, self.process.host)
        if child is not None:
            child.on_end = self._on_exit
            self._children[member] = child
            self._send(ProcessStarted(member, 1))

    def _on_exit(self, child: Process, status: int) -> None:
        if self.process.alive:
            self.process.world.after(self.process.world.random.random() * 0.05, self._report_exit, child, status)

    def _report_exit(self, child: Process, status: int) -> None:
        failure = None
        if status != 0:
            how = f"killed by signal {-status}" if status < 0 else "ConnectionFailed"
            code = "" if status < 0 else "connection-failed"
            now = self.process.world.now
            failure = ProcessFailure(str(child.member), f"h{child.host}", status, now, 0, how, [], [], code)
        if self.process.alive:
            self._send(ProcessExited(child.member, status, failure))

    def _send(self, message: Any) -> None:
        if self._end is not None:
            self._end.send(message)
