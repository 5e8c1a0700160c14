"""Planted bugs: each is one method of a shipped module replaced; the simulator must catch every one.

python -m tests.simulation --mutants        prints the table: mutant, seeds until caught, invariant that caught it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from psctl.store.shard import ShardMind

from .play import Outcome, play

Patch = tuple[type, str, Callable[[Any], Any]]
"""A class, the name of its method, and what makes the method's mutant out of the method."""


@dataclass(frozen=True)
class Mutant:
    """A planted bug, and within how many seeds it must be caught."""

    name: str
    patches: tuple[Patch, ...]
    within: int = 300


def _as_next(method: Any) -> Any:
    """A push that was taken before counts as the next one."""

    def place(self: ShardMind, rank: int, message: Any, size: int) -> Any:
        return method(self, rank, _renamed(self, rank, message), size)

    return place


def _renamed(shard: ShardMind, rank: int, message: Any) -> Any:
    if message.clock <= shard._taken[rank]:
        return replace(message, clock=shard._taken[rank] + 1)
    return message


MUTANTS = (Mutant("no dedupe", ((ShardMind, "place", _as_next), (ShardMind, "pushed", _as_next))),)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant the bug for a while."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in mutant.patches]
    for owner, name, make in mutant.patches:
        setattr(owner, name, make(owner.__dict__[name]))
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def hunt(mutant: Mutant, first: int = 0) -> tuple[int, Outcome] | None:
    """Return how many seeds it took and what caught it; None when nothing did."""
    with planted(mutant):
        for seed in range(first, first + mutant.within):
            outcome = play(seed)
            if outcome.broken:
                return seed - first + 1, outcome
    return None
