"""What a worker pushes and orders: kept until Pushed, sent again when asked, in its host's sum where that can be.

A push leaves on this worker's own connection, straight out of its send buffer, or it goes together with those of other
workers of the host (host_collection.py). What is said again is always this worker's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.client.host_collection import Act, Apart, Collecting, Gather, Tell
from psctl.ps.dense.client.send_buffers import Sending
from psctl.ps.dense.client.shard_routes import Route
from psctl.ps.dense.client.unacked_pushes import Outbox
from psctl.ps.dense.host_sums import Part, joint_weight
from psctl.ps.dense.lent_buffers import Lending, Lent
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import LARGE, Alone, Beside, FromWorker, HandIn, Place, Push, PushPart, Step
from psctl.ps.pieces import Piece, bytes_view, torch_dtype
from psctl.types import Number, Shard


class Out(msgspec.Struct, frozen=True):
    """An instruction: send this to server `server`; the payload must not be copied before it is sent."""

    server: int
    message: FromWorker
    payload: memoryview | None = None


Say = Out | Tell | Gather
"""What a mind has done: sent to a server, told a worker of this host, summed."""


class Pushing:
    """One worker's pushes and step orders. Calls must not overlap.

    Args:
        terms: what the job agreed on.
        shards: all of them, by index.
        held: their pieces.
        rank: this worker's.
        route: who leads which shard.
        lending: where send buffers come from, and which servers read them there.
        landed: tells the newest version of a shard that is whole in this worker's own memory.
    """

    def __init__(
        self,
        terms: Terms,
        shards: Sequence[Shard],
        held: Sequence[Sequence[Piece]],
        rank: int,
        route: Route,
        lending: Lending,
        landed: Callable[[int], int],
    ) -> None:
        self.sending = Sending(terms, shards, held, rank, lending)
        self._ordered = terms.update == "server"
        self.outbox = Outbox(route, ordered=self._ordered)
        self._shards, self._held, self._rank = shards, held, rank
        self._route, self._lending, self._landed = route, lending, landed
        self._pushed = [terms.base - 1] * len(shards)
        group = next((group for group in terms.hosts if rank in group), ())
        self._together = Collecting(rank, group, len(shards), terms.base, self.sending.room) if group else None

    # ---- out ------------------------------------------------------------------------------------------------------

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float) -> list[Say]:
        """Push a shard's gradients, which stand in the send buffer of `clock`, or were coded."""
        assert len(present) == len(self._held[shard]), f"shard {shard} has {len(self._held[shard])} pieces"
        assert clock == self._pushed[shard] + 1, f"shard {shard}: push of clock {clock} after {self._pushed[shard]}"
        self._pushed[shard] = clock
        size = self.sending.size(clock, shard)
        head = Push(shard, clock, float(weight), bytes(map(bool, present)), self._landed(shard), size=size)
        self.outbox.push(head)
        if self._together is None:
            return self._alone(head)
        part = Part(self._rank, head.weight, head.present, self.sending.of(clock, shard)[0])
        acts = self._together.push(shard, clock, part, self._readable(head))
        if not any(isinstance(act, Apart) for act in acts):
            self.outbox.beside(clock, shard)
        return self._do(acts)

    def _readable(self, head: Push) -> Place | None:
        """Return where others of this host read what is to go together with theirs; None where it goes alone: to a
        server that reads it there itself, or that is not heard of."""
        owner, (flat, _) = self._route.owners[head.shard], self.sending.of(head.clock, head.shard)
        if head.shard in self._route.shut or head.landed < head.clock or self._lending.place(owner, flat):
            return None
        return self._lending.where(flat)

    def _alone(self, head: Push) -> list[Say]:
        """Push this worker's own gradients, where their server is ready."""
        if head.shard in self._route.shut:
            return []
        owner = self._route.owners[head.shard]
        if not any(head.present):
            return [Out(owner, head)]
        flat, view = self.sending.of(head.clock, head.shard)
        if lent := self._lending.place(owner, flat):
            return [Out(owner, msgspec.structs.replace(head, at=lent))]
        return self._bytes_of(head, view)

    def _bytes_of(self, head: Push, view: memoryview) -> list[Say]:
        owner, offsets = self._route.owners[head.shard], range(LARGE, len(view), LARGE)
        parts = [Out(owner, PushPart(head.shard, head.clock, at), view[at : at + LARGE]) for at in offsets]
        return [Out(owner, head, view[:LARGE] or None), *parts]

    def step(self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None, save: bool) -> list[Say]:
        """Order the step of `clock`."""
        self.outbox.step(Step(clock, [dict(group) for group in groups], scale, save))
        return self.orders()

    def orders(self) -> list[Say]:
        """Send the orders that may leave now."""
        return [Out(server, step) for server, step in self.outbox.orders()] if self._ordered else []

    # ---- servers --------------------------------------------------------------------------------------------------

    def again(self, shard: int) -> list[Say]:
        """Send all of a shard that is not Pushed: its server is ready."""
        said: list[Say] = [*self.lost(shard)]
        for push in self.outbox.again(shard):
            said += self._alone(msgspec.structs.replace(push, landed=self._landed(shard)))
        return said

    def lost(self, shard: int) -> Sequence[Tell]:
        """Take in that a shard's server is gone, or is another: what is outstanding goes alone, to whoever leads."""
        return self._together.again(shard) if self._together is not None else []

    def taken(self, clock: int, shard: int) -> list[Say]:
        """Take in that the push is whole at its primary."""
        self.outbox.taken(clock, shard)
        return self._over(clock, shard)

    def pushed(self, clock: int, shard: int) -> list[Say]:
        """Take in that a shard's pushes up to `clock` are on all of its chain."""
        self.outbox.pushed(clock, shard)
        return self._over(clock, shard)

    def _over(self, clock: int, shard: int) -> list[Say]:
        if self._together is not None:
            self._together.taken(shard, clock)
        return self.orders()

    # ---- others of this host --------------------------------------------------------------------------------------

    def line_up(self, rank: int) -> list[Say]:
        """Take in that there is a line to a worker of this host."""
        return self._do(self._together.up(rank, self.outbox.outstanding)) if self._together is not None else []

    def line_down(self, rank: int) -> list[Say]:
        """Take in that the line to a worker of this host is broken."""
        return self._do(self._together.down(rank)) if self._together is not None else []

    def beside(self, rank: int, message: Beside, data: Lent) -> list[Say]:
        """Take in what a worker of this host says; `data`: what it hands in, None where that cannot be read.

        Raises:
            ProtocolError: there is no such shard, or we do not go together; the worker's fault.
        """
        if self._together is None or not 0 <= message.shard < len(self._shards):
            raise ProtocolError(f"worker/{rank}: speaks of shard {message.shard}", where=f"worker/{rank}")
        shard, clock = message.shard, message.clock
        if isinstance(message, Alone):
            return self._do(self._together.alone(rank, shard, clock))
        part = self._part(rank, message, data)
        if part is None:
            return self._do([Tell(rank, Alone(shard, clock)), *self._together.alone(rank, shard, clock)])
        return self._do(self._together.handed_in(shard, clock, part))

    def _part(self, rank: int, message: HandIn, data: Lent) -> Part | None:
        """Return what was handed in; None where it is not what this shard's gradients are."""
        one, held = self._shards[message.shard], self._held[message.shard]
        dtype = torch_dtype(one.dtype)
        fits = data is not None and len(data) == len(one.range) * dtype.itemsize
        known = len(message.present) == len(held) and not message.present.strip(b"\x00\x01")
        good = math.isfinite(message.weight) and message.weight >= 0
        if data is None or not (fits and known and good) or message.at.offset % dtype.itemsize:
            return None
        return Part(rank, message.weight, message.present, torch.frombuffer(data, dtype=dtype))

    def summed(self, gather: Gather, present: bytes) -> list[Say]:
        """Take in that a host's sum is made, in `gather.into`; `present`: which pieces are in it."""
        shard, clock = gather.shard, gather.clock
        if self._together is None or not self._together.summed(shard, clock):
            return []
        own = self.outbox.untaken(clock, shard)
        assert own is not None, "when it is Taken, or its server is lost, there is nothing to sum any more"
        weight, ranks = joint_weight(part.weight for part in gather.parts), tuple(part.rank for part in gather.parts)
        head = msgspec.structs.replace(own, weight=weight, present=present, covers=ranks)
        view = bytes_view(gather.into) if any(present) else memoryview(b"")
        return [*self._bytes_of(head, view), *self.orders()]

    def _do(self, acts: Sequence[Act]) -> list[Say]:
        said: list[Say] = []
        for act in acts:
            if not isinstance(act, Apart):
                said.append(act)
                continue
            self.outbox.alone(act.clock, act.shard)
            if own := self.outbox.untaken(act.clock, act.shard):
                said += self._alone(own)
        return said + self.orders()
