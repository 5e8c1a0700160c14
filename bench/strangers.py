"""Step times of a job while ten thousand connections arrive that its processes must refuse.

    python bench/strangers.py [--connections 10000] [--seconds 100]
    python bench/strangers.py --each 500        what one of each sort costs a listener, without a job

A job on the embedded local cluster (two workers, two servers, bsp) trains; a process of the lowest priority, as if it
were another machine, opens connections to the ports of its servers and its coordinator, spread evenly over the time,
in turns of five sorts: bytes of another protocol; a process of another job, with that job's secret and certificate; an
older incarnation of worker/1 (which is killed for it at the start), with the job's own secret and a certificate of its
own authority; connected and silent; and an answer to the challenge that arrives byte by byte.

Turns of five seconds alternate: no connections; connections to the job; the same connections to a listener in the
process that opens them, which sends its challenge and closes. The plain figure is the ratio of the medians of rank 0's
step times in the second and the first turn, the net one that of the second and the third. The opening process does less
in the third turn, because a handshake without an answer costs it less too: the net figure is not too good. Memory is
that of each listening process before and after.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from psctl.errors import ConnectionFailed  # noqa: E402
from psctl.transport.connect import Acceptor  # noqa: E402
from psctl.transport.credentials import Credentials, make_context  # noqa: E402
from psctl.transport.peer_connection import PeerConnection  # noqa: E402
from psctl.transport.protocol import preauth  # noqa: E402
from psctl.transport.protocol.authority import Pair, issue, make_authority  # noqa: E402
from psctl.types import Member  # noqa: E402

JOB = ROOT / "bench" / "failover_job" / "job.yaml"
PSCTL = (sys.executable, "-m", "psctl")
TURN = 5.0
"""Seconds of a turn."""


Sort = Callable[[socket.socket], None]


class Proof(NamedTuple):
    """The credentials that a connecting process has."""

    secret: str
    context: ssl.SSLContext


def proof(authority: Pair, secret: str, job: str, member: Member) -> Proof:
    """Return the credentials of a member of this authority's job, under any name."""
    pair = issue(authority, job, member, time.time())
    made = make_context(authority.certificate_pem, pair.certificate_pem, pair.key_pem, accepting=False)
    made.verify_mode = ssl.CERT_NONE  # the listener's identity is not checked
    return Proof(secret, made)


class Strangers:
    """Opens bad connections.

    Args:
        other: the credentials of a process of another job.
        older: those of an older incarnation of this one.
    """

    def __init__(self, other: Proof, older: Proof) -> None:
        self.made = 0
        self._held: list[socket.socket] = []
        self.sorts: dict[str, Sort] = {
            "no TLS": lambda line: line.sendall(b"GET / HTTP/1.1\r\n\r\n"),
            "another job's": lambda line: self._shake(line, other),
            "older": lambda line: self._shake(line, older),
            "half open": self._held.append,
            "dripping": self._drip,
        }

    def one(self, port: int, sort: Sort | None = None) -> None:
        """Open the next one, of this sort or the next; at most a hundred are held open."""
        line = socket.create_connection(("127.0.0.1", port), 5)
        sort = sort or list(self.sorts.values())[self.made % len(self.sorts)]
        self.made += 1
        try:
            sort(line)
        except OSError:
            pass  # it was refused, as it should be
        finally:
            if line not in self._held:
                line.close()
            self.let_go(100)

    def let_go(self, most: int) -> None:
        """Close all that are held open except so many."""
        while len(self._held) > most:
            self._held.pop(0).close()

    def _shake(self, line: socket.socket, own: Proof) -> None:
        line.settimeout(5)
        greeting = line.recv(preauth.GREETING, socket.MSG_WAITALL)
        line.sendall(preauth.answer(own.secret, greeting))
        with own.context.wrap_socket(line) as tls:
            tls.recv(1)

    def _drip(self, line: socket.socket) -> None:
        line.send(b"\x16")
        self._held.append(line)


def dead_end() -> int:
    """Listen in this process, send a challenge on each connection and close it after the answer; return the port."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)

    def hang_up(line: socket.socket) -> None:
        with line, contextlib.suppress(ConnectionError):
            line.sendall(preauth.greet())
            line.recv(1)

    def serve() -> None:
        while True:
            threading.Thread(target=hang_up, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listening.getsockname()[1])


def attack(ports: list[int], strangers: Strangers, rate: float, control: int, done: int) -> None:
    """Body of the opening process: `rate` connections a second, to the job (j) or its own listener (d)."""
    os.nice(19)
    state = {"word": b"-"}

    def listen() -> None:
        while word := os.read(control, 1):
            state["word"] = word
        state["word"] = b"over"

    threading.Thread(target=listen, daemon=True).start()
    turns = {b"j": itertools.cycle(ports), b"d": itertools.repeat(dead_end())}
    begun, owed, bad = time.monotonic(), 0.0, 0
    while (word := state["word"]) != b"over":
        now = time.monotonic()
        owed, begun = owed + (now - begun) * rate if word in turns else 0.0, now
        while owed >= 1 and state["word"] == word:
            strangers.one(next(turns[word]))
            owed, bad = owed - 1, bad + (word == b"j")
        time.sleep(0.005)
    os.write(done, json.dumps(bad).encode())


def processes(home: str) -> dict[str, psutil.Process]:
    """Return the job's processes that listen to peers, by name: each has orders of its own."""
    found = {}
    for process in psutil.process_iter(["environ"]):
        its = process.info["environ"] or {}
        name = Path(its.get("PSCTL_ORDERS", "")).stem
        if its.get("HOME") == home and name.startswith(("server", "coordinator")):
            found[name] = process
    return found


def memory(home: str) -> dict[str, int]:
    """Return bytes that each process holds."""
    return {name: process.memory_info().rss for name, process in processes(home).items()}


def listening(home: str) -> list[int]:
    connections = [each for process in processes(home).values() for each in process.net_connections("tcp")]
    return sorted({each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN})


def older_worker(home: str, job: str) -> Proof:
    """Kill worker/1, so that another incarnation takes its place, and return the credentials of the killed one."""
    files = [json.loads(path.read_bytes()) for path in Path(home).rglob("orders.json")]
    orders = next(each for each in files if each.get("authority_key"))
    had = proof(Pair(orders["authority"], orders["authority_key"]), orders["preauth_secret"], job, Member("worker", 1))
    for process in psutil.process_iter(["environ"]):
        its = process.info["environ"] or {}
        if (its.get("HOME"), its.get("PSCTL_ROLE"), its.get("RANK")) == (home, "worker", "1"):
            process.kill()
    return had


def steps_of(log: Path) -> list[float]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [float(line.split()[1]) for line in lines[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=100.0, help="with strangers; as many twice without")
    parser.add_argument("--each", type=int, help="no job: what so many of each sort cost")
    given = parser.parse_args()
    other = proof(make_authority("other-1", time.time()), preauth.new_secret(), "other-1", Member("worker", 0))
    if given.each:
        each_sort(other, given.each)
        return
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "steps"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": home, "PSCTL_HOME": f"{home}/psctl"}
        command = [*PSCTL, "train", str(JOB), "-d", "-o", "json", "--servers", "2", "--set", "replicas=0"]
        command += ["--set", f'args=["--log", "{log}", "--width", "512"]']
        started = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        job = json.loads(started.stdout)["job"]
        try:
            await_steps(log, 50)
            strangers = Strangers(other, older_worker(home, job))
            await_steps(log, len(steps_of(log)) + 200)
            report(*run(home, log, strangers, given.connections, given.seconds))
        finally:
            subprocess.run([*PSCTL, "stop", "-q", "--force"], env=environment, check=False)


def await_steps(log: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(steps_of(log)) < count:
        assert time.monotonic() < deadline, f"step {count} of the job was not reached within 60 s"
        time.sleep(0.5)


def run(
    home: str, log: Path, strangers: Strangers, connections: int, seconds: float
) -> tuple[dict[str, list[float]], int, str]:
    """Alternate; return (step times by turn, bad connections made, memory before and after)."""
    control, ours = os.pipe()
    answer, theirs = os.pipe()
    ports, before = listening(home), memory(home)
    if not (child := os.fork()):
        os.close(ours)
        attack(ports, strangers, connections / seconds, control, theirs)
        os._exit(0)
    times: dict[str, list[float]] = {word: [] for word in "-jd"}
    for word in list(times) * round(seconds / TURN):
        os.write(ours, word.encode())
        begun = time.time()
        time.sleep(TURN)
        inside = [when for when in steps_of(log) if begun < when < begun + TURN]
        times[word] += [b - a for a, b in itertools.pairwise(inside)]
    after = memory(home)
    grown = ", ".join(f"{name} {before[name] / 1e6:.1f} to {after[name] / 1e6:.1f} MB" for name in sorted(before))
    os.close(ours)
    made = int(json.loads(os.read(answer, 100)))
    os.waitpid(child, 0)
    return times, made, grown


def report(times: dict[str, list[float]], made: int, grown: str) -> None:
    quiet, loud, alone = (statistics.median(times[word]) for word in "-jd")
    print(f"{made} bad connections, load {os.getloadavg()[0]:.1f}")
    print(f"step with nobody             median {quiet * 1e3:.2f} ms ({len(times['-'])} steps)")
    print(f"step with strangers          median {loud * 1e3:.2f} ms ({len(times['j'])} steps): {loud / quiet - 1:+.1%}")
    print(
        f"step beside their process    median {alone * 1e3:.2f} ms ({len(times['d'])} steps): {alone / quiet - 1:+.1%}"
    )
    print(f"strangers, net of their process: {loud / alone - 1:+.1%}")
    print("means", ", ".join(f"{statistics.mean(times[word]) * 1e3:.2f} ms" for word in "-jd"))
    print(f"memory: {grown}")


class Nobody:
    """A handler that has no peers."""

    def on_connected(self, peer: PeerConnection) -> None:
        raise AssertionError(f"{peer} was let in")

    def receive_buffer_for(self, peer: PeerConnection, message: object, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: PeerConnection, message: object, payload: memoryview | None) -> None: ...

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None: ...


def each_sort(other: Proof, count: int) -> None:
    """Print the processor time that one of each sort costs a listener, least of five rounds, and its memory."""
    authority, secret, server = make_authority("job-1", time.time()), preauth.new_secret(), Member("server", 0)
    pair = issue(authority, "job-1", server, time.time())
    who = Credentials("job-1", server, authority.certificate_pem, pair.certificate_pem, pair.key_pem, secret)
    strangers = Strangers(other, proof(authority, secret, "job-1", Member("worker", 1)))
    told, tell = os.pipe()
    if not (child := os.fork()):
        acceptor = Acceptor("127.0.0.1", None, who, int, Nobody(), lambda member: f"{member} is dead")
        os.write(tell, str(acceptor.address.port).encode())
        threading.Event().wait()
    port, listener = int(os.read(told, 10)), psutil.Process(child)

    def cost(sort: Sort) -> float:
        before = listener.cpu_times()
        for _ in range(count):
            strangers.one(port, sort)
        strangers.let_go(0)
        time.sleep(0.3)
        after = listener.cpu_times()
        return (after.user + after.system - before.user - before.system) / count

    least: dict[str, float] = {}
    begun = listener.memory_info().rss
    for _ in range(5):
        for name, sort in strangers.sorts.items():
            least[name] = min(least.get(name, 1.0), cost(sort))
    print(", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in least.items()))
    print(f"mean {statistics.mean(least.values()) * 1e6:.0f} us, load {os.getloadavg()[0]:.1f}")
    print(f"memory {begun / 1e6:.1f} to {listener.memory_info().rss / 1e6:.1f} MB over {25 * count} of them")
    listener.kill()
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
