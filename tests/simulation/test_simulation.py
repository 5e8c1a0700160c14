"""Every invariant holds for a few hundred seeds, a seed determines its run, and every mutant is caught.

`make simulate SEEDS=10000` runs many seeds; `python -m tests.simulation --replay SEED` prints the messages of one.
"""

from __future__ import annotations

import pytest

from tests.simulation.catalogue import SIMULATIONS
from tests.simulation.mutants import MUTANTS, Mutant, StaleMutant, hunt, planted
from tests.simulation.store_run import run_store

SEEDS = {"store": 100, "chain": 150, "tables": 24, "takeover": 80, "leadership": 240, "racks": 60, "backward": 60}
"""Seeds that take a few seconds; `make simulate` runs thousands."""

GROUPS = 2


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("simulation", sorted(SIMULATIONS))
def test_every_invariant_holds_in_every_run(simulation: str, group: int) -> None:
    for seed in range(group, SEEDS[simulation], GROUPS):
        outcome = SIMULATIONS[simulation](seed)
        replay = f"python -m tests.simulation --what {simulation} --replay {seed}"
        assert not outcome.invariant, f"seed {seed}: {outcome.text}\nreplay: {replay}"


FOUND = {
    845: "an elastic job lost examples of a lost host",
    3966: "two kills of worker/0 before its first step ended the job",
    39648: "a replacement that was moved took a place in another host's sums",
    52196: "values were overwritten that a leaving worker still read",
    126279: "the replacement of a worker that had left waited for ever",
    159610: "a leaving worker was expected to send the numbers of a clock",
}


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_a_defect_holds(seed: int) -> None:
    outcome = run_store(seed)
    assert not outcome.invariant, f"{FOUND[seed]}: {outcome.text}"


def test_a_seed_determines_the_whole_run() -> None:
    for seed in (3, 8, 21):
        first, second = run_store(seed, traced=True), run_store(seed, traced=True)
        assert first.trace == second.trace
        assert len(first.trace) > 50


LONG = (
    "no own pushes after a host's sum is given up", "a host is not summed first", "tables: a group dropped whole",
    "orders are never dropped", "tables: a group applied whole", "acknowledge before the replica",
)  # fmt: skip
"""Mutants whose seed takes seconds; `make simulate` plants them all."""


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, id=mutant.name, marks=pytest.mark.soak if mutant.name in LONG else ()) for mutant in MUTANTS],
)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    assert hunt(mutant, mutant.first_seed) is not None, f"{mutant.seed_limit} seeds did not catch: {mutant.name}"


def test_a_mutant_of_a_missing_method_is_an_error() -> None:
    renamed = Mutant("renamed", ((Mutant, "no_such_method", lambda method: method),), 0)
    with pytest.raises(StaleMutant, match=r"Mutant\.no_such_method"), planted(renamed):
        pass
