"""The state machine of one dense shard on a server: pushes and step orders in; sums, steps and answers out.

Theory. At any time the shard has one version v (shard_state.py). On its primary the next one is under way:

    pushes           staged until complete (push_staging.py), then PushStaged is sent
    sum, mean        of a clock's members in rank order (aggregation.py); norm queries are answered from it
    apply            once its step order is here: an entry is sent down the chain of replicas (replica_chain.py), and
                     every member makes the same step; `update: worker`: the mean itself is the next version
    acknowledged     when all of the chain have version v: pulls that it satisfies are answered, other workers' pushes
                     are acknowledged (Pushed); only then is the next version applied

A pull is answered by a version that is `oldest` or newer, and newer than the worker's own; else it is kept until then.
A server that is not the primary drops workers' messages: the primary has sent, or will send, Leads to the workers, and
on Leads they send everything outstanding.

The chain replicates the shard's state; a new primary also receives the staged pushes. DenseShard never blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psctl.errors import MessageRefused, ProtocolError
from psctl.ps.dense.buffer_allocator import BufferAllocator, SharedBytes
from psctl.ps.dense.clock_ledger import Membership, StepOrder
from psctl.ps.dense.server.aggregation import intake
from psctl.ps.dense.server.push_staging import ReadyGradient
from psctl.ps.dense.server.shard_answers import ShardAnswers, VersionReaders
from psctl.ps.dense.server.shard_reads import ShardReads
from psctl.ps.dense.shard_state import ShardState, Terms
from psctl.ps.messages import (
    BetweenServers,
    Leads,
    Pull,
    Push,
    Pushed,
    PushStaged,
    ReadShards,
)
from psctl.ps.outputs import ChainOutput, Output, Snapshot, ToWorker
from psctl.ps.pieces import Piece, bytes_view
from psctl.ps.replication.chain_entries import CopyBudget
from psctl.ps.replication.replica_chain import ReplicaChain
from psctl.ps.snapshot import ShardLoading
from psctl.types import Shard


class DenseShard:
    """The state machine of one shard. Its calls must not overlap; two shards share no mutable state but the budget.

    Args:
        terms: the terms of the job.
        shard: the shard.
        held: its pieces.
        me: rank of this server.
        up: returns whether there is a connection to a server.
        membership: the members of each clock.
        epoch: the newest assignment so far, in which this server had no role for the shard.
        copying: the limit on concurrent copies, shared by the server's shards.
        allocator: allocates buffers, and finds their places for workers that read them.
        restored: start values are those of a checkpoint (`on_loaded`), not of rank 0.
    """

    def __init__(
        self,
        terms: Terms,
        shard: Shard,
        held: Sequence[Piece],
        me: int = 0,
        up: Callable[[int], bool] = lambda server: False,
        membership: Membership | None = None,
        epoch: int = -1,
        copying: CopyBudget | None = None,
        allocator: BufferAllocator | None = None,
        *,
        restored: bool = False,
    ) -> None:
        self.shard, self.held, allocator = shard, held, allocator or BufferAllocator()
        self._readers = VersionReaders()
        self.state = ShardState(terms, shard, held, self._readers.may_read, allocator)
        self._terms, self._restored, self._pushes_ask = terms, restored, terms.pushes_ask
        self.staging = intake(self.state, membership or Membership.initial(terms.world, terms.base))
        self._answers = ShardAnswers(self.state, self.staging, self._readers, allocator)
        self._reads = ShardReads(self.state, lambda: self.staging.clocks)
        self.chain = ReplicaChain(shard.index, me, self.state, up, epoch, copying=copying, staged=self.staging)
        self._starting = False  # start values are being received
        self._saved = terms.base - 1  # newest version that was copied for a checkpoint
        self._unacknowledged: set[int] = set()  # ranks that wait for Pushed
        self.led_from = terms.base - 1
        """The newest checkpoint that an earlier primary of the shard has made, or would have."""

    @property
    def version(self) -> int | None:
        """The newest version here; None: start values have not all arrived."""
        return self.state.version

    @property
    def leads(self) -> bool:
        """Whether this server is the shard's primary."""
        return self.chain.leads

    # ---- the chain --------------------------------------------------------------------------------------------------

    def on_assignment(
        self, epoch: int, chain: Sequence[int], copies: Sequence[int], alive: Callable[[int], bool]
    ) -> list[Output]:
        """Apply an assignment (replica_chain.py)."""
        return self._after_chain(self.chain.leads, self.chain.on_assignment(epoch, chain, copies, alive))

    def replica_buffer_for(self, server: int, message: BetweenServers, size: int) -> memoryview | None:
        """Return the buffer for another server's payload; None when the payload is not needed."""
        return self.chain.receive_buffer_for(server, message, size)

    def on_server_message(self, server: int, message: BetweenServers, size: int) -> list[Output]:
        """Handle another server's message."""
        return self._after_chain(self.chain.leads, self.chain.on_message(server, message, size))

    def on_server_connected(self, server: int) -> list[Output]:
        """Send again what may have been lost with an older connection."""
        return self._after_chain(self.chain.leads, self.chain.on_server_connected(server))

    def on_server_disconnected(self, server: int) -> list[Output]:
        """Handle the loss of the connection to a server."""
        self.chain.on_server_disconnected(server)
        return self._advance()

    def _after_chain(self, led: bool, outputs: Sequence[ChainOutput]) -> list[Output]:
        """Continue after the chain has handled an event."""
        if self.leads and not led and self.version is not None:
            now = self.staging.membership.changes[-1][1]
            self.led_from = 1 + min((self.staging.applied_of(rank) for rank in now), default=self.version)
            self._unacknowledged = set(self.staging.membership.everyone)
        if led and not self.leads:
            self._answers.clear()
            self._reads.clear()
        if self.chain.role in ("none", "copying", "member"):
            self.staging.clear()
        return [*outputs, *self._advance()]

    # ---- start values -----------------------------------------------------------------------------------------------

    def start_values_buffer(self, rank: int, size: int) -> memoryview | None:
        """Return the buffer for start values; None when they are not needed.

        Raises:
            ProtocolError: they have the wrong size or sender; the worker's fault.
        """
        if size != self.state.nbytes:
            raise self._error(rank, f"start values of {size} bytes where {self.state.nbytes} belong")
        if not (self.leads or self.chain.role == "demoting") or self.version is not None:
            return None
        if rank != 0 or self._restored:
            raise self._error(rank, "sent start values, which are not its to send")
        self._starting = True
        return bytes_view(self.state.values)

    def on_start_values(self) -> list[Output]:
        """Make the start values, which have arrived, the first version."""
        started, self._starting = self._starting, False
        if not started or not (self.leads or self.chain.role == "demoting") or self.version is not None:
            return []
        self.state.begin()
        return [*self.chain.on_first_version(), *self._advance()]

    def on_loaded(self, loading: ShardLoading) -> list[Output]:
        """Make the state loaded from a checkpoint the first version."""
        self.state.on_loaded(loading)
        return [*self.chain.on_first_version(), *self._advance()]

    # ---- pushes and orders ------------------------------------------------------------------------------------------

    def push_buffer_for(self, rank: int, message: Push, size: int) -> memoryview | None:
        """Return the buffer for a push's bytes; None when they are not needed.

        Raises:
            ProtocolError: wrong size or clock; the worker's fault, and nothing was changed.
        """
        self._check(rank, message)
        return self.staging.receive_buffer_for(rank, message, size) if self.chain.leads else None

    def _check(self, rank: int, message: Push) -> None:
        """Check the fields of a push from which something follows even if it does not count.

        Raises:
            MessageRefused: it speaks for other workers alone.
            ProtocolError: it reports a version that was never sent.
        """
        if message.covers and rank not in message.covers:
            what = f"Push: a sum of {len(message.covers)} workers without the sender"
            raise MessageRefused(f"worker/{rank}, shard {self.shard.index}: {what}", where=f"worker/{rank}")
        version = self.state.version
        if self.chain.leads and message.landed > (-1 if version is None else version):
            raise self._error(rank, f"push that claims version {message.landed}, which was never sent")

    def on_push(self, rank: int, message: Push, size: int, shared: SharedBytes = None) -> list[Output]:
        """Count a push that has arrived: it is acknowledged by PushStaged, and everything ready is applied.

        Args:
            shared: all of its bytes, in shared memory.

        Raises:
            ProtocolError: as `push_buffer_for`.
        """
        self._check(rank, message)  # `push_buffer_for` may have been called before this server led the shard
        if not self.chain.leads:
            return []
        self._readers.on_received(rank, message.landed)
        if message.covers:
            # A worker that offers gradients of a clock has that version.
            self._readers.on_covered(message.covers, message.clock)
        if self._pushes_ask:
            self._answers.on_push(rank, message.clock)
        if message.clock <= self.staging.clock_of(rank):
            self.staging.give_up(rank, message)
            applied = self.staging.applied_of(rank) >= message.clock
            self._unacknowledged.update([rank] if applied else ())
            return [
                *self._acknowledge([rank], message.clock),
                *self._ask_again(),
                *(self._advance() if applied else ()),
            ]
        if shared is not None:
            taken = self.staging.add_shared(rank, message, shared)
        else:
            taken = self.staging.add_received(rank, message, size)
        return [*self._acknowledge(taken, message.clock), *self._ask_again(), *(self._apply_ready() if taken else ())]

    def _acknowledge(self, ranks: Sequence[int], clock: int) -> list[Output]:
        """Send PushStaged: step orders wait for it; where workers hold the values none does, and nothing is sent."""
        waits = self._terms.update == "server"
        return [ToWorker(rank, PushStaged(self.shard.index, clock)) for rank in ranks] if waits else []

    def _ask_again(self) -> list[Output]:
        """Ask the ranks whose staged pushes were dropped to push again."""
        if not self.staging.given_up:
            return []
        ranks = sorted(self.staging.given_up)
        self.staging.given_up.clear()
        if not self.chain.leads:
            return []
        self._answers.on_new_clock()
        return [ToWorker(rank, Leads(self.chain.epoch, [self.shard.index])) for rank in ranks]

    def on_step_order(self, clock: int, order: StepOrder) -> list[Output]:
        """Record the step order of `clock`."""
        self.staging.add_order(clock, order)
        if order.save and self.version == clock + 1 and self._terms.in_backward > 0 and self.led_from <= clock:
            self.staging.saves.add(self.version)  # it has stepped in backward, and pushes of the next clock follow this
        return self._advance()

    def on_order_in_backward(self, clock: int, order: StepOrder) -> list[Output]:
        """Record the order to step `clock` as soon as this shard's pushes are in."""
        self.staging.add_order_in_backward(clock, order)
        return self._advance()

    def withdraw_orders_in_backward(self, before: int) -> None:
        """Drop such orders of clocks before `before` that are not applied, and refuse those that are on their way."""
        self.staging.withdraw_orders_in_backward(before)

    def drop_pushes_after(self, rank: int, clock: int) -> list[Output]:
        """Drop what a lost worker pushed after `clock`."""
        self.staging.drop_and_undo(rank, clock)
        return [*self._ask_again(), *self._advance()]

    def set_members(self, membership: Membership) -> list[Output]:
        """Set the members of each clock."""
        self.staging.set_members(membership)
        self._drop_readers()
        return [*self._ask_again(), *self._advance()]

    def _drop_readers(self) -> None:
        """Forget what ranks read that make no clock any more and have disconnected."""
        clock = self._terms.base if self.state.version is None else self.state.version
        self._readers.keep_only(self.staging.membership.from_clock(clock))

    # ---- progress ----------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Output]:
        """Make all progress that is possible now."""
        if not self.chain.leads or self.state.version is None:
            return []
        return [*self._answer_settled(), *self._apply_ready()]

    def _apply_ready(self) -> list[Output]:
        """Apply every ready gradient, and answer with each version once it is on all of the chain."""
        outputs: list[Output] = [*self._answers.norms()]
        if not self.chain.alone:
            outputs += self.chain.start_waiting_copies()
        while (self.chain.alone or self.chain.may_append) and (ready := self.staging.next_ready()) is not None:
            outputs += self._apply(ready)
            outputs += self._answer_settled()
            outputs += self._answers.norms()
        return outputs

    def _apply(self, ready: ReadyGradient) -> list[ChainOutput]:
        """Make the next version here, and forward its entry."""
        entry, gradient, number = ready.entry, ready.gradient, self.state.version
        keeps = not self.chain.alone and self.chain.keeps_payloads
        assert number is not None, "a clock was summed"
        some = any(entry.present)
        self._answers.on_new_clock()
        if not some:
            self.state.give_buffer(gradient)
        self.state.apply_entry(entry, gradient if some else None, kept=keeps)
        if any(first == number + 1 for first, _ in self.staging.membership.changes):
            self._drop_readers()
        self._unacknowledged.update(entry.ranks)
        if not keeps:
            return []
        return self.chain.append(
            number, self.state.encode_head(entry), self.state.bytes_of(gradient) if some else memoryview(b"")
        )

    def _answer_settled(self) -> list[Output]:
        """Send answers and acknowledgements for what is on all of the chain now."""
        if not (self.chain.alone or self.chain.settled):
            return []
        answers = self._answers.values()
        outputs: list[Output] = []
        if self._terms.staleness is not None:  # values imply it; but under asp the version is not the clock
            for answer in answers:
                self._unacknowledged.discard(answer.rank)
        if self._unacknowledged:
            ranks, self._unacknowledged = sorted(self._unacknowledged), set()
            outputs += [ToWorker(rank, Pushed(self.shard.index, self.staging.applied_of(rank))) for rank in ranks]
        outputs += answers
        outputs += self._reads.answers()
        return outputs + self._snapshot() if self.staging.saves else outputs

    def save_version(self, rank: int, version: int) -> list[Output]:
        """Copy version `version`, now or when it is reached; once, however many ranks request it."""
        if version <= self._saved or not self.leads:
            return []
        if self._terms.update != "server" or self._is_beyond(version):
            raise self._error(rank, f"asked to save version {version} of a shard at {self.version}")
        self.staging.saves.add(version)
        return self._advance()

    def _is_beyond(self, version: int) -> bool:
        """Return whether some clock is applied already that `version` does not hold."""
        return any(clock >= version for clock in self.state.applied.values())

    def _snapshot(self) -> list[Output]:
        outputs: list[Output] = []
        for version in sorted(self.staging.saves):
            ranks = self.staging.membership.at(max(0, version - 1))
            base = self._terms.base - 1
            if version <= self._saved or self._is_beyond(version):
                self.staging.saves.discard(version)
            elif all(self.state.applied.get(rank, base) == version - 1 for rank in ranks):
                self.staging.saves.discard(version)
                self._saved = version
                outputs.append(Snapshot(version, self.shard.index, self.state.checkpoint()))
        return outputs

    # ---- answers ----------------------------------------------------------------------------------------------------

    def on_pull(self, rank: int, message: Pull) -> list[Output]:
        """Answer with the values, or record that this rank waits."""
        if not self.chain.leads:
            return []
        self._answers.on_pull(rank, message)
        settled = self.version is not None if self.chain.alone else self.chain.settled
        return [*self._answers.values()] if settled else []

    def on_read(self, reader: int, message: ReadShards) -> list[Output]:
        """Answer a reader with the values, or record that it waits."""
        if not self.chain.leads:
            return []
        self._reads.on_read(reader, message)
        settled = self.version is not None if self.chain.alone else self.chain.settled
        return [*self._reads.answers()] if settled else []

    def on_reader_disconnected(self, reader: int) -> None:
        """Forget a reader's request."""
        self._reads.on_disconnected(reader)

    def on_norms_query(self, rank: int, clock: int) -> list[Output]:
        """Answer with the squared norms of `clock`, or record that this rank waits."""
        if not self.chain.leads:
            return []
        self._answers.on_norms_query(rank, clock)
        return [*self._answers.norms()]

    def missing_ranks(self, clock: int) -> list[int]:
        """Return the ranks without whose pushes no pull at `clock` can be answered; under asp, those that a checkpoint
        or a pull of all workers' clocks waits for."""
        if not self.chain.leads or self.state.version is None:
            return []
        asked, staleness = [*self.staging.saves, *self._answers.wanted_clocks], self._terms.staleness
        needed = max(asked, default=0) if staleness is None else clock - staleness
        return self.staging.missing_ranks(needed) if self.staging.clocks < needed else []

    def last_clock_of(self, rank: int) -> int:
        """Return the last clock of a rank that is staged here; under asp, that is applied: the rest will be dropped."""
        asp = self._terms.staleness is None
        return self.staging.applied_of(rank) if asp else self.staging.clock_of(rank)

    def last_separate_clock_of(self, rank: int) -> int:
        """Return the last clock of a rank that is staged separately here: a host sum is dropped when any of its ranks
        is cut. Under asp as `last_clock_of`."""
        return min(self.last_clock_of(rank), self.staging.last_separate_clock_of(rank))

    def on_worker_disconnected(self, rank: int) -> None:
        """Forget a rank's connection, but not what it may still read until a push reports a newer version."""
        self._answers.on_disconnected(rank)
        self._readers.on_disconnected(rank)
        self._drop_readers()
        self.staging.drop_incoming(rank)
        self._starting = self._starting and rank != 0

    def _error(self, rank: int, what: str) -> ProtocolError:
        return ProtocolError(f"worker/{rank}, shard {self.shard.index}: {what}", where=f"worker/{rank}")
