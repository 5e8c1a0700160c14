"""The receive buffer: room to receive into, bytes to read from, moved as little as can be."""

from __future__ import annotations

SMALL = 64 << 10


class ReceiveBuffer:
    """Bytes that have arrived and are not read yet; `size` bytes of room until a frame needs more."""

    def __init__(self, size: int = SMALL) -> None:
        self.store = memoryview(bytearray(size))
        """All of it; the unread bytes in it, from `start` to `end`, are valid until the next call of `room`."""
        self.start = 0
        self.end = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def data(self) -> memoryview:
        """The unread bytes."""
        return self.store[self.start : self.end]

    def room(self, needed: int) -> memoryview:
        """Return free space to receive into, so placed that `needed` unread bytes will lie in one piece."""
        unread = self.end - self.start
        assert unread < needed, "all that is needed is there"
        if needed > len(self.store):
            self._move_to(memoryview(bytearray(needed + SMALL)))
        elif unread == 0:
            self.start = self.end = 0
        elif needed > len(self.store) - self.start:
            self._move_to(self.store)
        return self.store[self.end :]

    def _move_to(self, store: memoryview) -> None:
        unread = self.end - self.start
        store[:unread] = self.store[self.start : self.end]
        self.store, self.start, self.end = store, 0, unread

    def wrote(self, count: int) -> None:
        """Note that `count` bytes were received into `room`."""
        self.end += count
        assert self.end <= len(self.store), "more was received than there was room for"

    def skip(self, count: int) -> None:
        """Note that the first `count` unread bytes are read."""
        self.start += count
        assert self.start <= self.end, "more was read than had arrived"
