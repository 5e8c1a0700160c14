"""What a model of so many parameters asks of its servers: bytes, memory, shards, clocks, replicas, checkpoints.

    values          4 N bytes (float32), dealt out over the servers to within one shard
    optimizer       two numbers a parameter beside its value (Adam, AdamW; SGD with momentum: one)
    replicas        each server also holds, and steps, as many bytes again for every replica of a shard
    under way       a server sums in rank order: the sum, the values that workers still read, and at most one gradient
                    a worker and clock of the staleness that is ahead of its turn
    vector clocks   one clock a shard and worker at most; ranges at one clock are kept as one
    checkpoint      values and optimizer state, once, written on the head host

The interval between checkpoints is Young's. Failures: production clusters lost 13.7% of jobs of 1,000 machine-hours (Li
and others, OSDI'14), so one in 6,800 hours of a machine. A checkpoint counts as costing the seconds that its bytes take
into the head host, which is more than it holds training up.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from psctl.plan.consistency import checkpoint_interval, checkpoint_overhead, harmonic, stable_step, timed
from psctl.ps.shards import target

VALUE = 4
"""Bytes of a parameter: float32."""

STATES = 2
"""Numbers that the optimizer keeps a parameter: Adam's."""

HOURS_BETWEEN_FAILURES = -1000 / math.log(1 - 0.137)
"""Of one machine, mean."""

DISK = 500e6
"""Bytes/s that a head host writes, where its network is faster."""

CLOCKS = 200
"""Clocks of the timing recursion that the figures of waiting are means of."""

MOST_WORKERS = 256
"""Workers of that recursion; more wait hardly longer (the harmonic number grows with the logarithm)."""


class Waiting(msgspec.Struct, frozen=True):
    """What one consistency costs where workers' times vary (independent, exponential).

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


class Checkpoints(msgspec.Struct, frozen=True):
    """How to save; seconds."""

    bytes: int
    seconds: float
    between_failures: float
    interval: float
    overhead: float


class Capacity(msgspec.Struct, frozen=True):
    """What the parameters ask for; bytes are of one server where the name says so, the fullest one's."""

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
    checkpoint: Checkpoints
    waiting: list[Waiting]


def capacity(
    parameters: int,
    workers: Sequence[str],
    servers: Sequence[str],
    replicas: int | None,
    staleness: int | None,
    rate: float,
) -> Capacity:
    """Return what `parameters` parameters ask for.

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
    under_way = values * (2 + ahead) + values * copies
    saved = total * (1 + STATES)
    cost = saved / (min(rate, DISK) if rate else DISK)
    between = HOURS_BETWEEN_FAILURES * 3600 / len(set(servers))
    interval = max(cost, checkpoint_interval(cost, between))
    return Capacity(
        parameters=parameters, bytes=total, workers=ranks, servers=count, hosts=len(set(servers)), replicas=copies,
        survives=copies, shards=shards, largest_shard=largest, values_a_server=values,
        memory_a_server=resident, memory_a_server_at_most=resident + under_way,
        memory_a_host_at_most=(resident + under_way) * max(Counter(servers).values()),
        clocks=shards * ranks, clock_bytes_at_most=8 * shards * ranks, pushed_a_clock=total,
        checkpoint=Checkpoints(saved, cost, between, interval, checkpoint_overhead(cost, interval, between)),
        waiting=waiting(ranks, staleness),
    )  # fmt: skip


def waiting(workers: int, staleness: int | None) -> list[Waiting]:
    """Return what bsp, some ssp (the one that is asked for among them) and asp cost; the same numbers in every run."""
    chance = random.Random(0)  # noqa: S311 (a simulation)
    compute = [[chance.expovariate(1.0) for _ in range(min(workers, MOST_WORKERS))] for _ in range(CLOCKS)]
    rows = [Waiting("bsp", 0, harmonic(workers), 1 - 1 / harmonic(workers), stable_step(0))]
    for bound in sorted({1, 2, 4, 8, 16, *([staleness] if staleness else [])}):
        found = timed(compute, bound)
        mean = math.fsum(math.fsum(row) for row in compute) / (len(compute) * len(compute[0]))
        rows.append(Waiting("ssp", bound, found.seconds_a_clock / mean, found.idle, stable_step(bound)))
    return [*rows, Waiting("asp", None, 1.0, 0.0, None)]
