"""Barriers: nobody has heard of everybody before everybody has come in.

What travels is the news of who is there, as an addition that may count twice. The textbooks' token ring stops when the
token is home again: then only the ranks that saw the full token know; a second lap must release the others.
"""

from __future__ import annotations

from psctl.schedule.algorithms import root
from psctl.schedule.reverse import turned
from psctl.schedule.spread import Transfers
from psctl.schedule.transfer import Transfer


def dissemination(world: int) -> Transfers:
    """Return ⌈lg p⌉ steps: in step k everyone tells the rank 2^k further on all it has heard."""
    steps = range((world - 1).bit_length())
    return [Transfer(step, rank, (rank + (1 << step)) % world, 0, "reduce") for step in steps for rank in range(world)]


def token_ring(world: int) -> Transfers:
    """Return 2p steps: a lap of the token to collect, a lap to release."""
    laps = range(2 * world if world > 1 else 0)
    return [Transfer(step, step % world, (step + 1) % world, 0, "reduce") for step in laps]


def through_root(world: int) -> Transfers:
    """Return two steps: all tell rank 0, rank 0 tells all."""
    return turned(root.spread(world))


def all_to_all(world: int) -> Transfers:
    """Return one step: everyone tells everyone."""
    return [Transfer(0, rank, (rank + away) % world, 0, "reduce", away - 1)
            for rank in range(world) for away in range(1, world)]  # fmt: skip
