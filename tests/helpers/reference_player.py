"""A second player of schedules, on whole numbers, which shares no code with the checker or with psctl's player."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psctl.schedule.schedule import Schedule, Transfer

PRIME = (1 << 61) - 1

Values = dict[tuple[int, int], Any]


def order_sensitive_sum(one: int, other: int) -> int:
    """Combine commutatively, not associatively: equal results mean equal expressions up to commuted operands."""
    return (one * one + other * other + one * other * 3) % PRIME


def play(values: Values, transfers: Sequence[Transfer], join: Callable[[Any, Any], Any]) -> Values | None:
    """Return the final value of each (node, chunk); None if a step cannot be played."""
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
    """Return random numbers by (rank, chunk), of 59 bits so that a wrong sum is not equal by chance."""
    rng = random.Random(seed)
    return {(rank, chunk): rng.getrandbits(59) for rank in range(world) for chunk in range(chunks)}


def sums_everywhere(world: int, chunks: int, transfers: Sequence[Transfer]) -> bool:
    """Return whether all ranks end with the sum of all ranks, by the same expression."""
    start = vectors(world, chunks)
    added = play(start, transfers, lambda one, other: one + other)
    shaped = play(start, transfers, order_sensitive_sum)
    if added is None or shaped is None:
        return False
    wanted = [sum(start[rank, chunk] for rank in range(world)) for chunk in range(chunks)]
    right = all(added.get((rank, chunk)) == wanted[chunk] for rank in range(world) for chunk in range(chunks))
    alike = all(shaped.get((rank, chunk)) == shaped.get((0, chunk)) for rank in range(world) for chunk in range(chunks))
    return right and alike


@dataclass(frozen=True)
class Change:
    """A damaged schedule: the damage and the transfers."""

    what: str
    transfers: tuple[Transfer, ...]


def changes(schedule: Schedule, index: int, rng: random.Random) -> list[Change]:
    """Return the schedule damaged in every way at one transfer."""
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
        Change("redirect", with_(destination=(one.destination + rng.randrange(1, nodes)) % nodes)),
        Change("other source", with_(source=(one.source + rng.randrange(1, nodes)) % nodes)),
        Change("other chunk", with_(chunk=(one.chunk + rng.randrange(1, max(chunks, 2))) % (chunks + 1))),
        Change("other step", with_(step=rng.choice([s for s in range(steps + 1) if s != one.step]))),
        Change("other action", with_(action="copy" if one.action == "reduce" else "reduce")),
    ]  # fmt: skip
