"""Pairs at distance 1, 2, 4 ...: halving-doubling for few start-ups at the ring's bytes, recursive doubling for fewest.

Halving-doubling exchanges halves, quarters, eighths, then the same in reverse: 2 lg p steps and 2(p-1)/p N bytes a rank
(Rabenseifner; the distances in MPICH's order), for which every rank needs lg p different peers. The first half is the
all-gather by doubling run in reverse. Recursive doubling exchanges whole sums: lg p (alpha + N beta + N gamma), for
small messages; both of a pair add the same two values, so all end with the same bits.

When p is no power of two, the first 2r ranks (r = p - 2^floor(lg p)) fold in pairs before and unfold after, one step
and the whole vector each.
"""

from __future__ import annotations

from psctl.schedule.checker import prove
from psctl.schedule.phases import AllGather, Transfers, relabelled, reverse, shifted, step_count
from psctl.schedule.schedule import Schedule, Transfer


def all_gather(world: int) -> AllGather:
    """Return the all-gather by doubling: the far half first with one chunk, distance 1 last with half of them.

    The owner of chunk c is the rank whose bits are c's in reverse order, so that what travels together is contiguous.

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
            start = owners[rank] // block * block  # reversing bits is its own inverse: the rank's own chunk
            transfers += [Transfer(step, rank, rank ^ distance, chunk, "copy") for chunk in range(start, start + block)]
    return AllGather(owners, transfers, (1,) * world, world)


def halving_doubling(world: int) -> Schedule:
    """Return the halving-doubling all-reduce of any number of ranks."""
    core = all_gather(1 << (world.bit_length() - 1))
    reduction = reverse(core.transfers)
    both = [*reduction, *shifted(core.transfers, step=step_count(reduction))]
    return prove("halving-doubling", world, _folded(world, both, len(core.shares)), core.shares)


def recursive_doubling(world: int) -> Schedule:
    """Return the recursive-doubling all-reduce of any number of ranks."""
    bits = world.bit_length() - 1
    core = [Transfer(step, rank, rank ^ 1 << step, 0, "reduce") for step in range(bits) for rank in range(1 << bits)]
    return prove("recursive-doubling", world, _folded(world, core, 1))


def _folded(world: int, core: Transfers, chunks: int) -> Transfers:
    """Return an all-reduce among the largest power of two of ranks, extended to all ranks.

    Of the first 2r ranks the odd ones add the even ones' vectors first, and send them the result at the end.
    """
    extra = world - (1 << (world.bit_length() - 1))
    fold = [Transfer(0, 2 * pair, 2 * pair + 1, chunk, "reduce") for pair in range(extra) for chunk in range(chunks)]
    remaining = [2 * pair + 1 for pair in range(extra)] + list(range(2 * extra, world))
    middle = shifted(relabelled(core, remaining), step=step_count(fold))
    return [*fold, *middle, *shifted(reverse(fold, "copy"), step=step_count([*fold, *middle]))]
