"""The mind of a worker's end: pushes until acknowledged, pulls until landed; calls and messages in, messages out.

Theory. Gradients of a clock stand in one of s+2 send buffers, by turns (s: staleness); a push leaves straight out of it
and may have to be sent again, so a buffer is given out anew only when all that it held is Pushed. Values land as
receive_buffers.py says. A shard's values have a version (messages.py); a push of clock c says "I computed this from
version c-s
or newer", so it may leave only when that version has landed: this keeps the fastest within s clocks of the slowest.

Nothing leaves for a server before it has said that it leads the shard (unacked_pushes.py). When it says so, on a new
connection,
after the death of another, after a move, all that is outstanding leaves, again: pushes that are not Pushed, from the
same bytes; step orders (outbox.py); the pull that is unanswered. The servers drop what they have.

Under `update: worker` the same path brings the joint mean gradient instead of values. Under asp a pull is answered when
this worker's own pushes are in; lazy reads (not `eager`) ask under ssp only when what is here is too old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.client.host_collection import HostSumTask
from psctl.ps.dense.client.push_path import ClientOutput, PushPath
from psctl.ps.dense.client.receive_buffers import JointNorms, ReceiveBuffers, ValueSink, wrong
from psctl.ps.dense.client.unacked_pushes import ShardRoutes
from psctl.ps.dense.lent_buffers import Lending, Lent
from psctl.ps.dense.rank_state_store import RankStateFetch
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import (
    LARGE,
    BetweenPeers,
    FromServer,
    Leads,
    NormsAnswer,
    NormsQuery,
    Pull,
    Pushed,
    PushStaged,
    PutRankState,
    RankStateAnswer,
    RankStateQuery,
    Refused,
    SaveNow,
    StartValues,
    Values,
    ValuesPart,
    WaitAnswer,
)
from psctl.ps.outputs import ToServer
from psctl.ps.pieces import bytes_view, pieces
from psctl.ps.shards import sizes
from psctl.types import Number, Shard


class DenseClient:
    """Everything that one worker knows of its servers. Calls must not overlap, except `show` (receive_buffers.py).

    Args:
        terms: what the job agreed on; `base` is the first clock of this worker.
        shards: all shards, by index.
        owners: for each the rank of the server that leads it.
        rank: this worker's.
        servers: all servers; None: those that lead a shard.
        lending: where send buffers come from, and which servers read them there.
        eager: under ssp, ask for newer values every clock, and not only when they are too old.
    """

    def __init__(
        self,
        terms: Terms,
        shards: Sequence[Shard],
        owners: Sequence[int],
        rank: int,
        servers: Sequence[int] | None = None,
        lending: Lending | None = None,
        *,
        eager: bool = True,
    ) -> None:
        self.terms, self.shards, self.rank = terms, shards, rank
        self.buffer_count = terms.buffers
        """Clocks whose gradients are kept at most."""
        self.held, self.sizes = pieces(terms.layout, shards), sizes(shards)
        self.refused: Refused | None = None
        self.wait_reasons: dict[int, list[int]] = {}  # server -> workers that it waits for, as it last said
        self._pushes_ask = terms.pushes_ask
        self._route = ShardRoutes(owners, sorted(set(owners)) if servers is None else servers)
        self._received = ReceiveBuffers(terms, shards, self.held)
        self.front = self._received.front
        self._eager = eager
        landed = self._whole_version
        self._pushing = PushPath(terms, shards, self.held, rank, self._route, lending or Lending(), landed)
        self._outbox, self.send_buffers = self._pushing.outbox, self._pushing.buffers
        self._start: Mapping[str, torch.Tensor] | None = None
        self._norms = JointNorms(self.held)
        self._save_wanted: int | None = None
        self._rank_states: dict[int, memoryview] = {}  # the last ones that were sent
        self._rank_state_fetch = RankStateFetch()  # what another rank left beside

    @property
    def owners(self) -> list[int]:
        """For each shard the rank of the server that leads it."""
        return self._route.owners

    # ---- who leads what ---------------------------------------------------------------------------------------------

    def on_assignment(self, epoch: int, owners: Sequence[int], servers: Sequence[int]) -> list[ClientOutput]:
        """Take over an assignment; what is outstanding leaves for shards that moved once their servers are ready."""
        changed, opened = self._route.on_assignment(epoch, owners, servers)
        said = self._forget_partial(changed)
        self._outbox.on_assignment()
        return said + self._send_outstanding(opened)

    def on_server_disconnected(self, server: int) -> list[ClientOutput]:
        """Take in that the connection to a server is gone; when there is a new one, all goes on by itself."""
        said = self._forget_partial(self._route.on_server_lost(server))
        self._outbox.forget_orders(server)
        return said

    def _forget_partial(self, shards: Sequence[int]) -> list[ClientOutput]:
        for shard in shards:
            self._received.on_owner_lost(shard)
        return [tell for shard in shards for tell in self._pushing.on_owner_lost(shard)]

    def _on_leads(self, server: int, message: Leads) -> list[ClientOutput]:
        for shard in message.shards:
            self._is_owner(server, shard)
        return self._send_outstanding(self._route.on_leads(server, message.epoch, message.shards), server)

    def _send_outstanding(self, shards: Sequence[int], server: int | None = None) -> list[ClientOutput]:
        """Send all that these shards' servers must have; `server` has said that it is ready."""
        outs: list[ClientOutput] = []
        again = [shard for shard in shards if self._received.restart(shard)]
        for shard in shards:
            outs += self._start_values_messages(shard)
            outs += self._pushing.resend(shard)
        for owner in sorted({self.owners[shard] for shard in shards}):
            self._outbox.forget_orders(owner)
            if self._norms.wanted is not None and self._norms.by_parameter(self._norms.wanted) is None:
                outs.append(ToServer(owner, NormsQuery(self._norms.wanted)))
        outs += [*self._pushing.orders(), *self._pull(again)]
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

    def _is_open(self, shard: int) -> bool:
        return shard not in self._route.closed_shards

    # ---- out --------------------------------------------------------------------------------------------------------

    def send_start_values(self, values: Mapping[str, torch.Tensor]) -> list[ToServer]:
        """Send start values, straight out of `values`; they must stay untouched until version `base` has landed."""
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
        offsets = range(0, max(1, len(view)), LARGE)
        return [ToServer(self.owners[shard], StartValues(shard, at), view[at : at + LARGE] or None) for at in offsets]

    def send_buffer(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the send buffer of `clock`, once `unacknowledged(clock - buffers)` is empty."""
        return self.send_buffers.gradients(clock)

    def unacknowledged_servers(self, clock: int) -> set[int]:
        """Return the servers that have not acknowledged all pushes up to `clock`."""
        return self._outbox.servers_behind(clock)

    def unsettled_servers(self) -> set[int]:
        """Return the servers that this worker must not leave yet: they lack an order or an acknowledgement of it."""
        return self._outbox.unsettled_servers()

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float) -> list[ClientOutput]:
        """Push a shard's gradients, which stand in `sending(clock)`, or which `pushes.encode` coded.

        `missing(clock, [shard])` must be empty.
        """
        assert not self._received.missing_shards(clock, [shard], False), (
            f"shard {shard}: push before its values have landed"
        )
        assert not self._outbox.has_unacknowledged(clock - self.buffer_count), (
            f"clock {clock - self.buffer_count} is not acknowledged"
        )
        if self._pushes_ask and self._received.each[shard].asked == clock:
            self.pull(clock + 1)
        return self._pushing.push(clock, shard, present, weight)

    def _whole_version(self, shard: int) -> int:
        return self._received.each[shard].whole_version

    def order_step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> list[ClientOutput]:
        """Order the step of `clock`, after all its pushes; what may not leave yet comes out of `received`."""
        assert self.terms.update == "server", "where workers step servers need no order"
        return self._pushing.order_step(clock, groups, scale, save)

    def request_save(self, version: int) -> list[ToServer]:
        """Have `version` saved, though its step did not say so."""
        self._save_wanted = version
        return [
            ToServer(server, SaveNow(version)) for server in self._route.servers if server in self._route.ready_servers
        ]

    def request_norms(self, clock: int) -> list[ToServer]:
        """Ask for the norms of `clock`, all of whose pushes have been handed in."""
        assert self.terms.staleness is not None, "under asp there is no joint gradient"
        self._norms.wanted = clock
        owners = {self.owners[shard] for shard in range(len(self.shards)) if self._is_open(shard)}
        return [ToServer(server, NormsQuery(clock)) for server in sorted(owners)]

    def pull(self, clock: int, exact: bool = False) -> list[ToServer]:
        """Ask for all shards at `clock`, first layers first; `exact`: for version `clock` itself, whatever s is.

        Where pushes ask (`Terms.pushes_ask`) nothing is sent but for the start values, and the first push of the clock
        before has called this already.
        """
        pushes_ask = self._pushes_ask and clock > self.terms.base
        if pushes_ask and self._received.each[0].asked == clock:
            return []
        self.copy_to_front()  # what has landed: the next values need its place
        if clock > self.terms.base:
            self._start = None
        if self._save_wanted is not None and self._save_wanted < clock:
            self._save_wanted = None
        each = range(len(self.shards))
        wished = [shard for shard in each if self._received.note_pull(shard, clock, exact=exact, eager=self._eager)]
        return [] if pushes_ask else self._pull([shard for shard in wished if self._is_open(shard)])

    def _pull(self, shards: Sequence[int]) -> list[ToServer]:
        wished: dict[tuple[int, int, int], list[int]] = {}
        for shard in shards:
            landing = self._received.each[shard]
            wished.setdefault((self.owners[shard], landing.asked, landing.wanted), []).append(shard)
        return [
            ToServer(server, Pull(clock, some, oldest, [self._received.each[shard].version for shard in some]))
            for (server, clock, oldest), some in wished.items()
        ]

    def send_rank_state(self, clock: int, payload: memoryview) -> list[ToServer]:
        """Send what travels beside the gradients, as it is at the start of `clock`; the payload must stay as it is."""
        self._rank_states[clock] = payload
        for old in sorted(self._rank_states)[: -self.buffer_count]:
            del self._rank_states[old]
        return self._rank_state_messages(clock) if self._is_open(0) else []

    def _rank_state_messages(self, clock: int) -> list[ToServer]:
        data, size = self._rank_states[clock], len(self._rank_states[clock])
        offsets = range(0, max(1, size), LARGE)
        head = partial(PutRankState, clock, size, rank=self.rank)
        return [ToServer(self.owners[0], head(at), data[at : at + LARGE] or None) for at in offsets]

    def request_rank_state(self, clock: int) -> list[ToServer]:
        """Ask for what rank 0 sent with `aside`; under asp, what this rank's start before sent."""
        self._rank_state_fetch.wanted = clock
        whose = self.rank if self.terms.staleness is None else 0
        return [ToServer(self.owners[0], RankStateQuery(clock, whose))] if self._is_open(0) else []

    def rank_state(self, clock: int) -> memoryview | None:
        """Return what was asked for with `ask_aside`, once it is here."""
        return self._rank_state_fetch.of(clock)

    # ---- in ---------------------------------------------------------------------------------------------------------

    def receive_buffer_for(self, server: int, message: FromServer, size: int) -> memoryview | None:
        """Return where a payload of `size` bytes lands; None when it is not wanted (any more).

        Raises:
            ProtocolError: the server broke the protocol; nothing was changed.
        """
        if isinstance(message, RankStateAnswer):
            return self._rank_state_fetch.receive_buffer_for(server, message, size)
        if not isinstance(message, Values | ValuesPart):
            raise ProtocolError(f"server/{server}: {type(message).__name__} with a payload", where=f"server/{server}")
        if not self._is_owner(server, message.shard):
            return None
        return self._received.receive_buffer_for(server, message, size)

    def on_server_message(
        self, server: int, message: FromServer, size: int = 0, lent: Lent = None
    ) -> list[ClientOutput]:
        """Take in a message whose payload, if any, stands where `place` said, or is `lent`; a wait may be over.

        Raises:
            ProtocolError: as `place`.
        """
        match message:
            case Values() | ValuesPart():
                return self._on_values(server, message, size, lent)
            case Leads():
                return self._on_leads(server, message)
            case PushStaged():
                if self._is_owner(server, message.shard) and self._is_open(message.shard):
                    return self._pushing.on_push_staged(message.clock, message.shard)
            case Pushed():
                self._is_owner(server, message.shard)
                return self._pushing.on_pushed(message.clock, message.shard)
            case NormsAnswer():
                if self._is_owner(server, message.shard):
                    self._norms.on_answer(server, message)
            case RankStateAnswer():
                self._rank_state_fetch.add_bytes(server, message, size)
            case WaitAnswer():
                self.wait_reasons[server] = message.workers
            case Refused():
                self.refused = message
        return []

    def _on_values(self, server: int, message: Values | ValuesPart, size: int, lent: Lent) -> list[ClientOutput]:
        if not self._is_owner(server, message.shard) or not self._received.add_bytes(server, message, size, lent):
            return []
        said = [] if self.terms.staleness is None else self._pushing.on_pushed(message.version - 1, message.shard)
        if self.terms.update == "server" and self.terms.staleness is None:
            said = self._pushing.orders()
        return [*said, *self._pull([message.shard])] if self._received.restart(message.shard) else said

    # ---- others of this host ----------------------------------------------------------------------------------------

    def on_peer_connected(self, rank: int) -> list[ClientOutput]:
        """Take in that there is a line to a worker of this host."""
        return self._pushing.on_peer_connected(rank)

    def on_peer_disconnected(self, rank: int) -> list[ClientOutput]:
        """Take in that the line to a worker of this host is broken."""
        return self._pushing.on_peer_disconnected(rank)

    def on_peer_message(self, rank: int, message: BetweenPeers, data: Lent) -> list[ClientOutput]:
        """Take in what a worker of this host says; `data`: what it hands in, None where that cannot be read.

        Raises:
            ProtocolError: it does not go together with us; nothing was changed.
        """
        return self._pushing.on_peer_message(rank, message, data)

    def on_host_sum(self, gather: HostSumTask, present: bytes) -> list[ClientOutput]:
        """Take in that the sum of a Gather stands in its place; `present`: which pieces are in it."""
        return self._pushing.on_host_sum(gather, present)

    # ---- what a wait is for -----------------------------------------------------------------------------------------

    def missing_shards(self, clock: int, shards: Sequence[int] | None = None, exact: bool = False) -> list[int]:
        """Return those of the shards (None: of all) whose values for `clock` have not landed."""
        return self._received.missing_shards(clock, shards, exact)

    def set_waiting(self, shards: Sequence[int], is_open: bool) -> None:
        """Tell that the user waits for these shards, so that values may land in the front; or no longer does."""
        for shard in shards:
            self._received.each[shard].waiting = is_open

    def set_value_sink(self, take: ValueSink) -> None:
        """From now on have landed values taken, in the place of bringing them to the front; between wait and pull."""
        self._received.sink = take

    def copy_to_front(self, shards: Sequence[int] | None = None) -> None:
        """Bring landed values to where they are read (receive_buffers.py says what this may overlap with)."""
        self._received.copy_to_front(shards)

    @property
    def unanswered(self) -> int:
        """How many shards were pulled and have not come."""
        return self._received.unanswered

    def complete_clocks(self, shards: Sequence[int]) -> int:
        """Return the clock before which everyone's clocks are in the front, for all of these shards."""
        return min((self._received.each[shard].front_clocks for shard in shards), default=self.terms.base)

    def front_version(self, shards: Sequence[int]) -> int:
        """Return the oldest version in the front among these shards; as `show`, it may overlap with other calls."""
        return min((self._received.each[shard].front_version for shard in shards), default=self.terms.base)

    def presence(self, clock: int) -> list[bool]:
        """Return, for each trainable parameter, whether any worker had a gradient at `clock`."""
        return self._received.presence(clock)

    def squared_norms(self, clock: int) -> dict[int, float] | None:
        """Return the squares of `clock` by parameter, summed in piece order; None when some shard's are missing."""
        return self._norms.by_parameter(clock)

    def servers_without_norms(self, clock: int) -> set[int]:
        """Return the servers whose norms of `clock` are missing."""
        return {self.owners[shard] for shard in self._norms.missing_shards(clock)}

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _is_owner(self, server: int, shard: int) -> bool:
        """Tell whether a server is the one that this worker speaks to about a shard."""
        if not 0 <= shard < len(self.shards):
            raise wrong(server, shard, f"there are {len(self.shards)} shards")
        return self._route.owners[shard] == server
