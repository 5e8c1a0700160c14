"""The cost of compression in a prediction: bytes sent in each direction, and processor time to encode and decode them.

Gradients are assumed to be float32. Times are seconds for each byte of uncompressed gradients, measured on one core of
two: encoding on a worker, decoding and adding where the sum is made. Under collectives ranks round once before the sum
and widen once after it.

The share of elements that a significance filter sends depends on the gradients; for normally distributed ones it is
P(|x| > v). Elements that are withheld and accumulate are ignored.
"""

from __future__ import annotations

import math

import msgspec

from psctl.plan.simulation.schedule_timing import Timing
from psctl.types import Compression

WIDTHS = {"none": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / 1024, "onebit": 1 / 8 + 4 / 1024, "topk": 4.0}
"""Bytes of a value that is sent."""

ENCODING = {"none": 0.0, "bf16": 6e-11, "fp16": 6e-11, "int8": 1.1e-9, "onebit": 0.7e-9, "topk": 1.8e-9}
"""Seconds a byte on a worker."""

READING = {"none": 0.0, "bf16": 1.5e-10, "fp16": 1.5e-10, "int8": 2.8e-10, "onebit": 4.4e-10, "topk": 7e-11}
"""Seconds for each byte of each worker where the sum is made."""

FILTERING = 3e-9
"""Seconds a byte on a worker to choose elements at random or by significance."""

SCATTERING = 1.3e-9
"""Seconds a byte where the sum is made, to add elements that are not contiguous."""


class Coding(msgspec.Struct, frozen=True):
    """The cost of a compression.

    `push` and `pull` are parts of the gradients' bytes; `encode` and `read` seconds a byte of the gradients.
    """

    push: float = 1.0
    pull: float = 1.0
    encode: float = 0.0
    read: float = 0.0

    @property
    def both(self) -> float:
        """The mean share of a push and a pull."""
        return (self.push + self.pull) / 2


def coding(compression: Compression, update: str) -> Coding:
    """Return the cost of a compression; under `update: worker` sums of halves are sent as halves."""
    if compression.off:
        return Coding()
    kind, chooses = compression.kind, bool(compression.skip or compression.significance)
    leave = (1 - compression.skip) * math.erfc(compression.significance / math.sqrt(2))
    leave = min(leave, compression.share) if kind == "topk" else leave
    places = min(4 * leave, 1 / 8) if leave < 1 else 0.0
    push = (places + leave * WIDTHS[kind]) / 4
    encode = ENCODING[kind] + (FILTERING if chooses else 0.0)
    read = READING[kind] + (SCATTERING * leave if chooses else 0.0)
    return Coding(push, 0.5 if compression.halves and update == "worker" else 1.0, encode, read)


def add_coding_time(timing: Timing, seconds: float) -> Timing:
    """Return a timing with the processor time of encoding and decoding added to that of the sums."""
    if not seconds:
        return timing
    return msgspec.structs.replace(timing, seconds=timing.seconds + seconds, summing=timing.summing + seconds)
