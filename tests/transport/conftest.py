"""Shared parts of the transport's tests: credentials of a job, and a handler that records its calls."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from psctl.errors import ConnectionFailed
from psctl.ps.permits import PARAMETERS
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import PeerConnection
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Member
from tests.helpers.memory_stream import MemoryNetwork


class Note(msgspec.Struct, frozen=True, tag=True):
    """Something to say; may have a payload."""

    text: str


class Other(msgspec.Struct, frozen=True, tag=True):
    """Another kind."""

    number: int


class Recorder:
    """A handler that queues (what, peer, detail) and can be told where payloads go."""

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[str, PeerConnection, Any]] = queue.Queue()
        self.landing: memoryview | None = None
        self.on_received: Callable[[PeerConnection, Any], None] = lambda peer, message: None

    def on_connected(self, peer: PeerConnection) -> None:
        self.told.put(("joined", peer, None))

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        return self.landing[:size] if self.landing is not None else None

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        self.told.put(("received", peer, (message, None if payload is None else bytes(payload))))
        self.on_received(peer, message)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        self.told.put(("lost", peer, error))

    def next(self, what: str, timeout: float = 10) -> tuple[PeerConnection, Any]:
        """Return (peer, detail) of the next thing told, which must be `what`."""
        found, peer, detail = self.told.get(timeout=timeout)
        assert found == what, f"told {found}: {detail}"
        return peer, detail


class Job:
    """A job's authority and the credentials of its members."""

    def __init__(self, name: str = "digits-1") -> None:
        self.name = name
        self.authority = make_authority(name, time.time())
        self.preauth_secret = new_secret()

    def credentials(self, member: Member) -> Credentials:
        pair = issue(self.authority, self.name, member, time.time())
        authority = self.authority.certificate_pem
        return Credentials(self.name, member, authority, pair.certificate_pem, pair.key_pem, self.preauth_secret)


SERVER, WORKER = Member("server", 0), Member("worker", 3)
KINDS = Note | Other


class Pair:
    """A server that accepts and a worker that dials, over TCP or memory."""

    def __init__(self, job: Job, kind: str, window: int = 2 << 20, kinds: Any = KINDS, *, sealed: bool = True) -> None:
        self.job, self.kind, self.kinds, self.sealed = job, kind, kinds, sealed
        self.server, self.worker = Recorder(), Recorder()
        self.refused: queue.Queue[str] = queue.Queue()
        self.network = MemoryNetwork(window=window, silence=0.2)
        self._acceptors: list[Acceptor] = []
        self.peers: list[PeerConnection] = []
        """Ends that `close` closes."""

    def accept(self, credentials: Credentials | None = None, **options: Any) -> Acceptor:
        mine = credentials or self.job.credentials(SERVER)
        options = {
            "refused": lambda end, error: self.refused.put(error.message), "sealed": self.sealed, **options,
        }  # fmt: skip
        if self.kind == "memory":
            made = self.network.acceptor(mine, self.kinds, self.server, **options)
        else:
            made = Acceptor("127.0.0.1", None, mine, self.kinds, self.server, **options)
        self._acceptors.append(made)
        return made

    def dial(self, acceptor: Acceptor, credentials: Credentials | None = None, expect: Any = SERVER) -> PeerConnection:
        call = self.network.dial if self.kind == "memory" else dial
        mine = credentials or self.job.credentials(WORKER)
        peer = call(acceptor.address, mine, expect, self.kinds, self.worker, sealed=self.sealed)
        self.peers.append(peer)
        return peer

    def join(self, **options: Any) -> tuple[PeerConnection, PeerConnection]:
        """Return (the worker's end, the server's end), joined."""
        mine = self.dial(self.accept(**options))
        self.worker.next("joined")
        theirs, _ = self.server.next("joined")
        self.peers.append(theirs)
        return mine, theirs

    def close(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for peer in self.peers:
            peer.close("the test is over")
        for peer in self.peers:
            assert peer.join(10), f"{peer} still has threads"


@pytest.fixture(scope="session")
def job() -> Job:
    return Job()


@pytest.fixture(scope="session")
def other_job() -> Job:
    return Job("other-7")


@pytest.fixture(params=["tcp", "memory", "tcp open", "memory open"])
def pair(request: pytest.FixtureRequest, job: Job) -> Iterator[Pair]:
    made = Pair(job, request.param.split()[0], sealed="open" not in request.param)
    yield made
    made.close()


@pytest.fixture
def memory_pair(job: Job) -> Iterator[Pair]:
    made = Pair(job, "memory")
    yield made
    made.close()


@pytest.fixture
def tcp_pair(job: Job) -> Iterator[Pair]:
    made = Pair(job, "tcp")
    yield made
    made.close()


@pytest.fixture
def note() -> type[Note]:
    return Note


@pytest.fixture
def other() -> type[Other]:
    return Other


@pytest.fixture(params=["sealed", "open"])
def narrow_pair(request: pytest.FixtureRequest, job: Job) -> Iterator[Pair]:
    """Ends that hold only 16 KiB unread, so that longer messages travel in pieces."""
    made = Pair(job, "memory", window=16 << 10, sealed=request.param == "sealed")
    yield made
    made.close()


@pytest.fixture
def server_pair(job: Job) -> Iterator[Pair]:
    """Ends that send the messages of workers and servers, under their permits."""
    made = Pair(job, "memory", kinds=PARAMETERS)
    yield made
    made.close()
