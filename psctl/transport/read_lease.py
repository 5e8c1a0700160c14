"""Whose turn it is to read a connection: the reader thread's, or that of whoever waits for what comes on it.

Theory. What somebody waits for costs two hand-overs when the reader thread takes it in: the kernel wakes the reader,
the reader wakes who waits, and that one must also get the interpreter's lock. So who waits reads himself where he can
(leader and followers: Schmidt et al., Pattern-oriented software architecture, vol. 2). A thread that sleeps in a system
call can't be called back for less than would be saved, so the reader thread gives up its turn unasked: when what it has
taken in ended a wait, another wait will likely come soon. It *rests*, and who waits next finds the turn free. Every
REST seconds the reader looks, and reads again when nobody has taken the turn since its last look. So a connection is
unread for 2 REST at most while nobody waits, which credits, keepalive and whoever sends don't notice. Who must have it
read and does not read himself calls the reader back at once (`recall`).
"""

from __future__ import annotations

import threading

REST = 0.005
"""Seconds between two looks of a reader thread that rests."""


class ReadLease:
    """The turn to read one connection: one thread has it, or it is free."""

    def __init__(self) -> None:
        self.offered = False
        """The reader thread shall rest when it has handed on what has come. Set by who has the turn."""
        self._reading = threading.Lock()
        self._called = threading.Event()
        self._taken = 0  # how often it was taken by who waits
        self._resting = False

    def take(self) -> bool:
        """Take the turn if it is free; for who waits."""
        if not self._reading.acquire(blocking=False):
            return False
        self._taken += 1
        return True

    def give(self) -> None:
        """Give the turn back that was taken."""
        self._reading.release()

    def recall(self) -> None:
        """End the reader thread's rest."""
        if self._resting or self.offered:
            self._called.set()

    # ---- the reader thread -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the turn for good, but for rests."""
        self._reading.acquire()

    def rest(self) -> None:
        """Leave the turn, which this thread has, to those who wait, for as long as they come; it has it again then."""
        self._resting = True
        self.offered = False
        seen = self._taken
        self._reading.release()
        while not self._called.wait(REST):
            if self._reading.acquire(blocking=False):
                if self._taken == seen:
                    break
                seen = self._taken
                self._reading.release()
        else:
            self._reading.acquire()
        self._resting = False
        self._called.clear()
