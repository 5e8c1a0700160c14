"""The time to give start values to all ranks: by the broadcast of the plan, and as a sum with zeros.

    python bench/start_values.py [--hosts 4] [--rate 500] [--size 50MB] [--strategy ring,sharded] [--rounds 5]

Test hosts of this machine (root, sshd, iproute2), one worker a host; both take turns, in jobs of their own. It prints
Markdown for docs/internals/measurements.md.
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from psctl.units import parse_size  # noqa: E402
from tests.helpers.hosts import Hosts  # noqa: E402


def start(home: dict[str, str], strategy: str, size: int, *, as_sum: bool) -> dict[str, Any]:
    """Run one job; return its measurement."""
    args = ["--size", str(size), *(["--sum"] if as_sum else [])]
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "training_job" / "job.yaml"), "-o", "jsonl",
         "--set", "script=start.py", "--set", f"args={json.dumps(args)}", "--set", f"sync.strategy={strategy}"],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    texts = [event["text"] for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "log"]
    found: dict[str, Any] = next(json.loads(text[9:]) for text in texts if text.startswith("measured "))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=500, help="Mbit/s")
    parser.add_argument("--size", default="50MB")
    parser.add_argument("--strategy", default="ring,sharded")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if os.getuid() != 0:
        print("needs root")
        return 1
    found: dict[tuple[str, str], list[float]] = {}
    with Hosts(given.hosts, rate=f"{given.rate}mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        home, file = hosts.make_home(Path(folder) / "home"), Path(folder) / "lab.yaml"
        file.write_text(hosts.cluster_text())
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file)], env={**home.env, "PYTHONPATH": str(ROOT)}, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=home.env["HOME"],
        )  # fmt: skip
        for _ in range(given.rounds):
            for strategy in given.strategy.split(","):
                for as_sum in (True, False):
                    one = start(home.env, strategy, parse_size(given.size), as_sum=as_sum)
                    how = "sum" if as_sum else one["algorithm"]
                    found.setdefault((strategy, how), []).append(one["seconds"])
                    print(f"{strategy} {how} {one['seconds']:.3f}", file=sys.stderr, flush=True)
    print("| strategy of the sums | start values | s | least to most |\n|---|---|---|---|")
    for (strategy, how), seconds in found.items():
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"| `{strategy}` | {how} | {statistics.median(seconds):.2f} | {spread} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
