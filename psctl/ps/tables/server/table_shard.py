"""One shard of all stores on one server: its state, its chain of replicas, and what waits to be applied."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from psctl.ps.outputs import ChainOutput
from psctl.ps.replication.chain_entries import CopyBudget
from psctl.ps.replication.replica_chain import ReplicaChain
from psctl.ps.table_messages import ShardProgress
from psctl.ps.tables.server.replicated_tables import EntryHead, ReplicatedTables
from psctl.ps.tables.table_kinds import Functions
from psctl.ps.tables.table_state import TableEntry

WINDOW = 32
"""Entries of a shard that may be on their way down the chain."""


class WaitingEntry(msgspec.Struct, frozen=True, eq=False):
    """An entry that was taken in and waits its turn."""

    head: EntryHead
    entry: TableEntry


class HostedShard:
    """See the module. Work is done in the order in which it came, but that who is held back holds up no one else.

    Args:
        shard: its index.
        me: this server's rank.
        functions: reductions and users' functions.
        up: tells whether there is a connection to a server.
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
        """The server's count of shards that it came to lead, when it came to lead this one."""
        self.announced = False
        """Whether workers were told that it is led here."""
        self.waiting: deque[WaitingEntry] = deque()

    @property
    def leads(self) -> bool:
        """Whether this server is the shard's primary, and has its state."""
        return self.chain.leads and self.state.version is not None

    @property
    def followed(self) -> bool:
        """Whether it is led here, and other servers get its entries from here."""
        return bool(self.chain.followers) and self.leads

    @property
    def version(self) -> int:
        """Of its state, which it has."""
        assert self.state.version is not None, "it is led here"
        return self.state.version

    def clock(self, store: str) -> int:
        """Return how many clocks of a store all have finished."""
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
        """Return how far the shard is, for a worker."""
        return ShardProgress(
            self.shard, self.clock(store), self.own_clock(store, worker), self.last_sequence(store, worker)
        )

    def take_due(self) -> Iterator[WaitingEntry]:
        """Yield, and take out, what may be done now; what was yielded is done when the next is asked for."""
        passed: list[WaitingEntry] = []
        held: set[tuple[str, int]] = set()
        while self.waiting and self.chain.may_append:
            work = self.waiting.popleft()
            store = self.state.stores.get(work.head.store)
            who = (work.head.store, work.entry.worker)
            if who in held or (
                store is not None and work.entry.what != "open" and store.is_held_back(work.entry.worker)
            ):
                held.add(who)
                passed.append(work)
                continue
            yield work
            if work.entry.what != "update" and passed:  # it may have let others go
                self.waiting.extendleft(reversed(passed))
                passed, held = [], set()
        self.waiting.extendleft(reversed(passed))

    def drop_waiting(self, store: str, worker: int) -> None:
        """Forget what waits of a worker, which will say it again."""
        self.waiting = deque(work for work in self.waiting if (work.head.store, work.entry.worker) != (store, worker))

    def forward(self, work: WaitingEntry) -> list[ChainOutput]:
        """Send what was just applied down the chain."""
        if not self.chain.keeps_payloads:
            return []
        head, payload = self.state.encode(work.head, work.entry)
        return self.chain.append(self.version - 1, head, payload)
