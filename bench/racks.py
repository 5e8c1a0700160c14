"""Steps under parameter servers on two racks of test hosts: gradients summed by host and by rack, by turns.

    python bench/racks.py [--hosts 6] [--rate 400] [--trunk 100] [--width 1200] [--rounds 5]

Test hosts of this machine (root, sshd, iproute2): half of them on another switch, one worker a host, servers on all.
`psctl up` measures the links. Each round runs a job with `sync.sums: host` and one with `rack`. Bytes are what crossed
the cable between the switches, both directions. It prints Markdown for docs/internals/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests.helpers.hosts import Hosts  # noqa: E402


def train(hosts: Hosts, home: dict[str, str], sums: str, given: argparse.Namespace) -> tuple[float, float, float]:
    """Run one job; return seconds a step, the prediction of a push and a pull, and MB between the racks a step."""
    args = f'["--width", "{given.width}", "--layers", "6", "--compute", "0", "--steps", "{given.steps}"]'
    before = hosts.between_racks()
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "training_job" / "job.yaml"), "-o", "jsonl",
         "--set", "script=buckets.py", "--set", f"args={args}", "--set", "sync.strategy=ps", "--set", "replicas=0",
         "--set", f"sync.sums={sums}", "--set", f"servers={given.hosts}", "--set", "checkpoint.on_stop=false"],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    plan = [event for event in events if event["event"] == "plan"][-1]
    predicted = next(each["seconds"] for each in plan["candidates"] if each["strategy"] == "ps")
    texts = [event["text"] for event in events if event["event"] == "log"]
    (seconds,) = [json.loads(text.removeprefix("measured "))["seconds"] for text in texts if text[:9] == "measured "]
    moved = (hosts.between_racks() - before) / (given.steps + 3) / 1e6
    return seconds, predicted, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=6)
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s of each host")
    parser.add_argument("--trunk", type=int, default=100, help="Mbit/s between the racks")
    parser.add_argument("--width", type=int, default=1200, help="of six square layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    names = [f"h{number}" for number in range(1, given.hosts + 1)]
    far = tuple(names[given.hosts // 2 :])
    found: dict[str, list[tuple[float, float, float]]] = {"host": [], "rack": []}
    with Hosts(names, rate=f"{given.rate}mbit", far=far, trunk=f"{given.trunk}mbit") as hosts:
        folder = Path(tempfile.mkdtemp(prefix="psctl-bench-racks-"))
        environment, file = hosts.make_home(folder / "home").env, folder / "lab.yaml"
        file.write_text(hosts.cluster_text())
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file)], env={**environment, "PYTHONPATH": str(ROOT)}, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=environment["HOME"],
        )  # fmt: skip
        for _ in range(given.rounds):
            for sums, rows in found.items():
                rows.append(train(hosts, environment, sums, given))
    size = 6 * 4 * (given.width**2 + given.width) / 1e6
    print(f"{given.hosts} hosts of {given.rate} Mbit/s in two racks, {given.trunk} Mbit/s between; {size:.1f} MB\n")
    print("| gradients are summed by | s a step | predicted s of push and pull | MB between the racks a step |")
    print("|---|---|---|---|")
    for sums, rows in found.items():
        seconds, predicted, moved = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {sums} | {seconds:.3f} | {predicted:.3f} | {moved:.1f} |")


if __name__ == "__main__":
    main()
