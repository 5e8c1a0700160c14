"""Steps under a parameter server while a group reads all parameters, beside steps without a group, by turns.

    python bench/readers.py [--rate 400] [--width 800] [--compute 0.5] [--steps 40] [--rounds 5]

Test hosts of this machine (root, sshd, iproute2): two workers, a server and a reader, each on a host. The server's
link is the limit: workers pull everything at every step, and the reader's bytes pass the same link. It prints Markdown
for docs/internals/measurements.md.
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

LAYERS = 6
CASES: dict[str, int] = {"none": 0, "every 10th step": 10, "every step": 1}
"""How often the group reads; 0: there is none."""


def train(home: dict[str, str], every: int, given: argparse.Namespace) -> tuple[float, float, float]:
    """Run one job; return seconds a step, the number of reads, and the seconds from one read to the next."""
    args = f'["--width", "{given.width}", "--layers", "{LAYERS}", "--compute", "{given.compute}"'
    reads = f'{args.rpartition(", ")[0].rpartition(", ")[0]}, "--every", "{every}"]'
    group = f"groups=[{{name: read, script: read.py, hosts: [h4], args: {reads}}}]"
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "train", str(ROOT / "bench" / "training_job" / "job.yaml"), "-o", "jsonl",
         "--set", "script=buckets.py", "--set", f'args={args}, "--steps", "{given.steps}"]', "--set", "workers=2",
         "--set", "sync.strategy=ps", "--set", "sync.update=server", "--set", "servers=1",
         *(("--set", group) if every else ())],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    texts = [event["text"] for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "log"]
    (steps,) = [json.loads(text.removeprefix("measured ")) for text in texts if text.startswith("measured ")]
    if not every:
        return steps["seconds"], 0, 0.0
    (found,) = [json.loads(text.removeprefix("read ")) for text in texts if text.startswith("read ")]
    return steps["seconds"], found["reads"], found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=400, help="Mbit/s of each host")
    parser.add_argument("--width", type=int, default=800, help="of six square layers")
    parser.add_argument("--compute", type=float, default=0.5, help="seconds of a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CASES}
    with Hosts(["h1", "h2", "h3", "h4"], rate=f"{given.rate}mbit") as hosts:
        folder = Path(tempfile.mkdtemp(prefix="psctl-bench-readers-"))
        environment, file = hosts.make_home(folder / "home").env, folder / "lab.yaml"
        text = hosts.cluster_text()
        roles = {"h1": "worker", "h2": "worker", "h3": "server", "h4": "server"}
        lines = "".join(f"  - {{address: {name}, roles: [{role}]}}\n" for name, role in roles.items())
        file.write_text(f"{text[: text.index('hosts:')]}hosts:\n{lines}")
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file)], env={**environment, "PYTHONPATH": str(ROOT)}, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=environment["HOME"],
        )  # fmt: skip
        for _ in range(given.rounds):
            for name, every in CASES.items():
                found[name].append(train(environment, every, given))
    size = LAYERS * 4 * (given.width**2 + given.width) / 1e6
    print(f"Two workers, a server and a reader on hosts of {given.rate} Mbit/s; {size:.1f} MB; {given.steps} steps\n")
    print("| the group reads | s a step | reads | s from one read to the next |")
    print("|---|---|---|---|")
    for name, rows in found.items():
        seconds, reads, pause = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {seconds:.3f} | {reads:.0f} | {pause:.2f} |")


if __name__ == "__main__":
    main()
