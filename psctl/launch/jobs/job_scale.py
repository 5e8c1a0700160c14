"""Requests more or fewer processes from a running job's coordinator (`psctl scale`)."""

from __future__ import annotations

import msgspec

from psctl import errors
from psctl.job.process_messages import ScaleAnswer
from psctl.launch import agent_calls
from psctl.launch.home import JobRecord
from psctl.remote.shell import Shell

_ANSWER = msgspec.json.Decoder(ScaleAnswer)


class Counts(msgspec.Struct, frozen=True):
    """How many processes a job had, and will have."""

    before: int
    after: int


class Scaled(msgspec.Struct, frozen=True):
    """The new numbers of processes; they hold as soon as processes have started or ended."""

    job: str
    workers: Counts
    servers: Counts


def scale(shell: Shell, record: JobRecord, workers: int | None, servers: int | None) -> Scaled:
    """Ask a job for other numbers of workers and servers; None keeps a number.

    Args:
        shell: of the job's head.
        record: the job.

    Raises:
        UsageError: this job cannot be scaled, or not now; the message contains the reason.
        NoSuchJob: the job has ended.
    """
    answer = agent_calls.call(shell, record.head, "scale", _ANSWER, {"workers": workers, "servers": servers})
    if answer is None and agent_calls.is_starting(shell, record.head):
        raise errors.UsageError(
            f"{record.job}: the job is starting", hint=f"try again when it makes steps: psctl attach {record.job}",
            where=record.job,
        )  # fmt: skip
    if answer is None:
        raise errors.NoSuchJob(f"{record.job} has ended", hint=f"psctl checkpoint list {record.job}", where=record.job)
    if answer.problem:
        raise errors.UsageError(f"{record.job}: {answer.problem}", hint=answer.hint, where=record.job)
    had = answer.workers, answer.servers
    wanted = [before if asked is None else asked for before, asked in zip(had, (workers, servers), strict=True)]
    return Scaled(record.job, Counts(had[0], wanted[0]), Counts(had[1], wanted[1]))
