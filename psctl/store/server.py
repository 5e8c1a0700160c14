"""The mind of a server: messages of workers in, messages and checkpoint parts out; it never waits and knows no network.

It owns one ShardMind a shard (what happens within a shard stands there) and the ledger of step orders: a clock may be
applied only when every rank has ordered it with the same numbers. Rank 0's count; a rank that differs is told to all as
Refused, naming group, key and both values, and from then on nothing is applied any more.

Locking. The mind takes `guard(shard)` around each call into one shard and `guard(LEDGER)` around the ledger; it never
holds two at once. A shell with many threads hands in real locks, a test none. What comes back may be sent after the
guard is let go: bytes that are on their way are never written to (shard.py, "No torn reads").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from psctl.errors import ProtocolError
from psctl.store.messages import (
    Because,
    Begin,
    FromWorker,
    Norms,
    Pull,
    Push,
    PushPart,
    Refused,
    SaveNow,
    Step,
    Why,
)
from psctl.store.pieces import pieces
from psctl.store.shard import Order, Output, Refusal, Send, ShardMind, Snapshot, Terms
from psctl.store.snapshot import Copied, Loading
from psctl.words import Number, Shard

LEDGER = -1
"""What `guard` is asked for around the ledger of step orders and the gathering of checkpoint parts."""


class Save(msgspec.Struct, frozen=True):
    """An instruction: send these slices to the coordinator as this server's part of the checkpoint of `step`."""

    step: int
    copied: list[Copied]


Instruction = Send | Save


class Ledger:
    """Step orders until all ranks agree on a clock's."""

    def __init__(self, world: int, first: int) -> None:
        self._world, self.next = world, first
        self._steps: dict[int, dict[int, Step]] = {}

    def add(self, rank: int, step: Step) -> Order | None:
        """Take in a rank's order; return what is to be done once the last rank has ordered the same.

        Raises:
            Refusal: two ranks differ; the user's fault.
        """
        if step.clock < self.next:
            return None  # sent again after a broken connection
        steps = self._steps.setdefault(step.clock, {})
        steps[rank] = step
        for other, theirs in sorted(steps.items()):
            if 0 in steps:
                _compare(steps[0], other, theirs)
        if len(steps) < self._world:
            return None
        del self._steps[step.clock]
        self.next = step.clock + 1
        return Order(steps[0].groups, steps[0].scale, steps[0].save)

    def missing(self, clock: int) -> list[int]:
        """Return the ranks that have not ordered `clock`."""
        if clock < self.next:
            return []
        return [rank for rank in range(self._world) if rank not in self._steps.get(clock, {})]


def _compare(first: Step, rank: int, other: Step) -> None:
    """Raise Refusal when a rank's order is not rank 0's."""
    hint = "let every rank set the same numbers: schedulers and hand-made changes must not depend on the rank"
    for index, (ours, theirs) in enumerate(zip(first.groups, other.groups, strict=True)):
        for key in sorted({*ours, *theirs}):
            if not _same(ours.get(key), theirs.get(key)):
                what = f"group {index}: {key} is {ours.get(key)!r} on worker/0 and {theirs.get(key)!r} on worker/{rank}"
                raise Refusal(f"optimizer {what} (clock {first.clock})", hint)
    if not _same(first.scale, other.scale):
        what = f"worker/0 scales the gradient by {first.scale!r}, worker/{rank} by {other.scale!r}"
        raise Refusal(f"{what} (clock {first.clock})", "clip on every rank, with the same bound")


def _same(a: Number, b: Number) -> bool:
    return a == b or (a != a and b != b)  # not-a-number equals itself here


class ServerMind:
    """Everything that one server knows; see the module's docstring for who may call it when.

    Args:
        terms: what the job agreed on.
        shards: all shards of the job.
        owners: for each shard the rank of the server that holds it.
        rank: this server's.
        guard: context manager for a shard's index, or for LEDGER.
        restored: the start values come from a checkpoint (`loaded`), not from rank 0.
    """

    def __init__(
        self,
        terms: Terms,
        shards: Sequence[Shard],
        owners: Sequence[int],
        rank: int,
        guard: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
        *,
        restored: bool = False,
    ) -> None:
        held = pieces(terms.layout, shards)
        self.terms = terms
        self.shards = {
            shard.index: ShardMind(terms, shard, held[shard.index], restored=restored)
            for shard, owner in zip(shards, owners, strict=True)
            if owner == rank
        }
        self._guard = guard
        self._ledger = Ledger(terms.world, terms.base)
        self._gathered: dict[int, dict[int, list[Copied]]] = {}  # step -> shard -> slices
        self._saved = terms.base - 1  # newest checkpoint that a server without shards took part in
        self._refused: Refused | None = None

    def place(self, rank: int, message: FromWorker, size: int) -> memoryview | None:
        """Return where a message's payload of `size` bytes goes; None when it is not wanted.

        Raises:
            ProtocolError: the message is against the protocol; end the connection, nothing was changed.
        """
        if isinstance(message, Begin):
            with self._guard(message.shard):
                return self._shard(rank, message.shard).place_begin(rank, message.offset, size)
        if isinstance(message, Push | PushPart):
            with self._guard(message.shard):
                return self._shard(rank, message.shard).place(rank, message, size)
        raise ProtocolError(f"worker/{rank}: {type(message).__name__} with a payload", where=f"worker/{rank}")

    def received(self, rank: int, message: FromWorker, size: int = 0) -> list[Instruction]:
        """Take in a message whose payload, if any, stands where `place` said; return what is to be sent.

        Raises:
            ProtocolError: as `place`.
        """
        try:
            return self._taken_in(rank, message, size)
        except Refusal as refusal:
            self._refused = Refused(refusal.reason, refusal.hint)
            return [Send(other, self._refused) for other in range(self.terms.world)]

    def joined(self, rank: int) -> list[Instruction]:
        """Take in that a worker connected."""
        if not 0 <= rank < self.terms.world:
            raise ProtocolError(f"worker/{rank} is none of the job's {self.terms.world} workers")
        return [Send(rank, self._refused)] if self._refused else []

    def lost(self, rank: int) -> None:
        """Take in that a worker's connection is gone."""
        for index, shard in self.shards.items():
            with self._guard(index):
                shard.lost(rank)

    def loaded(self, loadings: dict[int, Loading]) -> list[Instruction]:
        """Take over what a checkpoint held, by shard."""
        outputs: list[Instruction] = []
        for index, loading in loadings.items():
            with self._guard(index):
                found = self.shards[index].loaded(loading)
            outputs += self._gather(found)
        return outputs

    @property
    def version(self) -> int:
        """The oldest version among the shards (of none: the newest that was ordered); before the start values, base."""
        versions = [shard.version for shard in self.shards.values()]
        return min((self.terms.base if version is None else version for version in versions), default=self._ledger.next)

    def _taken_in(self, rank: int, message: FromWorker, size: int) -> list[Instruction]:
        if self._refused is not None:
            return []
        match message:
            case Push() | PushPart():
                with self._guard(message.shard):
                    found = self._shard(rank, message.shard).pushed(rank, message, size)
                return self._gather(found)
            case Begin():
                with self._guard(message.shard):
                    found = self._shard(rank, message.shard).begun(rank, message.offset, size)
                return self._gather(found)
            case Step():
                return self._step(rank, message)
            case SaveNow():
                if not self.shards and self.terms.update == "server":
                    return self._save_nothing(message.version)
                return self._each(rank, list(self.shards), lambda shard: shard.save(rank, message.version))
            case Pull():
                return self._each(rank, message.shards, lambda shard: shard.pull(rank, message.clock))
            case Norms():
                return self._each(rank, list(self.shards), lambda shard: shard.norms(rank, message.clock))
            case Why():
                return [Send(rank, Because(message.clock, self._missing(message.clock)))]

    def _each(self, rank: int, shards: list[int], ask: Callable[[ShardMind], list[Output]]) -> list[Instruction]:
        outputs: list[Instruction] = []
        for index in shards:
            with self._guard(index):
                found = ask(self._shard(rank, index))
            outputs += self._gather(found)
        return outputs

    def _step(self, rank: int, message: Step) -> list[Instruction]:
        groups = self.terms.layout.groups
        if self.terms.update != "server" or len(message.groups) != len(groups):
            raise ProtocolError(f"worker/{rank} ordered a step of {len(message.groups)} groups where {len(groups)} are")
        with self._guard(LEDGER):
            order = self._ledger.add(rank, message)
        if order is None:
            return []
        if order.save and not self.shards:
            return self._save_nothing(message.clock + 1)
        return self._each(rank, list(self.shards), lambda shard: shard.ordered(message.clock, order))

    def _save_nothing(self, step: int) -> list[Instruction]:
        """A server without shards has its (empty) part of a checkpoint at once; only once."""
        with self._guard(LEDGER):
            new = step > self._saved
            self._saved = max(self._saved, step)
        return [Save(step, [])] if new else []

    def _gather(self, outputs: Sequence[Output]) -> list[Instruction]:
        """Pass messages on; turn the last shard's snapshot of a step into one Save."""
        instructions: list[Instruction] = []
        for output in outputs:
            if isinstance(output, Send):
                instructions.append(output)
                continue
            with self._guard(LEDGER):
                whole = self._complete(output)
            if whole is not None:
                instructions.append(whole)
        return instructions

    def _complete(self, snapshot: Snapshot) -> Save | None:
        parts = self._gathered.setdefault(snapshot.step, {})
        parts[snapshot.shard] = snapshot.copied
        if len(parts) < len(self.shards):
            return None
        del self._gathered[snapshot.step]
        return Save(snapshot.step, [copied for index in sorted(parts) for copied in parts[index]])

    def _missing(self, clock: int) -> list[int]:
        ranks: set[int] = set()
        for index, shard in self.shards.items():
            with self._guard(index):
                ranks.update(shard.missing(clock))
        if self.terms.update == "server":
            with self._guard(LEDGER):
                ranks.update(self._ledger.missing(clock - self.terms.staleness - 1))
        return sorted(ranks)

    def _shard(self, rank: int, index: int) -> ShardMind:
        found = self.shards.get(index)
        if found is None:
            raise ProtocolError(f"worker/{rank} named shard {index}, which this server does not hold")
        return found
