"""Changes the number of servers or workers while the job trains (`psctl scale`), or returns the reason why not.

An added server is started like a replacement, and gets its share when it listens. A removed one transfers its shards
first, and receives Leave when workers have the assignment without it (server_changes.py). Servers are numbered from 0
without gaps: those with the highest numbers leave.

Workers join and leave while the others train (joining_workers.py) where that is possible. Elsewhere all workers go to a
common step, save and leave, and the new number starts from that checkpoint (restart.py). Either way no step is lost or
done twice.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from psctl.coordinator.state import joining_workers, losses, server_changes, table_placement
from psctl.job.process_messages import ScaleAnswer, ScaleWanted
from psctl.orders import HostOrder, JobOrder
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState

SERVERS_A_HOST = 64
"""Limit of servers per host: each is a process that loads torch."""

GROW_AFTER = 10.0
"""Seconds for which slots must be free before an elastic job takes them: a host that comes back may go again."""

INSTEAD = "psctl stop {job} --save, then psctl checkpoint restore {job}@latest --workers N --servers M"


class Scaling(msgspec.Struct):
    """Changes of the number of workers and servers."""

    restarts: int = 0  # with another number of workers, or with `update: worker`
    new_order: JobOrder | None = None  # after the restart in progress
    leaving_servers: set[int] = msgspec.field(default_factory=set)
    may_grow_since: float | None = None  # since when an elastic job has free slots for more workers


def on_scale_wanted(job: JobState, agent: Member, message: ScaleWanted) -> None:
    """Change the numbers of workers and servers as requested, or answer with the reason why not."""
    workers, servers = sum(not rank.leaving for rank in job.live("worker")), _servers(job)
    problem, hint = _refused(job, message)
    answer = ScaleAnswer(message.ticket, workers, servers, problem, hint.format(job=job.order.name))
    job.send(agent, answer)
    if problem:
        return
    if message.workers is not None and job.order.elastic is not None:
        job.order = replace(job.order, elastic=(min(job.order.elastic[0], message.workers), message.workers))
    then = servers if message.servers is None else message.servers
    if message.workers is not None and message.workers != workers:
        _scale_workers(job, message.workers, then, "psctl scale")
    if then != servers and job.restart is None:
        job.notice(f"psctl scale: from {servers} to {then} servers")
        _scale_servers(job, servers, then)


def grow(job: JobState) -> None:
    """Take more workers when an elastic job has had slots for them for GROW_AFTER."""
    if job.order.elastic is None:
        return
    scaling, live = job.scaling, [rank for rank in job.live("worker") if not rank.leaving]
    workers, on_host = len(live), Counter(rank.host for rank in live)
    free = sum(max(0, host.slots - on_host[index]) for index, host in _living(job).items())
    more = min(job.order.elastic[1] - workers, free)
    trains = (
        job.training and job.plan is not None and not job.collectives.wanted and not any(rank.finished for rank in live)
    )
    if more <= 0 or not trains or job.joining.members or job.returning or not joining_workers.may_retry(job):
        scaling.may_grow_since = None
    elif scaling.may_grow_since is None:
        scaling.may_grow_since = job.now
    elif job.now - scaling.may_grow_since >= GROW_AFTER:
        scaling.may_grow_since = None
        _scale_workers(job, workers + more, _servers(job), "slots are free")


def _servers(job: JobState) -> int:
    leaving = job.scaling.leaving_servers
    return len([rank for rank in job.live("server") if not rank.leaving and rank.member.rank not in leaving])


def _refused(job: JobState, message: ScaleWanted) -> tuple[str, str]:
    """Return why it cannot be done, and what to do instead; two empty texts when it can."""
    if job.ending is not None:
        return "the job is ending", "psctl status {job}"
    if job.restart is not None or not job.training or job.plan is None:
        return "the job does not train yet", "try again when it makes steps: psctl attach {job}"
    if all(rank.finished for rank in job.live("worker")):
        return "its workers have finished", "psctl status {job}"
    if job.plan.chosen != "ps":
        text = f"strategy {job.plan.chosen} sums over a fixed number of workers and has no servers"
        return text, f"set strategy: ps, or {INSTEAD}"
    if message.workers is not None and job.collectives.wanted:
        return "its workers call collectives (run.barrier, batchnorm: sync ...), of a fixed number of workers", INSTEAD
    if message.workers is not None and hosts_for_workers(job, message.workers) is None:
        slots = sum(max(host.slots, host.workers) for host in _living(job).values())
        return f"{message.workers} workers do not fit: the job's hosts have {slots} slots", INSTEAD
    if message.workers is not None and (job.joining.members or joining_workers.is_changing(job)):
        text = "the workers are changing already"
        if job.workers_being_replaced:
            text = f"{job.describe(job.workers_being_replaced[0])} is being started again"
        elif job.joining.members:
            text = f"{job.describe(job.ranks[job.joining.members[0]])} is being started"
        return text, "try again when all workers train: psctl attach {job}"
    if message.servers is None:
        return "", ""
    if message.servers < 1:
        return "strategy ps needs one server at least", "psctl stop {job} ends the job"
    asked = job.order.replicas
    if asked is not None and message.servers <= asked:
        return f"{asked} replicas of every shard need {asked + 1} servers", "request more servers"
    hosts = [agent.rank for agent in job.agents if job.order.hosts[agent.rank].may_serve]
    if not hosts and message.servers > _servers(job):
        return "no host of the job may hold another server", f"roles: [server] on one of them; {INSTEAD}"
    most = SERVERS_A_HOST * len(hosts)
    if message.servers > max(most, _servers(job)):
        return f"{message.servers} servers do not fit: {SERVERS_A_HOST} a host are {most}", "request fewer servers"
    held = job.tables.placement
    moving = job.shards.placement is None or not job.shards.placement.settled or (held is not None and not held.settled)
    if moving or job.tables.asked or any(not rank.ready for rank in job.live("server")):
        return "servers are joining or leaving already", "try again when they have: psctl attach {job}"
    return "", ""


def _living(job: JobState) -> dict[int, HostOrder]:
    return {agent.rank: job.order.hosts[agent.rank] for agent in job.agents}


def hosts_for_workers(job: JobState, workers: int) -> list[HostOrder] | None:
    """Return the hosts with so many workers: more go to free slots in the roster's order, fewer leave from its end;
    None when there are too few slots."""
    hosts = joining_workers.hosts_as_they_run(job)
    more = workers - sum(host.workers for host in hosts)
    for index in _living(job):
        host = hosts[index]
        change = min(more, max(0, host.slots - host.workers)) if more > 0 else 0
        hosts[index] = replace(host, workers=host.workers + change)
        more -= change
    for index in reversed(range(len(hosts))):
        change = min(-more, hosts[index].workers) if more < 0 else 0
        hosts[index] = replace(hosts[index], workers=hosts[index].workers - change)
        more += change
    return hosts if more == 0 else None


def _scale_workers(job: JobState, workers: int, servers: int, why: str) -> None:
    """Have workers join or leave; or all go to a common step and leave, and restart.py starts the new number there."""
    before = sum(not rank.leaving for rank in job.live("worker"))
    if joining_workers.may_change(job):
        job.notice(f"{why}: from {before} to {workers} workers, while training goes on")
        if workers > before:
            joining_workers.start(job, workers - before)
        else:
            joining_workers.leave(job, workers)
        return
    hosts = hosts_for_workers(job, workers)
    assert hosts is not None, "`_refused` checked that they fit"
    assert job.plan is not None
    job.notice(f"{why}: from {before} to {workers} workers, which start again from a common step")
    servers_wanted = servers if job.plan.chosen == "ps" else job.order.servers
    order = replace(job.order, hosts=hosts, servers=servers_wanted, strategy=job.plan.chosen)
    losses.restart_at_common_step(job, order, f"{workers} workers")


def _scale_servers(job: JobState, now: int, then: int) -> None:
    assert job.shards.placement is not None
    assert job.plan is not None
    job.order = replace(job.order, servers=then)
    if then < now:
        ranks = sorted(rank.member.rank for rank in job.live("server"))
        job.scaling.leaving_servers = set(ranks[then:])
        job.shards.placement.release(ranks[then:])
        if job.tables.placement is not None:
            job.tables.placement.release(ranks[then:])
        server_changes.announce(job)
        table_placement.announce(job)
        job.plan = replace(job.plan, servers=job.plan.servers[:then])
        return
    for number in range(now, then):
        host = server_changes.emptiest_host(job)
        assert host is not None, "`_refused` checked that there is a host for servers"
        server_changes.start_server(job, number, host)
        job.plan = replace(job.plan, servers=[*job.plan.servers[:number], host])
