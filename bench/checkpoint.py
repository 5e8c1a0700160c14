"""Measures how long a save stops training, for a model of 100 MB on this machine.

    python bench/checkpoint.py [--compute 1.0] [--saves 5]

Runs psctl's own worker and server processes under `ps` with the optimizer on servers, `ps` with it on workers, and
`ring` of two workers. Prints for each the median step without a save, the median of the call that saves, the median
step after a save (during which its bytes are sent), and the pause in milliseconds and as part of a step. The pause is
what a save adds to its own step and to the step after it.
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
EVERY = 10
RUNS = {
    "ps, update server": ["--strategy", "ps", "--workers", "1", "--servers", "1", "--set", "sync.update=server"],
    "ps, update worker": ["--strategy", "ps", "--workers", "1", "--servers", "1", "--set", "sync.update=worker"],
    "ring": ["--strategy", "ring", "--workers", "2"],
}


def measured(words: list[str], compute: float, saves: int) -> list[dict[str, float]]:
    """Run the job; return the steps of rank 0."""
    with tempfile.TemporaryDirectory(prefix="psctl-saving-") as home:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PSCTL_HOME": f"{home}/psctl"}
        arguments = json.dumps(["--compute", str(compute), "--saves", str(saves)])
        command = [
            sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "checkpoint_job" / "job.yaml"), "-o", "jsonl",
            "--set", f"args={arguments}", *words,
        ]  # fmt: skip
        done = subprocess.run(command, cwd=home, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    texts = [event["text"] for event in events if event["event"] == "log" and event["text"].startswith("measured ")]
    steps = [json.loads(text.removeprefix("measured ")) for text in texts]
    return [step for step in steps if step["rank"] == 0]


def row(steps: list[dict[str, float]]) -> str:
    """Return one line of the result."""
    after = {step["step"] + 1 for step in steps if step["saves"]}
    plain = [s["seconds"] for s in steps if not s["saves"] and s["step"] not in after and s["step"] > 2]
    usual = statistics.median(plain)
    saving = [step for step in steps if step["saves"]]
    call = statistics.median(step["report"] for step in saving)
    own = statistics.median(step["seconds"] for step in saving)
    following = statistics.median(step["seconds"] for step in steps if step["step"] in after)
    pause = max(0.0, own - usual) + max(0.0, following - usual)
    return (
        f"step {usual * 1e3:.0f} ms, call that saves {call * 1e3:.0f} ms, step with it {own * 1e3:.0f} ms, step after "
        f"it {following * 1e3:.0f} ms: pause {pause * 1e3:.0f} ms, {pause / usual:.1%} of a step ({len(saving)} saves)"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--compute", type=float, default=1.0, help="seconds of a step on the device")
    options.add_argument("--saves", type=int, default=5)
    options.add_argument("--only", choices=sorted(RUNS), help="one of the runs")
    given = options.parse_args()
    for name, words in RUNS.items():
        if given.only in (None, name):
            print(f"{name}: {row(measured(words, given.compute, given.saves))}", flush=True)


if __name__ == "__main__":
    main()
