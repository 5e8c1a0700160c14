"""Training steps by the size of buckets, given and chosen in the first steps, on test hosts with shaped links.

    python bench/buckets.py [--hosts 3] [--rate 500] [--compute 0.5] [--sizes 25MB,1MB,auto] [--rounds 5]

Test hosts of this machine (root, sshd, iproute2), one worker a host. In each round every size has a job of its own, and
so has `sync.bucket: auto`; the steps in which it tries sizes come before the measured ones, in all of them. It prints
Markdown for docs/internals/measurements.md: medians of the rounds, and what `auto` chose.
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
sys.path[:0] = [str(ROOT)]

from psctl.sync.choice_tuner import ROUNDS  # noqa: E402
from psctl.units import format_bytes  # noqa: E402
from tests.helpers.hosts import Hosts  # noqa: E402

SIZES = ("25MB", "1MB", "4MB", "10MB", "100MB", "auto")


def train(home: dict[str, str], size: str, options: list[str], strategy: str) -> tuple[float, str]:
    """Run one job; return the seconds of a step, and the size that was chosen ("": given)."""
    args = [*options, "--before", str(2 * ROUNDS * (len(SIZES) - 1))]
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "training_job" / "job.yaml"), "-o", "jsonl",
         "--set", "script=buckets.py", "--set", f"args={json.dumps(args)}", "--set", f"sync.bucket={size}",
         "--set", f"sync.strategy={strategy}"],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    texts = [event["text"] for event in events if event["event"] == "log"]
    found = next(json.loads(text.removeprefix("measured ")) for text in texts if text.startswith("measured "))
    chosen = [format_bytes(event["size"]) for event in events if event["event"] == "bucket"]
    assert bool(chosen) == (size == "auto")
    return found["seconds"], chosen[0] if chosen else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", type=int, default=500, help="Mbit/s")
    parser.add_argument("--compute", default="0.5", help="seconds of a step on a device")
    parser.add_argument("--width", default="512", help="of 24 layers")
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if os.getuid() != 0:
        print("needs root")
        return 1
    found: dict[str, list[float]] = {size: [] for size in given.sizes.split(",")}
    choices: list[str] = []
    options = ["--compute", given.compute, "--width", given.width]
    with Hosts(given.hosts, rate=f"{given.rate}mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        home, file = hosts.make_home(Path(folder) / "home"), Path(folder) / "lab.yaml"
        file.write_text(hosts.cluster_text())
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file)], env={**home.env, "PYTHONPATH": str(ROOT)}, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=home.env["HOME"],
        )  # fmt: skip
        for _ in range(given.rounds):
            for size in found:
                seconds, chosen = train(home.env, size, options, given.strategy)
                found[size].append(seconds)
                choices += [chosen] if chosen else []
                print(f"{size} {seconds:.4f} {chosen}", file=sys.stderr, flush=True)
    print("| `sync.bucket` | s a step | least to most |\n|---|---|---|")
    for size, seconds in found.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"| {size} | {statistics.median(seconds):.3f} | {spread} |")
    print(f"\n`auto` chose {', '.join(choices)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
