"""The time of a step when one of two workers has half of the other's processor: even shares, and shares by speed.

    python bench/shares.py [--times 5] [--strategies ps,ring]

As root, on this machine: control groups hold worker 0 to half a processor and worker 1 to a quarter; they go before
other processes, so that other load changes little. Each pair of jobs runs one after the other, `loader.share` even and
speed; the figures are medians over the pairs, of each job's median step in its second half. It prints Markdown for
docs/internals/measurements.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PERIOD = 20_000
"""Microseconds in which a group may use its quota."""


@contextlib.contextmanager
def limited(name: str, part: float) -> Iterator[Path]:
    """Make a control group with a part of a processor; the file to which its processes write their ids."""
    base = Path("/sys/fs/cgroup")
    old = (base / "cpu").is_dir()
    folder = (base / "cpu" if old else base) / f"psctl-shares-{os.getpid()}-{name}"
    folder.mkdir()
    try:
        quota = int(PERIOD * part)
        if old:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            (folder / "cpu.shares").write_text("65536")
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD}")
            (folder / "cpu.weight").write_text("10000")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def train(home: Path, groups: list[Path], strategy: str, share: str) -> dict[int, dict[str, float]]:
    """Run a job; return what each rank printed."""
    done = subprocess.run(
        [
            sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "shares_job" / "job.yaml"), "-o", "jsonl",
            "--strategy", strategy, "--servers", "1" if strategy == "ps" else "0", "--set", f"loader.share={share}",
            "--env", f"GROUP_0={groups[0]}", "--env", f"GROUP_1={groups[1]}",
        ],
        cwd=home, env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    found = [json.loads(each["text"]) for each in events if each["event"] == "log" and each["text"].startswith("{")]
    return {each["rank"]: each for each in found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--strategies", default="ps,ring")
    given = parser.parse_args()
    print("| strategy | even, ms | by speed, ms | times as fast | examples of the workers |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, limited("fast", 0.5) as fast, limited("slow", 0.25) as slow:
        for strategy in given.strategies.split(","):
            steps: dict[str, list[float]] = {"even": [], "speed": []}
            shares: list[tuple[float, float]] = []
            for _ in range(given.times):
                for share, found in steps.items():
                    ranks = train(Path(folder), [fast, slow], strategy, share)
                    found.append(ranks[0]["step"])
                    if share == "speed":
                        shares.append((ranks[0]["examples"], ranks[1]["examples"]))
            even, speed = (1000 * statistics.median(steps[share]) for share in ("even", "speed"))
            most, least = (statistics.median(each[at] for each in shares) for at in (0, 1))
            ratio = statistics.median(a / b for a, b in zip(steps["even"], steps["speed"], strict=True))
            print(f"| {strategy} | {even:.0f} | {speed:.0f} | {ratio:.2f} | {most:.0f} and {least:.0f} |", flush=True)


if __name__ == "__main__":
    main()
