"""`python -m tests.torture`: random faults on test hosts for hours, and after each the promises of docs/failures.md.

    python -m tests.torture --hours 1            (make torture HOURS=1)
    python -m tests.torture --seed 4711          the same faults again, once
    python -m tests.torture --only power,lossy   some of them

Needs root, as all test hosts do. The faults and their order follow from the seed; the moments at which they hit do not
entirely, because real processes take different times. The exit status is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path

from tests.helpers.hosts import Hosts, missing
from tests.helpers.job_on_hosts import reference_values
from tests.torture.faults import FAULTS, STRATEGIES
from tests.torture.promises import promise_of
from tests.torture.trial import Trial, choose, choose_strategy

RATE = "500mbit"
EPOCHS = 200
"""Of the undisturbed run: of ten steps each, which take two seconds in a trial."""


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main() -> int:
    """Run trials until the time is over."""
    names = ", ".join(fault.name for fault in FAULTS)
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__, epilog=f"Faults: {names}.")
    parser.add_argument("--hours", type=float, default=1.0, help="after which no further trial begins")
    parser.add_argument("--seed", type=int, help="run one trial, with this seed")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed")
    parser.add_argument("--only", default="", help="faults to choose from, with commas")
    parser.add_argument("--strategy", choices=STRATEGIES, default="", help="of all jobs; two of three are of ps")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    unknown = sorted(set(only) - {fault.name for fault in FAULTS})
    if unknown:
        parser.error(f"--only: no such fault: {', '.join(unknown)}; there are {names}")
    if reason := missing():
        say(f"not run: {reason}")
        return 2
    for fault in FAULTS:
        promise_of(fault.name)
    return _torture(
        [given.seed] if given.seed is not None else None, given.first, given.hours * 3600, only, given.strategy
    )


def _torture(seeds: list[int] | None, first: int, seconds: float, only: list[str], strategy: str) -> int:
    times: dict[str, list[float]] = defaultdict(list)
    broken: list[int] = []
    with tempfile.TemporaryDirectory(prefix="psctl-torture-") as folder:
        say("undisturbed run ...")
        references = {
            each: reference_values(Path(folder) / f"undisturbed-{each}", EPOCHS, workers=3, strategy=each)
            for each in ([strategy] if strategy else STRATEGIES)
        }
        end, seed = time.monotonic() + seconds, first
        while seeds or (seeds is None and time.monotonic() < end):
            seed = seeds.pop() if seeds else seed
            if not _one(seed, Path(folder), references, only, times):
                broken.append(seed)
            seed += 1
    _report(times, broken)
    return 1 if broken else 0


def _one(
    seed: int, folder: Path, references: dict[str, dict[int, str]], only: list[str], times: dict[str, list[float]]
) -> bool:  # fmt: skip
    chance = random.Random(seed)
    strategy = choose_strategy(chance)
    if strategy not in references:
        (strategy,) = references
    faults = choose(chance, only, strategy)
    say(f"seed {seed}, {strategy}: {', '.join(fault.name for fault in faults)}")
    try:
        with Hosts(3, RATE) as hosts:
            for name, took in Trial(hosts, folder / str(seed), chance, RATE, strategy).run(
                faults, references[strategy], say
            ):
                times[name if strategy == "ps" else f"{name} ({strategy})"].append(took)
    except Exception:  # noqa: BLE001 - whatever it is, the run goes on with the next seed and reports it
        say(traceback.format_exc())
        more = f" --strategy {strategy}" if len(references) == 1 else ""
        say(f"    replay: python -m tests.torture --seed {seed}{' --only ' + ','.join(only) if only else ''}{more}")
        return False
    return True


def _report(times: dict[str, list[float]], broken: list[int]) -> None:
    say(f"{'fault':26} {'times':>5} {'median s':>9} {'most s':>7}  promised")
    for name in sorted(times):
        found = times[name]
        pause = promise_of(name.split()[0]).pause or "-"
        say(f"{name:26} {len(found):>5} {statistics.median(found):>9.1f} {max(found):>7.1f}  {pause}")
    say(f"{len(broken)} trials broke a promise: seeds {broken}" if broken else "every promise held")


if __name__ == "__main__":
    sys.exit(main())
