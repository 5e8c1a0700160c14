"""Seconds from `psctl train` to the first step, beside the least possible: as many processes importing torch at once.

    python bench/startup.py [--runs 5] [--hosts 4]

The job is templates/digits on the embedded local cluster, once as it is, with two workers, and once with two workers
and two servers. So two or four processes import torch, and the floors are as many that do so at once, alone and with a
first optimizer, for which torch imports its compiler where psctl does not put that off. All are measured in turn in
one run; figures are medians. With --hosts N it runs on N test hosts of this machine (root, sshd), which `psctl up` made
ready before: N workers, and two servers in the second case.
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


FLOORS = {"imports of torch": "import torch", "with an optimizer": "import torch; torch.optim.SGD([torch.zeros(1)])"}

CASES = {"workers": ([], 0), "workers and servers": (["sync.strategy=ps", "servers=2"], 2)}
"""What is set in the job file, and the number of servers."""


def floor(code: str, processes: int) -> float:
    """Return seconds until `processes` interpreters have executed `code`, started together."""
    begin = time.monotonic()
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
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
    """The embedded local cluster: arguments, environment, workers."""
    with tempfile.TemporaryDirectory() as home:
        yield [], {**os.environ, "PYTHONPATH": str(ROOT), "PSCTL_HOME": home}, 2


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
        yield ["--cluster", str(cluster), "--workers", str(count)], environment, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=0)
    given = parser.parse_args()
    with on_hosts(given.hosts) if given.hosts else on_this_machine() as (arguments, environment, workers):
        found: dict[str, list[float]] = {}
        for turn in range(given.runs + 1):  # the first warms up
            for case, (settings, servers) in CASES.items():
                for name, code in FLOORS.items():
                    found.setdefault(f"{case}, {name}", []).append(floor(code, workers + servers))
                words = [word for each in settings for word in ("--set", each)]
                found.setdefault(f"{case}, first step", []).append(first_step([*arguments, *words], environment))
            print(f"turn {turn} of {given.runs}", file=sys.stderr, flush=True)
    print(
        "| processes | imports of torch | with an optimizer | first step | above | above |\n|---|---|---|---|---|---|"
    )
    for case, (_, servers) in CASES.items():
        torch, optimizer, step = (statistics.median(found[f"{case}, {name}"][1:]) for name in (*FLOORS, "first step"))
        print(
            f"| {case}: {workers + servers} | {torch:.2f} s | {optimizer:.2f} s | {step:.2f} s |"
            f" {step - torch:.2f} s | {step - optimizer:.2f} s |"
        )


if __name__ == "__main__":
    main()
