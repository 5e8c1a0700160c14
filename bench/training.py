"""Training steps of a 25 M-parameter model on test hosts with shaped links, beside DistributedDataParallel over Gloo.

    python bench/training.py [--hosts 4] [--rate 500] [--compute 1.0,0.6] [--cases ps,auto,bf16] [--rounds 3] [--slow]
                             [--free 2]

Test hosts of this machine (root, sshd, iproute2); iperf3 measures the payload rate B in the same run. There is one
worker a host. In each job both contestants take turns in the same processes, DistributedDataParallel with its defaults
and psctl through `prepare`, or in the cases `hook` another DistributedDataParallel with `psctl.accelerate_ddp`. With
`--slow` the last host has a fifth of the rate, and with `--free` so many further hosts hold the servers. Compute is
time on a device (training_job/train.py): a multiple of the time of a ring for the gradients, s = 2 (n-1)/n S/B. It
prints Markdown for docs/internals/measurements.md.

The bound of a ratio is what DistributedDataParallel takes, over the longer of compute and the bytes that psctl must
move: no implementation that computes and sends is faster. With values on servers that is 2 (n-1)/n S/B as for a ring,
half of it where both ways travel in 16 bits, and with factors of four workers what their vectors are of the gradients.

Where servers step, a round's first forward has no values on their way beside it, and the wait at its end no forward:
one forward a round is not hidden, which in training is one a job. So a round has many steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from links import iperf  # noqa: E402

from tests.helpers.hosts import Hosts  # noqa: E402

SIZE = 4 * 24 * (1020 * 1020 + 1020)
"""Bytes of gradients."""

ROWS = 16
"""Of a worker's batch, in the case `factors`."""

CASES: dict[str, tuple[list[str], float]] = {
    "auto": ([], 1.0),
    "ps": (["sync.strategy=ps", "sync.update=server", "servers=4"], 1.0),
    "sharded": (["sync.update=sharded", "sync.strategy=sharded"], 1.0),
    "sharded-ring": (["sync.update=sharded", "sync.strategy=ring"], 1.0),
    "in-backward": (["sync.update=sharded", "sync.strategy=ring", "sync.step_in_backward=true"], 1.0),
    "ps-in-backward": (["sync.strategy=ps", "sync.update=server", "servers=4", "sync.step_in_backward=true"], 1.0),
    "ps-worker": (["sync.strategy=ps", "sync.update=worker", "servers=4"], 1.0),
    "bf16": (["sync.compression=bf16"], 0.5),
    "bf16-ring": (["sync.compression=bf16", "sync.strategy=ring"], 0.5),
    "bf16-ps": (["sync.compression=bf16", "sync.strategy=ps", "sync.update=server", "servers=4"], 0.75),
    "bf16-ps-worker": (["sync.compression=bf16", "sync.strategy=ps", "sync.update=worker", "servers=4"], 0.5),
    "int8-ps": (["sync.compression=int8", "sync.strategy=ps", "sync.update=server", "servers=4"], 0.625),
    "onebit-ps": (["sync.compression=onebit", "sync.strategy=ps", "sync.update=server", "servers=4"], 0.52),
    "factors": ([f"sync.factor_rows={ROWS}", "sync.update=worker"], 4 * ROWS * 2040 / 1020**2),
    "hook": ([], 1.0),
    "hook-bf16": (["sync.compression=bf16"], 0.5),
    "topk-ps": (["sync.compression.topk=0.01", "sync.strategy=ps", "sync.update=server", "servers=4"], 0.51),
}
"""What is set in the job file, and the part of a ring's bytes that travels."""


TUNED = 40
"""Steps of the case `in-backward` before those that count: in these it chooses how much is stepped during backward."""


def train(
    home: dict[str, str], case: str, compute: float, rounds: int, steps: int, places: list[str]
) -> tuple[str, list[dict[str, Any]]]:  # fmt: skip
    """Run one job; return the strategy and the measurements. `places`: settings that say where processes run."""
    words = [word for each in (*CASES[case][0], *places) for word in ("--set", each)]
    hook = ', "--hook"' if case.startswith("hook") else f', "--rows", "{ROWS}"' if case == "factors" else ""
    before = TUNED if case == "in-backward" else 1
    args = (
        f'args=["--compute", "{compute}", "--rounds", "{rounds}", "--steps", "{steps}", "--before", "{before}"{hook}]'
    )
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "training_job" / "job.yaml"), "-o", "jsonl",
         "--set", args, *words],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=3600, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    plan = [event for event in events if event["event"] == "plan"][-1]
    texts = [event["text"] for event in events if event["event"] == "log"]
    return plan["chosen"], [json.loads(text.removeprefix("measured ")) for text in texts if text[:9] == "measured "]


def line(case: str, chosen: str, found: list[dict[str, Any]], compute: float, ring: float, *, free: bool) -> str:
    """Return a row of the table; `free`: servers have hosts of their own, for whose links `bound` is not computed."""

    def of(name: str, key: str) -> list[float]:
        return [row[key] for row in found if row["name"] == name]

    peer, ours = statistics.median(of("ddp", "seconds")), statistics.median(of("psctl", "seconds"))
    turns = sorted({row["turn"] for row in found})
    ratios = [
        max(row["seconds"] for row in found if (row["turn"], row["name"]) == (turn, "ddp"))
        / max(row["seconds"] for row in found if (row["turn"], row["name"]) == (turn, "psctl"))
        for turn in turns
    ]
    bound = "-" if free else f"{peer / max(compute, CASES[case][1] * ring):.2f}"
    megabytes = [f"{statistics.mean(of(name, 'sent')) / 1e6:.1f}" for name in ("ddp", "psctl")]
    return (
        f"| {case} ({chosen}) | {peer:.3f} | {ours:.3f} | {statistics.median(ratios):.2f} | {bound} "
        f"| {megabytes[0]} | {megabytes[1]} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=500, help="Mbit/s")
    parser.add_argument("--compute", default="1.0,0.6", help="of what a ring takes for the gradients")
    parser.add_argument("--cases", default="ps,auto,bf16,bf16-ps-worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each, a round")
    parser.add_argument("--free", type=int, default=0, help="further hosts, which hold the servers")
    parser.add_argument("--slow", action="store_true", help="the last host has a fifth of the rate")
    given = parser.parse_args()
    if shutil.which("iperf3") is None or os.getuid() != 0:
        print("needs root and iperf3")
        return 1
    with Hosts(2, rate=f"{given.rate}mbit") as pair:
        rate = iperf(pair, "auto")
    ring = 2 * (given.hosts - 1) / given.hosts * SIZE / rate
    print(f"{given.hosts} hosts, payload rate {rate * 8e-6:.1f} Mbit/s (iperf3); a ring of {SIZE / 1e6:.0f} MB takes "
          f"{ring:.3f} s at best\n")  # fmt: skip
    places = [f"servers={given.free}", f"workers={given.hosts}"] if given.free else []
    with Hosts(given.hosts + given.free, rate=f"{given.rate}mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        if given.slow:
            hosts.rate(f"h{given.hosts}", f"{given.rate // 5}mbit")
        home = hosts.make_home(Path(folder) / "home")
        file = Path(folder) / "lab.yaml"
        file.write_text(hosts.cluster_text())
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file)], env={**home.env, "PYTHONPATH": str(ROOT)}, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=home.env["HOME"],
        )  # fmt: skip
        for part in map(float, given.compute.split(",")):
            compute = part * ring
            print(f"Compute {compute:.3f} s a step, {part:g} of the ring's time:\n")
            print("| case | DDP s | psctl s | faster by | bound | DDP MB sent | psctl MB sent |")
            print("|---|---|---|---|---|---|---|", flush=True)
            for case in given.cases.split(","):
                chosen, found = train(home.env, case, compute, given.rounds, given.steps, places)
                print(line(case, chosen, found, compute, ring, free=given.free > 0), flush=True)
            print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
