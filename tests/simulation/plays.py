"""What can be simulated, by name."""

from __future__ import annotations

from .chained import play_chain
from .play import Outcome, play

PLAYS = {"store": play, "chain": play_chain}


def play_some(what: str, first: int, count: int) -> list[Outcome]:
    """Run seeds one after another."""
    return [PLAYS[what](seed) for seed in range(first, first + count)]
