"""What waiting for each other costs, what not waiting costs, and how often to save: closed forms and one recursion.

Timing. Worker p begins clock t when it has ended clock t-1, and every worker has ended clock t-1-s (s: staleness):

    S_p(t) = max(F_p(t-1), max_q F_q(t-1-s))          F_p(t) = S_p(t) + X_p(t) + c

with X the time that it computes and c what a push and a pull take. It is linear in the (max, +) algebra: s = 0 is bsp,
s without bound is asp. With X independent and exponential a bsp clock takes the mean of the largest of P, the harmonic
number H_P times the mean of one; under asp each takes its own mean. Staleness hides stragglers that change. One that
stays slow sets the pace of every finite s, for the others are never more than s clocks ahead of it.

What staleness costs the other way. On a quadratic with curvature l, gradient steps that are tau clocks late,
x(t+1) = x(t) - a x(t - tau) with a = step * l, converge exactly for 0 < a < 2 sin(pi / (2 (2 tau + 1))) (Levin and May
1976): a stale run must take smaller steps. And for convex functions with gradients of norm L at most within a diameter
F, SGD under SSP has a regret of at most 4 F L sqrt(2 (s+1) P T) (Ho and others 2013, theorem 1), so that the mean error
after T clocks grows with the root of s + 1.

Saving. With failures on average M seconds apart and C seconds for each checkpoint, the share C/I of the time goes into
saving every I seconds and I/(2M) into what a failure throws away; their sum is least at I = sqrt(2 C M) (Young 1974).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Timed(msgspec.Struct, frozen=True):
    """When workers ended their clocks.

    Args:
        ends: for each clock, each worker's end, seconds.
        idle: the share of all workers' time until the last one's end that they waited for others.
    """

    ends: list[list[float]]
    idle: float

    @property
    def seconds(self) -> float:
        """When the last worker has ended."""
        return max(self.ends[-1])

    @property
    def seconds_a_clock(self) -> float:
        """Mean over the clocks."""
        return self.seconds / len(self.ends)


def timed(compute: Sequence[Sequence[float]], staleness: int | None, exchange: float = 0.0) -> Timed:
    """Run the recursion.

    Args:
        compute: for each clock, the seconds that each worker computes.
        staleness: clocks that the fastest may be ahead of the slowest; None: nobody waits (asp).
        exchange: seconds of a push and a pull; they count as work, not as waiting.
    """
    assert compute and compute[0], "a clock and a worker"
    ends: list[list[float]] = []
    slowest: list[float] = []  # by clock: when all had ended it
    busy = 0.0
    for clock, row in enumerate(compute):
        before = ends[-1] if ends else [0.0] * len(row)
        bound = clock - 1 - staleness if staleness is not None else -1
        gate = slowest[bound] if bound >= 0 else 0.0
        ends.append([max(own, gate) + each + exchange for own, each in zip(before, row, strict=True)])
        slowest.append(max(ends[-1]))
        busy += sum(row) + exchange * len(row)
    return Timed(ends, 1.0 - busy / (slowest[-1] * len(compute[0])) if slowest[-1] > 0 else 0.0)


def harmonic(count: int) -> float:
    """Return 1 + 1/2 + ... + 1/count: a bsp clock's mean over one worker's, where times are exponential."""
    return math.fsum(1 / each for each in range(1, count + 1))


def stable_step(delay: int) -> float:
    """Return the bound on step * curvature below which gradients that are `delay` clocks late still converge."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def regret_bound(staleness: int, workers: int, clocks: int, gradient: float, diameter: float) -> float:
    """Return the bound on SSP's regret: how much the sum of all losses is above that of the best point.

    Args:
        staleness: s.
        workers: P.
        clocks: T, the number of gradients that were applied.
        gradient: L, the largest norm of one.
        diameter: F, with half the squared distance of any two points at most F squared.
    """
    return 4 * diameter * gradient * math.sqrt(2 * (staleness + 1) * workers * clocks)


def unseen_updates(staleness: int, workers: int) -> int:
    """Return how many updates, at most, a read lacks of the serial order or has beyond it (SSP's lemma 1)."""
    return 2 * staleness * (workers - 1)


def checkpoint_interval(cost: float, between_failures: float) -> float:
    """Return Young's interval between two checkpoints, seconds.

    Args:
        cost: seconds of one checkpoint.
        between_failures: mean seconds from one failure to the next.
    """
    return math.sqrt(2 * cost * between_failures)


def checkpoint_overhead(cost: float, interval: float, between_failures: float) -> float:
    """Return the share of the time that saving, and repeating what was lost, take."""
    return cost / interval + interval / (2 * between_failures)
