"""The mind of a worker's end: pushes until acknowledged, pulls until landed; calls and messages in, messages out.

Theory. Buffers, all flat, one a dtype:

    send x 2     gradients of even and odd clocks by turns. A push leaves straight out of its buffer, so a buffer is
                 given out for clock c only when every push of clock c-2 is acknowledged.
    back         where values land while the user may still read the front.
    front        `landing`: what the user reads. It changes only while the user waits for the shard: either the bytes
                 landed in the back, and `show` copies them (one copy), or the wait came before the first byte, and they
                 land in the front itself (no copy). An unfinished wait leaves its shards undefined. What landed and was
                 never waited for comes to the front before the next pull, which needs its place in the back.

A shard's values have a version (messages.py). A push of clock c says "I computed this from version c-s or newer", so
it may leave only when that version has landed: this is what keeps the fastest within s clocks of the slowest.
Under `update: worker` the same path brings the joint mean gradient instead of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.store.messages import (
    PART,
    Because,
    Begin,
    FromServer,
    FromWorker,
    NormsOf,
    Pull,
    Push,
    Pushed,
    PushPart,
    Refused,
    Values,
    ValuesPart,
)
from psctl.store.pieces import bytes_view, pieces, torch_dtype
from psctl.store.shard import Terms
from psctl.store.shards import spaces
from psctl.words import Shard


class Out(msgspec.Struct, frozen=True):
    """An instruction: send this to server `server`; the payload must not be copied before it is sent."""

    server: int
    message: FromWorker
    payload: memoryview | None = None


class Landing:
    """What one shard's values are at."""

    def __init__(self, base: int) -> None:
        self.asked = base - 1  # clock of the newest pull
        self.version = base - 1  # newest version that is whole here
        self.shown = base - 1  # version in the front
        self.incoming: int | None = None  # version whose bytes are coming in
        self.filled = 0
        self.direct = False  # the incoming bytes go to the front
        self.open = False  # the user waits: the front may be written
        self.present: dict[int, bytes] = {}  # by version, the last two


class ClientMind:
    """Everything that one worker knows of its servers. Calls must not overlap, except `show` (see there).

    Args:
        terms: what the job agreed on.
        shards: all shards, by index.
        owners: for each the rank of the server that holds it.
        rank: this worker's.
    """

    def __init__(self, terms: Terms, shards: Sequence[Shard], owners: Sequence[int], rank: int) -> None:
        self.terms, self.shards, self.owners, self.rank = terms, shards, owners, rank
        self.held = pieces(terms.layout, shards)
        self.landing = self._flat()
        self.refused: Refused | None = None
        self.because: dict[int, list[int]] = {}  # server -> workers that it waits for, as it last said
        self._back = self._flat()
        self._send = (self._flat(), self._flat())
        self._landings = [Landing(terms.base) for _ in shards]
        self._outstanding: set[tuple[int, int]] = set()  # (clock, shard), not acknowledged
        self._pushed = [terms.base - 1] * len(shards)
        self._norms: dict[int, dict[int, list[float | None]]] = {}  # clock -> shard -> squares

    def _flat(self) -> dict[str, torch.Tensor]:
        sizes = spaces(self.terms.layout)
        return {dtype: torch.zeros(size, dtype=torch_dtype(dtype)) for dtype, size in sizes.items()}

    # ---- out ---------------------------------------------------------------------------------------------------

    def begin(self, values: Mapping[str, torch.Tensor]) -> list[Out]:
        """Send start values, straight out of `values`; they must stay untouched until version `base` has landed."""
        outs: list[Out] = []
        for shard, owner in zip(self.shards, self.owners, strict=True):
            view = self._bytes(values, shard)
            for offset in range(0, max(1, len(view)), PART):
                payload = view[offset : offset + PART] or None
                outs.append(Out(owner, Begin(shard.index, offset), payload))
        return outs

    def sending(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the send buffer of `clock`, once `unacknowledged(clock - 2)` is empty."""
        return self._send[clock % 2]

    def unacknowledged(self, clock: int) -> set[int]:
        """Return the servers that have not acknowledged all pushes up to `clock`."""
        return {self.owners[shard] for pushed, shard in self._outstanding if pushed <= clock}

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float) -> list[Out]:
        """Push a shard's gradients; they stand in `sending(clock)`. `missing(clock, [shard])` must be empty."""
        landing, owner = self._landings[shard], self.owners[shard]
        assert len(present) == len(self.held[shard]), f"shard {shard} has {len(self.held[shard])} pieces"
        assert clock == self._pushed[shard] + 1, f"shard {shard}: push of clock {clock} after {self._pushed[shard]}"
        assert landing.version >= self._oldest(clock), f"shard {shard}: push before its values have landed"
        self._pushed[shard] = clock
        self._outstanding.add((clock, shard))
        head = Push(shard, clock, float(weight), bytes(bool(one) for one in present), landing.version)
        view = self._bytes(self._send[clock % 2], self.shards[shard]) if any(present) else memoryview(b"")
        outs = [Out(owner, head, view[:PART] or None)]
        for offset in range(PART, len(view), PART):
            outs.append(Out(owner, PushPart(shard, clock, offset), view[offset : offset + PART]))
        return outs

    def pull(self, clock: int) -> list[Out]:
        """Ask for all shards at `clock`, first layers first."""
        wished: dict[int, list[int]] = {}
        for shard, (landing, owner) in enumerate(zip(self._landings, self.owners, strict=True)):
            assert landing.shown == landing.version, "show before pull"
            assert landing.version >= self._oldest(landing.asked), f"shard {shard}: the last pull is unanswered"
            assert clock > landing.asked, f"clock {clock} was pulled already; values of clock c come with pull(c + 1)"
            landing.asked = clock
            if landing.version < self._oldest(clock):
                wished.setdefault(owner, []).append(shard)
        return [Out(server, Pull(clock, shards)) for server, shards in wished.items()]

    # ---- in ----------------------------------------------------------------------------------------------------

    def place(self, server: int, message: FromServer, size: int) -> memoryview | None:
        """Return where a payload of `size` bytes lands.

        Raises:
            ProtocolError: the server broke the protocol; nothing was changed.
        """
        if not isinstance(message, Values | ValuesPart):
            raise ProtocolError(f"server/{server}: {type(message).__name__} with a payload", where=f"server/{server}")
        landing, offset = self._expected(server, message)
        shard = self.shards[message.shard]
        whole = self._bytes(self.landing if landing.direct else self._back, shard)
        if offset + size > len(whole):
            raise self._wrong(server, message.shard, f"{offset + size} bytes where {len(whole)} belong")
        return whole[offset : offset + size]

    def received(self, server: int, message: FromServer, size: int = 0) -> bool:
        """Take in a message whose payload, if any, stands where `place` said; return whether a wait may be over.

        Raises:
            ProtocolError: as `place`.
        """
        match message:
            case Values() | ValuesPart():
                return self._fill(server, message, size)
            case Pushed():
                self._outstanding.discard((message.clock, message.shard))
                return True
            case NormsOf():
                self._owned(server, message.shard)
                if len(message.squares) != len(self.held[message.shard]):
                    raise self._wrong(server, message.shard, f"norms of {len(message.squares)} pieces")
                self._norms.setdefault(message.clock, {})[message.shard] = message.squares
                return True
            case Because():
                self.because[server] = message.workers
                return False
            case Refused():
                self.refused = message
                return True

    def _expected(self, server: int, message: Values | ValuesPart) -> tuple[Landing, int]:
        """Return the landing that a message belongs to and its offset; a Values begins a landing."""
        self._owned(server, message.shard)
        landing = self._landings[message.shard]
        if isinstance(message, ValuesPart):
            if message.version != landing.incoming or message.offset != landing.filled:
                raise self._wrong(server, message.shard, f"part of version {message.version}, out of order")
            return landing, message.offset
        if message.version <= landing.version or message.version < self._oldest(landing.asked):
            raise self._wrong(server, message.shard, f"version {message.version}, which was not asked for")
        if len(message.present) != len(self.held[message.shard]):
            raise self._wrong(server, message.shard, f"values of {len(message.present)} pieces")
        landing.incoming, landing.filled, landing.direct = message.version, 0, landing.open
        return landing, 0

    def _fill(self, server: int, message: Values | ValuesPart, size: int) -> bool:
        landing = self._landings[message.shard]
        if size == 0:
            self._expected(server, message)
        if isinstance(message, Values):
            landing.present[message.version] = message.present
            for old in [version for version in landing.present if version < message.version - 1]:
                del landing.present[old]
        landing.filled += size
        shard = self.shards[message.shard]
        if landing.filled < len(shard.range) * self.landing[shard.dtype].element_size():
            return False
        landing.version, landing.incoming = message.version, None
        if landing.direct:
            landing.shown = landing.version
        return True

    # ---- what a wait is for ------------------------------------------------------------------------------------

    def missing(self, clock: int, shards: Sequence[int] | None = None) -> list[int]:
        """Return those of the shards (None: of all) whose values for `clock` have not landed."""
        oldest = self._oldest(clock)
        wanted = range(len(self.shards)) if shards is None else shards
        missing = [shard for shard in wanted if self._landings[shard].version < oldest]
        for shard in missing:
            assert self._landings[shard].asked >= oldest, f"shard {shard}: clock {clock} was never pulled"
        return missing

    def opened(self, shards: Sequence[int], is_open: bool) -> None:
        """Tell that the user waits for these shards, so that values may land in the front; or no longer does."""
        for shard in shards:
            self._landings[shard].open = is_open

    def show(self, shards: Sequence[int] | None = None) -> None:
        """Bring landed values to the front.

        May overlap with other calls: the back of a landed shard is not written before the next pull, and only the
        user's own thread pulls and shows. It must be called for all shards before `pull`.
        """
        for shard in range(len(self.shards)) if shards is None else shards:
            landing, where = self._landings[shard], self.shards[shard]
            if landing.shown < landing.version:
                part = (0, where.range.start, len(where.range))
                self.landing[where.dtype].narrow(*part).copy_(self._back[where.dtype].narrow(*part))
                landing.shown = landing.version

    def shown(self, shards: Sequence[int]) -> int:
        """Return the oldest version in the front among these shards; as `show`, it may overlap with other calls."""
        return min((self._landings[shard].shown for shard in shards), default=self.terms.base)

    def presence(self, clock: int) -> list[bool]:
        """Return, for each trainable parameter, whether any worker had a gradient at `clock`."""
        seen: dict[int, bool] = {}
        for landing, held in zip(self._landings, self.held, strict=True):
            present = landing.present.get(clock + 1)
            assert present is not None, f"presence of clock {clock} is known after wait({clock + 1})"
            for piece, there in zip(held, present, strict=True):
                seen[piece.parameter] = seen.get(piece.parameter, False) or bool(there)
        return [seen[index] for index in sorted(seen)]

    def norms(self, clock: int) -> dict[int, float] | None:
        """Return the squares of `clock` by parameter, summed in piece order; None when some shard's are missing."""
        found = self._norms.get(clock, {})
        if len(found) < len(self.shards):
            return None
        parts: list[tuple[int, int, float]] = []
        for shard, squares in found.items():
            for piece, square in zip(self.held[shard], squares, strict=True):
                if square is not None:
                    parts.append((piece.parameter, piece.within.start, square))
        sums: dict[int, float] = {}
        for parameter, _, square in sorted(parts):
            sums[parameter] = sums.get(parameter, 0.0) + square
        for old in [known for known in self._norms if known < clock]:
            del self._norms[old]
        return sums

    def without_norms(self, clock: int) -> set[int]:
        """Return the servers whose norms of `clock` are missing."""
        found = self._norms.get(clock, {})
        return {owner for shard, owner in enumerate(self.owners) if shard not in found}

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _oldest(self, clock: int) -> int:
        """Return the oldest version that `clock` may read; there is none before the start values."""
        return max(self.terms.base, clock - self.terms.staleness) if clock >= self.terms.base else clock

    def _bytes(self, flat: Mapping[str, torch.Tensor], shard: Shard) -> memoryview:
        return bytes_view(flat[shard.dtype].narrow(0, shard.range.start, len(shard.range)))

    def _owned(self, server: int, shard: int) -> None:
        if not 0 <= shard < len(self.shards) or self.owners[shard] != server:
            raise self._wrong(server, shard, "it does not hold that shard")

    def _wrong(self, server: int, shard: int, what: str) -> ProtocolError:
        return ProtocolError(f"server/{server}, shard {shard}: {what}", where=f"server/{server}")
