"""The dense state machine of one worker: pushes until they are acknowledged, pulls until their values have arrived.

DenseClient performs no I/O: the user's calls and received messages are its inputs, messages to send its outputs.

Theory. Gradients of a clock are kept in one of s+2 send buffers, in rotation (s: staleness); a push is sent directly
from its buffer and may have to be sent again, so a buffer is reused only when everything in it is Pushed. Values are
received as receive_buffers.py describes. A shard's values have a version (messages.py); a push of clock c is computed
from version c-s or newer, so it may be sent only when that version has arrived: this keeps the fastest worker within s
clocks of the slowest.

Nothing is sent to a server before it has sent Leads for the shard (ShardRoutes, unacked_pushes.py). When it does (on a
new connection, after the loss of another server, after a move) everything outstanding is sent again: pushes that are
not Pushed, from the same bytes; step orders (UnackedPushes); the unanswered pull. Servers drop duplicates.

Under `update: worker` the same path carries the mean gradient instead of values. Under asp a pull is answered when this
worker's own pushes are applied.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.buffer_allocator import BufferAllocator, SharedBytes
from psctl.ps.dense.client.backward_shards import shards_in_backward
from psctl.ps.dense.client.host_collection import Act, HostCollection, HostSumTask, Offer, SeparatePush, ToPeer
from psctl.ps.dense.client.receive_buffers import JointNorms, ReceiveBuffers, ValueSink, wrong
from psctl.ps.dense.client.send_buffers import SendBuffers
from psctl.ps.dense.client.unacked_pushes import ShardRoutes, UnackedPushes
from psctl.ps.dense.client.value_relay import ValueRelay
from psctl.ps.dense.host_sums import RankGradients, joint_weight
from psctl.ps.dense.rank_state_store import RankStateFetch
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import (
    BetweenPeers,
    FromServer,
    HostPush,
    Leads,
    NormsAnswer,
    NormsQuery,
    Pull,
    Push,
    PushAlone,
    Pushed,
    PushStaged,
    PutRankState,
    RankStateAnswer,
    RankStateQuery,
    Refused,
    SaveNow,
    StartValues,
    Step,
    StepInBackward,
    Values,
    ValuesWanted,
    WaitAnswer,
)
from psctl.ps.outputs import ToServer
from psctl.ps.pieces import bytes_view, pieces, torch_dtype
from psctl.ps.shards import sizes
from psctl.types import Number, Shard

FORWARDED = -1
"""Stands for the worker that forwards values, where the buffers note the server that sends them."""

ClientOutput = ToServer | ToPeer | HostSumTask
"""The result of a client's call: a message to a server, a message to a worker of this host, or a host sum to make."""


class DenseClient:
    """The state machine of all dense shards of one worker. Calls must not overlap, except `copy_to_front`.

    Args:
        terms: the terms of the job; `base` is the first clock of this worker.
        shards: all shards, by index.
        owners: for each shard the rank of the server that leads it.
        rank: this worker's rank.
        servers: all servers; None: those that lead a shard.
        near: those in this worker's rack, which need no sum by rack.
        allocator: allocates send buffers, and finds their places for servers that read them.
    """

    def __init__(
        self,
        terms: Terms,
        shards: Sequence[Shard],
        owners: Sequence[int],
        rank: int,
        servers: Sequence[int] | None = None,
        allocator: BufferAllocator | None = None,
        near: Collection[int] = (),
    ) -> None:
        self.terms, self.shards, self.rank = terms, shards, rank
        self.buffer_count = terms.buffers
        """Number of clocks whose gradients are kept at most."""
        self.held, self.sizes = pieces(terms.layout, shards), sizes(shards)
        self.refused: Refused | None = None
        self.wait_reasons: dict[int, list[int]] = {}  # server -> workers that it waits for, by its last WaitAnswer
        self._pushes_ask = terms.pushes_ask
        self._route = ShardRoutes(owners, sorted(set(owners)) if servers is None else servers)
        self._received = ReceiveBuffers(terms, shards, self.held)
        self.front = self._received.front
        self._allocator = allocator or BufferAllocator()
        self.send_buffers = SendBuffers(terms, shards, self.held, rank, self._allocator)
        self._ordered = terms.update == "server"
        self._outbox = UnackedPushes(self._route, ordered=self._ordered)
        self._choose_in_backward()
        self._last_pushed = [terms.base - 1] * len(shards)  # by shard
        group = next((group for group in terms.hosts if rank in group), ())
        sums = self.send_buffers.sum_buffer
        self._host = HostCollection(rank, group, len(shards), terms.base, sums) if group else None
        self._relay = ValueRelay() if group and terms.by_rack else None
        self._near = near
        self._start: Mapping[str, torch.Tensor] | None = None
        self._norms = JointNorms(self.held)
        self._save_wanted: int | None = None
        self._rank_states: dict[int, memoryview] = {}  # this rank's last ones, by clock
        self._rank_state_fetch = RankStateFetch()  # a rank state that this worker has requested

    @property
    def owners(self) -> list[int]:
        """For each shard the rank of the server that leads it."""
        return self._route.owners

    # ---- assignment --------------------------------------------------------------------------------------------------

    def on_assignment(
        self, epoch: int, owners: Sequence[int], servers: Sequence[int], near: Collection[int] = ()
    ) -> list[ClientOutput]:
        """Apply an assignment; what is outstanding for moved shards is sent once their servers have sent Leads."""
        self._near = near
        changed, opened = self._route.on_assignment(epoch, owners, servers)
        said = self._forget_partial(changed)
        self._outbox.on_assignment()
        if changed:
            self._choose_in_backward()
        return said + self._send_outstanding(opened)

    def on_server_disconnected(self, server: int) -> list[ClientOutput]:
        """Handle the loss of the connection to a server; on a new one its Leads resumes everything."""
        said = self._forget_partial(self._route.on_server_lost(server))
        self._outbox.forget_orders(server)
        again = self._received.on_server_disconnected(server)
        return [*said, *self._pull([shard for shard in again if self._is_open(shard)])]

    def _choose_in_backward(self) -> None:
        """Choose the shards that step in backward, by the assignment."""
        self._in_backward = shards_in_backward(self.owners, self.terms.in_backward)
        self.shards_in_backward = frozenset(shard for shards in self._in_backward.values() for shard in shards)

    def _forget_partial(self, shards: Sequence[int]) -> list[ClientOutput]:
        for shard in shards:
            self._received.on_owner_lost(shard)
        return [message for shard in shards for message in self._break_up_host_sums(shard)]

    def _on_leads(self, server: int, message: Leads) -> list[ClientOutput]:
        for shard in message.shards:
            self._is_owner(server, shard)
        return self._send_outstanding(self._route.on_leads(server, message.epoch, message.shards), server)

    def _send_outstanding(self, shards: Sequence[int], server: int | None = None) -> list[ClientOutput]:
        """Send everything outstanding for these shards; `server` has sent Leads."""
        outs: list[ClientOutput] = []
        again = [shard for shard in shards if self._received.restart(shard)]
        for shard in shards:
            outs += self._start_values_messages(shard)
            outs += self._resend(shard)
        if server is not None:  # it may lead no shard, and its connection may be new
            self._outbox.forget_orders(server)
        for owner in sorted({self.owners[shard] for shard in shards}):
            self._outbox.forget_orders(owner)
            if self._norms.wanted is not None and self._norms.by_parameter(self._norms.wanted) is None:
                outs.append(ToServer(owner, NormsQuery(self._norms.wanted)))
        outs += [*self._ready_orders(), *self._pull(again)]
        if server is not None and self._save_wanted is not None:
            outs.append(ToServer(server, SaveNow(self._save_wanted)))
        if 0 in shards:
            for clock in sorted(self._rank_states):
                outs += self._rank_state_messages(clock)
            outs += (
                self.request_rank_state(self._rank_state_fetch.wanted)
                if self._rank_state_fetch.wanted is not None
                else []
            )
        return outs

    def _resend(self, shard: int) -> list[ClientOutput]:
        """Send all pushes of a shard that are not Pushed: its server has sent Leads."""
        said: list[ClientOutput] = [*self._break_up_host_sums(shard)]
        for push in self._outbox.to_resend(shard):
            said += self._push_separately(msgspec.structs.replace(push, landed=self._whole_version(shard)))
        return said

    def _break_up_host_sums(self, shard: int) -> Sequence[ToPeer]:
        """Drop the host sums of a shard after the loss or change of its server: each rank pushes its own gradients."""
        return self._host.break_up_shard(shard) if self._host is not None else []

    def _is_open(self, shard: int) -> bool:
        return shard not in self._route.closed_shards

    # ---- outgoing ----------------------------------------------------------------------------------------------------

    def send_start_values(self, values: Mapping[str, torch.Tensor]) -> list[ToServer]:
        """Send start values directly from `values`, which must not change until version `base` has arrived."""
        self._start = values
        return [
            out
            for shard in range(len(self.shards))
            if self._is_open(shard)
            for out in self._start_values_messages(shard)
        ]

    def _start_values_messages(self, shard: int) -> list[ToServer]:
        if self._start is None or self._received.each[shard].version >= self.terms.base:
            return []
        one = self.shards[shard]
        view = bytes_view(self._start[one.dtype].narrow(0, one.range.start, len(one.range)))
        return [ToServer(self.owners[shard], StartValues(shard), view)]

    def send_buffer(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the send buffer of `clock`; `unacknowledged_servers(clock - buffers)` must be empty."""
        return self.send_buffers.gradients(clock)

    def unacknowledged_servers(self, clock: int) -> set[int]:
        """Return the servers that have not acknowledged all pushes up to `clock`."""
        return self._outbox.servers_behind(clock)

    def unsettled_servers(self) -> set[int]:
        """Return the servers for which this worker must not end yet: they lack an order or an acknowledgement."""
        return self._outbox.unsettled_servers()

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float) -> list[ClientOutput]:
        """Push a shard's gradients, which are in `send_buffer(clock)`, or were coded by SendBuffers.encode.

        `missing_shards(clock, [shard])` must be empty.
        """
        assert not self._received.missing_shards(clock, [shard], False), (
            f"shard {shard}: push before its values have landed"
        )
        assert not self._outbox.has_unacknowledged(clock - self.buffer_count), (
            f"clock {clock - self.buffer_count} is not acknowledged"
        )
        if self._pushes_ask and self._received.each[shard].asked == clock:
            self.pull(clock + 1)
        assert len(present) == len(self.held[shard]), f"shard {shard} has {len(self.held[shard])} pieces"
        assert clock == self._last_pushed[shard] + 1, (
            f"shard {shard}: push of clock {clock} after {self._last_pushed[shard]}"
        )
        self._last_pushed[shard] = clock
        head = Push(shard, clock, float(weight), bytes(map(bool, present)), self._whole_version(shard))
        self._outbox.add_push(head)
        if self._host is None:
            return self._push_separately(head)
        part = RankGradients(self.rank, head.weight, head.present, self.send_buffers.sent_bytes(clock, shard)[0])
        acts = self._host.add_own(shard, clock, part, self._offer(head))
        if not any(isinstance(act, SeparatePush) for act in acts):
            self._outbox.note_in_host_sum(clock, shard)
        return self._carry_out(acts)

    def _offer(self, head: Push) -> Offer | None:
        """Return how others of this group get gradients for their sum; None: they are pushed separately, because the
        server reads them there itself, is in this rack, or is not connected yet."""
        owner, (flat, view) = self._route.owners[head.shard], self.send_buffers.sent_bytes(head.clock, head.shard)
        if head.shard in self._route.closed_shards or head.landed < head.clock:
            return None
        if self._relay is not None:
            return view if owner not in self._near else None
        return self._allocator.place_on_host(flat) if not self._allocator.place_for(owner, flat) else None

    def _push_separately(self, head: Push) -> list[ClientOutput]:
        """Push this worker's own gradients, if their server has sent Leads."""
        if head.shard in self._route.closed_shards:
            return []
        owner = self._route.owners[head.shard]
        if not any(head.present):
            return [ToServer(owner, head)]
        flat, view = self.send_buffers.sent_bytes(head.clock, head.shard)
        if place := self._allocator.place_for(owner, flat):
            return [ToServer(owner, msgspec.structs.replace(head, at=place))]
        return [ToServer(owner, head, view)]

    def _whole_version(self, shard: int) -> int:
        return self._received.each[shard].whole_version

    def order_step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> list[ClientOutput]:
        """Order the step of `clock`, after all its pushes; an order that must wait is sent by a later call."""
        assert self.terms.update == "server", "where workers step servers need no order"
        self._outbox.add_step(Step(clock, [dict(group) for group in groups], scale, save))
        return self._ready_orders()

    def order_in_backward(self, clock: int, groups: Sequence[Mapping[str, Number]]) -> list[ToServer]:
        """Order some shards to step at `clock` as soon as their own pushes are in; before all its pushes.

        A server that lacks an earlier order, which may save a checkpoint, would get it too late: it is left out.
        """
        assert self.terms.in_backward > 0, "the servers expect no such order"
        numbers, outbox = [dict(group) for group in groups], self._outbox
        return [
            ToServer(server, StepInBackward(clock, shards, numbers))
            for server, shards in self._in_backward.items()
            if server in self._route.ready_servers and outbox.has_orders(server)
        ]

    def pull_in_backward(self, clock: int, shard: int) -> list[ClientOutput]:
        """Request a shard at `clock`, before `pull` requests the others."""
        landing = self._received.each[shard]
        if landing.front_version < landing.version:
            return []  # nothing has read the last values: `pull` copies them before it requests others
        self._received.note_pull(shard, clock, exact=False)
        return self._pull([shard]) if self._is_open(shard) else []

    def _ready_orders(self) -> list[ClientOutput]:
        """Send the orders that may be sent now."""
        return [ToServer(server, step) for server, step in self._outbox.ready_orders()] if self._ordered else []

    def request_save(self, version: int) -> list[ToServer]:
        """Request a checkpoint of `version`, which its step did not order."""
        self._save_wanted = version
        return [
            ToServer(server, SaveNow(version)) for server in self._route.servers if server in self._route.ready_servers
        ]

    def request_norms(self, clock: int) -> list[ToServer]:
        """Request the norms of `clock`; all gradients of it must be pushed."""
        assert self.terms.staleness is not None, "under asp there is no joint gradient"
        self._norms.wanted = clock
        owners = {self.owners[shard] for shard in range(len(self.shards)) if self._is_open(shard)}
        return [ToServer(server, NormsQuery(clock)) for server in sorted(owners)]

    def pull(self, clock: int, exact: bool = False) -> list[ClientOutput]:
        """Request all shards at `clock`, first layers first; `exact`: version `clock` itself, whatever s is.

        Where pushes are answered with values (`Terms.pushes_ask`) nothing is sent except for the start values: the
        first push of the clock before has already called this.
        """
        pushes_ask = self._pushes_ask and clock > self.terms.base
        if pushes_ask and self._received.each[0].asked == clock:
            return []
        self.copy_to_front()  # of arrived values: the next ones need their buffer
        if clock > self.terms.base:
            self._start = None
        if self._save_wanted is not None and self._save_wanted < clock:
            self._save_wanted = None
        each: Iterable[int] = range(len(self.shards))
        if self.terms.in_backward > 0:
            each = [shard for shard in each if self._received.each[shard].asked < clock]
        requested = [shard for shard in each if self._received.note_pull(shard, clock, exact=exact)]
        return [] if pushes_ask else self._pull([shard for shard in requested if self._is_open(shard)])

    def _pull(self, shards: Sequence[int]) -> list[ClientOutput]:
        requested: dict[tuple[int, int, int, int | None], list[int]] = {}
        for shard in shards:
            landing = self._received.each[shard]
            key = self.owners[shard], landing.asked, landing.wanted, self._forwarder(shard)
            requested.setdefault(key, []).append(shard)
        return [
            ToServer(server, Pull(clock, some, oldest, [self._received.each[shard].version for shard in some]))
            if forwarder is None
            else ToPeer(forwarder, ValuesWanted(clock, some, oldest))
            for (server, clock, oldest, forwarder), some in requested.items()
        ]

    def _forwarder(self, shard: int) -> int | None:
        """Return the worker of this rack that forwards a shard's values; None: they are pulled from the server."""
        if self._relay is None or self._host is None or self.owners[shard] in self._near:
            return None
        if self._received.each[shard].asked <= self.terms.base:
            return None  # of start values, because the others may start later
        found = self._host.collector(shard)
        return found if found != self.rank and self._host.is_up(found) else None

    def send_rank_state(self, clock: int, payload: memoryview) -> list[ToServer]:
        """Send this rank's state outside the gradients at the start of `clock`; the payload must not change."""
        self._rank_states[clock] = payload
        for old in sorted(self._rank_states)[: -self.buffer_count]:
            del self._rank_states[old]
        return self._rank_state_messages(clock) if self._is_open(0) else []

    def _rank_state_messages(self, clock: int) -> list[ToServer]:
        return [ToServer(self.owners[0], PutRankState(clock, self.rank), self._rank_states[clock] or None)]

    def request_rank_state(self, clock: int) -> list[ToServer]:
        """Request rank 0's state at `clock`; under asp, the one that this rank sent before it was restarted."""
        self._rank_state_fetch.wanted = clock
        owner = self.rank if self.terms.staleness is None else 0
        return [ToServer(self.owners[0], RankStateQuery(clock, owner))] if self._is_open(0) else []

    def rank_state(self, clock: int) -> memoryview | None:
        """Return the state requested by `request_rank_state`, once it has arrived."""
        return self._rank_state_fetch.of(clock)

    # ---- incoming ----------------------------------------------------------------------------------------------------

    def receive_buffer_for(self, server: int, message: FromServer, size: int) -> memoryview | None:
        """Return the buffer for a payload of `size` bytes; None when the payload is not needed.

        Raises:
            ProtocolError: the server broke the protocol; nothing was changed.
        """
        if isinstance(message, RankStateAnswer):
            return self._rank_state_fetch.receive_buffer_for(server, message, size)
        if not isinstance(message, Values):
            raise ProtocolError(f"server/{server}: {type(message).__name__} with a payload", where=f"server/{server}")
        if not self._is_owner(server, message.shard):
            if size > self.sizes[message.shard]:
                raise wrong(server, message.shard, f"{size} bytes where {self.sizes[message.shard]} belong")
            return None
        return self._received.receive_buffer_for(server, message, size)

    def on_server_message(
        self, server: int, message: FromServer, size: int = 0, shared: SharedBytes = None
    ) -> list[ClientOutput]:
        """Handle a message whose payload, if any, was received into `receive_buffer_for`'s buffer, or is `shared`.

        Raises:
            ProtocolError: as `receive_buffer_for`.
        """
        match message:
            case Values():
                return self._on_values(server, message, size, shared)
            case Leads():
                return self._on_leads(server, message)
            case PushStaged():
                if self._is_owner(server, message.shard) and self._is_open(message.shard):
                    self._outbox.on_staged(message.clock, message.shard)
                    return self._after_acknowledgement(message.clock, message.shard)
            case Pushed():
                self._is_owner(server, message.shard)
                return self._on_pushed(message.clock, message.shard)
            case NormsAnswer():
                if self._is_owner(server, message.shard):
                    self._norms.on_answer(server, message)
            case RankStateAnswer():
                self._rank_state_fetch.on_answer(server, message, size)
            case WaitAnswer():
                self.wait_reasons[server] = message.workers
            case Refused():
                self.refused = message
        return []

    def _on_values(self, server: int, message: Values, size: int, shared: SharedBytes) -> list[ClientOutput]:
        repeat = self._received.on_payload_end(server, message.shard) and self._is_open(message.shard)
        if not self._is_owner(server, message.shard) or not self._received.on_values(server, message, size, shared):
            return [*self._pull([message.shard])] if repeat else []
        return [*self._forward(message), *self._after_values(message)]

    def _forward(self, message: Values) -> Sequence[ClientOutput]:
        """Forward the values of a shard that this worker collects for its rack."""
        if self._relay is None or self._host is None or self._host.collector(message.shard) != self.rank:
            return []
        return self._relay.on_values(message, self._received.newest(message.shard))

    def _after_values(self, message: Values) -> list[ClientOutput]:
        """Go on after values were received completely."""
        said: list[ClientOutput] = (
            [] if self.terms.staleness is None else self._on_pushed(message.version - 1, message.shard)
        )
        if self.terms.update == "server" and self.terms.staleness is None:
            said = self._ready_orders()
        return [*said, *self._pull([message.shard])] if self._received.restart(message.shard) else said

    def _on_pushed(self, clock: int, shard: int) -> list[ClientOutput]:
        """Record that a shard's pushes up to `clock` are on all of its chain."""
        self._outbox.on_pushed(clock, shard)
        return self._after_acknowledgement(clock, shard)

    def _after_acknowledgement(self, clock: int, shard: int) -> list[ClientOutput]:
        if self._host is not None:
            self._host.on_push_staged(shard, clock)
        return self._ready_orders()

    # ---- others of this host or rack --------------------------------------------------------------------------------

    def on_peer_connected(self, rank: int) -> list[ClientOutput]:
        """Handle a new connection to a worker of this group."""
        return (
            self._carry_out(self._host.on_peer_connected(rank, self._outbox.outstanding))
            if self._host is not None
            else []
        )

    def on_peer_disconnected(self, rank: int) -> list[ClientOutput]:
        """Handle the loss of the connection to a worker of this group; the servers send what it would have
        forwarded."""
        if self._host is None:
            return []
        said = self._carry_out(self._host.on_peer_disconnected(rank))
        if self._relay is None:
            return said
        self._relay.on_peer_disconnected(rank)
        mine = [shard for shard in range(len(self.shards)) if self._host.collector(shard) == rank]
        return [*said, *self._pull([shard for shard in mine if self._is_open(shard) and self._received.restart(shard)])]

    def on_peer_message(self, rank: int, message: BetweenPeers, data: SharedBytes) -> list[ClientOutput]:
        """Handle a message of a worker of this group.

        Args:
            rank: the worker's.
            message: of it.
            data: the gradients that it offers, or the values that it forwards; None if they are unreadable.

        Raises:
            ProtocolError: there is no such shard, the workers form no group, or these values are none of the shard;
                the other worker's fault.
        """
        named = message.shards if isinstance(message, ValuesWanted) else [message.shard]
        if self._host is None or not all(0 <= shard < len(self.shards) for shard in named):
            raise ProtocolError(f"worker/{rank}: speaks of shards {named}", where=f"worker/{rank}")
        if isinstance(message, ValuesWanted):
            relay = self._relay
            return [] if relay is None else [out for shard in named for out in relay.on_wanted(rank, shard, message)]
        shard, clock = message.shard, message.clock
        if isinstance(message, PushAlone):
            return self._carry_out(self._host.on_push_alone(rank, shard, clock))
        if isinstance(message, Values):
            return self._on_forwarded(rank, message, data)
        part = self._rank_gradients(rank, message, data)
        if part is None:
            return self._carry_out(
                [ToPeer(rank, PushAlone(shard, clock)), *self._host.on_push_alone(rank, shard, clock)]
            )
        return self._carry_out(self._host.on_host_push(shard, clock, part))

    def _on_forwarded(self, rank: int, message: Values, data: SharedBytes) -> list[ClientOutput]:
        """Use values that the collector of their shard has forwarded."""
        shard, size = message.shard, 0 if data is None else len(data)
        fits = size == self.sizes[shard] and len(message.present) == len(self.held[shard])
        if self._relay is None or data is None or not fits:
            raise ProtocolError(f"worker/{rank}: forwards {size} bytes as shard {shard}", where=f"worker/{rank}")
        if message.clock != self._received.each[shard].asked:
            return []  # it was pulled from the server meanwhile
        if message.version < self._received.oldest_version(message.clock, False):
            what = f"forwards version {message.version} of shard {shard} for clock {message.clock}"
            raise ProtocolError(f"worker/{rank}: {what}", where=f"worker/{rank}")
        buffer = self._received.receive_buffer_for(FORWARDED, message, size)
        if buffer is None:
            return []
        buffer[:] = data
        self._received.on_payload_end(FORWARDED, shard)
        return self._after_values(message) if self._received.on_values(FORWARDED, message, size) else []

    def _rank_gradients(self, rank: int, message: HostPush, data: SharedBytes) -> RankGradients | None:
        """Return the offered gradients; None if they do not fit this shard."""
        one, held = self.shards[message.shard], self.held[message.shard]
        dtype = torch_dtype(one.dtype)
        fits = data is not None and len(data) == len(one.range) * dtype.itemsize
        known = len(message.present) == len(held) and not message.present.strip(b"\x00\x01")
        good = math.isfinite(message.weight) and message.weight >= 0
        aligned = message.at is None or message.at.offset % dtype.itemsize == 0
        if data is None or not (fits and known and good and aligned):
            return None
        return RankGradients(rank, message.weight, message.present, torch.frombuffer(data, dtype=dtype))

    def on_host_sum(self, gather: HostSumTask, present: bytes) -> list[ClientOutput]:
        """Handle a complete host sum, in `gather.into`; `present`: which pieces are in it."""
        shard, clock = gather.shard, gather.clock
        if self._host is None or not self._host.on_host_sum(shard, clock):
            return []
        own = self._outbox.unstaged(clock, shard)
        assert own is not None, "when it is Taken, or its server is lost, there is nothing to sum any more"
        weight, ranks = joint_weight(part.weight for part in gather.parts), tuple(part.rank for part in gather.parts)
        head = msgspec.structs.replace(own, weight=weight, present=present, covers=ranks)
        view = bytes_view(gather.into) if any(present) else None
        return [ToServer(self._route.owners[shard], head, view), *self._ready_orders()]

    def _carry_out(self, acts: Sequence[Act]) -> list[ClientOutput]:
        said: list[ClientOutput] = []
        for act in acts:
            if not isinstance(act, SeparatePush):
                said.append(act)
                continue
            self._outbox.note_separate(act.clock, act.shard)
            if own := self._outbox.unstaged(act.clock, act.shard):
                said += self._push_separately(own)
        return said + self._ready_orders()

    # ---- waits -------------------------------------------------------------------------------------------------------

    def missing_shards(self, clock: int, shards: Sequence[int] | None = None, exact: bool = False) -> list[int]:
        """Return those of the shards (None: of all) whose values for `clock` have not arrived."""
        return self._received.missing_shards(clock, shards, exact)

    def set_waiting(self, shards: Sequence[int], is_open: bool) -> None:
        """Set whether the user waits for these shards, so that values may be received in the front."""
        for shard in shards:
            self._received.each[shard].waiting = is_open

    def set_value_sink(self, take: ValueSink) -> None:
        """Pass arrived values to `take` from now on, instead of the front; call it between wait and pull."""
        self._received.sink = take

    def copy_to_front(self, shards: Sequence[int] | None = None) -> None:
        """Copy arrived values to the front (receive_buffers.py defines what this may overlap with)."""
        self._received.copy_to_front(shards)

    @property
    def unanswered(self) -> int:
        """The number of shards that were pulled and have not arrived."""
        return self._received.unanswered

    def complete_clocks(self, shards: Sequence[int]) -> int:
        """Return the clock before which all workers' clocks are in the front, for all of these shards."""
        return min((self._received.each[shard].front_clocks for shard in shards), default=self.terms.base)

    def front_version(self, shards: Sequence[int]) -> int:
        """Return the oldest version in the front among these shards; it may overlap with other calls."""
        return min((self._received.each[shard].front_version for shard in shards), default=self.terms.base)

    def presence(self, clock: int) -> list[bool]:
        """Return, for each trainable parameter, whether any worker had a gradient at `clock`."""
        return self._received.presence(clock)

    def squared_norms(self, clock: int) -> dict[int, float] | None:
        """Return the squared norms of `clock` by parameter, in piece order; None when some shard's are missing."""
        return self._norms.by_parameter(clock)

    def servers_without_norms(self, clock: int) -> set[int]:
        """Return the servers whose norms of `clock` are missing."""
        return {self.owners[shard] for shard in self._norms.missing_shards(clock)}

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _is_owner(self, server: int, shard: int) -> bool:
        """Return whether a server is the owner of a shard on this worker's routes."""
        if not 0 <= shard < len(self.shards):
            raise wrong(server, shard, f"there are {len(self.shards)} shards")
        return self._route.owners[shard] == server
