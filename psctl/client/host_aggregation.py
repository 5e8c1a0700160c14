"""One push a host: this worker's lines to the others of its host, and the thread that sums what they hand in.

What goes together is decided by the mind (ps/dense/client/host_collection.py). The sum is made on a thread of its
own, under no lock,
out of the memory of those who handed in: it may take its time while backward runs and others' bytes leave.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psctl.client.host_connections import HostConnections
from psctl.client.shared_buffers import SharedBuffers
from psctl.errors import ProtocolError
from psctl.job.training_messages import WorkerListens, WorkersAt
from psctl.ps.dense.client.dense_client_state import ClientMind
from psctl.ps.dense.client.host_collection import Gather, Tell
from psctl.ps.dense.client.push_path import Say
from psctl.ps.dense.host_sums import host_sum
from psctl.ps.messages import Beside, HandIn
from psctl.types import Member

GOODBYE = 5.0
"""Seconds that the end waits for a sum that is being made."""


class HostAggregation:
    """One worker's end; `do` and `told` may be called by any thread.

    Args:
        me: this worker.
        folder: that this user alone can enter, the same for all processes of this host.
        sharing: memory of this process and of the host's others.
    """

    def __init__(self, me: Member, folder: Path, sharing: SharedBuffers) -> None:
        self._me, self._folder, self._sharing = me, folder, sharing
        self._gathers: queue.SimpleQueue[Gather | None] = queue.SimpleQueue()

    def begin(
        self,
        mind: ClientMind,
        say: Callable[[Callable[[], Sequence[Say]]], None],
        tell: Callable[[Any], object],
    ) -> None:
        """Listen for the others, and tell the coordinator so.

        Args:
            mind: told of what they say.
            say: takes the lock of the mind, and does what a call of it returns.
            tell: sends a message to the coordinator.
        """
        self._mind, self._say = mind, say
        self._thread = threading.Thread(target=self._sum, name="psctl host sums", daemon=True)
        self._thread.start()
        self._lines = HostConnections(self._me, self._folder, self)
        tell(WorkerListens(None, self._lines.secret))

    def told(self, message: WorkersAt) -> None:
        """Take in who of this host listens."""
        self._lines.told([each for each in message.workers if each.rank != self._me.rank])

    def do(self, what: Tell | Gather) -> None:
        """Do what the mind said; never waits."""
        if isinstance(what, Tell):
            self._lines.send(what.rank, what.message)
        else:
            self._gathers.put(what)

    def close(self) -> None:
        """End lines and sums."""
        self._lines.close()
        self._gathers.put(None)
        self._thread.join(GOODBYE)

    def _sum(self) -> None:
        held = self._mind.held
        while (gather := self._gathers.get()) is not None:
            present = host_sum(gather.into, held[gather.shard], gather.parts)
            self._say(lambda gather=gather, present=present: self._mind.summed(gather, present))  # type: ignore[misc]

    # ---- the lines: their reading thread ---------------------------------------------------------------------------

    def up(self, member: Member) -> None:
        self._say(lambda: self._mind.line_up(member.rank))

    def received(self, member: Member, message: Beside) -> None:
        data = None
        if isinstance(message, HandIn):
            try:
                data = self._sharing.read(member, message.at)
            except ProtocolError:
                data = None  # it goes alone
        self._say(lambda: self._mind.beside(member.rank, message, data))

    def down(self, member: Member) -> None:
        self._say(lambda: self._mind.line_down(member.rank))
        self._sharing.forget(member)
