"""Closed forms of the time of an all-reduce on equal hosts with one full-duplex port each.

They check the simulation, and replace it where there are too many ranks to simulate. Every form is a sum of
three parts: alpha, which messages that start together wait for together; beta = 1 / B, the seconds a byte takes
through a port; gamma, the seconds to add a byte. p is the number of ranks, N the bytes of the vector, lg = log2.

    root                 2 alpha + 2(p-1) N beta + (p-1) N gamma        2(p-1) alpha where a port takes one at a time
    cpu                  2 alpha + 2 p N beta + p N gamma               the sum is made on a further node
    sharded              2 alpha + 2(p-1)/p N beta + (p-1)/p N gamma    two-shot on GPUs
    one-shot             alpha + (p-1) N beta + (p-1) N gamma
    chain                2(p-1)(alpha + N beta) + (p-1) N gamma
    ring                 2(p-1) alpha + 2(p-1)/p N beta + (p-1)/p N gamma            (Patarasuk and Yuan 2009)
    several rings        the same over the sum of the cables that lead out of a rank     (Wang and others 2018)
    tree                 2 ceil(lg p) (alpha + N beta) + ceil(lg p) N gamma
    recursive doubling   lg p (alpha + N beta + N gamma)
    halving-doubling     2 lg p alpha + 2(p-1)/p N beta + (p-1)/p N gamma       (Rabenseifner; Thakur and others 2005)
                         no power of two: q = 2^floor(lg p) ranks do so, the others fold before and unfold after:
                         (2 lg q + 2) alpha + (2(q-1)/q + 2) N beta + (1 + (q-1)/q) N gamma
    pipelines            sums are sent back while more chunks arrive: (2 d + k - 1) alpha + (c (k-1) + f) N beta / k,
                         depth d, k chunks; a port carries each byte c times once the pipeline is full, and f chunks
                         pass while it fills and empties; best with k = sqrt((f - c) N beta / alpha)
        chain            d = p - 1, c = 2, f = 2 (p-1)
        binary tree      c = 3 (an inner rank sends up once and down twice), f = 4 d - 3
        double tree      c = 2 (half of the bytes through each tree), f = 2 d - 2
    hierarchical         a reduce-scatter and an all-gather in groups of G, between them an all-reduce of N / G among
                         the n groups on the outer network
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec

from psctl.plan.simulation.schedule_timing import BusiestLink, Timing, timing_of

MOST_CHUNKS = 1024
"""With more, chunks would have a few bytes, or a step of training would not have time for the messages."""


class UniformRates(msgspec.Struct, frozen=True):
    """A uniform network: seconds a message, seconds a byte through a port, seconds to add a byte."""

    alpha: float
    beta: float
    gamma: float = 0.0


class Form(msgspec.Struct, frozen=True):
    """A closed form's value: its three parts in seconds, its steps, and the bytes that the busiest rank sends."""

    steps: int
    sent: float
    waiting: float
    flowing: float
    summing: float = 0.0
    chunks: int = 1

    @property
    def seconds(self) -> float:
        """All three parts."""
        return self.waiting + self.flowing + self.summing

    def timing(self) -> Timing:
        """Return the form as a prediction."""
        return timing_of("closed form", (self.waiting, self.flowing, self.summing), BusiestLink("every port"))


def root(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time to gather on one rank and spread from there."""
    return _phases(2, (world - 1) * size, 2 * (world - 1) * size, (world - 1) * size, rates)


def on_cpu(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time to gather on a node that is no rank, and spread from there."""
    return _phases(2, size, 2 * world * size, world * size, rates)


def sharded(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time in which each rank sums an equal part for all, every pair at once."""
    part = (world - 1) / world * size
    return _phases(2, 2 * part, 2 * part, part, rates)


def one_shot(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time in which each rank sends all to all."""
    return _phases(1, (world - 1) * size, (world - 1) * size, (world - 1) * size, rates)


def chain(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time of the whole vector down a chain of ranks and back."""
    return _phases(2 * (world - 1), 2 * size, 2 * (world - 1) * size, (world - 1) * size, rates)


def ring(world: int, size: float, rates: UniformRates, cables: int = 1) -> Form:
    """Return the time of a ring, or of several side by side.

    `cables` is the number of cables, of 1 / beta bytes/s each, that leave each rank, over all rings and directions that
    are used: 2 for both directions where the two neighbours are on separate cables, 1 where one port leads to both.
    """
    part = (world - 1) / world * size
    return _phases(2 * (world - 1), 2 * part, 2 * part / cables, part, rates)


def tree(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time of a binomial tree: the whole vector up and down."""
    depth = _lg_up(world)
    return _phases(2 * depth, max(depth, 1) * size, 2 * depth * size, depth * size, rates)


def recursive_doubling(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time of exchanging the whole vector at distance 1, 2, 4 ...; others fold before and unfold after."""
    depth, extra = world.bit_length() - 1, 2 if world & (world - 1) else 0
    sums = depth + extra // 2
    return _phases(depth + extra, (depth + extra // 2) * size, (depth + extra) * size, sums * size, rates)


def halving_doubling(world: int, size: float, rates: UniformRates) -> Form:
    """Return the time of exchanging halves, quarters ..., and back; others fold before and unfold after."""
    core = 1 << (world.bit_length() - 1)
    extra = 0 if core == world else 2
    part = (core - 1) / core * size
    through, sums = 2 * part + extra * size, part + extra / 2 * size
    return _phases(2 * (core.bit_length() - 1) + extra, 2 * part + extra / 2 * size, through, sums, rates)


def pipelined_chain(world: int, size: float, rates: UniformRates, chunks: int | None = None) -> Form:
    """Return the time of a chain in chunks, each going back as soon as it is summed; `chunks` None: the best."""
    depth = world - 1
    return _two_way_pipeline(depth, min(2, depth), 2 * depth, size, rates, chunks)


def pipelined_tree(world: int, size: float, rates: UniformRates, chunks: int | None = None) -> Form:
    """Return the time of a balanced binary tree in chunks, each going down as soon as it is summed."""
    depth = _lg_up(world + 1) - 1
    through = min(3 if world > 4 else 2, world - 1)
    return _two_way_pipeline(depth, through, max(2, 4 * depth - 3 if through == 3 else 4), size, rates, chunks)


def double_tree(world: int, size: float, rates: UniformRates, chunks: int | None = None) -> Form:
    """Return the time of two trees with half of the bytes each, so that all ports are busy both ways.

    2 lg p alpha + 2 N beta + O(sqrt(alpha beta N lg p))      (Sanders, Speck and Traeff 2009). `chunks` is of a half.
    """
    depth = _lg_up(world)
    return _two_way_pipeline(depth, 2 if world > 2 else 1, max(3, 2 * depth - 2), size, rates, chunks)


def hierarchical(groups: int, each: int, size: float, inner: UniformRates, outer: UniformRates) -> Form:
    """Return the time of rings in `groups` groups of `each` ranks, and rings between ranks of the same place.

    A rank sends 2 (n-1)/n N / G bytes outside its group, so a group sends the same whatever G is. `outer.beta` is
    that of one rank's share of its group's port.
    """
    inside, between = ring(each, size, inner), ring(groups, size / each, outer)
    return Form(
        inside.steps + between.steps, inside.sent + between.sent, inside.waiting + between.waiting,
        inside.flowing + between.flowing, inside.summing + between.summing,
    )  # fmt: skip


def best_chunks(filling: float, size: float, rates: UniformRates) -> int:
    """Return the number k of chunks that makes k alpha + filling N beta / k least: sqrt(filling N beta / alpha).

    `filling` is how many chunks pass through a port while the pipeline fills and runs empty.
    """
    if filling <= 0 or size <= 0:
        return 1
    if rates.alpha <= 0:
        return MOST_CHUNKS
    best = math.sqrt(filling * size * rates.beta / rates.alpha)
    low = min(max(int(best), 1), MOST_CHUNKS)

    def time(count: int) -> float:
        return count * rates.alpha + filling * size * rates.beta / count

    return min((low, min(low + 1, MOST_CHUNKS)), key=time)


FORMS: Mapping[str, Callable[[int, float, UniformRates], Form]] = {
    "root": root, "cpu": on_cpu, "sharded": sharded, "one-shot": one_shot, "chain": chain,
    "pipelined-chain": pipelined_chain, "ring": ring, "bidirectional-ring": ring, "tree": tree,
    "pipelined-tree": pipelined_tree, "double-tree": double_tree, "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
}  # fmt: skip
"""The form of each strategy that needs nothing but the number of ranks. One port leads to both neighbours of a ring,
so both directions are no faster."""


def _phases(steps: int, sent: float, through: float, added: float, rates: UniformRates) -> Form:
    if through <= 0 and added <= 0:
        return Form(steps, sent, steps * rates.alpha, 0.0)
    return Form(steps, sent, steps * rates.alpha, through * rates.beta, added * rates.gamma)


def _two_way_pipeline(
    depth: int, through: float, filled: float, size: float, rates: UniformRates, chunks: int | None
) -> Form:  # fmt: skip
    if depth < 1:
        return Form(0, 0.0, 0.0, 0.0)
    count = chunks or best_chunks(filled - through, size, rates)
    turns, piece = 2 * depth + count - 1, size / count
    flowing = (through * (count - 1) + filled) * piece * rates.beta
    return Form(turns, through * size, turns * rates.alpha, flowing, depth * piece * rates.gamma, count)


def _lg_up(world: int) -> int:
    return (world - 1).bit_length()
