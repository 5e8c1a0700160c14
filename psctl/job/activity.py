"""What a worker does: the activity in a heartbeat, and the parts of its time.

An activity is `compute`, or a wait with the names of the ranks that are waited for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

COMPUTE = "compute"

PARTS = ("compute", "sync", "load", "update", "checkpoint")
"""The parts of a worker's time: it computes, waits for synchronization, waits for a batch, steps the optimizer, gives
its part of a checkpoint."""

_WAITS = ("sync", "waiting for")
_NAME = re.compile(r"\b(worker|server)/(\d{1,7})\b")


def waiting(what: str, workers: Iterable[int] = ()) -> str:
    """Return the activity of a worker that waits for other workers.

    Args:
        what: the data that the worker waits for.
        workers: the workers that have not sent it, as far as known.
    """
    names = ", ".join(f"worker/{rank}" for rank in sorted(set(workers)))
    return f"sync: waiting for {what}" + (f" from {names}" if names else "")


def is_wait(doing: str) -> bool:
    """Return whether this activity is a wait for another process."""
    return doing.startswith(_WAITS)


def waited_for(doing: str) -> set[tuple[str, int]]:
    """Return the (role, rank) of each process that an activity waits for; empty when it names none.

    "waiting for values from server/0, which waits for worker/1" waits for worker/1.
    """
    last = re.split(r", which waits? for ", doing)[-1]
    return {(role, int(rank)) for role, rank in _NAME.findall(last)}
