"""`python -m tests.simulation`: run many seeds, or one with every message written down.

python -m tests.simulation --seeds 10000 --from 0 --jobs 2      (make simulate SEEDS=10000)
python -m tests.simulation --replay 4711                        prints the trace of that seed
python -m tests.simulation --mutants                            how soon each planted bug is caught
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .mutants import MUTANTS, hunt
from .play import Outcome, play, play_some

CHUNK = 50

LONGEST = 600
"""Characters of a failure that are printed among others; a replay prints all."""


def main() -> int:
    """Run; the exit status is 1 when an invariant did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds even when one fails")
    parser.add_argument("--replay", type=int, help="run this seed alone and print its trace")
    parser.add_argument("--mutants", action="store_true", help="plant each bug and print what catches it")
    asked = parser.parse_args()
    if asked.mutants:
        return _mutants(asked.first)
    if asked.replay is not None:
        return _replay(asked.replay)
    return _many(asked.first, asked.seeds, asked.jobs, asked.keep_going)


def _replay(seed: int) -> int:
    outcome = play(seed, traced=True)
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


def _many(first: int, count: int, jobs: int, keep_going: bool) -> int:
    began, done, failed, simulated, read = time.monotonic(), 0, list[Outcome](), 0.0, 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [
            pool.submit(play_some, start, min(CHUNK, first + count - start))
            for start in range(first, first + count, CHUNK)
        ]
        for task in tasks:
            for outcome in task.result():
                done, simulated, read = done + 1, simulated + outcome.seconds, read + outcome.read
                if outcome.broken:
                    failed.append(outcome)
                    print(f"seed {outcome.seed}: {outcome.text[:LONGEST]}\n"
                          f"    replay: python -m tests.simulation --replay {outcome.seed}", flush=True)  # fmt: skip
            if failed and not keep_going:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - began
    print(f"{done} seeds, {len(failed)} failed, {seconds:.1f} s ({done / seconds:.0f} seeds/s), "
          f"{simulated / 3600:.1f} h simulated, {read} shards read and compared")  # fmt: skip
    if failed:
        print(
            "by invariant: " + ", ".join(f"{name} {n}" for name, n in Counter(f.broken for f in failed).most_common())
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
