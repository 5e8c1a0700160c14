"""The chosen strategy by the bytes of gradients: the winner of each decade, and about where it changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import msgspec

from psctl.plan.choose import Winner

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
"""Bytes of gradients for which the winner is computed."""

HALVINGS = 2
"""How often a decade in which the winner changes is bisected."""


class SizeRange(msgspec.Struct, frozen=True):
    """A strategy, and about the bytes from which it is chosen, up to the next range."""

    start: int
    chosen: str


def winners(winner: Callable[[int], Winner], sizes: Sequence[int] = SIZES) -> list[Winner]:
    """Return the winner of each size."""
    return [winner(size) for size in sizes]


def size_ranges(winner: Callable[[int], Winner], known: Sequence[Winner]) -> list[SizeRange]:
    """Return where the winner changes, smallest sizes first; the first range starts at 0.

    Args:
        winner: returns the choice for a size.
        known: winners of ascending sizes.
    """
    found: list[SizeRange] = [SizeRange(0, known[0].chosen)]
    for low, high in itertools.pairwise(known):
        found += _between(winner, low, high, HALVINGS)
    return found


def _between(winner: Callable[[int], Winner], low: Winner, high: Winner, halvings: int) -> list[SizeRange]:
    if low.chosen == high.chosen:
        return []
    size = round(math.sqrt(low.size * high.size))
    if not halvings:
        two_digits = round(size, min(0, 2 - len(str(size))))  # predictions are no more precise
        return [SizeRange(two_digits, high.chosen)]
    middle = winner(size)
    return [*_between(winner, low, middle, halvings - 1), *_between(winner, middle, high, halvings - 1)]
