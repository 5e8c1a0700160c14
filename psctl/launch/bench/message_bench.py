"""The bench of `psctl up`: what it measures of the costs of messages, and with which ranks."""

from __future__ import annotations

from collections.abc import Sequence

from psctl.job.bench_messages import BenchEffort
from psctl.launch.bench.bench_runs import BenchRequest, LikelyStrategies
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.placement.cluster_snapshot import machines_of
from psctl.launch.placement.roster import slots_of

MESSAGES = BenchRequest(
    "allreduce", [1_000_000, 256_000, 64_000, 4_000], [],
    effort=BenchEffort(least=5, seconds=0.5, slow=0.5, lasting=0.05, slower=1.5), limit="5m",
    likely=LikelyStrategies(factor=3.0, seconds=3.0), part_bytes=64_000,
)  # fmt: skip
"""The measurement of `up`, of the costs of messages: above a megabyte the links' rates determine the times, and for a
part of the ranks above 64 kB most of them. The shortest come last, because processes that have just started disturb
them most."""

MOST_RANKS = 64
"""Workers of that measurement, at most: a job with more starts longer than it measures."""

LEAST_PART = 3
"""Least ranks of a part of them: between two all strategies exchange the same messages, or more of them."""


def workers_of(reached: ReachedCluster) -> int:
    """Return the workers of the measurement of `up`: all that the hosts take, so that ranks share processors as in
    jobs; MOST_RANKS at most."""
    machines = machines_of(reached)
    slots = [slots_of(host, machines[host.name]) for host in reached.chosen.spec.hosts if host.name in machines]
    return min(MOST_RANKS, sum(slots))


def part_of(hosts: Sequence[str]) -> int | None:
    """Return how many of the first ranks measure once more for themselves; None: they are too few, or on one host.

    Half of them stand for jobs that leave hosts free: where hosts share processors, or a message's cost depends on the
    ranks in another way, the costs of all do not hold for fewer.

    Args:
        hosts: the host of each rank.
    """
    count = len(hosts) // 2
    return count if count >= LEAST_PART and len(set(hosts[:count])) > 1 else None
