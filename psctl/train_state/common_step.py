"""Agreement of all workers on one common step to save or stop at (a checkpoint by time, a stop by the user).

    coordinator                    every worker
    ProposeCut(ticket)  ------>    answers at once, from its network thread
                        <------    CutPosition(ticket, p)      p: the step in progress
    CutAt(ticket, m)    ------>    m = max(p) + 1

A worker that has answered p ends step p without waiting, because m > p; it does not end step p + 1 before it has
received CutAt. So every worker has received the cut before step m ends, and training does not stop for it. The wait is
short, because network threads answer while the main threads compute. Where ranks step alone for periods of H, p is the
last step before a period's end, so that m is a period's end: the values saved there are the same on all ranks.
"""

from __future__ import annotations

import threading

import msgspec

from psctl.errors import TimedOut


class StepActions(msgspec.Struct, frozen=True):
    """Actions due when a step has ended."""

    save: bool = False
    stop: bool = False


class StepAgreement:
    """One worker's side of the agreement. The network thread calls `position` and `add_cut`, the main thread the rest.

    Args:
        finished: steps that were finished before this run began.
        timeout: seconds to wait for a CutAt that was promised.
        period: cuts fall on steps that it divides.
    """

    def __init__(self, finished: int, timeout: float = 60.0, period: int = 1) -> None:
        self._changed = threading.Condition()
        self._finished = finished
        self._decided = finished  # the last step whose end was decided
        self._timeout, self._period = timeout, period
        self._answers: dict[int, int] = {}  # ticket -> position, until CutAt arrives
        self._cuts: dict[int, StepActions] = {}
        self.saved_before = 0
        """The newest common step that was saved before this run began, as far as a cut has named it."""

    def position(self, ticket: int) -> int:
        """Return the step in progress, or the next one before a period's end: the answer to ProposeCut(ticket)."""
        with self._changed:
            here = max(self._finished + 1, self._decided)
            here += -(here + 1) % self._period
            self._answers[ticket] = here
            return here

    def add_cut(self, ticket: int, step: int, actions: StepActions) -> None:
        """Record the actions of a CutAt; one of a finished step was sent for the worker that this one replaces."""
        with self._changed:
            self._answers.pop(ticket, None)
            self._changed.notify_all()
            if step <= self._finished:
                self.saved_before = max(self.saved_before, step if actions.save else 0)
                return
            before = self._cuts.get(step, StepActions())
            self._cuts[step] = StepActions(before.save or actions.save, before.stop or actions.stop)
            self._changed.notify_all()

    def begin_step_end(self, step: int) -> StepActions:
        """Return the actions due after `step`, which is about to end; waits for a CutAt that may name it.

        Raises:
            TimedOut: the coordinator proposed a cut and sent no CutAt.
        """
        with self._changed:
            free = self._changed.wait_for(lambda: all(step <= at for at in self._answers.values()), self._timeout)
            if not free:
                raise TimedOut(
                    f"the coordinator asked for a common step and did not name it in {self._timeout:.0f} s",
                    "its log on the head host says what it was doing",
                )
            self._decided = step
            due = [self._cuts.pop(at) for at in sorted(self._cuts) if at <= step]
            return StepActions(any(each.save for each in due), any(each.stop for each in due))

    def finish_step_end(self, step: int) -> None:
        """Record that `step` has ended."""
        with self._changed:
            self._finished = step
