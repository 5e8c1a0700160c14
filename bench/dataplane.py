"""Throughput of the data plane on one machine, over TCP and in shared memory, beside Gloo, torch RPC, Ray, sockets.

    python bench/dataplane.py [--rounds 5] [--congestion both|installed|reno] [--work big,call,each,small] [--markdown]

Two workers and two servers (for 4 KB: one and one) of each contestant are started once and then take turns, so that
other load of the machine affects all alike. psctl's are a job of `psctl train` on the embedded local cluster which
works through `prepare` and `run.store()`; a worker waits for its turn in a socket. A time is the slower worker's. Ray
takes part where it is installed beside psctl.

    big     64 MiB a worker in 16 parameters: from backward until the mean of all workers stands in .grad
    call    1,000 keys of 4 KB a worker, pushed in one call and pulled in one
    each    the same, key by key, all under way at once
    small   one push and pull of 4 KB, alone; `echo`: an open socket's 4 KB there and back, one round trip

`installed`: every socket has its own default (psctl: `congestion: auto`). `reno`: the whole run is in a
network namespace whose default is reno (root). GB are 10^9 bytes of payload, both directions counted; processor seconds
are of all processes of a contestant, system time included. Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PSCTL = (sys.executable, "-m", "psctl")
MEGA = 16 << 20
BYTES = {"big": 4 * MEGA, "call": 4_096_000, "each": 4_096_000, "small": 4096, "named": 4096, "echo": 4096}
REPEATS = {"big": 4, "call": 20, "each": 1, "small": 300, "named": 300, "echo": 300}
RAY = importlib.util.find_spec("ray") is not None
CPUCLOCK = 2  # of a whole process, as clock_getcpuclockid(3) makes it


def processor_seconds(pid: int) -> float:
    """Return user and system time of a process, to the nanosecond."""
    return time.clock_gettime((~pid) << 3 | CPUCLOCK)


@dataclass
class Contestant:
    """The processes of one contestant. `lines`: to its workers; `doing`: their names for each work."""

    name: str
    doing: dict[str, str]
    lines: list[Any] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    memory: int = 0

    def go(self, work: str, repeats: int) -> None:
        """Have the work done, and record its time."""
        before = {pid: processor_seconds(pid) for pid in self.pids if psutil.pid_exists(pid)}
        for line in self.lines:
            print(self.doing[work], repeats, file=line, flush=True)
        slowest = max(float(line.readline()) for line in self.lines)
        self.pids = [pid for pid in before if psutil.pid_exists(pid)]  # Ray ends helpers that idle
        spent = sum(processor_seconds(pid) - before[pid] for pid in self.pids)
        self.seconds.setdefault(work, []).append(slowest)
        moved = 2 * BYTES[work] * len(self.lines) * repeats
        self.processor.setdefault(work, []).append(spent / moved * 1e9)


class Bench:
    """Starts contestants and gives turns.

    Args:
        folder: for sockets and homes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._control = socket.socket(socket.AF_UNIX)
        self._control.bind(str(folder / "control"))
        self._control.listen(64)
        self._control.settimeout(180)

    def _meet(self, made: Contestant, workers: int) -> Contestant:
        lines: dict[int, Any] = {}
        while len(lines) < workers:
            line, _ = self._control.accept()
            file = line.makefile("rw")
            said = json.loads(file.readline())
            assert said["group"] == made.name, f"{said} while {made.name} starts"
            lines[said["rank"]] = file
            made.pids.append(said["pid"])
        made.lines = [lines[rank] for rank in sorted(lines)]
        return made

    @contextmanager
    def psctl(
        self, name: str, doing: dict[str, str], count: int, length: int, each: int, *, shared: bool = False,
        sealed: bool = True,
    ) -> Iterator[Contestant]:  # fmt: skip
        """Start a job with so many workers and as many servers; unless `shared`, all bytes travel over TCP."""
        home = self._folder / name
        home.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "PSCTL_HOME": str(home / "psctl")}
        environment["PSCTL_SHARED_MEMORY"] = "on" if shared else "off"
        words = ["--control", str(self._folder / "control"), "--group", name, "--count", count, "--length", length]
        command = [*PSCTL, "train", str(HERE / "dataplane_job" / "job.yaml"), "-d", "-o", "json"]
        command += [
            "--workers",
            str(each),
            "--servers",
            str(each),
            "--set",
            f"args={json.dumps(list(map(str, words)))}",
        ]
        if not sealed:
            cluster = home / "open.yaml"
            lines = [
                "name: open",
                f"hosts: [{{address: local, slots: {each}}}]",
                f"runtime: {{environment: existing, python: {sys.executable}}}",
            ]
            cluster.write_text("\n".join([*lines, "network: {encryption: off}", ""]))
            command += ["--cluster", str(cluster)]
            up = [*PSCTL, "up", str(cluster)]
            subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            made = self._meet(Contestant(name, doing), each)
            for process in psutil.process_iter(["environ", "pid"]):
                theirs = process.info["environ"] or {}
                if theirs.get("HOME") == str(home) and theirs.get("PSCTL_ROLE") == "server":
                    made.servers.append(process.info["pid"])
            assert len(made.servers) == each, made.servers
            made.pids += made.servers
            yield made
        finally:
            for line in made.lines:
                line.close()
            subprocess.run([*PSCTL, "stop", "-q", "--force"], env=environment, check=False)

    @contextmanager
    def peers(self, kind: str, name: str, doing: dict[str, str], each: int) -> Iterator[Contestant]:
        """Start a peer's processes."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        control = str(self._folder / "control")
        command = [sys.executable, str(HERE / "dataplane_peers.py"), kind]
        processes = [
            subprocess.Popen([*command, *map(str, (rank, each, each, port, control, name))]) for rank in range(2 * each)
        ]
        made: Contestant | None = None
        try:
            made = self._meet(Contestant(name, doing), each)
            made.servers = [process.pid for process in processes[each:] if process.poll() is None]
            for pid in list(made.servers):
                made.servers += [child.pid for child in psutil.Process(pid).children(recursive=True)]
            made.pids += made.servers
            yield made
        finally:
            for pid in made.servers[::-1] if made is not None else []:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in processes:
                process.kill()
                process.wait()


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def measure(rounds: int, works: list[str]) -> list[Contestant]:
    """Run all; the first round warms up and does not count."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench(Path(folder))
        enter: Callable[[Any], Contestant] = stack.enter_context
        found = []
        if set(works) & {"big", "call", "each"}:
            found += [
                enter(bench.psctl("psctl", same("big", "call", "each"), 16, MEGA // 16, 2)),
                enter(bench.psctl("psctl open", same("big", "call"), 16, MEGA // 16, 2, sealed=False)),
                enter(bench.psctl("psctl shared", same("big", "call", "each"), 16, MEGA // 16, 2, shared=True)),
                enter(bench.peers("gloo", "gloo", same("big", "call"), 2)),
                enter(bench.peers("rpc", "torch RPC", same("big", "call", "each"), 2)),
                enter(bench.peers("socket", "open socket", same("big", "call"), 2)),
                *([enter(bench.peers("ray", "Ray", same("big", "call", "each"), 2))] if RAY else []),
            ]
        if "small" in works:
            found += [
                enter(bench.psctl("psctl 4 KB", {"small": "big", "named": "named"}, 1, 1024, 1)),
                enter(bench.peers("rpc", "torch RPC 4 KB", same("small"), 1)),
                enter(bench.peers("socket", "open socket 4 KB", same("small", "echo"), 1)),
            ]
        for turn in range(rounds + 1):
            for work in [*works, *(["named", "echo"] if "small" in works else [])]:
                for each in found:
                    if work in each.doing:
                        each.go(work, REPEATS[work] if turn else 2)
            print(f"round {turn} of {rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        for each in found:
            each.memory = max(psutil.Process(pid).memory_info().rss for pid in each.servers if psutil.pid_exists(pid))
            for numbers in (*each.seconds.values(), *each.processor.values()):
                del numbers[0]
        return found


def table(found: list[Contestant]) -> list[dict[str, Any]]:
    """Return a row a contestant and work."""
    rows = []
    for each in found:
        for work, seconds in each.seconds.items():
            ours = [one for one in found if one.name.startswith("psctl") and work in one.seconds]
            ratios = [statistics.median(b / a for a, b in zip(one.seconds[work], seconds, strict=True)) for one in ours]
            middle = statistics.median(seconds)
            rows.append(
                {
                    "work": work, "contestant": each.name,
                    "gb_per_second": 2 * BYTES[work] * len(each.lines) / middle / 1e9, "microseconds": middle * 1e6,
                    "least": min(seconds) * 1e6, "most": max(seconds) * 1e6,
                    "psctl_is_faster_by": ratios,
                    "processor_seconds_per_gb": statistics.median(each.processor[work]),
                    "server_megabytes": each.memory / 1e6,
                }
            )  # fmt: skip
    return sorted(rows, key=lambda row: list(BYTES).index(row["work"]))


def show(rows: list[dict[str, Any]], congestion: str) -> None:
    """Print Markdown; psctl is faster by: over sealed TCP, and in shared memory where that was measured."""
    print(f"\nCongestion control: {congestion}\n")
    print("| work | contestant | GB/s | us | least .. most | psctl is faster by | processor s/GB | server MB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        ratio = ", ".join(format(one, ".2f") for one in row["psctl_is_faster_by"]) or "-"
        print(
            f"| {row['work']} | {row['contestant']} | {row['gb_per_second']:.3g} | {row['microseconds']:.0f} |"
            f" {row['least']:.0f} .. {row['most']:.0f} | {ratio} |"
            f" {row['processor_seconds_per_gb']:.3g} | {row['server_megabytes']:.0f} |"
        )
    sys.stdout.flush()


def in_reno(arguments: list[str]) -> None:
    """Run this script again where reno is the default of every socket."""
    words = 'ip link set lo up && sysctl -qw net.ipv4.tcp_congestion_control=reno && exec "$@"'
    again = [sys.executable, str(Path(__file__).resolve()), *arguments, "--congestion", "here"]
    subprocess.run(["unshare", "--net", "sh", "-c", words, "sh", *again], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--congestion", choices=["both", "installed", "reno", "here"], default="both")
    parser.add_argument("--work", default="big,call,each,small")
    given = parser.parse_args()
    if given.congestion in ("both", "installed", "here"):
        default = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        show(table(measure(given.rounds, given.work.split(","))), f"default here {default}")
    if given.congestion in ("both", "reno"):
        in_reno(["--rounds", str(given.rounds), "--work", given.work])


if __name__ == "__main__":
    main()
