"""A session between a member and the coordinator: its messages outlast a connection, and the coordinator's process.

Both ends count the numbered messages of each direction. A connection keeps their order (all are urgent, only bulk data
is not), so the numbers themselves are not sent. The sender keeps a message until the receiver has acknowledged it.
After a connection broke, each end states how many messages it has received, and the other sends the following ones
again: each message is handled exactly once.

A coordinator that is started again computes the same messages, with the same numbers, from its journal of inputs
(coordinator/journal.py). It acknowledges a message after that is in the journal, so none is lost with it.

Not numbered are messages that a later one replaces (heartbeats, samples of load, certificates) and bulk data: parts of
checkpoints and start values. A transfer that a broken connection has interrupted is given up, not continued.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from psctl.job import checkpoint_messages as checkpoint
from psctl.job import leadership_messages as leadership
from psctl.job import table_server_messages as tables
from psctl.job import training_messages as training
from psctl.job.process_messages import ClockIs, ClockWanted, HostSample, NewCertificate, Register, StopWanted
from psctl.job.session_messages import MessagesReceived, ResumeSession, SessionResumed
from psctl.permits import WireMessage

T = TypeVar("T")

REPLACED = (training.Join, Register, ResumeSession, SessionResumed, MessagesReceived, training.Heartbeat, HostSample,
            NewCertificate, ClockWanted, ClockIs)  # fmt: skip
"""Messages of one connection, or that a later one replaces."""

BULK = (
    checkpoint.SaveBegin, checkpoint.SavePart, checkpoint.SaveEnd, checkpoint.LoadWanted, checkpoint.LoadPart,
    checkpoint.LoadEnd, checkpoint.CheckpointCopyBegin, checkpoint.CheckpointCopyPart, checkpoint.CheckpointCopyEnd,
    training.StartBegin, training.StartPart, training.StartEnd, tables.ReadWanted, tables.ReadBy, tables.ReadRows,
)  # fmt: skip
"""Messages of transfers that end with their connection."""

LEADERSHIP = (
    leadership.Leadership, leadership.LeadershipAccepted, leadership.MajorityMissed, leadership.ReplicaBegin,
    leadership.ReplicaLog, leadership.ReplicaSnapshot, leadership.ReplicaRecord, leadership.ReplicaStored,
)  # fmt: skip
"""Messages of the copy of the state, which are no part of it."""


def is_numbered(message: WireMessage) -> bool:
    """Return whether a session delivers this message exactly once."""
    return not isinstance(message, REPLACED + BULK + LEADERSHIP)


class MessageSession(Generic[T]):
    """One end of a session, which keeps messages of type T. Safe to use from several threads."""

    def __init__(self) -> None:
        self.received = 0
        """Numbered messages that were received."""
        self._lock = threading.Lock()
        self._kept: deque[T] = deque()
        self._first = 0  # number of the first one that is kept

    def __getstate__(self) -> tuple[int, deque[T], int]:
        return self.received, self._kept, self._first

    def __setstate__(self, state: tuple[int, deque[T], int]) -> None:
        self._lock = threading.Lock()
        self.received, self._kept, self._first = state

    @property
    def next(self) -> int:
        """The number of the next message that is sent."""
        with self._lock:
            return self._first + len(self._kept)

    @property
    def waiting(self) -> int:
        """Messages that are kept."""
        return len(self._kept)

    def keep(self, message: T) -> None:
        """Keep a message that is about to be sent."""
        with self._lock:
            self._kept.append(message)

    def acknowledge(self, count: int) -> None:
        """Drop the first `count` messages of the session, which the other end has received.

        Raises:
            ValueError: so many were not sent; the other end's fault.
        """
        with self._lock:
            if count > self._first + len(self._kept):
                raise ValueError(f"{count} messages are acknowledged, {self._first + len(self._kept)} were sent")
            while self._first < count:
                self._kept.popleft()
                self._first += 1

    def unacknowledged(self) -> list[T]:
        """Return the messages to send again, in order."""
        with self._lock:
            return list(self._kept)

    def begin_again(self, first: int) -> None:
        """Begin a new session with message `first` of the old one; of earlier ones only a user's stop is kept."""
        with self._lock:
            old = max(0, first - self._first)
            kept = [
                message for index, message in enumerate(self._kept) if index >= old or isinstance(message, StopWanted)
            ]
            self._kept, self._first, self.received = deque(kept), 0, 0
