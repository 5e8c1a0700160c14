"""Lost hosts that return, and new hosts: the job may use them when no earlier process of it runs there.

A host is lost when the head has not reached it for some seconds; its link, or the host, may come back. Its agent, or a
new one that `psctl up` started after a boot, registers again and names the processes of the job that still run there.
They are of incarnations that the others refuse, and may hold the memory of devices, so nothing is started before the
agent reports their ends.

A new host, which `psctl up` adds to a running job, is a lost host that has never run anything. Until its agent
registers nothing waits for it; where the job has a standby, it gets a vote as one that returns.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from msgspec.structs import replace

from psctl.job.process_messages import EndProcesses, HoldSlots, HostAnswer, HostWanted
from psctl.types import MOST_RANKS, Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState


def on_host_wanted(job: JobState, agent: Member, wanted: HostWanted) -> None:
    """The agent of a host is to be started: add the host if it is new, and answer with all hosts, or why not."""
    problem = _refusal(job, wanted)
    if not problem and wanted.host is not None:
        place, hosts = wanted.place, list(job.order.hosts)
        new = place not in job.new_hosts  # else it was added by a psctl that ended before it started the agent
        hosts[place:] = [replace(wanted.host, workers=0, may_serve=False)]
        job.may_serve[place:] = [wanted.host.may_serve]
        job.order = replace(job.order, hosts=hosts, added=job.order.added + new)
        job.lost_hosts.add(place)
        job.new_hosts.add(place)
    hosts = [] if problem else job.order.hosts
    job.send(agent, HostAnswer(wanted.ticket, hosts, job.order.added, problem))


def _refusal(job: JobState, wanted: HostWanted) -> str:
    names = [host.name for host in job.order.hosts]
    if job.ending is not None:
        return "the job is ending"
    if wanted.host is None:
        return "" if wanted.place < len(names) else f"the job has {len(names)} hosts"
    if job.state in ("submitted", "placing"):
        return "the job's agents are being started"
    if wanted.place in job.new_hosts and names[wanted.place :] == [wanted.host.name]:
        return ""
    if wanted.host.name in names:
        return f"the job has a host {wanted.host.name}, which another psctl added"
    if wanted.place != len(names):
        return f"the job has {len(names)} hosts, and this psctl knows {wanted.place}: another one added some"
    return "" if len(names) < MOST_RANKS else f"the job has {len(names)} hosts, as many as it can have"


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
    if host in job.new_hosts:
        job.new_hosts.discard(host)
        job.notice(f"{hosts[host].name} was added to the job's hosts, and may be used")
    else:
        job.notice(f"{hosts[host].name} is back, and may be used again")
