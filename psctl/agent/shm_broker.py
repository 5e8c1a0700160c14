"""The agent's side of shared memory: a socket pair and a thread that answers requests for each child."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from psctl.transport.shared_memory import SegmentServer, pair
from psctl.types import Member

OFF = "PSCTL_SHARED_MEMORY"
"""Environment variable of the agent: with the value "off" processes share no memory and send all bytes; for
measurements and debugging."""


class SegmentBroker:
    """Serves shared memory segments to an agent's children; called on the agent's main thread."""

    def __init__(self) -> None:
        wanted = os.environ.get(OFF) != "off"
        self._segments = SegmentServer(psutil.virtual_memory().total if wanted else 0)
        self._ends: dict[Member, socket.socket] = {}

    @contextmanager
    def opened(self, member: Member) -> Iterator[int]:
        """Open a child's socket pair; yields the end that the child inherits, and closes it here afterwards."""
        ours, theirs = pair()
        with theirs:
            self._ends[member] = ours
            threading.Thread(
                target=self._segments.serve, args=(member, ours), name=f"psctl segments {member}", daemon=True
            ).start()
            yield theirs.fileno()

    def ended(self, member: Member) -> None:
        """Release the segments of a child that has ended or could not be started."""
        end = self._ends.pop(member, None)
        if end is not None:
            with suppress(OSError):  # its thread has read the end of file and closed it
                end.shutdown(socket.SHUT_RDWR)
        self._segments.ended(member)
