"""The scenario of a seed: a job, its hosts, and its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from psctl.job.examples import clocks_in_epoch
from psctl.orders import JobOrder
from psctl.types import Member
from tests.helpers.orders import make_hosts, make_order
from tests.simulation.model import Spec


@dataclass(frozen=True)
class KillProcess:
    """A process is killed at its n-th action (a message sent or received)."""

    member: Member
    action: int


@dataclass(frozen=True)
class Disconnect:
    """The connections between two members break."""

    at: float
    a: Member
    b: Member


@dataclass(frozen=True)
class CutLink:
    """No message passes between two hosts for `seconds`."""

    at: float
    hosts: frozenset[int]
    seconds: float


@dataclass(frozen=True)
class PowerOff:
    """A host loses power, with all its processes."""

    at: float
    host: int


@dataclass(frozen=True)
class PauseProcess:
    """A process does nothing for `seconds`, as one that is stopped or whose interpreter lock is held."""

    at: float
    member: Member
    seconds: float


@dataclass(frozen=True)
class MoveShard:
    """A shard gets another primary."""

    at: float
    shard: int
    server: int


@dataclass(frozen=True)
class AddServer:
    """A server is added on a host."""

    at: float
    server: int
    host: int


@dataclass(frozen=True)
class RemoveServer:
    """All shards are moved away from a server."""

    at: float
    server: int


@dataclass(frozen=True)
class ScaleWorkers:
    """Another number of workers is requested."""

    at: float
    workers: int


COUNTABLE_PUSHES = 26
"""Pushes that a float64 counts exactly (model.Script)."""

Fault = (
    KillProcess | Disconnect | CutLink | PowerOff | PauseProcess | MoveShard | AddServer | RemoveServer | ScaleWorkers
)


@dataclass(frozen=True)
class Scenario:
    """All inputs of a run; a function of the seed."""

    seed: int
    spec: Spec
    update: str  # "server" | "worker"
    staleness: int | None  # clocks; None: asp
    reassigns: bool  # shards also move at random (reassigning_coordinator.py)
    replicas: int
    save_every: int  # steps between checkpoints; 0: none
    on_worker_loss: str  # restart | wait | continue
    replaces_servers: bool  # a lost server is replaced
    hosts: int
    workers: tuple[int, ...]  # host of each rank
    servers: tuple[int, ...]  # host of each rank
    shard_bytes: int  # target size of a shard
    latency: float  # seconds that a message takes at most
    slow_payloads: float  # share of payloads that arrive slowly
    compute: tuple[float, ...]  # seconds that a clock's gradients take, by rank
    pulls_early: bool  # a pull is requested before the pushes
    requests_norms: bool  # the joint gradient's norm is requested before the step
    faults: tuple[Fault, ...]
    elastic: bool = False  # there are no free slots, and one worker is enough
    racks: tuple[str, ...] = ()  # of each host, where gradients are summed by rack
    in_backward: bool = False  # some shards step as soon as their own pushes are in

    @property
    def depends_on_timing(self) -> bool:
        """Whether the values depend on the order of events, so that the reference must follow the actual pushes."""
        return bool(self.staleness) or self.divides

    @property
    def divides(self) -> bool:
        """Whether examples are divided among other workers than at the start."""
        return self.on_worker_loss == "continue" or self.scales or self.elastic

    @property
    def scales(self) -> bool:
        """Whether workers join and leave."""
        return any(isinstance(fault, ScaleWorkers) for fault in self.faults)

    @property
    def host_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of workers that share a host, or a rack, and push one sum."""
        places = self.racks or tuple(map(str, range(self.hosts)))
        ranks = [[rank for rank, host in enumerate(self.workers) if places[host] == one] for one in sorted({*places})]
        found = sorted(tuple(each) for each in ranks if len(each) > 1)
        return tuple(found) if self.staleness == 0 and self.hosts > 1 else ()


def draw_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(seed * 2654435761 % (1 << 61))
    hosts = rng.choice((1, 2, 2, 3, 4))
    workers = tuple(sorted(rng.randrange(hosts) for _ in range(rng.choice((1, 2, 2, 2, 3, 4)))))
    servers = tuple(rng.randrange(hosts) for _ in range(rng.choice((1, 2, 2, 3, 3))))
    update = rng.choice(("server", "server", "server", "worker"))
    reassigns = rng.random() < 0.5
    staleness = rng.choice((0, 0, 0, 1, 1, 2, None)) if update == "server" else 0
    on_worker_loss = "wait" if reassigns else rng.choice(("restart", "wait", "wait", "continue", "continue"))
    if on_worker_loss == "continue" and (update == "worker" or staleness is None):
        on_worker_loss = "wait"
    spec = _spec(rng, len(workers), asynchronous=staleness is None)
    if on_worker_loss == "continue":  # end with an epoch, as a script does: then no returned examples are left over
        whole = clocks_in_epoch(spec.examples, spec.batch, spec.world)
        spec = replace(spec, steps=max(1, spec.steps // whole) * whole)
    latency = rng.choice((0.001, 0.01, 0.05))
    slow = [rng.choice((0.5, 1.0, 1.0, 8.0)) * latency * rng.choice((1, 4)) for _ in workers]
    if reassigns:
        faults = _reassigning_faults(rng, hosts, len(workers), len(servers), latency, spec.steps)
    else:
        faults = _faults(rng, hosts, len(workers), len(servers), latency, spec.steps)
    drawn = Scenario(
        seed=seed, spec=spec, update=update, staleness=staleness, reassigns=reassigns,
        save_every=rng.choice((0, 1, 2)) if update == "server" and not reassigns else 0,
        on_worker_loss=on_worker_loss,
        replicas=rng.choice((0, 1, 1, 2)), replaces_servers=rng.random() < 0.7,
        hosts=hosts, workers=workers, servers=servers,
        shard_bytes=rng.choice((16, 32, 64, 1 << 20)) if not spec.wide else rng.choice((512, 1 << 20)),
        latency=latency,
        slow_payloads=max(0.0 if rng.random() < 0.8 else 0.4, rng.choice((0.0, 0.1, 0.4))), compute=tuple(slow),
        pulls_early=update == "worker" and rng.random() < 0.5,
        requests_norms=update == "server" and staleness is not None and rng.random() < 0.2, faults=faults,
    )  # fmt: skip
    drawn = replace(drawn, faults=(*faults, *_host_group_faults(drawn), *_simultaneous_kills(drawn)))
    return _with_scaling(drawn)


def draw_racks(seed: int) -> Scenario:
    """Return the scenario of a seed in which gradients are summed by rack, if it has several hosts in step."""
    drawn, rng = draw_scenario(seed), random.Random(seed * 104729 + 3)
    if drawn.staleness != 0 or drawn.hosts == 1:
        return drawn
    drawn = replace(drawn, racks=tuple(rng.choice(("a", "a", "b")) for _ in range(drawn.hosts)))
    return replace(drawn, faults=(*drawn.faults, *_host_group_faults(drawn)))


def draw_backward(seed: int) -> Scenario:
    """Return the scenario of a seed with steps in backward: all workers in step, servers step, nothing is clipped."""
    drawn = draw_scenario(seed)
    at = seed
    while drawn.update != "server" or drawn.staleness != 0:
        at += 1_000_003
        drawn = draw_scenario(at)
    rng = random.Random(seed * 15485863 + 1)
    return replace(
        drawn, seed=seed, in_backward=True, requests_norms=False, spec=replace(drawn.spec, clips=False),
        shard_bytes=rng.choice((16, 16, 32, 64)) if not drawn.spec.wide else 512,
    )  # fmt: skip


def _with_scaling(scenario: Scenario) -> Scenario:
    """Draw changes of the number of workers, in some of the scenarios in which they need no restart."""
    rng = random.Random(scenario.seed * 7919 + 11)
    spec, scaled = scenario.spec, rng.random() < 0.3
    divisible = scenario.update == "server" and scenario.staleness is not None and scenario.on_worker_loss != "restart"
    elastic = not scaled and scenario.hosts > 1 and 0 in scenario.workers and rng.random() < 0.2
    if scenario.reassigns or not divisible or not (scaled or elastic):
        return scenario
    spec = replace(spec, examples=spec.batch * 3)  # no tail, whose clock depends on the number of workers
    spec = replace(spec, steps=max(1, spec.steps // 3) * 3 + rng.choice((0, 3)))
    span = scenario.latency * (12 + 10 * min(spec.steps, 12))
    if elastic:
        off = PowerOff(rng.random() * span, rng.randrange(1, scenario.hosts))
        return replace(scenario, spec=spec, faults=(*scenario.faults, off), elastic=True)
    found = [ScaleWorkers(rng.random() * span, rng.randrange(1, spec.world + 3)) for _ in range(rng.choice((1, 2, 3)))]
    kills = [
        KillProcess(Member("worker", rng.randrange(spec.world, spec.world + 2), 0), 4 + int(rng.random() ** 2 * 60))
        for _ in range(rng.choice((0, 0, 1)))
    ]
    cuts = [  # so that a server learns of new members late
        CutLink(one.at + 0.02 + rng.random() * 8 * scenario.latency, frozenset((0, host)), rng.choice((0.05, 1.0)))
        for one in found
        for host in set(scenario.servers)
        if host and rng.random() < 0.3
    ]
    return replace(scenario, spec=spec, faults=(*scenario.faults, *found, *kills, *cuts))


def _host_group_faults(scenario: Scenario) -> list[Fault]:
    """Draw faults between workers of one host: connections that break, pauses and kills."""
    rng, found = random.Random(scenario.seed * 40503 + 7), list[Fault]()
    steps = scenario.spec.steps
    for _ in range(rng.choice((0, 2, 5, 12)) if scenario.host_groups else 0):
        a, b = (Member("worker", rank, 0) for rank in rng.sample(rng.choice(scenario.host_groups), 2))
        when = rng.random() * scenario.latency * (12 + 10 * min(steps, 12))
        still = PauseProcess(when, a, rng.choice((2, 8)) * scenario.latency)
        found.append(Disconnect(when, a, b) if rng.random() < 0.7 else still)
    if scenario.host_groups and scenario.reassigns and scenario.update == "server" and rng.random() < 0.6:
        for rank in rng.sample(rng.choice(scenario.host_groups), rng.choice((1, 1, 2))):
            found.append(KillProcess(Member("worker", rank, 0), 12 + int(rng.random() * 25 * steps)))
    return found


def _simultaneous_kills(scenario: Scenario) -> list[Fault]:
    """Draw two or three workers that are killed at about the same time; only the job's state machine handles that."""
    rng = random.Random(scenario.seed * 69069 + 5)
    ranks = range(len(scenario.workers))
    if scenario.reassigns or len(ranks) < 2 or rng.random() < 0.7:
        return []
    when = 8 + int(rng.random() * 25 * scenario.spec.steps)
    killed = rng.sample(ranks, min(len(ranks), rng.choice((2, 2, 3))))
    return [KillProcess(Member("worker", rank, 0), max(8, when + rng.randrange(-6, 7))) for rank in killed]


def _spec(rng: random.Random, world: int, *, asynchronous: bool) -> Spec:
    """Draw from few values, so that reference runs are reused."""
    steps = rng.choice((2, 3, 4, 4, 5, 5, 7)) if rng.random() < 0.98 else 40
    if asynchronous:
        steps = min(steps, COUNTABLE_PUSHES // world)
    batch = world * 2 + rng.choice((0, 0, 1))
    return Spec(
        optimizer="SGD" if asynchronous else rng.choice(("SGD", "AdamW")),
        dtype="float64" if asynchronous else rng.choice(("float32", "float64")),
        parameters=rng.choice((1, 2, 3, 4)), wide=rng.random() < 0.1,
        sparse=rng.random() < 0.3 and not asynchronous, clips=rng.random() < 0.3 and not asynchronous,
        counted=asynchronous, world=world, batch=batch, examples=batch * 3 + rng.choice((0, world)), steps=steps,
    )  # fmt: skip


def _faults(
    rng: random.Random, hosts: int, workers: int, servers: int, latency: float, steps: int
) -> tuple[Fault, ...]:
    """Draw faults of the network, and kills; a seventh of the seeds has no network fault."""
    found = [
        _network_fault(rng, hosts, workers, servers, latency, steps) for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 8)))
    ]
    if hosts > 1 and rng.random() < 0.15:
        found.append(PowerOff(rng.random() * latency * (12 + 10 * min(steps, 12)), rng.randrange(1, hosts)))
    for incarnation in range(rng.choice((0, 0, 0, 1, 1, 2, 3))):
        role, count = rng.choice((("worker", workers), ("server", servers)))
        member = Member(role, rng.randrange(count), incarnation)  # type: ignore[arg-type]
        found.append(KillProcess(member, 8 + int(rng.random() ** 2 * 25 * steps)))
    return tuple(found)


def _network_fault(rng: random.Random, hosts: int, workers: int, servers: int, latency: float, steps: int) -> Fault:
    worker = Member("worker", rng.randrange(workers))
    server = Member("server", rng.randrange(servers))
    when = rng.random() * latency * (12 + 10 * min(steps, 12))  # about as long as the run takes
    kind = rng.choice(("snap", "snap", "snap", "cut", "pause"))
    if kind == "cut" and hosts > 1:
        return CutLink(when, frozenset(rng.sample(range(hosts), 2)), rng.choice((0.05, 1.0, 3.0)))
    if kind == "pause":
        return PauseProcess(when, rng.choice((worker, server)), rng.choice((2 * latency, 0.5, 20.0)))
    other = Member("server", rng.randrange(servers))
    return (
        Disconnect(when, rng.choice((worker, server)), other) if other != server else Disconnect(when, worker, server)
    )


def _reassigning_faults(
    rng: random.Random, hosts: int, workers: int, servers: int, latency: float, steps: int
) -> tuple[Fault, ...]:
    """Draw faults of all kinds, and moves, additions and removals of servers."""
    found: list[Fault] = []
    span = latency * (12 + 10 * min(steps, 12))
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 5))):
        kind = rng.choice(("net", "move", "move", "server", "server", "worker", "worker", "join", "leave", "power"))
        when, actions = rng.random() * span, int(rng.random() ** 2 * 25 * steps)
        if kind == "net":
            found.append(_network_fault(rng, hosts, workers, servers, latency, steps))
        elif kind == "move":
            found.append(MoveShard(when, rng.randrange(8), rng.randrange(servers)))
        elif kind == "server":
            found.append(KillProcess(Member("server", rng.randrange(servers), rng.choice((0, 0, 1))), 12 + actions))
        elif kind == "worker":
            found.append(KillProcess(Member("worker", rng.randrange(workers), rng.choice((0, 0, 1))), 12 + actions))
        elif kind == "join":
            found.append(AddServer(when, servers + len(found), rng.randrange(hosts)))
        elif kind == "leave":
            found.append(RemoveServer(when, rng.randrange(servers)))
        elif hosts > 1:
            found.append(PowerOff(when, rng.randrange(1, hosts)))
    return tuple(found)


def order(scenario: Scenario) -> JobOrder:
    """Return the job's order for the coordinator."""
    workers = [scenario.workers.count(host) for host in range(scenario.hosts)]
    return make_order(
        make_hosts(*workers, free=0 if scenario.elastic else 4), name="digits-1", servers=len(scenario.servers),
        update=scenario.update,
        every=scenario.save_every, staleness=scenario.staleness,
        replicas=scenario.replicas, on_worker_loss=scenario.on_worker_loss,
        elastic=(1, len(scenario.workers)) if scenario.elastic else None, step_in_backward=scenario.in_backward,
    )  # fmt: skip
