"""The first of several failures, and its description for people.

Failures cause each other: when a worker raises, the others lose their peer a moment later, and their agents may report
earlier. So the decision is made a moment after the first report, and a failure that is the loss of a peer is named only
if there is no other.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

import msgspec

from psctl.job.process_messages import ProcessFailure

SETTLE = 0.3
"""Seconds from the first report to the decision: agents report within a fraction of it."""

SETTLE_LOSS = 5.0
"""The same while all reports are losses of peers: connections detect a lost peer within 5 s."""

HOST_LOST = "HostLost"
"""Prefix of the exception of a rank whose host was lost."""

TRAIN_AGAIN = "psctl train JOB.yaml --resume latest"
"""The command that continues after an error in the user's code. psctl inserts the path of the job file, which only the
submitting machine knows."""

_LOSSES = frozenset({"peer-lost", "connection-failed", "protocol"})

_ENGINE = (
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
    "remote process exited", "distnetworkerror", "distbackenderror", "diststoreerror", "connecterror",
    "timed out waiting", "connection timeout",
)  # fmt: skip
"""Parts of the errors of torch.distributed when another rank has ended."""


def is_loss(failure: ProcessFailure) -> bool:
    """Return whether this failure is the loss of another process, as far as can be known."""
    return failure.code in _LOSSES or any(words in failure.exception.lower() for words in _ENGINE)


def is_death(failure: ProcessFailure) -> bool:
    """Return whether a process or its host was lost (killed, crashed, unreachable) and not ended by its own code.

    An exception or exit status of the user's code would come again, so a job does not survive it. A server runs no code
    of the user, so its end is a loss unless it reports an error of its own.
    """
    if failure.code:
        return is_loss(failure)
    server = failure.member.startswith("server/")
    return failure.status < 0 or failure.exception.startswith(HOST_LOST) or server or is_loss(failure)


def may_follow(failure: ProcessFailure, before: list[ProcessFailure]) -> bool:
    """Return whether this failure, which is no loss, may follow from these.

    After a kill or the loss of a host anything may fail; an error of the script's own will come again after the
    restart. An abort does not count: torch.distributed aborts when another rank has failed.
    """
    killed = any(
        (each.status < 0 and each.status != -signal.SIGABRT) or each.exception.startswith(HOST_LOST) for each in before
    )
    return killed and not failure.code


def same(one: ProcessFailure | None, other: ProcessFailure) -> bool:
    """Return whether this is the failure after which the job was restarted, at the same step; signals never are."""
    return (
        one is not None
        and one.status >= 0
        and (one.member, one.exception, one.step) == (other.member, other.exception, other.step)
    )


def settled(failures: list[ProcessFailure], since: float, now: float) -> bool:
    """Return whether it is time to decide which failure was the first."""
    return now - since >= (SETTLE_LOSS if all(is_loss(each) for each in failures) else SETTLE)


def first(failures: list[ProcessFailure]) -> ProcessFailure:
    """Return the failure that ended the job: the first report that is not the loss of a peer, else the first report."""
    return next((each for each in failures if not is_loss(each)), failures[0])


def exit_code(failure: ProcessFailure) -> int:
    """Return the exit code that this failure gives the job."""
    return failure.exit if failure.code and failure.exit else 1


def resume_command(failure: ProcessFailure, checkpoint: str | None) -> str | None:
    """Return the command that continues after a failure; None without a checkpoint.

    A restore runs the code that the checkpoint was made with, which is right after a lost process or host. An error of
    the user's code would come again, so the job file and the corrected script are sent anew.
    """
    if checkpoint is None:
        return None
    in_code = failure.member.startswith("worker/") and not is_death(failure)
    return TRAIN_AGAIN if in_code else f"psctl checkpoint restore {checkpoint}"


def document(
    failure: ProcessFailure, job: str, stopped: list[str], checkpoint: str | None, others: Iterable[ProcessFailure] = ()
) -> dict[str, object]:
    """Return the document of `finished.failure`: rank, host, time, cause, other ended ranks, and what to do next.

    Args:
        failure: the first.
        job: its name.
        stopped: ranks that psctl ended because of it.
        checkpoint: the newest that is verified.
        others: failures of ranks that ended by themselves.
    """
    role, _, rank = failure.member.partition("/")
    body: dict[str, object] = msgspec.to_builtins(failure)
    del body["member"]
    return {
        **body,
        "role": role,
        "rank": int(rank or 0),
        "stopped": stopped,
        "failed": [
            {"rank": each.member, "host": each.host, "status": each.status, "exception": each.exception}
            for each in others
        ],
        "checkpoint": checkpoint,
        "resume": resume_command(failure, checkpoint),
        "log": f"psctl logs {job} -r {role}:{int(rank or 0)}" if role in ("worker", "server") else f"psctl logs {job}",
    }
