"""What `bench` asks of its workers and what they answer: one file in the job's folder, one marked line an answer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FILE = "bench.json"
"""The question's file in the job's folder."""

MARK = "psctl-bench "
"""How a line of rank 0 begins that is an answer."""

Operation = Literal["allreduce", "pushpull"]


class BenchEffort(msgspec.Struct, frozen=True):
    """How often a strategy is measured: `least` times unless that takes more than `slow` seconds, then on for
    `seconds`, at most `most` times. What is short is repeated within one measurement until it lasts `lasting` s."""

    least: int = 5
    most: int = 40
    seconds: float = 1.5
    slow: float = 10.0
    lasting: float = 0.1

    def enough(self, times: list[float], repeats: int = 1) -> bool:
        """Whether a strategy that took these seconds, each over so many repeats, has been measured often enough."""
        spent = sum(times) * repeats
        if len(times) < self.least:
            return bool(times) and spent >= self.slow
        return len(times) >= self.most or spent >= self.seconds


class BenchRound(msgspec.Struct, frozen=True):
    """One size: bytes of the vector, and each strategy with its options as plain data."""

    bytes: int
    strategies: dict[str, dict[str, Any]]


class BenchQuestion(msgspec.Struct, frozen=True):
    """What the workers of one job measure."""

    operation: Operation
    rounds: list[BenchRound]
    effort: BenchEffort = BenchEffort()


class BenchProgress(msgspec.Struct, frozen=True, tag="doing"):
    """These strategies are measured now."""

    bytes: int
    strategies: list[str]


class BenchRow(msgspec.Struct, frozen=True, tag="row"):
    """What one strategy took at one size: seconds of the slowest rank, one for each measurement, in order."""

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
        msgspec.DecodeError: it is marked and no answer: workers and psctl are of different versions.
    """
    return _decoder.decode(line[len(MARK) :]) if line.startswith(MARK) else None


def question_of(data: bytes) -> BenchQuestion:
    """Read the question's file; raises msgspec.DecodeError."""
    return _asked.decode(data)
