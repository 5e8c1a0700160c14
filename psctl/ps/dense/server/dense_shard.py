"""The mind of one shard on its server: pushes and orders in, sums, steps and answers out; it never waits.

Theory. At any time the shard has one version v (state.py). On its primary the next one is under way:

    pushes           staged until whole (push_staging.py) -> Taken
    sum, mean        of a clock's members in rank order (sums.py); asked-for norms are answered from it
    apply            when the step order is in too: an entry goes down the chain of replicas (chain.py), and every
                     member takes the same step; `update: worker`: the mean itself is the next version
    acknowledged     when all of the chain have version v: pulls that it satisfies are answered, the others' pushes are
                     acknowledged (Pushed); only then is the next one applied

A pull is answered by a version that is `oldest` or newer, and newer than what the worker has; else it is remembered.
Who is not the primary drops what workers say: the primary has told them, or will, that it leads (Leads), and on that
they send all that is outstanding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psctl.errors import ProtocolError
from psctl.ps.dense.clock_ledger import Membership, Order
from psctl.ps.dense.lent_buffers import Lending, Lent
from psctl.ps.dense.server.aggregation import intake
from psctl.ps.dense.server.push_staging import Ready
from psctl.ps.dense.server.replicated_shard import ShardMachine
from psctl.ps.dense.server.shard_answers import Answers, Readers
from psctl.ps.dense.shard_state import ShardState, Terms
from psctl.ps.messages import (
    Between,
    Leads,
    Pull,
    Push,
    Pushed,
    PushPart,
    Taken,
)
from psctl.ps.outputs import ChainOutput, Output, Send, Snapshot
from psctl.ps.pieces import Piece, bytes_view
from psctl.ps.replication.chain_entries import Copying
from psctl.ps.replication.replica_chain import Chain
from psctl.ps.snapshot import Loading
from psctl.types import Shard


class ShardMind:
    """One shard; see the module's theory. Its calls must not overlap; two shards know nothing of each other.

    Args:
        terms: what the job agreed on.
        shard: which one.
        held: its pieces.
        me: rank of this server.
        up: tells whether there is a connection to a server.
        membership: which ranks take part.
        epoch: the newest assignment so far, in which this server had no part in the shard.
        copying: shared by the server's shards.
        lending: where buffers come from, and which workers read them there.
        restored: start values come from a checkpoint (`loaded`), not from rank 0.
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
        copying: Copying | None = None,
        lending: Lending | None = None,
        *,
        restored: bool = False,
    ) -> None:
        self.shard, self.held, lending = shard, held, lending or Lending()
        self._readers = Readers()
        self.state = ShardState(terms, shard, held, self._readers.may_read, lending)
        self._terms, self._restored, self._pushes_ask = terms, restored, terms.pushes_ask
        self._intake = intake(self.state, membership or Membership.first(terms.world, terms.base))
        self._answers = Answers(self.state, self._intake, self._readers, lending)
        self.chain = Chain(shard.index, me, ShardMachine(self.state, self._intake), up, epoch, copying=copying)
        self._begun = 0  # bytes of start values
        self._saved = terms.base - 1  # newest version that was copied for a checkpoint
        self._owed: set[int] = set()  # ranks that wait to hear that what they pushed is on all of the chain
        self.led_from = terms.base - 1
        """The newest checkpoint that whoever led the shard before has made, or would have."""

    @property
    def version(self) -> int | None:
        """The newest version here; None: start values are not all here."""
        return self.state.version

    @property
    def leads(self) -> bool:
        """Whether this server is the shard's primary."""
        return self.chain.leads

    # ---- the chain --------------------------------------------------------------------------------------------------

    def assigned(
        self, epoch: int, chain: Sequence[int], copies: Sequence[int], alive: Callable[[int], bool]
    ) -> list[Output]:
        """Take over an assignment (chain.py)."""
        return self._after(self.chain.leads, self.chain.assigned(epoch, chain, copies, alive))

    def place_from(self, server: int, message: Between, size: int) -> memoryview | None:
        """Return where another server's payload goes; None when it is not wanted."""
        return self.chain.place(server, message, size)

    def received_from(self, server: int, message: Between, size: int) -> list[Output]:
        """Take in what another server said."""
        return self._after(self.chain.leads, self.chain.received(server, message, size))

    def server_joined(self, server: int) -> list[Output]:
        """Say again what may have been lost with an older connection."""
        return self._after(self.chain.leads, self.chain.joined(server))

    def server_lost(self, server: int) -> list[Output]:
        """Take in that the connection to a server is gone."""
        self.chain.lost(server)
        return self._advance()

    def _after(self, led: bool, outputs: Sequence[ChainOutput]) -> list[Output]:
        """Go on after the chain took something in."""
        if self.leads and not led and self.version is not None:
            now = self._intake.membership.changes[-1][1]
            self.led_from = 1 + min((self._intake.applied_of(rank) for rank in now), default=self.version)
            self._owed = set(self._intake.membership.everyone)
        if led and not self.leads:
            self._answers.clear()
        if self.chain.role in ("none", "copying", "member"):
            self._intake.clear()
        return [*outputs, *self._advance()]

    # ---- start values -----------------------------------------------------------------------------------------------

    def place_begin(self, rank: int, offset: int, size: int) -> memoryview | None:
        """Return where start values go; None when they are not wanted."""
        if not (self.leads or self.chain.role == "handing") or self.version is not None:
            return None
        if rank != 0 or self._restored:
            raise self._wrong(rank, "sent start values, which are not its to send")
        if offset == 0:
            self._begun = 0
        if offset != self._begun or offset + size > self.state.nbytes:
            raise self._wrong(rank, f"start values [{offset}, {offset + size})")
        return bytes_view(self.state.values)[offset : offset + size]

    def begun(self, rank: int, offset: int, size: int) -> list[Output]:
        """Count start values in; the last ones make the first version."""
        if self.place_begin(rank, offset, size) is None:
            return []
        self._begun += size
        if self._begun < self.state.nbytes:
            return []
        self.state.start()
        return [*self.chain.begun(), *self._advance()]

    def loaded(self, loading: Loading) -> list[Output]:
        """Take over what was loaded: it is the first version."""
        self.state.loaded(loading)
        return [*self.chain.begun(), *self._advance()]

    # ---- pushes and orders ------------------------------------------------------------------------------------------

    def place(self, rank: int, message: Push | PushPart, size: int) -> memoryview | None:
        """Return where a push's bytes go; None when they are not wanted.

        Raises:
            ProtocolError: wrong size, wrong offset, wrong clock; the worker's fault, and nothing was changed.
        """
        if not self.chain.leads:
            return None
        self._check(rank, message)
        return self._intake.place(rank, message, size)

    def _check(self, rank: int, message: Push | PushPart) -> None:
        version = self.state.version
        if isinstance(message, Push) and message.landed > (-1 if version is None else version):
            raise self._wrong(rank, f"push that claims version {message.landed}, which was never sent")

    def pushed(self, rank: int, message: Push | PushPart, size: int, lent: Lent = None) -> list[Output]:
        """Count a push's bytes in; the last ones are acknowledged as taken, and all goes on as far as it can.

        Args:
            lent: all of its bytes, where they lie in shared memory.
        """
        if not self.chain.leads:
            return []
        if not size:
            self._check(rank, message)  # else `place` did
        if isinstance(message, Push):
            self._readers.landed(rank, message.landed)
            if message.covers:
                self._readers.covered(message.covers, message.clock)  # who hands in a clock has its version
            if self._pushes_ask:
                self._answers.pushed(rank, message.clock)
        if message.clock <= self._intake.clock_of(rank):
            self._intake.late(rank, message)
            if not isinstance(message, Push):
                return []
            applied = self._intake.applied_of(rank) >= message.clock
            self._owed.update([rank] if applied else ())
            return [*self._taken([rank], message.clock), *self._again(), *(self._advance() if applied else ())]
        if isinstance(message, Push) and lent is not None:
            taken = self._intake.lend(rank, message, lent)
        else:
            taken = self._intake.filled(rank, message, size)
        return [*self._taken(taken, message.clock), *self._again(), *(self._go_on() if taken else ())]

    def _taken(self, ranks: Sequence[int], clock: int) -> list[Output]:
        """Tell that pushes are whole: orders wait for it, and where workers hold the values none does."""
        waits = self._terms.update == "server"
        return [Send(rank, Taken(self.shard.index, clock)) for rank in ranks] if waits else []

    def _again(self) -> list[Output]:
        """Have those push again whose pushes were given up, though they count on them."""
        if not self._intake.given_up:
            return []
        ranks = sorted(self._intake.given_up)
        self._intake.given_up.clear()
        if not self.chain.leads:
            return []
        self._answers.renewed()
        return [Send(rank, Leads(self.chain.epoch, [self.shard.index])) for rank in ranks]

    def ordered(self, clock: int, order: Order) -> list[Output]:
        """Take in how to apply `clock`."""
        self._intake.ordered(clock, order)
        return self._advance()

    def cut(self, rank: int, clock: int) -> list[Output]:
        """Drop what a worker that is gone pushed after `clock`."""
        self._intake.cut(rank, clock)
        return [*self._again(), *self._advance()]

    def members(self, membership: Membership) -> list[Output]:
        """Take over which ranks take part."""
        self._readers.only(membership.changes[-1][1])
        self._intake.changed(membership)
        return [*self._again(), *self._advance()]

    # ---- going on ---------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Output]:
        """Do all that can be done now."""
        if not self.chain.leads or self.state.version is None:
            return []
        return [*self._settle(), *self._go_on()]

    def _go_on(self) -> list[Output]:
        """Apply what is ready, and tell of each version what is on all of the chain."""
        outputs: list[Output] = [*self.chain.fill(), *self._answers.norms()]
        while self.chain.may_append and (ready := self._intake.ready()) is not None:
            outputs += self._apply(ready)
            outputs += self._settle()
            outputs += self._answers.norms()
        return outputs

    def _apply(self, ready: Ready) -> list[ChainOutput]:
        """Make the next version here, and pass it on."""
        entry, gradient, keeps, number = ready.entry, ready.gradient, self.chain.keeps, self.state.version
        assert number is not None, "a clock was summed"
        some = any(entry.present)
        self._answers.renewed()
        if not some:
            self.state.give(gradient)
        self.state.enter(entry, gradient if some else None, kept=keeps)
        self._owed.update(entry.ranks)
        if not keeps:
            return []
        return self.chain.append(
            number, self.state.head(entry), self.state.bytes_of(gradient) if some else memoryview(b"")
        )

    def _settle(self) -> list[Output]:
        """Tell what is on all of the chain now."""
        if not self.chain.settled:
            return []
        answers = self._answers.values()
        outputs: list[Output] = []
        if self._terms.staleness is not None:  # values say it as well; but under asp the version is not the clock
            for answer in answers:
                self._owed.discard(answer.rank)
        if self._owed:
            owed, self._owed = sorted(self._owed), set()
            outputs += [Send(rank, Pushed(self.shard.index, self._intake.applied_of(rank))) for rank in owed]
        outputs += answers
        return outputs + self._snapshot() if self._intake.saves else outputs

    def save(self, rank: int, version: int) -> list[Output]:
        """Copy version `version`, now or when it is reached; once, however many ask."""
        if version <= self._saved or not self.leads:
            return []
        if self._terms.update != "server" or self._beyond(version):
            raise self._wrong(rank, f"asked to save version {version} of a shard at {self.version}")
        self._intake.saves.add(version)
        return self._advance()

    def _beyond(self, version: int) -> bool:
        """Whether some clock is applied already that `version` does not hold."""
        return any(clock >= version for clock in self.state.applied.values())

    def _snapshot(self) -> list[Output]:
        outputs: list[Output] = []
        for version in sorted(self._intake.saves):
            ranks = self._intake.membership.at(max(0, version - 1))
            base = self._terms.base - 1
            if version <= self._saved or self._beyond(version):
                self._intake.saves.discard(version)
            elif all(self.state.applied.get(rank, base) == version - 1 for rank in ranks):
                self._intake.saves.discard(version)
                self._saved = version
                outputs.append(Snapshot(version, self.shard.index, self.state.checkpoint()))
        return outputs

    # ---- answers ----------------------------------------------------------------------------------------------------

    def pull(self, rank: int, message: Pull) -> list[Output]:
        """Answer with the values, or remember that this rank waits."""
        if not self.chain.leads:
            return []
        self._answers.pulled(rank, message)
        return [*self._answers.values()] if self.chain.settled else []

    def norms(self, rank: int, clock: int) -> list[Output]:
        """Answer with the squares of `clock`, or remember that this rank waits."""
        if not self.chain.leads:
            return []
        self._answers.asked(rank, clock)
        return [*self._answers.norms()]

    def missing(self, clock: int) -> list[int]:
        """Return the ranks without whose pushes no pull at `clock` can be answered; under asp, those that a checkpoint
        or a worker that asked for everyone's clocks waits for."""
        if not self.chain.leads or self.state.version is None:
            return []
        asked, staleness = [*self._intake.saves, *self._answers.wished], self._terms.staleness
        needed = max(asked, default=0) if staleness is None else clock - staleness
        return self._intake.missing(needed) if self._intake.clocks < needed else []

    def held_of(self, rank: int) -> int:
        """Return the last clock of a rank that is whole here; under asp, that is applied: the rest will be dropped."""
        asp = self._terms.staleness is None
        return self._intake.applied_of(rank) if asp else self._intake.clock_of(rank)

    def apart_of(self, rank: int) -> int:
        """Return the last clock of a rank that is whole here and in nobody else's hands: a host sum goes when any of
        its ranks is cut. Under asp as `held_of`."""
        return min(self.held_of(rank), self._intake.apart_of(rank))

    def lost(self, rank: int) -> None:
        """Forget a rank's connection, but not what it may read on until a push says what it, or a successor, has."""
        self._answers.lost(rank)
        self._readers.lost(rank)
        self._intake.drop_partial(rank)

    def _wrong(self, rank: int, what: str) -> ProtocolError:
        return ProtocolError(f"worker/{rank}, shard {self.shard.index}: {what}", where=f"worker/{rank}")
