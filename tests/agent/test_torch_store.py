"""Connections to the store through a sealed stream: every byte, both directions, each ending by itself, and breaks."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from psctl.agent.torch_store import TUNNELS, MasterPort, StoreSocket, Tunnel, TunnelServer, copy_both_ways
from psctl.errors import PsctlError
from psctl.transport import loopback_tcp
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.loopback_tcp import GuardedListener
from psctl.transport.peer_connection import PeerConnection
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Member
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.running import ROOT, until

LIMIT = 10.0
BULK = os.urandom(24 << 20)
"""More than windows, queues and sockets hold together."""


class Way:
    """A store's listening socket, the head's end of tunnels, and what another host's agent does with a connection."""

    def __init__(self) -> None:
        with loopback_tcp.listen(None) as front:
            self.store = GuardedListener(front)
        self.listening = socket.socket(fileno=os.dup(self.store.fileno()))
        self.listening.settimeout(LIMIT)
        authority, preauth_secret = make_authority("try", time.time()), new_secret()
        self.failed: list[str] = []
        self.peers: list[PeerConnection] = []

        def credentials(member: Member) -> Credentials:
            pair = issue(authority, "try", member, time.time())
            return Credentials(
                "try", member, authority.certificate_pem, pair.certificate_pem, pair.key_pem, preauth_secret
            )

        self.other = credentials(Member("agent", 1))
        end = TunnelServer(self.store.connect, self.store.release, lambda _, error: self.failed.append(error.message))
        self._acceptor = Acceptor("127.0.0.1", None, credentials(Member("agent", 0)), TUNNELS, end)
        self.threads: list[threading.Thread] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Return a worker's end of a connection, and the store's."""
        worker, agents = socket.socketpair()
        worker.settimeout(LIMIT)
        tunnel = Tunnel(agents)
        peer = dial(self._acceptor.address, self.other, Member("agent", 0), TUNNELS, tunnel)

        def carry() -> None:
            with agents:
                try:
                    tunnel.run(peer)
                except (PsctlError, OSError) as error:
                    self.failed.append(str(error))
                peer.join()

        self.peers.append(peer)
        self.threads.append(threading.Thread(target=carry))
        self.threads[-1].start()
        try:
            accepted, _ = self.listening.accept()
        except OSError:
            worker.close()
            raise
        accepted.settimeout(LIMIT)
        return worker, accepted

    def end(self) -> None:
        for peer in self.peers:
            peer.close()
        for thread in self.threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        self._acceptor.close()
        self.listening.close()
        self.store.close()


@pytest.fixture
def way() -> Iterator[Way]:
    made = Way()
    yield made
    made.end()


def read_all(end: socket.socket) -> bytes:
    data = bytearray()
    while part := end.recv(1 << 16):
        data += part
    return bytes(data)


def send_all(end: socket.socket, data: bytes) -> None:
    end.sendall(data)
    end.shutdown(socket.SHUT_WR)


def test_bytes_go_both_ways_and_each_direction_ends_by_itself(way: Way) -> None:
    worker, store = way.connect()
    with worker, store:
        worker.sendall(b"a question")
        worker.shutdown(socket.SHUT_WR)
        assert read_all(store) == b"a question"
        store.sendall(b"an answer")
        store.close()
        assert read_all(worker) == b"an answer"
    way.threads[0].join(LIMIT)
    assert way.failed == []


def test_an_end_that_does_not_read_stops_the_sender_and_nothing_is_lost(way: Way) -> None:
    worker, store = way.connect()
    sent = 0
    with worker, store:
        worker.settimeout(0.5)
        with pytest.raises(TimeoutError):  # noqa: PT012
            while sent < len(BULK):
                sent += worker.send(BULK[sent : sent + (1 << 20)])
        worker.settimeout(LIMIT)
        rest = threading.Thread(target=send_all, args=(worker, BULK[sent:]))
        rest.start()
        assert read_all(store) == BULK
        rest.join(LIMIT)


def test_one_connection_that_is_not_read_holds_up_no_other(way: Way) -> None:
    slow, unread = way.connect()
    quick, store = way.connect()
    with slow, unread, quick, store:
        slow.setblocking(False)
        with pytest.raises(BlockingIOError):  # noqa: PT012
            while True:
                slow.send(BULK[: 1 << 20])
        quick.sendall(b"word")
        assert store.recv(4) == b"word"
        unread.close()


def test_a_store_that_is_killed_ends_the_connection_with_a_report(way: Way) -> None:
    worker, store = way.connect()
    with worker:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset, as when its process dies
        store.close()
        assert worker.recv(1) == b""
    broke = "the store's connection broke: [Errno 104] Connection reset by peer"
    until(lambda: any(broke in text for text in way.failed), LIMIT, name="the report of the broken connection")


def test_a_lost_stream_ends_both_ends(way: Way) -> None:
    worker, store = way.connect()
    with worker, store:
        way.peers[0].close("cut")
        assert worker.recv(1) == b""
        assert store.recv(1) == b""


def test_connections_that_ended_leave_their_places_to_others(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_tcp, "MOST", 1)
    for _ in range(3):
        worker, store = way.connect()
        assert not _is_free(way.store)
        worker.close()
        assert store.recv(1) == b""
        store.close()
        way.threads[-1].join(LIMIT)
        until(lambda: _is_free(way.store), LIMIT, name="the release of the port")
        way.listening.accept()[0].close()


def _is_free(store: GuardedListener) -> bool:
    """Return whether the store takes another connection; one is made and released."""
    try:
        store.release(store.connect())
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return False
    return True


OLDER = """
import os, sys, threading
from datetime import timedelta
import torch.distributed
newer = torch.distributed.TCPStore
def older(*given, **named):
    if named.get("use_libuv", True):
        raise NotImplementedError("does not support initialization with an listen fd")
    return newer(*given, **named)
torch.distributed.TCPStore = older
from psctl.agent import torch_store_host
descriptor, port = int(sys.argv[1]), int(sys.argv[2])
def use():
    store = newer("127.0.0.1", port, None, False, timedelta(seconds=60))
    store.set("name", "value")
    print(store.get("name").decode(), flush=True)
    os._exit(0)
threading.Thread(target=use).start()
torch_store_host.main(descriptor, "127.0.0.1", port)
"""


def test_torch_whose_newer_store_takes_no_socket_serves_with_the_older_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = [sys.executable, "-c", OLDER, str(listening.fileno()), str(listening.getsockname()[1])]
        done = subprocess.run(
            words, pass_fds=[listening.fileno()], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, "value\n"), done.stderr


def test_an_unreachable_store_is_reported_at_the_head(way: Way) -> None:
    way.store.close()
    way.listening.close()
    with pytest.raises(OSError, match="Bad file"):
        way.connect()
    way.threads[0].join(LIMIT)
    assert any("the listener is closed" in text for text in way.failed), way.failed


def test_a_store_that_the_kernel_cannot_guard_is_told_once(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_tcp, "ATTACH_CHOICE", 9999)  # as a kernel before 4.6 answers
    told: list[str] = []
    order, credentials = make_order(make_hosts(1)), way.other
    master_port = MasterPort(order, credentials, told.append)
    store = StoreSocket(order, credentials, master_port)
    assert "refuses the choice between two listeners" in store.problem
    for _ in range(2):
        with socket.create_connection((loopback_tcp.HOST, store.port), LIMIT) as line:
            line.settimeout(LIMIT)
            assert line.recv(1) == b""
    assert len(told) == 1
    assert store.problem in told[0]


def test_connections_of_the_heads_own_host_are_joined() -> None:
    (worker, agents), (ours, store) = socket.socketpair(), socket.socketpair()
    both = threading.Thread(target=copy_both_ways, args=(agents, ours))
    both.start()
    with worker, agents, ours, store:
        worker.sendall(b"a question")
        worker.shutdown(socket.SHUT_WR)
        assert read_all(store) == b"a question"
        store.sendall(b"an answer")
        store.close()
        assert read_all(worker) == b"an answer"
        both.join(LIMIT)
        assert not both.is_alive()


def test_a_broken_end_ends_the_other() -> None:
    (worker, agents), (ours, store) = socket.socketpair(), socket.socketpair()
    both = threading.Thread(target=copy_both_ways, args=(agents, ours))
    both.start()
    with worker, agents, ours:
        store.close()
        worker.sendall(b"to nobody")
        assert read_all(worker) == b""
        both.join(LIMIT)
        assert not both.is_alive()
