"""Bytes and seconds of checkpoints of a table, complete ones beside incremental ones, on this machine.

    python bench/table_saves.py [--rows 1000000] [--share 0.01] [--saves 8] [--turns 3]

A table of rows of 16 float32 with the state of adagrad, on one server. Between two checkpoints a share of the rows
changes. Jobs with `full_every: 1` and with `full_every: 1000` take turns; the first checkpoint of a job, which has all
rows in both cases, is left out. It prints Markdown for docs/internals/measurements.md: medians over all other
checkpoints, with the least and the most. The copies, for which a server stops, are measured in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from psctl.process.user_functions import JobFunctions
from psctl.ps.table_messages import RowOptimizerSpec, StoreSpec, TableSpec
from psctl.ps.tables.reductions import Lanes
from psctl.ps.tables.row_index import shard_of
from psctl.ps.tables.row_optimizers import complete
from psctl.ps.tables.server.saved_tables import copy_changes, copy_shard
from psctl.ps.tables.server.table_shard import ReplicatedTables

ROOT = Path(__file__).resolve().parent.parent
SHARDS = 8
JOB = ROOT / "bench" / "table_saves_job" / "job.yaml"


def train(full_every: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """Run one job; return its checkpoints but the first."""
    words = ["--rows", given.rows, "--share", given.share, "--saves", given.saves, "--pause", given.pause]
    args = json.dumps([str(word) for word in words])
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "psctl", "train", str(JOB), "-o", "jsonl", "--set", f"args={args}",
             "--set", f"checkpoint.full_every={full_every}"],
            env={**os.environ, "HOME": home, "PSCTL_HOME": f"{home}/psctl", "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=1800, check=False, cwd=home,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return [event for event in events if event["event"] == "checkpoint"][1:]


def copies(given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Return the seconds for which copies of all shards stop a server: of all rows, and of those that changed."""
    machine = ReplicatedTables(JobFunctions())
    optimizer = complete(RowOptimizerSpec("adagrad", {"lr": 0.1}))
    table = TableSpec("", (16,), "float32", optimizer=optimizer)
    shards, numbers = [], np.random.default_rng(1)
    for at in range(SHARDS):
        held = machine.make_shard(StoreSpec("rows", 0, False, (0,), SHARDS))
        keys = np.flatnonzero(shard_of("", np.arange(given.rows), SHARDS) == at)
        held.table(table).push(keys, Lanes(torch.ones(len(keys), 16)))
        shards.append((held, keys))
    whole, changed = [], []
    for turn in range(7):
        began = time.perf_counter()
        for at, (held, _) in enumerate(shards):
            copy_shard(held, at, SHARDS)
        whole.append(time.perf_counter() - began)
        cuts = [{"": held.tables[""].cut()} for held, _ in shards]
        for held, keys in shards:
            some = np.sort(numbers.choice(keys, int(len(keys) * given.share), replace=False))
            held.tables[""].push(some, Lanes(torch.ones(len(some), 16)))
        began = time.perf_counter()
        for at, (held, _) in enumerate(shards):
            copy_changes(held, at, SHARDS, turn, cuts[at])
        changed.append(time.perf_counter() - began)
    return whole, changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds of a step beside the table")
    given = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {1: [], 1000: []}
    for _ in range(given.turns):
        for full_every, rows in found.items():
            rows += train(full_every, given)
    torch.set_num_threads(1)
    copied = dict(zip(found, copies(given), strict=True))
    print("| checkpoints | MB written | s until complete | copy ms | number |\n|---|---|---|---|---|")
    for full_every, rows in found.items():
        kind = "complete" if full_every == 1 else "incremental"
        cells = []
        columns = [row["written"] / 1e6 for row in rows], [row["seconds"] for row in rows], copied[full_every]
        for column, scale, digits in zip(columns, (1, 1, 1e3), (2, 2, 1), strict=True):
            values = [value * scale for value in column]
            middle, least, most = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
            cells.append(f"{middle} ({least} to {most})")
        print(f"| {kind} | {' | '.join(cells)} | {len(rows)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
