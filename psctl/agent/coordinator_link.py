"""The agent's connection to the coordinator, made again when it breaks.

A connection that is refused means that the coordinator is gone: the job is over here. Silence may be a link that comes
back: it is tried until the coordinator was missed for 15 s, 5 of which net has taken to notice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from psctl.agent.checkpoint_copies import CheckpointCopies
from psctl.errors import ConnectionFailed, PsctlError
from psctl.job.checkpoint_messages import CheckpointCopyBegin, CheckpointCopyEnd, CheckpointCopyPart
from psctl.job.job_permits import COORDINATION
from psctl.job.message import JobMessage
from psctl.job.process_messages import Register
from psctl.process.certificate_renewal import CertificateRenewer
from psctl.transport.connect import dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Address, Member

PATIENCE = 10.0
"""Seconds for making a lost connection again."""

HANDSHAKE = 5.0
"""Seconds for one attempt."""

COORDINATOR = Member("coordinator", 0)


class LinkUp(msgspec.Struct, frozen=True):
    """The coordinator is reached and knows us."""


class LinkGone(msgspec.Struct, frozen=True):
    """The coordinator is gone for good."""

    reason: str


class FromCoordinator(msgspec.Struct, frozen=True):
    """The coordinator says something."""

    message: JobMessage
    payload: bytes = b""


class CoordinatorLink:
    """Keeps one connection; what happens goes to `put`, copies of checkpoints straight to disk.

    Args:
        credentials: who we are.
        register: what we say first.
        congestion: TCP's congestion control.
        put: takes LinkUp, LinkGone and Heard, from any thread.
        copies: takes what comes of checkpoints.
    """

    def __init__(
        self,
        credentials: Credentials,
        register: Register,
        congestion: str,
        put: Callable[[Any], None],
        copies: CheckpointCopies,
    ) -> None:
        self._credentials, self._register, self._congestion = credentials, register, congestion
        self._put, self._copies = put, copies
        self._lock = threading.Lock()
        self._peer: PeerConnection | None = None
        self._lost = threading.Event()
        self._why = ""
        self._over = threading.Event()

    def start(self, address: Address) -> None:
        """Connect, and stay connected, from now on."""
        threading.Thread(target=self._run, args=(address,), name="psctl link", daemon=True).start()

    def send(self, message: JobMessage) -> bool:
        """Send to the coordinator; False when there is no connection now."""
        with self._lock:  # the coordinator may order something before `_run` has said whom it reached
            peer = self._peer
        return peer is not None and peer.send(message, urgent=True)

    def finish(self) -> None:
        """The job is over: a connection that breaks from now on is not made again."""
        self._over.set()

    def close(self, timeout: float) -> None:
        """Say what is left to say, then end the connection."""
        self._over.set()
        peer = self._peer
        if peer is not None:
            with contextlib.suppress(PsctlError):  # it is gone already, or does not listen any more
                peer.flush(timeout)
            peer.close("the agent leaves")

    def _run(self, address: Address) -> None:
        since: float | None = None
        while not self._over.is_set():
            self._lost.clear()
            began = time.monotonic()
            since = since if since is not None else began
            try:
                peer = self._dial(address, since + PATIENCE - began)
            except PsctlError as error:
                if isinstance(error.__cause__, ConnectionRefusedError) or time.monotonic() - since >= PATIENCE:
                    self._put(LinkGone(error.message))
                    return
                self._lost.wait(0.3)
                continue
            with self._lock:
                peer.send(self._register, urgent=True)
                self._peer = peer
            self._put(LinkUp())
            self._lost.wait()
            if self._over.is_set():
                return
            self._peer, since = None, time.monotonic()

    def _dial(self, address: Address, left: float) -> PeerConnection:
        timeout = max(0.1, min(HANDSHAKE, left))
        handler = CertificateRenewer(self._credentials, self, print)
        return dial(address, self._credentials, COORDINATOR, COORDINATION, handler, timeout, self._congestion)

    # ---- net's handler, on the connection's reader thread ------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """The connection is made."""

    def receive_buffer_for(self, peer: PeerConnection, message: Any, size: int) -> memoryview | None:
        """Payloads are written to disk from a lent buffer."""
        return None

    def on_message(self, peer: PeerConnection, message: Any, payload: memoryview | None) -> None:
        """Hand on what the coordinator says."""
        match message:
            case CheckpointCopyBegin() | CheckpointCopyPart() | CheckpointCopyEnd():
                for answer in self._copies.take(message, payload):
                    peer.send(answer, urgent=True)
            case _:
                self._put(FromCoordinator(message, b"" if payload is None else bytes(payload)))

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """The connection ended; the link's thread tries again."""
        self._why = error.message
        self._lost.set()
