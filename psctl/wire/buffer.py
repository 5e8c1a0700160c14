"""The receive buffer: room to receive into, bytes to read from, moved as little as can be."""

from __future__ import annotations

SMALL = 64 << 10


class ReceiveBuffer:
    """Bytes that have arrived and are not read yet; `size` bytes of room until a frame needs more."""

    def __init__(self, size: int = SMALL) -> None:
        self._store = memoryview(bytearray(size))
        self._start = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def data(self) -> memoryview:
        """The unread bytes; valid until the next call of `room`."""
        return self._store[self._start : self._end]

    def first(self, count: int) -> memoryview:
        """Return the first unread bytes; valid as `data` is."""
        return self._store[self._start : self._start + count]

    def room(self, needed: int) -> memoryview:
        """Return free space to receive into, so placed that `needed` unread bytes will lie in one piece."""
        unread = self._end - self._start
        assert unread < needed, "all that is needed is there"
        if needed > len(self._store):
            self._move_to(memoryview(bytearray(needed + SMALL)))
        elif unread == 0:
            self._start = self._end = 0
        elif needed > len(self._store) - self._start:
            self._move_to(self._store)
        return self._store[self._end :]

    def _move_to(self, store: memoryview) -> None:
        unread = self._end - self._start
        store[:unread] = self._store[self._start : self._end]
        self._store, self._start, self._end = store, 0, unread

    def wrote(self, count: int) -> None:
        """Note that `count` bytes were received into `room`."""
        self._end += count
        assert self._end <= len(self._store), "more was received than there was room for"

    def skip(self, count: int) -> None:
        """Note that the first `count` unread bytes are read."""
        self._start += count
        assert self._start <= self._end, "more was read than had arrived"
