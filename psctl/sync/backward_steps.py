"""Steps of buckets while backward still runs, so that their new values travel then (`sync.step_in_backward`).

Where the optimizer is sharded, a step sends its gradients during backward (reduce-scatter) and its values during the
next forward (all-gather). With b and f the seconds of backward and forward, and h those of each half on the links, the
links rest for b - h of backward if h < b, and forward waits for h - f of its values if h > f. A bucket that is stepped
and gathered as soon as it is summed moves its values from the one time to the other; (b - h) / h of all buckets fit
there, and more would delay the gradients behind them. They lie apart, because forward reads the values one after
another: values that are there already give those behind them time. The last bucket of backward is never among them,
since the values of the first layers are needed first and `optimizer.step()` follows at once.

b, f and h vary with machines and other work, so the number of these buckets is chosen by measurement. It changes no bit
of any value: steps are elementwise, and the sums are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from psctl.collectives.allreduce_backends import PendingSum
from psctl.collectives.partitioned_sums import ChunkRanges, SchedulePartition
from psctl.sync.choice_tuner import ELEMENTS, ChoiceTuner

OnChosen = Callable[[int, int, Sequence[tuple[int, float]]], object]

PARTS = (0.0, 0.125, 0.25, 0.375, 0.5)
"""Parts of the buckets that are stepped during backward, as they are tried. Where backward takes twice as long as
forward, a third is the most that helps; half of them where forward is computed again in backward."""


def waiting_counts(buckets: int) -> tuple[int, ...]:
    """Return the numbers of buckets that wait for `optimizer.step()`, of so many in all, as they are tried."""
    return tuple(dict.fromkeys(buckets - min(buckets - 1, round(part * buckets)) for part in PARTS))


def stepped_in_backward(buckets: int, waiting: int) -> frozenset[int]:
    """Return the buckets that are stepped when they are summed.

    Args:
        buckets: their number; they are sent in the order of their indices.
        waiting: how many of them wait for `optimizer.step()`; at least one.
    """
    early, last = buckets - waiting, buckets - 1
    return frozenset(last - -(-(place + 1) * last // early) for place in range(early))


class BackwardSteps:
    """One rank's part of the choice which buckets are stepped during backward, and their gathers.

    Args:
        backend: gathers.
        buckets: their number.
        tuner: chooses how many wait.
        device: where vectors lie.
        on_chosen: called when the tuner has chosen: how many are stepped during backward, of how many, and the numbers
            that were tried with the median of their seconds.
    """

    def __init__(
        self, backend: SchedulePartition, buckets: int, tuner: ChoiceTuner, device: torch.device, on_chosen: OnChosen
    ) -> None:
        self._backend, self._buckets, self._tuner, self._on_chosen = backend, buckets, tuner, on_chosen
        self._times = backend.sums.buffer(ELEMENTS, torch.float32, device)
        self._sum: PendingSum | None = None
        self._early = stepped_in_backward(buckets, tuner.choice)
        self._report()

    def begin_round(self) -> None:
        """Choose for the round whose first bucket will be sent next; the values of the former one are there."""
        if self._sum is None:
            return
        self._sum.wait()
        self._sum = None
        self._tuner.end_round([float(number) for number in self._times.tolist()])
        self._early = stepped_in_backward(self._buckets, self._tuner.choice)
        self._report()

    def _report(self) -> None:
        if not self._tuner.measures:
            measured = [(self._buckets - waiting, seconds) for waiting, seconds in self._tuner.medians]
            self._on_chosen(len(self._early), self._buckets, measured)

    def has(self, bucket: int) -> bool:
        """Whether a bucket is stepped when it is summed, in this round."""
        return bucket in self._early

    def gather(self, vector: torch.Tensor, ranges: ChunkRanges, step: Callable[[], object]) -> PendingSum:
        """Begin to gather a bucket whose sum was begun before; `step` is called between the two and writes the values
        of this rank's chunks into the vector."""
        return self._backend.gather_after(step, vector, ranges)

    def end_round(self) -> None:
        """Begin to sum the ranks' times of the former round, unless the choice is made; the values follow."""
        if self._tuner.measures:
            self._tuner.write(self._times)
            self._sum = self._backend.sums.put(self._times)
