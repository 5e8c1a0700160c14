"""The cost of waiting and of not waiting: one training with stragglers, under staleness from 0 up.

    python bench/staleness.py            simulated: the timing recursion, and gradient descent on the versions it allows
    python bench/staleness.py --real     psctl's own worker and server processes on this machine, slowed by sleeps

Stragglers: a clock takes each worker 1 unit of time and up to a tenth more or less; one clock in five, at random, three
(transient). With `persistent`, one worker takes a quarter longer for good. Every staleness sees the same times.

The training is least squares, by gradients with noise and one learning rate for all, as long as it takes to a given
loss. A worker's gradient of clock t is of the newest values at its begin, which hold all clocks up to
t-s-1 at least; the step of a clock is taken when all gradients of it are in. Idle: share of all workers' time that they
wait.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from psctl.plan.capacity import clock_times

STALENESS = (0, 1, 2, 4, 8, 16)
WORKERS = 8
CLOCKS = 600
SLOW_EVERY, SLOW, LASTING = 0.2, 3.0, 1.25


def times(workers: int, clocks: int, persistent: bool, seed: int = 0) -> list[list[float]]:
    """Return the seconds that each worker computes at each clock."""
    chance = random.Random(seed)
    rows = []
    for _ in range(clocks):
        row = [chance.uniform(0.9, 1.1) * (SLOW if chance.random() < SLOW_EVERY else 1.0) for _ in range(workers)]
        if persistent:
            row[-1] *= LASTING
        rows.append(row)
    return rows


class Problem:
    """Least squares in its main axes: curvatures from 0.02 to 1, gradients with noise."""

    RATE = 0.2
    TARGET = 0.02  # of the loss at the start

    def __init__(self, workers: int, clocks: int, seed: int = 1) -> None:
        generator = np.random.default_rng(seed)
        self.curvature = np.geomspace(0.02, 1.0, 30)
        self.start = np.ones(30)
        self.noise = generator.normal(0.0, 0.5, (clocks, workers, 30))

    def loss(self, x: np.ndarray) -> float:
        return float((self.curvature * x * x).sum() / (self.curvature * self.start**2).sum())


def simulate(compute: list[list[float]], staleness: int, problem: Problem) -> dict[str, float | None]:
    """Return how long the training takes to the target, and how much of the time workers wait."""
    found = clock_times(compute, staleness)
    ends = np.array(found.ends)
    whole = ends.max(axis=1)  # when each clock is whole, and its step is taken
    begins = ends - np.array(compute)
    versions = np.searchsorted(whole, begins, side="right")  # steps that were taken when a worker began
    values = [problem.start]
    reached = None
    for clock in range(len(compute)):
        seen = np.array([values[min(version, clock)] for version in versions[clock]])
        gradient = (problem.curvature * seen + problem.noise[clock]).mean(axis=0)
        values.append(values[-1] - problem.RATE * gradient)
        if reached is None and problem.loss(values[-1]) < problem.TARGET:
            reached = clock
    lag = np.arange(len(compute))[:, None] - versions
    return {
        "staleness": staleness, "idle": found.idle, "clock": found.seconds_a_clock, "lag": float(lag.mean()),
        "clocks": None if reached is None else reached + 1.0,
        "time": None if reached is None else float(whole[reached]),
    }  # fmt: skip


def sweep(persistent: bool, seeds: int = 5) -> list[dict[str, float | None]]:
    """Return a row for each staleness; clocks and time to the loss are means over the noise of several seeds."""
    compute = times(WORKERS, CLOCKS, persistent)
    rows = []
    for staleness in STALENESS:
        found = [simulate(compute, staleness, Problem(WORKERS, CLOCKS, seed)) for seed in range(seeds)]
        row = found[0]
        for name in ("clocks", "time"):
            numbers = [one[name] for one in found]
            row[name] = None if None in numbers else float(np.mean(numbers))
        rows.append(row)
    return rows


def table(rows: list[dict[str, float | None]], unit: str = "") -> str:
    heads = ("staleness", "idle", "a clock", "mean lag", "clocks to the loss", "time to the loss")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [str(row["staleness"]), f"{row['idle']:.1%}", f"{row['clock']:.2f}{unit}", f"{row['lag']:.1f}"]
        cells += ["-" if row[name] is None else f"{row[name]:.0f}" for name in ("clocks", "time")]
        lines.append("| " + " | ".join(cells) + (unit if row["time"] is not None else "") + " |")
    return "\n".join(lines)


def picture(rows: list[dict[str, float | None]], width: int = 48) -> str:
    """Draw idle time and time to the loss as bars."""
    longest = max(row["time"] or 0.0 for row in rows)
    lines = ["staleness  idle                        time to the loss"]
    for row in rows:
        idle = "#" * round(24 * (row["idle"] or 0.0))
        bar = "=" * round(width * (row["time"] or 0.0) / longest) if row["time"] else "never"
        lines.append(f"{row['staleness']:9}  {idle:<24}    {bar}")
    return "\n".join(lines)


# ---- on psctl's own processes --------------------------------------------------------------------------------------

UNIT = 0.08  # seconds
REAL_CLOCKS = 240

SCRIPT = """
import json, os, pathlib, time
import numpy as np, torch
import psctl

run = psctl.init()
given = json.loads(pathlib.Path("given.json").read_text())
curvature = torch.tensor(given["curvature"], dtype=torch.float64)
noise = np.random.default_rng(given["seed"]).normal(0.0, 0.5, (given["drawn"], run.world, 30))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.ones(30, dtype=torch.float64))
    def forward(self):
        return self.x

net = Net()
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=given["rate"]))
rows = []
for clock in range(given["clocks"]):
    began = time.time()
    x = model()
    read = time.time()
    loss = float((curvature * x.detach() ** 2).sum() / curvature.sum())
    time.sleep(given["times"][clock][run.rank])
    ready = time.time()
    optimizer.zero_grad()
    (0.5 * (curvature * x * x).sum() + (torch.from_numpy(noise[clock, run.rank]) * x).sum()).backward()
    optimizer.step()
    rows.append((began, read, ready, time.time(), loss))
    run.report(staleness=0.0)
pathlib.Path(given["out"], f"{run.rank}.json").write_text(json.dumps(rows))
"""


def measured(folder: Path, staleness: int, compute: list[list[float]]) -> dict[str, float | None]:
    """Train once on real processes; returns the same figures, in seconds."""
    given = {
        "times": [[each * UNIT for each in row] for row in compute], "clocks": len(compute), "drawn": CLOCKS, "seed": 0,
        "curvature": np.geomspace(0.02, 1.0, 30).tolist(), "rate": Problem.RATE, "out": str(folder),
    }  # fmt: skip
    (folder / "given.json").write_text(json.dumps(given))
    (folder / "train.py").write_text(SCRIPT)
    mode = f"{{ssp: {staleness}}}" if staleness else "bsp"
    (folder / "job.yaml").write_text(
        f"version: 1\nname: sweep\nscript: train.py\nworkers: {len(compute[0])}\nservers: 1\n"
        f"sync: {{strategy: ps, update: server, consistency: {mode}}}\ncheckpoint: {{every: null}}\n"
    )
    (folder / "cluster.yaml").write_text(
        "version: 1\nname: sweep\n"
        f"runtime: {{environment: existing, python: {sys.executable}, workdir: {folder}/host}}\n"
        f"hosts: [{{address: local, slots: {len(compute[0])}}}]\n"
    )
    environment = os.environ | {"PSCTL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "psctl", "train", "job.yaml", "--cluster", "./cluster.yaml"]
    subprocess.run(words, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(compute[0]))]
    began, ended = min(rows[0][0] for rows in ranks), max(rows[-1][3] for rows in ranks)
    busy = sum(done - read for rows in ranks for _, read, _, done, _ in rows)  # not waiting for values
    reached = next(((clock, row[1]) for clock, row in enumerate(ranks[0]) if row[4] < Problem.TARGET), None)
    lags = []
    ends = np.array([[row[3] for row in rows] for rows in ranks]).max(axis=0)
    for rows in ranks:
        lags += [clock - int(np.searchsorted(ends, row[1])) for clock, row in enumerate(rows)]
    return {
        "staleness": staleness, "idle": 1 - busy / ((ended - began) * len(ranks)), "lag": float(np.mean(lags)),
        "clock": (ended - began) / len(compute), "clocks": None if reached is None else float(reached[0]),
        "time": None if reached is None else reached[1] - began,
    }  # fmt: skip


def real() -> list[dict[str, float | None]]:
    """Return a row for each staleness, measured."""
    compute = times(WORKERS, REAL_CLOCKS, persistent=False)
    rows = []
    for staleness in STALENESS:
        with tempfile.TemporaryDirectory(prefix="psctl-sweep-") as folder:
            rows.append(measured(Path(folder), staleness, compute))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--real", action="store_true", help="on psctl's own processes, some minutes")
    if options.parse_args().real:
        rows = real()
        print(f"{WORKERS} worker processes, transient stragglers", table(rows, " s"), picture(rows), sep="\n\n")
        return
    for persistent in (False, True):
        more = ", one worker a quarter slower for good" if persistent else ""
        rows = sweep(persistent)
        print(f"{WORKERS} workers, transient stragglers{more}", table(rows), picture(rows), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
