"""One shard of all stores on one server: its state, its chain of replicas, and what waits to be applied.

The chain of a shard replicates that shard of every store; entries alone change it. An entry's head names its store, and
has the store's spec when the entry opens it. Entries that wait to be applied are not replicated: no Done was sent for
them, so their worker sends them again to the next primary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np

from psctl.ps.outputs import ChainOutput
from psctl.ps.replication.chain_entries import CopyBudget
from psctl.ps.replication.replica_chain import ReplicaChain
from psctl.ps.table_messages import LARGEST_STATE, ShardProgress, StoreSpec
from psctl.ps.tables.table_bytes import decode_entry, decode_shards, encode_entry, encode_shards
from psctl.ps.tables.table_kinds import Functions
from psctl.ps.tables.table_state import ShardTable, TableEntry, TableShard


class EntryHead(msgspec.Struct, frozen=True):
    """The store that an entry changes; `spec`: the specification, in the entry that opens the store."""

    store: str
    spec: StoreSpec | None = None


_ENCODER = msgspec.msgpack.Encoder()
_HEAD = msgspec.msgpack.Decoder(EntryHead)


class ReplicatedTables:
    """One shard of all stores.

    Args:
        functions: reductions and users' functions.
    """

    copy_limit = entry_limit = LARGEST_STATE

    def __init__(self, functions: Functions) -> None:
        self.version: int | None = None
        self.stores: dict[str, TableShard] = {}
        self.failed: dict[str, str] = {}
        """Stores in which a function failed on this server but not on the primary."""
        self._functions = functions

    # ---- operations of the primary -------------------------------------------------------------------------------

    def set_first_version(self, shards: list[TableShard]) -> None:
        """Set the first version: empty, or the shards of a checkpoint."""
        self.version, self.stores = 0, {shard.spec.name: shard for shard in shards}

    def apply_new(self, head: EntryHead, entry: TableEntry) -> bool:
        """Apply an entry; return False, with the version unchanged, when it was applied before.

        Raises:
            UsageError: the entry is invalid; the user's fault.
            Exception: what a user's function raised.
        """
        assert self.version is not None, "it has begun"
        if not self._store(head).apply(entry):
            return False
        self.version += 1
        return True

    @staticmethod
    def encode(head: EntryHead, entry: TableEntry) -> tuple[bytes, memoryview]:
        """Return the head and the payload that are sent down the chain."""
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

    # ---- operations of the replication chain -----------------------------------------------------------------------

    def entry_buffer(self, head: bytes, size: int) -> memoryview:
        """Return the buffer for an entry's payload."""
        return np.empty(size, dtype=np.uint8).data  # its memory is taken as the bytes arrive

    def release(self, payload: memoryview) -> None:
        """Do nothing: payload buffers are not reused."""

    def apply(self, head: bytes, payload: memoryview, *, kept: bool) -> object:
        """Apply an entry that another server has applied. A function that fails only here ends its store here."""
        assert self.version is not None, "entries follow a version"
        what = _HEAD.decode(head)
        try:
            shard = self._store(what)
            shard.apply(decode_entry(payload, shard.kind))
        except Exception as error:  # noqa: BLE001  a user's function may raise anything; reported when this server leads
            self.failed[what.store] = f"{type(error).__name__}: {error}"
        self.version += 1
        return None

    def snapshot(self) -> tuple[bytes, memoryview]:
        """Return all of the state."""
        return b"", memoryview(encode_shards(list(self.stores.values())))

    def restore(self, version: int, head: bytes, data: memoryview) -> None:
        """Replace the state by another server's `snapshot`."""
        self.set_first_version(decode_shards(data, self.make_shard))
        self.version, self.failed = version, {}

    def forget(self) -> None:
        """Discard the state."""
        self.version, self.stores, self.failed = None, {}, {}


WINDOW = 32
"""Entries of a shard that may be on their way down the chain."""


class WaitingEntry(msgspec.Struct, frozen=True, eq=False):
    """An accepted entry that has not been applied yet."""

    head: EntryHead
    entry: TableEntry


class HostedShard:
    """See the module. Entries are applied in order of arrival, but those of a worker held back do not delay others.

    Args:
        shard: its index.
        me: this server's rank.
        functions: reductions and users' functions.
        up: returns whether a server is connected.
        epoch: the newest assignment so far, in which this server had no part in the shard.
        copying: shared by the server's shards.
    """

    def __init__(
        self, shard: int, me: int, functions: Functions, up: Callable[[int], bool], epoch: int, copying: CopyBudget
    ) -> None:
        self.shard = shard
        self.state = ReplicatedTables(functions)
        self.chain = ReplicaChain(shard, me, self.state, up, epoch, WINDOW, copying)
        self.term = -1
        """The number of shards that the server had started to lead when it started to lead this one."""
        self.loads = False
        """Whether its state in a checkpoint was requested: once, whatever happens until it has arrived."""
        self.had_role = False
        """Whether an assignment has given this server a role for the shard."""
        self.announced = False
        """Whether StoreLeads has announced to workers that this server leads the shard."""
        self.waiting: deque[WaitingEntry] = deque()

    @property
    def leads(self) -> bool:
        """Whether this server is the shard's primary, and has its state."""
        return self.chain.leads and self.state.version is not None

    @property
    def has_replicas(self) -> bool:
        """Whether this server leads the shard and other servers replicate it."""
        return bool(self.chain.followers) and self.leads

    @property
    def version(self) -> int:
        """The version of the shard's state, which this server has."""
        assert self.state.version is not None, "it is led here"
        return self.state.version

    def table(self, store: str, name: str) -> ShardTable | None:
        """Return a table of a store; None if the shard has none of this name."""
        found = self.state.stores.get(store)
        return None if found is None else found.tables.get(name)

    def clock(self, store: str) -> int:
        """Return the number of clocks of a store that all workers have finished."""
        found = self.state.stores.get(store)
        return 0 if found is None else found.clock

    def last_sequence(self, store: str, worker: int) -> int:
        """Return the sequence of a worker's last entry."""
        found = self.state.stores.get(store)
        return -1 if found is None else found.sequences.get(worker, -1)

    def own_clock(self, store: str, worker: int) -> int:
        """Return how many clocks a worker has finished."""
        found = self.state.stores.get(store)
        return 0 if found is None else found.clocks.get(worker, 0)

    def progress(self, store: str, worker: int) -> ShardProgress:
        """Return the shard's progress, as sent to a worker."""
        return ShardProgress(
            self.shard, self.clock(store), self.own_clock(store, worker), self.last_sequence(store, worker)
        )

    def take_due(self) -> Iterator[WaitingEntry]:
        """Remove and yield the entries that may be applied now; the caller applies each before it requests the next."""
        passed: list[WaitingEntry] = []
        held: set[tuple[str, int]] = set()
        while self.waiting and self.chain.may_append:
            work = self.waiting.popleft()
            store = self.state.stores.get(work.head.store)
            client = (work.head.store, work.entry.worker)
            opens = work.entry.what == "open"
            if client in held or (store is not None and not opens and store.is_held_back(work.entry.worker)):
                held.add(client)
                passed.append(work)
                continue
            yield work
            if work.entry.what != "update" and passed:  # it may have released entries of other workers
                self.waiting.extendleft(reversed(passed))
                passed, held = [], set()
        self.waiting.extendleft(reversed(passed))

    def drop_waiting(self, store: str, worker: int) -> None:
        """Drop the waiting entries of a worker, which will send them again."""
        self.waiting = deque(work for work in self.waiting if (work.head.store, work.entry.worker) != (store, worker))

    def forward(self, work: WaitingEntry) -> list[ChainOutput]:
        """Send the entry that was just applied down the chain."""
        if not self.chain.keeps_payloads:
            return []
        head, payload = self.state.encode(work.head, work.entry)
        return self.chain.append(self.version - 1, head, payload)


def led_shards(shards: Mapping[int, HostedShard]) -> list[HostedShard]:
    """Return the shards that this server leads, in order of their index."""
    return [shards[shard] for shard in sorted(shards) if shards[shard].leads]
