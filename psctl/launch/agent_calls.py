"""Calls a job's agent over its socket, by running psctl's control client on its host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec

from psctl import errors
from psctl.job.control_answers import ControlFailure
from psctl.launch.home import HostRecord, ReportedRank
from psctl.launch.host_programs import HOST_STATE, read_answer, run_program
from psctl.process.leader_file import LeaderFile
from psctl.remote.shell import Process, Shell
from psctl.types import UNDECODABLE, JsonObject

T = TypeVar("T")


class StartedDigest(msgspec.Struct):
    """The processes that a job was started with."""

    roles: list[ReportedRank]


class StepDigest(msgspec.Struct):
    """A step that the job has reached or saved."""

    step: int


class SizeDigest(msgspec.Struct):
    """The bytes of gradients of a decided plan."""

    size: int


class FinishedDigest(msgspec.Struct):
    """How the job ended."""

    status: Literal["done", "failed", "stopped"]
    exit: Annotated[int, msgspec.Meta(ge=0, le=255)]
    steps: int
    failure: JsonObject | None = None


class RecoveryDigest(msgspec.Struct):
    """The hosts that a job waits for; times in seconds since the epoch."""

    hosts: list[str]
    since: float
    until: float


class PrintedDigest(msgspec.Struct):
    """A line that a process printed; seconds since the epoch."""

    time: float
    rank: str
    text: str


class TrafficDigest(msgspec.Struct):
    """What a host's network interface sends and receives, in bytes/s."""

    sent: float
    received: float


class JobDigest(msgspec.Struct):
    """The last events of a job's log, and the state of its head's agent.

    `alive`: whether that agent runs; `waiting`: whether its orders are not read yet; `state`: the job's state; `ranks`:
    the last state of every process by name, "worker/3"; `recovering`: the hosts that the job waits for; `leader`: what
    the host knows of the job's head; `printed`: the last line that a worker printed; `traffic`: by host.
    """

    alive: bool
    ranks: dict[str, ReportedRank]
    waiting: bool = False
    state: str = ""
    started: StartedDigest | None = None
    plan: SizeDigest | None = None
    progress: StepDigest | None = None
    checkpoint: StepDigest | None = None
    finished: FinishedDigest | None = None
    recovering: RecoveryDigest | None = None
    leader: LeaderFile | None = None
    printed: PrintedDigest | None = None
    traffic: dict[str, TrafficDigest] = {}


_DIGESTS: msgspec.json.Decoder[dict[str, JobDigest]] = msgspec.json.Decoder(dict[str, JobDigest])
_FAILURE = msgspec.json.Decoder(ControlFailure)


def call(
    shell: Shell,
    host: HostRecord,
    command: str,
    answer: msgspec.json.Decoder[T],
    arguments: Mapping[str, object] | None = None,
) -> T | None:
    """Call the agent of a host; None when it does not answer (not yet, or no longer).

    Args:
        shell: the host.
        host: the job's part there.
        command: hello | stop | state | scale | read | stacks | spans | profile | orders.
        answer: decoder of the answer, made at import as those of `run_program`.
        arguments: of the command.

    Raises:
        CommandFailed: the agent refused, psctl's fault; or its answer has another form.
    """
    program = host.module("psctl.agent.control_client", host.job_dir, command, json.dumps(arguments or {}))
    result = shell.run(program, check=False, timeout=30)
    name = f"psctl.agent.control_client {command}"
    if result.status == 0:
        return read_answer(shell.name, name, answer, result.stdout)
    try:
        error = _FAILURE.decode(result.stdout).error
    except UNDECODABLE:
        tail = (result.stderr or result.stdout).decode(errors="replace")
        raise errors.CommandFailed(shell.name, name, result.status, tail) from None
    if error.code == "gone":
        return None
    raise errors.CommandFailed(shell.name, name, result.status, f"{error.code}: {error.message}")


def alive(shell: Shell, host: HostRecord) -> bool:
    """Return whether the agent of a host runs."""
    if not host.started:  # psctl ended before it recorded the agent
        return digest(shell, host).alive
    return shell.alive(Process(host.pid, host.started))


def is_starting(shell: Shell, host: HostRecord) -> bool:
    """Return whether the agent of a host runs, or will when it has read its orders."""
    found = digest(shell, host)
    return found.finished is None and (found.alive or found.waiting)


def digests(shell: Shell, hosts: list[HostRecord]) -> dict[str, JobDigest]:
    """Return, by job folder, the digests of the event logs on a head host.

    Raises:
        CommandFailed: the host's answer has another form; later commands read the record that is made from it.
    """
    python = hosts[0].python
    question = {"jobs": [{"folder": host.job_dir, "pid": host.pid, "started": host.started} for host in hosts]}
    found = run_program(shell, python, HOST_STATE, "digest", question, _DIGESTS)
    lacking = next((host.job_dir for host in hosts if host.job_dir not in found), None)
    if lacking is not None:
        raise errors.CommandFailed(shell.name, "digest of event logs", 0, f"it lacks {lacking}")
    return found


def digest(shell: Shell, host: HostRecord) -> JobDigest:
    """Return the digest of one job; as `digests`."""
    return digests(shell, [host])[host.job_dir]


def why_gone(shell: Shell, host: HostRecord, job: str) -> errors.PsctlError:
    """Return the error of a job whose agent on its head ended before the job ran."""
    finished = digest(shell, host).finished
    if finished:
        failure = finished.failure or {}
        error = errors.JobFailed(
            f"{job} ended before it ran: {failure.get('exception') or finished.status}",
            hint=str(failure.get("hint") or "train again; psctl doctor shows what a host lacks"),
            where=job,
        )
        error.exit = finished.exit or 1
        error.code = _CODES.get(error.exit, error.code)
        return error
    return errors.JobFailed(
        f"{shell.name}: the agent of {job} ended before it ran: {last_log_line(shell, host) or 'its log is empty'}",
        hint="psctl doctor shows what the host lacks",
        where=shell.name,
    )


def last_log_line(shell: Shell, host: HostRecord) -> str:
    """Return the last line of an agent's log; "" when it has none."""
    result = shell.run(["tail", "-n", "5", f"{host.job_dir}/agent.log"], check=False)
    lines = result.stdout.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


_CODES = {4: "disk-full", 5: "timed-out", 7: "port-taken", 9: "checkpoint-corrupt"}
"""Codes of errors that end a job before it runs, by exit code."""
