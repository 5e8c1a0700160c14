"""All-reduce between processes of one host: psctl's schedules over its own data plane beside Gloo's and Open MPI's.

    python bench/allreduce.py [--ranks 2,4] [--sizes 4KB,64KB,1MB,100MB] [--strategies ...] [--rounds 1]

Every figure comes from `psctl bench allreduce`, which has Gloo's own all-reduce (`native`) and the schedules take turns
and checks every sum. It runs twice: as installed, and in a network namespace of its own where reno is every socket's
congestion control (needs root; shared memory has none, so only Gloo changes). Open MPI is measured where `mpirun` and
its C compiler are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from open_mpi import compile_bench, measure

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = "native,one-shot,recursive-doubling,sharded,ring"
RENO = 'ip link set lo up && echo reno > /proc/sys/net/ipv4/tcp_congestion_control && exec "$@"'


def psctl(ranks: int, sizes: str, strategies: str, reno: bool, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of `psctl bench allreduce` on this host."""
    cluster = folder / f"cluster{ranks}.yaml"
    cluster.write_text(f"version: 1\nname: ranks{ranks}\nhosts: [{{address: local, slots: {ranks}}}]\n")
    command = [
        sys.executable, "-m", "psctl", "-y", "-o", "json", "bench", "allreduce", "--cluster", str(cluster),
        "--workers", str(ranks), "--sizes", sizes, "--strategy", strategies,
    ]  # fmt: skip
    if reno:
        command = ["unshare", "--net", "sh", "-c", RENO, "sh", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PSCTL_HOME": str(folder / "home")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found


def run(command: list[str]) -> str:
    """Return a command's output."""
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def open_mpi(ranks: int, sizes: Sequence[int], folder: Path) -> dict[int, float]:
    """Return Open MPI's median by size; empty where it is not installed."""
    if (program := compile_bench(folder)) is None:
        return {}
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), str(program)]
    return measure(run, words, "allreduce", sizes)


def table(rows: Sequence[dict[str, Any]], mpi: dict[int, float]) -> None:
    """Print a line a size: Gloo, Open MPI, the best schedule and each one's time."""
    for size in dict.fromkeys(row["bytes"] for row in rows):
        times = {
            name: statistics.median(
                row["seconds"]["median"] for row in rows if row["bytes"] == size and row["strategy"] == name
            )
            for name in dict.fromkeys(row["strategy"] for row in rows)
        }
        assert all(row["correct"] for row in rows if row["bytes"] == size), "every sum is right"
        gloo = times.pop("native")
        best = min(times, key=lambda name: times[name])
        own = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in times.items())
        other = f"{mpi[size] * 1e3:8.2f}" if size in mpi else "       -"
        print(f"{size:>12} {gloo * 1e3:8.2f} {other} {times[best] * 1e3:8.2f} {gloo / times[best]:8.1f}  {own}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="4KB,64KB,1MB,100MB")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; times in ms, medians")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in map(int, given.ranks.split(",")):
            for reno in (False, True):
                rows = [
                    row
                    for _ in range(given.rounds)
                    for row in psctl(ranks, given.sizes, given.strategies, reno, folder)
                ]
                sizes = list(dict.fromkeys(row["bytes"] for row in rows))
                mpi = open_mpi(ranks, sizes, folder)
                said = "" if mpi else "; Open MPI is not installed"
                print(f"\n{ranks} ranks, {'reno for all' if reno else f'as installed ({default})'}{said}")
                print("       bytes     Gloo Open MPI     best Gloo/best")
                table(rows, mpi)


if __name__ == "__main__":
    main()
