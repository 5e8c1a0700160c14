"""What one seed stands for: a job, the machines it runs on, and what goes wrong when."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from psctl.job.examples import clocks_in_epoch
from psctl.orders import JobOrder
from psctl.types import Member
from tests.helpers.orders import make_hosts, make_order
from tests.simulation.model import Spec


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


@dataclass(frozen=True)
class Move:
    """A shard's primary is to be another server."""

    at: float
    shard: int
    server: int


@dataclass(frozen=True)
class Join:
    """One more server comes, on a host."""

    at: float
    server: int
    host: int


@dataclass(frozen=True)
class Leave:
    """A server is to hold nothing any more."""

    at: float
    server: int


DIGITS = 26
"""Pushes that a float64 counts without error (model.Script)."""

Fault = Crash | Snap | Cut | Power | Pause | Move | Join | Leave


@dataclass(frozen=True)
class Scenario:
    """All that a run depends on beside the product; a function of the seed."""

    seed: int
    spec: Spec
    update: str  # "server" | "worker"
    staleness: int | None  # clocks that the fastest may be ahead; None: asp
    directed: bool  # shards also move at random (director.py)
    replicas: int
    saves: int  # a checkpoint at every so many steps; 0: none
    deaths: str  # what becomes of a worker's death: restart | wait | continue
    replaces: bool  # a server that died is started again
    hosts: int
    workers: tuple[int, ...]  # host of each rank
    servers: tuple[int, ...]  # host of each rank
    cut_bytes: int  # target size of a shard
    pace: float  # seconds that messages take
    torn: float  # share of payloads that arrive slowly
    compute: tuple[float, ...]  # seconds that a clock's gradients take, by rank
    early: bool  # pulls go ahead of pushes
    norms: bool  # the joint gradient's norm is asked for before the step
    faults: tuple[Fault, ...]

    @property
    def follows(self) -> bool:
        """Does what training gives depend on what happened, so that it must be followed from what was pushed?"""
        return bool(self.staleness) or self.deaths == "continue"

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The workers that share a host and push together."""
        ranks = [[rank for rank, host in enumerate(self.workers) if host == one] for one in range(self.hosts)]
        found = sorted(tuple(each) for each in ranks if len(each) > 1)
        return tuple(found) if self.staleness == 0 and self.hosts > 1 else ()

    @property
    def deadly(self) -> bool:
        """May a process be lost?"""
        return any(isinstance(fault, Crash | Power) for fault in self.faults)


def draw(seed: int) -> Scenario:
    """Return what a seed stands for."""
    chance = random.Random(seed * 2654435761 % (1 << 61))
    hosts = chance.choice((1, 2, 2, 3, 4))
    workers = tuple(sorted(chance.randrange(hosts) for _ in range(chance.choice((1, 2, 2, 2, 3, 4)))))
    servers = tuple(chance.randrange(hosts) for _ in range(chance.choice((1, 2, 2, 3, 3))))
    update = chance.choice(("server", "server", "server", "worker"))
    directed = chance.random() < 0.5
    staleness = chance.choice((0, 0, 0, 1, 1, 2, None)) if update == "server" else 0
    deaths = "wait" if directed else chance.choice(("restart", "wait", "wait", "continue", "continue"))
    if deaths == "continue" and (update == "worker" or staleness is None):
        deaths = "wait"  # it comes to that
    spec = _spec(chance, len(workers), asynchronous=staleness is None)
    if deaths == "continue":  # it ends with a pass, as a script's loop does: then nobody's examples are left over
        whole = clocks_in_epoch(spec.examples, spec.batch, spec.world)
        spec = replace(spec, steps=max(1, spec.steps // whole) * whole)
    pace = chance.choice((0.001, 0.01, 0.05))
    slow = [chance.choice((0.5, 1.0, 1.0, 8.0)) * pace * chance.choice((1, 4)) for _ in workers]
    if directed:
        faults = _director_faults(chance, hosts, len(workers), len(servers), pace, spec.steps)
    else:
        faults = _faults(chance, hosts, len(workers), len(servers), pace, spec.steps)
    drawn = Scenario(
        seed=seed, spec=spec, update=update, staleness=staleness, directed=directed,
        saves=chance.choice((0, 1, 2)) if update == "server" and not directed else 0,
        deaths=deaths,
        replicas=chance.choice((0, 1, 1, 2)), replaces=chance.random() < 0.7,
        hosts=hosts, workers=workers, servers=servers,
        cut_bytes=chance.choice((16, 32, 64, 1 << 20)) if not spec.wide else chance.choice((512, 1 << 20)),
        pace=pace,
        torn=max(0.0 if chance.random() < 0.8 else 0.4, chance.choice((0.0, 0.1, 0.4))), compute=tuple(slow),
        early=update == "worker" and chance.random() < 0.5,
        norms=update == "server" and staleness is not None and chance.random() < 0.2, faults=faults,
    )  # fmt: skip
    return replace(drawn, faults=(*faults, *_between_workers(drawn), *_two_at_once(drawn)))


def _between_workers(scenario: Scenario) -> list[Fault]:
    """Draw what goes wrong between workers of one host: lines break, one of them stands still, or some die."""
    chance, found = random.Random(scenario.seed * 40503 + 7), list[Fault]()
    steps = scenario.spec.steps
    for _ in range(chance.choice((0, 2, 5, 12)) if scenario.groups else 0):
        a, b = (Member("worker", rank, 0) for rank in chance.sample(chance.choice(scenario.groups), 2))
        when = chance.random() * scenario.pace * (12 + 10 * min(steps, 12))
        still = Pause(when, a, chance.choice((2, 8)) * scenario.pace)
        found.append(Snap(when, a, b) if chance.random() < 0.7 else still)
    if scenario.groups and scenario.directed and scenario.update == "server" and chance.random() < 0.6:
        for rank in chance.sample(chance.choice(scenario.groups), chance.choice((1, 1, 2))):
            found.append(Crash(Member("worker", rank, 0), 12 + int(chance.random() * 25 * steps)))
    return found


def _two_at_once(scenario: Scenario) -> list[Fault]:
    """Draw two workers, at times three, that die at about the same time; only the job's state machine handles that."""
    chance = random.Random(scenario.seed * 69069 + 5)
    ranks = range(len(scenario.workers))
    if scenario.directed or len(ranks) < 2 or chance.random() < 0.7:
        return []
    when = 8 + int(chance.random() * 25 * scenario.spec.steps)
    who = chance.sample(ranks, min(len(ranks), chance.choice((2, 2, 3))))
    return [Crash(Member("worker", rank, 0), max(8, when + chance.randrange(-6, 7))) for rank in who]


def _spec(chance: random.Random, world: int, *, asynchronous: bool) -> Spec:
    """Draw from few enough that undisturbed runs are found again."""
    steps = chance.choice((2, 3, 4, 4, 5, 5, 7)) if chance.random() < 0.98 else 40
    if asynchronous:
        steps = min(steps, DIGITS // world)
    batch = world * 2 + chance.choice((0, 0, 1))
    return Spec(
        optimizer="SGD" if asynchronous else chance.choice(("SGD", "AdamW")),
        dtype="float64" if asynchronous else chance.choice(("float32", "float64")),
        parameters=chance.choice((1, 2, 3, 4)), wide=chance.random() < 0.1,
        sparse=chance.random() < 0.3 and not asynchronous, clips=chance.random() < 0.3 and not asynchronous,
        counted=asynchronous, world=world, batch=batch, examples=batch * 3 + chance.choice((0, world)), steps=steps,
    )  # fmt: skip


def _faults(
    chance: random.Random, hosts: int, workers: int, servers: int, pace: float, steps: int
) -> tuple[Fault, ...]:
    """Draw what goes wrong with the network; of a seventh of the seeds nothing does."""
    found = [
        _disturbance(chance, hosts, workers, servers, pace, steps) for _ in range(chance.choice((0, 1, 1, 2, 3, 5, 8)))
    ]
    if hosts > 1 and chance.random() < 0.15:
        found.append(Power(chance.random() * pace * (12 + 10 * min(steps, 12)), chance.randrange(1, hosts)))
    for incarnation in range(chance.choice((0, 0, 0, 1, 1, 2, 3))):
        role, count = chance.choice((("worker", workers), ("server", servers)))
        member = Member(role, chance.randrange(count), incarnation)  # type: ignore[arg-type]
        found.append(Crash(member, 8 + int(chance.random() ** 2 * 25 * steps)))
    return tuple(found)


def _disturbance(chance: random.Random, hosts: int, workers: int, servers: int, pace: float, steps: int) -> Fault:
    worker = Member("worker", chance.randrange(workers))
    server = Member("server", chance.randrange(servers))
    when = chance.random() * pace * (12 + 10 * min(steps, 12))  # about as long as the run takes
    kind = chance.choice(("snap", "snap", "snap", "cut", "pause"))
    if kind == "cut" and hosts > 1:
        return Cut(when, frozenset(chance.sample(range(hosts), 2)), chance.choice((0.05, 1.0, 3.0)))
    if kind == "pause":
        return Pause(when, chance.choice((worker, server)), chance.choice((2 * pace, 0.5, 20.0)))
    other = Member("server", chance.randrange(servers))
    return Snap(when, chance.choice((worker, server)), other) if other != server else Snap(when, worker, server)


def _director_faults(
    chance: random.Random, hosts: int, workers: int, servers: int, pace: float, steps: int
) -> tuple[Fault, ...]:
    """Draw deaths, moves, joins and leaves too."""
    found: list[Fault] = []
    span = pace * (12 + 10 * min(steps, 12))
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 5))):
        kind = chance.choice(("net", "move", "move", "server", "server", "worker", "worker", "join", "leave", "power"))
        when, actions = chance.random() * span, int(chance.random() ** 2 * 25 * steps)
        if kind == "net":
            found.append(_disturbance(chance, hosts, workers, servers, pace, steps))
        elif kind == "move":
            found.append(Move(when, chance.randrange(8), chance.randrange(servers)))
        elif kind == "server":
            found.append(Crash(Member("server", chance.randrange(servers), chance.choice((0, 0, 1))), 12 + actions))
        elif kind == "worker":
            found.append(Crash(Member("worker", chance.randrange(workers), chance.choice((0, 0, 1))), 12 + actions))
        elif kind == "join":
            found.append(Join(when, servers + len(found), chance.randrange(hosts)))
        elif kind == "leave":
            found.append(Leave(when, chance.randrange(servers)))
        elif hosts > 1:
            found.append(Power(when, chance.randrange(1, hosts)))
    return tuple(found)


def order(scenario: Scenario) -> JobOrder:
    """Return the job as the coordinator is told of it."""
    workers = [scenario.workers.count(host) for host in range(scenario.hosts)]
    return make_order(
        make_hosts(*workers, free=4), name="digits-1", servers=len(scenario.servers), update=scenario.update,
        every=scenario.saves, staleness=scenario.staleness,
        replicas=scenario.replicas, on_worker_loss=scenario.deaths,
    )  # fmt: skip
