"""What travels beside the gradients (rank 0's buffers and tracked state), kept for the last clocks, for who joins."""

from __future__ import annotations

from psctl.errors import ProtocolError
from psctl.store.messages import PART, Aside, AsideIs
from psctl.store.outputs import Send, ToServer

LARGEST = 1 << 30
"""Bytes of one clock's; buffers are small beside parameters, and sizes are checked before memory is taken."""


class _Coming:
    def __init__(self, message: Aside | AsideIs) -> None:
        self.clock, self.filled, self.data = message.clock, 0, bytearray(message.size)


class Asides:
    """By clock; who asks for one that is not here waits for it.

    Args:
        kept: how many clocks.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._whole: dict[int, memoryview] = {}
        self._coming: dict[str, _Coming] = {}  # by sender
        self._wishes: dict[int, int] = {}  # rank -> clock

    def place(self, sender: str, message: Aside, size: int) -> memoryview | None:
        """Return where a part goes; None when it is here already.

        Raises:
            ProtocolError: it does not fit.
        """
        if message.clock in self._whole or message.size > LARGEST:
            return None
        if message.offset == 0:
            self._coming[sender] = _Coming(message)
        coming = self._coming.get(sender)
        if coming is None or coming.clock != message.clock:
            return None
        if message.offset != coming.filled or message.offset + size > len(coming.data):
            raise ProtocolError(f"{sender}: bytes beside the gradients out of order", where=sender)
        return memoryview(coming.data)[message.offset : message.offset + size]

    def filled(self, sender: str, message: Aside, size: int) -> bool:
        """Count a part in; tell whether it became whole."""
        if size == 0 and message.size == 0:
            self.place(sender, message, 0)
        coming = self._coming.get(sender)
        if coming is None or coming.clock != message.clock or message.clock in self._whole:
            return False
        coming.filled += size
        if coming.filled < len(coming.data):
            return False
        del self._coming[sender]
        self._whole[coming.clock] = memoryview(coming.data)
        for old in sorted(self._whole)[: -self._kept]:
            del self._whole[old]
        return True

    @property
    def newest(self) -> int:
        """The newest clock that is here; -1: none."""
        return max(self._whole, default=-1)

    def wish(self, rank: int, clock: int) -> None:
        """Remember that a rank asks for a clock's."""
        self._wishes[rank] = clock

    def lost(self, rank: int) -> None:
        """Forget what a rank asked for and what it had sent in part."""
        self._wishes.pop(rank, None)
        self._coming.pop(f"worker/{rank}", None)

    def answers(self) -> list[Send]:
        """Answer what can be answered."""
        outputs: list[Send] = []
        for rank, clock in sorted(self._wishes.items()):
            data = self._whole.get(clock)
            if data is not None:
                del self._wishes[rank]
                for offset in range(0, max(1, len(data)), PART):
                    part = data[offset : offset + PART]
                    outputs.append(Send(rank, AsideIs(clock, len(data), offset), part or None))
        return outputs

    def copies(self, server: int, clock: int | None = None) -> list[ToServer]:
        """Pass one clock's (None: all) on to another server."""
        outputs: list[ToServer] = []
        for known, data in sorted(self._whole.items()):
            if clock is None or clock == known:
                for offset in range(0, max(1, len(data)), PART):
                    part = data[offset : offset + PART]
                    outputs.append(ToServer(server, Aside(known, len(data), offset), part or None))
        return outputs


class Fetching:
    """What a worker asked for, as it comes in: from one server at a time, begun anew by the first part."""

    def __init__(self) -> None:
        self.wanted: int | None = None  # clock that was asked for and is not here
        self._server = -1
        self._coming: _Coming | None = None
        self._whole: tuple[int, memoryview] | None = None

    def of(self, clock: int) -> memoryview | None:
        """Return a clock's, once it is here."""
        return self._whole[1] if self._whole is not None and self._whole[0] == clock else None

    def place(self, server: int, message: AsideIs, size: int) -> memoryview | None:
        """Return where a part goes; None when it is not wanted (any more)."""
        if message.clock != self.wanted or message.size > LARGEST:
            return None
        if message.offset == 0:
            self._server, self._coming = server, _Coming(message)
        coming = self._coming
        if coming is None or self._server != server or message.offset != coming.filled:
            return None
        return memoryview(coming.data)[message.offset : message.offset + size]

    def filled(self, server: int, message: AsideIs, size: int) -> None:
        """Count a part in."""
        if message.size == 0:
            self.place(server, message, 0)
        coming = self._coming
        if coming is None or self._server != server or coming.clock != message.clock or message.offset != coming.filled:
            return
        coming.filled += size
        if coming.filled == len(coming.data):
            self._whole, self._coming = (coming.clock, memoryview(coming.data)), None
            self.wanted = None
