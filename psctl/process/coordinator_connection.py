"""A member's connection to the coordinator, made again when it breaks: a session outlasts its connections.

The coordinator's process may be killed and started again while the members train. A member then connects again and
resumes its session (job/message_session.py). Bulk data does not continue on another connection: the rest of a transfer
is dropped here, and the coordinator gives it up. Tensors of a checkpoint that were on their way are requested again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from psctl.errors import ConnectionFailed, PeerLeft, ProtocolError, TimedOut
from psctl.job.checkpoint_messages import LoadEnd, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.message import JobMessage
from psctl.job.message_session import BULK, MessageSession, is_numbered
from psctl.job.session_messages import MessagesReceived, ResumeSession, SessionResumed
from psctl.job.silence import AGENT_PATIENCE, TOLERANCE
from psctl.process.leader_file import CoordinatorAddress
from psctl.transport.peer_connection import AnyHandler, ConnectionHandler, PeerConnection
from psctl.types import Address

PAUSE = 0.05
"""Seconds between two attempts."""

LOOK = 0.25
"""Seconds between two looks whether the coordinator has moved."""

MOST_SAVES = 64
"""Steps of checkpoints that are named when a session is resumed: those begun last."""


class MemberConnection(Protocol):
    """The methods of a connection to the coordinator that workers and servers call."""

    def send(self, message: JobMessage, payload: memoryview | None = None) -> object: ...
    def flush(self, timeout: float | None = None) -> None: ...
    def deliver(self, timeout: float) -> None: ...
    def close(self, reason: str = "") -> None: ...
    def join(self, timeout: float | None = None) -> object: ...


class CoordinatorConnection(ConnectionHandler[JobMessage]):
    """The connection of a worker or a server to the coordinator.

    Args:
        handler: receives messages, and `on_connection_lost` once, when the coordinator is lost for good.
        dial: connects to the coordinator, given the handler of the connection.
        patience: seconds for which the coordinator is dialled.
        address: of the coordinator, which may move to another host; the connection follows. `dial` takes it from there.

    Raises:
        ConnectionFailed: the coordinator cannot be reached within that time.
    """

    def __init__(
        self,
        handler: AnyHandler,
        dial: Callable[[AnyHandler], PeerConnection],
        patience: float = AGENT_PATIENCE,
        address: CoordinatorAddress | None = None,
    ) -> None:
        self._handler, self._dial, self._patience = handler, dial, patience
        self._session: MessageSession[JobMessage] = MessageSession()
        self._changed = threading.Condition()
        self._peer: PeerConnection | None = None
        self._ready = False  # the session is begun or resumed on this connection
        self._closing = False
        self._lost: ConnectionFailed | None = None
        self._saves: set[tuple[int, bool]] = set()  # parts that are being sent on this connection: (step, of tables)
        self._saved: list[int] = []  # the last steps of which a part was begun
        self._loads: dict[int, LoadWanted] = {}  # by ticket: requests without an answer, for the next connection
        at = address.get() if address is not None else None
        self._dial_again()
        with self._changed:
            self._changed.wait_for(lambda: self._peer is not None)
        if address is not None and address.moves:
            threading.Thread(target=self._follow, args=(address, at), name="psctl leader", daemon=True).start()

    # ---- any thread ----------------------------------------------------------------------------------------------

    def send(self, message: JobMessage, payload: memoryview | None = None) -> bool:
        """Send a message: bulk data after all others, which keep their order, because they are numbered by it.

        A numbered message is kept while there is no connection; bulk data of a broken connection is dropped.

        Returns:
            False when the message was dropped.
        """
        with self._changed:
            if isinstance(message, LoadWanted):
                self._loads[message.ticket] = message
                if not self._ready and self._lost is None:
                    return True  # sent when the session is resumed
            if isinstance(message, SaveBegin):
                self._changed.wait_for(lambda: self._ready or self._lost is not None or self._closing)
            if self._lost is not None:
                return False
            if is_numbered(message):
                self._session.keep(message)
                if self._ready and self._peer is not None:
                    self._peer.send(message, urgent=True)
                return True
            bulk = isinstance(message, BULK)
            if not self._ready or self._peer is None or (bulk and not self._continues(message)):
                return False
            return self._peer.send(message, payload, urgent=not bulk)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the coordinator's system holds what was sent on this connection.

        Raises:
            TimedOut: it took longer than `timeout` seconds.
            ConnectionFailed: the coordinator is lost for good.
        """
        peer = self._peer
        if self._lost is not None:
            raise self._lost
        if peer is not None:
            try:
                peer.flush(timeout)
            except ConnectionFailed:  # it is made again; a transfer that it interrupted is given up
                if self._lost is not None or self._closing:
                    raise

    def deliver(self, timeout: float) -> None:
        """Wait until the coordinator has received all numbered messages, and its system all bulk data.

        Call it before `close`, which drops what is queued.

        Raises:
            TimedOut: it took longer than `timeout` seconds.
            ConnectionFailed: the coordinator is lost for good.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: self._lost is not None or not self._session.unacknowledged(), timeout)
            if self._lost is not None:
                raise self._lost
        if not done:
            raise TimedOut(f"the coordinator did not acknowledge all messages within {timeout:g} s")
        self.flush(timeout)

    def close(self, reason: str = "") -> None:
        """Close the connection; it is not made again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            peer = self._peer
        if peer is not None:
            peer.close(reason)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the threads of the connection have ended."""
        peer = self._peer
        if peer is not None:
            peer.join(timeout)

    def _continues(self, message: JobMessage) -> bool:
        """Return whether bulk data belongs to a transfer of this connection; under the lock."""
        if isinstance(message, SaveBegin):
            self._saves.add((message.step, message.tables))
            self._saved = [*self._saved[1 - MOST_SAVES :], message.step]
        if isinstance(message, SavePart):
            return (message.step, message.tables) in self._saves
        if isinstance(message, SaveEnd):
            begun = (message.step, message.tables) in self._saves
            self._saves.discard((message.step, message.tables))
            return begun
        return True

    # ---- the handler of each connection: its reader thread -------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        peer.tolerate(TOLERANCE)
        with self._changed:
            first, self._peer = self._peer is None, peer
            self._ready = first
            self._changed.notify_all()
        if not first:
            peer.send(ResumeSession(self._session.received, tuple(self._saved)), urgent=True)

    def receive_buffer_for(self, peer: PeerConnection, message: JobMessage, size: int) -> memoryview | None:
        return self._handler.receive_buffer_for(peer, message, size)

    def on_message(self, peer: PeerConnection, message: JobMessage, payload: memoryview | None) -> None:
        match message:
            case SessionResumed(received=received):
                self._resume(peer, received or 0)
            case MessagesReceived(count=count):
                with self._changed:
                    self._session.acknowledge(count)
                    self._changed.notify_all()
            case _:
                if isinstance(message, LoadEnd):
                    with self._changed:
                        self._loads.pop(message.ticket, None)
                self._handler.on_message(peer, message, payload)
                if is_numbered(message):
                    self._session.received += 1
                    peer.send(MessagesReceived(self._session.received), urgent=True)

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        with self._changed:
            self._ready = False
            self._saves.clear()
            final = self._closing or isinstance(error, PeerLeft | ProtocolError)
        if final:
            self._give_up(peer, error)
        else:
            threading.Thread(
                target=self._connect_again, args=(peer, error), name="psctl reconnect", daemon=True
            ).start()

    def _resume(self, peer: PeerConnection, received: int) -> None:
        """Send again what the coordinator has not received, then everything that waits."""
        with self._changed:
            self._session.acknowledge(received)
            for message in self._session.unacknowledged():
                peer.send(message, urgent=True)
            for wanted in self._loads.values():  # their answers were on their way, and are sent anew
                peer.send(wanted)
            self._ready = True
            self._changed.notify_all()

    # ---- the thread that follows the coordinator ------------------------------------------------------------------

    def _follow(self, address: CoordinatorAddress, at: Address | None) -> None:
        """Leave the connection when the coordinator is at another address than `at`."""
        while not self._closing and self._lost is None:
            time.sleep(LOOK)
            now, peer = address.get(), self._peer
            if now != at:
                at = now
                if peer is not None:
                    peer.close("another coordinator leads")

    # ---- the thread that connects again --------------------------------------------------------------------------

    def _connect_again(self, old: PeerConnection, error: ConnectionFailed) -> None:
        try:
            self._dial_again()
        except ProtocolError as refusal:  # the coordinator does not want this member any more
            self._give_up(old, refusal)
        except ConnectionFailed:
            self._give_up(old, error)

    def _dial_again(self) -> None:
        """Dial until a connection is made."""
        until = time.monotonic() + self._patience
        while True:
            try:
                self._dial(self)
                return
            except ProtocolError:
                raise
            except ConnectionFailed:
                if self._closing or time.monotonic() >= until:
                    raise
                time.sleep(PAUSE)

    def _give_up(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify_all()
        self._handler.on_connection_lost(peer, error)
