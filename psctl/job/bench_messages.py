"""The question of `bench` to its workers, a file in the job's folder, and their answers, one marked line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import msgspec

FILE = "bench.json"
"""The question's file in the job's folder."""

OPERATIONS = 3
"""Operations by which the duration of a short one is estimated."""

MARK = "psctl-bench "
"""Prefix of each line of rank 0 that is an answer."""

CollectiveOperation = Literal[
    "broadcast", "reduce", "gather", "scatter", "all-gather", "reduce-scatter", "all-to-all"
]  # fmt: skip
"""Collectives that are measured by their own algorithms; they have the names of psctl/schedule/contracts.py."""

Operation = Literal["allreduce", "pushpull"] | CollectiveOperation


def collective_of(operation: Operation) -> CollectiveOperation | None:
    """Return the collective that an operation is, or None of one that strategies carry out."""
    return None if operation in ("allreduce", "pushpull") else cast("CollectiveOperation", operation)


class BenchEffort(msgspec.Struct, frozen=True):
    """How often a strategy is measured: `least` times unless that takes more than `slow` seconds, then until `seconds`
    have passed, at most `most` times. A short operation is repeated until one measurement lasts `lasting` s. Where
    only the fastest matter, `slower` is the factor of the fastest time above which one measurement is enough; after
    three only half of its part above 1 counts, after seven a quarter."""

    least: int = 5
    most: int = 40
    seconds: float = 1.5
    slow: float = 10.0
    lasting: float = 0.1
    slower: float | None = None

    def enough(self, times: list[float], repeats: int = 1) -> bool:
        """Whether these measurements, seconds of one operation as a mean over `repeats`, are enough."""
        spent = sum(times) * repeats
        if len(times) < self.least:
            return bool(times) and spent >= self.slow
        return len(times) >= self.most or spent >= self.seconds

    def unfinished(self, times: Mapping[str, list[float]], repeats: Mapping[str, int]) -> list[str]:
        """Return the names that are measured once more, of measurements as `enough` has them.

        All ranks have the same times, so they return the same.
        """
        left = [name for name in times if not self.enough(times[name], repeats[name])]
        if self.slower is None or not all(times.values()):
            return left
        fastest = min(min(each) for each in times.values())
        return [name for name in left if min(times[name]) <= fastest * self._limit(len(times[name]))]

    def _limit(self, count: int) -> float:
        assert self.slower is not None, "else all are measured alike"
        return 1 + (self.slower - 1) * 2 / (1 + count)


class BenchRound(msgspec.Struct, frozen=True):
    """One vector size in bytes, and each strategy to measure with its options as plain data. `ranks`: how many take
    part, the first ones, which are on two hosts at least; None: all of the job."""

    bytes: int
    strategies: dict[str, dict[str, object]]
    ranks: int | None = None


class BenchQuestion(msgspec.Struct, frozen=True):
    """The measurements that the workers of one job make."""

    operation: Operation
    rounds: list[BenchRound]
    effort: BenchEffort = BenchEffort()


class BenchProgress(msgspec.Struct, frozen=True, tag="doing"):
    """The strategies that are being measured now, with `world` ranks."""

    bytes: int
    world: int
    strategies: list[str]


class BenchRow(msgspec.Struct, frozen=True, tag="row"):
    """The times of one strategy at one size: seconds of the slowest rank, one for each measurement, in order."""

    operation: Operation
    strategy: str
    bytes: int
    world: int
    times: list[float]
    correct: bool


BenchAnswer = BenchProgress | BenchRow

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[BenchAnswer] = msgspec.json.Decoder(BenchAnswer)
_asked: msgspec.json.Decoder[BenchQuestion] = msgspec.json.Decoder(BenchQuestion)


def to_line(answer: BenchAnswer) -> str:
    """Return an answer as the line that rank 0 prints."""
    return MARK + _encoder.encode(answer).decode()


def from_line(line: str) -> BenchAnswer | None:
    """Return the answer that a line holds; None of any other line.

    Raises:
        ValueError, RecursionError: the line is marked but not an answer: workers and psctl have different versions.
    """
    return _decoder.decode(line[len(MARK) :]) if line.startswith(MARK) else None


def question_of(data: bytes) -> BenchQuestion:
    """Read the question's file; raises ValueError."""
    return _asked.decode(data)
