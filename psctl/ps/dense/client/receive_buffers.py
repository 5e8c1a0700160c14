"""Buffers for the values that a worker pulls, and the norms of the mean gradient.

back             values are received here while the user may still read the front.
shared           values in a server's shared memory: they are read there, instead of from the back.
front            the values that the user reads. It changes only while the user waits for the shard: either the bytes
                 are in the back, and `copy_to_front` copies them (one copy), or the wait began before the first byte,
                 and they are received in the front itself (no copy). An unfinished wait leaves its shards undefined.
                 Values that were never waited for are copied to the front before the next pull, which needs the back.
sink             a caller that keeps values elsewhere (a model's parameters) copies them from the back, or from the
                 server's memory, instead of from the front: one copy. A shard may be copied piece by piece.

The bytes of a shard that a former owner still sends are received in the same buffer as those of the new owner would be.
Until they have ended, or the connection has, the new owner's values are not received; then the shard is pulled again.

Sums of gradients may be sent in half as many bits (error_feedback.py): those are always received in the back.

JointNorms collects the squared norms of each shard's pieces, by clock and by parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from psctl.errors import ProtocolError
from psctl.ps.compression.error_feedback import narrow
from psctl.ps.dense.buffer_allocator import BufferAllocator, SharedBytes
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import NormsAnswer, Values
from psctl.ps.pieces import Piece, Stretch, stretch, torch_dtype
from psctl.ps.shards import spaces
from psctl.types import Shard


class ValueSink(Protocol):
    """Copies values to their destination."""

    def __call__(self, shard: int, values: torch.Tensor, present: bytes, clocks: int) -> bool:
        """Copy those of a shard's values that are wanted now; return whether this version is copied completely.

        Args:
            shard: its index.
            values: of the shard, in the dtype in which they were sent; must not be written or kept.
            present: for each of its pieces whether any worker had a gradient.
            clocks: all workers' clocks before this one are in the values.
        """


def flat_buffers(
    terms: Terms, allocator: BufferAllocator | None = None, only: Sequence[str] | None = None
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return a buffer for each dtype's flat space (`only`: for these dtypes)."""
    new = (allocator or BufferAllocator()).zeros
    wanted = spaces(terms.layout).items()
    return {dtype: new(size, torch_dtype(dtype)) for dtype, size in wanted if only is None or dtype in only}


class ShardValues:
    """The state of one shard's values."""

    def __init__(self, base: int) -> None:
        self.asked = base - 1  # clock of the newest pull
        self.pending = False  # that pull is unanswered
        self.answered = base - 1  # clock of the newest pull that was answered
        self.wanted = base - 1  # `clocks` wanted at least
        self.version = base - 1  # newest version that is complete here
        self.clocks = base - 1  # all workers' clocks before it are in it; the version itself, except under asp
        self.front_version = base - 1  # version in the front
        self.front_clocks = base - 1
        self.incoming: int | None = None  # version that is being received
        self.sender: int | None = None  # server whose bytes are being written into a buffer of this shard
        self.repeat = False  # values were not received, as another server's bytes were still arriving
        self.incoming_clocks = base - 1
        self.direct = False  # the incoming bytes are received in the front
        self.waiting = False  # the user waits: the front may be written
        self.shared: tuple[int, torch.Tensor] | None = None  # the newest version, in its server's memory
        self.present: dict[int, bytes] = {}  # by version, the last two

    @property
    def whole_version(self) -> int:
        """The newest version that is complete in this worker's own memory."""
        return self.version if self.shared is None else self.front_version


class ReceiveBuffers:
    """The values of all shards. Calls must not overlap, except `copy_to_front`."""

    def __init__(self, terms: Terms, shards: Sequence[Shard], held: Sequence[Sequence[Piece]]) -> None:
        self.front = flat_buffers(terms)
        self._fronts = [
            stretch(self.front[one.dtype].narrow(0, one.range.start, len(one.range))) for one in shards
        ]  # the part of each shard
        self.each = [ShardValues(terms.base) for _ in shards]
        self._back = flat_buffers(terms)
        self._backs: dict[tuple[int, bool], Stretch] = {}
        self._terms, self._shards, self._held = terms, shards, held
        self.unanswered = 0
        """Shards with an unanswered pull."""
        self.sink: ValueSink | None = None
        """Receives arrived values instead of the front; set only when nothing is being copied to the front."""

    def oldest_version(self, clock: int, exact: bool) -> int:
        """Return how many of all workers' clocks the values for clock `clock` must hold at least; never less than the
        start values hold."""
        base, staleness = self._terms.base, 0 if exact else self._terms.staleness
        return max(base, clock - staleness if staleness is not None else base) if clock >= base else clock

    def note_pull(self, shard: int, clock: int, *, exact: bool) -> bool:
        """Record that clock `clock` will read the shard; return whether it must be pulled."""
        landing, asp = self.each[shard], self._terms.staleness is None
        assert landing.front_version == landing.version, "show before pull"
        assert not landing.pending or self._terms.staleness != 0, f"shard {shard}: the last pull is unanswered"
        assert clock >= landing.asked + (0 if exact and self._terms.staleness != 0 else 1), (
            f"clock {clock} was pulled already; values of clock c come with pull(c + 1)"
        )
        landing.wanted = max(landing.wanted, self.oldest_version(clock, exact))
        if landing.pending or (asp and exact and landing.clocks >= landing.wanted):
            return False
        landing.asked, landing.pending = clock, True
        self.unanswered += 1
        return True

    def restart(self, shard: int) -> bool:
        """Return whether a pull of the shard is unanswered; a partly received answer is dropped."""
        landing = self.each[shard]
        landing.incoming = None
        return landing.pending

    def on_owner_lost(self, shard: int) -> None:
        """Drop a partly received answer, which the lost owner cannot continue."""
        self.each[shard].incoming = None

    def on_payload_end(self, server: int, shard: int) -> bool:
        """Record that the bytes of a server's values have ended; return whether the shard must be pulled again."""
        landing = self.each[shard]
        if landing.sender != server:
            return False
        landing.sender = None
        again, landing.repeat = landing.repeat and landing.pending, False
        return again

    def on_server_disconnected(self, server: int) -> list[int]:
        """Record that no more bytes come from a server; return the shards that must be pulled again."""
        return [shard for shard in range(len(self.each)) if self.on_payload_end(server, shard)]

    def receive_buffer_for(self, server: int, message: Values, size: int) -> memoryview | None:
        """Return the buffer for a payload; None when the payload is not needed.

        Raises:
            ProtocolError: the server broke the protocol; nothing was changed.
        """
        landing, belong = self.each[message.shard], len(self._back_of(message.shard, message.version).bytes)
        if message.at is not None:
            raise wrong(server, message.shard, "values with a payload and a place in shared memory")
        if size != belong:
            raise wrong(server, message.shard, f"{size} bytes where {belong} belong")
        if not self._begin(server, landing, message):
            return None
        if landing.sender not in (None, server):
            landing.incoming, landing.repeat = None, True
            return None
        landing.sender = server
        return self._target(landing, message.shard, message.version).bytes

    def _begin(self, server: int, landing: ShardValues, message: Values) -> bool:
        asp = self._terms.staleness is None
        if message.clock > landing.asked or (not asp and message.version < self.oldest_version(message.clock, False)):
            raise wrong(server, message.shard, f"version {message.version}, which was not requested")
        if len(message.present) != len(self._held[message.shard]):
            raise wrong(server, message.shard, f"values of {len(message.present)} pieces")
        landing.incoming = None
        if not landing.pending or (message.clock != landing.asked if asp else message.version <= landing.version):
            return False  # the pull was repeated after a broken connection, and answered twice
        landing.incoming, landing.incoming_clocks = message.version, message.clocks
        landing.direct = False
        if landing.waiting and self.sink is None:
            landing.direct = self._narrow(self._shards[message.shard], message.version) is None
        return True

    def on_values(self, server: int, message: Values, size: int, shared: SharedBytes = None) -> bool:
        """Use values that have arrived, or are in shared memory; return whether they are the shard's newest.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        if shared is not None:
            return self._use_shared(server, message, shared)
        if not size:
            raise wrong(server, message.shard, "values without bytes")
        landing = self.each[message.shard]
        if landing.incoming != message.version:
            return False
        self._note_presence(landing, message)
        landing.shared = None
        self._on_whole(landing, message.version)
        if landing.direct:
            landing.front_version, landing.front_clocks = landing.version, landing.clocks
        return True

    def _use_shared(self, server: int, message: Values, shared: memoryview) -> bool:
        landing = self.each[message.shard]
        if not self._begin(server, landing, message):
            return False
        assert message.at is not None, "the caller has found their bytes"
        front = self._fronts[message.shard]
        dtype, belong = front.tensor.dtype, len(front.bytes)
        if len(shared) != belong or not belong or message.at.offset % dtype.itemsize:
            raise wrong(server, message.shard, f"{len(shared)} bytes at {message.at} where {belong} belong")
        self._note_presence(landing, message)
        landing.shared = message.version, torch.frombuffer(shared, dtype=dtype)
        self._on_whole(landing, message.version)
        return True

    def newest(self, shard: int) -> torch.Tensor:
        """Return the bytes of a shard's newest version, before the user may change them: right after `on_values`."""
        landing = self.each[shard]
        return landing.shared[1] if landing.shared is not None else self._target(landing, shard, landing.version).tensor

    def _note_presence(self, landing: ShardValues, message: Values) -> None:
        landing.present[message.version] = message.present
        for old in [version for version in landing.present if version < message.version - 1]:
            del landing.present[old]

    def _on_whole(self, landing: ShardValues, version: int) -> None:
        landing.version, landing.clocks, landing.incoming = version, landing.incoming_clocks, None
        landing.answered = landing.asked
        before, landing.pending = landing.pending, landing.clocks < landing.wanted  # newer clocks were pulled meanwhile
        self.unanswered += landing.pending - before

    def missing_shards(self, clock: int, shards: Sequence[int] | None, exact: bool) -> list[int]:
        """Return those of the shards (None: of all) whose values for `clock` have not arrived."""
        staleness, missing = self._terms.staleness, []
        asp, oldest = staleness is None, clock if staleness == 0 else self.oldest_version(clock, exact)
        for shard in range(len(self.each)) if shards is None else shards:
            one = self.each[shard]
            if (one.answered < clock or one.clocks < oldest) if asp else one.version < oldest:
                never = one.asked < clock if asp else one.wanted < oldest
                assert not never, f"shard {shard}: clock {clock} was never pulled"
                missing.append(shard)
        return missing

    def copy_to_front(self, shards: Sequence[int] | None = None) -> None:
        """Copy arrived values to the front, or pass them to the sink.

        May overlap with other calls: the back of an arrived shard is not written before the next pull, and only the
        user's own thread pulls and copies. It must be called for all shards before `note_pull`.
        """
        for shard in range(len(self.each)) if shards is None else shards:
            landing = self.each[shard]
            if landing.front_version < landing.version:
                version, source = landing.shared or (landing.version, self._back_of(shard, landing.version).tensor)
                if self.sink is None:
                    self._fronts[shard].tensor.copy_(source)
                elif not self.sink(shard, source, landing.present[version], landing.clocks):
                    continue
                landing.front_version, landing.front_clocks = version, landing.clocks

    def presence(self, clock: int) -> list[bool]:
        """Return, for each trainable parameter, whether any worker had a gradient at `clock`."""
        seen: dict[int, bool] = {}
        for landing, held in zip(self.each, self._held, strict=True):
            present = landing.present.get(clock + 1)
            assert present is not None, f"presence of clock {clock} is known after wait({clock + 1})"
            for piece, there in zip(held, present, strict=True):
                seen[piece.parameter] = seen.get(piece.parameter, False) or bool(there)
        return [seen[index] for index in sorted(seen)]

    def _narrow(self, shard: Shard, version: int) -> torch.dtype | None:
        """Return the dtype in which a version is sent, if it is not the shard's own; start values keep theirs."""
        terms = self._terms
        return narrow(terms.compression, terms.update, torch_dtype(shard.dtype)) if version > terms.base else None

    def _target(self, landing: ShardValues, shard: int, version: int) -> Stretch:
        """Return the buffer in which a version is received."""
        return self._fronts[shard] if landing.direct else self._back_of(shard, version)

    def _back_of(self, shard: int, version: int) -> Stretch:
        first = version <= self._terms.base  # start values are sent in the shard's own dtype
        found = self._backs.get((shard, first))
        if found is None:
            where = self._shards[shard]
            whole = self._back[where.dtype].narrow(0, where.range.start, len(where.range))
            dtype = self._narrow(where, version)
            found = stretch(whole if dtype is None else whole.view(dtype)[: len(where.range)])
            self._backs[shard, first] = found
        return found


def wrong(server: int, shard: int, what: str) -> ProtocolError:
    """Return the error for a server's violation of the protocol."""
    return ProtocolError(f"server/{server}, shard {shard}: {what}", where=f"server/{server}")


class JointNorms:
    """Squared 2-norms of the mean gradient's pieces, as they arrive. Calls must not overlap.

    Args:
        held: the pieces of each shard.
    """

    def __init__(self, held: Sequence[Sequence[Piece]]) -> None:
        self.wanted: int | None = None
        """The clock of the last request for norms."""
        self._held = held
        self._squares: dict[int, dict[int, list[float | None]]] = {}  # clock -> shard -> of each piece

    def on_answer(self, server: int, message: NormsAnswer) -> None:
        """Record a shard's norms.

        Raises:
            ProtocolError: the shard has other pieces; the server's fault.
        """
        if len(message.squares) != len(self._held[message.shard]):
            raise wrong(server, message.shard, f"norms of {len(message.squares)} pieces")
        self._squares.setdefault(message.clock, {})[message.shard] = message.squares

    def missing_shards(self, clock: int) -> list[int]:
        """Return the shards without norms of `clock`."""
        found = self._squares.get(clock, {})
        return [shard for shard in range(len(self._held)) if shard not in found]

    def by_parameter(self, clock: int) -> dict[int, float] | None:
        """Return the squares of `clock` by parameter, summed in piece order; None when some shard's are missing."""
        if self.missing_shards(clock):
            return None
        each = [
            one
            for shard, squares in self._squares[clock].items()
            for one in zip(self._held[shard], squares, strict=True)
        ]
        parts = [(piece.parameter, piece.within, square) for piece, square in each if square is not None]
        sums: dict[int, float] = {}
        for parameter, _, square in sorted(parts):
            sums[parameter] = sums.get(parameter, 0.0) + square
        for old in [known for known in self._squares if known < clock]:
            del self._squares[old]
        return sums
