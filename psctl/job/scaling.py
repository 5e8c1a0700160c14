"""psctl scale: more or fewer servers while the job trains, or why not.

A server that comes is started like a replacement, and gets its share when it listens; one that goes hands its shards
over first, and is told to leave when workers know that it holds nothing (sharding.py). The servers stay 0, 1, ...: the
last ones go.
"""

from __future__ import annotations

from psctl.job import sharding
from psctl.job.messages import ScaleAnswer, ScaleWanted
from psctl.job.table import Job
from psctl.words import Member

INSTEAD = "psctl stop {job} --save, then psctl checkpoint restore {job}@latest --workers N --servers M"


def wanted(job: Job, agent: Member, message: ScaleWanted) -> None:
    """Do what is asked, or answer why not."""
    workers, servers = len(job.live("worker")), _servers(job)
    problem, hint = _refused(job, message)
    answer = ScaleAnswer(message.ticket, workers, servers, problem, hint.format(job=job.order.name))
    job.tell(agent, answer)
    if not problem and message.servers is not None and message.servers != servers:
        job.say(f"psctl scale: from {servers} to {message.servers} servers")
        _scale_servers(job, servers, message.servers)


def _servers(job: Job) -> int:
    return len([rank for rank in job.live("server") if not rank.leaving and rank.member.rank not in _going(job)])


def _going(job: Job) -> set[int]:
    return job.holdings.leaving if job.holdings is not None else set()


def _refused(job: Job, message: ScaleWanted) -> tuple[str, str]:
    """Return why it cannot be done, and what to do instead; two empty texts when it can."""
    if job.ending is not None:
        return "the job is ending", "psctl status {job}"
    if job.recovery is not None or not job.training or job.plan is None:
        return "the job does not train yet", "try again when it makes steps: psctl attach {job}"
    if job.plan.chosen != "ps":
        text = f"strategy {job.plan.chosen} sums over a fixed number of workers and has no servers"
        return text, f"set strategy: ps, or {INSTEAD}"
    if message.workers is not None and message.workers != len(job.live("worker")):
        return "the number of workers cannot be changed while the job runs in this version", INSTEAD
    if message.servers is None:
        return "", ""
    if message.servers < 1:
        return "strategy ps needs one server at least", "psctl stop {job} ends the job"
    asked = job.order.replicas
    if asked is not None and message.servers <= asked:
        return f"{asked} replicas of every shard need {asked + 1} servers", "ask for more servers"
    hosts = [agent.rank for agent in job.agents if job.order.hosts[agent.rank].may_serve]
    if not hosts and message.servers > _servers(job):
        return "no host of the job may hold another server", f"roles: [server] on one of them; {INSTEAD}"
    if job.holdings is None or not job.holdings.settled or any(not rank.ready for rank in job.live("server")):
        return "servers are coming or going already", "try again when they have: psctl attach {job}"
    return "", ""


def _scale_servers(job: Job, now: int, then: int) -> None:
    assert job.holdings is not None
    if then < now:
        ranks = sorted(rank.member.rank for rank in job.live("server"))
        job.holdings.leave(ranks[then:])
        sharding.tell(job)
        return
    for number in range(now, then):
        host = sharding.emptiest(job)
        assert host is not None, "there is a host for servers: it was looked at"
        sharding.order(job, number, host)
