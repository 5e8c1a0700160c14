"""Seconds from `psctl train` to the first step, beside the least possible: as many processes importing torch at once.

    python bench/startup.py [--runs 5] [--hosts 4]

Both are measured in turn in one run; the figure is the median of each. The job is templates/digits on the embedded
local cluster: two workers and two servers, so the floor is four processes importing torch at once. With --hosts N it
runs on N test hosts of this machine (root, sshd), each with a worker, and two servers: N + 2 processes import torch.
The hosts were made ready by `psctl up` before.
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
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "templates" / "digits" / "job.yaml"
PSCTL = (sys.executable, "-m", "psctl")


def floor(processes: int) -> float:
    """Return seconds until `processes` interpreters have imported torch, started together."""
    begin = time.monotonic()
    started = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(processes)]
    for each in started:
        each.wait()
    return time.monotonic() - begin


def first_step(arguments: list[str], environment: dict[str, str]) -> float:
    """Return seconds from starting psctl until its log reports a finished step.

    The first progress line comes a report's interval after its step, so the interval is 100 ms here.
    """
    command = [*PSCTL, "train", str(DIGITS), "-o", "jsonl", "--set", "metrics.interval=100ms", *arguments]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        seconds = float("nan")
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "progress" and seconds != seconds:
                seconds = time.monotonic() - begin
    assert process.returncode == 0, f"psctl ended with {process.returncode}"
    return seconds


@contextlib.contextmanager
def on_this_machine() -> Iterator[tuple[list[str], dict[str, str], int]]:
    """The embedded local cluster: arguments, environment, processes that import torch."""
    with tempfile.TemporaryDirectory() as home:
        yield [], {**os.environ, "PYTHONPATH": str(ROOT), "PSCTL_HOME": home}, 4


@contextlib.contextmanager
def on_hosts(count: int) -> Iterator[tuple[list[str], dict[str, str], int]]:
    """Test hosts, made ready."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.hosts import Hosts  # imported here because it needs root

    with Hosts(count) as hosts, tempfile.TemporaryDirectory() as folder:
        home = hosts.make_home(Path(folder) / "home")
        cluster = Path(folder) / "cluster.yaml"
        cluster.write_text(hosts.cluster_text())
        environment = {**home.env, "PYTHONPATH": str(ROOT)}
        subprocess.run([*PSCTL, "up", str(cluster), "-q"], check=True, env=environment)
        yield ["--cluster", str(cluster), "--workers", str(count)], environment, count + 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=0)
    given = parser.parse_args()
    floors, starts = [], []
    with on_hosts(given.hosts) if given.hosts else on_this_machine() as (arguments, environment, processes):
        for _ in range(given.runs):
            floors.append(floor(processes))
            starts.append(first_step(arguments, environment))
    low, high = statistics.median(floors), statistics.median(starts)
    print(f"{processes} imports of torch at once:    median {low:.2f} s  {[round(each, 2) for each in floors]}")
    print(f"psctl train to the first step: median {high:.2f} s  {[round(each, 2) for each in starts]}")
    print(f"above the floor: {high - low:.2f} s")


if __name__ == "__main__":
    main()
