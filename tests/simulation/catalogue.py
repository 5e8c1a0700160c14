"""The simulations by name, and a batch of seeds of one of them."""

from __future__ import annotations

import gc
from collections.abc import Callable

from tests.simulation.chain_run import run_chain
from tests.simulation.leadership_run import run_leadership
from tests.simulation.outcome import Outcome
from tests.simulation.store_run import run_backward, run_racks, run_store
from tests.simulation.table_run import run_tables
from tests.simulation.takeover_run import run_takeovers

SIMULATIONS = {
    "store": run_store, "chain": run_chain, "tables": run_tables, "takeover": run_takeovers,
    "leadership": run_leadership, "racks": run_racks, "backward": run_backward,
}  # fmt: skip

RUNS_PER_COLLECTION = 20
"""Runs between two garbage collections."""


def run_seeds(simulation: str, first: int, count: int) -> list[Outcome]:
    """Run consecutive seeds. Garbage is collected between runs only, which is faster."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return [_run_seed(SIMULATIONS[simulation], seed) for seed in range(first, first + count)]
    finally:
        gc.enable()


def _run_seed(run: Callable[[int], Outcome], seed: int) -> Outcome:
    outcome = run(seed)
    if seed % RUNS_PER_COLLECTION == 0:
        gc.collect()
    return outcome
