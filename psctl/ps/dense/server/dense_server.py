"""The mind of a server: messages of workers and servers in, messages and checkpoint parts out; it never waits.

It owns one ShardMind for each shard that it leads or holds a replica of (dense_shard.py, chain.py), and the ledger
of step orders (clock_ledger.py). The coordinator's word comes in as plain values:

    assigned(epoch, chains, copies, alive)   which servers have which shard; first of all, and at every change
    gone(rank)                               a worker died: -> Held, what is here of it
    count_until(rank, clock)                 its pushes count up to this clock; later ones are dropped
    members(clock, ranks)                    from this clock on these ranks take part

A worker that connects (`joined`) is told which shards are led here (Leads); so are all workers when a shard comes to be
led here. Refusals (two ranks differ, an optimizer failed) are told to all, and nothing is applied any more.

Locking. The mind takes `guard(shard)` around each call into one shard and `guard(LEDGER)` around all else; it never
holds two at once. A shell with many threads hands in real locks, one for every shard of the job, a test none. What
comes back may be sent after the guard is let go: bytes that are on their way are never written to (state.py); but what
is about one shard must leave in the order in which it was said, so a shell with threads holds the shard's guard until
then (the mind may be entered with one shard's guard held). Messages of one connection come in order, and none of an
older connection of the same peer after `joined` or `server_joined`.

One server's part of a checkpoint, gathered from its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from psctl.errors import ProtocolError
from psctl.ps.dense.clock_ledger import JobRefusal, Membership, StepLedger, StepOrder
from psctl.ps.dense.lent_buffers import Lending, Lent
from psctl.ps.dense.rank_state_store import RankStates
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import (
    BetweenServers,
    FromWorker,
    Leads,
    NormsQuery,
    Pull,
    Push,
    PushPart,
    PutRankState,
    RankStateQuery,
    Refused,
    SaveNow,
    StartValues,
    Step,
    WaitAnswer,
    WaitQuery,
)
from psctl.ps.outputs import HeldPushes, Instruction, Output, SaveSlices, Snapshot, ToWorker
from psctl.ps.pieces import pieces
from psctl.ps.replication.chain_entries import CopyBudget
from psctl.ps.snapshot import CopiedSlice, ShardLoading
from psctl.types import Shard


class CheckpointParts:
    """Snapshots of shards until a step's are all here.

    Args:
        base: the first version of the job.
    """

    def __init__(self, base: int) -> None:
        self._parts: dict[int, dict[int, list[CopiedSlice]]] = {}  # step -> shard -> slices
        self._empty = base - 1  # newest that this server took part in without leading a shard

    def add(self, snapshot: Snapshot, owed: Iterable[int]) -> list[SaveSlices]:
        """Take in a shard's part; return the server's when all shards that owe one have given theirs."""
        parts = self._parts.setdefault(snapshot.step, {})
        parts[snapshot.shard] = snapshot.copied
        if not all(index in parts for index in owed):
            return []
        del self._parts[snapshot.step]
        return [SaveSlices(snapshot.step, [one for index in sorted(parts) for one in parts[index]])]

    def empty_part(self, step: int) -> list[SaveSlices]:
        """Return the (empty) part of a server that leads no shard; only once a step."""
        if step <= self._empty:
            return []
        self._empty = step
        return [SaveSlices(step, [])]


LEDGER = -1
"""What `guard` is asked for around all that is not one shard's."""


class DenseServer:
    """Everything that one server knows; see the module's docstring for who may call it when.

    Args:
        terms: what the job agreed on.
        shards: all shards of the job.
        rank: this server's.
        guard: context manager for a shard's index, or for LEDGER.
        lending: where buffers come from, and which workers read them there.
        restored: the start values come from a checkpoint (`loaded`), not from rank 0.
    """

    def __init__(
        self,
        terms: Terms,
        shards: Sequence[Shard],
        rank: int,
        guard: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
        lending: Lending | None = None,
        *,
        restored: bool = False,
    ) -> None:
        self.terms, self.rank, self.epoch = terms, rank, -1
        self.shards: dict[int, DenseShard] = {}
        self._all, self._held, self._restored = list(shards), pieces(terms.layout, shards), restored
        self._guard, self._lending = guard, lending
        self._membership = Membership.initial(terms.world, terms.base)
        self._ledger = StepLedger(self._membership, terms.base, terms.staleness if terms.update == "server" else None)
        self._rank_states = RankStates(terms.buffers)
        self._rank_states_sent_to: set[int] = set()  # servers that have all asides that are here
        self._workers: set[int] = set()  # connected
        self._servers: set[int] = set()
        self._checkpoint_parts, self._copy_budget = CheckpointParts(terms.base), CopyBudget()
        self._refused: Refused | None = None

    @property
    def leading(self) -> list[int]:
        """The shards that this server is the primary of."""
        return [index for index, mind in sorted(self.shards.items()) if mind.leads]

    @property
    def version(self) -> int:
        """The oldest version among its shards (of none: the newest that was ordered); before start values, base."""
        versions = [self.shards[index].version for index in self.leading]
        return min((self.terms.base if version is None else version for version in versions), default=self._ledger.next)

    # ---- the coordinator's word -------------------------------------------------------------------------------------

    def on_assignment(
        self, epoch: int, chains: Sequence[Sequence[int]], copies: Sequence[Sequence[int]], alive: Iterable[int]
    ) -> list[Instruction]:
        """Take over an assignment.

        Args:
            epoch: its number; an old one is ignored.
            chains: for each shard its servers, primary first.
            copies: for each shard the servers that are to be filled.
            alive: ranks of the servers that live, this one too.
        """
        if epoch <= self.epoch:
            return []
        concerned = [i for i, some in enumerate(zip(chains, copies, strict=True)) if self.rank in (*some[0], *some[1])]
        for index in concerned:
            self._shard("the coordinator", index, made=True)  # before the epoch moves on: see there
        self.epoch, living = epoch, frozenset(alive)
        outputs: list[Instruction] = []
        for index in sorted(self.shards):
            chain, filled = chains[index], copies[index]
            word = partial(DenseShard.on_assignment, epoch=epoch, chain=chain, copies=filled, alive=living.__contains__)
            outputs += self._ask_shard(index, word)
        return outputs

    def on_worker_lost(self, rank: int) -> list[Instruction]:
        """Say what is here of a dead worker, whose connection is `lost`; no more of it is agreed on before the cut."""
        with self._guard(LEDGER):
            self._ledger.hold_rank(rank)
            agreed = self._ledger.next if self.terms.staleness is not None else self.terms.base
        clocks, versions, apart = dict[int, int](), dict[int, int](), dict[int, int]()
        for index, mind in sorted(self.shards.items()):
            with self._guard(index):
                if mind.leads:
                    clocks[index] = mind.last_clock_of(rank)
                    if mind.last_separate_clock_of(rank) < clocks[index]:
                        apart[index] = mind.last_separate_clock_of(rank)
                    versions[index] = max(agreed, self.terms.base if mind.version is None else mind.version)
        with self._guard(LEDGER):
            aside = self._rank_states.newest_clock(rank) if 0 in clocks else -1
        return [HeldPushes(rank, clocks, versions, aside, apart)]

    def count_until(self, rank: int, clock: int) -> list[Instruction]:
        """Drop what a dead worker pushed after `clock`; what it ordered up to then counts as given."""
        outputs = self._ask_each(lambda mind: mind.drop_pushes_after(rank, clock))
        with self._guard(LEDGER):
            orders = self._ledger.remove_rank(rank, clock)
        return outputs + self._give_orders(orders)

    def set_members(self, clock: int, ranks: Sequence[int]) -> list[Instruction]:
        """Let these ranks, and no others, take part from `clock` on."""
        with self._guard(LEDGER):
            membership = self._membership = self._membership.changed(clock, ranks)
        outputs = self._ask_each(lambda mind: mind.set_members(membership), all_roles=True)
        with self._guard(LEDGER):
            orders = self._ledger.set_members(membership)
        return outputs + self._give_orders(orders)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def on_worker_connected(self, rank: int) -> list[Instruction]:
        """Take in that a worker connected; what came over an older connection in part is forgotten."""
        if rank not in self._membership.everyone:
            raise ProtocolError(f"worker/{rank} is none of the job's {len(self._membership.everyone)} workers")
        self.on_worker_disconnected(rank)
        self._workers.add(rank)
        told: list[Instruction] = [ToWorker(rank, Leads(self.epoch, self.leading))]
        return [*told, ToWorker(rank, self._refused)] if self._refused else told

    def on_worker_disconnected(self, rank: int) -> None:
        """Take in that a worker's connection is gone."""
        self._workers.discard(rank)
        for index, mind in list(self.shards.items()):
            with self._guard(index):
                mind.on_worker_disconnected(rank)
        with self._guard(LEDGER):
            self._rank_states.on_disconnected(rank)

    def receive_buffer_for(self, rank: int, message: FromWorker, size: int) -> memoryview | None:
        """Return where a message's payload of `size` bytes goes; None when it is not wanted.

        Raises:
            ProtocolError: the message is against the protocol; end the connection, nothing was changed.
        """
        if isinstance(message, PutRankState):
            with self._guard(LEDGER):
                return self._rank_states.receive_buffer_for(f"worker/{rank}", message, size)
        if not isinstance(message, StartValues | Push | PushPart):
            raise ProtocolError(f"worker/{rank}: {type(message).__name__} with a payload", where=f"worker/{rank}")
        mind = self.shards.get(message.shard) or self._shard(f"worker/{rank}", message.shard)
        if mind is None:
            return None
        with self._guard(message.shard):
            if isinstance(message, StartValues):
                return mind.start_values_buffer(rank, message.offset, size)
            return mind.push_buffer_for(rank, message, size)

    def on_worker_message(self, rank: int, message: FromWorker, size: int = 0, lent: Lent = None) -> list[Instruction]:
        """Take in a message whose payload, if any, stands where `place` said, or is `lent`; return what is to be done.

        Raises:
            ProtocolError: as `place`.
        """
        if self._refused is not None:
            return []
        try:
            return self._dispatch(rank, message, size, lent)
        except JobRefusal as refusal:
            return self._refuse(refusal)

    def _refuse(self, refusal: JobRefusal) -> list[Instruction]:
        self._refused = Refused(refusal.reason, refusal.hint)
        return [ToWorker(rank, self._refused) for rank in self._membership.everyone]

    def _dispatch(self, rank: int, message: FromWorker, size: int, lent: Lent) -> list[Instruction]:
        match message:
            case Push() | PushPart():
                return self._ask_if_here(rank, message.shard, lambda mind: mind.on_push(rank, message, size, lent))
            case StartValues():
                return self._ask_if_here(
                    rank, message.shard, lambda mind: mind.on_start_values(rank, message.offset, size)
                )
            case Step():
                return self._step(rank, message)
            case SaveNow():
                if not self.leading and self.terms.update == "server":
                    return [*self._checkpoint_parts.empty_part(message.version)]
                return self._ask_each(lambda mind: mind.save_version(rank, message.version))
            case Pull():
                if len(message.have) != len(message.shards):
                    raise ProtocolError(f"worker/{rank}: a pull that does not say what it has", where=f"worker/{rank}")
                asked = [
                    self._ask_if_here(rank, index, lambda mind: mind.on_pull(rank, message)) for index in message.shards
                ]
                return [output for outputs in asked for output in outputs]
            case NormsQuery():
                return self._ask_each(lambda mind: mind.on_norms_query(rank, message.clock))
            case PutRankState() | RankStateQuery():
                return self._on_rank_state(rank, message, size)
            case WaitQuery():
                return [ToWorker(rank, WaitAnswer(message.clock, self._missing_ranks(message.clock)))]

    def _step(self, rank: int, message: Step) -> list[Instruction]:
        groups = len(self.terms.layout.groups) if self.terms.update == "server" else 0
        if len(message.groups) != groups or not groups:
            what = f"ordered a step of {len(message.groups)} groups where {groups} are"
            raise ProtocolError(f"worker/{rank} {what}", where=f"worker/{rank}")
        with self._guard(LEDGER):
            orders = self._ledger.add(rank, message)
        return self._give_orders(orders)

    def _give_orders(self, orders: Sequence[tuple[int, StepOrder]]) -> list[Instruction]:
        outputs: list[Instruction] = []
        for clock, order in orders:
            if order.save and not self.leading:
                outputs += self._checkpoint_parts.empty_part(clock + 1)
            outputs += self._ask_each(partial(DenseShard.on_step_order, clock=clock, order=order))
        return outputs

    def _on_rank_state(self, rank: int, message: PutRankState | RankStateQuery, size: int) -> list[Instruction]:
        with self._guard(LEDGER):
            if isinstance(message, RankStateQuery):
                self._rank_states.on_query(rank, message)
                return [*self._rank_states.answers()]
            if not self._rank_states.add_bytes(f"worker/{rank}", message, size):
                return []
            copies = [one for to in sorted(self._rank_states_sent_to) for one in self._rank_states.copies(to, message)]
            return [*self._rank_states.answers(), *copies]

    # ---- servers ----------------------------------------------------------------------------------------------------

    def on_server_connected(self, server: int) -> list[Instruction]:
        """Take in that a connection to a server is made, whoever dialled; say again what may have been lost."""
        self._servers.add(server)
        with self._guard(LEDGER):
            self._rank_states_sent_to.discard(server)
        return self._ask_each(lambda mind: mind.on_server_connected(server), all_roles=True)

    def on_server_disconnected(self, server: int) -> list[Instruction]:
        """Take in that the connection to a server is gone."""
        self._servers.discard(server)
        return self._ask_each(lambda mind: mind.on_server_disconnected(server), all_roles=True)

    def replica_buffer_for(self, server: int, message: BetweenServers, size: int) -> memoryview | None:
        """Return where another server's payload goes; None when it is not wanted.

        Raises:
            ProtocolError: as `place`.
        """
        if isinstance(message, PutRankState):
            with self._guard(LEDGER):
                return self._rank_states.receive_buffer_for(f"server/{server}", message, size)
        mind = self._shard(f"server/{server}", message.shard, made=True)
        assert mind is not None, "it was made"
        with self._guard(message.shard):
            return mind.replica_buffer_for(server, message, size)

    def on_server_message(self, server: int, message: BetweenServers, size: int = 0) -> list[Instruction]:
        """Take in what another server said; a payload, if any, stands where `place_from` said.

        Raises:
            ProtocolError: as `place`.
        """
        if isinstance(message, PutRankState):
            with self._guard(LEDGER):
                if not self._rank_states.add_bytes(f"server/{server}", message, size):
                    return []
                return [
                    one for to in sorted(self._rank_states_sent_to) for one in self._rank_states.copies(to, message)
                ]
        try:
            return self._ask_shard(message.shard, lambda mind: mind.on_server_message(server, message, size))
        except JobRefusal as refusal:
            return self._refuse(refusal)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def on_loaded(self, loadings: Mapping[int, ShardLoading]) -> list[Instruction]:
        """Take over what a checkpoint held, by shard."""
        found = [self._ask_shard(index, partial(DenseShard.on_loaded, loading=one)) for index, one in loadings.items()]
        return [output for outputs in found for output in outputs]

    def _gather_checkpoint(self, outputs: Sequence[Output]) -> list[Instruction]:
        """Pass all on; turn the last shard's snapshot of a step into one Save."""
        instructions: list[Instruction] = []
        for output in outputs:
            if not isinstance(output, Snapshot):
                instructions.append(output)
                continue
            with self._guard(LEDGER):
                owed = [index for index in self.leading if self.shards[index].led_from < output.step]
                instructions += self._checkpoint_parts.add(output, owed)
        return instructions

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _shard(self, who: str, index: int, *, made: bool = False) -> DenseShard | None:
        """Return a shard's mind, made when it is asked for; None when it is not here.

        One that is made knows the newest assignment, in which it is nothing: it waits for the next one.
        """
        if not 0 <= index < len(self._all):
            raise ProtocolError(f"{who} named shard {index}, of which there are {len(self._all)}", where=who)
        if index in self.shards or not made:
            return self.shards.get(index)
        with self._guard(LEDGER):
            found = DenseShard(
                self.terms, self._all[index], self._held[index], self.rank, self._servers.__contains__,
                self._membership, self.epoch, self._copy_budget, self._lending, restored=self._restored,
            )  # fmt: skip
            self.shards = {**self.shards, index: self.shards.get(index, found)}
        return self.shards[index]

    def _ask_if_here(self, rank: int, index: int, ask: Callable[[DenseShard], list[Output]]) -> list[Instruction]:
        return self._ask_shard(index, ask) if index in self.shards or self._shard(f"worker/{rank}", index) else []

    def _ask_each(self, ask: Callable[[DenseShard], list[Output]], *, all_roles: bool = False) -> list[Instruction]:
        asked = [self._ask_shard(index, ask) for index, mind in sorted(self.shards.items()) if mind.leads or all_roles]
        return [output for outputs in asked for output in outputs]

    def _ask_shard(self, index: int, ask: Callable[[DenseShard], list[Output]]) -> list[Instruction]:
        """Ask one shard; see to what changes when it comes to be led here, or is not held any more."""
        mind = self.shards.get(index) or self._shard("the coordinator", index, made=True)
        assert mind is not None, "it was made"
        with self._guard(index):
            led, before = mind.chain.leads, mind.chain.role
            found = ask(mind)
            leads, role, followers = mind.chain.leads, mind.chain.role, mind.chain.followers.keys()
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
        """Give a shard what is agreed on already, and tell the workers."""
        with self._guard(LEDGER):
            agreed = list(self._ledger.agreed.items())
        outputs: list[Instruction] = [ToWorker(rank, Leads(self.epoch, [index])) for rank in sorted(self._workers)]
        for clock, order in agreed:
            outputs += self._ask_shard(index, partial(DenseShard.on_step_order, clock=clock, order=order))
        return outputs

    def _missing_ranks(self, clock: int) -> list[int]:
        ranks: set[int] = set()
        for index, mind in list(self.shards.items()):
            with self._guard(index):
                ranks.update(mind.missing_ranks(clock))
        with self._guard(LEDGER):
            ranks.update(self._ledger.missing_ranks(clock - (self.terms.staleness or 0) - 1))
        return sorted(ranks)
