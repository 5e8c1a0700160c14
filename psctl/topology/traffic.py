"""Who sends how much to whom in each way to synchronise, and how long the cables take for it.

A way is a few phases, one after the other. The bytes of a phase are laid over the cables that they cross; its fullest
cable decides, and every step adds the latency of its slowest message. A pipelined phase fills up first: with s steps of
latency a and a time B for its bytes, the best number of pieces gives (sqrt(s a) + sqrt(B))² (FORMULAS 2.2). This is
arithmetic on the topology alone: no software, no sharing that a simulation would show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psctl.topology.rings import Rings
from psctl.topology.roads import Arc, Roads
from psctl.topology.trees import Packing

Move = tuple[str, str, float]
"""From, to, bytes."""


class Phase(msgspec.Struct, frozen=True):
    """What is sent at the same time. `steps` is the number of messages that wait for each other."""

    moves: tuple[Move, ...]
    steps: int = 1
    pipelined: bool = False


def loads(phases: Iterable[Phase], roads: Roads) -> dict[Arc, float]:
    """Return the bytes over each cable in each direction in all phases together."""
    found: dict[Arc, float] = {}
    for phase in phases:
        for a, b, size in phase.moves:
            for arc in roads.road(a, b):
                found[arc] = found.get(arc, 0.0) + size
    return found


def busy(load: Mapping[Arc, float], roads: Roads) -> float:
    """Return the seconds that the fullest cable needs for its bytes."""
    return max((size / roads.bandwidth[arc] for arc, size in load.items()), default=0.0)


def seconds(phases: Iterable[Phase], roads: Roads) -> float:
    """Return the predicted time of phases that follow each other; infinite when some pair has no way."""
    return math.fsum(_phase_seconds(phase, roads) for phase in phases)


def _phase_seconds(phase: Phase, roads: Roads) -> float:
    ways = [roads.road(a, b) for a, b, _ in phase.moves]
    if not all(ways):
        return math.inf
    wait = phase.steps * max((roads.latency(way) for way in ways), default=0.0)
    carry = busy(loads((phase,), roads), roads)
    return (math.sqrt(wait) + math.sqrt(carry)) ** 2 if phase.pipelined else wait + carry


def ring(order: Sequence[str], size: float, both: bool = False) -> tuple[Phase, ...]:
    """Chunks round a ring: 2(p-1) steps, 2(p-1)/p of the bytes over each cable, or half of it in each direction."""
    count = len(order)
    part = 2 * (count - 1) / count * size / (2 if both else 1)
    ahead = list(zip(order, (*order[1:], order[0]), strict=True))
    back = [(b, a) for a, b in ahead] if both else []
    return (Phase(tuple((a, b, part) for a, b in ahead + back), 2 * (count - 1)),)


def multi_ring(found: Rings, size: float) -> tuple[Phase, ...]:
    """All rings at once, in both directions, each with its share."""
    parts = [ring(one.order, size * share, both=True)[0] for one, share in zip(found.rings, found.shares, strict=True)]
    return (Phase(tuple(move for part in parts for move in part.moves), max(part.steps for part in parts)),)


def packed_trees(found: Packing, size: float) -> tuple[Phase, ...]:
    """All trees at once, up and down in a pipeline, each with its share."""
    moves = [
        move
        for tree, share in zip(found.trees, found.shares, strict=True)
        for a, b in tree.edges
        for move in ((a, b, size * share), (b, a, size * share))
    ]
    return (Phase(tuple(moves), 2 * max(tree.depth for tree in found.trees), pipelined=True),)


def sharded(ranks: Sequence[str], size: float) -> tuple[Phase, ...]:
    """Each rank sums a part of what all send it, then gives it to all."""
    return (Phase(_everyone(ranks, size / len(ranks))),) * 2


def one_shot(ranks: Sequence[str], size: float) -> tuple[Phase, ...]:
    """Everyone sends everything to everyone."""
    return (Phase(_everyone(ranks, size)),)


def root(ranks: Sequence[str], size: float, at: str) -> tuple[Phase, ...]:
    """All send to one place, one after the other, and it sends the sum to each."""
    others = [rank for rank in ranks if rank != at]
    moves = [(rank, at, size) for rank in others]
    return Phase(tuple(moves), len(others)), Phase(tuple((b, a, part) for a, b, part in moves), len(others))


def halving_doubling(ranks: Sequence[str], size: float) -> tuple[Phase, ...]:
    """Halves, quarters ... with the rank 1, 2, 4 ... places away; ranks beyond a power of two join another first."""
    core, before, after = _core(ranks, size)
    rounds = len(core).bit_length() - 1
    halves = [Phase(_exchange(core, 1 << at, size / 2 ** (at + 1))) for at in range(rounds)]
    return (*before, *halves, *halves[::-1], *after)


def recursive_doubling(ranks: Sequence[str], size: float) -> tuple[Phase, ...]:
    """Everything with the rank 1, 2, 4 ... places away."""
    core, before, after = _core(ranks, size)
    return (*before, *(Phase(_exchange(core, 1 << at, size)) for at in range(len(core).bit_length() - 1)), *after)


def double_tree(ranks: Sequence[str], size: float) -> tuple[Phase, ...]:
    """Half over a binary tree, half over one whose leaves are the first one's inner ranks; in a pipeline."""
    count = len(ranks)
    steps = 2 * max(1, math.ceil(math.log2(count)))
    moves = []
    for order in (list(ranks), list(ranks)[::-1]):
        for at in range(1, count):
            above = (at - 1) // 2
            moves += [(order[at], order[above], size / 2), (order[above], order[at], size / 2)]
    return (Phase(tuple(moves), steps, pipelined=True),)


def servers(workers: Sequence[str], parts: Mapping[str, float], size: float) -> tuple[Phase, ...]:
    """Every worker sends each server its part and gets it back, keys overlapping; a message a server (FORMULAS 2.3)."""
    pairs = [(worker, host, size * part) for worker in workers for host, part in parts.items() if _apart(worker, host)]
    moves = [move for worker, host, part in pairs for move in ((worker, host, part), (host, worker, part))]
    return (Phase(tuple(moves), 2 * len(parts)),)


def _apart(worker: str, host: str) -> bool:
    return worker != host and not worker.startswith(f"{host}/")


def _everyone(ranks: Sequence[str], size: float) -> tuple[Move, ...]:
    return tuple((a, b, size) for a in ranks for b in ranks if a != b)


def _exchange(ranks: Sequence[str], distance: int, size: float) -> tuple[Move, ...]:
    return tuple((rank, ranks[at ^ distance], size) for at, rank in enumerate(ranks))


def _core(ranks: Sequence[str], size: float) -> tuple[list[str], list[Phase], list[Phase]]:
    """As many ranks as the largest power of two; what the others send to them first, and get back at last."""
    extra = len(ranks) - (1 << len(ranks).bit_length() - 1)
    if not extra:
        return list(ranks), [], []
    pairs = [(ranks[2 * at + 1], ranks[2 * at]) for at in range(extra)]
    core = [*(ranks[2 * at] for at in range(extra)), *ranks[2 * extra :]]
    up = Phase(tuple((a, b, size) for a, b in pairs))
    return core, [up], [Phase(tuple((b, a, size) for a, b in pairs))]
