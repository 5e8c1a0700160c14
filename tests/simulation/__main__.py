"""`python -m tests.simulation`: run many seeds, or one with every message written down.

    python -m tests.simulation --seeds 10000 --from 0 --jobs 2      (make simulate SEEDS=10000)
    python -m tests.simulation --replay 4711                        prints the trace of that seed
    python -m tests.simulation --mutants                            how soon each planted bug is caught

`--what chain` runs the chain of replicas alone (chained.py), `--what tables` what `run.store()` stands on (tables.py);
else it is the whole store under the job's own machine, or under the director that moves everything at random.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.mutants import MUTANTS, hunt
from tests.simulation.play import Outcome
from tests.simulation.plays import PLAYS, play_some

CHUNK = 50

LONGEST = 600
"""Characters of a failure that are printed among others; a replay prints all."""


def main() -> int:
    """Run; the exit status is 1 when an invariant did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--what", choices=sorted(PLAYS), default="store", help="what is simulated")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds even when one fails")
    parser.add_argument("--replay", type=int, help="run this seed alone and print its trace")
    parser.add_argument("--mutants", action="store_true", help="plant each bug and print what catches it")
    asked = parser.parse_args()
    if asked.mutants:
        return _mutants(asked.first)
    if asked.replay is not None:
        return _replay(asked.what, asked.replay)
    return _many(asked.what, asked.first, asked.seeds, asked.jobs, asked.keep_going)


def _replay(what: str, seed: int) -> int:
    outcome = PLAYS[what](seed, traced=True)
    print("\n".join(outcome.trace))
    print(f"seed {seed}: {outcome.text or 'every invariant holds'}")
    return 1 if outcome.broken else 0


def _mutants(first: int) -> int:
    print(f"{'mutant':52} {'seeds':>6}  caught by")
    alive = 0
    for mutant in MUTANTS:
        found = hunt(mutant, first)
        alive += found is None
        seeds, by = (str(found[0]), found[1].broken) if found else (f">{mutant.within}", "nothing")
        print(f"{mutant.name:52} {seeds:>6}  {by}", flush=True)
    return 1 if alive else 0


def _many(what: str, first: int, count: int, jobs: int, keep_going: bool) -> int:
    began, done, failed, simulated, read = time.monotonic(), 0, list[Outcome](), 0.0, 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        starts = range(first, first + count, CHUNK)
        tasks = [pool.submit(play_some, what, start, min(CHUNK, first + count - start)) for start in starts]
        for task in tasks:
            for outcome in task.result():
                done, simulated, read = done + 1, simulated + outcome.seconds, read + outcome.read
                if outcome.broken:
                    failed.append(outcome)
                    print(f"seed {outcome.seed}: {outcome.text[:LONGEST]}", flush=True)
                    print(f"    replay: python -m tests.simulation --what {what} --replay {outcome.seed}", flush=True)
            if failed and not keep_going:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - began
    print(f"{what}: {done} seeds, {len(failed)} failed, {seconds:.1f} s ({done / seconds:.0f} seeds/s), "
          f"{simulated / 3600:.1f} h simulated, {read} values compared")  # fmt: skip
    if failed:
        kinds = Counter(outcome.broken for outcome in failed).most_common()
        print("by invariant: " + ", ".join(f"{name} {times}" for name, times in kinds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
