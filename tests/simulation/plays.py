"""What can be simulated, by name."""

from __future__ import annotations

import gc
from collections.abc import Callable

from tests.simulation.chained import play_chain
from tests.simulation.play import Outcome, play
from tests.simulation.tables import play_tables

PLAYS = {"store": play, "chain": play_chain, "tables": play_tables}

BETWEEN = 20
"""Runs between two collections."""


def play_some(what: str, first: int, count: int) -> list[Outcome]:
    """Run seeds one after another; garbage is collected between runs, and not while they go."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return [_play_one(PLAYS[what], seed) for seed in range(first, first + count)]
    finally:
        gc.enable()


def _play_one(play: Callable[[int], Outcome], seed: int) -> Outcome:
    outcome = play(seed)
    if seed % BETWEEN == 0:
        gc.collect()
    return outcome
