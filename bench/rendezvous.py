"""What it costs to reach the store behind MASTER_PORT, and to start a Gloo group, on test hosts.

    python bench/rendezvous.py [--hosts 4]

One worker a host, on test hosts of this machine (root, sshd, iproute2). The first host is the head, which holds the
store; the others reach it through their agents. "first" is the first connection, which the store's process is
started for; "group" is a connection, init_process_group, one all-reduce of 4 bytes, and destroy_process_group.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tests.helpers.hosts import Hosts  # noqa: E402
from tests.helpers.running import Psctl  # noqa: E402

JOB = ROOT / "bench" / "rendezvous_job" / "job.yaml"
LIMIT = 300.0


def main() -> None:
    """Run the job and print a line a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    wanted = parser.parse_args()
    with Hosts(wanted.hosts) as hosts, tempfile.TemporaryDirectory() as folder:
        home = hosts.make_home(Path(folder) / "home")
        cluster = home.path / "cluster.yaml"
        cluster.write_text(hosts.cluster_text())
        psctl = Psctl(home.path, environment=home.env)
        run = psctl.run("train", str(JOB), "--cluster", str(cluster), "-o", "jsonl", timeout=LIMIT)
        if run.code:
            raise SystemExit(str(run))
    texts = [event["text"] for event in run.of("log") if event["text"].startswith("measured ")]
    print(f"{'rank':>4} {'first':>9} {'connect':>9} {'add':>9} {'get':>9} {'group':>9}   milliseconds, medians")
    for each in sorted((json.loads(text.partition(" ")[2]) for text in texts), key=lambda found: found["rank"]):
        times = "".join(f" {1000 * each[name]:9.3f}" for name in ("first", "connect", "add", "get", "group"))
        print(f"{each['rank']:>4}{times}")


if __name__ == "__main__":
    main()
