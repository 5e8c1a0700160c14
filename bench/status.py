"""Seconds of `psctl status` on idle hosts and during a job, and of `psctl topo --from` and `psctl --version`.

    python bench/status.py [--hosts 4] [--runs 7]

The hosts are test hosts of this machine (root, sshd), made ready by `psctl up`. The job is templates/digits with a
worker a host, which keeps the machine's processors busy; `status` is asked once it trains. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time

from startup import DIGITS, PSCTL, ROOT, on_hosts

STEPS = 50
"""Steps of the job before the first question: all of its processes have started."""


def seconds(words: list[str], environment: dict[str, str], runs: int) -> list[float]:
    """Return the seconds of a command, run several times."""
    found = []
    for _ in range(runs):
        begin = time.monotonic()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*PSCTL, *words], check=True, env=environment, **quiet)
        found.append(time.monotonic() - begin)
    return found


def show(name: str, found: list[float]) -> None:
    """Print one row."""
    print(f"{name:24} median {statistics.median(found):.2f} s  {[round(each, 2) for each in found]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=7)
    given = parser.parse_args()
    with on_hosts(given.hosts) as (arguments, environment, _):
        show("--version", seconds(["--version"], environment, given.runs))
        machines = ["topo", "--from", str(ROOT / "clusters" / "pcie-box.json")]
        show("topo --from", seconds(machines, environment, given.runs))
        show("status, idle", seconds(["status"], environment, given.runs))
        command = [*PSCTL, "train", str(DIGITS), "-o", "jsonl", "--set", 'args=[--epochs, "100000"]', *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as job:
            assert job.stdout is not None
            for line in job.stdout:
                event = json.loads(line)
                if event["event"] == "progress" and event["step"] >= STEPS:
                    break
            else:
                raise RuntimeError(f"the job ended with {job.wait()} before step {STEPS}; train it alone to see why")
            show("status during a job", seconds(["status"], environment, given.runs))
            show("jobs during a job", seconds(["jobs"], environment, given.runs))
            subprocess.run([*PSCTL, "stop", "digits-1", "--force"], check=True, env=environment)
            job.communicate()


if __name__ == "__main__":
    main()
