"""Costs of messages, and the factors by which strategies were measured to differ from predictions with these costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import msgspec

NEAR = 4.0
"""Factor of a measured size within which its schedule's options are taken."""


class Costs(msgspec.Struct, frozen=True):
    """The costs of a message besides its bytes on the links, in seconds.

    `alpha` adds to the route's latency and occupies no processor; `overhead` occupies the sender's processor, then the
    receiver's; `gamma` the receiver's, per byte that it reduces.
    """

    alpha: float = 0.0
    overhead: float = 0.0
    gamma: float = 0.0


class MeasuredSize(msgspec.Struct, frozen=True):
    """A strategy at one size: the bytes of a vector, the measured time over the predicted one with all other factors,
    and the options of its schedule (`catalog.ScheduleOptions` as plain data)."""

    bytes: float
    factor: float
    options: dict[str, object] = {}


class StrategyPace(msgspec.Struct, frozen=True):
    """Factors by which a strategy's bytes flow, and its messages wait, longer than predicted: effects that links and an
    engine's costs do not model, such as senders that share one receiver, or ranks that share cores.

    `measured` holds the sizes that were measured, in ascending order.
    """

    flowing: float = 1.0
    waiting: float = 1.0
    measured: tuple[MeasuredSize, ...] = ()

    def factor(self, size: float) -> float:
        """Return the factor of the whole time of a vector of `size` bytes.

        Between two measured sizes it is interpolated on logarithmic scales. Below the smallest it is that of the
        smallest; above the largest the further seconds stay the same, while those of the bytes grow.
        """
        if not self.measured:
            return 1.0
        first, last = self.measured[0], self.measured[-1]
        if size <= first.bytes:
            return first.factor
        if size >= last.bytes:
            return 1.0 + (last.factor - 1.0) * last.bytes / size
        low, high = next((low, high) for low, high in pairwise(self.measured) if size <= high.bytes)
        part = math.log(size / low.bytes) / math.log(high.bytes / low.bytes)
        return math.exp((1.0 - part) * math.log(low.factor) + part * math.log(high.factor))

    def options(self, size: float) -> dict[str, object] | None:
        """Return the options of a measured size; None where there is none within a factor of NEAR.

        The factors hold for the options that were measured: the model ranks other ones without them. Those of a smaller
        size are preferred: what a larger vector is cut into may be too small in a smaller one.
        """
        near = [each for each in self.measured if size / NEAR <= each.bytes <= size * NEAR]
        smaller = [each for each in near if each.bytes <= size]
        return smaller[-1].options if smaller else near[0].options if near else None

    @property
    def least(self) -> float:
        """The least factor of any size."""
        return min([1.0, *(each.factor for each in self.measured)])

    @property
    def unmeasured(self) -> StrategyPace:
        """These factors without those of measured sizes, which hold for the measured ranks only."""
        return StrategyPace(self.flowing, self.waiting)


AS_PREDICTED = StrategyPace()


class RanksCosts(msgspec.Struct, frozen=True):
    """What was measured with the same ranks: costs by engine, and factors by strategy."""

    engines: dict[str, Costs] = {}
    paces: dict[str, StrategyPace] = {}

    @property
    def unmeasured(self) -> RanksCosts:
        """What holds for other ranks: no factors of single sizes."""
        return RanksCosts(self.engines, {name: pace.unmeasured for name, pace in self.paces.items()})


class MeasuredRanks(msgspec.Struct, frozen=True):
    """The ranks of each host, in the order of hosts, and what was measured with them."""

    ranks: dict[str, int]
    costs: RanksCosts

    def is_of(self, ranks: Mapping[str, int]) -> bool:
        """Whether these are the ranks."""
        return list(self.ranks.items()) == list(ranks.items())

    def distance(self, ranks: Mapping[str, int]) -> tuple[float, float]:
        """Return how far these ranks are from other ones, to be compared: by their number, as a factor; of two that
        are as far, more ranks are nearer."""
        mine, other = sum(self.ranks.values()), sum(ranks.values())
        return abs(math.log(max(mine, 1) / max(other, 1))), -mine


class MeasuredCosts(msgspec.Struct, frozen=True):
    """What was measured on a cluster, by the ranks that took part."""

    groups: tuple[MeasuredRanks, ...] = ()

    def for_ranks(self, ranks: Mapping[str, int]) -> RanksCosts:
        """Return what holds for these ranks by host.

        What was measured with them holds in full. An engine or a strategy that was not has what was found with the
        ranks whose number is nearest, without the factors of single sizes.
        """
        found = RanksCosts()
        for group in sorted(self.groups, key=lambda each: (not each.is_of(ranks), each.distance(ranks)), reverse=True):
            better = group.costs if group.is_of(ranks) else group.costs.unmeasured
            found = RanksCosts({**found.engines, **better.engines}, {**found.paces, **better.paces})
        return found


UNKNOWN_COSTS = MeasuredCosts()
"""Of a cluster on which nothing was measured."""
