"""Lost hosts that return: their old processes are ended first, then the job may use them again.

A host is lost when the head has not reached it for some seconds; its link, or the host, may come back. Its agent, or a
new one that `psctl up` started after a boot, registers again and names the processes of the job that still run there.
They are of incarnations that the others refuse, and may hold the memory of devices, so nothing is started before the
agent reports their ends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from msgspec.structs import replace

from psctl.job.process_messages import EndProcesses, HoldSlots
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState


def on_returned(job: JobState, host: int, running: Collection[Member]) -> None:
    """The agent of a lost host has registered again; `running`: the processes of the job there."""
    job.returning[host] = set(running)
    if running:
        reason = "this host was lost to the job, which went on without it"
        job.send(Member("agent", host), EndProcesses(sorted(running), 0.0, reason))
    _use_when_idle(job, host)


def on_process_ended(job: JobState, host: int, member: Member) -> None:
    """A process on a lost host has ended."""
    if host in job.returning:
        job.returning[host].discard(member)
        _use_when_idle(job, host)


def _use_when_idle(job: JobState, host: int) -> None:
    if job.returning[host]:
        return
    del job.returning[host]
    if host in job.partitions.given_up:
        return
    job.lost_hosts.discard(host)
    hosts = list(job.order.hosts)
    hosts[host] = replace(hosts[host], may_serve=job.may_serve[host])
    job.order = replace(job.order, hosts=hosts)
    # A restart that comes may place workers here; else they were placed elsewhere.
    workers = hosts[host].workers if job.restart is not None else 0
    job.send(Member("agent", host), HoldSlots(workers))
    job.notice(f"{hosts[host].name} is back, and may be used again")
