"""Run seeds of the simulator: `python -m tests.simulation`.

    python -m tests.simulation --seeds 10000 --from 0 --jobs 2      (make simulate SEEDS=10000)
    python -m tests.simulation --replay 4711                        prints the trace of that seed
    python -m tests.simulation --mutants                            how soon each mutant is caught

`--what chain` runs one chain of replicas (chain_run.py), `--what tables` the tables of `run.store()` (table_run.py),
`--what takeover` a coordinator that is killed (takeover_run.py), `--what leadership` the election of another leader
(leadership_run.py); the default is a whole job (store_run.py), `racks` one that sums gradients by rack, and `backward`
one that steps some shards in backward.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.catalogue import SIMULATIONS, run_seeds
from tests.simulation.mutants import MUTANTS, hunt
from tests.simulation.outcome import Outcome

CHUNK = 50

LONGEST = 600
"""Characters of a failure that are printed; a replay prints all."""


def main() -> int:
    """Run; return 1 when an invariant did not hold, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--what", choices=sorted(SIMULATIONS), default="store", dest="simulation", help="the simulation"
    )
    parser.add_argument("--keep-going", action="store_true", help="run all seeds even when one fails")
    parser.add_argument("--replay", type=int, help="run this seed alone and print its trace")
    parser.add_argument("--mutants", action="store_true", help="plant each bug and print simulation catches it")
    args = parser.parse_args()
    if args.mutants:
        return _mutants(args.first)
    if args.replay is not None:
        return _replay(args.simulation, args.replay)
    return _many(args.simulation, args.first, args.seeds, args.jobs, args.keep_going)


def _replay(simulation: str, seed: int) -> int:
    outcome = SIMULATIONS[simulation](seed, traced=True)
    print("\n".join(outcome.trace))
    print(f"seed {seed}: {outcome.text or 'every invariant holds'}")
    return 1 if outcome.invariant else 0


def _mutants(first: int) -> int:
    print(f"{'mutant':52} {'seeds':>6}  caught by")
    alive = 0
    for mutant in MUTANTS:
        found = hunt(mutant, first)
        alive += found is None
        seeds, by = (str(found[0]), found[1].invariant) if found else (f">{mutant.seed_limit}", "nothing")
        print(f"{mutant.name:52} {seeds:>6}  {by}", flush=True)
    return 1 if alive else 0


def _many(simulation: str, first: int, count: int, jobs: int, keep_going: bool) -> int:
    began, done, failed, simulated, values_checked = time.monotonic(), 0, list[Outcome](), 0.0, 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        starts = range(first, first + count, CHUNK)
        tasks = [pool.submit(run_seeds, simulation, start, min(CHUNK, first + count - start)) for start in starts]
        for task in tasks:
            for outcome in task.result():
                done, simulated, values_checked = (
                    done + 1,
                    simulated + outcome.seconds,
                    values_checked + outcome.values_checked,
                )
                if outcome.invariant:
                    failed.append(outcome)
                    print(f"seed {outcome.seed}: {outcome.text[:LONGEST]}", flush=True)
                    print(
                        f"    replay: python -m tests.simulation --what {simulation} --replay {outcome.seed}",
                        flush=True,
                    )
            if failed and not keep_going:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - began
    print(f"{simulation}: {done} seeds, {len(failed)} failed, {seconds:.1f} s ({done / seconds:.0f} seeds/s), "
          f"{simulated / 3600:.1f} h simulated, {values_checked} values compared")  # fmt: skip
    if failed:
        kinds = Counter(outcome.invariant for outcome in failed).most_common()
        print("by invariant: " + ", ".join(f"{name} {times}" for name, times in kinds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
