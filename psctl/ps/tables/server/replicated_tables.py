"""What the chain of one shard replicates of tables: that shard of every store, changed by entries alone (machine.py).

An entry's head says which store it is about, and what that is when somebody opens it. What was taken in and waits its
turn is no part of it: whoever pushed it has no word that it is done, and says it again to who leads next.
"""

from __future__ import annotations

import msgspec

from psctl.ps.table_messages import StoreSpec
from psctl.ps.tables.table_bytes import decode_entry, decode_shards, encode_entry, encode_shards
from psctl.ps.tables.table_kinds import Functions
from psctl.ps.tables.table_state import TableEntry, TableShard

LARGEST = 1 << 36
"""Bytes of one shard of all stores that are copied at most."""


class EntryHead(msgspec.Struct, frozen=True):
    """Which store an entry is about; `spec`: what it is, of an entry that opens it."""

    store: str
    spec: StoreSpec | None = None


_ENCODER = msgspec.msgpack.Encoder()
_HEAD = msgspec.msgpack.Decoder(EntryHead)


class ReplicatedTables:
    """One shard of all stores.

    Args:
        functions: reductions and users' functions.
    """

    copy_limit = LARGEST

    def __init__(self, functions: Functions) -> None:
        self.version: int | None = None
        self.stores: dict[str, TableShard] = {}
        self.failed: dict[str, str] = {}
        """Stores in which a function failed here that did not on the server which leads."""
        self._functions = functions

    # ---- what the server that leads does -------------------------------------------------------------------------

    def begin(self, shards: list[TableShard]) -> None:
        """Have the first version: empty, or what a checkpoint had."""
        self.version, self.stores = 0, {shard.spec.name: shard for shard in shards}

    def apply_new(self, head: EntryHead, entry: TableEntry) -> bool:
        """Apply an entry; False, and no version more, when it was taken in before.

        Raises:
            UsageError: it asks for what cannot be; the user's fault.
            Exception: what a user's function raised.
        """
        assert self.version is not None, "it has begun"
        if not self._store(head).apply(entry):
            return False
        self.version += 1
        return True

    @staticmethod
    def encode(head: EntryHead, entry: TableEntry) -> tuple[bytes, memoryview]:
        """Return what goes down the chain."""
        return _ENCODER.encode(head), memoryview(encode_entry(entry))

    def make_shard(self, spec: StoreSpec) -> TableShard:
        """Return an empty shard of a store."""
        return TableShard(spec, self._functions)

    def _store(self, head: EntryHead) -> TableShard:
        found = self.stores.get(head.store)
        if head.spec is not None:
            if found is None:
                found = self.stores[head.store] = self.make_shard(head.spec)
            elif found.restored:
                found.reopen(head.spec)
        assert found is not None, "a store is opened before it is spoken of"
        return found

    # ---- what a chain wants ----------------------------------------------------------------------------------------

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return where an entry's payload goes."""
        return memoryview(bytearray(size))

    def release(self, payload: memoryview) -> None:
        """Nothing to take back."""

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> object:
        """Apply an entry that another server has applied. A function that fails only here ends its store here."""
        assert self.version is not None, "entries follow a version"
        what = _HEAD.decode(head)
        try:
            shard = self._store(what)
            shard.apply(decode_entry(payload, shard.kind))
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; told when this server leads
            self.failed[what.store] = f"{type(error).__name__}: {error}"
        self.version += 1
        return None

    def snapshot(self) -> tuple[bytes, list[memoryview]]:
        """Return all of the state."""
        return b"", [memoryview(encode_shards(list(self.stores.values())))]

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Become what another's `snapshot` was."""
        self.begin(decode_shards(data, self.make_shard))
        self.version, self.failed = version, {}

    def forget(self) -> None:
        """Have no state any more."""
        self.version, self.stores, self.failed = None, {}, {}

    def staged_state(self) -> tuple[bytes, list[memoryview]]:
        """Return nothing: see the module."""
        return b"", []

    def restore_staged(self, head: bytes, data: memoryview) -> None:
        """Nothing was handed over beside the state."""
