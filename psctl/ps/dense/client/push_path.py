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
from psctl.ps.dense.client.host_collection import Act, HostCollection, HostSumTask, SeparatePush, ToPeer
from psctl.ps.dense.client.send_buffers import SendBuffers
from psctl.ps.dense.client.unacked_pushes import ShardRoutes, UnackedPushes
from psctl.ps.dense.host_sums import RankGradients, joint_weight
from psctl.ps.dense.lent_buffers import Lending, Lent
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import LARGE, BetweenPeers, HostPush, Push, PushAlone, PushPart, SharedRange, Step
from psctl.ps.outputs import ToServer
from psctl.ps.pieces import Piece, bytes_view, torch_dtype
from psctl.types import Number, Shard

ClientOutput = ToServer | ToPeer | HostSumTask
"""What a mind has done: sent to a server, told a worker of this host, summed."""


class PushPath:
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
        route: ShardRoutes,
        lending: Lending,
        landed: Callable[[int], int],
    ) -> None:
        self.buffers = SendBuffers(terms, shards, held, rank, lending)
        self._ordered = terms.update == "server"
        self.outbox = UnackedPushes(route, ordered=self._ordered)
        self._shards, self._held, self._rank = shards, held, rank
        self._route, self._lending, self._landed = route, lending, landed
        self._pushed = [terms.base - 1] * len(shards)
        group = next((group for group in terms.hosts if rank in group), ())
        self._host = HostCollection(rank, group, len(shards), terms.base, self.buffers.sum_buffer) if group else None

    # ---- out ------------------------------------------------------------------------------------------------------

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float) -> list[ClientOutput]:
        """Push a shard's gradients, which stand in the send buffer of `clock`, or were coded."""
        assert len(present) == len(self._held[shard]), f"shard {shard} has {len(self._held[shard])} pieces"
        assert clock == self._pushed[shard] + 1, f"shard {shard}: push of clock {clock} after {self._pushed[shard]}"
        self._pushed[shard] = clock
        size = self.buffers.code_size(clock, shard)
        head = Push(shard, clock, float(weight), bytes(map(bool, present)), self._landed(shard), size=size)
        self.outbox.add_push(head)
        if self._host is None:
            return self._push_separately(head)
        part = RankGradients(self._rank, head.weight, head.present, self.buffers.sent_bytes(clock, shard)[0])
        acts = self._host.add_own(shard, clock, part, self._readable(head))
        if not any(isinstance(act, SeparatePush) for act in acts):
            self.outbox.note_in_host_sum(clock, shard)
        return self._carry_out(acts)

    def _readable(self, head: Push) -> SharedRange | None:
        """Return where others of this host read what is to go together with theirs; None where it goes alone: to a
        server that reads it there itself, or that is not heard of."""
        owner, (flat, _) = self._route.owners[head.shard], self.buffers.sent_bytes(head.clock, head.shard)
        if head.shard in self._route.closed_shards or head.landed < head.clock or self._lending.place_for(owner, flat):
            return None
        return self._lending.place_on_host(flat)

    def _push_separately(self, head: Push) -> list[ClientOutput]:
        """Push this worker's own gradients, where their server is ready."""
        if head.shard in self._route.closed_shards:
            return []
        owner = self._route.owners[head.shard]
        if not any(head.present):
            return [ToServer(owner, head)]
        flat, view = self.buffers.sent_bytes(head.clock, head.shard)
        if lent := self._lending.place_for(owner, flat):
            return [ToServer(owner, msgspec.structs.replace(head, at=lent))]
        return self._bytes_of(head, view)

    def _bytes_of(self, head: Push, view: memoryview) -> list[ClientOutput]:
        owner, offsets = self._route.owners[head.shard], range(LARGE, len(view), LARGE)
        parts = [ToServer(owner, PushPart(head.shard, head.clock, at), view[at : at + LARGE]) for at in offsets]
        return [ToServer(owner, head, view[:LARGE] or None), *parts]

    def order_step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None, save: bool
    ) -> list[ClientOutput]:
        """Order the step of `clock`."""
        self.outbox.add_step(Step(clock, [dict(group) for group in groups], scale, save))
        return self.orders()

    def orders(self) -> list[ClientOutput]:
        """Send the orders that may leave now."""
        return [ToServer(server, step) for server, step in self.outbox.ready_orders()] if self._ordered else []

    # ---- servers --------------------------------------------------------------------------------------------------

    def resend(self, shard: int) -> list[ClientOutput]:
        """Send all of a shard that is not Pushed: its server is ready."""
        said: list[ClientOutput] = [*self.on_owner_lost(shard)]
        for push in self.outbox.to_resend(shard):
            said += self._push_separately(msgspec.structs.replace(push, landed=self._landed(shard)))
        return said

    def on_owner_lost(self, shard: int) -> Sequence[ToPeer]:
        """Take in that a shard's server is gone, or is another: what is outstanding goes alone, to whoever leads."""
        return self._host.break_up_shard(shard) if self._host is not None else []

    def on_push_staged(self, clock: int, shard: int) -> list[ClientOutput]:
        """Take in that the push is whole at its primary."""
        self.outbox.on_staged(clock, shard)
        return self._after_acknowledgement(clock, shard)

    def on_pushed(self, clock: int, shard: int) -> list[ClientOutput]:
        """Take in that a shard's pushes up to `clock` are on all of its chain."""
        self.outbox.on_pushed(clock, shard)
        return self._after_acknowledgement(clock, shard)

    def _after_acknowledgement(self, clock: int, shard: int) -> list[ClientOutput]:
        if self._host is not None:
            self._host.on_push_staged(shard, clock)
        return self.orders()

    # ---- others of this host --------------------------------------------------------------------------------------

    def on_peer_connected(self, rank: int) -> list[ClientOutput]:
        """Take in that there is a line to a worker of this host."""
        return (
            self._carry_out(self._host.on_peer_connected(rank, self.outbox.outstanding))
            if self._host is not None
            else []
        )

    def on_peer_disconnected(self, rank: int) -> list[ClientOutput]:
        """Take in that the line to a worker of this host is broken."""
        return self._carry_out(self._host.on_peer_disconnected(rank)) if self._host is not None else []

    def on_peer_message(self, rank: int, message: BetweenPeers, data: Lent) -> list[ClientOutput]:
        """Take in what a worker of this host says; `data`: what it hands in, None where that cannot be read.

        Raises:
            ProtocolError: there is no such shard, or we do not go together; the worker's fault.
        """
        if self._host is None or not 0 <= message.shard < len(self._shards):
            raise ProtocolError(f"worker/{rank}: speaks of shard {message.shard}", where=f"worker/{rank}")
        shard, clock = message.shard, message.clock
        if isinstance(message, PushAlone):
            return self._carry_out(self._host.on_push_alone(rank, shard, clock))
        part = self._part(rank, message, data)
        if part is None:
            return self._carry_out(
                [ToPeer(rank, PushAlone(shard, clock)), *self._host.on_push_alone(rank, shard, clock)]
            )
        return self._carry_out(self._host.on_host_push(shard, clock, part))

    def _part(self, rank: int, message: HostPush, data: Lent) -> RankGradients | None:
        """Return what was handed in; None where it is not what this shard's gradients are."""
        one, held = self._shards[message.shard], self._held[message.shard]
        dtype = torch_dtype(one.dtype)
        fits = data is not None and len(data) == len(one.range) * dtype.itemsize
        known = len(message.present) == len(held) and not message.present.strip(b"\x00\x01")
        good = math.isfinite(message.weight) and message.weight >= 0
        if data is None or not (fits and known and good) or message.at.offset % dtype.itemsize:
            return None
        return RankGradients(rank, message.weight, message.present, torch.frombuffer(data, dtype=dtype))

    def on_host_sum(self, gather: HostSumTask, present: bytes) -> list[ClientOutput]:
        """Take in that a host's sum is made, in `gather.into`; `present`: which pieces are in it."""
        shard, clock = gather.shard, gather.clock
        if self._host is None or not self._host.on_host_sum(shard, clock):
            return []
        own = self.outbox.unstaged(clock, shard)
        assert own is not None, "when it is Taken, or its server is lost, there is nothing to sum any more"
        weight, ranks = joint_weight(part.weight for part in gather.parts), tuple(part.rank for part in gather.parts)
        head = msgspec.structs.replace(own, weight=weight, present=present, covers=ranks)
        view = bytes_view(gather.into) if any(present) else memoryview(b"")
        return [*self._bytes_of(head, view), *self.orders()]

    def _carry_out(self, acts: Sequence[Act]) -> list[ClientOutput]:
        said: list[ClientOutput] = []
        for act in acts:
            if not isinstance(act, SeparatePush):
                said.append(act)
                continue
            self.outbox.note_separate(act.clock, act.shard)
            if own := self.outbox.unstaged(act.clock, act.shard):
                said += self._push_separately(own)
        return said + self.orders()
