"""The mind of a worker's end: pushes until acknowledged, pulls until landed; calls and messages in, messages out.

Theory. Gradients of a clock stand in one of s+2 send buffers, by turns (s: staleness); a push leaves straight out of it
and may have to be sent again, so a buffer is given out anew only when all that it held is Pushed. Values land as
receive_buffers.py says. A shard's values have a version (messages.py); a push of clock c says "I computed this from
version c-s
or newer", so it may leave only when that version has landed: this keeps the fastest within s clocks of the slowest.

Nothing leaves for a server before it has said that it leads the shard (shard_routes.py). When it says so, on a new
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
from psctl.ps.dense.client.host_collection import Gather
from psctl.ps.dense.client.joint_norms import JointNorms
from psctl.ps.dense.client.push_path import Out, Pushing, Say
from psctl.ps.dense.client.receive_buffers import Landings, Take, wrong
from psctl.ps.dense.client.shard_routes import Route
from psctl.ps.dense.lent_buffers import Lending, Lent
from psctl.ps.dense.rank_state_store import Fetching
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import (
    LARGE,
    Aside,
    AsideIs,
    AsideOf,
    Because,
    Begin,
    Beside,
    FromServer,
    Leads,
    Norms,
    NormsOf,
    Pull,
    Pushed,
    Refused,
    SaveNow,
    Taken,
    Values,
    ValuesPart,
)
from psctl.ps.pieces import bytes_view, pieces
from psctl.ps.shards import sizes
from psctl.types import Number, Shard


class ClientMind:
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
        self.buffers = terms.buffers
        """Clocks whose gradients are kept at most."""
        self.held, self.sizes = pieces(terms.layout, shards), sizes(shards)
        self.refused: Refused | None = None
        self.because: dict[int, list[int]] = {}  # server -> workers that it waits for, as it last said
        self._pushes_ask = terms.pushes_ask
        self._route = Route(owners, sorted(set(owners)) if servers is None else servers)
        self._landings = Landings(terms, shards, self.held)
        self.landing = self._landings.front
        self._eager = eager
        landed = self._landed_of
        self._pushing = Pushing(terms, shards, self.held, rank, self._route, lending or Lending(), landed)
        self._outbox, self.pushes = self._pushing.outbox, self._pushing.sending
        self._start: Mapping[str, torch.Tensor] | None = None
        self._norms = JointNorms(self.held)
        self._saving: int | None = None
        self._asides: dict[int, memoryview] = {}  # the last ones that were sent
        self._fetching = Fetching()  # what another rank left beside

    @property
    def owners(self) -> list[int]:
        """For each shard the rank of the server that leads it."""
        return self._route.owners

    # ---- who leads what ---------------------------------------------------------------------------------------------

    def assigned(self, epoch: int, owners: Sequence[int], servers: Sequence[int]) -> list[Say]:
        """Take over an assignment; what is outstanding leaves for shards that moved once their servers are ready."""
        changed, opened = self._route.assigned(epoch, owners, servers)
        said = self._lost(changed)
        self._outbox.moved()
        return said + self._outstanding(opened)

    def lost(self, server: int) -> list[Say]:
        """Take in that the connection to a server is gone; when there is a new one, all goes on by itself."""
        said = self._lost(self._route.lost(server))
        self._outbox.forget_orders(server)
        return said

    def _lost(self, shards: Sequence[int]) -> list[Say]:
        for shard in shards:
            self._landings.lost(shard)
        return [tell for shard in shards for tell in self._pushing.lost(shard)]

    def _leads(self, server: int, message: Leads) -> list[Say]:
        for shard in message.shards:
            self._known(server, shard)
        return self._outstanding(self._route.leads(server, message.epoch, message.shards), server)

    def _outstanding(self, shards: Sequence[int], server: int | None = None) -> list[Say]:
        """Send all that these shards' servers must have; `server` has said that it is ready."""
        outs: list[Say] = []
        again = [shard for shard in shards if self._landings.again(shard)]
        for shard in shards:
            outs += self._begin(shard)
            outs += self._pushing.again(shard)
        for owner in sorted({self.owners[shard] for shard in shards}):
            self._outbox.forget_orders(owner)
            if self._norms.wanted is not None and self._norms.of(self._norms.wanted) is None:
                outs.append(Out(owner, Norms(self._norms.wanted)))
        outs += [*self._pushing.orders(), *self._pull(again)]
        if server is not None and self._saving is not None:
            outs.append(Out(server, SaveNow(self._saving)))
        if 0 in shards:
            for clock in sorted(self._asides):
                outs += self._aside_parts(clock)
            outs += self.ask_aside(self._fetching.wanted) if self._fetching.wanted is not None else []
        return outs

    def _is_open(self, shard: int) -> bool:
        return shard not in self._route.shut

    # ---- out --------------------------------------------------------------------------------------------------------

    def begin(self, values: Mapping[str, torch.Tensor]) -> list[Out]:
        """Send start values, straight out of `values`; they must stay untouched until version `base` has landed."""
        self._start = values
        return [out for shard in range(len(self.shards)) if self._is_open(shard) for out in self._begin(shard)]

    def _begin(self, shard: int) -> list[Out]:
        if self._start is None or self._landings.each[shard].version >= self.terms.base:
            return []
        one = self.shards[shard]
        view = bytes_view(self._start[one.dtype].narrow(0, one.range.start, len(one.range)))
        offsets = range(0, max(1, len(view)), LARGE)
        return [Out(self.owners[shard], Begin(shard, at), view[at : at + LARGE] or None) for at in offsets]

    def sending(self, clock: int) -> dict[str, torch.Tensor]:
        """Return the send buffer of `clock`, once `unacknowledged(clock - buffers)` is empty."""
        return self.pushes.flat(clock)

    def unacknowledged(self, clock: int) -> set[int]:
        """Return the servers that have not acknowledged all pushes up to `clock`."""
        return self._outbox.unacknowledged(clock)

    def unsettled(self) -> set[int]:
        """Return the servers that this worker must not leave yet: they lack an order or an acknowledgement of it."""
        return self._outbox.unsettled()

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float) -> list[Say]:
        """Push a shard's gradients, which stand in `sending(clock)`, or which `pushes.encode` coded.

        `missing(clock, [shard])` must be empty.
        """
        assert not self._landings.missing(clock, [shard], False), f"shard {shard}: push before its values have landed"
        assert not self._outbox.holds(clock - self.buffers), f"clock {clock - self.buffers} is not acknowledged"
        if self._pushes_ask and self._landings.each[shard].asked == clock:
            self.pull(clock + 1)
        return self._pushing.push(clock, shard, present, weight)

    def _landed_of(self, shard: int) -> int:
        return self._landings.each[shard].held

    def step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> list[Say]:
        """Order the step of `clock`, after all its pushes; what may not leave yet comes out of `received`."""
        assert self.terms.update == "server", "where workers step servers need no order"
        return self._pushing.step(clock, groups, scale, save)

    def save(self, version: int) -> list[Out]:
        """Have `version` saved, though its step did not say so."""
        self._saving = version
        return [Out(server, SaveNow(version)) for server in self._route.servers if server in self._route.heard]

    def ask_norms(self, clock: int) -> list[Out]:
        """Ask for the norms of `clock`, all of whose pushes have been handed in."""
        assert self.terms.staleness is not None, "under asp there is no joint gradient"
        self._norms.wanted = clock
        owners = {self.owners[shard] for shard in range(len(self.shards)) if self._is_open(shard)}
        return [Out(server, Norms(clock)) for server in sorted(owners)]

    def pull(self, clock: int, exact: bool = False) -> list[Out]:
        """Ask for all shards at `clock`, first layers first; `exact`: for version `clock` itself, whatever s is.

        Where pushes ask (`Terms.pushes_ask`) nothing is sent but for the start values, and the first push of the clock
        before has called this already.
        """
        pushes_ask = self._pushes_ask and clock > self.terms.base
        if pushes_ask and self._landings.each[0].asked == clock:
            return []
        self.show()  # what has landed: the next values need its place
        if clock > self.terms.base:
            self._start = None
        if self._saving is not None and self._saving < clock:
            self._saving = None
        each = range(len(self.shards))
        wished = [shard for shard in each if self._landings.ask(shard, clock, exact=exact, eager=self._eager)]
        return [] if pushes_ask else self._pull([shard for shard in wished if self._is_open(shard)])

    def _pull(self, shards: Sequence[int]) -> list[Out]:
        wished: dict[tuple[int, int, int], list[int]] = {}
        for shard in shards:
            landing = self._landings.each[shard]
            wished.setdefault((self.owners[shard], landing.asked, landing.wanted), []).append(shard)
        return [
            Out(server, Pull(clock, some, oldest, [self._landings.each[shard].version for shard in some]))
            for (server, clock, oldest), some in wished.items()
        ]

    def aside(self, clock: int, payload: memoryview) -> list[Out]:
        """Send what travels beside the gradients, as it is at the start of `clock`; the payload must stay as it is."""
        self._asides[clock] = payload
        for old in sorted(self._asides)[: -self.buffers]:
            del self._asides[old]
        return self._aside_parts(clock) if self._is_open(0) else []

    def _aside_parts(self, clock: int) -> list[Out]:
        data, size = self._asides[clock], len(self._asides[clock])
        offsets = range(0, max(1, size), LARGE)
        head = partial(Aside, clock, size, rank=self.rank)
        return [Out(self.owners[0], head(at), data[at : at + LARGE] or None) for at in offsets]

    def ask_aside(self, clock: int) -> list[Out]:
        """Ask for what rank 0 sent with `aside`; under asp, what this rank's start before sent."""
        self._fetching.wanted = clock
        whose = self.rank if self.terms.staleness is None else 0
        return [Out(self.owners[0], AsideOf(clock, whose))] if self._is_open(0) else []

    def aside_of(self, clock: int) -> memoryview | None:
        """Return what was asked for with `ask_aside`, once it is here."""
        return self._fetching.of(clock)

    # ---- in ---------------------------------------------------------------------------------------------------------

    def place(self, server: int, message: FromServer, size: int) -> memoryview | None:
        """Return where a payload of `size` bytes lands; None when it is not wanted (any more).

        Raises:
            ProtocolError: the server broke the protocol; nothing was changed.
        """
        if isinstance(message, AsideIs):
            return self._fetching.place(server, message, size)
        if not isinstance(message, Values | ValuesPart):
            raise ProtocolError(f"server/{server}: {type(message).__name__} with a payload", where=f"server/{server}")
        if not self._known(server, message.shard):
            return None
        return self._landings.place(server, message, size)

    def received(self, server: int, message: FromServer, size: int = 0, lent: Lent = None) -> list[Say]:
        """Take in a message whose payload, if any, stands where `place` said, or is `lent`; a wait may be over.

        Raises:
            ProtocolError: as `place`.
        """
        match message:
            case Values() | ValuesPart():
                return self._landed(server, message, size, lent)
            case Leads():
                return self._leads(server, message)
            case Taken():
                if self._known(server, message.shard) and self._is_open(message.shard):
                    return self._pushing.taken(message.clock, message.shard)
            case Pushed():
                self._known(server, message.shard)
                return self._pushing.pushed(message.clock, message.shard)
            case NormsOf():
                if self._known(server, message.shard):
                    self._norms.filled(server, message)
            case AsideIs():
                self._fetching.filled(server, message, size)
            case Because():
                self.because[server] = message.workers
            case Refused():
                self.refused = message
        return []

    def _landed(self, server: int, message: Values | ValuesPart, size: int, lent: Lent) -> list[Say]:
        if not self._known(server, message.shard) or not self._landings.filled(server, message, size, lent):
            return []
        said = [] if self.terms.staleness is None else self._pushing.pushed(message.version - 1, message.shard)
        if self.terms.update == "server" and self.terms.staleness is None:
            said = self._pushing.orders()
        return [*said, *self._pull([message.shard])] if self._landings.again(message.shard) else said

    # ---- others of this host ----------------------------------------------------------------------------------------

    def line_up(self, rank: int) -> list[Say]:
        """Take in that there is a line to a worker of this host."""
        return self._pushing.line_up(rank)

    def line_down(self, rank: int) -> list[Say]:
        """Take in that the line to a worker of this host is broken."""
        return self._pushing.line_down(rank)

    def beside(self, rank: int, message: Beside, data: Lent) -> list[Say]:
        """Take in what a worker of this host says; `data`: what it hands in, None where that cannot be read.

        Raises:
            ProtocolError: it does not go together with us; nothing was changed.
        """
        return self._pushing.beside(rank, message, data)

    def summed(self, gather: Gather, present: bytes) -> list[Say]:
        """Take in that the sum of a Gather stands in its place; `present`: which pieces are in it."""
        return self._pushing.summed(gather, present)

    # ---- what a wait is for -----------------------------------------------------------------------------------------

    def missing(self, clock: int, shards: Sequence[int] | None = None, exact: bool = False) -> list[int]:
        """Return those of the shards (None: of all) whose values for `clock` have not landed."""
        return self._landings.missing(clock, shards, exact)

    def opened(self, shards: Sequence[int], is_open: bool) -> None:
        """Tell that the user waits for these shards, so that values may land in the front; or no longer does."""
        for shard in shards:
            self._landings.each[shard].open = is_open

    def deliver(self, take: Take) -> None:
        """From now on have landed values taken, in the place of bringing them to the front; between wait and pull."""
        self._landings.take = take

    def show(self, shards: Sequence[int] | None = None) -> None:
        """Bring landed values to where they are read (receive_buffers.py says what this may overlap with)."""
        self._landings.show(shards)

    @property
    def unanswered(self) -> int:
        """How many shards were pulled and have not come."""
        return self._landings.unanswered

    def clocks(self, shards: Sequence[int]) -> int:
        """Return the clock before which everyone's clocks are in the front, for all of these shards."""
        return min((self._landings.each[shard].shown_clocks for shard in shards), default=self.terms.base)

    def shown(self, shards: Sequence[int]) -> int:
        """Return the oldest version in the front among these shards; as `show`, it may overlap with other calls."""
        return min((self._landings.each[shard].shown for shard in shards), default=self.terms.base)

    def presence(self, clock: int) -> list[bool]:
        """Return, for each trainable parameter, whether any worker had a gradient at `clock`."""
        return self._landings.presence(clock)

    def norms(self, clock: int) -> dict[int, float] | None:
        """Return the squares of `clock` by parameter, summed in piece order; None when some shard's are missing."""
        return self._norms.of(clock)

    def without_norms(self, clock: int) -> set[int]:
        """Return the servers whose norms of `clock` are missing."""
        return {self.owners[shard] for shard in self._norms.missing(clock)}

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _known(self, server: int, shard: int) -> bool:
        """Tell whether a server is the one that this worker speaks to about a shard."""
        if not 0 <= shard < len(self.shards):
            raise wrong(server, shard, f"there are {len(self.shards)} shards")
        return self._route.owners[shard] == server
