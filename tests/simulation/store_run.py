"""One run of the store: a scenario's processes, its faults, and the oracle that checks it."""

from __future__ import annotations

from typing import Any

import torch

from psctl.ps.messages import Push
from psctl.types import Member
from tests.simulation.coordinator import Agent, Coordinator
from tests.simulation.kernel import KILLED, Process, Violation, World
from tests.simulation.model import Script
from tests.simulation.network import Network
from tests.simulation.oracle import Oracle
from tests.simulation.outcome import Outcome, outcome_of
from tests.simulation.reassigning_coordinator import ReassigningCoordinator
from tests.simulation.scenario import (
    AddServer,
    CutLink,
    Disconnect,
    KillProcess,
    MoveShard,
    PauseProcess,
    PowerOff,
    RemoveServer,
    ScaleWorkers,
    Scenario,
    draw_backward,
    draw_racks,
    draw_scenario,
)
from tests.simulation.server import Server
from tests.simulation.worker import Worker

TIME_LIMIT = 600.0
"""Simulated seconds within which every run must end."""


MAX_LOSSES = 3
"""Losses that a job survives (`restart.max`)."""


class StoreRun:
    """The run of one scenario."""

    def __init__(self, scenario: Scenario, *, traced: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, traced=traced)
        self.network = Network(self.world, scenario.latency, scenario.slow_payloads)
        self.network.on_send = self._on_send
        self.script = Script(scenario.spec)
        self.oracle = Oracle(scenario, self.script)
        self.processes: dict[Member, Process] = {}  # the newest incarnation of each
        self._started: list[Process] = []
        self.running: dict[Member, Any] = {}
        head = self._process(Member("coordinator", 0), 0)
        self.coordinator = (ReassigningCoordinator if scenario.reassigns else Coordinator)(head, self.network, scenario)
        self.coordinator.on_go = self._on_go
        self.coordinator.on_cut = self.oracle.on_worker_cut
        self.coordinator.on_restart = self.oracle.on_restart
        self.coordinator.on_members = self.oracle.on_members
        self.coordinator.on_start = self.oracle.on_start
        for host in range(scenario.hosts):
            agent = self._process(Member("agent", host), host)
            Agent(agent, self.network, self.coordinator.address, self._start_process)
        self._faults_scheduled = False

    def _on_go(self) -> None:
        """Schedule the scenario's faults when training starts for the first time."""
        if not self._faults_scheduled:
            self._faults_scheduled = True
            for fault in self.scenario.faults:
                if not isinstance(fault, KillProcess):
                    self.world.after(fault.at, self._inject, fault)

    def run(self) -> None:
        """Run the job to its end.

        Raises:
            Violation: an invariant does not hold.
        """
        self.world.log(lambda: f"{self.scenario}")
        if not self.world.run(lambda: self.coordinator.over, TIME_LIMIT):
            waits = [text for process in self.processes.values() if process.alive for text in process.describe_waits()]
            raise Violation("hangs", f"not over after {self.world.now:.0f} s: " + "; ".join(waits))
        if self.coordinator.status != "done":
            self._check_failure(self.coordinator.status)
            return
        machines = {
            str(member): started.machine
            for member, started in self.running.items()
            if isinstance(started, Worker | Server) and started.machine is not None
        }
        servers = {
            member.rank: started.machine
            for member, started in self.running.items()
            if isinstance(started, Server) and started.process.status in (None, 0) and started.machine is not None
        }
        self.oracle.check_end(machines, servers, self.coordinator.chains())

    def _check_failure(self, status: str) -> None:
        """Check that a job that failed had more losses than it must survive."""
        coordinator = self.coordinator
        failure = getattr(coordinator.events[-1], "failure", None) if coordinator.events else None
        if coordinator.losses > MAX_LOSSES and 2 * self._killed > MAX_LOSSES:
            return
        raise Violation("ends", f"the job ended as {status}: {failure['exception'] if failure else ''}")

    @property
    def _killed(self) -> int:
        """The number of processes that faults killed."""
        return sum(process.status == KILLED for process in self._started)

    def _process(self, member: Member, host: int) -> Process:
        process = Process(self.world, member, host)
        for fault in self.scenario.faults:
            if isinstance(fault, KillProcess) and fault.member == member:
                process.dies_at = fault.action
        self.processes[Member(member.role, member.rank)] = process
        self._started.append(process)
        return process

    def _start_process(self, member: Member, host: int) -> Process | None:
        """Start a process of the job on a host; an agent calls it."""
        process = self._process(member, host)
        coordinator = self.coordinator.address
        if member.role == "worker":
            compute = self.scenario.compute
            early = {member.rank: compute[member.rank % len(compute)]}
            self.running[member] = Worker(
                process, self.network, self.scenario, self.script, self.oracle, coordinator, early
            )
        else:
            self.running[member] = Server(process, self.network, coordinator)
        return process

    def _inject(
        self,
        fault: Disconnect | CutLink | PowerOff | PauseProcess | MoveShard | AddServer | RemoveServer | ScaleWorkers,
    ) -> None:
        match fault:
            case ScaleWorkers(workers=workers):
                self.coordinator.scale(workers)
            case Disconnect(a=a, b=b):
                self.network.disconnect(a, b)
            case CutLink(hosts=hosts, seconds=seconds):
                self.network.cut(hosts, seconds)
            case PauseProcess(member=member, seconds=seconds):
                process = self.processes.get(member)
                if process is not None:
                    self.world.log(lambda: f"{process} pauses for {seconds:.3f} s")
                    process.paused_until = self.world.now + seconds
            case MoveShard(shard=shard, server=server) if isinstance(self.coordinator, ReassigningCoordinator):
                self.coordinator.move(shard, server)
            case AddServer(server=server, host=host) if isinstance(self.coordinator, ReassigningCoordinator):
                if host not in self.network.hosts_down:
                    self.coordinator.join(server, host)
            case RemoveServer(server=server) if isinstance(self.coordinator, ReassigningCoordinator):
                self.coordinator.leave(server)
            case PowerOff(host=host):
                self.network.hosts_down.add(host)
                for process in list(self.processes.values()):
                    if process.host == host:
                        process.end(-9)

    def _on_send(self, owner: Process, message: Any, body: bytes | None) -> None:
        if isinstance(message, Push) and body is not None:
            self.oracle.on_push_sent(owner.member, message, body)


def run_store(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed; an error of the product is part of the outcome."""
    return _run(draw_scenario(seed), traced=traced)


def run_racks(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed of a job that sums gradients by rack, where the seed has several hosts in step."""
    return _run(draw_racks(seed), traced=traced)


def run_backward(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed of a job that steps some shards in backward."""
    return _run(draw_backward(seed), traced=traced)


def _run(scenario: Scenario, *, traced: bool) -> Outcome:
    torch.set_num_threads(1)
    seed = scenario.seed
    store_run = StoreRun(scenario, traced=traced)
    outcome = outcome_of(seed, store_run.run)
    outcome.seconds, outcome.event_count = store_run.world.now, store_run.world.event_count
    outcome.values_checked, outcome.trace = store_run.oracle.values_checked, store_run.world.trace or []
    return outcome
