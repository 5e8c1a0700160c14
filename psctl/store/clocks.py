"""Vector clocks by range: for each sender, up to which clock every key of a space is in; one entry a range, not a key.

Theory (Li and others, OSDI'14, 4.3 and algorithm 2). A vector clock vc[i](k) says which clock of sender i was last
taken in for key k; kept for n senders and m keys it costs n*m numbers. But senders push ranges, so vc[i] is constant on
ranges: it starts as one range at one clock, and to set [a, b) to t only cuts the (at most two) ranges that a and b lie
in. Neighbours of the same clock are one range again, so r distinct pushed ranges never make more than 2r + 1 entries,
and when every sender has pushed everything of a clock there is one entry a sender again: memory is bounded by how
far apart senders and ranges are, not by how many messages came.

What it is for: a push (i, [a, b), t) is new only where vc[i] < t. The rest is in already (a resend after a lost
acknowledgement, a duplicate, a straggler of the network) and is acknowledged and dropped. When a space is cut in two,
for a shard that moves, its clocks are cut with it; when two neighbours come together, theirs are joined.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping

import msgspec

from psctl.words import Range


class Held(msgspec.Struct, frozen=True):
    """A range of keys at one clock."""

    keys: Range
    clock: int


class RangeClock:
    """One sender's clock of every key in a space.

    Args:
        space: the keys, not empty.
        clock: of all of them.
    """

    def __init__(self, space: Range, clock: int) -> None:
        assert len(space) > 0, "a space has keys"
        self.space = space
        self._starts = [space.start]  # of the ranges, rising
        self._clocks = [clock]  # of neighbours never the same

    def __len__(self) -> int:
        """Number of ranges that are kept."""
        return len(self._starts)

    def __iter__(self) -> Iterator[Held]:
        stops = [*self._starts[1:], self.space.stop]
        for start, stop, clock in zip(self._starts, stops, self._clocks, strict=True):
            yield Held(Range(start, stop), clock)

    def at(self, key: int) -> int:
        """Return the clock of a key of the space."""
        assert self.space.start <= key < self.space.stop, "a key of the space"
        return self._clocks[bisect_right(self._starts, key) - 1]

    def within(self, keys: Range) -> Iterator[Held]:
        """Yield the ranges that meet `keys`, cut to them."""
        keys = keys.meet(self.space)
        for place in range(bisect_right(self._starts, keys.start) - 1, bisect_left(self._starts, keys.stop)):
            stop = self._starts[place + 1] if place + 1 < len(self._starts) else self.space.stop
            part = Range(self._starts[place], stop).meet(keys)
            if len(part):
                yield Held(part, self._clocks[place])

    def oldest(self, keys: Range) -> int:
        """Return the least clock in a range that holds keys of the space: all of it is in up to there."""
        return min(each.clock for each in self.within(keys))

    def set(self, keys: Range, clock: int) -> None:
        """Set the clock of a range (algorithm 2); what of it lies outside of the space is left out."""
        keys = keys.meet(self.space)
        if not len(keys):
            return
        first, last = self._cut(keys.start), self._cut(keys.stop)
        self._starts[first:last] = [keys.start]
        self._clocks[first:last] = [clock]
        for place in (first + 1, first):  # equal neighbours become one
            if 0 < place < len(self._starts) and self._clocks[place - 1] == self._clocks[place]:
                del self._starts[place], self._clocks[place]

    def take(self, keys: Range, clock: int) -> list[Range]:
        """Take in a push of `clock`: return the parts of `keys` where it is new, which are at `clock` from now on."""
        new = [each.keys for each in self.within(keys) if each.clock < clock]
        for part in new:
            self.set(part, clock)
        return _joined(new)

    def split(self, key: int) -> tuple[RangeClock, RangeClock]:
        """Return the clocks of the keys below `key` and of the others, as two."""
        assert self.space.start < key < self.space.stop, "both parts have keys"
        return self.of(Range(self.space.start, key)), self.of(Range(key, self.space.stop))

    def of(self, keys: Range) -> RangeClock:
        """Return the clock of a part of the space."""
        held = list(self.within(keys))
        part = RangeClock(Range(held[0].keys.start, held[-1].keys.stop), held[0].clock)
        part._starts, part._clocks = [each.keys.start for each in held], [each.clock for each in held]
        return part

    def joined(self, other: RangeClock) -> RangeClock:
        """Return the clock of this space and the one that follows it at once."""
        assert self.space.stop == other.space.start, "neighbours"
        whole = RangeClock(Range(self.space.start, other.space.stop), self._clocks[0])
        for each in (*self, *other):
            whole.set(each.keys, each.clock)
        return whole

    def _cut(self, key: int) -> int:
        """Let a range begin at `key`; return its place (the number of ranges where the space ends)."""
        if key == self.space.stop:
            return len(self._starts)
        place = bisect_left(self._starts, key)
        if place == len(self._starts) or self._starts[place] != key:
            self._starts.insert(place, key)
            self._clocks.insert(place, self._clocks[place - 1])
        return place


def _joined(parts: list[Range]) -> list[Range]:
    """Return ranges with those that touch as one."""
    found: list[Range] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            found[-1] = Range(found[-1].start, part.stop)
        else:
            found.append(part)
    return found


def oldest(clocks: Mapping[int, RangeClock], keys: Range) -> int:
    """Return the clock up to which all senders' pushes of a range are in: what bsp and ssp wait for."""
    return min(clock.oldest(keys) for clock in clocks.values())
