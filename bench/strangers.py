"""Ten thousand bad connections while a job trains: how much longer does a step take?

    python bench/strangers.py [--connections 10000] [--seconds 100]

A job on the embedded local cluster (two workers, two servers, bsp) trains; a process of the lowest priority, as if it
were another machine, opens connections to the ports of its servers and its coordinator, spread evenly over the time,
in turns of five sorts: bytes that are no TLS, TLS with another job's certificate, with an older incarnation's of a job
of the same name, half open (connected and silent), and a hello that drips byte by byte. Turns of five seconds with and
without them alternate; the figure is the ratio of the medians of rank 0's step times. Memory is what each
process that is spoken to held before and after.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from psctl.net.tls import make_context  # noqa: E402
from psctl.wire.authority import issue, make_authority  # noqa: E402
from psctl.words import Member  # noqa: E402

JOB = ROOT / "bench" / "failover_job" / "job.yaml"
PSCTL = (sys.executable, "-m", "psctl")
TURN = 5.0
"""Seconds with strangers, then as many without."""


def context(job: str, incarnation: int) -> ssl.SSLContext:
    """Return the TLS of a member that has nothing to do with the running job, whatever its name says."""
    authority = make_authority(job, time.time())
    pair = issue(authority, job, Member("worker", 0, incarnation), time.time())
    made = make_context(authority.certificate_pem, pair.certificate_pem, pair.key_pem, accepting=False)
    made.verify_mode = ssl.CERT_NONE  # a stranger does not care whom it speaks to
    return made


class Strangers:
    """Opens bad connections.

    Args:
        ports: where.
        job: name of the job that trains.
    """

    def __init__(self, ports: list[int], job: str) -> None:
        self.made = 0
        self._ports = itertools.cycle(ports)
        self._held: list[socket.socket] = []
        other, older = context("other-1", 0), context(job, 0)
        self._sorts: list[Callable[[socket.socket], None]] = [
            lambda line: line.sendall(b"GET / HTTP/1.1\r\n\r\n"),
            lambda line: self._shake(line, other),
            lambda line: self._shake(line, older),
            self._held.append,
            self._drip,
        ]

    def one(self) -> None:
        """Open the next one; those that are held open are as many as a hundred."""
        line = socket.create_connection(("127.0.0.1", next(self._ports)), 5)
        sort = self._sorts[self.made % len(self._sorts)]
        self.made += 1
        try:
            sort(line)
        except OSError:
            pass  # it was refused, as it should be
        finally:
            if line not in self._held:
                line.close()
            while len(self._held) > 100:
                self._held.pop(0).close()

    def _shake(self, line: socket.socket, own: ssl.SSLContext) -> None:
        line.settimeout(5)
        with own.wrap_socket(line) as tls:
            tls.recv(1)

    def _drip(self, line: socket.socket) -> None:
        line.send(b"\x16")
        self._held.append(line)


def attack(ports: list[int], job: str, rate: float, control: int, done: int) -> None:
    """Body of the strangers' process: as long as `control` says "on", `rate` connections a second."""
    os.nice(19)
    strangers, state = Strangers(ports, job), {"on": False, "over": False}

    def listen() -> None:
        while word := os.read(control, 1):
            state["on"] = word == b"1"
        state["over"] = True

    threading.Thread(target=listen, daemon=True).start()
    begun, owed = time.monotonic(), 0.0
    while not state["over"]:
        now = time.monotonic()
        owed, begun = owed + (now - begun) * rate if state["on"] else 0.0, now
        while owed >= 1 and state["on"]:
            strangers.one()
            owed -= 1
        time.sleep(0.005)
    os.write(done, json.dumps(strangers.made).encode())


def processes(home: str) -> list[psutil.Process]:
    """Return the job's processes that listen to peers."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("HOME") == home
        and (process.info["environ"] or {}).get("PSCTL_ROLE") in ("server", "coordinator")
    ]


def memory(home: str) -> dict[str, int]:
    """Return bytes that each process holds."""
    return {
        f"{process.info['environ']['PSCTL_ROLE']} {process.info['environ'].get('RANK', '')}".strip(): (
            process.memory_info().rss
        )
        for process in processes(home)
    }


def listening(home: str) -> list[int]:
    return sorted(
        {
            connection.laddr.port
            for process in processes(home)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    )


def steps_of(log: Path) -> list[float]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [float(line.split()[1]) for line in lines[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=100.0, help="with strangers; as many without")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "steps"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PSCTL_HOME": f"{home}/psctl"}
        command = [*PSCTL, "train", str(JOB), "-d", "-o", "json", "--servers", "2", "--set", "replicas=0"]
        command += ["--set", f'args=["--log", "{log}", "--width", "512"]']
        started = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        job = json.loads(started.stdout)["job"]
        try:
            while len(steps_of(log)) < 100:
                time.sleep(0.5)
            report(*run(home, log, job, given.connections, given.seconds))
        finally:
            subprocess.run([*PSCTL, "stop", "-q", "--force"], env=environment, check=False)


def run(home: str, log: Path, job: str, connections: int, seconds: float) -> tuple[list[float], list[float], int, str]:
    """Alternate; return (steps without, steps with, connections made, what became of memory)."""
    control, ours = os.pipe()
    answer, theirs = os.pipe()
    ports, before = listening(home), memory(home)
    if not (child := os.fork()):
        os.close(ours)
        attack(ports, job, connections / seconds, control, theirs)
        os._exit(0)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * round(seconds / TURN)):
        on = bool(turn % 2)
        os.write(ours, b"1" if on else b"0")
        begun = time.time()
        time.sleep(TURN)
        inside = [when for when in steps_of(log) if begun < when < begun + TURN]
        times[on] += [b - a for a, b in itertools.pairwise(inside)]
    after = memory(home)
    grown = ", ".join(f"{name} {before[name] / 1e6:.0f} to {after[name] / 1e6:.0f} MB" for name in sorted(before))
    os.close(ours)
    made = int(json.loads(os.read(answer, 100)))
    os.waitpid(child, 0)
    return times[False], times[True], made, grown


def report(without: list[float], during: list[float], made: int, grown: str) -> None:
    quiet, loud = statistics.median(without), statistics.median(during)
    print(f"{made} bad connections, load {os.getloadavg()[0]:.1f}")
    print(f"step without them  median {quiet * 1e3:.2f} ms ({len(without)} steps)")
    print(f"step with them     median {loud * 1e3:.2f} ms ({len(during)} steps): {loud / quiet - 1:+.1%}")
    print(f"mean               {statistics.mean(without) * 1e3:.2f} ms and {statistics.mean(during) * 1e3:.2f} ms")
    print(f"memory: {grown}")


if __name__ == "__main__":
    main()
