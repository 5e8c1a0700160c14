"""Planted bugs: each is a method or two of a shipped module replaced; the simulator must catch every one.

python -m tests.simulation --mutants        prints the table: mutant, seeds until caught, invariant that caught it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from psctl.job.shard_placement import ShardPlacement
from psctl.ps.dense.client.host_collection import HostCollection
from psctl.ps.dense.client.receive_buffers import ReceiveBuffers
from psctl.ps.dense.client.send_buffers import SendBuffers
from psctl.ps.dense.client.unacked_pushes import UnackedPushes
from psctl.ps.dense.clock_ledger import Membership
from psctl.ps.dense.server.aggregation import ClockAggregation
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.server.push_staging import PushStaging, StagedTransfer
from psctl.ps.dense.server.shard_answers import VersionReaders
from psctl.ps.outputs import Snapshot
from psctl.ps.replication.replica_chain import ReplicaChain
from psctl.ps.tables.server.client_sessions import OpenedStore
from psctl.ps.tables.server.table_server import TableServer
from psctl.ps.tables.server.table_shard import ReplicatedTables
from psctl.ps.tables.table_state import EntryPart, TableEntry, TableShard
from tests.simulation.play import Outcome
from tests.simulation.plays import PLAYS

Patch = tuple[type, str, Callable[[Any], Any]]
"""A class, the name of its method, and what makes the method's mutant out of the method."""


@dataclass(frozen=True)
class Mutant:
    """A planted bug, and within how many seeds it must be caught."""

    name: str
    patches: tuple[Patch, ...]
    known: int  # a seed that caught it when this was written: the tests begin there
    within: int = 600
    what: str = "store"  # what is simulated


def _as_next(method: Any) -> Any:
    """A push that was taken before counts as the next one."""

    def mutant(self: DenseShard, rank: int, message: Any, *more: Any) -> Any:
        taken = self._staging.clock_of(rank)
        if self.leads and message.clock <= taken:
            message = replace(message, clock=taken + 1)
        return method(self, rank, message, *more)

    return mutant


def _one_buffer(method: Any) -> Any:
    """All clocks' gradients leave out of one buffer."""

    def mutant(self: SendBuffers, *args: Any, **more: Any) -> None:
        method(self, *args, **more)
        self._flat = [self._flat[0]] * len(self._flat)

    return mutant


def _at_once(method: Any) -> Any:
    """What the primary has counts as being on all of the chain."""
    return property(lambda self: self.version >= 0)


def _anyone_promoted(method: Any) -> Any:
    """At a death a server that is not of the chain, or is only being filled, is promoted if there is one."""

    def mutant(self: ShardPlacement, gone: Any) -> bool:
        gone = list(gone)
        survived = bool(method(self, gone))
        for chain in self.chains if survived and gone else ():
            chain[:0] = [server for server in sorted(self.places) if server not in chain][:1]
        return survived

    return mutant


def _nothing_staged(method: Any) -> Any:
    """The old primary says what it has taken, and does not hand it over."""

    def mutant(self: ClockAggregation) -> tuple[bytes, memoryview]:
        orders = [(clock, order) for (clock, _), order in self._orders.items()]
        head = StagedTransfer(dict(self.taken), orders, [], sorted(self.saves))
        return msgspec.msgpack.encode(head), memoryview(b"")

    return mutant


def _each_its_own(method: Any) -> Any:
    """Each shard counts a dead worker's pushes up to the last that it has itself."""

    def mutant(self: DenseServer, rank: int, clock: int) -> Any:
        own = [machine.last_clock_of(rank) for machine in self.shards.values() if machine.leads]
        outputs = self._call_each_shard(lambda machine: machine.drop_pushes_after(rank, machine.last_clock_of(rank)))
        return outputs + self._give_orders(self._ledger.remove_rank(rank, max(own, default=clock)))

    return mutant


def _looser(method: Any) -> Any:
    """A worker reads versions that are one clock older than it may."""

    def mutant(self: ReceiveBuffers, clock: int, exact: bool) -> int:
        return max(min(clock, self._terms.base), int(method(self, clock, exact)) - 1)

    return mutant


def _backwards(method: Any) -> Any:
    """Ranks are summed in another order."""
    return lambda self, clock: tuple(reversed(method(self, clock)))


def _unread(method: Any) -> Any:
    """Values are stepped where they lie, though some worker may still be reading them."""
    return lambda self, *of: False


def _late_copy(method: Any) -> Any:
    """A checkpoint's copy is of whatever version is there when its turn comes."""

    def mutant(self: DenseShard) -> Any:
        due = {version for version in self._staging.saves if self.version is not None and self.version > version}
        self._staging.saves -= due
        copies = [Snapshot(version, self.shard.index, self.state.checkpoint()) for version in sorted(due)]
        self._saved = max([self._saved, *due])
        return copies

    return mutant


def _for_ever(method: Any) -> Any:
    """Orders are kept for good."""
    return lambda self, clock: None


def _counted_again(method: Any) -> Any:
    """An update that was taken in before counts as the next one."""

    def mutant(self: TableShard, entry: TableEntry) -> bool:
        last = self.sequences.get(entry.worker, -1)
        if entry.what == "update" and entry.sequence <= last:
            entry = replace(entry, sequence=last + 1)
        return bool(method(self, entry))

    return mutant


def _all_or_nothing(method: Any) -> Any:
    """Of single pushes that came together none counts when one of them had been taken in before."""

    def mutant(self: EntryPart, after: int, until: int) -> EntryPart:
        kept = method(self, after, until)
        return kept if kept is self else method(self, until, until)

    return mutant


def _never_a_part(method: Any) -> Any:
    """Of single pushes that came together all count, also those that had been taken in before."""
    return lambda self, after, until: self


def _as_lent(method: Any) -> Any:
    """What is kept beyond Done stays where it was lent."""
    return lambda self, message, payload: payload


def _what_leads(method: Any) -> Any:
    """What the server that leads has done is told as done."""
    return lambda self, shard: self.shards_here[shard].state.version if shard in self.shards_here else -1


def _any_term(method: Any) -> Any:
    """What was sent before a worker knew who leads counts too."""
    return lambda self, shard, term: shard in self.shards_here and self.shards_here[shard].leads


def _any_session(method: Any) -> Any:
    """A session in which something was not understood goes on."""

    def mutant(self: TableServer, worker: int, message: Any, payload: memoryview) -> Any:
        for opened in self.stores.values():
            if worker in opened.sessions:
                opened.sessions[worker].ignored_until = -1
        return method(self, worker, message, payload)

    return mutant


def _as_first_copied(method: Any) -> Any:
    """What came since a shard was first copied is in no copy of it."""
    copies: dict[int, tuple[Any, Any]] = {}

    def mutant(self: ReplicatedTables) -> Any:
        return copies.setdefault(id(self), (self, method(self)))[1]

    return mutant


def _nobody_asked(method: Any) -> Any:
    """Of a host's sum that is given up the others are not asked to push for themselves."""

    def mutant(self: PushStaging, rank: int, message: Any) -> None:
        before = set(self.given_up)
        method(self, rank, message)
        self.given_up = before

    return mutant


def _each_apart(method: Any) -> Any:
    """Servers sum rank after rank, and not a host first, where its ranks push for themselves."""

    def mutant(self: ClockAggregation, pushes: Any) -> None:
        for _, staged in pushes:
            self._add(staged)

    return mutant


def _waits_on(method: Any) -> Any:
    """Who has handed in waits on when the line to its collector breaks."""

    def mutant(self: HostCollection, rank: int) -> Any:
        self._up.discard(rank)
        return []

    return mutant


MUTANTS = (
    Mutant("no dedupe", ((DenseShard, "push_buffer_for", _as_next), (DenseShard, "on_push", _as_next)), 16),
    Mutant("acknowledge before the replica", ((ReplicaChain, "settled", _at_once),), 1),
    Mutant("stale promotion", ((ShardPlacement, "remove_lost", _anyone_promoted),), 19),
    Mutant("lost hand-over delta", ((ClockAggregation, "staged_state", _nothing_staged),), 32),
    Mutant("a death cut at different clocks on two shards", ((DenseServer, "count_until", _each_its_own),), 31),
    Mutant("gradient overwritten before its acknowledgement", ((SendBuffers, "__init__", _one_buffer),), 9),
    Mutant("read older than the staleness allows", ((ReceiveBuffers, "oldest_version", _looser),), 0),
    Mutant("ranks summed in another order", ((Membership, "at", _backwards),), 13),
    Mutant("values stepped while they are read", ((VersionReaders, "may_read", _unread),), 2),
    Mutant("a checkpoint of several versions", ((DenseShard, "_snapshot", _late_copy),), 37),
    Mutant("orders are kept for ever", ((UnackedPushes, "_drop", _for_ever),), 111),
    Mutant("nobody is asked when a host's sum is given up", ((PushStaging, "give_up", _nobody_asked),), 365),
    Mutant("a host is not summed first", ((ClockAggregation, "_add_host", _each_apart),), 23),
    Mutant("a worker waits for a collector that is gone", ((HostCollection, "on_peer_disconnected", _waits_on),), 52),
    Mutant("tables: no dedupe", ((TableShard, "apply", _counted_again),), 0, what="tables"),
    Mutant("tables: a group dropped whole", ((EntryPart, "only", _all_or_nothing),), 7, what="tables"),
    Mutant("tables: a group taken in whole", ((EntryPart, "only", _never_a_part),), 7, what="tables"),
    Mutant("tables: kept where it was lent", ((OpenedStore, "lasting_payload", _as_lent),), 0, what="tables"),
    Mutant("tables: acknowledge before the replica", ((TableServer, "_acknowledged", _what_leads),), 6, what="tables"),
    Mutant("tables: stale promotion", ((ShardPlacement, "remove_lost", _anyone_promoted),), 1, what="tables"),
    Mutant("tables: lost hand-over delta", ((ReplicatedTables, "snapshot", _as_first_copied),), 0, what="tables"),
    Mutant("tables: term ignored", ((TableServer, "_is_led", _any_term),), 30, what="tables"),
    Mutant("tables: session ignored", ((TableServer, "on_worker_message", _any_session),), 0, what="tables"),
)


class StaleMutant(Exception):
    """A mutant names an attribute that the product does not have (any more): it would catch only itself."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plant the bug for the duration of a block.

    Raises:
        StaleMutant: a patched class has no such method; nothing is patched.
    """
    missing = [f"{owner.__name__}.{name}" for owner, name, _ in mutant.patches if not hasattr(owner, name)]
    if missing:
        raise StaleMutant(f"{mutant.name}: there is no {', '.join(missing)}")
    before = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in mutant.patches]
    for owner, name, make in mutant.patches:
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, method in before:
            if method is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, method)


def hunt(mutant: Mutant, first: int = 0) -> tuple[int, Outcome] | None:
    """Return how many seeds it took and what caught it; None when nothing did.

    A seed that fails without the bug too has caught nothing.

    Raises:
        StaleMutant: a patched class, or an object that the mutant reads, lacks an attribute that the mutant names.
    """
    for seed in range(first, first + mutant.within):
        with planted(mutant):
            outcome = PLAYS[mutant.what](seed)
        if "AttributeError" in outcome.text:
            raise StaleMutant(f"{mutant.name}, seed {seed}: {outcome.text}")
        if outcome.broken and not PLAYS[mutant.what](seed).broken:
            return seed - first + 1, outcome
    return None
