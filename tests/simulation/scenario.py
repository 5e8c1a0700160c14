"""What one seed stands for: a job, the machines it runs on, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from psctl.orders import CheckpointOrder, HostOrder, JobOrder
from psctl.words import Member

from .model import Spec


@dataclass(frozen=True)
class Crash:
    """A process dies at its n-th action (a message sent or received)."""

    member: Member
    action: int


@dataclass(frozen=True)
class Snap:
    """The connections between two members break."""

    at: float
    a: Member
    b: Member


@dataclass(frozen=True)
class Cut:
    """Nothing passes between two hosts for a time."""

    at: float
    hosts: frozenset[int]
    seconds: float


@dataclass(frozen=True)
class Power:
    """A host goes dark with all its processes."""

    at: float
    host: int


@dataclass(frozen=True)
class Pause:
    """A process does nothing for a time, as one that is stopped or holds its interpreter's lock."""

    at: float
    member: Member
    seconds: float


Fault = Crash | Snap | Cut | Power | Pause


@dataclass(frozen=True)
class Scenario:
    """All that a run depends on beside the product; a function of the seed."""

    seed: int
    spec: Spec
    update: str  # "server" | "worker"
    staleness: int  # clocks that the fastest may be ahead
    hosts: int
    workers: tuple[int, ...]  # host of each rank
    servers: tuple[int, ...]  # host of each rank
    cut_bytes: int  # target size of a shard
    part: int  # bytes of one part of a message's payload
    pace: float  # seconds that messages take
    torn: float  # share of payloads that arrive slowly
    compute: tuple[float, ...]  # seconds that a clock's gradients take, by rank
    early: bool  # pulls go ahead of pushes
    norms: bool  # the joint gradient's norm is asked for before the step
    faults: tuple[Fault, ...]

    @property
    def deadly(self) -> bool:
        """May a process be lost?"""
        return any(isinstance(fault, Crash | Power) for fault in self.faults)


def draw(seed: int) -> Scenario:
    """Return what a seed stands for."""
    chance = random.Random(seed * 2654435761 % (1 << 61))
    hosts = chance.choice((1, 2, 2, 3, 4))
    workers = tuple(sorted(chance.randrange(hosts) for _ in range(chance.choice((1, 2, 2, 2, 3, 4)))))
    servers = tuple(chance.randrange(hosts) for _ in range(chance.choice((1, 1, 2, 2, 3))))
    spec = _spec(chance, len(workers))
    cut_bytes = chance.choice((16, 32, 64, 1 << 20)) if not spec.wide else chance.choice((512, 1 << 20))
    part = 1 << 19 if chance.random() < 0.8 else 256 if spec.wide else 8
    pace = chance.choice((0.001, 0.01, 0.05))
    slow = [chance.choice((0.5, 1.0, 1.0, 8.0)) * pace * chance.choice((1, 4)) for _ in workers]
    update = chance.choice(("server", "server", "server", "worker"))
    staleness = chance.choice((0, 0, 1, 2, 3)) if update == "server" else 0
    return Scenario(
        seed=seed, spec=spec, update=update,
        early=update == "worker" and chance.random() < 0.5,
        staleness=staleness,
        hosts=hosts, workers=workers, servers=servers,
        cut_bytes=cut_bytes, part=part, pace=pace,
        torn=chance.choice((0.0, 0.1, 0.4)), compute=tuple(slow),
        norms=update == "server" and staleness == 0 and chance.random() < 0.2,
        faults=_faults(chance, hosts, len(workers), len(servers), pace, spec.steps),
    )  # fmt: skip


def _spec(chance: random.Random, world: int) -> Spec:
    """Draw from few enough that undisturbed runs are found again."""
    steps = chance.choice((2, 3, 4, 4, 5, 5, 7)) if chance.random() < 0.98 else 40
    batch = world * 2 + chance.choice((0, 0, 1))
    return Spec(
        optimizer=chance.choice(("SGD", "AdamW")), dtype=chance.choice(("float32", "float64")),
        parameters=chance.choice((1, 2, 3, 4)), wide=chance.random() < 0.1, sparse=chance.random() < 0.3,
        clips=chance.random() < 0.3, world=world, batch=batch, examples=batch * 3 + chance.choice((0, world)),
        steps=steps,
    )  # fmt: skip


def _faults(
    chance: random.Random, hosts: int, workers: int, servers: int, pace: float, steps: int
) -> tuple[Fault, ...]:
    """Draw what goes wrong; of a seventh of the seeds nothing does."""
    span = pace * (12 + 10 * min(steps, 12))  # about as long as the run takes
    found: list[Fault] = []
    for _ in range(chance.choice((0, 1, 1, 2, 3, 5, 8))):
        worker = Member("worker", chance.randrange(workers))
        server = Member("server", chance.randrange(servers))
        kind = chance.choice(("snap", "snap", "snap", "cut", "pause"))
        when = chance.random() * span
        if kind == "snap":
            found.append(Snap(when, worker, server))
        elif kind == "cut" and hosts > 1:
            pair = frozenset(chance.sample(range(hosts), 2))
            found.append(Cut(when, pair, chance.choice((0.05, 1.0, 3.0))))
        elif kind == "pause":
            found.append(Pause(when, chance.choice((worker, server)), chance.choice((2 * pace, 0.5, 20.0))))
    return tuple(found)


def order(scenario: Scenario) -> JobOrder:
    """Return the job as the coordinator is told of it."""
    hosts = [
        HostOrder(f"h{host}", f"10.0.0.{host + 1}", "eth0", 4, 0, scenario.workers.count(host), may_serve=True)
        for host in range(scenario.hosts)
    ]
    return JobOrder(
        name="digits-1", argv=["train.py"], hosts=hosts, servers=len(scenario.servers), strategy="ps",
        update=scenario.update, seed=0, size=None, start_timeout=120.0, stall_timeout=300.0, total_timeout=None,
        report_seconds=1.0, ports=None,
        checkpoint=CheckpointOrder(None, 0, 0.0, 3, None, on_stop=False, copies=0), resume=None, resume_id=None,
        code_hash="c", job_file="", environment={}, congestion="auto", staleness=scenario.staleness,
    )  # fmt: skip
