"""The pause at a server's death: seconds from kill -9 to the next clock that is applied everywhere.

    python bench/failover.py [--kills 20] [--width 512] [--servers 3] [--replicas 1]

One training job on the embedded local cluster; its servers are killed one after the other, each time when psctl has
said that every shard has its replicas again, and some clocks have passed. After each clock rank 0 notes when its values
had arrived. The pause of a kill is the longest time without such a note from the kill until two seconds after it;
beside it stand the median step, and the longest one in the two seconds before the kill, which is the machine's doing.
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
WHOLE, BARE, JOINED = "servers again", "on one server only", "takes part"
"""Parts of the lines that say: every shard has its replicas again; it has not; a server has come."""

WINDOW = 2.0
"""Seconds before and after a kill that are looked at."""

LIMIT = 300.0
"""Seconds in which what must come comes: a server imports torch and is filled, on a machine that others use too."""


class Said:
    """What psctl prints, line by line, read by a thread.

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

    def whole_after(self, kills: int) -> bool:
        """Tell whether another server has come for each that was killed, and every shard has its replicas."""
        lines = list(self.lines)
        copies = [line for line in lines if WHOLE in line or BARE in line]
        return sum(JOINED in line for line in lines) == kills and (not copies or WHOLE in copies[-1])


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


def wait_for(what, name: str) -> None:
    end = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < end, f"not within {LIMIT:.0f} s: {name}"
        time.sleep(0.05)


def kill_in_turn(home: str, log: Path, said: Said, kills: int, count: int) -> list[float]:
    """Kill servers; return when."""
    moments: list[float] = []
    wait_for(lambda: len(notes_of(log)) > 10, "steps")
    for turn in range(kills):
        pids = sorted(servers_of(home), key=lambda pid: psutil.Process(pid).create_time())
        assert len(pids) == count, f"{len(pids)} servers where {count} should be: {said.lines[-20:]}"
        moments.append(time.time())
        os.kill(pids[0], signal.SIGKILL)  # the oldest: it has shards
        end = moments[-1] + WINDOW
        wait_for(lambda end=end: any(when > end for _, when in notes_of(log)[-1:]), "the next clock")
        wait_for(lambda turn=turn: said.whole_after(turn + 1), "all shards whole")
        before = len(notes_of(log))
        wait_for(lambda seen=before: len(notes_of(log)) > seen + 10, "steps")
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
        command = [*PSCTL, "train", str(JOB), "--servers", str(given.servers), "--set", words]
        command += ["--set", f"replicas={given.replicas}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True) as training:
            assert training.stderr is not None
            said = Said(training.stderr)
            try:
                moments = kill_in_turn(home, log, said, given.kills, given.servers)
            finally:
                subprocess.run([*PSCTL, "stop", "-q"], env=environment, check=False)
                training.wait(60)
        notes = notes_of(log)
    pauses = [longest(notes, moment, moment + WINDOW) for moment in moments]
    before = [longest(notes, moment - WINDOW, moment) for moment in moments]
    steps = [b - a for (_, a), (_, b) in itertools.pairwise(notes)]
    restored = sum("restored checkpoint=" in line for line in said.lines)
    parameters = 2 * given.width * (given.width + 1)
    print(f"{parameters:,} parameters, {given.servers} servers, {given.replicas} replica(s), {len(moments)} kills")
    print(f"pause at a kill           median {statistics.median(pauses):.3f} s, maximum {max(pauses):.3f} s")
    print(f"longest step just before  median {statistics.median(before):.3f} s, maximum {max(before):.3f} s")
    print(f"median step {statistics.median(steps):.3f} s; went back to a checkpoint {restored} times")
    print("each pause: " + " ".join(f"{pause:.3f}" for pause in pauses))


if __name__ == "__main__":
    main()
