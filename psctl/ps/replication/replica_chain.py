"""One server's part in the chain of replicas of one shard: entries down, acknowledgements up, copies, hand-over.

Theory (van Renesse & Schneider, Chain replication, OSDI'04; after aggregation as in the parameter server, OSDI'14). The
head (*primary*) applies an entry and forwards it; each member applies it and forwards it on; the tail acknowledges, and
the acknowledgement goes back up. So a member holds all that the members after it hold, and what the primary knows as
acknowledged is on all of them. An entry's number is the version that it steps from. At most `window` entries are
unacknowledged; a member keeps them, and the last `window` ones, to send them again to a new successor.

The assignment (`assigned`) says who is in the chain and who is being filled (copies). Entries and acknowledgements of
an older one (an older *epoch*) are refused, so a primary that does not know that it was deposed can never have anything
acknowledged. On a new assignment everybody sends his successor again what it may lack, and tells his predecessor what
it has.

    role       in the assignment            what it does
    none       -                            nothing
    copying    to be filled                 is copied to by the primary, then gets entries from it; does not count, but
                                            the primary never gets more than CATCH_UP entries ahead; from the first
                                            time that it has all (CaughtUp) it counts, so it may join at either end
    member     in the chain, not first      forwards and acknowledges
    heir       first; the former primary    waits for what that had taken in (HandOver); then primary
               lives
    primary    first                        takes pushes, makes entries
    handing    was first; lives             makes no more entries; the heir follows it, and the rest of the chain the
                                            heir; when they have all, it hands over; then as assigned

A chain that begins has nothing to copy: who gets the first version passes it on to a successor that has none.

The heir may die before it took over; then the next of the chain leads at once, maybe without the last entries of the
one that would have handed over. What that has is *void* from then on: it says that it has nothing, and is copied to.
But it holds all that was ever acknowledged, and while it says so nothing else is; so if it must lead before the copy
came, it leads with what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from psctl.errors import ProtocolError
from psctl.ps.messages import (
    Ask,
    Between,
    CopyBegin,
    CopyEnd,
    CopyPart,
    Forward,
    Forwarded,
    ForwardPart,
    HandOver,
    TookOver,
)
from psctl.ps.outputs import ChainOutput, HandedOver, ToServer
from psctl.ps.replication.chain_downstream import Downstream
from psctl.ps.replication.chain_entries import Copying, copy_messages
from psctl.ps.replication.chain_incoming import Incoming
from psctl.ps.replication.replica_roles import AFTER_HANDING, ROLES, Follower, Role, Standing, place_of
from psctl.ps.replication.replicated_state import Replicated


class Chain:
    """See the module's docstring. Calls must not overlap.

    Args:
        shard: its index.
        me: this server's rank.
        machine: what is replicated.
        up: tells whether there is a connection to a server.
        epoch: the newest assignment so far, in which this server had no part in the shard.
        window: entries that may be unacknowledged.
        copying: shared by the server's shards.
    """

    def __init__(
        self,
        shard: int,
        me: int,
        machine: Replicated,
        up: Callable[[int], bool],
        epoch: int = -1,
        window: int = 1,
        copying: Copying | None = None,
    ) -> None:
        self.shard, self.me = shard, me
        self._now = Standing(me, epoch)
        self.role: Role = self._now.role
        """What this server is to the shard."""
        self.leads = False
        """Whether pushes and pulls are answered here: it is the primary."""
        self._machine, self._up = machine, up
        self._down = Downstream(shard, self._now, machine, up, window, copying or Copying())
        self._former: int | None = None  # who led when this server did not
        self._incoming = Incoming(shard, machine)
        self._handed: tuple[int, int, bytes, memoryview] | None = None  # source, epoch, head, data: before its time
        self._offered = False  # handing: HandOver was sent
        self._given = False  # handing: all that was here was offered to this heir
        self._handing_since = -1  # the assignment that made the heir the first
        self._asked: tuple[int, int] | None = None  # who asked by an assignment that is not known here yet
        self._took = ""  # the last copy that was taken

    # ---- what the shard asks ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The newest assignment that is known here."""
        return self._now.epoch

    @property
    def members(self) -> list[int]:
        """The servers of the chain, primary first."""
        return self._now.chain

    @property
    def followers(self) -> Mapping[int, Follower]:
        """The servers that get entries from here, with what each has."""
        return self._down.each

    @property
    def acknowledged(self) -> int:
        """The version that all that count have; -1: there is none."""
        return self._down.acknowledged

    @property
    def settled(self) -> bool:
        """Whether all that count have all there is."""
        return self._down.settled

    @property
    def keeps(self) -> bool:
        """Whether an entry's payload is needed after it was applied."""
        return bool(self._down.each) or self._now.role != "primary"

    @property
    def may_append(self) -> bool:
        """Whether the primary may make another entry."""
        return self._down.may_append

    # ---- the assignment ---------------------------------------------------------------------------------------------

    def assigned(
        self, epoch: int, chain: Sequence[int], copies: Sequence[int], alive: Callable[[int], bool]
    ) -> list[ChainOutput]:
        """Take over who is in the chain from `epoch` on.

        Args:
            epoch: number of the assignment; an old one is ignored.
            chain: ranks of the servers in it, primary first.
            copies: those that are to be filled.
            alive: tells whether a server lives.
        """
        now = self._now
        if epoch <= now.epoch or not chain:
            return []
        if now.role != "heir":
            self._former = now.chain[0] if now.chain else None
        if now.chain[:1] != [chain[0]]:
            self._handing_since, self._given = epoch, False
        now.epoch, now.chain, now.copies = epoch, list(chain), list(copies)
        witness = chain[0] if now.role in ("handing", "primary") else self._former
        lives = witness is not None and witness != self.me and alive(witness)
        self._become(ROLES[now.role, place_of(self.me, chain, copies)][0 if lives else 1])
        self._offered = False
        self._incoming.drop_older(epoch)
        outputs = self._take_over()
        known = set(self._down.each)
        self._down.follow_anew()
        self._down.prune()
        outputs += self._down.bring_all(known)
        asked = self._asked is not None and self._asked[1] <= epoch
        if self._asked is not None and asked:
            if self.leads and self._asked[0] != self.me:
                outputs.append(ToServer(self._asked[0], TookOver(self.shard, epoch)))
            self._asked = None
        for server, message in self._down.due():
            outputs += self._acked(server, message)
        return outputs + self._tell_up(missed=asked) + self._hand()

    def _become(self, role: Role) -> None:
        self._now.role = self.role = role
        self.leads = role == "primary"
        if role == "primary":
            self._now.void = False  # nobody is left who has more
        if role == "none":
            self._down.log.clear()
            self._incoming.drop_older(self.epoch)
            self._incoming.drop_copy(self.epoch)
            if self._handed is not None and self._handed[1] < self.epoch:
                self._handed = None

    # ---- down -------------------------------------------------------------------------------------------------------

    def append(self, number: int, head: bytes, payload: memoryview) -> list[ChainOutput]:
        """Forward the entry that the primary has just applied; `payload` is kept until `release`."""
        return self._down.append(number, head, payload)

    def fill(self) -> list[ChainOutput]:
        """Begin copies that had to wait for others."""
        return self._down.fill() if self._down.each else []

    def begun(self) -> list[ChainOutput]:
        """The machine has its first version: pass it on."""
        return self._down.bring_all() + self._hand()

    def joined(self, server: int) -> list[ChainOutput]:
        """A connection to a server is made: say again what may have been lost with the one before."""
        return self._down.bring(server, again=True) + self._tell_up(server) + self._hand(again=server)

    def lost(self, server: int) -> None:
        """The connection to a server is gone."""
        self._down.lost(server)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def place(self, server: int, message: Between, size: int) -> memoryview | None:
        """Return where a payload goes; None when it is not wanted.

        Raises:
            ProtocolError: it does not fit; nothing was changed.
        """
        if isinstance(message, Forward):
            self._open(server, message)
        return self._incoming.place(server, message, size)

    def received(self, server: int, message: Between, size: int) -> list[ChainOutput]:
        """Take in what another server said; a payload, if any, stands where `place` said.

        Raises:
            ProtocolError: as `place`.
        """
        if self.leads and isinstance(message, Forward | Ask) and message.epoch >= self.epoch:
            return [ToServer(server, TookOver(self.shard, message.epoch))]  # who would hand over need not
        match message:
            case Forward() | ForwardPart():
                return self._entry(server, message, size)
            case Ask():
                if message.epoch <= self.epoch:
                    return self._tell_up(missed=True)  # a copy that was sent before, and is not the one taken, is lost
                self._asked = (server, message.epoch)
                return []
            case Forwarded():
                return self._acked(server, message)
            case CopyBegin() | HandOver():
                meant = self._meant(server, message.epoch)
                self._incoming.open_copy(server, message if meant else None)
                return []
            case CopyPart():
                self._incoming.copy_filled(server, size)
                return []
            case CopyEnd():
                return self._filled(server)
            case TookOver():
                return self._took_over(message)
            case _:
                raise ProtocolError(f"server/{server}: {type(message).__name__} is not about a chain")

    def _meant(self, server: int, epoch: int) -> bool:
        """Tell whether a copy may be taken: from the future, or from whom this server follows."""
        if epoch > self.epoch or (server == self._before_me and self.role != "none"):
            return True
        return epoch == self.epoch and self.role in ("copying", "member", "heir", "primary")

    def _open(self, server: int, message: Forward) -> None:
        """Begin an entry, if it is the next one and of no older epoch; else what comes in from others goes on."""
        if message.epoch < self.epoch or (message.epoch == self.epoch and self.role in ("none", "primary")):
            return
        if self.role == "handing":
            return  # what it has is the newest, or void
        if message.number == self._down.version:
            self._incoming.open_entry(server, message)

    def _entry(self, server: int, message: Forward | ForwardPart, size: int) -> list[ChainOutput]:
        if isinstance(message, Forward):
            if size == 0:
                self._open(server, message)
            if not self._incoming.is_open(server, message):
                missed = message.number > self._down.version
                return self._tell_up(missed=missed) if message.epoch >= self.epoch else []
        whole = self._incoming.entry_filled(server, message, size)
        if whole is None:
            return []
        begin, payload = whole
        self._machine.apply(begin.head, payload, kept=True)
        return self.append(begin.number, begin.head, payload) + self._tell_up()

    @property
    def _before_me(self) -> int | None:
        """Whom this server follows."""
        return self._former if self.role == "heir" else self._now.before

    def _tell_up(self, only: int | None = None, *, missed: bool = False) -> list[ChainOutput]:
        """Acknowledge to whom this server follows (if it is `only`)."""
        source = self._before_me
        if source is None or source == self.me or only not in (None, source):
            return []
        has = self._down.version
        heir = self._now.chain[0] if self.role == "handing" else None  # it is before this server, too
        if heir is not None and (has < 0 or self._down.each[heir].has < has):
            return []  # it would be ahead of its predecessors
        after = [one.acked for server, one in self._down.each.items() if one.counts and server != heir]
        return [ToServer(source, Forwarded(self.shard, min([has, *after]), has, self.epoch, self._took, missed))]

    def _acked(self, server: int, message: Forwarded) -> list[ChainOutput]:
        outputs, changed = self._down.heard(server, message)
        return outputs + (self._tell_up() if changed else []) + self._hand()

    def _filled(self, server: int) -> list[ChainOutput]:
        whole = self._incoming.copied(server)
        if whole is None or not self._meant(server, whole[0].epoch):
            return self._tell_up(missed=True)
        begin, data = whole
        if isinstance(begin, HandOver):
            self._handed = (server, begin.epoch, begin.head, data)
            return self._take_over()
        if self.role == "primary" and begin.epoch <= self.epoch:
            return []
        self._took = begin.copy
        if self.role == "primary":
            return []  # handing by that assignment
        if self.role == "handing":  # what it has is the newest, or void
            return self._tell_up()
        first, self._now.void = self._down.version < 0, False
        self._machine.restore(begin.version, begin.head, data)
        self._incoming.drop_entry()
        self._down.log.clear()
        outputs = self.begun() if first else []
        return outputs + self._down.renewed() + self._tell_up()

    # ---- hand-over --------------------------------------------------------------------------------------------------

    def _hand(self, again: int | None = None) -> list[ChainOutput]:
        """Hand over when the heir, and all that count, have all."""
        if self.role != "handing":
            return []
        first = self._now.chain[0]
        heir = self._down.each.get(first)
        if heir is None or heir.told < self.epoch or not self.settled or not self._up(first):
            return []
        if self._offered and again != first:
            return []
        self._offered = self._given = True
        head, data = self._machine.staged()
        version = self._machine.version
        assert version is not None, "it is settled"
        begin = HandOver(self.shard, version, self.epoch, sum(len(one) for one in data), head)
        return [ToServer(first, begin), *copy_messages(first, self.shard, data)]

    def _take_over(self) -> list[ChainOutput]:
        if self._handed is None or self._handed[1] > self.epoch:
            return []
        (source, epoch, head, data), self._handed = self._handed, None
        if epoch < self.epoch or self.role not in ("heir", "primary"):
            return []
        outputs: list[ChainOutput] = [ToServer(source, TookOver(self.shard, epoch))]
        if self.role == "primary":
            return outputs  # again, after a broken connection
        self._machine.restage(head, data)
        self._become("primary")
        self._former = self.me
        known = set(self._down.each)
        self._down.follow_anew()
        for server in set(self._down.each) - known:
            outputs += self._down.bring(server, again=True)
        return outputs

    def _took_over(self, message: TookOver) -> list[ChainOutput]:
        now = self._now
        if now.role != "handing" or message.epoch < self._handing_since:
            return []
        if not (self.settled or self._given):  # who leads began without what is only here
            now.void = True
            self._down.log.clear()
        self._become(AFTER_HANDING[place_of(self.me, now.chain, now.copies)])
        self._down.follow_anew()
        return [HandedOver(self.epoch, self.shard), *self._tell_up(missed=True)]
