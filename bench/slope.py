"""The time of a push and a pull against workers over servers, m/n, on test hosts with shaped links, and its picture.

    python bench/slope.py [--rate 200] [--size 10MB] [--svg docs/internals/slope.svg]

Eight test hosts of this machine (root, sshd, iproute2): up to four hold a worker each, the other four serve. It runs
`psctl bench pushpull -o json` for every number of workers and of servers, as a user would. A server receives m/n of the
bytes of a worker's gradients and sends as many, so the time grows with m/n: O(m) with one server, O(m/n) with n. Where
m < n a worker's own port is the limit, S/B. It prints Markdown for docs/internals/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from links import iperf  # noqa: E402

from psctl.units import parse_size  # noqa: E402
from tests.helpers.hosts import Hosts  # noqa: E402

WORKERS, SERVERS = (1, 2, 3, 4), (1, 2, 4)
WIDE, HIGH, EDGE = 480, 320, 50


def measure(home: dict[str, str], workers: int, servers: int, size: str) -> dict[str, Any]:
    """Return the record of `psctl bench pushpull`."""
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "bench", "pushpull", "--cluster", "lab", "--workers", str(workers), "--servers",
         str(servers), "--sizes", size, "-o", "json"],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    record: dict[str, Any] = json.loads(done.stdout)["results"][0]
    return record


def picture(rows: list[tuple[float, float]]) -> str:
    """Return an SVG of (m/n, time in units of S/B), with the line through the origin of slope 1."""
    most = max(max(ratio, units) for ratio, units in rows) * 1.1

    def x(value: float) -> float:
        return EDGE + value / most * (WIDE - 2 * EDGE)

    def y(value: float) -> float:
        return HIGH - EDGE - value / most * (HIGH - 2 * EDGE)

    marks = "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" fill="#1f77b4"/>' for a, b in rows)
    ticks = "".join(
        f'<text x="{x(n):.1f}" y="{HIGH - EDGE + 16}" text-anchor="middle">{n}</text>'
        f'<text x="{EDGE - 8}" y="{y(n) + 4:.1f}" text-anchor="end">{n}</text>'
        for n in range(int(most) + 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDE}" height="{HIGH}" fill="white"/>'
        f'<path d="M{EDGE} {EDGE}V{HIGH - EDGE}H{WIDE - EDGE}" fill="none" stroke="#444"/>'
        f'<path d="M{x(0):.1f} {y(0):.1f}L{x(most):.1f} {y(most):.1f}" stroke="#999" stroke-dasharray="4 4"/>'
        f'{marks}{ticks}<text x="{WIDE / 2}" y="{HIGH - 10}" text-anchor="middle">workers / servers</text>'
        f'<text x="{EDGE}" y="{EDGE - 14}">seconds of a push and a pull, in units of S/B; the line: m/n</text></svg>\n'
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s")
    parser.add_argument("--size", default="10MB")
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    if os.getuid() != 0:
        print("needs root")
        return 1
    size = parse_size(given.size)
    with Hosts(2, rate=f"{given.rate}mbit") as pair:
        rate = iperf(pair, "auto")
    print(f"{given.size} a worker, payload rate {rate * 8e-6:.1f} Mbit/s (iperf3), S/B = {size / rate:.3f} s\n")
    print("| workers | servers | m/n | seconds | in S/B | predicted in S/B |\n|---|---|---|---|---|---|", flush=True)
    rows = []
    with Hosts(8, rate=f"{given.rate}mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        home, file = hosts.make_home(Path(folder) / "home"), Path(folder) / "lab.yaml"
        roles = "".join(
            f"  - {{address: {name}, roles: [{'worker' if number < 4 else 'server'}]}}\n"
            for number, name in enumerate(hosts.hosts)
        )
        file.write_text(hosts.cluster_text(names=["gone"]).replace("  - gone\n", roles))
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file)], env={**home.env, "PYTHONPATH": str(ROOT)}, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=home.env["HOME"],
        )  # fmt: skip
        for servers in SERVERS:
            for workers in WORKERS:
                found = measure(home.env, workers, servers, given.size)
                seconds, unit = found["seconds"]["median"], size / rate
                rows.append((workers / servers, seconds / unit))
                print(f"| {workers} | {servers} | {workers / servers:.2f} | {seconds:.3f} | {seconds / unit:.2f} "
                      f"| {found['predicted_seconds'] / unit:.2f} |", flush=True)  # fmt: skip
    limited = [(ratio, units) for ratio, units in rows if ratio >= 1]
    slope = sum(a * b for a, b in limited) / sum(a * a for a, _ in limited)
    print(f"\nSlope through the origin where m >= n: {slope:.2f} S/B for each m/n.")
    if given.svg:
        given.svg.write_text(picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
