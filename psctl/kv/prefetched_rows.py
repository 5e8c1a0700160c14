"""Rows that were requested one clock ahead, while the script computes: a pull of the same keys in the next clock takes
them.

The request asks for the rows of the next clock, so the servers answer it when that clock's rows are complete: under bsp
when all workers have ended the present clock. No row is older than a pull in that clock would return; what is saved is
the way of the request, and its time on the servers.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from psctl.ps.tables.client.calls_in_flight import TableRead
from psctl.ps.tables.row_index import Keys
from psctl.ps.tables.table_kinds import TableKind


class EarlyRead(NamedTuple):
    """One request: keys as the script gave them, the own clocks after which its rows are used, and the read."""

    kind: TableKind
    keys: Keys
    clock: int
    ticket: int
    read: TableRead


class PrefetchedRows:
    """The two newest requests: the present clock's, which is taken by a pull, and the next one's."""

    def __init__(self) -> None:
        self._reads: deque[EarlyRead] = deque(maxlen=2)

    def __bool__(self) -> bool:
        return bool(self._reads)

    def add(self, read: EarlyRead) -> None:
        """Keep a request."""
        self._reads.append(read)

    def take(self, keys: Keys, clock: int) -> EarlyRead | None:
        """Remove and return the request of these keys for this number of own clocks; None: there is none.

        Older ones are dropped: what they ask for is not read any more.
        """
        for at, read in enumerate(self._reads):
            if read.clock == clock and np.array_equal(read.keys, keys):
                for _ in range(at + 1):
                    self._reads.popleft()
                return read
        return None

    def clear(self) -> None:
        """Drop all requests, after a change of rows that they may lack."""
        self._reads.clear()
