"""The agent's side of the times of steps: makes the memory of each worker, and reads it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from psctl.job.control_answers import RankSpans
from psctl.process import step_ring
from psctl.types import Member


class StepRings:
    """The memory of an agent's children; `opened` and `ended` on the main thread, the others on any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[Member, int] = {}

    @contextlib.contextmanager
    def opened(self, member: Member) -> Iterator[int]:
        """Make a child's memory; yields the descriptor that the child inherits."""
        self.ended(member)
        descriptor = os.memfd_create("psctl-steps", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, step_ring.SIZE)  # pages are taken when they are written
        with self._lock:
            self._memory[member] = descriptor
        yield descriptor

    def ended(self, member: Member) -> None:
        """Release the memory of a child that has ended or could not be started."""
        with self._lock:
            descriptor = self._memory.pop(member, None)
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

    def request_profile(self, rank: int, steps: int) -> bool:
        """Ask a worker of this host to profile its next steps; return whether it runs here."""
        with self._lock:
            for member, descriptor in self._memory.items():
                if (member.role, member.rank) == ("worker", rank):
                    step_ring.request_profile(descriptor, steps)
                    return True
        return False
