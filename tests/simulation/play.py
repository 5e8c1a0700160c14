"""One run: a seed's scenario with its cast, its faults and its judge."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from psctl.ps.messages import Push
from psctl.types import Member
from tests.simulation.coordinator import Agent, Coordinator
from tests.simulation.director import Director
from tests.simulation.kernel import KILLED, Broken, Process, World
from tests.simulation.model import Script
from tests.simulation.network import Network
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import Crash, Cut, Join, Leave, Move, Pause, Power, Scenario, Snap, draw
from tests.simulation.server import Server
from tests.simulation.worker import Worker

HORIZON = 600.0
"""Simulated seconds in which every run must be over."""


@dataclass
class Outcome:
    """What became of a seed."""

    seed: int
    broken: str = ""  # name of the invariant that does not hold
    text: str = ""
    seconds: float = 0.0  # simulated
    happened: int = 0
    read: int = 0
    trace: list[str] = field(default_factory=list)


LOSSES = 3
"""Losses that a job survives (restart.max)."""


class Play:
    """The run of one scenario."""

    def __init__(self, scenario: Scenario, *, traced: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, traced=traced)
        self.network = Network(self.world, scenario.pace, scenario.torn)
        self.network.on_leave = self._leaves
        self.script = Script(scenario.spec)
        self.oracle = Oracle(scenario, self.script)
        self.processes: dict[Member, Process] = {}  # the newest of each
        self._all: list[Process] = []
        self.shells: dict[Member, Any] = {}
        head = self._process(Member("coordinator", 0), 0)
        self.coordinator = (Director if scenario.directed else Coordinator)(head, self.network, scenario)
        self.coordinator.on_go = self._go
        self.coordinator.on_cut = self.oracle.cut
        self.coordinator.on_restart = self.oracle.restarted
        self.coordinator.on_members = self.oracle.members
        for host in range(scenario.hosts):
            agent = self._process(Member("agent", host), host)
            Agent(agent, self.network, self.coordinator.address, self._make)
        self._armed = False

    def _go(self) -> None:
        """Training begins: faults count from the first time."""
        if not self._armed:
            self._armed = True
            for fault in self.scenario.faults:
                if not isinstance(fault, Crash):
                    self.world.after(fault.at, self._strike, fault)

    def run(self) -> None:
        """Play it to its end; raises Broken when something is not as it must be."""
        self.world.say(lambda: f"{self.scenario}")
        if not self.world.run(lambda: self.coordinator.over, HORIZON):
            waits = [text for process in self.processes.values() if process.alive for text in process.waits()]
            raise Broken("hangs", f"not over after {self.world.now:.0f} s: " + "; ".join(waits))
        if self.coordinator.status != "done":
            self._excused(self.coordinator.status)
            return
        machines = {
            str(member): shell.machine
            for member, shell in self.shells.items()
            if isinstance(shell, Worker | Server) and shell.machine is not None
        }
        servers = {
            member.rank: shell.machine
            for member, shell in self.shells.items()
            if isinstance(shell, Server) and shell.process.status in (None, 0) and shell.machine is not None
        }
        self.oracle.judge(machines, servers, self.coordinator.chains())

    def _excused(self, status: str) -> None:
        """The run ended without its result: was that promised?"""
        one = self.coordinator
        failure = getattr(one.events[-1], "failure", None) if one.events else None
        if one.losses > LOSSES and 2 * self._killed > LOSSES:
            return
        raise Broken("ends", f"the job ended as {status}: {failure['exception'] if failure else ''}")

    @property
    def _killed(self) -> int:
        """How many processes died of faults."""
        return sum(process.status == KILLED for process in self._all)

    def _process(self, member: Member, host: int) -> Process:
        process = Process(self.world, member, host)
        for fault in self.scenario.faults:
            if isinstance(fault, Crash) and fault.member == member:
                process.dies_at = fault.action
        self.processes[Member(member.role, member.rank)] = process
        self._all.append(process)
        return process

    def _make(self, member: Member, host: int) -> Process | None:
        """Start a process of the job on a host, as its agent was told to."""
        process = self._process(member, host)
        coordinator = self.coordinator.address
        if member.role == "worker":
            early = dict(enumerate(self.scenario.compute))
            self.shells[member] = Worker(
                process, self.network, self.scenario, self.script, self.oracle, coordinator, early
            )
        else:
            self.shells[member] = Server(process, self.network, coordinator)
        return process

    def _strike(self, fault: Snap | Cut | Power | Pause | Move | Join | Leave) -> None:
        match fault:
            case Snap(a=a, b=b):
                self.network.snap(a, b)
            case Cut(hosts=hosts, seconds=seconds):
                self.network.cut(hosts, seconds)
            case Pause(member=member, seconds=seconds):
                process = self.processes.get(member)
                if process is not None:
                    self.world.say(lambda: f"{process} stands still for {seconds:.3f} s")
                    process.paused_until = self.world.now + seconds
            case Move(shard=shard, server=server) if isinstance(self.coordinator, Director):
                self.coordinator.move(shard, server)
            case Join(server=server, host=host) if isinstance(self.coordinator, Director):
                if host not in self.network.dark:
                    self.coordinator.join(server, host)
            case Leave(server=server) if isinstance(self.coordinator, Director):
                self.coordinator.leave(server)
            case Power(host=host):
                self.network.dark.add(host)
                for process in list(self.processes.values()):
                    if process.host == host:
                        process.end(-9)

    def _leaves(self, owner: Process, message: Any, body: bytes | None) -> None:
        if isinstance(message, Push) and body is not None:
            self.oracle.sent(owner.member, message, body)


def play(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed; never raises for what the product does wrong."""
    torch.set_num_threads(1)
    scenario = draw(seed)
    one = Play(scenario, traced=traced)
    outcome = judged(seed, one.run)
    outcome.seconds, outcome.happened = one.world.now, one.world.happened
    outcome.read, outcome.trace = one.oracle.checked, one.world.trace or []
    return outcome


def judged(seed: int, run: Callable[[], None]) -> Outcome:
    """Run something; a broken invariant, and the product's own crash, are findings."""
    outcome = Outcome(seed)
    try:
        run()
    except Broken as broken:
        outcome.broken, outcome.text = broken.invariant, str(broken)
    except AssertionError as error:
        outcome.broken, outcome.text = "assertion", "".join(traceback.format_exception(error)[-2:])
    except Exception as error:  # noqa: BLE001  the product's own crash is a finding like any other
        outcome.broken, outcome.text = "exception", "".join(traceback.format_exception(error)[-4:])
    return outcome
