"""Halving-doubling: pairs at distance 1, 2, 4 ... exchange halves, quarters, eighths, then the same way back.

2 lg p steps and 2(p-1)/p N bytes a rank (Rabenseifner; the distances in MPICH's order): the ring's bytes with far fewer
start-ups, for which every rank needs lg p different peers. The first half is the all-gather by recursive doubling run
backwards. When p is no power of two, the first 2r ranks (r = p - 2^floor(lg p)) fold in pairs before and unfold after,
one step and the whole vector each: 2 floor(lg p) + 2 steps.
"""

from __future__ import annotations

from psctl.schedule.checker import prove
from psctl.schedule.reverse import backwards
from psctl.schedule.spread import Spread, Transfers, moved, placed, steps_of
from psctl.schedule.transfer import Schedule, Transfer


def spread(world: int) -> Spread:
    """Return the all-gather by doubling: the far half first with one chunk, distance 1 last with half of them.

    Chunk c lies with the rank whose bits are c's read backwards, so that what travels together lies together.

    Raises:
        ValueError: the world is no power of two; the caller's fault.
    """
    if world & (world - 1) or world < 1:
        raise ValueError(f"doubling needs a power of two, not {world} ranks")
    bits = world.bit_length() - 1
    owners = tuple(int(f"{chunk:0{bits}b}"[::-1], 2) if bits else 0 for chunk in range(world))
    transfers = []
    for step in range(bits):
        distance, block = world >> (step + 1), 1 << step
        for rank in range(world):
            start = owners[rank] // block * block  # reading bits backwards is its own reverse: rank's own chunk
            transfers += [Transfer(step, rank, rank ^ distance, chunk, "copy") for chunk in range(start, start + block)]
    return Spread(owners, transfers, (1,) * world, world)


def folded(world: int, chunks: int) -> tuple[Transfers, list[int], Transfers]:
    """Return how a world that is no power of two becomes one: folding, the ranks that go on, unfolding.

    Of the first 2r ranks the odd ones take in the even ones' vectors, and give them the result at the end.
    """
    extra = world - (1 << (world.bit_length() - 1))
    fold = [Transfer(0, 2 * pair, 2 * pair + 1, chunk, "reduce") for pair in range(extra) for chunk in range(chunks)]
    going_on = [2 * pair + 1 for pair in range(extra)] + list(range(2 * extra, world))
    return fold, going_on, backwards(fold, "copy")


def around(world: int, core: Transfers, chunks: int) -> Transfers:
    """Return an all-reduce among the largest power of two of ranks, made one of all ranks by folding."""
    fold, going_on, unfold = folded(world, chunks)
    middle = moved(placed(core, going_on), step=steps_of(fold))
    return [*fold, *middle, *moved(unfold, step=steps_of([*fold, *middle]))]


def build(world: int) -> Schedule:
    """Return the halving-doubling all-reduce of any number of ranks."""
    core = spread(1 << (world.bit_length() - 1))
    both = [*backwards(core.transfers), *moved(core.transfers, step=core.steps)]
    transfers = around(world, both, len(core.shares))
    return prove("halving-doubling", "all-reduce", world, transfers, core.shares)
