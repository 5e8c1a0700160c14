"""Silent hosts: which of them are lost, and outages of the head's own link, in which the job waits.

A host sends a packet every second, because idle connections carry keepalives. One that sends nothing for SUSPECT
seconds is lost. But where most hosts fall silent at about the same time, the more likely cause is the head's own link:
their loss would end the job, or restart it on the head alone, for an outage that ends by itself. So the job waits. The
connections to the coordinator outlast the outage (job/silence.py), so no message is lost. After AGENT_PATIENCE the
agents have ended their processes and do not come back, so there is nothing to wait for: the silent hosts are lost.

While an outage lasts no deadline passes, nothing is restarted and no checkpoint begins; messages are handled as they
come. When the hosts are reached again, all waits that began before are as much longer as the outage was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from psctl.job import events
from psctl.job.silence import AGENT_PATIENCE

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState

SUSPECT = 5.0
"""Seconds of silence after which a host is lost, unless most hosts are silent."""

NEARLY = 3.0
"""Seconds of silence from which a host counts as silent where others do."""

RETURN = 3.0
"""Seconds for the other hosts when most are reached again: systems send again once a second, each at its own time."""


class Outage(msgspec.Struct):
    """An outage: since when, and the hosts that are silent."""

    since: float
    hosts: set[int]
    disconnected: set[int] = msgspec.field(default_factory=set)  # of them, those whose connection has ended
    over_since: float | None = None  # since when most hosts are reached again


def is_outage(silent: Collection[int], hosts: Collection[int]) -> bool:
    """Return whether so many hosts are silent that the head's own link must be down.

    Args:
        silent: hosts that have sent nothing for NEARLY seconds.
        hosts: all hosts of the job but the head and those that are lost.
    """
    return len(silent) > 1 and 2 * len(silent) > len(hosts)


def on_silence(job: JobState, seconds: Mapping[int, float]) -> dict[int, str]:
    """Begin, continue or end an outage; return the hosts that are lost, with the reason.

    Args:
        job: the job.
        seconds: since the last packet of each host whose agent is connected.
    """
    hosts = job.registered - job.lost_hosts - {job.head}
    outage = job.outage
    gone = outage.disconnected & hosts if outage is not None else set()
    silent = {host for host in hosts if seconds.get(host, 0.0) >= NEARLY} | gone
    too_long = outage is not None and job.now - outage.since >= AGENT_PATIENCE
    if is_outage(silent, hosts) and not too_long:
        _go_on(job, silent)
        return {}
    if outage is not None:
        outage.over_since = job.now if outage.over_since is None else outage.over_since
        if silent and job.now - outage.over_since < RETURN and not too_long:
            return {}
        _end(job, hosts - silent)
    lost = {host: f"no sign of life for {seconds[host]:.0f} s" for host in silent if seconds.get(host, 0.0) >= SUSPECT}
    return {**lost, **dict.fromkeys(gone, "its connection ended in an outage of the head's link")}


def on_disconnected(job: JobState, host: int) -> bool:
    """Return whether the end of an agent's connection belongs to an outage, and is no loss as long as that lasts."""
    if job.outage is None or host not in job.outage.hosts:
        return False
    job.outage.disconnected.add(host)
    return True


def on_reached(job: JobState, host: int) -> None:
    """An agent has connected again."""
    if job.outage is not None:
        job.outage.disconnected.discard(host)


def _go_on(job: JobState, silent: set[int]) -> None:
    if job.outage is None:
        job.outage = Outage(job.now, set(silent))
        names = [job.order.hosts[host].name for host in sorted(silent)]
        until = job.time + AGENT_PATIENCE
        job.append_event(events.Recovering(time=job.time, hosts=names, since=job.time, until=until))
        job.notice(
            f"no sign of life from {_names(job, silent)} at the same time: the network of the head, "
            f"{job.order.hosts[job.head].name}, seems to be down; the job waits until it is back"
        )
    job.outage.hosts |= silent
    job.outage.over_since = None


def _end(job: JobState, reached: set[int]) -> None:
    outage, job.outage = job.outage, None
    assert outage is not None, "called for one"
    job.append_event(events.Recovered(time=job.time))
    lasted = job.now - outage.since
    back = outage.hosts & reached
    if back:
        job.notice(f"{_names(job, back)} reached again after {lasted:.0f} s: the job continues")
    extend_waits(job, lasted)


def extend_waits(job: JobState, seconds: float) -> None:
    """Make all waits that began before so much longer, because nothing was decided for that time."""
    for rank in job.ranks.values():
        rank.moved_at += seconds
        rank.active_at += seconds
        if rank.lost_at is not None:
            rank.lost_at = job.now
    if job.restart is not None:
        job.restart.deadline += seconds


def _names(job: JobState, hosts: set[int]) -> str:
    names = [job.order.hosts[host].name for host in sorted(hosts)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
