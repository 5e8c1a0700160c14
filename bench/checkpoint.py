"""Time that a checkpoint of 100 MB takes from training, on this machine's two cores.

    python bench/checkpoint.py [--cases server,worker,ring] [--every 8] [--saves 7] [--compute 1.0]

A step's compute is time on a device (checkpoint_job/train.py), so the processors are free for what a checkpoint needs
beside training. Within one job, periods of `--every` steps with a checkpoint follow each other, so the steps without
one are measured by turns with those that have one. For each checkpoint it takes

- the step: how much longer the step after the capture takes than the median step without a checkpoint;
- the period: how much longer all steps from the capture to the next one take. What is written, hashed, sealed and read
  back beside training is in it.

It prints medians over the checkpoints of one job, of the slowest worker, as Markdown for docs/internals/checkpoints.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CASES = {
    "server": ["sync.strategy=ps", "sync.update=server"],
    "worker": ["sync.strategy=ps", "sync.update=worker"],
    "ring": ["sync.strategy=ring"],
}
"""What is set in the job file."""

WARM = 1
"""Periods at the start that are not counted."""


def train(case: str, every: int, saves: int, compute: float, more: list[str]) -> tuple[list[list[float]], list[float]]:
    """Run one job; return the seconds of each worker's steps, and those from each capture to a whole checkpoint."""
    steps = every * (saves + WARM + 1)
    settings = [*CASES[case], f"checkpoint.every={every} steps", *more]
    settings.append(f'args=["--compute", "{compute}", "--steps", "{steps}"]')
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "checkpoint_job" / "job.yaml"), "-o", "jsonl",
             *(word for each in settings for word in ("--set", each))],
            env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PSCTL_HOME": f"{home}/psctl"},
            capture_output=True, text=True, timeout=3600, check=False, cwd=home,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    texts = [event["text"] for event in events if event["event"] == "log"]
    written = [event["seconds"] for event in events if event["event"] == "checkpoint"]
    return [json.loads(text.removeprefix("measured ")) for text in texts if text[:9] == "measured "], written


def line(case: str, every: int, workers: list[list[float]], written: list[float]) -> str:
    """Return a row of the table."""
    steps = [max(each) for each in zip(*workers, strict=True)]
    last = len(steps) // every
    captured = [number * every for number in range(WARM, last)]  # index of the step after each capture
    plain = [seconds for at, seconds in enumerate(steps) if at >= WARM * every and at % every == every - 1]
    usual = statistics.median(plain)
    step = [steps[at] - usual for at in captured]
    period = [sum(steps[at : at + every]) - every * usual for at in captured]
    middle, least, most = (of(step) * 1e3 for of in (statistics.median, min, max))
    whole = f"{statistics.median(period) * 1e3:.0f} | {statistics.median(written):.2f}"
    return f"| {case} | {usual:.3f} | {middle:.0f} ({least:.0f} to {most:.0f}) | {whole} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="server,worker,ring")
    parser.add_argument("--every", type=int, default=8, help="steps of a period")
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of a step on the device")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="as psctl train --set")
    given = parser.parse_args()
    print("| case | step s | longer step ms | longer period ms | capture to whole s |")
    print("|---|---|---|---|---|", flush=True)
    for case in given.cases.split(","):
        workers, written = train(case, given.every, given.saves, given.compute, given.settings)
        print(line(case, given.every, workers, written), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
