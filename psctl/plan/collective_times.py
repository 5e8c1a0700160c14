"""Closed forms of the collectives that are no all-reduce, on equal links (Thakur, Rabenseifner and Gropp 2005).

n is the bytes of the whole vector; of an all-to-all, what one rank has for all.

    broadcast       tree ceil(lg p)(alpha + n beta)            ring (lg p + p - 1) alpha + 2(p-1)/p n beta
    reduce          the same backwards, with n gamma for each message that is added
    scatter, gather tree lg p alpha + (p-1)/p n beta           root alpha + (p-1)/p n beta, (p-1) alpha one by one
    all-gather      ring (p-1) alpha + (p-1)/p n beta          doubling ceil(lg p) alpha + (p-1)/p n beta
    reduce-scatter  the same, with (p-1)/p n gamma
    all-to-all      ring (p-1) alpha + (p-1)/p n beta          doubling lg p alpha + n/2 lg p beta

`sharded` is one start-up and (p-1)/p n beta: all peers at once share a port. A chain and a binary tree are pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from psctl.plan.allreduce_times import Form, UniformRates, best_chunks

_Made = Callable[[int, float, UniformRates, int], Form]


def collective(name: str, algorithm: str, world: int, size: float, rates: UniformRates, chunks: int = 1) -> Form:
    """Return the time of a collective.

    Args:
        name: the collective.
        algorithm: as `schedule/algorithms/collectives.py` names it; not packed-trees.
        world: ranks.
        size: bytes of the vector; for an all-to-all what one rank has for all.
        rates: of every port.
        chunks: of a pipelined broadcast or reduce; 0 takes the best number.

    Raises:
        KeyError: no form for it; the caller's fault.
    """
    adds = name in ("reduce", "reduce-scatter")
    form = _FORMS[_SPREAD_OF.get(name, name), algorithm](world, size, rates, chunks)
    if not adds:
        return form
    added = form.flowing / rates.beta if rates.beta else 0.0
    if algorithm == "ring" and name == "reduce":
        added /= 2  # the gather behind it adds nothing
    return Form(form.steps, form.sent, form.waiting, form.flowing, added * rates.gamma, form.chunks)


def pipeline(depth: int, size: float, rates: UniformRates, through: float = 1.0, chunks: int | None = None) -> Form:
    """Return the time of `size` bytes through `depth` stages in chunks.

    Args:
        depth: stages, one message behind the other.
        size: bytes.
        rates: of every stage.
        through: how often the busiest port carries each byte.
        chunks: how many; None takes the best number.
    """
    if depth < 1:
        return Form(0, 0.0, 0.0, 0.0)
    count = chunks or best_chunks((depth - 1) * through, size, rates)
    turns = depth + count - 1
    return Form(turns, size * through, turns * rates.alpha, turns * through * size / count * rates.beta, 0.0, count)


def _plain(turns: Callable[[int], float], through: Callable[[int], float]) -> _Made:
    """Make a form of so many messages behind each other, and so many times the vector through the busiest port."""

    def form(world: int, size: float, rates: UniformRates, chunks: int) -> Form:
        moved = through(world) * size
        return Form(round(turns(world)), moved, turns(world) * rates.alpha, moved * rates.beta)

    return form


def _chain(world: int, size: float, rates: UniformRates, chunks: int) -> Form:
    return pipeline(world - 1, size, rates, 1, chunks or None)


def _tree(world: int, size: float, rates: UniformRates, chunks: int) -> Form:
    return pipeline(world.bit_length() - 1, size, rates, min(2, world - 1), chunks or None)


def _lg(world: int) -> int:
    return (world - 1).bit_length()


def _one(world: int) -> int:
    return min(1, world - 1)


def _rest(world: int) -> int:
    return world - 1


def _part(world: int) -> float:
    return (world - 1) / world


_SPREAD_OF: Mapping[str, str] = {"reduce": "broadcast", "reduce-scatter": "all-gather", "gather": "scatter"}

_FORMS: Mapping[tuple[str, str], _Made] = {
    ("broadcast", "tree"): _plain(_lg, _lg),
    ("broadcast", "root"): _plain(_one, _rest),
    ("broadcast", "pipelined-chain"): _chain,
    ("broadcast", "pipelined-tree"): _tree,
    ("broadcast", "ring"): _plain(lambda world: _lg(world) + world - 1, lambda world: 2 * _part(world)),
    ("scatter", "tree"): _plain(_lg, _part),
    ("scatter", "root"): _plain(_one, _part),
    ("all-gather", "ring"): _plain(_rest, _part),
    ("all-gather", "sharded"): _plain(_one, _part),
    ("all-gather", "recursive-doubling"): _plain(_lg, _part),
    ("all-to-all", "ring"): _plain(_rest, _part),
    ("all-to-all", "sharded"): _plain(_one, _part),
    ("all-to-all", "recursive-doubling"): _plain(_lg, lambda world: _lg(world) / 2),
}
