"""Partitions: two hosts that do not reach each other, though the head reaches both.

Members report servers, and under collectives workers, that they cannot connect to. Where such a process runs, the cause
is the network between two hosts, and training stands still: every clock needs every worker and every shard. Both ends
dial on, so a short partition costs its own time only. When training has stood still for `timeouts.stall`, one host of
the pair is taken for lost, and its processes are replaced on others; the job does not use it again. The head is never
the one.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from psctl.job.membership_messages import ServerUnreachable
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

DETECTION = 60.0
"""Seconds before a stall in which a report belongs to it: a connection outlasts some silence before it ends."""


APART = 5.0
"""Seconds without a report after which the next one may be of another partition. A step reaches the coordinator about a
second after it is done."""


class Partitions(msgspec.Struct):
    """What members reported, and the hosts that are no longer used because of it."""

    reported: dict[tuple[Member, Member], float] = msgspec.field(default_factory=dict)
    """(the member, the server or worker that it does not reach) -> when it was last reported."""

    last: dict[tuple[object, object], tuple[float, int]] = msgspec.field(default_factory=dict)
    """Two members or two hosts -> when they were last reported, and the furthest step then."""

    given_up: set[int] = msgspec.field(default_factory=set)  # hosts


def on_unreachable(job: JobState, rank: Rank, message: ServerUnreachable) -> None:
    """A rank cannot connect to a server: append a notice if the server runs; both try again."""
    server = job.ranks.get(Member("server", message.server, message.incarnation))
    if server is None or server.ended:
        return
    report(job, rank, server, message.reason)


def report(job: JobState, rank: Rank, other: Rank, reason: str) -> None:
    """A rank cannot connect to another one, which runs."""
    job.partitions.reported[rank.member, other.member] = job.now
    if _is_new(job, rank.member, other.member):
        job.notice(f"{job.describe(rank)} cannot connect to {job.describe(other)}, which runs: {reason}")
    a, b = sorted((rank.host, other.host))
    if a != b and _is_new(job, a, b):
        names = [host.name for host in job.order.hosts]
        job.notice(f"{names[a]} and {names[b]} do not reach each other, though {names[job.head]} reaches both")


def _is_new(job: JobState, one: object, other: object) -> bool:
    """Record a report of two that do not reach each other; return whether training continued since the last one."""
    at, step = job.partitions.last.get((one, other), (-APART, -1))
    job.partitions.last[one, other] = job.now, job.furthest_step
    return job.now - at >= APART and job.furthest_step > step


def partitioned_hosts(job: JobState, stalled_since: float) -> list[tuple[int, int]]:
    """Return the pairs of hosts that do not reach each other in a stall, those with the most reports first.

    Args:
        job: the job.
        stalled_since: when training stopped, by the job's clock.
    """
    pairs: Counter[tuple[int, int]] = Counter()
    for (member, server), at in job.partitions.reported.items():
        ends = [job.ranks.get(each) for each in (member, server)]
        hosts = sorted({each.host for each in ends if each is not None and not each.ended})
        if len(hosts) == 2 and at >= stalled_since - DETECTION:
            pairs[hosts[0], hosts[1]] += 1
    return [pair for pair, _ in pairs.most_common()]


def host_to_give_up(job: JobState, stalled_since: float) -> tuple[int, str] | None:
    """Return the host to take for lost so that a stalled job goes on, and why; None where that does not help.

    Args:
        job: the job.
        stalled_since: when training stopped, by the job's clock.
    """
    pairs = partitioned_hosts(job, stalled_since)
    count = Counter(host for pair in pairs for host in pair if host != job.head)
    workers = Counter(rank.host for rank in job.live("worker"))
    for host in sorted(count, key=lambda host: (-count[host], workers[host], -host)):
        others = [agent.rank for agent in job.agents if agent.rank != host]
        free = sum(max(0, job.order.hosts[other].slots - workers[other]) for other in others)
        if free >= workers[host] or job.order.elastic is not None:
            apart = sorted({other for pair in pairs if host in pair for other in pair} - {host})
            names = ", ".join(job.order.hosts[other].name for other in apart)
            return host, f"{names} and it did not reach each other for {job.now - stalled_since:.0f} s"
    return None


def describe_partitions(job: JobState, stalled_since: float) -> list[str]:
    """Return the pairs of hosts that do not reach each other in a stall, as text."""
    names = [host.name for host in job.order.hosts]
    return [f"{names[a]} and {names[b]} do not reach each other" for a, b in partitioned_hosts(job, stalled_since)]
