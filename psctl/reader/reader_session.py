"""A reader's session with the coordinator: the decision of the job, changes of its servers, and the end of training."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from psctl.errors import ConnectionFailed, JobFailed, PsctlError
from psctl.job.membership_messages import Reassign
from psctl.job.message import JobMessage
from psctl.job.reader_messages import TrainingEnded
from psctl.job.table_server_messages import TablesAt, TablesWanted
from psctl.job.training_messages import Decision, Heartbeat, Join, Leave
from psctl.process.coordinator_connection import MemberConnection
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Assignment

BEAT = 1.0
"""Seconds between two heartbeats."""


class ReaderSession:
    """One reader's session; the handler of its connection to the coordinator.

    Args:
        leave: ends the process, with the reason; called from the network thread.
    """

    def __init__(self, leave: Callable[[PsctlError], object]) -> None:
        self._leave = leave
        self.changed = threading.Condition()
        """Notified at every change, also of what is read from servers."""
        self.has_training_ended = False
        self.step = 0
        """The step of the values that were read last."""
        self._connection: MemberConnection | None = None
        self._decision: Decision | None = None
        self._tables: TablesAt | None = None
        self._on_assignment: Callable[[Assignment], None] | None = None
        self._on_tables: Callable[[TablesAt], None] | None = None
        self._newest: Assignment | None = None
        self._closing = threading.Event()

    # ---- the main thread ---------------------------------------------------------------------------------------------

    def join(self, connection: MemberConnection) -> Decision:
        """Join the job; return its decision."""
        self._connection = connection
        connection.send(Join(os.getpid()))
        threading.Thread(target=self._beat, name="psctl heartbeats", daemon=True).start()
        with self.changed:
            while self._decision is None:
                self.changed.wait(1.0)
            return self._decision

    def send(self, message: JobMessage) -> None:
        """Queue a message for the coordinator."""
        if self._connection is not None:
            self._connection.send(message)

    def follow_servers(self, changed: Callable[[Assignment], None]) -> None:
        """Call `changed` with every newer assignment of the parameters' shards."""
        with self.changed:
            self._on_assignment, newest = changed, self._newest
        if newest is not None:
            changed(newest)

    def tables(self, changed: Callable[[TablesAt], None]) -> None:
        """Ask for the servers that hold tables; `changed` is called with them, once there are any, and at changes."""
        self._on_tables = changed
        self.send(TablesWanted())

    def close(self) -> None:
        """Close the connection; messages that were sent before still arrive."""
        self._closing.set()
        if self._connection is not None:
            try:
                self._connection.deliver(10.0)
            except PsctlError as error:
                print(f"psctl: while the connection to the coordinator was closed: {error}", file=sys.stderr)
            self._connection.close("the script has ended")
            self._connection.join(10.0)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT):
            self.send(Heartbeat(self.step, "reading"))

    # ---- the handler: network thread ---------------------------------------------------------------------------------

    def on_connected(self, peer: PeerConnection) -> None:
        """Do nothing: `join` sends the first message."""

    def receive_buffer_for(self, peer: PeerConnection, message: JobMessage, size: int) -> memoryview | None:
        """Return None: no message for a reader has a payload."""
        return None

    def on_message(self, peer: PeerConnection, message: JobMessage, payload: memoryview | None) -> None:
        """Handle one message."""
        match message:
            case Reassign(assignment=assignment):
                with self.changed:
                    self._newest, follow = assignment, self._on_assignment
                if follow is not None:
                    follow(assignment)
            case TablesAt() if self._on_tables is not None:
                self._on_tables(message)
            case Leave(reason=reason):
                self._closing.set()
                self._leave(JobFailed(reason))
            case Decision():
                with self.changed:
                    self._decision = message
            case TrainingEnded():
                with self.changed:
                    self.has_training_ended = True
            case _:
                pass  # it is for workers
        with self.changed:
            self.changed.notify_all()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """End the process: without a coordinator no message would end it."""
        if not self._closing.is_set():
            self._leave(ConnectionFailed(f"the connection to the coordinator is lost: {error.message}"))
