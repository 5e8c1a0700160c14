"""Bytes and seconds of a step with an embedding on test hosts with shaped links: torch's ways and psctl's, by turns.

    python bench/sparse.py [--hosts 3] [--rate 500] [--keys 10000,1000000,1000000000] [--rounds 3] [--batch 256]

Test hosts of this machine (root, sshd, iproute2), one worker a host, servers on all hosts. In each job all contestants
take turns in the same processes (sparse_job/train.py has them); beyond a million keys only psctl's is there, because
torch's embeddings allocate all rows. It prints Markdown for docs/internals/measurements.md.
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

from tests.helpers.hosts import Hosts  # noqa: E402


def train(home: dict[str, str], keys: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one job; return the measurements."""
    words = {
        "keys": keys, "rounds": given.rounds, "steps": given.steps, "batch": given.batch,
        "contestants": given.contestants, "compute": given.compute, "bags": given.bags,
    }  # fmt: skip
    args = ", ".join(f'"--{name}", "{value}"' for name, value in words.items())
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "sparse_job" / "job.yaml"), "-o", "jsonl",
         "--set", f"args=[{args}]", "--set", f"sync.strategy={given.strategy}", "--set", f"servers={given.hosts}"],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=3600, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    texts = [event["text"] for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "log"]
    return [json.loads(text.removeprefix("measured ")) for text in texts if text.startswith("measured ")]


def rows(keys: int, found: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in found):
        mine = [row for row in found if row["name"] == name]
        turns = {row["turn"] for row in mine}
        total = statistics.median(sum(row["sent"] for row in mine if row["turn"] == turn) for turn in turns)
        slowest = statistics.median(max(row["seconds"] for row in mine if row["turn"] == turn) for turn in turns)
        distinct = statistics.mean(row["distinct"] for row in mine)
        lines.append(f"| {keys:,} | {name} | {distinct:.0f} | {total / 1e6:.3f} | {slowest:.3f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rate", type=int, default=500, help="Mbit/s")
    parser.add_argument("--keys", default="10000,1000000,1000000000")
    parser.add_argument("--strategy", default="ring")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="of each, a round")
    parser.add_argument("--batch", type=int, default=256, help="examples of a worker")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds that psctl's steps compute besides")
    parser.add_argument("--bags", type=int, default=8, help="of `bag` and `bag-rows`, each in a job of its own")
    parser.add_argument("--contestants", default="ddp-dense,ddp-sparse,rpc,psctl,prefetch")
    given = parser.parse_args()
    if os.getuid() != 0:
        print("needs root")
        return 1
    with Hosts(given.hosts, rate=f"{given.rate}mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        home = hosts.make_home(Path(folder) / "home")
        file = Path(folder) / "lab.yaml"
        file.write_text(hosts.cluster_text())
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file)], env={**home.env, "PYTHONPATH": str(ROOT)}, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=home.env["HOME"],
        )  # fmt: skip
        print("| possible keys | | distinct keys of a worker's batch | MB sent, all hosts | s |")
        print("|---|---|---|---|---|", flush=True)
        for keys in map(int, given.keys.split(",")):
            print("\n".join(rows(keys, train(home.env, keys, given))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
