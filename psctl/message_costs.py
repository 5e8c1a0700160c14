"""Costs of messages, and the factors by which strategies were measured to differ from predictions with these costs."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec


class Costs(msgspec.Struct, frozen=True):
    """The costs of a message besides its bytes on the links, in seconds.

    `alpha` adds to the route's latency and occupies no processor; `overhead` occupies the sender's processor, then the
    receiver's; `gamma` the receiver's, per byte that it reduces.
    """

    alpha: float = 0.0
    overhead: float = 0.0
    gamma: float = 0.0


class StrategyPace(msgspec.Struct, frozen=True):
    """Factors by which a strategy's bytes flow, and its messages wait, longer than predicted: effects that links and an
    engine's costs do not model, such as senders that share one receiver, or ranks that share cores.

    `measured` holds, for vectors of these bytes in ascending order, the measured time over the predicted one with all
    other factors.
    """

    flowing: float = 1.0
    waiting: float = 1.0
    measured: tuple[tuple[float, float], ...] = ()

    def factor(self, size: float) -> float:
        """Return the factor of the whole time of a vector of `size` bytes.

        Between two measured sizes it is interpolated on logarithmic scales. Below the smallest it is that of the
        smallest; above the largest the further seconds stay the same, while those of the bytes grow.
        """
        if not self.measured:
            return 1.0
        (first, least), (last, most) = self.measured[0], self.measured[-1]
        if size <= first:
            return least
        if size >= last:
            return 1.0 + (most - 1.0) * last / size
        for (low, below), (high, above) in pairwise(self.measured):
            if size <= high:
                part = math.log(size / low) / math.log(high / low)
                return math.exp((1.0 - part) * math.log(below) + part * math.log(above))
        raise AssertionError("one of the ranges has the size")

    @property
    def least(self) -> float:
        """The least factor of any size."""
        return min(1.0, *(factor for _, factor in self.measured)) if self.measured else 1.0

    @property
    def unmeasured(self) -> StrategyPace:
        """These factors without those of measured sizes, which hold for the measured ranks only."""
        return StrategyPace(self.flowing, self.waiting)


AS_PREDICTED = StrategyPace()


class MeasuredCosts(msgspec.Struct, frozen=True):
    """What was measured on a cluster: costs by engine, factors by strategy, and the ranks on each host meanwhile."""

    engines: dict[str, Costs] = {}
    paces: dict[str, StrategyPace] = {}
    ranks: dict[str, int] = {}

    def for_ranks(self, ranks: dict[str, int]) -> MeasuredCosts:
        """Return what holds for these ranks by host: with other ones than the measured, no factors of single sizes."""
        if ranks == self.ranks:
            return self
        return MeasuredCosts(self.engines, {name: pace.unmeasured for name, pace in self.paces.items()}, self.ranks)


UNKNOWN_COSTS = MeasuredCosts()
"""Of a cluster on which nothing was measured."""
