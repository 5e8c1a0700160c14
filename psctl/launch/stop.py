"""Ending a job: ask its coordinator, watch it end, prove that nothing is left on any host; by force when told so."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

import msgspec

from psctl import errors
from psctl.launch import ask, calls
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Process, Shell
from psctl.words import HostName

PATIENCE = 120.0
"""Seconds that a polite stop may take: a checkpoint is written first."""

SWEEP = 10.0
"""Seconds that the last processes of a stopped job may take to leave."""


class Stopped(msgspec.Struct, frozen=True):
    """How a stop went. `was` is the state before it; `left` names processes that could not be ended."""

    job: str
    state: str
    was: str
    left: list[str] = []


def ask_to_stop(shell: Shell, record: JobRecord, *, save: bool, by: str) -> bool:
    """Ask the job's head to stop it; False when its agent does not answer.

    Args:
        save: write a checkpoint first, whatever `checkpoint.on_stop` says.
        by: who wants it, for the event log.
    """
    arguments = {"save": save, "force": False, "by": by}
    return calls.call(shell, record.head, "stop", arguments) is not None


def stop(home: Home, record: JobRecord, fleet: Fleet, *, save: bool, force: bool, by: str) -> Stopped:
    """End a job and prove that nothing of it is left.

    Args:
        home: where the record is kept.
        record: the job.
        fleet: connections to its hosts.
        save, by: as for `ask_to_stop`.
        force: do not ask; end its processes by their ids.

    Raises:
        TimedOut: it did not end in time; the job goes on ending, `--force` does not wait.
        HostUnreachable and others: its head was not reached.
        Partial: it ended, and a host that could not be reached may still hold processes of it.
    """
    head = HostName(record.head.name)
    if head in fleet.failed and not force:
        raise fleet.failed[head]
    was = "unknown"
    if head in fleet.shells:
        digest = calls.digests(fleet.shells[head], [record.head])[record.head.job_dir]
        was = _state(digest, record)
        if digest.get("alive") and not force:
            digest = _ask_and_wait(fleet.shells[head], record, save=save, by=by)
        record = settle(home, record, digest, forced=force)
    left = sweep(fleet, record.hosts, kill=force)
    unreached = [host.name for host in record.hosts if host.name in fleet.failed]
    if unreached:
        raise errors.Partial(
            f"{record.job} is stopped; not reached: {', '.join(unreached)} (what runs there ends by itself)",
            hint=f"psctl stop {record.job} --force, once it is back",
            where=record.job,
        )
    if left:
        raise errors.TimedOut(
            f"{record.job} ended, and processes of it are left: {'; '.join(left)}",
            hint=f"psctl stop {record.job} --force",
            where=record.job,
        )
    return Stopped(record.job, record.state, was)


def kill(fleet: Fleet, record: JobRecord) -> None:
    """End a job's processes at once, on every host that is reached; only those that are its own."""

    def end(name: HostName, shell: Shell) -> None:
        host = next(host for host in record.hosts if host.name == name)
        if host.started:
            shell.signal(Process(host.pid, host.started), signal.SIGKILL)

    fleet.each(end, names=[HostName(host.name) for host in record.hosts])
    sweep(fleet, record.hosts, kill=True)


def sweep(fleet: Fleet, hosts: Iterable[HostRecord], *, kill: bool) -> list[str]:
    """Return what is left of a job on hosts that can be reached, as "host: command"; with `kill` it is ended first."""
    by_name = {host.name: host for host in hosts}

    def look(name: HostName, shell: Shell) -> list[str]:
        host = by_name[name]
        question = {"folder": host.job_dir, "kill": kill, "seconds": SWEEP}
        answer = ask.ask(shell, host.python, ask.THERE, "sweep", question)
        return [f"{name}: {each['command'] or each['pid']}" for each in answer["left"]]

    reached = [HostName(name) for name in by_name if name in fleet.shells]
    found = fleet.each(look, names=reached)
    return [line for outcome in found.values() if outcome.ok for line in outcome.value]


def settle(home: Home, record: JobRecord, digest: dict[str, object], *, forced: bool = False) -> JobRecord:
    """Write down how a job ended, from what its event log says; return the record."""
    finished = digest.get("finished")
    if isinstance(finished, dict):
        state, code, step = str(finished["status"]), int(finished["exit"]), int(finished["steps"])
    elif forced:
        state, code, step = "stopped", 1, _last_step(digest, record)
    elif not digest.get("alive"):
        state, code, step = "failed", 1, _last_step(digest, record)
    else:
        return record
    ranks, plan = digest.get("ranks"), digest.get("plan")
    settled = msgspec.structs.replace(
        record, state=state, exit=code, step=step, ranks=list(ranks.values()) if isinstance(ranks, dict) else [],
        size=int(plan["size"]) if isinstance(plan, dict) else record.size,
    )  # fmt: skip
    home.save(settled)
    return settled


def _last_step(digest: dict[str, object], record: JobRecord) -> int:
    """Return the last step that was seen of a job whose log does not say how it ended."""
    progress = digest.get("progress")
    return int(progress["step"]) if isinstance(progress, dict) else record.step


def _state(digest: dict[str, object], record: JobRecord) -> str:
    finished = digest.get("finished")
    if isinstance(finished, dict):
        return str(finished["status"])
    return str(digest.get("state") or record.state)


def _ask_and_wait(shell: Shell, record: JobRecord, *, save: bool, by: str) -> dict[str, object]:
    """Ask the head to stop, again while its agent does not listen yet, and wait for its end; return its last digest."""
    deadline = time.monotonic() + PATIENCE
    heard = False
    while time.monotonic() < deadline:
        heard = heard or ask_to_stop(shell, record, save=save, by=by)
        digest = calls.digests(shell, [record.head])[record.head.job_dir]
        if not digest.get("alive"):
            return digest
        time.sleep(0.1)
    raise errors.TimedOut(
        f"{record.job} did not end within {PATIENCE:.0f} s of being asked",
        hint=f"psctl stop {record.job} --force ends it without a checkpoint",
        where=record.job,
    )
