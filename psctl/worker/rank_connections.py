"""The connections of a worker to all others, over which the collectives of the training script go.

worker                            coordinator
RanksWanted             ------>   of the first worker whose script calls a collective
                        <------   ListenForRanks: to all workers
RankListens             ------>   from a thread: the script may do anything meanwhile
                        <------   RanksAt: when all listen
connects
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from psctl.collectives.data_plane import DataPlane
from psctl.errors import PsctlError, UsageError
from psctl.job.message import JobMessage
from psctl.job.training_messages import (
    CollectiveChoice,
    ListenForRanks,
    RankListens,
    RanksAt,
    RanksWanted,
    WorkerAt,
)
from psctl.schedule.algorithms.catalog import build
from psctl.types import Address
from psctl.worker.plane_connections import Connect, Wait


class RanksRefused(UsageError):
    """Workers of the job cannot be connected now."""


class ConnectionOutcome(NamedTuple):
    """The data plane, or why there is none."""

    plane: DataPlane | None
    error: PsctlError | None = None


class RankConnections:
    """Connects one worker to all others, once.

    Args:
        connect: makes a data plane.
        send: sends a message to the coordinator.
        wait: for messages of the coordinator.
        changed: wakes the thread that waits.
    """

    def __init__(
        self, connect: Connect, send: Callable[[JobMessage], None], wait: Wait, changed: Callable[[], None]
    ) -> None:
        self._connect, self._send, self._wait, self._changed = connect, send, wait, changed
        self._at: RanksAt | None = None
        self._made: ConnectionOutcome | None = None

    def on_message(self, message: ListenForRanks | RanksAt) -> None:
        """Handle a message; called by the network thread."""
        if isinstance(message, RanksAt):
            self._at = message
        else:
            threading.Thread(target=self._listen, args=(message.hosts,), name="psctl-ranks", daemon=True).start()

    def connected(self) -> tuple[DataPlane, list[CollectiveChoice]]:
        """Return the data plane between all workers, and the plan of collectives; wait until they are connected.

        Raises:
            UsageError: workers of this job cannot be connected now; the message has the reason.
            ConnectionFailed: a worker cannot be reached.
        """
        self._send(RanksWanted())
        outcome = self._wait(self._outcome)
        if isinstance(outcome.error, RanksRefused):
            self._at = None
        if outcome.error is not None:
            raise outcome.error
        assert outcome.plane is not None, "it is made where there is no error"
        assert self._at is not None, "it came before the connections"
        return outcome.plane, self._at.choices

    def _outcome(self) -> ConnectionOutcome | None:
        if self._at is not None and self._at.problem:
            text = f"a collective of the script (run.barrier and others): {self._at.problem}"
            return ConnectionOutcome(None, RanksRefused(text, "call the first one while all workers train"))
        return self._made

    def _listen(self, hosts: Sequence[int]) -> None:
        try:
            plane = self._connect(build("one-shot", len(hosts)), hosts, self._exchange, None)
            self._made = ConnectionOutcome(plane)
        except PsctlError as error:
            self._made = ConnectionOutcome(None, error)
        self._changed()

    def _exchange(self, address: Address | None, secret: bytes) -> Sequence[WorkerAt]:
        self._send(RankListens(address, secret))
        return self._wait(lambda: self._at).workers
