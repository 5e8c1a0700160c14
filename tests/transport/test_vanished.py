"""A peer that stands still is waited for; one whose link is cut without a word is lost within 5 s, and named."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl.errors import ConnectionFailed
from psctl.transport.connect import dial
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Address, Member

ACTOR = Path(__file__).with_name("actor.py")
pytestmark = pytest.mark.whole


class Part(msgspec.Struct, frozen=True, tag=True):
    """As in actor.py."""

    number: int


class Total(msgspec.Struct, frozen=True, tag=True):
    """As in actor.py."""

    parts: int = 0
    bytes: int = 0
    digest: str = ""


class Process:
    """An actor in a process of its own, perhaps in a network namespace."""

    def __init__(self, *arguments: str, namespace: str | None = None) -> None:
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = subprocess.Popen(
            [*inside, sys.executable, str(ACTOR), *arguments], stdout=subprocess.PIPE, text=True, env=environment
        )

    def next(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the actor ended without a word"
        document: dict[str, Any] = json.loads(line)
        return document

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Waiter:
    """A handler that waits for the reader's Total."""

    def __init__(self) -> None:
        self.total: Total | None = None
        self.answered = threading.Event()
        self.error: ConnectionFailed | None = None

    def on_connected(self, peer: PeerConnection) -> None:
        pass

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        return None

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        self.total = message
        self.answered.set()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        self.error = error
        self.answered.set()


@pytest.fixture
def files(job: Any, tmp_path: Path) -> dict[str, str]:
    """Credentials in files, by role."""
    paths = {}
    for member in (Member("server", 0), Member("worker", 0)):
        path = tmp_path / member.role
        path.write_bytes(msgspec.json.encode(job.credentials(member)))
        paths[member.role] = str(path)
    return paths


def test_a_reader_that_stands_still_for_8_s_loses_nothing(job: Any, files: dict[str, str]) -> None:
    """TCP gives up after 5 s without acknowledgement; what is in flight always fits the kernel of the reader's host."""
    reader = Process("accept", files["server"], "127.0.0.1")
    host, port = reader.next()["address"]
    mine = job.credentials(Member("worker", 0))
    ways = {}
    for way in ("bulk", "small"):
        waiter = Waiter()
        ways[way] = (dial(Address(host, port), mine, Member("server", 0), Part | Total, waiter), waiter)
        assert reader.next()["joined"] == "worker/0"
    reader.signal(signal.SIGSTOP)
    bulk, small = ways["bulk"][0], ways["small"][0]
    silences = []
    data = os.urandom(512 << 10)
    for number in range(64):
        bulk.send(Part(number), data)
    for number in range(20_000):
        small.send(Part(number), b"x")
        if number < 100:
            small.flush(5)  # these leave alone, the others in batches
    for _, waiter in ways.values():
        assert not waiter.answered.wait(4), waiter.error
        silences += [bulk.silent_for(), small.silent_for()]
    assert max(silences) < 3, "the system of a process that stands still answers"
    assert bulk.pending() > 16 << 20
    reader.signal(signal.SIGCONT)
    for peer, waiter in ways.values():
        peer.send(Total())
        assert waiter.answered.wait(20)
    expected = hashlib.sha256()
    for _ in range(64):
        expected.update(data)
    assert ways["bulk"][1].total == Total(64, 64 << 19, expected.hexdigest())
    assert ways["small"][1].total == Total(20_000, 20_000, hashlib.sha256(b"x" * 20_000).hexdigest())
    for peer, _ in ways.values():
        peer.close("done")
        assert peer.join(10)
    reader.end()


@pytest.fixture
def hosts() -> Iterator[tuple[tuple[str, str], str, Any]]:
    """Two hosts on a switch, each (namespace, address), and a function that cuts the second one's cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    token = secrets.token_hex(3)
    names = [f"psctl-{token}-{part}" for part in ("switch", "a", "b")]
    switch = names[0]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names[1:], 1):
            ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield (
            (names[1], "10.77.0.1"),
            (names[2], "10.77.0.2"),
            lambda: ip("-n", switch, "link", "set", "port2", "nomaster"),
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        for name in made:
            ip("netns", "del", name)


def test_a_link_cut_without_a_word_is_an_error_within_5_s_at_both_ends(files: dict[str, str], hosts: Any) -> None:
    (here, address), (there, _), cut = hosts
    actors = []
    for how in ("idle", "pour"):
        server = Process("accept", files["server"], address, namespace=here)
        port = str(server.next()["address"][1])
        worker = Process("dial", files["worker"], address, port, how, namespace=there)
        assert server.next()["joined"] == "worker/0"
        assert worker.next()["joined"] == "server/0"
        actors += [(server, "worker/0 at 10.77.0.2"), (worker, "server/0 at 10.77.0.1")]
    cut()
    begin = time.monotonic()
    for actor, name in actors:
        told = actor.next()
        assert told["lost"].startswith(name)
        assert told["lost"].endswith("no sign of life for 5 s"), told
        assert told["time"] - begin < 5.6, told
        actor.end()
