"""The choice of a number by measurement in the first steps of a training: the size of buckets (`sync.bucket: auto`), or
how many of them wait for `optimizer.step()` (backward_steps.py).

All ranks must take the same number in every round of sums, and they measure different times. So the seconds of each
round are summed in the next round: an all-reduce gives every rank the same sum to the bit, and what follows from the
same numbers is the same on every rank, without a further message. A rank that a loss has delayed, or that replaces a
lost one, has no time of that round and adds nothing; if no rank has, the round does not count. The number of a round
depends on the rounds before it and on these sums only, so a replacement that takes them from another rank takes the
numbers that all others take, and a loss changes no bit of any sum.

Each number is tried twice, because other work may come and go meanwhile: a turn is ROUNDS rounds, of which the first,
with new memory, does not count. The second time, other numbers than the usual one that took SLOW times as long as the
fastest are left out. The one with the least median is taken; the usual one unless another saves GAIN of the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import torch

from psctl.clock import Clock
from psctl.types import State

ROUNDS = 4
"""Rounds of a turn."""

SLOW = 1.2
"""Of a number that is not tried again: its time over the least."""

GAIN = 0.03
"""Part of the time that another number than the usual one must save."""

ELEMENTS = 3
"""Of the vector that is summed: the seconds of the former round in two parts, and whether they are known."""


class TunerRecord(msgspec.Struct, frozen=True):
    """The progress of a choice, as checkpoints and replacements have it.

    `rounds` that have ended; `times` of each choice: the mean seconds of all ranks, of each round that counts;
    `chosen`: 0: none yet; `world`, `strategy` and `choices` to which all of it applies.
    """

    world: int
    strategy: str
    choices: tuple[int, ...]
    rounds: int = 0
    times: tuple[tuple[float, ...], ...] = ()
    second: tuple[int, ...] | None = None
    chosen: int = 0


class ChoiceTuner:
    """One rank's part of the choice.

    Args:
        choices: the numbers that are tried, none of them 0; the first is the usual one.
        clock: measures rounds.
        world: number of ranks.
        strategy: its name.
        saved: of a checkpoint: another choice of the same numbers, world and strategy goes on.
    """

    def __init__(self, choices: Sequence[int], clock: Clock, world: int, strategy: str, saved: State | None) -> None:
        self._clock = clock
        self._new = TunerRecord(world, strategy, tuple(choices), times=tuple(() for _ in choices))
        self._record = self._new if saved is None else self._taken(saved)
        if len(choices) == 1 and not self._record.chosen:
            self._record = msgspec.structs.replace(self._record, chosen=choices[0])
        self._began: float | None = None  # this round
        self._former: float | None = None  # seconds of the former round

    @property
    def choices(self) -> tuple[int, ...]:
        """The numbers that are tried."""
        return self._record.choices

    @property
    def choice(self) -> int:
        """The number of this round."""
        return self._record.chosen or self._record.choices[self._at(self._record.rounds)[0]]

    @property
    def measures(self) -> bool:
        """Whether none is chosen yet, so that ELEMENTS are summed in each round."""
        return not self._record.chosen

    @property
    def medians(self) -> list[tuple[int, float]]:
        """The numbers with a time, and the median of their seconds."""
        pairs = zip(self._record.choices, self._record.times, strict=True)
        return [(choice, statistics.median(times)) for choice, times in pairs if times]

    def write(self, place: torch.Tensor) -> None:
        """Write this rank's time of the former round into elements of the vector that is summed."""
        seconds = self._former or 0.0
        high = float(torch.tensor(seconds, dtype=place.dtype))
        place.copy_(torch.tensor([high, seconds - high, float(self._former is not None)]))

    def forget(self) -> None:
        """A loss has delayed this round: its time does not count."""
        self._began = None

    def end_round(self, total: Sequence[float]) -> None:
        """Count a round.

        Args:
            total: the sum over all ranks of what they wrote.
        """
        now = self._clock.now()
        self._former = None if self._began is None else now - self._began
        self._began = now
        high, low, known = total
        record = self._record
        if known > 0 and record.rounds > 0:
            at, within = self._at(record.rounds - 1)
            if within > 0:
                times = list(record.times)
                times[at] = (*times[at], (high + low) / known)
                record = msgspec.structs.replace(record, times=tuple(times))
        rounds = record.rounds + 1
        if rounds == ROUNDS * len(record.choices):
            record = msgspec.structs.replace(record, second=worth_another(record.times))
        if record.second is not None and rounds == ROUNDS * (len(record.choices) + len(record.second)):
            record = msgspec.structs.replace(record, chosen=record.choices[best(record.times)])
        self._record = msgspec.structs.replace(record, rounds=rounds)

    def state(self) -> State:
        """Return the progress, for a checkpoint or a replacement."""
        found: State = msgspec.to_builtins(self._record)
        return found

    def load(self, state: State) -> None:
        """Take the progress of another rank, between two rounds."""
        self._record, self._began, self._former = msgspec.convert(state, TunerRecord), None, None

    def _taken(self, saved: State) -> TunerRecord:
        try:
            found = msgspec.convert(saved, TunerRecord)
        except msgspec.ValidationError:  # another version of psctl wrote it
            return self._new
        same = (found.world, found.strategy, found.choices) == (self._new.world, self._new.strategy, self._new.choices)
        return found if same and len(found.times) == len(found.choices) else self._new

    def _at(self, rounds: int) -> tuple[int, int]:
        """Return the place of the number that is tried in this round, and the round's place in its turn."""
        turn, within = divmod(rounds, ROUNDS)
        record = self._record
        if turn < len(record.choices):
            return turn, within
        assert record.second is not None, "it is known when the first turn of all has ended"
        return record.second[turn - len(record.choices)], within


def worth_another(times: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the places of the numbers that are tried a second time."""
    known = [statistics.median(each) for each in times if each]
    limit = SLOW * min(known, default=0.0)
    return tuple(at for at, each in enumerate(times) if not at or not each or statistics.median(each) <= limit)


def best(times: Sequence[Sequence[float]]) -> int:
    """Return the place of the number that is taken; times by place, the usual one's first."""
    medians = {at: statistics.median(each) for at, each in enumerate(times) if each}
    least = min(medians, key=lambda at: medians[at], default=0)
    usual = medians.get(0)
    return least if usual is None or medians[least] < (1 - GAIN) * usual else 0
