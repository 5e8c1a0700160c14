"""Ends a job: requests a stop, waits for the end and checks that no process remains; or kills the job's processes."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from psctl import errors
from psctl.job.control_answers import StopAnswer
from psctl.launch import agent_calls, leader_search
from psctl.launch.agent_calls import JobDigest
from psctl.launch.home import Home, HostRecord, JobRecord, ReportedRank
from psctl.launch.host_programs import HOST_FILES, HOST_STATE, OBJECT, SWEPT, run_program
from psctl.remote import slurm
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName

_STOP = msgspec.json.Decoder(StopAnswer)

PATIENCE = 120.0
"""Time limit in seconds for a stop without --force; it includes a checkpoint."""

GIVEN_UP = 60.0
"""Seconds beyond the limit of its start after which a host that still has a job's orders is taken as rebooted."""

SWEEP = 10.0
"""Time limit in seconds for the last processes of a stopped job to end."""


class Stopped(msgspec.Struct, frozen=True):
    """The result of a stop. `was` is the state before it; `left` names processes that could not be ended; `checkpoint`
    is the job's newest checkpoint on its head, None when there is none or the head was not reached."""

    job: str
    state: str
    was: str
    left: list[str] = []
    checkpoint: str | None = None


def ask_to_stop(shell: Shell, record: JobRecord, *, save: bool, by: str) -> bool:
    """Request a stop of the job from its head; return False when the head's agent does not answer.

    Args:
        save: write a checkpoint first, whatever the value of `checkpoint.on_stop`.
        by: the origin of the request ("psctl stop", "Ctrl-C"), for the event log.
    """
    arguments = {"save": save, "force": False, "by": by}
    return agent_calls.call(shell, record.head, "stop", _STOP, arguments) is not None


def stop(home: Home, record: JobRecord, fleet: Fleet, *, save: bool, force: bool, by: str) -> Stopped:
    """End a job and check that no process of it remains.

    Args:
        home: the records of this machine.
        record: the job.
        fleet: connections to its hosts.
        save, by: as for `ask_to_stop`.
        force: kill its processes by their ids, without a request.

    Raises:
        TimedOut: it did not end in time; the job is still ending, `--force` does not wait.
        HostUnreachable and others: its head was not reached.
        Partial: it ended, but a host that could not be reached may still run processes of it.
    """
    record = leader_search.on_fleet(fleet, record) if force else leader_search.await_leader(fleet, record)
    head = HostName(record.head.name)
    if isinstance(fleet.failed.get(head), errors.AllocationEnded):
        return _without_allocation(home, record, fleet.failed[head])
    if head in fleet.failed and not force:
        raise fleet.failed[head]
    was, checkpoint, ended = "unknown", None, False
    if head in fleet.shells:
        digest = agent_calls.digest(fleet.shells[head], record.head)
        was = digest.finished.status if digest.finished else digest.state or record.state
        if not digest.alive and record.state == "placing":
            if home.is_being_submitted(record.job):
                raise errors.JobRunning(
                    f"{record.job} is being started by another psctl", hint="try again in a moment", where=record.job
                )
            force = True  # no agent answers, and orders may be left on hosts
        if digest.alive and not force:
            digest = _ask_and_wait(fleet.shells[head], record, save=save, by=by)
        record = settle(home, record, digest, forced=force)
        ended = digest.finished is not None
        checkpoint = f"{record.job}@{digest.checkpoint.step}" if digest.checkpoint else None
    if force:
        left = kill(fleet, record)
    else:
        left = sweep_ended(fleet, record.hosts) if ended else sweep(fleet, record.hosts, kill=False)
    unreached = [host.name for host in record.hosts if host.name in fleet.failed]
    if unreached:
        raise errors.Partial(
            f"{record.job} is stopped; not reached: {', '.join(unreached)} (processes there end by themselves)",
            hint=f"psctl stop {record.job} --force, once it is back",
            where=record.job,
        )
    if left:
        raise errors.TimedOut(
            f"{record.job} ended, but processes of it still run: {'; '.join(left)}",
            hint=f"psctl stop {record.job} --force",
            where=record.job,
        )
    return Stopped(record.job, record.state, was, checkpoint=checkpoint)


def _without_allocation(home: Home, record: JobRecord, error: errors.PsctlError) -> Stopped:
    """Record the end of a job whose processes and event log were lost with Slurm's allocation."""
    was = record.state if record.over else "failed"
    if not record.over:
        record = msgspec.structs.replace(record, state="failed", exit=1, reason=error.message)
        home.update_record(record)
    return Stopped(record.job, record.state, was, checkpoint=None)


def kill(fleet: Fleet, record: JobRecord) -> list[str]:
    """Kill a job's processes, and no others, on every host that is reached; return those that could not be killed.

    The head's first, without a wait for their end: a coordinator that saw another host end would report a failure.
    """
    sweep(fleet, [record.head], kill=True, seconds=0)
    return sweep(fleet, record.hosts, kill=True)


def discard(home: Home, fleet: Fleet, record: JobRecord) -> None:
    """Remove the folders of a job that is over from the connected hosts, and its record here."""

    def remove(name: HostName, shell: Shell) -> None:
        host = hosts[name]
        run_program(shell, host.python, HOST_FILES, "discard", {"folder": host.job_dir}, OBJECT)

    hosts = {host.name: host for host in record.hosts}
    for outcome in fleet.each(remove, names=list(hosts)).values():
        if outcome.error is not None:
            raise outcome.error
    home.release_name(record.job)


def sweep(fleet: Fleet, hosts: Iterable[HostRecord], *, kill: bool, seconds: float = SWEEP) -> list[str]:
    """Return the processes of a job that still run on reached hosts, as "host: command"; with `kill`, kill all.

    Args:
        fleet: connections to hosts.
        hosts: the job's hosts.
        kill: kill the processes.
        seconds: how long to wait for their end.
    """
    by_name = {host.name: host for host in hosts}

    def look(name: HostName, shell: Shell) -> list[str]:
        host = by_name[name]
        question = {"folder": host.job_dir, "kill": kill, "seconds": seconds}
        answer = run_program(shell, host.python, HOST_STATE, "sweep", question, SWEPT)
        return [f"{name}: {each.command or each.pid}" for each in answer.left]

    reached = [name for name in by_name if name in fleet.shells]
    found = fleet.each(look, names=reached)
    return [line for outcome in found.values() if outcome.ok for line in outcome.value]


def sweep_ended(fleet: Fleet, hosts: Iterable[HostRecord]) -> list[str]:
    """Wait until no process of a job remains whose event log has its end, and kill those that do not end.

    An agent that was still starting when the job ended waits for the coordinator, which does not run any more.

    Returns:
        The processes that could not be killed.
    """
    hosts = list(hosts)
    return sweep(fleet, hosts, kill=False) and sweep(fleet, hosts, kill=True)


def settle(home: Home, record: JobRecord, digest: JobDigest, *, forced: bool = False) -> JobRecord:
    """Record the end of a job from the digest of its event log; return the record."""
    finished, step, state, code = digest.finished, last_step(digest, record.step), "failed", 1
    if finished is not None:
        state, code, step = finished.status, finished.exit, max(step, finished.steps)
    elif forced:
        state = "stopped"
    elif digest.alive or _may_start(home, record, digest):
        return record
    settled = msgspec.structs.replace(
        record, state=state, exit=code, step=step, ranks=list(digest.ranks.values()),
        size=digest.plan.size if digest.plan else record.size,
        reason=_reason(record, digest) if state == "failed" else "",
    )  # fmt: skip
    home.update_record(settled)
    return settled


def last_step(digest: JobDigest, otherwise: int) -> int:
    """Return the last step that a job's workers have reported, including the steps before it resumed from a checkpoint.

    Progress is sent together with the script's metrics, so workers may have made later steps.

    Args:
        digest: of the job's event log.
        otherwise: what to return when it has neither progress nor workers.
    """
    steps = [digest.progress.step] if digest.progress else []
    return max([*steps, *worker_steps(digest.ranks.values())], default=otherwise)


def worker_steps(ranks: Iterable[ReportedRank]) -> list[int]:
    """Return the last reported step of each worker."""
    return [rank.step for rank in ranks if rank.role == "worker"]


def _may_start(home: Home, record: JobRecord, digest: JobDigest) -> bool:
    """Return whether the job's first agent may still start: psctl is starting it, or the host waits (`expire`)."""
    waits = digest.waiting and time.time() - record.created < record.limit + GIVEN_UP
    return record.state == "placing" and (home.is_being_submitted(record.job) or waits)


def _reason(record: JobRecord, digest: JobDigest) -> str:
    """Return why a job failed, or "" where a rank reports the reason."""
    if any(rank.last_error for rank in digest.ranks.values()):
        return ""
    if digest.finished:
        return str((digest.finished.failure or {}).get("exception", ""))
    if record.state == "placing":
        return "psctl ended before it had started the job's agents"
    return slurm.why_ended(record.cluster.allocation) or f"psctl's agent on {record.head.name} ended without a report"


def _ask_and_wait(shell: Shell, record: JobRecord, *, save: bool, by: str) -> JobDigest:
    """Request a stop until the head's agent answers, and wait for the job's end; return its last digest."""
    deadline = time.monotonic() + PATIENCE
    asked = False
    while time.monotonic() < deadline:
        asked = asked or ask_to_stop(shell, record, save=save, by=by)
        digest = agent_calls.digest(shell, record.head)
        if not digest.alive:
            return digest
        time.sleep(0.1)
    raise errors.TimedOut(
        f"{record.job} did not end within {PATIENCE:.0f} s of the request",
        hint=f"psctl stop {record.job} --force ends it without a checkpoint",
        where=record.job,
    )
