"""Plays schedules on real numbers, by the semantics of psctl/schedule/schedule.py, independently of the checker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psctl.schedule.schedule import Schedule, Transfer

PRIME = (1 << 61) - 1

Values = dict[tuple[int, int], Any]


def rough(one: int, other: int) -> int:
    """Commutative, not associative: equal results mean equal expressions, up to two operands changing places."""
    return (one * one + other * other + one * other * 3) % PRIME


def play(values: Values, transfers: Sequence[Transfer], join: Callable[[Any, Any], Any]) -> Values | None:
    """Return what every node holds of every chunk at the end; None where a step cannot be played."""
    held = dict(values)
    for step in sorted({one.step for one in transfers}):
        before, coming = dict(held), {}
        for one in transfers:
            if one.step != step:
                continue
            if (one.source, one.chunk) not in before or one.source == one.destination:
                return None
            coming.setdefault((one.destination, one.chunk), []).append(one)
        for place, arrived in coming.items():
            if any(one.action == "copy" for one in arrived):
                if len(arrived) > 1:
                    return None
                held[place] = before[arrived[0].source, place[1]]
                continue
            operands = [(one.source, before[one.source, place[1]]) for one in arrived]
            if place in before:
                operands.append((place[0], before[place]))
            operands.sort()
            total = operands[0][1]
            for _, value in operands[1:]:
                total = join(total, value)
            held[place] = total
    return held


def vectors(world: int, chunks: int, seed: int = 1) -> Values:
    """Return numbers so large and odd that no wrong sum comes out right by chance."""
    dice = random.Random(seed)
    return {(rank, chunk): dice.getrandbits(59) for rank in range(world) for chunk in range(chunks)}


def sums_everywhere(world: int, chunks: int, transfers: Sequence[Transfer]) -> bool:
    """Return whether all ranks end with the sum of all, and with the same expression of it."""
    start = vectors(world, chunks)
    added = play(start, transfers, lambda one, other: one + other)
    shaped = play(start, transfers, rough)
    if added is None or shaped is None:
        return False
    wanted = [sum(start[rank, chunk] for rank in range(world)) for chunk in range(chunks)]
    right = all(added.get((rank, chunk)) == wanted[chunk] for rank in range(world) for chunk in range(chunks))
    alike = all(shaped.get((rank, chunk)) == shaped.get((0, chunk)) for rank in range(world) for chunk in range(chunks))
    return right and alike


@dataclass(frozen=True)
class Change:
    """One way to break a schedule."""

    what: str
    transfers: tuple[Transfer, ...]


def changes(schedule: Schedule, index: int, dice: random.Random) -> list[Change]:
    """Return the schedule broken in every way at one transfer."""
    one, others = schedule.transfers[index], list(schedule.transfers)
    del others[index]

    def with_(**fields: object) -> tuple[Transfer, ...]:
        given = {name: getattr(one, name) for name in ("step", "source", "destination", "chunk", "action", "lane")}
        return (*others, Transfer(**{**given, **fields}))  # type: ignore[arg-type]

    nodes, chunks, steps = schedule.nodes, len(schedule.shares), schedule.steps
    return [
        Change("drop", tuple(others)),
        Change("duplicate", (*schedule.transfers, one)),
        Change("again later", (*with_(step=steps), one)),
        Change("redirect", with_(destination=(one.destination + dice.randrange(1, nodes)) % nodes)),
        Change("other source", with_(source=(one.source + dice.randrange(1, nodes)) % nodes)),
        Change("other chunk", with_(chunk=(one.chunk + dice.randrange(1, max(chunks, 2))) % (chunks + 1))),
        Change("other step", with_(step=dice.choice([s for s in range(steps + 1) if s != one.step]))),
        Change("other action", with_(action="copy" if one.action == "reduce" else "reduce")),
    ]  # fmt: skip
