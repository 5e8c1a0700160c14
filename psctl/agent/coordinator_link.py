"""The agent's connection to the coordinator, made again when it breaks, and the checkpoint copies that arrive on it.

A coordinator that was killed is started again by its agent; where connections are refused for longer than that takes,
it is gone, and the job is over on this host, unless another host may lead (elections.py). Silence may be a link that
comes back: when the coordinator has been out of reach for AGENT_PATIENCE (job/silence.py), the agent ends its
processes, but goes on to dial for as long as the job waits for lost hosts. Messages outlast the connection in a session
(job/message_session.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from psctl.agent.elections import Elections
from psctl.checkpoint.catalog import prune
from psctl.checkpoint.copies import CheckpointReceiver
from psctl.checkpoint.reader import folder_name
from psctl.checkpoint.writer import remove_abandoned
from psctl.errors import ConnectionFailed, PsctlError
from psctl.job.checkpoint_messages import CheckpointCopyBegin, CheckpointCopyDone, CheckpointCopyEnd, CheckpointCopyPart
from psctl.job.job_permits import COORDINATION
from psctl.job.leadership_messages import (
    Leadership,
    MajorityMissed,
    ReplicaBegin,
    ReplicaLog,
    ReplicaRecord,
    ReplicaSnapshot,
)
from psctl.job.message import JobMessage
from psctl.job.message_session import MessageSession, is_numbered
from psctl.job.process_messages import OutputLines, Register
from psctl.job.session_messages import MessagesReceived, SessionResumed
from psctl.job.silence import AGENT_PATIENCE, TOLERANCE
from psctl.orders import JobOrder
from psctl.process.certificate_renewal import CertificateRenewer
from psctl.transport.connect import dial
from psctl.transport.credentials import Credentials
from psctl.transport.peer_connection import ConnectionHandler, PeerConnection
from psctl.types import Address, Member


class CheckpointCopies:
    """Copies of checkpoints on this host: received, verified, and pruned like those of the head.

    Called on the link's reader thread; the coordinator sends one copy after another.

    Args:
        root: folder of all jobs' checkpoints on this host.
        order: the job, with the number of checkpoints to retain.
    """

    def __init__(self, root: Path, order: JobOrder) -> None:
        self._root, self._order = root, order
        remove_abandoned(root)
        self._receivers: dict[int, CheckpointReceiver] = {}

    def receive(
        self, message: CheckpointCopyBegin | CheckpointCopyPart | CheckpointCopyEnd, payload: memoryview | None
    ) -> Iterator[CheckpointCopyDone]:
        """Process one message of a copy; yield the answer when the copy is complete or has failed."""
        try:
            if self._act(message, payload):
                yield CheckpointCopyDone(message.step)
        except PsctlError as error:
            receiver = self._receivers.pop(message.step, None)
            if receiver is not None:
                receiver.discard()
            yield CheckpointCopyDone(message.step, error.message)

    def _act(
        self, message: CheckpointCopyBegin | CheckpointCopyPart | CheckpointCopyEnd, payload: memoryview | None
    ) -> bool:
        step = message.step
        if isinstance(message, CheckpointCopyBegin):
            self.discard()  # from a connection that broke
            folder = self._root / self._order.name / folder_name(step)
            base = self._root / self._order.name / folder_name(message.base) if message.linked else None
            self._receivers[step] = CheckpointReceiver(folder, message.files, base=base, linked=message.linked)
        elif step in self._receivers and isinstance(message, CheckpointCopyPart):
            self._receivers[step].write_part(message.file, message.offset, payload if payload is not None else b"")
        elif step in self._receivers:
            self._receivers.pop(step).finish()
            keep = self._order.checkpoint
            prune(self._root, self._order.name, keep.keep, keep.keep_best, protect=step)
            return True
        return False  # a late part of a copy that has failed, which was reported

    def discard(self) -> None:
        """Remove incomplete copies."""
        for receiver in self._receivers.values():
            receiver.discard()
        self._receivers.clear()


REFUSED = 10.0
"""Seconds of refused connections after which the coordinator is gone: it takes a second to start it again."""

UNLED = 30.0
"""The same where another host may lead: it has been elected by then, or none can be."""

PAUSE = 0.1
"""Seconds between two attempts."""

MOST_WAITING = 1000
"""Messages that wait for a connection before further printed lines are dropped."""

HANDSHAKE = 5.0
"""Seconds for one attempt."""

LOOK = 1.0
"""Seconds between two looks at how long the coordinator has been silent."""

COORDINATOR = Member("coordinator", 0)


class LinkSilent(msgspec.Struct, frozen=True):
    """The coordinator has been out of reach for AGENT_PATIENCE; it may come back."""

    reason: str


class LinkGone(msgspec.Struct, frozen=True):
    """The coordinator is gone for good."""

    reason: str


class FromCoordinator(msgspec.Struct, frozen=True):
    """A message of the coordinator."""

    message: JobMessage
    payload: bytes = b""
    at: int = 0  # nanoseconds of this host's monotonic clock


class CoordinatorLink(ConnectionHandler[JobMessage]):
    """Maintains one connection. Events go to `put`, checkpoint copies directly to disk.

    Args:
        credentials: of the agent.
        register: returns the first message of each connection; called on another thread.
        patience: seconds without the coordinator after which it is gone for good, at least AGENT_PATIENCE.
        congestion: TCP's congestion control.
        put: takes LinkSilent, LinkGone and FromCoordinator; called on other threads.
        copies: receives checkpoint copies.
        elections: takes part in the leadership of the job; None: it has too few hosts.
    """

    def __init__(
        self, credentials: Credentials, register: Callable[[], Register], patience: float, congestion: str,
        put: Callable[[LinkSilent | LinkGone | FromCoordinator], None], copies: CheckpointCopies,
        elections: Callable[[], Elections | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._elections = elections
        self._address: Address | None = None
        self._since = time.monotonic()  # when the coordinator was last in reach, while there is no connection
        self._credentials, self._register, self._congestion = credentials, register, congestion
        self._patience = max(AGENT_PATIENCE, patience)
        self._put, self._copies = put, copies
        self._lock = threading.Lock()
        self._session: MessageSession[JobMessage] = MessageSession()
        self._first = 0  # message of the session that would be the first of a new one
        self._peer: PeerConnection | None = None
        self._begun = False  # there is a session
        self._ready = False  # the session is begun or resumed on this connection
        self._lost = threading.Event()
        self._over = threading.Event()

    def start(self, address: Address) -> None:
        """Connect, and reconnect whenever the connection breaks."""
        self._address, self._since = address, time.monotonic()
        threading.Thread(target=self._run, name="psctl link", daemon=True).start()

    def move(self, address: Address) -> None:
        """Connect to the coordinator at another address from now on."""
        if self._address is None:
            self.start(address)
            return
        self._address, self._since = address, time.monotonic()
        peer = self._peer
        if peer is not None:
            peer.close("another coordinator leads")

    def silent_for(self) -> float:
        """Return the seconds since the coordinator was last in reach."""
        peer = self._peer
        return time.monotonic() - self._since if peer is None else peer.silent_for()

    def send(self, message: JobMessage) -> bool:
        """Send to the coordinator, now or when it is connected again.

        Returns:
            False when there is no connection now and the message was dropped: it is not numbered, or too many wait.
        """
        with self._lock:
            if not is_numbered(message):
                return self._ready and self._peer is not None and self._peer.send(message, urgent=True)
            if not self._ready and isinstance(message, OutputLines) and self._session.waiting > MOST_WAITING:
                return False  # the lines are in the log files of this host
            self._session.keep(message)
            if self._ready and self._peer is not None:
                self._peer.send(message, urgent=True)
            return True

    def ask(self, question: JobMessage) -> bool:
        """Send a question, whose answer a user waits for; return False when there is no connection.

        It would not outlast the begin of a session: a user who has given up wants no late change.
        """
        with self._lock:
            ready = self._ready and self._peer is not None
        return ready and self.send(question)

    def finish(self) -> None:
        """The job is over: a connection that breaks from now on is not made again."""
        self._over.set()

    def close(self, timeout: float) -> None:
        """Send what is queued, then end the connection."""
        self._over.set()
        peer = self._peer
        if peer is not None:
            with contextlib.suppress(PsctlError):  # the coordinator is gone already
                peer.flush(timeout)
            peer.close("the agent ends")

    def _run(self) -> None:
        silent = False  # whether the agent knows that the coordinator is out of reach
        while not self._over.is_set():
            self._lost.clear()
            address = self._address
            assert address is not None, "start or move sets it"
            try:
                peer = self._dial(address, self._since + self._patience - time.monotonic())
            except PsctlError as error:
                away = time.monotonic() - self._since
                refused = isinstance(error.__cause__, ConnectionRefusedError)
                patience = REFUSED if self._elections() is None else UNLED
                if away >= (patience if refused else self._patience):
                    self._put(LinkGone(error.message))
                    return
                if away >= AGENT_PATIENCE and not silent:
                    silent = True
                    self._put(LinkSilent(error.message))
                self._lost.wait(PAUSE)
                continue
            with self._lock:
                self._first = self._session.next  # before the list of processes, whose ends have later numbers
                known = self._session.received if self._begun else None
                peer.send(msgspec.structs.replace(self._register(), received=known), urgent=True)
                self._peer = peer
            silence = self._await_end(peer)
            if self._over.is_set():
                return
            with self._lock:
                self._peer, self._ready = None, False
            if address != self._address:
                continue
            self._since, silent = time.monotonic() - silence, silence >= AGENT_PATIENCE
            if silent:
                self._put(LinkSilent(f"{peer.name}: no sign of life for {silence:.0f} s"))
                peer.close("no sign of life")

    def _await_end(self, peer: PeerConnection) -> float:
        """Wait for the connection's end, or for AGENT_PATIENCE of silence; return the seconds of silence before."""
        silence = 0.0
        while not self._lost.wait(LOOK) and silence < AGENT_PATIENCE:
            silence = peer.silent_for()
        return silence

    def _dial(self, address: Address, left: float) -> PeerConnection:
        timeout = max(0.1, min(HANDSHAKE, left))
        handler = CertificateRenewer(self._credentials, self, print)
        peer = dial(address, self._credentials, COORDINATOR, COORDINATION, handler, timeout, self._congestion)
        peer.tolerate(TOLERANCE)
        return peer

    # ---- on the connection's reader thread ------------------------------------------------------------------------

    def on_message(self, peer: PeerConnection, message: JobMessage, payload: memoryview | None) -> None:
        match message:
            case CheckpointCopyBegin() | CheckpointCopyPart() | CheckpointCopyEnd():
                for answer in self._copies.receive(message, payload):
                    self.send(answer)
            case SessionResumed(received=received):
                self._resume(peer, received)
            case MessagesReceived(count=count):
                self._session.acknowledge(count)
            case Leadership() | MajorityMissed() | ReplicaBegin() | ReplicaLog() | ReplicaSnapshot() | ReplicaRecord():
                elections = self._elections()
                reply = elections.on_message(message, payload) if elections is not None else None
                if reply is not None:
                    peer.send(reply, urgent=True)
            case _:
                at = time.monotonic_ns()
                self._put(FromCoordinator(message, b"" if payload is None else bytes(payload), at))
                if is_numbered(message):
                    self._session.received += 1
                    peer.send(MessagesReceived(self._session.received), urgent=True)

    def _resume(self, peer: PeerConnection, received: int | None) -> None:
        """Send again what the coordinator has not received, then everything that waits."""
        with self._lock:
            if received is None:
                self._session.begin_again(self._first)
            else:
                self._session.acknowledge(received)
            for message in self._session.unacknowledged():
                peer.send(message, urgent=True)
            self._begun = True
            self._ready = self._peer is peer

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        self._lost.set()
