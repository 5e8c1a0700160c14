"""Rank states (a rank's buffers and tracked state) of the last clocks, kept for workers that start in mid-run."""

from __future__ import annotations

from psctl.errors import ProtocolError
from psctl.ps.messages import LARGEST, PutRankState, RankStateAnswer, RankStateQuery
from psctl.ps.outputs import ToServer, ToWorker


class RankStates:
    """Rank states by rank and clock; a query for one that is missing waits for it.

    Args:
        kept: number of clocks kept of a rank.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._whole: dict[int, dict[int, memoryview]] = {}  # rank -> clock -> bytes
        self._arriving: dict[str, memoryview] = {}  # by sender
        self._queries: dict[int, RankStateQuery] = {}  # by the rank that sent the query

    def receive_buffer_for(self, sender: str, message: PutRankState, size: int) -> memoryview | None:
        """Return the buffer for a state; None when the state is here already.

        Raises:
            ProtocolError: it is too large, or another rank's.
        """
        if sender.startswith("worker/") and sender != f"worker/{message.rank}":
            raise ProtocolError(f"{sender}: it sent a rank state as worker/{message.rank}", where=sender)
        if size > LARGEST:
            raise ProtocolError(f"{sender}: a rank state of {size} bytes, more than {LARGEST}", where=sender)
        if message.clock in self._of(message.rank):
            return None
        buffer = self._arriving[sender] = memoryview(bytearray(size))
        return buffer

    def add(self, sender: str, message: PutRankState, size: int) -> bool:
        """Keep a state that has arrived; return False when it was here already."""
        if size == 0:
            self.receive_buffer_for(sender, message, 0)
        arrived, whole = self._arriving.pop(sender, None), self._of(message.rank)
        if arrived is None or message.clock in whole:
            return False
        whole[message.clock] = arrived
        for old in sorted(whole)[: -self._kept]:
            del whole[old]
        return True

    def _of(self, rank: int) -> dict[int, memoryview]:
        return self._whole.setdefault(rank, {})

    def newest_clock(self, rank: int) -> int:
        """Return the newest clock of a rank's states here; -1: none."""
        return max(self._of(rank), default=-1)

    def at_or_newest(self, rank: int, clock: int) -> tuple[int, memoryview]:
        """Return a rank's state at a clock, or its newest one, and the clock of that; -1 and nothing: none is here."""
        found = self._of(rank)
        clock = clock if clock in found else self.newest_clock(rank)
        return clock, found.get(clock, memoryview(b""))

    def on_query(self, rank: int, message: RankStateQuery) -> None:
        """Record a rank's query."""
        self._queries[rank] = message

    def on_disconnected(self, rank: int) -> None:
        """Drop a rank's query and the state that it was sending."""
        self._queries.pop(rank, None)
        self._arriving.pop(f"worker/{rank}", None)

    def answers(self) -> list[ToWorker]:
        """Answer the queries for states that have arrived."""
        outputs: list[ToWorker] = []
        for rank, query in sorted(self._queries.items()):
            data = self._of(query.rank).get(query.clock)
            if data is not None:
                del self._queries[rank]
                outputs.append(ToWorker(rank, RankStateAnswer(query.clock), data or None))
        return outputs

    def copies(self, server: int, only: PutRankState | None = None) -> list[ToServer]:
        """Return the messages that send the state of `only` (None: all states) to another server."""
        return [
            ToServer(server, PutRankState(clock, rank), data or None)
            for rank, states in self._whole.items()
            for clock, data in sorted(states.items())
            if only is None or (rank, clock) == (only.rank, only.clock)
        ]


class RankStateFetch:
    """The state that a worker requests, until it has arrived."""

    def __init__(self) -> None:
        self.wanted: int | None = None  # clock that was requested and has not arrived
        self._arriving: dict[int, memoryview] = {}  # by server
        self._whole: tuple[int, memoryview] | None = None

    def of(self, clock: int) -> memoryview | None:
        """Return a clock's state, once it has arrived."""
        return self._whole[1] if self._whole is not None and self._whole[0] == clock else None

    def receive_buffer_for(self, server: int, message: RankStateAnswer, size: int) -> memoryview | None:
        """Return the buffer for a state; None when it is not needed.

        Raises:
            ProtocolError: it is too large.
        """
        if size > LARGEST:
            what = f"server/{server}: a rank state of {size} bytes, more than {LARGEST}"
            raise ProtocolError(what, where=f"server/{server}")
        if message.clock != self.wanted:
            return None
        buffer = self._arriving[server] = memoryview(bytearray(size))
        return buffer

    def on_answer(self, server: int, message: RankStateAnswer, size: int) -> None:
        """Keep a state that has arrived, if it is still wanted."""
        if size == 0:
            self.receive_buffer_for(server, message, 0)
        arrived = self._arriving.pop(server, None)
        if arrived is not None and message.clock == self.wanted:
            self._whole, self.wanted = (message.clock, arrived), None
