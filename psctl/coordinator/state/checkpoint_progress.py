"""Which checkpoints are being made, by whom, and when the next is due.

A checkpoint's parts come from several senders; it can be committed when all of them have ended. Who they are: all
workers, and, where the optimizer steps on servers, those that lead a shard now. Servers that lead none may send a part
too (what they led when the step was ordered, or an empty one) and are waited for once they have begun: one that came a
moment ago may never have heard of the order. A cut is how all workers agree on one step: everybody tells the step in
progress and waits before the one after next; the cut is one beyond the largest.
"""

from __future__ import annotations

import msgspec

from psctl.types import Member


class PendingCheckpoint(msgspec.Struct):
    """One checkpoint that is being made."""

    step: int
    since: float
    begun: set[Member] = msgspec.field(default_factory=set)
    ended: set[Member] = msgspec.field(default_factory=set)
    tables: set[Member] | None = None
    """Servers whose part of the tables is still to come; None: nobody was asked yet."""
    sent: float | None = None
    """When its last part had come; the numbers that ranks reported of its step may still be on their way."""
    committing: bool = False


class CommonStep(msgspec.Struct):
    """A common step that is being agreed on. `step` is None until all have answered."""

    ticket: int
    save: bool
    stop: bool
    waiting: set[Member]
    largest: int = 0
    answered: bool = False
    step: int | None = None


class JobCheckpoints:
    """All checkpoints of a job in its life."""

    def __init__(self, job: str, every_seconds: float, resumed: str | None, now: float) -> None:
        self.sources: set[Member] = set()  # who must send a part
        self.open: dict[int, PendingCheckpoint] = {}
        self.copying: set[int] = set()
        self.cut: CommonStep | None = None
        self.last: int | None = None  # step of the last verified one of this job
        self.problem = ""  # of the last one that was given up
        self._tickets = 0
        self._dropped: set[int] = set()
        self._written: set[int] = set()
        self._job = job
        self._resumed = resumed
        self._every = every_seconds
        self._due = now + every_seconds

    def begun(self, member: Member, step: int, now: float) -> str:
        """A sender begins its part of a step's checkpoint; return why it may not, or ""."""
        served = any(source.role == "server" for source in self.sources)
        if member not in self.sources and not (served and member.role == "server"):
            return f"{member} sent a checkpoint's part unasked"
        if step in self._dropped or step in self._written:
            return ""  # others' parts of one that was given up come in late, and empty ones of one that is whole
        self.open.setdefault(step, PendingCheckpoint(step, now)).begun.add(member)
        self._due = now + self._every
        return ""

    def want_tables(self, step: int, servers: set[Member]) -> bool:
        """These servers' parts of the tables belong to a checkpoint; return whether they are to be asked for it."""
        save = self.open.get(step)
        if save is None or save.tables is not None:
            return False
        save.tables = set(servers)
        return True

    def ended(self, member: Member, step: int, now: float, *, of_tables: bool = False) -> bool:
        """A sender has sent all; return True when it was the last."""
        save = self.open.get(step)
        if save is None or save.sent is not None:
            return False
        if of_tables and save.tables is not None:
            save.tables.discard(member)
        elif not of_tables:
            save.ended.add(member)
        save.sent = now if save.ended >= self.sources | save.begun and not save.tables else None
        return save.sent is not None

    def sent(self) -> list[PendingCheckpoint]:
        """Return those of which every part has come, oldest step first, and which nobody has committed yet."""
        return [save for _, save in sorted(self.open.items()) if save.sent is not None and not save.committing]

    def written(self, step: int, problem: str) -> None:
        """A commit came to its end."""
        self.open.pop(step, None)
        if problem:
            self._dropped.add(step)
            self.problem = f"the checkpoint of step {step} was not written: {problem}"
        else:
            self.last, self.problem = step, ""
            self._written.add(step)

    def give_up(self, gone: set[Member]) -> list[int]:
        """Return, and forget, the steps whose checkpoint waits for a member that is gone."""
        lost = [
            step
            for step, save in self.open.items()
            if save.sent is None and (((self.sources | save.begun) - save.ended) | (save.tables or set())) & gone
        ]
        for step in lost:
            del self.open[step]
            self._dropped.add(step)
        return lost

    def again(self, now: float) -> list[int]:
        """All senders end and begin again: return the steps that are given up; the same steps may be saved later."""
        given_up = self.abandon()
        self._dropped.clear()
        self._written.clear()
        self.cut, self._due = None, now + self._every
        return given_up

    def abandon(self) -> list[int]:
        """Return, and forget, the steps whose parts are still coming."""
        lost = [step for step, save in self.open.items() if save.sent is None]
        for step in lost:
            del self.open[step]
            self._dropped.add(step)
        return lost

    def drop(self, step: int) -> bool:
        """Give a step's checkpoint up, though it may not have begun; tell whether it had."""
        self._dropped.add(step)
        return self.open.pop(step, None) is not None

    def dropped(self, step: int) -> bool:
        """Was this step's checkpoint given up?"""
        return step in self._dropped

    def pending(self) -> bool:
        """Is anything being written or copied?"""
        return bool(self.open or self.copying)

    def due(self, now: float) -> bool:
        """Is it time for a checkpoint by the clock?"""
        return self._every > 0 and now >= self._due and self.cut is None and not self.open

    def propose(self, workers: set[Member], save: bool, stop: bool, now: float) -> CommonStep:
        """Begin to agree on a common step."""
        self._tickets += 1
        self._due = now + self._every
        self.cut = CommonStep(self._tickets, save, stop, set(workers))
        return self.cut

    def position(self, member: Member, ticket: int, step: int) -> CommonStep | None:
        """A worker told its step; return the cut when it is agreed now."""
        if self.cut is None or ticket != self.cut.ticket or self.cut.step is not None:
            return None
        self.cut.answered = True
        self.cut.largest = max(self.cut.largest, step)
        self.cut.waiting.discard(member)
        return self._agreed()

    def without(self, member: Member) -> CommonStep | None:
        """A worker will answer no more; return the cut when it is agreed now without it."""
        if self.cut is None or self.cut.step is not None or member not in self.cut.waiting:
            return None
        self.cut.waiting.discard(member)
        return self._agreed()

    def checkpoint(self) -> str | None:
        """Return the last verified checkpoint's name, the one that the job came from included."""
        return f"{self._job}@{self.last}" if self.last is not None else self._resumed

    def _agreed(self) -> CommonStep | None:
        assert self.cut is not None
        if self.cut.waiting:
            return None
        cut, self.cut = self.cut, None
        if not cut.answered:
            return None
        cut.step = cut.largest + 1
        return cut
