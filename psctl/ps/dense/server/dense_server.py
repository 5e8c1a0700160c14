"""The dense state machine of one server: dispatches messages to its shards.

DenseServer performs no I/O and never blocks: messages of workers and servers are its inputs; messages to send and parts
of checkpoints are its outputs. It owns one DenseShard for each shard that it leads or holds a replica of
(dense_shard.py, replica_chain.py), and one StepLedger (clock_ledger.py). The coordinator's decisions are plain calls:

    on_assignment(epoch, chains, copies, alive)   the servers of every shard; the first call, and at every change
    on_worker_lost(rank)                          a worker is lost; returns HeldPushes, the clocks held of it
    count_until(rank, clock)                      its pushes count up to this clock; later ones are dropped
    set_members(clock, ranks)                     these ranks take part from this clock on

A worker that connects (`on_worker_connected`) receives Leads with the shards led here; when this server becomes the
primary of a shard, every connected worker receives Leads. A refusal (two ranks differ, an optimizer failed) is sent to
all workers as Refused, and nothing is applied afterwards.

Locking. The server enters `guard(shard)` around each call into one shard and `guard(LEDGER)` around everything else; it
never holds two guards at once. A caller with several threads passes real locks, one for every shard of the job; a test
passes none. Outputs may be sent after the guard is released: bytes that are being sent are never written to
(shard_state.py). But messages about one shard must be sent in the order in which they were returned, so a caller with
several threads holds the shard's guard until they are sent (calls with one shard's guard held are allowed, so that lock
must be reentrant). Messages of one connection are delivered in order, and none of an older connection of the same peer
after `on_worker_connected` or `on_server_connected`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from psctl.errors import ProtocolError
from psctl.ps.dense.buffer_allocator import BufferAllocator, SharedBytes
from psctl.ps.dense.clock_ledger import BackwardLedger, JobRefusal, Membership, StepLedger, StepOrder
from psctl.ps.dense.rank_state_store import RankStates
from psctl.ps.dense.server.checkpoint_parts import CheckpointParts
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.server.push_staging import largest_payload
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import (
    BetweenServers,
    FromReader,
    FromWorker,
    Leads,
    NormsQuery,
    Pull,
    Push,
    PutRankState,
    RankStateQuery,
    RankStateRead,
    ReadRankState,
    Refused,
    SaveNow,
    StartValues,
    Step,
    StepInBackward,
    WaitAnswer,
    WaitQuery,
)
from psctl.ps.outputs import HeldPushes, Instruction, Output, Snapshot, ToReader, ToWorker
from psctl.ps.pieces import pieces
from psctl.ps.replication.chain_entries import CopyBudget
from psctl.ps.snapshot import ShardLoading
from psctl.types import Shard

LEDGER = -1
"""The argument of `guard` for all state that does not belong to one shard."""


class DenseServer:
    """The state machine of all dense shards of one server; the module's docstring defines its locking.

    Args:
        terms: the terms of the job.
        shards: all shards of the job.
        rank: this server's rank.
        guard: returns a context manager for a shard's index, or for LEDGER.
        allocator: allocates buffers, and finds their places for workers that read them.
        restored: the start values are those of a checkpoint (`on_loaded`), not of rank 0.
    """

    def __init__(
        self,
        terms: Terms,
        shards: Sequence[Shard],
        rank: int,
        guard: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
        allocator: BufferAllocator | None = None,
        *,
        restored: bool = False,
    ) -> None:
        self.terms, self.rank, self.epoch = terms, rank, -1
        self.shards: dict[int, DenseShard] = {}
        self._all, self._held, self._restored = list(shards), pieces(terms.layout, shards), restored
        self._largest = [largest_payload(terms, *one) for one in zip(shards, self._held, strict=True)]
        self._guard, self._allocator = guard, allocator
        self._membership = Membership.initial(terms.world, terms.base)
        self._ledger = StepLedger(self._membership, terms.base, terms.staleness if terms.update == "server" else None)
        self._backward_ledger = BackwardLedger(self._membership, terms.base)
        self._rank_states = RankStates(terms.buffers)
        self._rank_states_sent_to: set[int] = set()  # servers that have all rank states held here
        self._workers: set[int] = set()  # connected
        self._servers: set[int] = set()
        self._readers: set[int] = set()
        self._checkpoint_parts, self._copy_budget = CheckpointParts(terms.base), CopyBudget()
        self._refused: Refused | None = None

    @property
    def leading(self) -> list[int]:
        """The shards that this server is the primary of."""
        return [index for index, shard in sorted(self.shards.items()) if shard.leads]

    @property
    def version(self) -> int:
        """The oldest version led here (none led: the newest ordered one); base before the start values."""
        versions = [self.shards[index].version for index in self.leading]
        return min((self.terms.base if version is None else version for version in versions), default=self._ledger.next)

    # ---- the coordinator's word -------------------------------------------------------------------------------------

    def on_assignment(
        self, epoch: int, chains: Sequence[Sequence[int]], copies: Sequence[Sequence[int]], alive: Iterable[int]
    ) -> list[Instruction]:
        """Apply an assignment.

        Args:
            epoch: its number; an assignment that is not newer is ignored.
            chains: for each shard its servers, primary first.
            copies: for each shard the servers that are to receive a copy.
            alive: ranks of the servers that are alive, this one included.
        """
        if epoch <= self.epoch:
            return []
        concerned = [i for i, some in enumerate(zip(chains, copies, strict=True)) if self.rank in (*some[0], *some[1])]
        for index in concerned:
            self._shard("the coordinator", index, made=True)  # before self.epoch changes: see _shard
        self.epoch, servers = epoch, frozenset(alive)
        outputs: list[Instruction] = []
        for index in sorted(self.shards):
            chain, filled = chains[index], copies[index]
            assign = partial(
                DenseShard.on_assignment, epoch=epoch, chain=chain, copies=filled, alive=servers.__contains__
            )
            outputs += self._call_shard(index, assign)
        return outputs

    def on_worker_lost(self, rank: int) -> list[Instruction]:
        """Return the clocks held of a lost worker; no further order of it is agreed on before `count_until`.

        Orders to step in backward are withdrawn first, so that no shard steps after its version was reported.
        """
        with self._guard(LEDGER):
            self._ledger.hold_rank(rank)
            withdrawn = self._backward_ledger.withdraw()
            agreed = self._ledger.next if self.terms.staleness is not None else self.terms.base
        clocks, versions, separate = dict[int, int](), dict[int, int](), dict[int, int]()
        for index, shard in sorted(self.shards.items()):
            with self._guard(index):
                if shard.leads:
                    shard.withdraw_orders_in_backward(withdrawn)
                    clocks[index] = shard.last_clock_of(rank)
                    if shard.last_separate_clock_of(rank) < clocks[index]:
                        separate[index] = shard.last_separate_clock_of(rank)
                    versions[index] = max(agreed, self.terms.base if shard.version is None else shard.version)
        with self._guard(LEDGER):
            rank_state_clock = self._rank_states.newest_clock(rank) if 0 in clocks else -1
        return [HeldPushes(rank, clocks, versions, rank_state_clock, separate)]

    def count_until(self, rank: int, clock: int) -> list[Instruction]:
        """Drop what a lost worker pushed after `clock`; orders up to it count as given."""
        outputs = self._call_each_shard(lambda shard: shard.drop_pushes_after(rank, clock))
        with self._guard(LEDGER):
            orders = self._ledger.remove_rank(rank, clock)
        return outputs + self._give_orders(orders)

    def set_members(self, clock: int, ranks: Sequence[int]) -> list[Instruction]:
        """Make these ranks, and no others, the members from `clock` on."""
        with self._guard(LEDGER):
            membership = self._membership = self._membership.changed(clock, ranks)
        outputs = self._call_each_shard(lambda shard: shard.set_members(membership), all_roles=True)
        with self._guard(LEDGER):
            orders = self._ledger.set_members(membership)
            self._backward_ledger.set_members(membership)
        return outputs + self._give_orders(orders)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def on_worker_connected(self, rank: int) -> list[Instruction]:
        """Register a worker's new connection; partly received messages of an older one are dropped."""
        self.on_worker_disconnected(rank)
        self._workers.add(rank)
        answers: list[Instruction] = [ToWorker(rank, Leads(self.epoch, self.leading))]
        return [*answers, ToWorker(rank, self._refused)] if self._refused else answers

    def on_worker_disconnected(self, rank: int) -> None:
        """Handle the loss of a worker's connection."""
        self._workers.discard(rank)
        for index, shard in list(self.shards.items()):
            with self._guard(index):
                shard.on_worker_disconnected(rank)
        with self._guard(LEDGER):
            self._rank_states.on_disconnected(rank)

    def receive_buffer_for(self, rank: int, message: FromWorker, size: int) -> memoryview | None:
        """Return the buffer for a message's payload of `size` bytes; None when the payload is not needed.

        Raises:
            ProtocolError: the message breaks the protocol; nothing was changed, and the connection must be closed.
        """
        if isinstance(message, PutRankState):
            with self._guard(LEDGER):
                return self._rank_states.receive_buffer_for(f"worker/{rank}", message, size)
        if not isinstance(message, StartValues | Push):
            raise ProtocolError(f"worker/{rank}: {type(message).__name__} with a payload", where=f"worker/{rank}")
        shard = self.shards.get(message.shard) or self._shard(f"worker/{rank}", message.shard)
        if size > self._largest[message.shard]:
            what = f"{size} bytes where {self._largest[message.shard]} belong at most"
            raise ProtocolError(f"worker/{rank}, shard {message.shard}: {what}", where=f"worker/{rank}")
        if shard is None:
            return None
        with self._guard(message.shard):
            if isinstance(message, StartValues):
                return shard.start_values_buffer(rank, size)
            return shard.push_buffer_for(rank, message, size)

    def on_worker_message(
        self, rank: int, message: FromWorker, size: int = 0, shared: SharedBytes = None
    ) -> list[Instruction]:
        """Handle a message whose payload, if any, was received into `receive_buffer_for`'s buffer, or is `shared`.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        if self._refused is not None:
            return []
        try:
            return self._dispatch(rank, message, size, shared)
        except JobRefusal as refusal:
            return self._refuse(refusal)

    def _refuse(self, refusal: JobRefusal) -> list[Instruction]:
        self._refused = Refused(refusal.reason, refusal.hint)
        return [ToWorker(rank, self._refused) for rank in self._membership.everyone]

    def _dispatch(self, rank: int, message: FromWorker, size: int, shared: SharedBytes) -> list[Instruction]:
        match message:
            case Push():
                return self._call_shard_if_held(
                    rank, message.shard, lambda shard: shard.on_push(rank, message, size, shared)
                )
            case StartValues():
                return self._call_shard_if_held(rank, message.shard, DenseShard.on_start_values)
            case Step():
                return self._step(rank, message)
            case StepInBackward():
                return self._step_in_backward(rank, message)
            case SaveNow():
                if not self.leading and self.terms.update == "server":
                    return [*self._checkpoint_parts.empty_part(message.version)]
                return self._call_each_shard(lambda shard: shard.save_version(rank, message.version))
            case Pull():
                if len(message.have) != len(message.shards):
                    raise ProtocolError(f"worker/{rank}: a pull that does not say what it has", where=f"worker/{rank}")
                asked = [
                    self._call_shard_if_held(rank, index, lambda shard: shard.on_pull(rank, message))
                    for index in message.shards
                ]
                return [output for outputs in asked for output in outputs]
            case NormsQuery():
                return self._call_each_shard(lambda shard: shard.on_norms_query(rank, message.clock))
            case PutRankState() | RankStateQuery():
                return self._on_rank_state(rank, message, size)
            case WaitQuery():
                return [ToWorker(rank, WaitAnswer(message.clock, self._missing_ranks(message.clock)))]

    def _step(self, rank: int, message: Step) -> list[Instruction]:
        self._check_groups(rank, message)
        with self._guard(LEDGER):
            orders = self._ledger.add(rank, message)
        return self._give_orders(orders)

    def _step_in_backward(self, rank: int, message: StepInBackward) -> list[Instruction]:
        self._check_groups(rank, message)
        if self.terms.in_backward <= 0:
            what = "ordered a step in backward, of which this job has none"
            raise ProtocolError(f"worker/{rank} {what}", where=f"worker/{rank}")
        with self._guard(LEDGER):
            found = self._backward_ledger.add(rank, message)
        if found is None:
            return []
        order, shards = found
        give = partial(DenseShard.on_order_in_backward, clock=message.clock, order=order)
        given = [self._call_shard(index, give) for index in self.leading if index in shards]
        return [output for outputs in given for output in outputs]

    def _check_groups(self, rank: int, message: Step | StepInBackward) -> None:
        groups = len(self.terms.layout.groups) if self.terms.update == "server" else 0
        if len(message.groups) != groups or not groups:
            what = f"ordered a step of {len(message.groups)} groups where {groups} are"
            raise ProtocolError(f"worker/{rank} {what}", where=f"worker/{rank}")

    def _give_orders(self, orders: Sequence[tuple[int, StepOrder]]) -> list[Instruction]:
        outputs: list[Instruction] = []
        for clock, order in orders:
            if order.save and not self.leading:
                outputs += self._checkpoint_parts.empty_part(clock + 1)
            outputs += self._call_each_shard(partial(DenseShard.on_step_order, clock=clock, order=order))
        return outputs

    def _on_rank_state(self, rank: int, message: PutRankState | RankStateQuery, size: int) -> list[Instruction]:
        with self._guard(LEDGER):
            if isinstance(message, RankStateQuery):
                self._rank_states.on_query(rank, message)
                return [*self._rank_states.answers()]
            if not self._rank_states.add(f"worker/{rank}", message, size):
                return []
            copies = [one for to in sorted(self._rank_states_sent_to) for one in self._rank_states.copies(to, message)]
            return [*self._rank_states.answers(), *copies]

    # ---- readers ----------------------------------------------------------------------------------------------------

    def on_reader_connected(self, reader: int) -> list[Instruction]:
        """Register a reader's new connection."""
        self._readers.add(reader)
        return [ToReader(reader, Leads(self.epoch, self.leading))]

    def on_reader_disconnected(self, reader: int) -> None:
        """Handle the loss of a reader's connection."""
        self._readers.discard(reader)
        for index, shard in list(self.shards.items()):
            with self._guard(index):
                shard.on_reader_disconnected(reader)

    def on_reader_message(self, reader: int, message: FromReader) -> list[Instruction]:
        """Handle a reader's message.

        Raises:
            ProtocolError: it names a shard that does not exist; the reader's fault.
        """
        if isinstance(message, ReadRankState):
            with self._guard(LEDGER):
                clock, state = self._rank_states.at_or_newest(0, message.clock)
            return [ToReader(reader, RankStateRead(message.ticket, clock), state or None)]
        outputs: list[Instruction] = []
        for index in message.shards:
            if index in self.shards or self._shard(f"reader/{reader}", index):
                outputs += self._call_shard(index, lambda shard: shard.on_read(reader, message))
        return outputs

    # ---- servers ----------------------------------------------------------------------------------------------------

    def on_server_connected(self, server: int) -> list[Instruction]:
        """Register a connection to a server, dialled by either side; what may have been lost is sent again."""
        self._servers.add(server)
        with self._guard(LEDGER):
            self._rank_states_sent_to.discard(server)
        return self._call_each_shard(lambda shard: shard.on_server_connected(server), all_roles=True)

    def on_server_disconnected(self, server: int) -> list[Instruction]:
        """Handle the loss of the connection to a server."""
        self._servers.discard(server)
        return self._call_each_shard(lambda shard: shard.on_server_disconnected(server), all_roles=True)

    def replica_buffer_for(self, server: int, message: BetweenServers, size: int) -> memoryview | None:
        """Return the buffer for another server's payload; None when the payload is not needed.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        if isinstance(message, PutRankState):
            with self._guard(LEDGER):
                return self._rank_states.receive_buffer_for(f"server/{server}", message, size)
        shard = self._shard(f"server/{server}", message.shard, made=True)
        assert shard is not None, "it was made"
        with self._guard(message.shard):
            return shard.replica_buffer_for(server, message, size)

    def on_server_message(self, server: int, message: BetweenServers, size: int = 0) -> list[Instruction]:
        """Handle another server's message whose payload, if any, was received into `replica_buffer_for`'s buffer.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        if isinstance(message, PutRankState):
            with self._guard(LEDGER):
                if not self._rank_states.add(f"server/{server}", message, size):
                    return []
                return [
                    one for to in sorted(self._rank_states_sent_to) for one in self._rank_states.copies(to, message)
                ]
        try:
            return self._call_shard(message.shard, lambda shard: shard.on_server_message(server, message, size))
        except JobRefusal as refusal:
            return self._refuse(refusal)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def on_loaded(self, loadings: Mapping[int, ShardLoading]) -> list[Instruction]:
        """Load the shards' state of a checkpoint, by shard."""
        found = [self._call_shard(index, partial(DenseShard.on_loaded, loading=one)) for index, one in loadings.items()]
        return [output for outputs in found for output in outputs]

    def _gather_checkpoint(self, outputs: Sequence[Output]) -> list[Instruction]:
        """Return all outputs, with the last snapshot of a step replaced by one SaveSlices."""
        instructions: list[Instruction] = []
        for output in outputs:
            if not isinstance(output, Snapshot):
                instructions.append(output)
                continue
            with self._guard(LEDGER):
                led = [index for index in self.leading if self.shards[index].led_from < output.step]
                instructions += self._checkpoint_parts.add(output, led)
        return instructions

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _shard(self, sender: str, index: int, *, made: bool = False) -> DenseShard | None:
        """Return a shard's state machine; None when this server has none and `made` is not set.

        One that is made here starts at the newest assignment, in which it has no role, and waits for the next one.
        """
        if not 0 <= index < len(self._all):
            raise ProtocolError(f"{sender} named shard {index}, of which there are {len(self._all)}", where=sender)
        if index in self.shards or not made:
            return self.shards.get(index)
        with self._guard(LEDGER):
            found = DenseShard(
                self.terms, self._all[index], self._held[index], self.rank, self._servers.__contains__,
                self._membership, self.epoch, self._copy_budget, self._allocator, restored=self._restored,
            )  # fmt: skip
            self.shards = {**self.shards, index: self.shards.get(index, found)}
        return self.shards[index]

    def _call_shard_if_held(
        self, rank: int, index: int, ask: Callable[[DenseShard], list[Output]]
    ) -> list[Instruction]:
        return self._call_shard(index, ask) if index in self.shards or self._shard(f"worker/{rank}", index) else []

    def _call_each_shard(
        self, ask: Callable[[DenseShard], list[Output]], *, all_roles: bool = False
    ) -> list[Instruction]:
        held = sorted(self.shards.items())
        asked = [self._call_shard(index, ask) for index, shard in held if shard.leads or all_roles]
        return [output for outputs in asked for output in outputs]

    def _call_shard(self, index: int, ask: Callable[[DenseShard], list[Output]]) -> list[Instruction]:
        """Call one shard; handle the changes when it becomes led here, or is no longer held."""
        shard = self.shards.get(index) or self._shard("the coordinator", index, made=True)
        assert shard is not None, "it was made"
        with self._guard(index):
            led, before = shard.chain.leads, shard.chain.role
            found = ask(shard)
            leads, role, followers = shard.chain.leads, shard.chain.role, shard.chain.followers.keys()
        outputs = self._gather_checkpoint(found)
        if leads and not led:
            outputs += self._on_lead(index)
        if role == "none" and before != "none":
            self.shards = {other: one for other, one in self.shards.items() if other != index}
        if index == 0 and followers != self._rank_states_sent_to:
            with self._guard(LEDGER):
                for server in sorted(followers - self._rank_states_sent_to):
                    if server in self._servers:
                        outputs += self._rank_states.copies(server)
                self._rank_states_sent_to = followers & self._servers
        return outputs

    def _on_lead(self, index: int) -> list[Instruction]:
        """Give a shard that is led here now the agreed step orders, and send Leads to the workers."""
        with self._guard(LEDGER):
            agreed = list(self._ledger.agreed.items())
        lead = Leads(self.epoch, [index])
        outputs: list[Instruction] = [ToWorker(rank, lead) for rank in sorted(self._workers)]
        outputs += [ToReader(reader, lead) for reader in sorted(self._readers)]
        for clock, order in agreed:
            outputs += self._call_shard(index, partial(DenseShard.on_step_order, clock=clock, order=order))
        return outputs

    def _missing_ranks(self, clock: int) -> list[int]:
        ranks: set[int] = set()
        for index, shard in list(self.shards.items()):
            with self._guard(index):
                ranks.update(shard.missing_ranks(clock))
        with self._guard(LEDGER):
            ranks.update(self._ledger.missing_ranks(clock - (self.terms.staleness or 0) - 1))
        return sorted(ranks)
