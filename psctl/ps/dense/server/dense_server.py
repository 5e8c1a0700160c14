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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from psctl.errors import ProtocolError
from psctl.ps.dense.clock_ledger import Ledger, Membership, Order, Refusal
from psctl.ps.dense.lent_buffers import Lending, Lent
from psctl.ps.dense.rank_state_store import Asides
from psctl.ps.dense.server.checkpoint_parts import Gathering
from psctl.ps.dense.server.dense_shard import ShardMind
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import (
    Aside,
    AsideOf,
    Because,
    Begin,
    Between,
    FromWorker,
    Leads,
    Norms,
    Pull,
    Push,
    PushPart,
    Refused,
    SaveNow,
    Step,
    Why,
)
from psctl.ps.outputs import Held, Instruction, Output, Send, Snapshot
from psctl.ps.pieces import pieces
from psctl.ps.replication.chain_entries import Copying
from psctl.ps.snapshot import Loading
from psctl.types import Shard

LEDGER = -1
"""What `guard` is asked for around all that is not one shard's."""


class ServerMind:
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
        self.shards: dict[int, ShardMind] = {}
        self._all, self._held, self._restored = list(shards), pieces(terms.layout, shards), restored
        self._guard, self._lending = guard, lending
        self._membership = Membership.first(terms.world, terms.base)
        self._ledger = Ledger(self._membership, terms.base, terms.staleness if terms.update == "server" else None)
        self._asides = Asides(terms.buffers)
        self._aside_to: set[int] = set()  # servers that have all asides that are here
        self._workers: set[int] = set()  # connected
        self._servers: set[int] = set()
        self._gathering, self._copying = Gathering(terms.base), Copying()
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

    def assigned(
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
            word = partial(ShardMind.assigned, epoch=epoch, chain=chain, copies=filled, alive=living.__contains__)
            outputs += self._to(index, word)
        return outputs

    def gone(self, rank: int) -> list[Instruction]:
        """Say what is here of a dead worker, whose connection is `lost`; no more of it is agreed on before the cut."""
        with self._guard(LEDGER):
            self._ledger.hold(rank)
            agreed = self._ledger.next if self.terms.staleness is not None else self.terms.base
        clocks, versions, apart = dict[int, int](), dict[int, int](), dict[int, int]()
        for index, mind in sorted(self.shards.items()):
            with self._guard(index):
                if mind.leads:
                    clocks[index] = mind.held_of(rank)
                    if mind.apart_of(rank) < clocks[index]:
                        apart[index] = mind.apart_of(rank)
                    versions[index] = max(agreed, self.terms.base if mind.version is None else mind.version)
        with self._guard(LEDGER):
            aside = self._asides.newest(rank) if 0 in clocks else -1
        return [Held(rank, clocks, versions, aside, apart)]

    def count_until(self, rank: int, clock: int) -> list[Instruction]:
        """Drop what a dead worker pushed after `clock`; what it ordered up to then counts as given."""
        outputs = self._each(lambda mind: mind.cut(rank, clock))
        with self._guard(LEDGER):
            orders = self._ledger.left(rank, clock)
        return outputs + self._order(orders)

    def members(self, clock: int, ranks: Sequence[int]) -> list[Instruction]:
        """Let these ranks, and no others, take part from `clock` on."""
        with self._guard(LEDGER):
            membership = self._membership = self._membership.changed(clock, ranks)
        outputs = self._each(lambda mind: mind.members(membership), all_roles=True)
        with self._guard(LEDGER):
            orders = self._ledger.changed(membership)
        return outputs + self._order(orders)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def joined(self, rank: int) -> list[Instruction]:
        """Take in that a worker connected; what came over an older connection in part is forgotten."""
        if rank not in self._membership.everyone:
            raise ProtocolError(f"worker/{rank} is none of the job's {len(self._membership.everyone)} workers")
        self.lost(rank)
        self._workers.add(rank)
        told: list[Instruction] = [Send(rank, Leads(self.epoch, self.leading))]
        return [*told, Send(rank, self._refused)] if self._refused else told

    def lost(self, rank: int) -> None:
        """Take in that a worker's connection is gone."""
        self._workers.discard(rank)
        for index, mind in list(self.shards.items()):
            with self._guard(index):
                mind.lost(rank)
        with self._guard(LEDGER):
            self._asides.lost(rank)

    def place(self, rank: int, message: FromWorker, size: int) -> memoryview | None:
        """Return where a message's payload of `size` bytes goes; None when it is not wanted.

        Raises:
            ProtocolError: the message is against the protocol; end the connection, nothing was changed.
        """
        if isinstance(message, Aside):
            with self._guard(LEDGER):
                return self._asides.place(f"worker/{rank}", message, size)
        if not isinstance(message, Begin | Push | PushPart):
            raise ProtocolError(f"worker/{rank}: {type(message).__name__} with a payload", where=f"worker/{rank}")
        mind = self.shards.get(message.shard) or self._shard(f"worker/{rank}", message.shard)
        if mind is None:
            return None
        with self._guard(message.shard):
            if isinstance(message, Begin):
                return mind.place_begin(rank, message.offset, size)
            return mind.place(rank, message, size)

    def received(self, rank: int, message: FromWorker, size: int = 0, lent: Lent = None) -> list[Instruction]:
        """Take in a message whose payload, if any, stands where `place` said, or is `lent`; return what is to be done.

        Raises:
            ProtocolError: as `place`.
        """
        if self._refused is not None:
            return []
        try:
            return self._taken_in(rank, message, size, lent)
        except Refusal as refusal:
            return self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> list[Instruction]:
        self._refused = Refused(refusal.reason, refusal.hint)
        return [Send(rank, self._refused) for rank in self._membership.everyone]

    def _taken_in(self, rank: int, message: FromWorker, size: int, lent: Lent) -> list[Instruction]:
        match message:
            case Push() | PushPart():
                return self._for(rank, message.shard, lambda mind: mind.pushed(rank, message, size, lent))
            case Begin():
                return self._for(rank, message.shard, lambda mind: mind.begun(rank, message.offset, size))
            case Step():
                return self._step(rank, message)
            case SaveNow():
                if not self.leading and self.terms.update == "server":
                    return [*self._gathering.nothing(message.version)]
                return self._each(lambda mind: mind.save(rank, message.version))
            case Pull():
                if len(message.have) != len(message.shards):
                    raise ProtocolError(f"worker/{rank}: a pull that does not say what it has", where=f"worker/{rank}")
                asked = [self._for(rank, index, lambda mind: mind.pull(rank, message)) for index in message.shards]
                return [output for outputs in asked for output in outputs]
            case Norms():
                return self._each(lambda mind: mind.norms(rank, message.clock))
            case Aside() | AsideOf():
                return self._aside(rank, message, size)
            case Why():
                return [Send(rank, Because(message.clock, self._missing(message.clock)))]

    def _step(self, rank: int, message: Step) -> list[Instruction]:
        groups = len(self.terms.layout.groups) if self.terms.update == "server" else 0
        if len(message.groups) != groups or not groups:
            what = f"ordered a step of {len(message.groups)} groups where {groups} are"
            raise ProtocolError(f"worker/{rank} {what}", where=f"worker/{rank}")
        with self._guard(LEDGER):
            orders = self._ledger.add(rank, message)
        return self._order(orders)

    def _order(self, orders: Sequence[tuple[int, Order]]) -> list[Instruction]:
        outputs: list[Instruction] = []
        for clock, order in orders:
            if order.save and not self.leading:
                outputs += self._gathering.nothing(clock + 1)
            outputs += self._each(partial(ShardMind.ordered, clock=clock, order=order))
        return outputs

    def _aside(self, rank: int, message: Aside | AsideOf, size: int) -> list[Instruction]:
        with self._guard(LEDGER):
            if isinstance(message, AsideOf):
                self._asides.wish(rank, message)
                return [*self._asides.answers()]
            if not self._asides.filled(f"worker/{rank}", message, size):
                return []
            copies = [one for to in sorted(self._aside_to) for one in self._asides.copies(to, message)]
            return [*self._asides.answers(), *copies]

    # ---- servers ----------------------------------------------------------------------------------------------------

    def server_joined(self, server: int) -> list[Instruction]:
        """Take in that a connection to a server is made, whoever dialled; say again what may have been lost."""
        self._servers.add(server)
        with self._guard(LEDGER):
            self._aside_to.discard(server)
        return self._each(lambda mind: mind.server_joined(server), all_roles=True)

    def server_lost(self, server: int) -> list[Instruction]:
        """Take in that the connection to a server is gone."""
        self._servers.discard(server)
        return self._each(lambda mind: mind.server_lost(server), all_roles=True)

    def place_from(self, server: int, message: Between, size: int) -> memoryview | None:
        """Return where another server's payload goes; None when it is not wanted.

        Raises:
            ProtocolError: as `place`.
        """
        if isinstance(message, Aside):
            with self._guard(LEDGER):
                return self._asides.place(f"server/{server}", message, size)
        mind = self._shard(f"server/{server}", message.shard, made=True)
        assert mind is not None, "it was made"
        with self._guard(message.shard):
            return mind.place_from(server, message, size)

    def received_from(self, server: int, message: Between, size: int = 0) -> list[Instruction]:
        """Take in what another server said; a payload, if any, stands where `place_from` said.

        Raises:
            ProtocolError: as `place`.
        """
        if isinstance(message, Aside):
            with self._guard(LEDGER):
                if not self._asides.filled(f"server/{server}", message, size):
                    return []
                return [one for to in sorted(self._aside_to) for one in self._asides.copies(to, message)]
        try:
            return self._to(message.shard, lambda mind: mind.received_from(server, message, size))
        except Refusal as refusal:
            return self._refuse(refusal)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def loaded(self, loadings: Mapping[int, Loading]) -> list[Instruction]:
        """Take over what a checkpoint held, by shard."""
        found = [self._to(index, partial(ShardMind.loaded, loading=one)) for index, one in loadings.items()]
        return [output for outputs in found for output in outputs]

    def _gather(self, outputs: Sequence[Output]) -> list[Instruction]:
        """Pass all on; turn the last shard's snapshot of a step into one Save."""
        instructions: list[Instruction] = []
        for output in outputs:
            if not isinstance(output, Snapshot):
                instructions.append(output)
                continue
            with self._guard(LEDGER):
                owed = [index for index in self.leading if self.shards[index].led_from < output.step]
                instructions += self._gathering.add(output, owed)
        return instructions

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _shard(self, who: str, index: int, *, made: bool = False) -> ShardMind | None:
        """Return a shard's mind, made when it is asked for; None when it is not here.

        One that is made knows the newest assignment, in which it is nothing: it waits for the next one.
        """
        if not 0 <= index < len(self._all):
            raise ProtocolError(f"{who} named shard {index}, of which there are {len(self._all)}", where=who)
        if index in self.shards or not made:
            return self.shards.get(index)
        with self._guard(LEDGER):
            found = ShardMind(
                self.terms, self._all[index], self._held[index], self.rank, self._servers.__contains__,
                self._membership, self.epoch, self._copying, self._lending, restored=self._restored,
            )  # fmt: skip
            self.shards = {**self.shards, index: self.shards.get(index, found)}
        return self.shards[index]

    def _for(self, rank: int, index: int, ask: Callable[[ShardMind], list[Output]]) -> list[Instruction]:
        return self._to(index, ask) if index in self.shards or self._shard(f"worker/{rank}", index) else []

    def _each(self, ask: Callable[[ShardMind], list[Output]], *, all_roles: bool = False) -> list[Instruction]:
        asked = [self._to(index, ask) for index, mind in sorted(self.shards.items()) if mind.leads or all_roles]
        return [output for outputs in asked for output in outputs]

    def _to(self, index: int, ask: Callable[[ShardMind], list[Output]]) -> list[Instruction]:
        """Ask one shard; see to what changes when it comes to be led here, or is not held any more."""
        mind = self.shards.get(index) or self._shard("the coordinator", index, made=True)
        assert mind is not None, "it was made"
        with self._guard(index):
            led, before = mind.chain.leads, mind.chain.role
            found = ask(mind)
            leads, role, followers = mind.chain.leads, mind.chain.role, mind.chain.followers.keys()
        outputs = self._gather(found)
        if leads and not led:
            outputs += self._now_leads(index)
        if role == "none" and before != "none":
            self.shards = {other: one for other, one in self.shards.items() if other != index}
        if index == 0 and followers != self._aside_to:
            with self._guard(LEDGER):
                for server in sorted(followers - self._aside_to):
                    if server in self._servers:
                        outputs += self._asides.copies(server)
                self._aside_to = followers & self._servers
        return outputs

    def _now_leads(self, index: int) -> list[Instruction]:
        """Give a shard what is agreed on already, and tell the workers."""
        with self._guard(LEDGER):
            agreed = list(self._ledger.agreed.items())
        outputs: list[Instruction] = [Send(rank, Leads(self.epoch, [index])) for rank in sorted(self._workers)]
        for clock, order in agreed:
            outputs += self._to(index, partial(ShardMind.ordered, clock=clock, order=order))
        return outputs

    def _missing(self, clock: int) -> list[int]:
        ranks: set[int] = set()
        for index, mind in list(self.shards.items()):
            with self._guard(index):
                ranks.update(mind.missing(clock))
        with self._guard(LEDGER):
            ranks.update(self._ledger.missing(clock - (self.terms.staleness or 0) - 1))
        return sorted(ranks)
