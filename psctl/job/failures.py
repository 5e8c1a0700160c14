"""The first of several failures, and its description for people.

Deaths cause each other: when a worker raises, the others lose their peer a moment later, and their agents may be
quicker to tell. So after the first report there is a moment to settle, and a failure that is itself somebody else's
loss is not named while there is a better one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any

import msgspec

from psctl.job.process_messages import ProcessFailure

SETTLE = 0.3
"""Seconds from the first report to the verdict: agents report within a fraction of it."""

SETTLE_LOSS = 5.0
"""The same while all that is known are losses of peers: the one that was lost is being noticed (words on time: 5 s)."""

HOST_LOST = "HostLost"
"""How the failure of a rank begins whose host was lost."""

TRAIN_AGAIN = "psctl train JOB.yaml --resume latest"
"""The command that goes on after an error in the user's code. psctl puts the path of the job file in, which only the
machine knows that submitted the job."""

_LOSSES = frozenset({"peer-lost", "connection-failed", "protocol"})

_ENGINE = (
    "connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "socket closed",
    "remote process exited", "distnetworkerror", "distbackenderror", "diststoreerror", "connecterror",
    "timed out waiting", "connection timeout",
)  # fmt: skip
"""What torch.distributed says when another rank is gone."""


def is_loss(failure: ProcessFailure) -> bool:
    """Whether this failure is the loss of another process, as far as can be known."""
    return failure.code in _LOSSES or any(words in failure.exception.lower() for words in _ENGINE)


def is_death(failure: ProcessFailure) -> bool:
    """Was a process or its host lost: killed, crashed, vanished, out of reach? Else its own code ended it.

    What its own code did (an exception, an exit status) it would do again; a job does not survive it. A server runs no
    code of the user's, so its end is a loss unless it says itself whose fault it was.
    """
    if failure.code:
        return is_loss(failure)
    server = failure.member.startswith("server/")
    return failure.status < 0 or failure.exception.startswith(HOST_LOST) or server or is_loss(failure)


def may_follow(failure: ProcessFailure, before: list[ProcessFailure]) -> bool:
    """May this failure, which is no death, follow from these? After a kill or a host's loss anything may break; what
    was a mistake all the same will come again. An abort does not count: engines abort when another rank has failed."""
    killed = any(
        (each.status < 0 and each.status != -signal.SIGABRT) or each.exception.startswith(HOST_LOST) for each in before
    )
    return killed and not failure.code


def same(one: ProcessFailure | None, other: ProcessFailure) -> bool:
    """Is this the failure that the job was started again after, at the same step? Signals come from outside."""
    return (
        one is not None
        and one.status >= 0
        and (one.member, one.exception, one.step) == (other.member, other.exception, other.step)
    )


def settled(failures: list[ProcessFailure], since: float, now: float) -> bool:
    """Is it time for the verdict?"""
    return now - since >= (SETTLE_LOSS if all(is_loss(each) for each in failures) else SETTLE)


def first(failures: list[ProcessFailure]) -> ProcessFailure:
    """Return the failure that the job failed of: the first report that is no mere loss, else the first report."""
    return next((each for each in failures if not is_loss(each)), failures[0])


def exit_code(failure: ProcessFailure) -> int:
    """Return the exit code that this failure gives the job."""
    return failure.exit if failure.code and failure.exit else 1


def resume_command(failure: ProcessFailure, checkpoint: str | None) -> str | None:
    """Return the command that goes on after a failure; None without a checkpoint.

    A restore replays the code that the checkpoint was made with. That is right after a lost process or host; the user's
    own error would come again, so the job file and the mended script are sent anew.
    """
    if checkpoint is None:
        return None
    in_code = failure.member.startswith("worker/") and not is_death(failure)
    return TRAIN_AGAIN if in_code else f"psctl checkpoint restore {checkpoint}"


def document(
    failure: ProcessFailure, job: str, stopped: list[str], checkpoint: str | None, others: Iterable[ProcessFailure] = ()
) -> dict[str, Any]:
    """Return what `finished.failure` holds: who, where, when, why, what else ended, and what to do next.

    Args:
        failure: the first.
        job: its name.
        stopped: ranks that psctl ended because of it.
        checkpoint: the newest that is verified.
        others: failures of ranks that ended by themselves.
    """
    role, _, rank = failure.member.partition("/")
    body: dict[str, Any] = msgspec.to_builtins(failure)
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
