"""10,000 workers and 1,000 servers, simulated: throughput, losses of machines, the coordinator's cost and the plan's.

    python bench/internet_scale.py [--days 30] [--seeds 20] [--svg docs/internals]

No machine is behind it; what is not computed by psctl's own code is named here with its source.

Throughput: the timing recursion of `psctl.plan.capacity`, with stragglers that change (a clock takes 1 unit of time and
up to a tenth more or less; one clock in five three), as in bench/staleness.py; relative to workers that never wait.

Losses: each machine has one worker or one server, and fails at the rates that Li and others (OSDI 2014) report: 7.8 %
of the jobs of 100 machine-hours failed, 13.7 % of 1,000, 24.7 % of 10,000, so one failure in 1,231, 6,788 or 35,249
hours of a machine. What a loss costs was measured on test hosts (PAUSES). A second server that is lost while the shards
of the first one are not on a replacement yet, and has the only other copy, sends all back to the last checkpoint, whose
interval is Young's.

Coordinator: its own state machine handles every report and heartbeat of such a job, without a network
(bench/coordinator.py), and the plan is `psctl.plan`'s for hosts of eight GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator import SimulatedJob

from psctl.plan.capacity import clock_times

ROOT = Path(__file__).resolve().parents[1]
WORKERS = (10, 100, 1000, 10000)
WAYS: Mapping[str, int] = {"bsp": 0, "ssp 1": 1, "ssp 4": 4, "ssp 16": 16}
CLOCKS = 200
FAILED = {100: 0.078, 1000: 0.137, 10000: 0.247}
"""Share of the jobs that failed, by machine-hours."""

DETECTED, STARTED, REPLICA, RESTARTED, SAVED = 5.0, 8.0, 0.63, 60.0, 0.052
PAUSES = {
    "a host without power is lost": DETECTED,
    "a process is started and has imported torch": STARTED,
    "the next replica is primary": REPLICA,
    "all processes start again": RESTARTED,
    "a checkpoint": SAVED,
}
"""Seconds. The first three and the last are measured (docs/failures.md, docs/internals/measurements.md); that a start
of all takes a minute at this scale is an assumption."""

NEIGHBOURS = 16
"""Servers that share a shard with a server: eight shards a server, each with one replica."""


def times(workers: int, seed: int = 0) -> list[list[float]]:
    """Return the seconds that each worker computes at each clock."""
    chance = random.Random(seed)
    return [
        [chance.uniform(0.9, 1.1) * (3.0 if chance.random() < 0.2 else 1.0) for _ in range(workers)]
        for _ in range(CLOCKS)
    ]


def throughput() -> dict[str, list[float]]:
    """Return the throughput relative to that of workers that never wait, by consistency and number of workers."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for workers in WORKERS:
        compute = times(workers)
        never = 1.0 - clock_times(compute, None).idle  # all wait for the last one at the end of the training
        for name, staleness in WAYS.items():
            found[name].append((1.0 - clock_times(compute, staleness).idle) / never)
    return found


@dataclass
class Month:
    """What losses did to a job."""

    workers: int = 0
    servers: int = 0
    restores: int = 0
    paused: float = 0.0  # seconds
    repeated: float = 0.0  # seconds of training that were lost with a restore
    saving: float = 0.0  # seconds


def month(hours: float, workers: int, servers: int, replicas: int, wait: bool, days: float, seed: int) -> Month:
    """Simulate the losses of a job.

    Args:
        hours: between two failures of one machine, mean.
        workers: their number; each has its machine.
        servers: their number; each has its machine.
        replicas: of each shard, 0 or 1.
        wait: the others wait for a lost worker's replacement; else they go on without it.
        days: of the job.
        seed: of the failures.
    """
    chance, end, now, found = random.Random(seed), days * 86400, 0.0, Month()
    rate = (workers + servers) / (hours * 3600)
    restoring = servers / (workers + servers) * (1.0 if not replicas else min(1.0, rate * NEIGHBOURS * STARTED))
    interval = math.sqrt(2 * SAVED / max(1e-12, rate * restoring))
    interval = min(3600.0, max(10.0, interval))
    found.saving = SAVED * end / interval
    saved, exposed = 0.0, -math.inf
    while (now := now + chance.expovariate(rate)) < end:
        if chance.random() < workers / (workers + servers):
            found.workers += 1
            found.paused += DETECTED + (STARTED if wait else 0.0)
            continue
        found.servers += 1
        second = now - exposed < DETECTED + STARTED and chance.random() < NEIGHBOURS / servers
        if replicas and not second:
            found.paused += DETECTED + REPLICA
            exposed = now
        else:
            found.restores += 1
            saved = now - (now - saved) % interval
            found.paused += DETECTED + RESTARTED
            found.repeated += now - saved
            saved = now
    return found


def losses(days: float, seeds: int) -> tuple[list[str], dict[str, list[float]]]:
    """Return the table's rows, and the lost share of the time by machines for its picture."""
    rows, shares = [], dict[str, list[float]]()
    for machine_hours, share in FAILED.items():
        hours = -machine_hours / math.log(1 - share)
        for replicas, wait in ((1, False), (1, True), (0, True)):
            name = f"{replicas} replica, {'wait' if wait else 'continue'}" if replicas else "no replica, wait"
            months = [month(hours, 10000, 1000, replicas, wait, days, seed) for seed in range(seeds)]
            lost = statistics.mean(each.paused + each.repeated + each.saving for each in months) / (days * 86400)
            cells = [
                statistics.mean(getattr(each, name) for each in months)
                for name in ("workers", "servers", "restores", "paused", "repeated", "saving")
            ]
            rows.append(
                f"| {hours:,.0f} | {name} | {cells[0]:,.0f} | {cells[1]:,.0f} | {cells[2]:,.1f} "
                f"| {cells[3] / 3600:.2f} | {cells[4] / 3600:.2f} | {cells[5] / 3600:.2f} | {1 - lost:.2%} |"
            )
    for replicas, wait, label in ((1, False, "continue"), (1, True, "wait"), (0, True, "no replica")):
        shares[label] = []
        for count in WORKERS:
            hours = -100 / math.log(1 - FAILED[100])
            found = [month(hours, count, max(1, count // 10), replicas, wait, days, seed) for seed in range(seeds)]
            lost = statistics.mean(each.paused + each.repeated + each.saving for each in found) / (days * 86400)
            shares[label].append(lost)
    return rows, shares


def coordinator(workers: int) -> str:
    """Return a row: processor seconds of the coordinator for a second of the job, and for losses."""
    job = SimulatedJob(workers)
    cells = []

    def processor(act: object, count: int = 1) -> float:
        began = time.process_time()
        for _ in range(count):
            act()  # type: ignore[operator]
        return (time.process_time() - began) / count

    cells.append(f"{processor(job.start):.2f}")
    job.rate()
    second = processor(job.train, 3)
    count, _ = job.rate()
    cells += [f"{count / 3 / second:,.0f}", f"{second:.2f}"]
    cells += [f"{processor(job.lose_a_server, 3):.2f}", f"{processor(job.lose_a_worker, 3):.2f}"]
    return f"| {len(job.workers):,} | {job.count:,} | {' | '.join(cells)} |"


def plan(hosts: int) -> str:
    """Return a row: the plan for hosts of eight GPUs."""
    document = json.loads((ROOT / "clusters" / "sixteen-gpu-nodes.json").read_text())
    host, cable = json.dumps(document["hosts"][0]), document["between"][0]
    document["hosts"] = [json.loads(host.replace("node0", f"node{n}")) for n in range(hosts)]
    document["between"] = [{**cable, "a": f"node{n}"} for n in range(hosts)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hosts.json"
        file.write_text(json.dumps(document))
        command = [sys.executable, "-m", "psctl", "plan", "--topology", str(file), "--size", "160MB", "-o", "json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(done.stdout)
    seconds = next(one["seconds"] for one in found["candidates"] if one["strategy"] == found["chosen"])
    return f"| {hosts:,} | {8 * hosts:,} | {spent:.1f} | {found['chosen']} | {seconds * 1e3:.1f} |"


def chart(title: str, lines: Mapping[str, Sequence[float]], top: float) -> str:
    """Return a picture as SVG: shares from 0 to `top` by the number of workers, on a logarithmic axis."""
    wide, high, edge = 480, 300, 48
    colours = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#7f7f7f")

    def x(workers: int) -> float:
        return edge + (wide - 2 * edge - 60) * (math.log10(workers) - 1) / 3

    def y(share: float) -> float:
        return high - edge - (high - 2 * edge) * share / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<path d="M{edge} {edge}V{high - edge}H{wide - edge}" fill="none" stroke="#444"/>',
        f'<text x="{edge}" y="{edge - 16}">{title}</text>',
        f'<text x="{(wide - 60) / 2}" y="{high - 10}" text-anchor="middle">workers</text>',
    ]
    for workers in WORKERS:
        parts.append(f'<text x="{x(workers):.0f}" y="{high - edge + 16}" text-anchor="middle">{workers:,}</text>')
    for share in (0, top / 4, top / 2, top * 3 / 4, top):
        parts.append(f'<text x="{edge - 6}" y="{y(share) + 4:.0f}" text-anchor="end">{share:.3g}</text>')
    for (name, shares), colour in zip(lines.items(), colours, strict=False):
        points = "L".join(f"{x(workers):.1f} {y(share):.1f}" for workers, share in zip(WORKERS, shares, strict=True))
        parts.append(f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x(WORKERS[-1]) + 6:.0f}" y="{y(shares[-1]) + 4:.0f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workers", default="1000,10000", help="of the coordinator's job")
    parser.add_argument("--hosts", default="16,32,128,1024", help="of the plan")
    parser.add_argument("--svg", type=Path, help="folder for the pictures")
    given = parser.parse_args()
    found = throughput()
    print("## Throughput\n\n| workers | " + " | ".join(WAYS) + " |\n" + "|---" * (len(WAYS) + 1) + "|")
    for at, workers in enumerate(WORKERS):
        print(f"| {workers:,} | " + " | ".join(f"{shares[at]:.0%}" for shares in found.values()) + " |")
    rows, shares = losses(given.days, given.seeds)
    print(f"\n## Losses: 10,000 workers, 1,000 servers, {given.days:g} days, means of {given.seeds} simulations\n")
    print("| hours between failures of a machine | | workers lost | servers lost | restores | h waited | h repeated "
          "| h saving | useful time |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    print("\n".join(rows), flush=True)
    print("\n## Coordinator: seconds of one processor\n")
    print("| workers | servers | start | inputs a second | a second of training | a lost server | a lost worker |")
    print("|---|---|---|---|---|---|---|")
    for workers in given.workers.split(","):
        print(coordinator(int(workers)), flush=True)
    print("\n## Plan: seconds of one processor, and its choice for 160 MB\n")
    print("| hosts | GPUs | seconds | chosen | predicted ms |\n|---|---|---|---|---|")
    for hosts in given.hosts.split(","):
        print(plan(int(hosts)), flush=True)
    if given.svg:
        (given.svg / "scale-throughput.svg").write_text(
            chart("throughput, relative to workers that never wait", found, 1.0)
        )
        title = "lost share of the time; a machine fails every 1,231 h"
        (given.svg / "scale-losses.svg").write_text(chart(title, shares, 0.06))
    return 0


if __name__ == "__main__":
    sys.exit(main())
