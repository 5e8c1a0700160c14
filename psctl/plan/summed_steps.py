"""The time of a sum in buckets under a collective, and of the training step around it.

Training sums the gradients in buckets, one after another, so a synchronisation is the sum over its buckets. The time of
the largest one is predicted; the bytes of the others flow in proportion, and their messages wait as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.plan.candidates import TIE, Predicted
from psctl.plan.compression_cost import Coding, coding
from psctl.plan.overlap import StepTime, after_period, pushed_and_pulled, summed_in_backward
from psctl.plan.plan_input import PlanInput, PlanRequest
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.types import BUCKET, DIVISIBLE, FIRST_BUCKET, bucket_bytes


def buckets(size: int, each: int = BUCKET) -> tuple[int, ...]:
    """Return the bytes of each bucket of `size` bytes of gradients, in the order in which they are sent.

    Parameters are not cut, so real buckets differ by up to the largest parameter.

    Args:
        size: bytes of gradients.
        each: bytes of a bucket; the first may be smaller.
    """
    first = min(FIRST_BUCKET, each)
    if size <= first:
        return (size,)
    whole, rest = divmod(size - first, each)
    return (first, *(each for _ in range(whole)), *((rest,) if rest else ()))


def options_as_played(found: Predicted, update: str) -> ScheduleOptions:
    """Return the options with which a schedule is played: pieces of strategy `sharded` overlap the halves of its sum,
    which are played apart where the optimizer is sharded."""
    apart = update == found.strategy == "sharded"
    return msgspec.structs.replace(found.options, pieces=1) if apart else found.options


class SummedSteps:
    """Times of sums and steps under collectives.

    Args:
        inputs: machines, ranks, costs.
        request: of the job file and the model.
    """

    def __init__(self, inputs: PlanInput, request: PlanRequest) -> None:
        self._inputs, self._request = inputs, request

    def buckets(self, size: int, update: str = "") -> tuple[int, ...]:
        """Return the bytes of each bucket; `update`: where the optimizer steps, if not as requested."""
        sharded = "sharded" in (update, self._request.update)
        return buckets(size, bucket_bytes(self._request.bucket, sharded=sharded)) if self._request.bucketed else (size,)

    def largest(self, size: int) -> float:
        """Return the bytes that are sent of the largest bucket."""
        return max(self.buckets(size)) * self._request.halved

    def total(self, seconds: float, waiting: float, size: int) -> float:
        """Return the seconds of all buckets, one after another.

        Args:
            seconds, waiting: of the largest bucket, and the part of it in which messages wait.
            size: bytes of gradients.
        """
        return round(sum(self._seconds(seconds, waiting, size)), 9)

    def step(self, found: Predicted, size: int) -> tuple[str, StepTime | None]:
        """Return where the optimizer steps, and the time of a step; None: the compute of a step is not known.

        Where the choice is free, and the compute known, each worker steps a part if that makes the step shorter.

        Args:
            found: the prediction of the largest bucket.
            size: bytes of gradients.
        """
        request, compute = self._request, self._request.compute
        only = "sharded" if request.update == "sharded" and self._inputs.world > 1 else "worker"
        if compute is None:
            return only, None
        parts = [float(part) for part in self.buckets(size)]
        times = self._seconds(found.seconds, found.timing.waiting, size)
        if request.period > 1:
            return only, after_period(compute, sum(times), request.period)
        by_worker = summed_in_backward(compute, parts, times)
        small = self.buckets(size, "sharded")
        short = self._seconds(found.seconds, found.timing.waiting, size, small)
        early = request.step_in_backward and found.strategy != "native"
        half = sum(short) / 2
        seconds = pushed_and_pulled(compute, half, half, len(small), in_backward=early).seconds
        in_parts = StepTime(seconds, compute + sum(times) - seconds)
        # What smaller buckets alone would gain is no reason: a lost worker is not replaced then.
        least = min(by_worker.seconds, summed_in_backward(compute, [float(part) for part in small], short).seconds)
        free = request.may_be_sharded and found.strategy in DIVISIBLE
        if only == "sharded" or (free and seconds * TIE < least):
            return "sharded", in_parts
        return "worker", by_worker

    def _seconds(self, seconds: float, waiting: float, size: int, each: Sequence[int] = ()) -> list[float]:
        """Return the seconds of each bucket, from those of the largest; `each`: bytes of other buckets."""
        moving, largest, codes = seconds - waiting, max(self.buckets(size)), self._codes
        code = codes.encode + codes.read
        return [waiting + part * (moving / max(1, largest) + code) for part in each or self.buckets(size)]

    @property
    def _codes(self) -> Coding:
        """The cost of compression under a collective, on cores that ranks may share."""
        own_core, sharing = coding(self._request.compression, "worker"), max(1.0, self._inputs.ranks_per_core)
        return Coding(own_core.push, own_core.pull, own_core.encode * sharing, own_core.read * sharing)
