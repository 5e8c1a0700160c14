"""The rate that psctl measures between two hosts, beside iperf3's and the rate that was set.

    python bench/links.py [--runs 5] [--rates 100,200,500] [--congestion auto] [--quick]

Two test hosts of this machine (root, sshd, iproute2) with shaped links; both tools measure in turn in one run, the
figure is the median of each. iperf3 counts at its receiver, the first second left out (--omit), as psctl leaves out the
burst of the shaper. The set rate counts headers; payload is at most 0.956 of it at an MTU of 1500.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from psctl.launch.clusters import choose_cluster  # noqa: E402
from psctl.launch.home import Home  # noqa: E402
from psctl.launch.hosts.converge import inspect  # noqa: E402
from psctl.launch.measure import link_measurement  # noqa: E402
from psctl.remote.fleet import Fleet  # noqa: E402
from tests.helpers.hosts import PATH, Hosts  # noqa: E402


def iperf(hosts: Hosts, congestion: str, seconds: int = 3) -> float:
    """Return the payload bytes/s that iperf3 moves from h1 to h2."""
    inner = ["env", "-i", f"PATH={PATH}", "iperf3"]
    address = hosts["h2"].addresses[-1]
    with subprocess.Popen(
        [*hosts.command("h2"), *inner, "-s", "-1", "-B", address, "--forceflush"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            assert server.poll() is None, "iperf3 does not listen"
        chosen = [] if congestion == "auto" else ["-C", congestion]
        done = hosts.exec("h1", ["iperf3", "-c", address, "-t", str(seconds), "--omit", "1", "-J", *chosen])
        server.communicate()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def psctl(
    hosts: Hosts, folder: Path, congestion: str, effort: link_measurement.MeasurementEffort
) -> link_measurement.Measurements:
    """Return what psctl measures between h1 and h2."""
    home = folder / "home"
    if not home.exists():
        hosts.make_home(home)
    file = folder / "cluster.yaml"
    file.write_text(hosts.cluster_text(more=f"network: {{congestion: {congestion}}}\n"))
    state = Home(folder / "psctl")
    chosen, config = choose_cluster(state, str(file)), home / ".ssh" / "config"
    with inspect(state, chosen, lambda chosen, _: Fleet.connect(chosen.spec, config=config)) as reached:
        return link_measurement.measure(reached, lambda *_: None, effort)


def compare(rate: int, runs: int, congestion: str, effort: link_measurement.MeasurementEffort) -> dict[str, float]:
    """Measure in turn at a rate in Mbit/s; all figures in Mbit/s of payload."""
    theirs, ours, spreads = [], [], []
    with Hosts(2, rate=f"{rate}mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            theirs.append(iperf(hosts, congestion) * 8e-6)
            found = [each for one in psctl(hosts, Path(folder), congestion, effort).series for each in one.samples]
            ours.append(next(each.rate for each in found if each.a == "h1") * 8e-6)
            spreads.append(max(each.spread for each in found))
    a, b = statistics.median(theirs), statistics.median(ours)
    return {"iperf3": a, "psctl": b, "difference": b / a - 1, "spread": max(spreads)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rates", default="100,200,500")
    parser.add_argument("--congestion", default="auto")
    parser.add_argument("--quick", action="store_true", help="as `up` measures, not as `topo --measure` does")
    given = parser.parse_args()
    if shutil.which("iperf3") is None:
        print("iperf3 is not installed: apt install iperf3")
        return 1
    effort = link_measurement.QUICK if given.quick else link_measurement.THOROUGH
    worst = 0.0
    print("Mbit/s\tset\tiperf3\tpsctl\tdifference\tspread")
    for rate in map(int, given.rates.split(",")):
        row = compare(rate, given.runs, given.congestion, effort)
        worst = max(worst, abs(row["difference"]))
        print(f"\t{rate}\t{row['iperf3']:.1f}\t{row['psctl']:.1f}\t{row['difference']:+.2%}\t{row['spread']:.1%}")
    return int(worst > 0.02)


if __name__ == "__main__":
    sys.exit(main())
