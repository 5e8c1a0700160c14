"""A minimal state machine for a chain: a list of (client, number), and the entries not applied yet."""

from __future__ import annotations

import msgspec

_entry = msgspec.msgpack.Decoder(tuple[int, int]).decode
_entries = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
_pending = msgspec.msgpack.Decoder(dict[int, int]).decode


class Log:
    """See the module's docstring; `rooms` counts the payloads that are not released."""

    copy_limit = entry_limit = staged_limit = 1 << 20

    def __init__(self) -> None:
        self.version: int | None = None
        self.entries: list[tuple[int, int]] = []
        self.pending: dict[int, int] = {}  # client -> number
        self.rooms = 0

    def last(self, client: int) -> int:
        return max((number for sender, number in self.entries if sender == client), default=-1)

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        self.rooms += 1
        return memoryview(bytearray(size))

    def release(self, payload: memoryview) -> None:
        self.rooms -= 1

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> None:
        assert self.version is not None
        self.entries.append(_entry(payload))
        self.version += 1

    def snapshot(self) -> tuple[bytes, memoryview]:
        return b"", memoryview(msgspec.msgpack.encode(self.entries))

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        self.version, self.entries = version, _entries(data)

    def staged_state(self) -> tuple[bytes, memoryview]:
        return b"", memoryview(msgspec.msgpack.encode(self.pending))

    def restore_staged(self, head: bytes, data: memoryview) -> None:
        self.pending = _pending(data)
