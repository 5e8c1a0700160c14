"""The pause of training after kill -9 of a server or of the coordinator: seconds until the next clock is complete.

    python bench/failover.py [--kills 20] [--process server] [--width 512] [--servers 3] [--replicas 1]

One training job on the embedded local cluster; its servers, or its coordinators, are killed one after the other, each
time when psctl has reported that the last one is replaced (for servers: that every shard has its replicas again), and
some clocks have passed. Rank 0 writes the time at which the values of each clock have arrived. The pause of a kill is
the longest time between two of them from the kill until two seconds after it; the median step, and the longest one in
the two seconds before the kill, show the share of the machine in it.
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
import threading
import time
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "bench" / "failover_job" / "job.yaml"
PSCTL = (sys.executable, "-m", "psctl")
COMPLETE, MISSING, JOINED = "servers again", "on one server only", "takes part"
"""Parts of psctl's lines: every shard has its replicas again; some have not; a server has joined."""

CONTINUES = "a new one continues the job"
"""Part of the line that a new coordinator prints."""

STEADY = 6.0
"""Seconds between a coordinator's start and its kill: one that ends at once three times ends the job."""

WINDOW = 2.0
"""Seconds before and after a kill that are measured."""

LIMIT = 300.0
"""Seconds for one replacement: a server imports torch and is filled, on a machine with other work too."""


class Output:
    """The lines that psctl prints, read by a thread.

    Args:
        lines: its stream.
    """

    def __init__(self, lines: IO[str]) -> None:
        self.lines: list[str] = []
        self._stream = lines
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stream:
            self.lines.append(line.rstrip())

    def replaced(self, kind: str, kills: int) -> bool:
        """Return whether so many processes were replaced, and every shard has its replicas."""
        lines = list(self.lines)
        if kind == "coordinator":
            return sum(CONTINUES in line for line in lines) == kills
        copies = [line for line in lines if COMPLETE in line or MISSING in line]
        return sum(JOINED in line for line in lines) == kills and (not copies or COMPLETE in copies[-1])


def processes_of(home: str, kind: str) -> list[int]:
    """Return the processes of a kind of this home's job, the oldest first."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline", "create_time", "pid"]):
        words = " ".join(process.info["cmdline"] or [])
        if (process.info["environ"] or {}).get("HOME") == home and f"psctl.{kind}.main" in words:
            found.append((process.info["create_time"], process.info["pid"]))
    return [pid for _, pid in sorted(found)]


def steps_of(log: Path) -> list[tuple[int, float]]:
    """Return (step, time of its values) of all complete lines."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(step), float(when)) for step, when in (line.split() for line in lines[:-1])]


def longest(steps: list[tuple[int, float]], begin: float, end: float) -> float:
    """Return the longest time without a step in an interval; both ends count as steps."""
    times = [begin, *(when for _, when in steps if begin < when < end), end]
    return max(b - a for a, b in itertools.pairwise(times))


def wait_for(what, name: str) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, f"not within {LIMIT:.0f} s: {name}"
        time.sleep(0.05)


def kill_in_turn(home: str, log: Path, output: Output, kind: str, kills: int, count: int) -> list[float]:
    """Kill processes of a kind; return the times."""
    moments: list[float] = []
    wait_for(lambda: len(steps_of(log)) > 10, "steps")
    for turn in range(kills):
        pids = processes_of(home, kind)
        assert len(pids) == count, f"{len(pids)} processes of kind {kind} instead of {count}: {output.lines[-20:]}"
        moments.append(time.time())
        os.kill(pids[0], signal.SIGKILL)  # of servers the oldest: it has shards
        end = moments[-1] + WINDOW
        wait_for(lambda end=end: any(when > end for _, when in steps_of(log)[-1:]), "the next clock")
        wait_for(lambda turn=turn: output.replaced(kind, turn + 1), "the replacement")
        before = len(steps_of(log))
        wait_for(lambda before=before: len(steps_of(log)) > before + 10, "steps")
        if kind == "coordinator":
            time.sleep(max(0.0, moments[-1] + STEADY + WINDOW - time.time()))
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--process", choices=("server", "coordinator"), default="server")
    parser.add_argument("--width", type=int, default=512, help="of the model's two layers")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "steps"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PSCTL_HOME": f"{home}/psctl"}
        words = f'args=["--log", "{log}", "--width", "{given.width}"]'
        command = [*PSCTL, "train", str(JOB), "--servers", str(given.servers), "--set", words]
        command += ["--set", f"replicas={given.replicas}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as training:
            assert training.stderr is not None
            output = Output(training.stderr)
            try:
                count = given.servers if given.process == "server" else 1
                moments = kill_in_turn(home, log, output, given.process, given.kills, count)
            finally:
                subprocess.run([*PSCTL, "stop", "-q"], env=environment, check=False)
                training.wait(60)
        steps = steps_of(log)
    pauses = [longest(steps, moment, moment + WINDOW) for moment in moments]
    before = [longest(steps, moment - WINDOW, moment) for moment in moments]
    each = [b - a for (_, a), (_, b) in itertools.pairwise(steps)]
    restored = sum("restored checkpoint=" in line for line in output.lines)
    parameters = 2 * given.width * (given.width + 1)
    kills = f"{len(moments)} kills of a {given.process}"
    print(f"{parameters:,} parameters, {given.servers} servers, {given.replicas} replica(s), {kills}")
    print(f"pause at a kill           median {statistics.median(pauses):.3f} s, maximum {max(pauses):.3f} s")
    print(f"longest step just before  median {statistics.median(before):.3f} s, maximum {max(before):.3f} s")
    print(f"median step {statistics.median(each):.3f} s; went back to a checkpoint {restored} times")
    print("each pause: " + " ".join(f"{pause:.3f}" for pause in pauses))


if __name__ == "__main__":
    main()
