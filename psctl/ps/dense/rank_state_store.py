"""Rank states (a rank's buffers and tracked state) of the last clocks, kept for workers that start in mid-run."""

from __future__ import annotations

from psctl.errors import ProtocolError
from psctl.ps.messages import PART, PutRankState, RankStateAnswer, RankStateQuery
from psctl.ps.outputs import ToServer, ToWorker

LARGEST = 1 << 30
"""Limit of the bytes of one rank state; buffers are small, and sizes are checked before memory is allocated."""


class _IncomingState:
    def __init__(self, clock: int, size: int, rank: int = 0) -> None:
        self.clock, self.rank, self.filled, self.data = clock, rank, 0, bytearray(size)


class RankStates:
    """Rank states by rank and clock; a query for one that is missing waits for it.

    Args:
        kept: number of clocks kept of a rank.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._whole: dict[int, dict[int, memoryview]] = {}  # rank -> clock -> bytes
        self._coming: dict[str, _IncomingState] = {}  # by sender
        self._wishes: dict[int, RankStateQuery] = {}  # by the rank that sent the query

    def receive_buffer_for(self, sender: str, message: PutRankState, size: int) -> memoryview | None:
        """Return the buffer for a part; None when the state is here already.

        Raises:
            ProtocolError: it does not fit.
        """
        if sender.startswith("worker/") and sender != f"worker/{message.rank}":
            raise ProtocolError(f"{sender}: it left a state as worker/{message.rank}", where=sender)
        if message.clock in self._of(message.rank) or message.size > LARGEST:
            return None
        if message.offset == 0:
            self._coming[sender] = _IncomingState(message.clock, message.size, message.rank)
        coming = self._coming.get(sender)
        if coming is None or (coming.rank, coming.clock) != (message.rank, message.clock):
            return None
        if message.offset != coming.filled or message.offset + size > len(coming.data):
            raise ProtocolError(f"{sender}: bytes beside the gradients out of order", where=sender)
        return memoryview(coming.data)[message.offset : message.offset + size]

    def add_bytes(self, sender: str, message: PutRankState, size: int) -> bool:
        """Count a part's bytes; return whether the state became complete."""
        if size == 0 and message.size == 0:
            self.receive_buffer_for(sender, message, 0)
        coming, whole = self._coming.get(sender), self._of(message.rank)
        if coming is None or (coming.rank, coming.clock) != (message.rank, message.clock) or message.clock in whole:
            return False
        coming.filled += size
        if coming.filled < len(coming.data):
            return False
        del self._coming[sender]
        whole[coming.clock] = memoryview(coming.data)
        for old in sorted(whole)[: -self._kept]:
            del whole[old]
        return True

    def _of(self, rank: int) -> dict[int, memoryview]:
        return self._whole.setdefault(rank, {})

    def newest_clock(self, rank: int) -> int:
        """Return the newest clock of a rank's states here; -1: none."""
        return max(self._of(rank), default=-1)

    def on_query(self, rank: int, message: RankStateQuery) -> None:
        """Record a rank's query."""
        self._wishes[rank] = message

    def on_disconnected(self, rank: int) -> None:
        """Drop a rank's query and the state that it has sent in part."""
        self._wishes.pop(rank, None)
        self._coming.pop(f"worker/{rank}", None)

    def answers(self) -> list[ToWorker]:
        """Answer the queries whose state is here."""
        outputs: list[ToWorker] = []
        for rank, wish in sorted(self._wishes.items()):
            data = self._of(wish.rank).get(wish.clock)
            if data is not None:
                del self._wishes[rank]
                for offset in range(0, max(1, len(data)), PART):
                    part = data[offset : offset + PART]
                    outputs.append(ToWorker(rank, RankStateAnswer(wish.clock, len(data), offset), part or None))
        return outputs

    def copies(self, server: int, only: PutRankState | None = None) -> list[ToServer]:
        """Return the messages that send the state of `only` (None: all states) to another server."""
        outputs: list[ToServer] = []
        for rank, clock, data in [(rank, *one) for rank, some in self._whole.items() for one in sorted(some.items())]:
            if only is None or (rank, clock) == (only.rank, only.clock):
                for offset in range(0, max(1, len(data)), PART):
                    part = data[offset : offset + PART]
                    outputs.append(ToServer(server, PutRankState(clock, len(data), offset, rank), part or None))
        return outputs


class RankStateFetch:
    """The state that a worker requests, while it is received: from one server at a time, restarted by a first part."""

    def __init__(self) -> None:
        self.wanted: int | None = None  # clock that was requested and has not arrived
        self._server = -1
        self._coming: _IncomingState | None = None
        self._whole: tuple[int, memoryview] | None = None

    def of(self, clock: int) -> memoryview | None:
        """Return a clock's state, once it has arrived."""
        return self._whole[1] if self._whole is not None and self._whole[0] == clock else None

    def receive_buffer_for(self, server: int, message: RankStateAnswer, size: int) -> memoryview | None:
        """Return the buffer for a part; None when the part is not needed."""
        if message.clock != self.wanted or message.size > LARGEST:
            return None
        if message.offset == 0:
            self._server, self._coming = server, _IncomingState(message.clock, message.size)
        coming = self._coming
        if coming is None or self._server != server or message.offset != coming.filled:
            return None
        return memoryview(coming.data)[message.offset : message.offset + size]

    def add_bytes(self, server: int, message: RankStateAnswer, size: int) -> None:
        """Count a part's bytes."""
        if message.size == 0:
            self.receive_buffer_for(server, message, 0)
        coming = self._coming
        if coming is None or self._server != server or coming.clock != message.clock or message.offset != coming.filled:
            return
        coming.filled += size
        if coming.filled == len(coming.data):
            self._whole, self._coming = (coming.clock, memoryview(coming.data)), None
            self.wanted = None
