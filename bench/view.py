"""What it costs to follow a job of many ranks: events read and applied, and drawings of the live screen.

    python bench/view.py [--workers 512] [--servers 64] [--hosts 64] [--seconds 20] [--size 200x60]

Every rank reports once a second, as in training, and rank 0's progress five times. Events are decoded from their lines,
as `psctl attach` reads them; the screen is drawn four times a second into memory. Figures are processor time. It prints
Markdown for docs/internals/measurements.md.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time

from psctl.job import events as kinds
from psctl.job.events import from_line, to_line
from psctl.view.console import Glyphs, make_console
from psctl.view.live_picture import picture
from psctl.view.live_screen import LiveScreen


class Terminal(io.StringIO):
    """A terminal that counts what is written."""

    def isatty(self) -> bool:
        return True


def reports(second: int, workers: int, servers: int, hosts: int) -> list[str]:
    """Return the lines of one second."""
    now = 1000.0 + second
    lines = []
    for role, count in (("worker", workers), ("server", servers)):
        for rank in range(count):
            state = kinds.StateChanged(
                time=now, role=role, rank=rank, host=f"node-{rank % hosts:03}", state="running", pid=1000 + rank,
                step=10 * second + rank % 3, cpu=90 + (rank + second) % 20, memory=3 << 30, sync=(rank + second) % 40,
                sends=1e8, receives=1e8,
            )  # fmt: skip
            lines.append(to_line(state))
    for part in range(5):
        progress = kinds.Progress(
            time=now + part / 5, step=10 * second + 2 * part, epoch=second // 10, metrics={"loss": 2.0 / (1 + second)},
            examples_per_second=1e5, bytes_per_second=1e9, sync_seconds=0.004, compute_seconds=0.1, staleness=0,
        )  # fmt: skip
        lines.append(to_line(progress))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--size", default="200x60")
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    stream = Terminal()
    console = make_console(stream, environment={"TERM": "xterm-256color"})
    console.size = (width, height)
    screen, glyphs = LiveScreen(console), Glyphs(console)
    roles = [kinds.RoleOf("worker", rank, f"node-{rank % given.hosts:03}") for rank in range(given.workers)]
    roles += [kinds.RoleOf("server", rank, f"node-{rank % given.hosts:03}") for rank in range(given.servers)]
    hosts = [f"node-{host:03}" for host in range(given.hosts)]
    screen.on_event(kinds.Started(time=999.0, job="large-1", hosts=hosts, roles=roles))
    applied, drawn, made, written = [], [], [], []
    for second in range(given.seconds):
        lines = reports(second, given.workers, given.servers, given.hosts)
        began = time.process_time()
        for line in lines:
            screen.on_event(from_line(line))
        applied.append((time.process_time() - began) / len(lines))
        written.append(-stream.tell())
        for _ in range(4):
            began = time.process_time()
            screen.draw()
            drawn.append(time.process_time() - began)
            began = time.process_time()
            picture(screen.state, width, height, 0.1, "", glyphs)
            made.append(time.process_time() - began)
        written[-1] += stream.tell()
    each, draw = statistics.median(applied), statistics.median(drawn)
    share = each * len(lines) + 4 * draw
    print(f"{given.workers} workers, {given.servers} servers, {len(lines)} events/s, a terminal of {given.size}\n")
    print("| | |\n|---|---|")
    print(f"| an event: read and applied | {1e6 * each:.0f} us |")
    print(f"| a drawing | {1e3 * draw:.1f} ms, of it the rows {1e3 * statistics.median(made):.1f} ms |")
    print(f"| bytes written a second | {statistics.median(written):.0f} |")
    print(f"| share of a processor, four drawings a second | {share:.0%} |")


if __name__ == "__main__":
    main()
