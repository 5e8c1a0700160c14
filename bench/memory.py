"""Memory of servers with large parameters, and its growth over many steps.

    python bench/memory.py [--width 3536] [--workers 2] [--servers 2] [--replicas 0] [--flat 10000]

Trainings on the embedded local cluster with AdamW, whose state is twice the parameters. A server's bound is
2 (parameters + state) + (workers + 1) gradients of its part (with replicas it holds so many parts more); the memory
of a server of a tiny model (Python and torch) is subtracted. Private: not shared; Pss: with its part of the memory that
it shares with workers. Each with shared memory on and off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from failover import JOB, PSCTL, ROOT, notes_of, servers_of, wait_for

MB = 1e6
SMALL = 64


@contextmanager
def training(given: argparse.Namespace, width: int, *, shared: bool) -> Iterator[tuple[str, Path]]:
    """Run a job; give its home and the file of rank 0's steps."""
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "steps"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PSCTL_HOME": f"{home}/psctl"}
        if not shared:
            environment["PSCTL_SHARED_MEMORY"] = "off"
        command = [*PSCTL, "train", str(JOB), "-q", "--workers", str(given.workers), "--servers", str(given.servers)]
        command += ["--set", f'args=["--log", "{log}", "--width", "{width}"]']
        command += ["--set", f"replicas={given.replicas}"]
        if not shared:
            command += ["--set", "env.PSCTL_SHARED_MEMORY=off"]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                yield home, log
            finally:
                subprocess.run([*PSCTL, "stop", "-q"], env=environment, check=False)
                process.wait(60)


def held(home: str) -> tuple[float, float]:
    """Return (private, proportional) megabytes of the server that has most."""
    most = (0.0, 0.0)
    for pid in servers_of(home):
        found = dict.fromkeys(("Private_Clean", "Private_Dirty", "Pss"), 0)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split()[:2]
            if name[:-1] in found:
                found[name[:-1]] = int(size)
        private = (found["Private_Clean"] + found["Private_Dirty"]) * 1024 / MB
        most = max(most, (private, found["Pss"] * 1024 / MB))
    return most


def at_step(home: str, log: Path, step: int) -> tuple[float, float]:
    """Return the memory of all servers when rank 0 has done `step`."""
    wait_for(lambda: any(done >= step for done, _ in notes_of(log)[-1:]), f"step {step}")
    return held(home)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3536, help="of the model's two layers: 25 M parameters")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--flat", type=int, default=10_000, help="steps of the tiny model; 0: leave it out")
    given = parser.parse_args()
    parameters = 2 * given.width * (given.width + 1)
    part = 4 * parameters / given.servers / MB * (1 + given.replicas)
    bound = 2 * (part + 2 * part) + (given.workers + 1) * part
    print(f"{parameters:,} parameters, {given.workers} workers, {given.servers} servers, {given.replicas} replica(s)")
    print(f"bound of a server: {bound:.0f} MB; its part of the parameters: {part:.0f} MB")
    for shared in (True, False):
        name = "shared memory" if shared else "sealed TCP"
        with training(given, SMALL, shared=shared) as (home, log):
            base, base_pss = at_step(home, log, 50)
            if given.flat:
                flat = [at_step(home, log, given.flat * tenth // 10)[0] for tenth in range(1, 11)]
                print(f"{name}, private MB at each tenth of {given.flat:,} steps: "
                      + " ".join(f"{each:.1f}" for each in flat), flush=True)  # fmt: skip
        with training(given, given.width, shared=shared) as (home, log):
            for step in (5, 20, 40):
                private, pss = at_step(home, log, step)
                own, all_of_it = private - base, pss - base_pss
                print(f"{name}, step {step}: {own:.0f} MB of its own ({own / bound:.2f} of the bound),"
                      f" {all_of_it:.0f} MB with its part of what is shared ({all_of_it / bound:.2f})",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
