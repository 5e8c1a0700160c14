"""The agent's side of shared memory: a pair of sockets for each child, and a thread that answers on it."""

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
"""Set to "off" where psctl starts an agent, its processes send all bytes: to measure that, and to look for faults."""


class SegmentBroker:
    """Segments of an agent's children; called on its main thread."""

    def __init__(self) -> None:
        wanted = os.environ.get(OFF) != "off"
        self._segments = SegmentServer(psutil.virtual_memory().total if wanted else 0)
        self._ends: dict[Member, socket.socket] = {}

    @contextmanager
    def opened(self, member: Member) -> Iterator[int]:
        """Open a child's pair; gives the descriptor that the child is to inherit, and closes it here at the end."""
        ours, theirs = pair()
        with theirs:
            self._ends[member] = ours
            threading.Thread(
                target=self._segments.serve, args=(member, ours), name=f"psctl segments {member}", daemon=True
            ).start()
            yield theirs.fileno()

    def ended(self, member: Member) -> None:
        """Let go of all that a child held: it has ended, or could not be started."""
        end = self._ends.pop(member, None)
        if end is not None:
            with suppress(OSError):  # its thread found the end before us, and has closed it
                end.shutdown(socket.SHUT_RDWR)
        self._segments.ended(member)
