"""`psctl profile`: a profile by torch.profiler of some steps of one worker, which its agent requests."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from psctl import errors
from psctl.clock import Clock
from psctl.job.control_answers import ProfileAnswer, SpansAnswer
from psctl.launch import agent_calls
from psctl.launch.home import HostRecord, JobRecord
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName

_ANSWER = msgspec.json.Decoder(ProfileAnswer)
_SPANS = msgspec.json.Decoder(SpansAnswer)

LOOK = 0.5
"""Seconds between two looks for the profile."""

PATIENCE = 120.0
"""Seconds without a step after which the wait ends; the profiler itself may need some to write."""


class Profile(msgspec.Struct, frozen=True):
    """The trace file of a profile, and its operators as a table."""

    host: str
    trace: bytes
    table: str


def worker_of(text: str) -> int:
    """Return the rank of "worker:1" or "1"."""
    match = re.fullmatch(r"(?:worker[:/])?([0-9]{1,6})", text)
    if match is None:
        raise errors.UsageError(f"-r {text}: expected one worker", hint="-r worker:1; only workers are profiled")
    return int(match[1])


def profile(
    record: JobRecord, fleet: Fleet, rank: int, steps: int, clock: Clock, tell: Callable[[str], None]
) -> Profile:
    """Have a worker profile its next steps, and return the result.

    Raises:
        NoSuchJob: no such worker runs, or the job has ended meanwhile.
        TimedOut: the worker has made no step for PATIENCE.
        PsctlError: a host was not reached.
    """
    by_name = {host.name: host for host in record.hosts}

    def ask(name: HostName, shell: Shell) -> ProfileAnswer | None:
        return agent_calls.call(shell, by_name[name], "profile", _ANSWER, {"rank": rank, "steps": steps})

    found = fleet.each(ask, names=by_name)
    for outcome in found.values():
        if outcome.error is not None:
            raise outcome.error
    for name, outcome in found.items():
        if outcome.value is not None and outcome.value.path:
            tell(f"worker/{rank} on {name} profiles its next {steps} steps")
            shell = fleet.shell(str(name))
            path = outcome.value.path
            return Profile(str(name), *_await(record, shell, by_name[str(name)], rank, path, clock))
    raise errors.NoSuchJob(
        f"no worker/{rank} of {record.job} runs now", hint=f"psctl status {record.job}", where=record.job
    )


def _await(record: JobRecord, shell: Shell, host: HostRecord, rank: int, path: str, clock: Clock) -> tuple[bytes, str]:
    """Wait for the files, take and remove them."""
    table = path.removesuffix(".json") + ".txt"
    last, moved = -1, clock.now()
    while True:
        got = shell.run(["cat", path], check=False, timeout=60)
        if got.status == 0:
            text = shell.run(["cat", table], check=False).stdout.decode(errors="replace")
            shell.run(["rm", "-f", path, table], check=False)
            return got.stdout, text
        answer = agent_calls.call(shell, host, "spans", _SPANS, {})
        worker = next((each for each in answer.workers if each.rank == rank), None) if answer is not None else None
        if worker is None:
            raise errors.NoSuchJob(
                f"worker/{rank} of {record.job} has ended before the profile was complete",
                hint="profile fewer steps", where=record.job,
            )  # fmt: skip
        if worker.last != last:
            last, moved = worker.last, clock.now()
        if clock.now() - moved > PATIENCE:
            raise errors.TimedOut(
                f"worker/{rank} of {record.job} has made no step for {PATIENCE:.0f} s",
                hint=f"psctl stacks {record.job} -r worker:{rank} shows what it does",
                where=record.job,
            )
        clock.sleep(LOOK)
