"""Jobs, their ranks, and hosts, as `status` and `jobs` print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from psctl.launch import agent_calls
from psctl.launch.checkpoints.checkpoint_listing import by_cluster
from psctl.launch.clusters import ChosenCluster, Connect, recalled_cluster
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.launch.hosts.converge import inspect
from psctl.launch.jobs.job_end import last_step, settle
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName


def refresh(home: Home, records: Sequence[JobRecord], connect: Connect) -> list[dict[str, Any]]:
    """Return `status.jobs` for these jobs; asks the heads of those that had not ended, in parallel.

    The state of a job whose head is not reached is unknown; `problem` contains the reason.
    """
    open_jobs = [record for record in records if not record.over]
    answers: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    for cluster, group in by_cluster(open_jobs):
        heads = sorted({record.head.name for record in group})
        with connect(recalled_cluster(home, cluster.cluster), heads) as fleet:
            _ask_heads(fleet, group, answers, problems)
    return [_document(home, record, answers.get(record.job), problems.get(record.job)) for record in records]


def host_rows(home: Home, chosen: ChosenCluster, connect: Connect) -> list[dict[str, Any]]:
    """Return `status.hosts` of a cluster: one look at each host."""
    with inspect(home, chosen, connect) as reached:
        rows = []
        for host in chosen.spec.hosts:
            error = reached.failed.get(host.name)
            site = reached.sites.get(host.name)
            problems = [finding.what for finding in site.facts.findings] if site else []
            if error is not None:
                problems.insert(0, error.message)
            word = "unreachable" if site is None else "failed" if error else "busy" if site.jobs else "ready"
            if word == "ready" and reached.plans.get(host.name):
                word = "not set up"
            rows.append({
                "name": host.name, "state": word, "cores": site.cores if site else None,
                "gpus": len(site.facts.gpus) if site else None, "problems": problems, "labels": dict(host.labels),
            })  # fmt: skip
        return rows


def _ask_heads(
    fleet: Fleet, group: Sequence[JobRecord], answers: dict[str, dict[str, Any]], problems: dict[str, str]
) -> None:
    by_head: dict[str, list[JobRecord]] = {}
    for record in group:
        by_head.setdefault(record.head.name, []).append(record)

    def look(name: HostName, shell: Shell) -> dict[str, dict[str, Any]]:
        hosts: list[HostRecord] = [record.head for record in by_head[name]]
        return agent_calls.digests(shell, hosts)

    for name, outcome in fleet.each(look, names=[HostName(name) for name in by_head]).items():
        for record in by_head[name]:
            if outcome.error is not None:
                message = outcome.error.message.removeprefix(f"{record.head.name}: ")
                problems[record.job] = f"its head {record.head.name} is not reached: {message}"
            else:
                answers[record.job] = outcome.value[record.head.job_dir]


def _document(home: Home, record: JobRecord, digest: dict[str, Any] | None, problem: str | None) -> dict[str, Any]:
    if digest is not None:
        record = settle(home, record, digest)
        if not record.over:
            told = int((digest.get("progress") or {}).get("step", 0))
            ranks = [_moved(rank, told) for rank in digest["ranks"].values()] or _placed(digest)
            first = "placing" if record.state == "placing" and not digest.get("alive") else "starting"
            record = msgspec.structs.replace(
                record, state=str(digest.get("state") or first), step=last_step(digest, record.step), ranks=ranks,
                size=(digest.get("plan") or {}).get("size"),
            )  # fmt: skip
    counted = record.size is not None  # steps of a script that never calls `prepare` are not counted
    document: dict[str, Any] = {
        "job": record.job, "state": "unknown" if problem else record.state, "step": record.step if counted else None,
        "started": record.created, "ranks": [_rank(rank, over=record.over) for rank in record.ranks],
        "cluster": record.cluster.name, "head": record.head.name, "exit": record.exit,
    }  # fmt: skip
    problem = problem or record.reason
    return {**document, "problem": problem} if problem else document


def _moved(rank: dict[str, Any], step: int) -> dict[str, Any]:
    """Return a worker's row with at least the step of the job's progress, which every live worker has reached."""
    if rank["role"] != "worker" or rank["state"] not in ("running", "waiting"):
        return rank
    return {**rank, "step": max(int(rank.get("step") or 0), step)}


def _placed(digest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ranks that have not reported yet, from the `started` event."""
    return [dict(role) for role in (digest.get("started") or {}).get("roles", [])]


def _rank(event: dict[str, Any], *, over: bool) -> dict[str, Any]:
    state = event.get("state", "starting")
    if over and state in ("starting", "running", "waiting"):
        state = "lost"  # its job ended before the end of this rank was reported
    return {
        "role": event["role"], "rank": event["rank"], "host": event.get("host", ""), "pid": event.get("pid") or None,
        "state": state, "step": event.get("step", 0),
        "last_error": event.get("last_error") or None,
    }  # fmt: skip
