"""The memory that a model needs on its servers, and the costs of consistency and of checkpoints.

    values          4 N bytes (float32), divided over the servers to within one shard
    optimizer       two numbers a parameter besides its value (Adam, AdamW; SGD with momentum: one)
    replicas        each server also holds, and updates, as many bytes again for every replica of a shard
    in progress     a server sums in rank order: the sum, the values that workers still read, and at most one gradient
                    a worker and clock of the staleness that arrived before its turn
    vector clocks   one clock a shard and worker at most; ranges at one clock are kept as one
    checkpoint      values and optimizer state, once, written on the head host

Consistency. Worker p starts clock t when it has finished clock t-1, and every worker has finished clock t-1-s (s:
staleness):

    S_p(t) = max(F_p(t-1), max_q F_q(t-1-s))          F_p(t) = S_p(t) + X_p(t) + c

with X the time that it computes and c that of a push and a pull. It is linear in the (max, +) algebra: s = 0 is bsp, s
without bound is asp. With X independent and exponential a bsp clock takes the mean of the largest of P, the harmonic
number H_P times the mean of one; under asp each takes its own mean. Staleness hides stragglers that change. A worker
that stays slow sets the pace of every finite s, because the others are never more than s clocks ahead of it.

The price of staleness: on a quadratic with curvature l, gradient steps that are tau clocks late, x(t+1) = x(t) - a
x(t - tau) with a = step * l, converge exactly for 0 < a < 2 sin(pi / (2 (2 tau + 1))) (Levin and May 1976).

Checkpoints. With failures on average M seconds apart and C seconds for each checkpoint, the share C/I of the time is
spent on saving every I seconds and I/(2M) on repeating lost steps; their sum is least at I = sqrt(2 C M)
(Young 1974). Failures: production clusters lost 13.7% of jobs of 1,000 machine-hours (Li and others, OSDI'14), so one
in 6,800 hours of a machine. A checkpoint counts as costing the seconds that its bytes take into the head host, which is
more than it delays training.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from psctl.ps.shards import target

VALUE = 4
"""Bytes of a parameter: float32."""

STATES = 2
"""Numbers that the optimizer keeps for a parameter: Adam's."""

HOURS_BETWEEN_FAILURES = -1000 / math.log(1 - 0.137)
"""Of one machine, mean."""

DISK = 500e6
"""Bytes/s that a head host writes to disk, where its network is faster."""

CLOCKS = 200
"""Clocks of the recursion over which the costs of consistency are averaged."""

MOST_WORKERS = 256
"""Workers of that recursion; with more the wait is hardly longer (the harmonic number grows with the logarithm)."""


class ConsistencyCost(msgspec.Struct, frozen=True):
    """The cost of one consistency where the times of workers vary (independent, exponential).

    Args:
        consistency: bsp, ssp or asp.
        staleness: clocks; None under asp.
        clock: length of a clock over the mean time of one worker.
        idle: share of the time that workers wait.
        step: step size times curvature must stay below it; None under asp, where nothing bounds the delay.
    """

    consistency: str
    staleness: int | None
    clock: float
    idle: float
    step: float | None


class CheckpointCost(msgspec.Struct, frozen=True):
    """A checkpoint's bytes and seconds, and its best interval; the overhead is a share of the time."""

    bytes: int
    seconds: float
    between_failures: float
    interval: float
    overhead: float


class Capacity(msgspec.Struct, frozen=True):
    """The needs of a model; figures of one server are those of the fullest one."""

    parameters: int
    bytes: int
    workers: int
    servers: int
    hosts: int
    replicas: int
    survives: int
    shards: int
    largest_shard: int
    values_a_server: int
    memory_a_server: int
    memory_a_server_at_most: int
    memory_a_host_at_most: int
    clocks: int
    clock_bytes_at_most: int
    pushed_a_clock: int
    checkpoint: CheckpointCost
    waiting: list[ConsistencyCost]


def capacity(
    parameters: int,
    workers: Sequence[str],
    servers: Sequence[str],
    replicas: int | None,
    staleness: int | None,
    rate: float,
) -> Capacity:
    """Return the needs of a model.

    Args:
        parameters: their number.
        workers: the host of each worker.
        servers: the host of each server, at least one.
        replicas: copies of a shard beyond the first; None: 1 where there are two servers.
        staleness: clocks that the fastest worker may be ahead; None: asp.
        rate: payload bytes/s into the head host; 0: unknown.
    """
    ranks, count, total = len(workers), len(servers), parameters * VALUE
    copies = min(1 if replicas is None else replicas, count - 1)
    largest = min(target(total, count, near=len({*workers, *servers}) == 1), total)
    shards = math.ceil(total / largest)
    values = math.ceil(total / count) + largest * (count > 1)  # to within one shard
    resident = values * (copies + 1) * (1 + STATES)
    ahead = ranks * (1 if staleness is None else staleness + 1)
    in_progress = values * (2 + ahead) + values * copies
    saved = total * (1 + STATES)
    cost = saved / (min(rate, DISK) if rate else DISK)
    between = HOURS_BETWEEN_FAILURES * 3600 / len(set(servers))
    interval = max(cost, checkpoint_interval(cost, between))
    return Capacity(
        parameters=parameters, bytes=total, workers=ranks, servers=count, hosts=len(set(servers)), replicas=copies,
        survives=copies, shards=shards, largest_shard=largest, values_a_server=values,
        memory_a_server=resident, memory_a_server_at_most=resident + in_progress,
        memory_a_host_at_most=(resident + in_progress) * max(Counter(servers).values()),
        clocks=shards * ranks, clock_bytes_at_most=8 * shards * ranks, pushed_a_clock=total,
        checkpoint=CheckpointCost(saved, cost, between, interval, checkpoint_overhead(cost, interval, between)),
        waiting=waiting(ranks, staleness),
    )  # fmt: skip


def waiting(workers: int, staleness: int | None) -> list[ConsistencyCost]:
    """Return the costs of bsp, some ssp (also that of `staleness`) and asp; the same numbers in every run."""
    rng = random.Random(0)  # noqa: S311 (a simulation)
    compute = [[rng.expovariate(1.0) for _ in range(min(workers, MOST_WORKERS))] for _ in range(CLOCKS)]
    rows = [ConsistencyCost("bsp", 0, harmonic(workers), 1 - 1 / harmonic(workers), stable_step(0))]
    for bound in sorted({1, 2, 4, 8, 16, *([staleness] if staleness else [])}):
        found = clock_times(compute, bound)
        mean = math.fsum(math.fsum(row) for row in compute) / (len(compute) * len(compute[0]))
        rows.append(ConsistencyCost("ssp", bound, found.seconds_a_clock / mean, found.idle, stable_step(bound)))
    return [*rows, ConsistencyCost("asp", None, 1.0, 0.0, None)]


class ClockTimes(msgspec.Struct, frozen=True):
    """The times at which workers end their clocks.

    Args:
        ends: for each clock, each worker's end, seconds.
        idle: the share of all workers' time until the last one ends in which they wait for others.
    """

    ends: list[list[float]]
    idle: float

    @property
    def seconds(self) -> float:
        """The end of the last worker, seconds."""
        return max(self.ends[-1])

    @property
    def seconds_a_clock(self) -> float:
        """Mean over the clocks."""
        return self.seconds / len(self.ends)


def clock_times(compute: Sequence[Sequence[float]], staleness: int | None, exchange: float = 0.0) -> ClockTimes:
    """Return the ends of clocks by the recursion above.

    Args:
        compute: for each clock, the seconds that each worker computes.
        staleness: clocks that the fastest may be ahead of the slowest; None: no worker waits (asp).
        exchange: seconds of a push and a pull; they count as work, not as waiting.
    """
    assert compute and compute[0], "a clock and a worker"
    ends: list[list[float]] = []
    slowest: list[float] = []  # by clock: when all workers had ended it
    busy = 0.0
    for clock, row in enumerate(compute):
        before = ends[-1] if ends else [0.0] * len(row)
        bound = clock - 1 - staleness if staleness is not None else -1
        gate = slowest[bound] if bound >= 0 else 0.0
        ends.append([max(own, gate) + each + exchange for own, each in zip(before, row, strict=True)])
        slowest.append(max(ends[-1]))
        busy += sum(row) + exchange * len(row)
    return ClockTimes(ends, 1.0 - busy / (slowest[-1] * len(compute[0])) if slowest[-1] > 0 else 0.0)


def harmonic(count: int) -> float:
    """Return 1 + 1/2 + ... + 1/count: a bsp clock's mean over one worker's, where times are exponential."""
    return math.fsum(1 / each for each in range(1, count + 1))


def stable_step(delay: int) -> float:
    """Return the bound on step * curvature below which gradients that are `delay` clocks late still converge."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def checkpoint_interval(cost: float, between_failures: float) -> float:
    """Return Young's interval between two checkpoints, seconds.

    Args:
        cost: seconds of one checkpoint.
        between_failures: mean seconds from one failure to the next.
    """
    return math.sqrt(2 * cost * between_failures)


def checkpoint_overhead(cost: float, interval: float, between_failures: float) -> float:
    """Return the share of the time that is spent on saving and on repeating lost steps."""
    return cost / interval + interval / (2 * between_failures)
