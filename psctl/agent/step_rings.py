"""The agent's side of the times of steps: makes the memory of each worker, and reads it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from psctl.job.activity import PARTS
from psctl.job.control_answers import RankSpans
from psctl.process import step_ring
from psctl.types import Member

KEPT_STEPS = 10
KEPT_SPANS = 400
"""Of the steps of a worker that has ended."""


@dataclass
class _TimeOfSteps:
    """How a worker divided its time: up to span number `seen`, which was read at `at` nanoseconds."""

    at: int
    seen: int = 0
    parts: tuple[int, ...] = field(default=())


class StepRings:
    """The memory of an agent's children; `opened` and `ended` on the main thread, the others on any.

    Args:
        now: nanoseconds of the clock of the spans.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._memory: dict[Member, int] = {}
        self._times: dict[Member, _TimeOfSteps] = {}

    @contextlib.contextmanager
    def opened(self, member: Member) -> Iterator[int]:
        """Make a child's memory; yields the descriptor that the child inherits."""
        self.ended(member)
        descriptor = os.memfd_create("psctl-steps", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, step_ring.SIZE)  # pages are taken when they are written
        with self._lock:
            self._memory[member] = descriptor
            self._times[member] = _TimeOfSteps(self._now())
        yield descriptor

    def ended(self, member: Member) -> None:
        """Release the memory of a child that has ended or could not be started."""
        with self._lock:
            descriptor = self._memory.pop(member, None)
            self._times.pop(member, None)
            if descriptor is not None:
                os.close(descriptor)

    def read(self, first: int, last: int) -> list[RankSpans]:
        """Return the spans of these steps, and of each worker the steps that it holds and has finished."""
        found = []
        with self._lock:
            for member, descriptor in sorted(self._memory.items()):
                if member.role != "worker":
                    continue
                spans = step_ring.read_spans(descriptor)
                finished = [span.step for span in spans if span.kind == "step"]
                wanted = [span for span in spans if first <= span.step <= last]
                found.append(
                    RankSpans(
                        member.rank, finished[0] if finished else 0, finished[-1] if finished else 0,
                        [(span.kind, span.step, span.begin, span.end) for span in wanted],
                    )
                )  # fmt: skip
        return found

    def newest(self, member: Member) -> tuple[step_ring.StepSpan, ...]:
        """Return the parts of the last KEPT_STEPS steps that a worker has finished; none of other processes."""
        with self._lock:
            descriptor = self._memory.get(member)
            spans = step_ring.read_spans(descriptor) if descriptor is not None and member.role == "worker" else []
        last = max((span.step for span in spans if span.kind == "step"), default=0)
        return tuple(span for span in spans if last - KEPT_STEPS < span.step <= last)[-KEPT_SPANS:]

    def parts(self, member: Member) -> tuple[int, ...]:
        """Return the percent of a worker's time in each of `activity.PARTS`, between the last two calls with new spans.

        It is empty before that, and for other processes.
        """
        with self._lock:
            known, descriptor = self._times.get(member), self._memory.get(member)
            if known is None or descriptor is None:
                return ()
            spans, seen = step_ring.read_new_spans(descriptor, known.seen)
            if spans:
                now = self._now()
                known.parts = parts_of(spans, now - known.at) if known.seen else ()
                known.at, known.seen = now, seen
            return known.parts

    def request_profile(self, rank: int, steps: int) -> bool:
        """Ask a worker of this host to profile its next steps; return whether it runs here."""
        with self._lock:
            for member, descriptor in self._memory.items():
                if (member.role, member.rank) == ("worker", rank):
                    step_ring.request_profile(descriptor, steps)
                    return True
        return False


def parts_of(spans: Sequence[step_ring.StepSpan], elapsed: int) -> tuple[int, ...]:
    """Return the percent of a time in each of `activity.PARTS`.

    A wait within the optimizer's step is a wait. What is left of steps is computation.

    Args:
        spans: that ended in this time.
        elapsed: nanoseconds; a span may have begun before.
    """
    sums = dict.fromkeys(step_ring.KINDS, 0)
    for span in spans:
        sums[span.kind] += span.end - span.begin
    updates = {span.step: span for span in spans if span.kind == "update"}
    both = sum(
        max(0, min(span.end, updates[span.step].end) - max(span.begin, updates[span.step].begin))
        for span in spans
        if span.kind == "synchronize" and span.step in updates
    )
    sync, load, update = sums["synchronize"], sums["load"], max(0, sums["update"] - both)
    found = {
        "compute": max(0, sums["step"] - sync - load - update), "sync": sync, "load": load, "update": update,
        "checkpoint": sums["checkpoint"],
    }  # fmt: skip
    whole = max(elapsed, sum(found.values()), 1)
    return tuple(100 * found[name] // whole for name in PARTS)
