"""Jobs, their ranks, and hosts, as `status` and `jobs` print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import msgspec

from psctl.grouping import grouped
from psctl.launch import agent_calls, leader_search
from psctl.launch.agent_calls import JobDigest
from psctl.launch.clusters import ChosenCluster, Connect, recalled_cluster
from psctl.launch.home import Home, JobRecord, ReportedRank, by_cluster
from psctl.launch.hosts.converge import inspect
from psctl.launch.jobs.job_end import last_step, settle
from psctl.remote import slurm
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName, JsonObject


class HostRow(TypedDict):
    """A host in `status.hosts`; `cores` and `gpus` are None where it was not reached."""

    name: str
    state: str
    cores: int | None
    gpus: int | None
    problems: list[str]
    labels: dict[str, str]


class JobRow(TypedDict):
    """A job in `status.jobs`; `step` is None where its steps are not counted."""

    job: str
    state: str
    step: int | None
    started: float
    ranks: list[JsonObject]
    cluster: str
    head: str
    exit: int | None
    problem: NotRequired[str]
    printed: NotRequired[JsonObject]  # rank, text, time: the last line of a worker of a job whose steps are not counted
    traffic: NotRequired[JsonObject]  # by host: bytes/s sent and received
    encryption: NotRequired[str]  # "off" where data connections are not encrypted
    recovering: NotRequired[JsonObject]  # hosts that it waits for; since, until: seconds since the epoch


def overview(
    home: Home, records: Sequence[JobRecord], chosen: ChosenCluster, connect: Connect
) -> tuple[list[JobRow], list[HostRow]]:
    """Return `status.jobs` of these jobs and `status.hosts` of a cluster; its hosts are connected to once."""
    with connect(chosen, None) as fleet:

        def reuse(cluster: ChosenCluster, names: Sequence[str] | None) -> Fleet:
            return fleet.lend(names) if cluster.same(chosen) else connect(cluster, names)

        return refresh(home, records, reuse), host_rows(home, chosen, reuse)


def refresh(home: Home, records: Sequence[JobRecord], connect: Connect) -> list[JobRow]:
    """Return `status.jobs` for these jobs; query the heads of those that had not ended, in parallel.

    The state of a job whose head is not reached is unknown; `problem` contains the reason.
    """
    open_jobs = [record for record in records if not record.over]
    answers: dict[str, JobDigest] = {}
    problems: dict[str, str] = {}
    for _, group in by_cluster(open_jobs):
        moved = _ask_heads(home, group, connect, answers, problems)
        found = {record.job: _find_leader(home, record, connect, answers, problems) for record in moved}
        led_elsewhere = [found[record.job] for record in moved if found[record.job].leader != record.leader]
        if led_elsewhere:
            _ask_heads(home, led_elsewhere, connect, answers, problems)
            records = [found.get(record.job, record) for record in records]
    return [job_document(home, record, answers.get(record.job), problems.get(record.job)) for record in records]


def host_rows(home: Home, chosen: ChosenCluster, connect: Connect) -> list[HostRow]:
    """Return `status.hosts` of a cluster after one inspection of each host."""
    if why := slurm.why_ended(chosen.spec.allocation):
        return [
            {"name": host.name, "state": "unreachable", "cores": None, "gpus": None, "problems": [why], "labels": {}}
            for host in chosen.spec.hosts
        ]
    with inspect(home, chosen, connect) as reached:
        rows: list[HostRow] = []
        for host in chosen.spec.hosts:
            error = reached.failed.get(host.name)
            site = reached.sites.get(host.name)
            problems = [finding.what for finding in site.facts.findings] if site else []
            if error is not None:
                problems.insert(0, error.message)
            state = "unreachable" if site is None else "failed" if error else "busy" if site.jobs else "ready"
            if state == "ready" and reached.plans.get(host.name):
                state = "not set up"
            rows.append({
                "name": host.name, "state": state, "cores": site.cores if site else None,
                "gpus": len(site.facts.gpus) if site else None, "problems": problems, "labels": dict(host.labels),
            })  # fmt: skip
        return rows


def _ask_heads(
    home: Home, group: Sequence[JobRecord], connect: Connect, answers: dict[str, JobDigest], problems: dict[str, str]
) -> list[JobRecord]:
    """Ask the heads of jobs of one cluster, in parallel; return the jobs that another host may lead."""
    by_head = grouped((record.head.name, record) for record in group)

    def look(name: HostName, shell: Shell) -> dict[str, JobDigest]:
        return agent_calls.digests(shell, [record.head for record in by_head[name]])

    with connect(recalled_cluster(home, group[0].cluster), sorted(by_head)) as fleet:
        for name, outcome in fleet.each(look, names=by_head).items():
            for record in by_head[name]:
                if outcome.error is not None:
                    message = outcome.error.message.removeprefix(f"{record.head.name}: ")
                    problems[record.job] = f"its head {record.head.name} is not reached: {message}"
                else:
                    answers[record.job] = outcome.value[record.head.job_dir]
    return [record for record in group if _may_be_led_elsewhere(record, answers.get(record.job))]


def _may_be_led_elsewhere(record: JobRecord, digest: JobDigest | None) -> bool:
    if not leader_search.may_move(record) or digest is None:
        return leader_search.may_move(record)
    if digest.leader is not None and digest.leader.host != record.leader:
        return True
    return not digest.alive and digest.finished is None


def _find_leader(
    home: Home, record: JobRecord, connect: Connect, answers: dict[str, JobDigest], problems: dict[str, str]
) -> JobRecord:
    """Return the record of a job with the host that leads it now; its head's answer may not hold any more."""
    found, open_question = leader_search.search(home, record, connect)
    digest = answers.get(record.job)
    if found.leader != record.leader:
        answers.pop(record.job, None)
        problems.pop(record.job, None)
    elif open_question and (digest is None or digest.finished is None):
        answers.pop(record.job, None)
        problems[record.job] = open_question
    return found


def job_document(home: Home, record: JobRecord, digest: JobDigest | None, problem: str | None) -> JobRow:
    """Return the row of one job in `status.jobs`.

    Args:
        home, record: this machine's record of the job; its end is recorded.
        digest: the digest of its event log, if its head answered.
        problem: why its head did not answer.
    """
    if digest is not None:
        record = settle(home, record, digest)
        if not record.over:
            reported = digest.progress.step if digest.progress else 0
            ranks = [_advanced(rank, reported) for rank in digest.ranks.values()]
            first = "placing" if record.state == "placing" and not digest.alive else "starting"
            record = msgspec.structs.replace(
                record, state=digest.state or first, step=last_step(digest, record.step),
                ranks=ranks or (digest.started.roles if digest.started else []),
                size=digest.plan.size if digest.plan else None,
            )  # fmt: skip
    counted = record.size is not None  # steps of a script that never calls `prepare` are not counted
    document: JobRow = {
        "job": record.job, "state": "unknown" if problem else record.state, "step": record.step if counted else None,
        "started": record.created, "ranks": [_rank(rank, over=record.over) for rank in record.ranks],
        "cluster": record.cluster.name, "head": record.head.name, "exit": record.exit,
    }  # fmt: skip
    if not record.over and recalled_cluster(home, record.cluster).spec.network.encryption == "off":
        document["encryption"] = "off"
    if digest is not None and digest.recovering is not None and not record.over:
        document["recovering"] = msgspec.to_builtins(digest.recovering)
    if digest is not None and not record.over:
        if digest.printed is not None and not counted:
            document["printed"] = msgspec.to_builtins(digest.printed)
        if digest.traffic:
            document["traffic"] = msgspec.to_builtins(digest.traffic)
    problem = problem or record.reason
    return {**document, "problem": problem} if problem else document


def _advanced(rank: ReportedRank, step: int) -> ReportedRank:
    """Return a worker's state with at least the step of the job's progress, which every live worker has reached."""
    if rank.role != "worker" or rank.state not in ("running", "waiting"):
        return rank
    return msgspec.structs.replace(rank, step=max(rank.step, step))


def _rank(rank: ReportedRank, *, over: bool) -> JsonObject:
    # the job ended before the end of this rank was reported
    lost = over and rank.state in ("starting", "running", "waiting")
    row = msgspec.structs.replace(
        rank, pid=rank.pid or None, last_error=rank.last_error or None, state="lost" if lost else rank.state
    )
    return dict(msgspec.to_builtins(row))
