"""Numbers that ranks reported, brought together.

For each step and name the value is the mean over the ranks that reported it, weighted by their examples and added in
rank order, so that it does not depend on which report came first. A step is *complete* when every live rank has passed
it: it reported that step, or is beyond it. What comes in later for a complete step (an accuracy after the last epoch)
is added to it.
"""

from __future__ import annotations

import msgspec

from psctl.job.training_messages import WorkerReport

KEEP = 64
"""Complete steps whose numbers are kept, for what comes in late."""


class IntervalRates(msgspec.Struct, frozen=True):
    """What an interval amounted to, over all ranks. Seconds are per step, means over the ranks."""

    examples_per_second: float
    bytes_per_second: float
    sync_seconds: float
    compute_seconds: float
    hidden_seconds: float  # of these, synchronising that nobody waited for


class _Tally:
    """One rank's sums since the last interval's end."""

    def __init__(self) -> None:
        self.examples = self.compute = self.sync = self.hidden = self.bytes = 0.0
        self.from_step: int | None = None
        self.to_step = 0


class RankReports:
    """All reports of a job's workers."""

    def __init__(self, start: float, first_step: int = 0) -> None:
        self._values: dict[int, dict[str, dict[int, tuple[float, float]]]] = {}  # step, name, rank: (weight, value)
        self._epochs: dict[int, int] = {}
        self._reached: dict[int, float] = {}
        self._rested: dict[int, int] = {}  # by rank: the last step whose point of rest is behind it
        self._last: dict[str, tuple[int, float]] = {}
        self._tallies: dict[int, _Tally] = {}
        self._since = start
        self._first = first_step
        self.step = first_step
        self.epoch = 0

    def add(self, rank: int, report: WorkerReport) -> None:
        """Take in one rank's report."""
        before = self._reached.get(rank, float(self._first))
        self._reached[rank] = max(before, float(report.step))
        self._rested[rank] = max(self._rested.get(rank, self._first), report.rested)
        self.step = max(self.step, report.step)
        self.epoch = max(self.epoch, report.epoch)
        for each in report.steps:
            self._epochs[each.step] = each.epoch
            for name, value in each.metrics.items():
                self._values.setdefault(each.step, {}).setdefault(name, {})[rank] = (each.weight, value)
        tally = self._tallies.setdefault(rank, _Tally())
        tally.from_step = int(before) if tally.from_step is None and before < float("inf") else tally.from_step
        tally.to_step = report.step
        tally.examples += report.examples
        tally.compute += report.compute_seconds
        tally.sync += report.sync_seconds
        tally.hidden += report.hidden_seconds
        tally.bytes += report.bytes_moved

    def rewind(self, step: int, now: float) -> None:
        """All ranks begin again after `step`: what was reported of later ones is forgotten."""
        self._values = {each: found for each, found in self._values.items() if each <= step}
        self._epochs = {each: found for each, found in self._epochs.items() if each <= step}
        self._last = {name: found for name, found in self._last.items() if found[0] <= step}
        self._reached, self._rested, self._tallies = {}, {}, {}
        self._first = self.step = step
        self._since = now
        self.epoch = max(self._epochs.values(), default=0)

    def finished(self, rank: int, step: int) -> None:
        """A rank will report no further step."""
        self._reached[rank] = float("inf")
        self.step = max(self.step, step)

    def complete(self, live: set[int]) -> int | None:
        """Return the last step with numbers that all live ranks have passed; None when there is none.

        Its numbers, and those of the steps before it, are settled into `last_values`.
        """
        found = None
        for step in sorted(self._values):
            if all(self._passed(rank, step) for rank in live):
                found = step
                for name, value in self.at(step).items():
                    if step >= self._last.get(name, (0, 0.0))[0]:
                        self._last[name] = (step, value)
        for step in sorted(self._values)[:-KEEP]:
            if found is not None and step < found:
                del self._values[step]
                self._epochs.pop(step, None)
        return found

    def settled(self, step: int, live: set[int]) -> bool:
        """Tell whether every live rank is past what it could report of a step."""
        return all(self._rested.get(rank, self._first) >= step for rank in live)

    def at(self, step: int) -> dict[str, float]:
        """Return the numbers of one step, from the ranks that reported it so far."""
        return {name: _mean(by_rank) for name, by_rank in sorted(self._values.get(step, {}).items())}

    @property
    def waiting(self) -> int:
        """Steps whose numbers are kept."""
        return len(self._values)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step that was reported, else the newest epoch."""
        return self._epochs.get(step, self.epoch)

    def last_values(self) -> dict[str, float]:
        """Return each name's last complete value."""
        return {name: value for name, (_, value) in sorted(self._last.items())}

    def rates(self, now: float) -> IntervalRates:
        """Return what came in since the last call, and begin a new interval."""
        seconds = max(now - self._since, 1e-9)
        tallies = [each for each in self._tallies.values() if each.from_step is not None]
        steps = sum(max(0, each.to_step - (each.from_step or 0)) for each in tallies)
        found = IntervalRates(
            examples_per_second=sum(each.examples for each in tallies) / seconds,
            bytes_per_second=sum(each.bytes for each in tallies) / seconds,
            sync_seconds=sum(each.sync for each in tallies) / max(steps, 1),
            compute_seconds=sum(each.compute for each in tallies) / max(steps, 1),
            hidden_seconds=sum(each.hidden for each in tallies) / max(steps, 1),
        )
        self._since, self._tallies = now, {}
        return found

    def _passed(self, rank: int, step: int) -> bool:
        reached = self._reached.get(rank, float(self._first))
        return reached > step or any(rank in by_rank for by_rank in self._values[step].values())


def _mean(by_rank: dict[int, tuple[float, float]]) -> float:
    weights = sum(by_rank[rank][0] for rank in sorted(by_rank))
    if weights == 0:  # no examples counted (a DataLoader of one's own): ranks count equally
        return sum(by_rank[rank][1] for rank in sorted(by_rank)) / len(by_rank)
    return sum(by_rank[rank][0] * by_rank[rank][1] for rank in sorted(by_rank)) / weights
