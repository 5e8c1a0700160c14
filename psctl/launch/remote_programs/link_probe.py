"""Measures the link between two hosts, as server or client. The program is sent like host_state.py.

Verbs: `serve` listens on addresses of its host until it is stopped or its time is over. `ports` returns the ports of
the server on the same host, and `stop` ends it; both use a Unix socket whose abstract name is derived from the token.
`dial` measures one link in both directions. `reach` tries many addresses at the same time. A client reads the token
from standard input and proves its possession by a keyed hash over the server's random challenge; without that proof,
the server sends nothing more.

Pairs that are measured at the same time wait for each other at a barrier on one of the servers.

Bytes are counted at the receiver, because bytes in the sender's buffers have not been transferred. Slow start and the
burst of a token bucket occur at the beginning and are left out.
"""

# one long module, because it is sent as one text

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import itertools
import json
import os
import select
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""
Line = Any
"""A line that the other side sent, as JSON has it. Any: as a Question."""
Counted = list[tuple[float, int]]
"""Pairs of a time in seconds and the bytes that had arrived by then."""

RECEIVE = 4 << 20  # as for psctl's own data connections: transport/tcp_stream.py
RCVBUFFORCE = 33
CHUNK = 1 << 18
WINDOWS = 12
BURST = 1.05  # a window that is faster than later ones by this factor belongs to a token bucket's burst
UNPROVEN = 256
"""Limit of connections that have not proved possession of the token."""
PATIENCE = 5.0
"""Seconds to wait for the peer's next message."""


def make_socket(host: str, congestion: str) -> socket.socket:
    """Return a TCP socket for a numeric address, with the options of psctl's own data connections."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE)
    with contextlib.suppress(PermissionError):
        made.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, RECEIVE)
    if congestion != "auto":
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class JsonLines:
    """A connection that carries lines of JSON, and between them the bytes that are measured."""

    def __init__(self, connected: socket.socket, patience: float = PATIENCE) -> None:
        self.socket, self.patience = connected, patience
        connected.settimeout(patience)

    def send_line(self, message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive_line(self) -> Line:
        """Read the next line, byte by byte because measured bytes follow it, and return its value."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = self.socket.recv(1)
            if not byte or len(line) > 1 << 16:
                raise ConnectionError("the peer closed the connection")
            line += byte
        return json.loads(line)

    def echo(self, count: int, *, first: bool) -> list[float]:
        """Exchange one byte `count` times; return the seconds of each round trip, on the side that sends first."""
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            if first:
                self.socket.sendall(b".")
            if not self.socket.recv(1):
                raise ConnectionError("the peer closed the connection")
            if not first:
                self.socket.sendall(b".")
            seconds.append(time.perf_counter() - begin)
        return seconds

    def count(self, seconds: float) -> Counted:
        """Receive bytes for `seconds`; return the bytes received by each moment."""
        buffer, total = bytearray(CHUNK), 0
        counted: Counted = []
        begin, every = 0.0, seconds / (8 * WINDOWS)
        while True:
            got = self.socket.recv_into(buffer)
            now = time.monotonic()
            if not got:
                raise ConnectionError("the peer closed the connection")
            total += got
            begin = begin or now
            if not counted or now - counted[-1][0] >= every:
                counted.append((now, total))
            if now - begin >= seconds:
                return counted

    def flood(self, limit: float) -> bool:
        """Send until the peer sends or closes; return False if it does neither within `limit` seconds."""
        data, end = memoryview(bytes(CHUNK)), time.monotonic() + limit
        self.socket.setblocking(False)
        try:
            while time.monotonic() < end:
                readable, writable, _ = select.select([self.socket], [self.socket], [], PATIENCE)
                if readable:
                    return True
                if not writable:
                    return False
                with contextlib.suppress(BlockingIOError):
                    self.socket.send(data)
        except (BrokenPipeError, ConnectionResetError):
            return True
        finally:
            self.socket.settimeout(self.patience)
        return False


def proof(token: str, nonce: str) -> str:
    """Return the proof of possession of the token for a challenge."""
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def steady(counted: Counted, burn: float) -> float:
    """Return the steady bytes/s of a transfer.

    The first `burn` seconds are left out, and the rest is divided into windows. Windows at the beginning that are
    faster than the median of the later half are the burst of a token bucket and are left out too. The result is the
    mean over the remaining time.
    """
    begin, end = counted[0][0] + burn, counted[-1][0]
    marks = [begin + (end - begin) * number / WINDOWS for number in range(WINDOWS + 1)]
    totals = [bytes_at(counted, mark) for mark in marks]
    rates = [(b - a) * WINDOWS / (end - begin) for a, b in itertools.pairwise(totals)]
    later = statistics.median(rates[WINDOWS // 2 :])
    first = next((number for number in range(WINDOWS // 2) if rates[number] <= BURST * later), WINDOWS // 2)
    return (totals[-1] - totals[first]) / (marks[-1] - marks[first])


def bytes_at(counted: Counted, moment: float) -> float:
    """Return the bytes that had arrived by a moment, interpolated between two counts."""
    before = counted[0]
    for after in counted[1:]:
        if after[0] >= moment:
            part = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 1.0
            return before[1] + part * (after[1] - before[1])
        before = after
    return float(before[1])


def serve(question: Question, token: str) -> Question:
    """Listen until stopped, for `seconds` at most; serve clients that have the token."""
    stopped, meetings = threading.Event(), Meetings()
    listening, failed = {}, {}
    for host in question["listen"]:
        try:
            listening[host] = listen(host, question["ports"], question["congestion"])
        except OSError as error:
            failed[host] = error.strerror or str(error)
    message = {"ports": {host: one.getsockname()[1] for host, one in listening.items()}, "failed": failed}
    with contextlib.ExitStack() as open_:
        control = open_.enter_context(closing(socket.socket(socket.AF_UNIX)))
        for one in listening.values():
            open_.enter_context(closing(one))
            threading.Thread(target=accept, args=(one, token, meetings), daemon=True).start()
        control.bind(control_name(question, token))
        control.listen(8)
        threading.Thread(target=serve_control, args=(control, message, stopped), daemon=True).start()
        stopped.wait(question["seconds"])
        stopped.set()
    return {}


@contextlib.contextmanager
def closing(listener: socket.socket) -> Iterator[socket.socket]:
    """Close a listener at the end of the block, which ends a thread that waits in its accept()."""
    with listener:
        yield listener
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def listen(host: str, ports: list[int] | None, congestion: str) -> socket.socket:
    """Return a socket that listens on an address, at the first free port of the range, or at any port."""
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        made = make_socket(host, congestion)
        try:
            made.bind((host, port))
            made.listen(64)
        except OSError:
            made.close()
            if port == last:
                raise
        else:
            return made
    raise OSError("no port")


def control_name(question: Question, token: str) -> str:
    """Return the abstract name of the control socket of a host's server; hosts may share a network namespace."""
    return "\0psctl-link-" + proof(token, question["name"])[:32]


def serve_control(control: socket.socket, message: Question, stopped: threading.Event) -> None:
    """Answer requests on the control socket: report the server's ports, or stop it."""
    while not stopped.is_set():
        try:
            asking = JsonLines(control.accept()[0])
            with asking.socket:
                if user_of(asking.socket) != os.geteuid():
                    continue  # every user of the host can connect to an abstract name
                if asking.receive_line() == "stop":
                    stopped.set()
                asking.send_line(message)
        except (OSError, ValueError):
            continue


def user_of(connected: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, from the kernel."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def accept(listener: socket.socket, token: str, meetings: Meetings) -> None:
    """Serve each connection on its own thread; bound the number of those without a proof of the token."""
    unproven = threading.BoundedSemaphore(UNPROVEN)
    while True:
        try:
            connected = listener.accept()[0]
        except OSError:  # closed at the end of the server
            return
        if unproven.acquire(blocking=False):
            threading.Thread(target=serve_client, args=(connected, token, meetings, unproven), daemon=True).start()
        else:
            connected.close()


class Meetings:
    """Barriers for the clients of a round."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, threading.Barrier] = {}

    def wait(self, key: str, count: int) -> None:
        """Wait until `count` clients wait under a key, for PATIENCE seconds at most."""
        with self._lock:
            barrier = self._open.setdefault(key, threading.Barrier(count))
        with contextlib.suppress(threading.BrokenBarrierError):  # a client did not arrive: the others continue
            barrier.wait(PATIENCE)


def has_proved(line: JsonLines, token: str) -> bool:
    """Return whether the peer answers a random challenge with the proof of the token."""
    nonce = os.urandom(16).hex()
    line.send_line(nonce)
    return hmac.compare_digest(str(line.receive_line()), proof(token, nonce))


def serve_client(connected: socket.socket, token: str, meetings: Meetings, unproven: threading.Semaphore) -> None:
    """Serve the requests of one connection after its proof of the token."""
    with contextlib.suppress(OSError, ValueError), connected:
        line = JsonLines(connected)
        try:
            proved = has_proved(line, token)
        finally:
            unproven.release()
        while proved:
            asked = line.receive_line()
            line.send_line("yes")
            if asked["do"] == "meet":
                meetings.wait(asked["key"], asked["count"])
                line.send_line("go")
                return
            if asked["do"] == "echo":
                line.echo(asked["count"], first=False)
            elif asked["do"] == "take":
                counted = line.count(asked["seconds"])
                line.send_line(counted)
                drain(line)
                return
            else:
                line.flood(asked["seconds"] + PATIENCE)
                return


def drain(line: JsonLines) -> None:
    """Read the remaining bytes, so that the count reaches the sender before a reset does."""
    while line.socket.recv(CHUNK):
        continue


@contextlib.contextmanager
def connect_line(question: Question, token: str) -> Iterator[JsonLines]:
    """Connect to a server and send the proof of the token."""
    host, port = question["to"]
    with make_socket(host, question["congestion"]) as made:
        patience = question.get("patience", PATIENCE)
        made.settimeout(patience)
        if question.get("from"):
            made.bind((question["from"], 0))
        made.connect((host, port))
        line = JsonLines(made, patience)
        line.send_line(proof(token, line.receive_line()))
        yield line


def request(line: JsonLines, message: Question) -> None:
    line.send_line(message)
    line.receive_line()


def latency(line: JsonLines, count: int) -> float:
    """Return the latency one way in seconds: half the median of `count` round trips, without the first five."""
    request(line, {"do": "echo", "count": count + 5})
    return statistics.median(line.echo(count + 5, first=True)[5:]) / 2


def outward(question: Question, token: str, seconds: float) -> Counted:
    """Send for `seconds`; return the server's counts."""
    with connect_line(question, token) as line:
        request(line, {"do": "take", "seconds": seconds})
        line.flood(seconds + PATIENCE)
        return [(moment, total) for moment, total in line.receive_line()]


def inward(question: Question, token: str, seconds: float) -> Counted:
    """Receive for `seconds`; return this side's counts."""
    with connect_line(question, token) as line:
        request(line, {"do": "give", "seconds": seconds})
        return line.count(seconds)


Direction = Callable[[Question, str, float], Counted]


def rate(direction: Direction, question: Question, token: str) -> float:
    """Return the bytes/s of one repeat: the sum of the steady rates of its parallel streams."""
    streams, seconds, burn = question["streams"], question["burn"] + question["seconds"], question["burn"]
    if streams == 1:
        return steady(direction(question, token, seconds), burn)
    found: list[float] = []

    def one() -> None:
        found.append(steady(direction(question, token, seconds), burn))

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < streams:
        raise ConnectionError("a stream broke")
    return sum(found)


def dial(question: Question, token: str) -> Question:
    """Measure the link to one server: latency, then bytes/s out and in, `repeats` times each."""
    with connect_line(question, token) as line:
        late = latency(line, question["pings"])
    repeats = range(question["repeats"])
    # slow start lasts some round trips, so a link with a long latency needs a longer warm-up
    question["burn"] = max(question["burn"], min(2.0, 40 * late))
    meet(question, token, "out")
    out = [rate(outward, question, token) for _ in repeats]
    meet(question, token, "in")
    return {"latency": late, "out": out, "in": [rate(inward, question, token) for _ in repeats]}


def meet(question: Question, token: str, phase: str) -> None:
    """Wait at the barrier of this round; a client that cannot connect to it continues without a wait."""
    meeting = question.get("meet")
    if meeting is None:
        return
    with contextlib.suppress(OSError, ValueError), connect_line({**question, "to": meeting["to"]}, token) as line:
        line.socket.settimeout(2 * PATIENCE)
        request(line, {"do": "meet", "key": f"{meeting['key']} {phase}", "count": meeting["count"]})
        line.receive_line()


def reach(question: Question, token: str) -> Question:
    """Try many servers at the same time; return for each the latency, or the error."""
    found: Question = {}

    def one(key: str, to: list[object]) -> None:
        try:
            with connect_line({**question, "to": to, "patience": question["seconds"]}, token) as line:
                found[key] = {"latency": latency(line, question["pings"])}
        except (OSError, ValueError) as error:
            found[key] = {"error": getattr(error, "strerror", None) or str(error) or "no answer"}

    threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in question["to"].items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + question["seconds"] + PATIENCE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {key: found.get(key, {"error": "no answer in time"}) for key in question["to"]}


def call_server(message: str, question: Question, token: str) -> Question:
    """Send "ports" or "stop" to the control socket of this host's server, and return its ports.

    The socket is waited for, up to `seconds`.
    """
    end = time.monotonic() + question["seconds"]
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(control_name(question, token))
                line = JsonLines(control)
                line.send_line(message)
                return dict(line.receive_line())
        except (FileNotFoundError, ConnectionError):
            if time.monotonic() >= end:
                raise
        time.sleep(0.02)


def main() -> int:
    verb, question, token = sys.argv[1], json.loads(sys.argv[2]), sys.stdin.readline().strip()
    verbs: dict[str, Callable[[Question, str], Question]] = {
        "serve": serve, "dial": dial, "reach": reach,
        "ports": functools.partial(call_server, "ports"), "stop": functools.partial(call_server, "stop"),
    }  # fmt: skip
    try:
        print(json.dumps(verbs[verb](question, token)))
    except (OSError, ValueError) as error:
        print(getattr(error, "strerror", None) or str(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
