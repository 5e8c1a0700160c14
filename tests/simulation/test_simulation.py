"""A few hundred seeds of the simulator, that a seed replays, and that the judge is awake: planted bugs are caught.

`make simulate SEEDS=10000` runs many; `python -m tests.simulation --replay SEED` prints one run message by message.
"""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, StaleMutant, hunt, planted
from tests.simulation.play import play
from tests.simulation.plays import PLAYS

SEEDS = {"store": 160, "chain": 300, "tables": 40}
"""What fits into a few seconds each."""

GROUPS = 4


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("what", sorted(PLAYS))
def test_every_invariant_holds_in_every_run(what: str, group: int) -> None:
    for seed in range(group, SEEDS[what], GROUPS):
        outcome = PLAYS[what](seed)
        replay = f"python -m tests.simulation --what {what} --replay {seed}"
        assert not outcome.broken, f"seed {seed}: {outcome.text}\nreplay: {replay}"


def test_a_seed_determines_the_whole_run() -> None:
    for seed in (3, 8, 21):
        first, second = play(seed, traced=True), play(seed, traced=True)
        assert first.trace == second.trace
        assert len(first.trace) > 50


LONG = (
    "nobody is asked when a host's sum is given up", "a host is not summed first", "tables: a group dropped whole",
    "orders are kept for ever", "tables: a group taken in whole", "acknowledge before the replica",
)  # fmt: skip
"""Planted bugs whose seed takes seconds; `make simulate` plants all of them too."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, id=mutant.name, marks=pytest.mark.soak if mutant.name in LONG else ()) for mutant in MUTANTS],
)
def test_a_planted_bug_is_caught(mutant: Mutant) -> None:
    assert hunt(mutant, mutant.known) is not None, f"{mutant.within} seeds did not catch: {mutant.name}"


def test_a_mutant_of_a_missing_method_is_an_error() -> None:
    renamed = Mutant("renamed", ((Mutant, "no_such_method", lambda method: method),), 0)
    with pytest.raises(StaleMutant, match=r"Mutant\.no_such_method"), planted(renamed):
        pass
