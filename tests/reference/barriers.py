"""Barriers: no rank passes before all have entered.

What is sent is the set of ranks that have entered, as an addition that may count twice. The textbooks' token ring ends
when the token has returned: then only the ranks that saw the full token know; a second lap must release the others.
"""

from __future__ import annotations

from psctl.schedule.algorithms import root
from psctl.schedule.phases import Transfers, reverse, shifted
from psctl.schedule.schedule import Schedule, Transfer


def dissemination(world: int) -> Transfers:
    """Return ⌈lg p⌉ steps: in step k each rank sends the rank 2^k further on all that it has received."""
    steps = range((world - 1).bit_length())
    return [Transfer(step, rank, (rank + (1 << step)) % world, 0, "reduce") for step in steps for rank in range(world)]


def token_ring(world: int) -> Transfers:
    """Return 2p steps: a lap of the token to collect, a lap to release."""
    laps = range(2 * world if world > 1 else 0)
    return [Transfer(step, step % world, (step + 1) % world, 0, "reduce") for step in laps]


def through_root(world: int) -> Transfers:
    """Return two steps: all to rank 0, rank 0 to all."""
    release = root.broadcast(world).transfers
    return [*reverse(release), *shifted(release, step=1)]


def all_to_all(world: int) -> Transfers:
    """Return one step: each rank to each other."""
    return [Transfer(0, rank, (rank + away) % world, 0, "reduce", away - 1)
            for rank in range(world) for away in range(1, world)]  # fmt: skip


NAMES = {"dissemination": dissemination, "token-ring": token_ring, "root": through_root, "all-to-all": all_to_all}


def build(name: str, world: int) -> Schedule:
    """Return a barrier as a schedule, for its steps and times."""
    return Schedule(name, world, world, (1,), tuple(sorted(NAMES[name](world))))
