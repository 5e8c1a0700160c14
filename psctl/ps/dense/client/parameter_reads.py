"""A reader's read of shards that several servers hold, at one step; a state machine without I/O.

Theory. Training goes on while shards are read, so their newest versions differ. A read therefore names one version for
all shards, and a server answers when its shard has that version. A shard that is past it answers with its newest one;
then the versions differ, and the read is made again for a version a little later than the newest that was seen. The
margin is doubled after each such attempt: it exceeds, at last, the steps that are made while a request is on its way.
Where training stands still (it has ended, or a worker is awaited), all shards soon have one version, and version 0 is
asked for: the newest.

Answers bear the ticket of their attempt; those of an earlier one are dropped. A request is sent to the server that has
announced that it leads the shard (Leads), and again when another server announces it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psctl.errors import ProtocolError
from psctl.ps.messages import Leads, RankStateRead, ReadRankState, ReadShards, ShardRead
from psctl.ps.outputs import ToServer

WIDEST = 1024
"""Largest margin, in versions."""


class ParameterReads:
    """The reads of one reader; one at a time. Calls must not overlap.

    Args:
        sizes: the bytes of each shard.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._leaders: dict[int, int] = {}  # shard -> server
        self._ticket, self._version, self._margin = 0, 0, 1
        self._wanted: frozenset[int] = frozenset()
        self.versions: dict[int, int] = {}
        """By shard, the version that has arrived in this attempt."""
        self.clocks: dict[int, int] = {}
        """By shard, the number of all workers' clocks that are in it."""
        self.values: dict[int, bytearray] = {}
        """By shard, its bytes; complete for the shards in `versions`."""
        self._state_clock: int | None = None  # of rank 0's state that is asked for
        self.rank_state: tuple[int, bytes] | None = None
        """Rank 0's state that was asked for, and its clock, once it has arrived."""
        self._arriving: dict[int, bytearray] = {}  # rank 0's state, by server

    # ---- reads -------------------------------------------------------------------------------------------------------

    def begin(self, wanted: Collection[int], version: int) -> list[ToServer]:
        """Begin an attempt: read these shards at `version`, or newer where that is past."""
        self._ticket += 1
        self._wanted, self._version = frozenset(wanted), version
        self.versions, self.clocks, self.values = {}, {}, {}
        return self._requests(self._wanted)

    @property
    def is_complete(self) -> bool:
        """Whether all shards have arrived."""
        return len(self.versions) == len(self._wanted)

    def differ_by(self) -> int:
        """Return by how many versions the shards of a complete attempt differ."""
        return max(self.versions.values(), default=0) - min(self.versions.values(), default=0)

    def next_version(self) -> int:
        """Return the version for the next attempt, after one whose versions differ by too much."""
        version = max(self.versions.values()) + self._margin
        self._margin = min(2 * self._margin, WIDEST)
        return version

    def accept(self) -> None:
        """Note that an attempt has succeeded."""
        self._margin = max(1, self._margin // 2)

    def begin_state(self, clock: int) -> list[ToServer]:
        """Ask for rank 0's state at a clock."""
        self._ticket += 1
        self.rank_state, self._state_clock = None, clock
        return self._state_request()

    def _requests(self, shards: Collection[int]) -> list[ToServer]:
        by_server: dict[int, list[int]] = {}
        for shard in sorted(shards):
            if shard in self._leaders:
                by_server.setdefault(self._leaders[shard], []).append(shard)
        return [ToServer(server, ReadShards(self._ticket, found, self._version)) for server, found in by_server.items()]

    def _state_request(self) -> list[ToServer]:
        if self._state_clock is None or 0 not in self._leaders:
            return []
        return [ToServer(self._leaders[0], ReadRankState(self._ticket, self._state_clock))]

    # ---- servers -----------------------------------------------------------------------------------------------------

    def on_leads(self, server: int, message: Leads) -> list[ToServer]:
        """Send what is outstanding for the shards that a server leads now.

        Raises:
            ProtocolError: a shard does not exist; the server's fault.
        """
        for shard in message.shards:
            if not 0 <= shard < len(self._sizes):
                raise ProtocolError(f"server/{server}: it leads shard {shard}, of {len(self._sizes)}")
            self._leaders[shard] = server
        outstanding = (self._wanted - self.versions.keys()) & set(message.shards)
        return [*self._requests(outstanding), *(self._state_request() if 0 in message.shards else ())]

    def on_disconnected(self, server: int) -> None:
        """Forget the shards that a server led: it, or another one, announces them again."""
        self._leaders = {shard: one for shard, one in self._leaders.items() if one != server}
        self._arriving.pop(server, None)

    def receive_buffer_for(self, server: int, message: ShardRead | RankStateRead, size: int) -> memoryview | None:
        """Return the buffer for a payload; None when it is not needed.

        Raises:
            ProtocolError: the payload does not fit; the server's fault.
        """
        if message.ticket != self._ticket:
            return None
        if isinstance(message, RankStateRead):
            self._arriving[server] = bytearray(size)
            return memoryview(self._arriving[server])
        self._check(server, message)
        if size != self._sizes[message.shard]:
            what = f"shard {message.shard} with {size} bytes, not {self._sizes[message.shard]}"
            raise ProtocolError(f"server/{server}: {what}")
        self.values[message.shard] = bytearray(size)
        return memoryview(self.values[message.shard])

    def on_answer(self, server: int, message: ShardRead | RankStateRead, size: int) -> None:
        """Take an answer whose payload is in the buffer of `receive_buffer_for`.

        Raises:
            ProtocolError: it has no payload, or was not asked for; the server's fault.
        """
        if message.ticket != self._ticket:
            return
        if isinstance(message, RankStateRead):
            self.rank_state = message.clock, bytes(self._arriving.pop(server, b""))
            self._state_clock = None
            return
        self._check(server, message)
        if size != self._sizes[message.shard]:
            raise ProtocolError(f"server/{server}: shard {message.shard} without its bytes")
        if size == 0:
            self.values[message.shard] = bytearray()
        self.versions[message.shard], self.clocks[message.shard] = message.version, message.clocks

    def _check(self, server: int, message: ShardRead) -> None:
        if message.shard not in self._wanted or message.shard in self.versions:
            raise ProtocolError(f"server/{server}: shard {message.shard}, which was not asked for")
