"""Bruck: what each rank holds doubles in every step, for any number of ranks.

All-gather in ⌈lg p⌉ steps: with d = 1, 2, 4 ... rank r sends what it has, its own chunk and the d-1 after it, to the
rank d before it; the last step sends only what is missing. All-to-all in ⌈lg p⌉ steps: a chunk that must go o ranks
further goes by the bits of o, so half of all chunks travel in every step: (n/2) lg p bytes for lg p start-ups.
"""

from __future__ import annotations

from psctl.schedule.phases import AllGather, Transfers
from psctl.schedule.schedule import Transfer


def all_gather(world: int) -> AllGather:
    """Return the all-gather in which rank i owns chunk i."""
    transfers = [
        Transfer(step, rank, (rank - (1 << step)) % world, (rank + further) % world, "copy")
        for step in range((world - 1).bit_length())
        for rank in range(world)
        for further in range(min(1 << step, world - (1 << step)))
    ]
    return AllGather(tuple(range(world)), transfers, (1,) * world, world)


def all_to_all(world: int) -> Transfers:
    """Return the all-to-all in which chunk s * world + d goes from rank s to rank d."""
    return [
        Transfer(
            step, (source + away % (1 << step)) % world, (source + away % (2 << step)) % world,
            source * world + (source + away) % world, "copy",
        )
        for source in range(world)
        for away in range(1, world)
        for step in range((world - 1).bit_length())
        if away >> step & 1
    ]  # fmt: skip
