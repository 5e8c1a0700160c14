"""The pause at a server's death: seconds from kill -9 to the next clock that is applied everywhere.

    python bench/failover.py [--kills 20] [--width 512] [--servers 3] [--replicas 1]

One training job on the embedded local cluster; its servers are killed one after the other, each time when all are there
again and a settling time has passed. After each clock rank 0 notes when its values had arrived. The pause of a kill is
the longest time without such a note between the kill and the next one; beside it stands the longest such time before
the kill, which is what a step takes when nothing happens.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "bench" / "failover_job" / "job.yaml"
PSCTL = (sys.executable, "-m", "psctl")
SETTLE = 7.0
"""Seconds between the start of the last server and the next kill: it imports torch and is filled meanwhile. A kill that
comes before takes a shard's only copy, and all start again from the last checkpoint."""


def servers_of(home: str) -> dict[int, str]:
    """Return the servers of this home's jobs: process id -> name."""
    found = {}
    for process in psutil.process_iter(["environ", "create_time", "pid"]):
        environment = process.info["environ"] or {}
        if environment.get("HOME") == home and environment.get("PSCTL_ROLE") == "server":
            found[process.info["pid"]] = f"server/{environment.get('RANK', '?')}"
    return found


def notes_of(log: Path) -> list[tuple[int, float]]:
    """Return (step, when) of the lines that are whole."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(step), float(when)) for step, when in (line.split() for line in lines[:-1])]


def longest(notes: list[tuple[int, float]], begin: float, end: float) -> float:
    """Return the longest time without a note in an interval; both ends count as notes."""
    times = [begin, *(when for _, when in notes if begin < when < end), end]
    return max(b - a for a, b in itertools.pairwise(times))


def wait_for(what, seconds: float, name: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {name}"
        time.sleep(0.05)


def kill_in_turn(home: str, log: Path, kills: int, count: int) -> list[float]:
    """Kill servers; return when."""
    moments: list[float] = []
    for turn in range(kills):
        wait_for(lambda: len(servers_of(home)) == count, 60, f"{count} servers")
        before = len(notes_of(log))
        wait_for(lambda seen=before: len(notes_of(log)) > seen + 10, 60, "steps")
        time.sleep(SETTLE)
        pids = sorted(servers_of(home))
        moments.append(time.time())
        os.kill(pids[turn % len(pids)], signal.SIGKILL)
        time.sleep(0.2)
    wait_for(lambda: len(servers_of(home)) == count, 60, f"{count} servers")
    time.sleep(SETTLE)
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--width", type=int, default=512, help="of the model's two layers")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "steps"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PSCTL_HOME": f"{home}/psctl"}
        words = f'args=["--log", "{log}", "--width", "{given.width}"]'
        command = [*PSCTL, "train", str(JOB), "-o", "jsonl", "--servers", str(given.servers), "--set", words]
        command += ["--set", f"replicas={given.replicas}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as training:
            try:
                moments = kill_in_turn(home, log, given.kills, given.servers)
            finally:
                subprocess.run([*PSCTL, "stop", "-q"], env=environment, check=False)
                training.wait(60)
        notes = notes_of(log)
    ends = [*moments[1:], notes[-1][1]]
    pauses = [longest(notes, moment, min(end, moment + 10)) for moment, end in zip(moments, ends, strict=True)]
    usual = [longest(notes, moment - 1.5, moment) for moment in moments]
    parameters = 2 * given.width * (given.width + 1)
    print(f"{parameters:,} parameters, {given.servers} servers, {given.replicas} replica(s), {len(moments)} kills")
    print(f"pause at a kill    median {statistics.median(pauses):.3f} s, maximum {max(pauses):.3f} s")
    print(f"longest undisturbed step   median {statistics.median(usual):.3f} s, maximum {max(usual):.3f} s")
    print("each pause: " + " ".join(f"{pause:.3f}" for pause in pauses))


if __name__ == "__main__":
    main()
