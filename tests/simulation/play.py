"""One run: a seed's scenario with its cast, its faults and its judge."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from psctl.store import client, shard
from psctl.store.messages import Push, PushPart
from psctl.words import Member

from .coordinator import Agent, Coordinator
from .kernel import Broken, Process, World
from .model import Script
from .network import Network
from .oracle import Oracle
from .scenario import Crash, Cut, Pause, Power, Scenario, Snap, draw
from .server import Server
from .worker import Worker

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
        self.shells: dict[Member, Any] = {}
        head = self._process(Member("coordinator", 0), 0)
        self.coordinator = Coordinator(head, self.network, scenario, None)
        self.coordinator.on_go = self._go
        for host in range(scenario.hosts):
            agent = self._process(Member("agent", host), host)
            Agent(agent, self.network, self.coordinator.address, self._make)
        self._armed = False

    def _go(self) -> None:
        """Training begins: faults count from now."""
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
            last = [repr(event) for event in self.coordinator.events[-3:]]
            raise Broken("ends", f"the job ended as {self.coordinator.status}: {' '.join(last)}")
        minds = {
            str(member): shell.mind
            for member, shell in self.shells.items()
            if isinstance(shell, Worker | Server) and shell.mind is not None
        }
        self.oracle.judge(minds)

    def _process(self, member: Member, host: int) -> Process:
        process = Process(self.world, member, host)
        for fault in self.scenario.faults:
            if isinstance(fault, Crash) and fault.member == member:
                process.dies_at = fault.action
        self.processes[Member(member.role, member.rank)] = process
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

    def _strike(self, fault: Snap | Cut | Power | Pause) -> None:
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
            case Power(host=host):
                self.network.dark.add(host)
                for process in list(self.processes.values()):
                    if process.host == host:
                        process.end(-9)

    def _leaves(self, owner: Process, message: Any, body: bytes | None) -> None:
        if isinstance(message, Push | PushPart) and body is not None:
            self.oracle.sent(owner.member.rank, message, body)


@contextmanager
def parts_of(size: int) -> Iterator[None]:
    """Let payloads travel in parts of `size` bytes, so that tiny tensors have several."""
    before = shard.PART
    client.PART = shard.PART = size
    try:
        yield
    finally:
        client.PART = shard.PART = before


def play(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed; never raises for what the product does wrong."""
    torch.set_num_threads(1)
    scenario = draw(seed)
    outcome = Outcome(seed)
    one: Play | None = None
    try:
        with parts_of(scenario.part):
            one = Play(scenario, traced=traced)
            one.run()
    except Broken as broken:
        outcome.broken, outcome.text = broken.invariant, str(broken)
    except AssertionError as error:
        outcome.broken, outcome.text = "assertion", "".join(traceback.format_exception(error)[-3:])
    except Exception as error:  # noqa: BLE001  the product's own crash is a finding like any other
        outcome.broken, outcome.text = "exception", "".join(traceback.format_exception(error)[-4:])
    if one is not None:
        outcome.seconds, outcome.happened = one.world.now, one.world.happened
        outcome.read, outcome.trace = one.oracle.checked, one.world.trace or []
    return outcome


def play_some(first: int, count: int) -> list[Outcome]:
    """Run seeds one after another."""
    return [play(seed) for seed in range(first, first + count)]
