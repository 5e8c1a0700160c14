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
"""

# long: one state machine; what a role does is read beside what the others do

from __future__ import annotations

from collections.abc import Callable, Sequence

from psctl.errors import ProtocolError
from psctl.store.entries import Copying, Entries, copy_messages
from psctl.store.incoming import Incoming
from psctl.store.machine import Replicated
from psctl.store.messages import (
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
from psctl.store.outputs import CaughtUp, ChainOutput, HandedOver, ToServer
from psctl.store.roles import AFTER_HANDING, ROLES, Follower, Role, place_of

CATCH_UP = 4
"""Entries that a primary may be ahead of a member that is being filled."""


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
        self.shard, self.me, self.epoch = shard, me, epoch
        self.role: Role = "none"
        self.followers: dict[int, Follower] = {}
        self._machine, self._up, self._window = machine, up, window
        self._copying = copying or Copying()
        self._chain: list[int] = []
        self._copies: list[int] = []
        self._former: int | None = None  # who led when this server did not
        self._log = Entries(shard, machine)
        self._incoming = Incoming(shard, machine)
        self._handed: tuple[int, int, bytes, memoryview] | None = None  # source, epoch, head, data: before its time
        self._offered = False  # handing: HandOver was sent
        self._given = False  # handing: all that was here was offered to this heir
        self._handing_since = -1  # the assignment that made the heir the first
        self._later: dict[int, Forwarded] = {}  # acknowledgements by an assignment that is not known here yet
        self._asked: tuple[int, int] | None = None  # who asked by an assignment that is not known here yet
        self._sent = 0  # copies
        self._took = ""  # the last copy that was taken

    # ---- what the shard asks ----------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether pushes and pulls are answered here."""
        return self.role == "primary"

    @property
    def acknowledged(self) -> int:
        """The version that all that count have; -1: there is none."""
        version = -1 if self._machine.version is None else self._machine.version
        return min([version, *(one.acked for one in self.followers.values() if one.counts)])

    @property
    def settled(self) -> bool:
        """Whether all that count have all there is."""
        return self._machine.version is not None and self.acknowledged == self._machine.version

    @property
    def keeps(self) -> bool:
        """Whether an entry's payload is needed after it was applied."""
        return bool(self.followers) or self.role != "primary"

    @property
    def may_append(self) -> bool:
        """Whether the primary may make another entry."""
        version = self._machine.version
        if self.role != "primary" or version is None or version - self.acknowledged >= self._window:
            return False
        if any(one.told < self.epoch for one in self.followers.values() if one.counts):
            return False  # one may have what only a dead primary gave it
        return all(version - one.acked < CATCH_UP for one in self.followers.values() if one.filled)

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
        if epoch <= self.epoch or not chain:
            return []
        if self.role != "heir":
            self._former = self._chain[0] if self._chain else None
        if self._chain[:1] != [chain[0]]:
            self._handing_since, self._given = epoch, False
        self.epoch, self._chain, self._copies = epoch, list(chain), list(copies)
        witness = chain[0] if self.role in ("handing", "primary") else self._former
        lives = witness is not None and witness != self.me and alive(witness)
        self.role = ROLES[self.role, place_of(self.me, chain, copies)][0 if lives else 1]
        self._offered = False
        self._incoming.drop_older(epoch)
        if self.role == "none":
            self._forget()
        outputs = self._take_over()
        known = set(self.followers)
        self._follow_anew()
        self._prune()
        for server in list(self.followers):
            outputs += self._bring(server, again=server not in known)
        if self._asked is not None and self._asked[1] <= epoch:
            if self.leads and self._asked[0] != self.me:
                outputs.append(ToServer(self._asked[0], TookOver(self.shard, epoch)))
            self._asked = None
        for server in [server for server, later in self._later.items() if later.epoch <= epoch]:
            outputs += self._acked(server, self._later.pop(server))
        return outputs + self._tell_up() + self._hand()

    def _follow_anew(self) -> None:
        """Find who gets entries from here now; what is known of those who did before stays."""
        before, self.followers = self.followers, {}
        position = self._chain.index(self.me) if self.me in self._chain else len(self._chain)
        members = self._chain[position + 1 : position + 2]
        if self.role == "handing":
            members = [self._chain[0], *members]
        for server in members:
            # It says what it has, and what those after it have now, before anything counts as acknowledged.
            known = before.get(server, Follower(True, filled=True))
            known.counts, known.acked = True, known.acked if known.told >= self.epoch else -1
            self.followers[server] = known
        for server in self._copies if self.role == "primary" else ():
            self.followers[server] = before.get(server, Follower(False))
        for server in before.keys() - self.followers.keys():
            self._copying.end(self.shard, server)

    def _forget(self) -> None:
        self._log.clear()
        self._incoming.drop_older(self.epoch)
        self._incoming.drop_copy(self.epoch)
        if self._handed is not None and self._handed[1] < self.epoch:
            self._handed = None

    # ---- down -------------------------------------------------------------------------------------------------------

    def append(self, number: int, head: bytes, payload: memoryview) -> list[ChainOutput]:
        """Forward the entry that the primary has just applied; `payload` is kept until `release`."""
        self._log.add(number, head, payload)
        outputs: list[ChainOutput] = []
        for server, follower in self.followers.items():
            if follower.filled and self._up(server):
                outputs += self._log.messages(server, number, self.epoch)
        self._prune()
        return outputs

    def fill(self) -> list[ChainOutput]:
        """Begin copies that had to wait for others."""
        waiting = [server for server, follower in self.followers.items() if not follower.filled]
        return [output for server in waiting for output in self._bring(server, again=True)]

    def begun(self) -> list[ChainOutput]:
        """The machine has its first version: pass it on."""
        outputs: list[ChainOutput] = []
        for server in list(self.followers):
            outputs += self._bring(server, again=True)
        return outputs + self._hand()

    def joined(self, server: int) -> list[ChainOutput]:
        """A connection to a server is made: say again what may have been lost with the one before."""
        return self._bring(server, again=True) + self._tell_up(server) + self._hand(again=server)

    def lost(self, server: int) -> None:
        """The connection to a server is gone. Who was being filled is filled anew, and holds nobody up until then."""
        self._copying.end(self.shard, server)
        follower = self.followers.get(server)
        if follower is not None and not follower.counts:
            self.followers[server] = Follower(False)

    def _bring(self, server: int, *, again: bool) -> list[ChainOutput]:
        """Send a follower what it may lack: all of it, or the entries that it has not acknowledged.

        Args:
            server: whom.
            again: what was sent before may be lost, so a copy that was not acknowledged is begun anew.
        """
        follower = self.followers.get(server)
        version = self._machine.version
        if follower is None or version is None or not self._up(server):
            return []
        if not follower.filled and not self._copying.begin(self.shard, server, self._machine.limit):
            return []  # `fill`
        if not follower.filled or (again and follower.copy) or self._strayed(follower):
            return self._copy(server, follower, version)
        outputs: list[ChainOutput] = []
        if follower.told < self.epoch:
            outputs.append(ToServer(server, Ask(self.shard, self.epoch)))
        if follower.told >= 0 or follower.copied >= 0:
            for number in self._log.since(max(follower.has, follower.copied)):
                outputs += self._log.messages(server, number, self.epoch)
        if follower.counts and self.role == "primary" and server in self._copies:
            outputs.append(CaughtUp(self.epoch, self.shard, server))
        return outputs

    def _copy(self, server: int, follower: Follower, version: int) -> list[ChainOutput]:
        head, data = self._machine.snapshot()
        self._sent += 1
        follower.filled, follower.copied, follower.copy = True, version, f"{self.me}.{self.epoch}.{self._sent}"
        follower.acked = min(follower.acked, version) if follower.counts else version - 1
        begin = CopyBegin(self.shard, version, self.epoch, sum(len(one) for one in data), head, follower.copy)
        return [ToServer(server, begin), *copy_messages(server, self.shard, data)]

    def _prune(self) -> None:
        """Let go of entries that nobody can ask for any more."""
        version = -1 if self._machine.version is None else self._machine.version
        needed = min([version, *(one.acked for one in self.followers.values() if one.filled)])
        if self.role != "primary":
            needed = min(needed, version - self._window)
        self._log.drop_below(needed)

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
        if self.leads and isinstance(message, Forward | Ask) and message.epoch == self.epoch:
            return [ToServer(server, TookOver(self.shard, self.epoch))]  # who would hand over need not
        if self.leads and isinstance(message, Forward | Ask) and message.epoch >= self.epoch:
            return [ToServer(server, TookOver(self.shard, message.epoch))]  # who would hand over need not
        match message:
            case Forward() | ForwardPart():
                return self._entry(server, message, size)
            case Ask():
                if message.epoch <= self.epoch:
                    return self._tell_up()
                self._asked = (server, message.epoch)
                return []
            case Forwarded():
                return self._acked(server, message)
            case CopyBegin() | HandOver():
                if self._meant(server, message.epoch):
                    self._incoming.open_copy(server, message)
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
        if message.number == self._machine.version:
            self._incoming.open_entry(server, message)

    def _entry(self, server: int, message: Forward | ForwardPart, size: int) -> list[ChainOutput]:
        if isinstance(message, Forward):
            if size == 0:
                self._open(server, message)
            if not self._incoming.is_open(server, message):
                version = -1 if self._machine.version is None else self._machine.version
                return self._tell_up(missed=message.number > version) if message.epoch >= self.epoch else []
        whole = self._incoming.entry_filled(server, message, size)
        if whole is None:
            return []
        begin, payload = whole
        self._machine.apply(begin.head, payload, kept=True)
        return self.append(begin.number, begin.head, payload) + self._tell_up()

    @property
    def _before_me(self) -> int | None:
        """Whom this server follows."""
        if self.role == "copying":
            return self._chain[0]
        if self.role == "member" or (self.role == "handing" and self.me in self._chain):
            return self._chain[self._chain.index(self.me) - 1]
        return self._former if self.role == "heir" else None

    def _tell_up(self, only: int | None = None, *, missed: bool = False) -> list[ChainOutput]:
        """Acknowledge to whom this server follows (if it is `only`)."""
        source = self._before_me
        if source is None or source == self.me or only not in (None, source):
            return []
        has = -1 if self._machine.version is None else self._machine.version
        heir = self._chain[0] if self.role == "handing" else None  # it is before this server, too
        if heir is not None and (has < 0 or self.followers[heir].has < has):
            return []  # it would be ahead of its predecessors
        after = [one.acked for server, one in self.followers.items() if one.counts and server != heir]
        return [ToServer(source, Forwarded(self.shard, min([has, *after]), has, self.epoch, self._took, missed))]

    def _acked(self, server: int, message: Forwarded) -> list[ChainOutput]:
        follower = self.followers.get(server)
        if message.epoch > self.epoch:
            self._later[server] = message  # it is about a chain that is not known here yet
            return []
        if follower is None or message.epoch < self.epoch or not follower.filled:
            return []
        if follower.copy and follower.copy != message.copy:
            return self._bring(server, again=True) if message.missed else []
        follower.copy = ""
        self._copying.end(self.shard, server)
        before, lacks = (follower.acked, follower.has), message.missed or follower.told < message.epoch
        follower.acked, follower.has = max(follower.acked, message.version), message.has
        follower.told = max(follower.told, message.epoch)
        if self._strayed(follower):
            return self._copy(server, follower, -1 if self._machine.version is None else self._machine.version)
        outputs: list[ChainOutput] = self._bring(server, again=False) if lacks else []
        if not follower.counts and follower.acked == self._machine.version:
            follower.counts = True
            outputs.append(CaughtUp(self.epoch, self.shard, server))
        self._prune()
        if (follower.acked, follower.has) != before:
            outputs += self._tell_up()
        return outputs + self._hand()

    def _strayed(self, follower: Follower) -> bool:
        """Tell whether a follower needs a copy: it lacks what is not kept, or has what only a dead primary gave it."""
        version = self._machine.version
        if version is None or follower.copy or follower.told < 0:
            return False
        ahead = follower.has > version and self.role in ("primary", "member")
        return ahead or follower.has < self._log.lowest(version)

    def _filled(self, server: int) -> list[ChainOutput]:
        whole = self._incoming.copied(server)
        if whole is None or not self._meant(server, whole[0].epoch):
            return self._tell_up(missed=True)
        begin, data = whole
        if isinstance(begin, HandOver):
            self._handed = (server, begin.epoch, begin.head, data)
            return self._take_over()
        if self.role == "primary":
            return []
        if self.role == "handing":  # what it has is the newest, or void
            self._took = begin.copy
            return self._tell_up()
        first, self._took = self._machine.version is None, begin.copy
        self._machine.restore(begin.version, begin.head, data)
        self._incoming.drop_entry()
        self._log.clear()
        outputs = self.begun() if first else []
        for follower, known in self.followers.items():
            if self._strayed(known):
                outputs += self._copy(follower, known, begin.version)
        return outputs + self._tell_up()

    # ---- hand-over --------------------------------------------------------------------------------------------------

    def _hand(self, again: int | None = None) -> list[ChainOutput]:
        """Hand over when the heir, and all that count, have all."""
        heir = self.followers.get(self._chain[0]) if self.role == "handing" else None
        if heir is None or heir.told < self.epoch or not self.settled or not self._up(self._chain[0]):
            return []
        if self._offered and again != self._chain[0]:
            return []
        self._offered = self._given = True
        head, data = self._machine.staged()
        version = self._machine.version
        assert version is not None, "it is settled"
        begin = HandOver(self.shard, version, self.epoch, sum(len(one) for one in data), head)
        return [ToServer(self._chain[0], begin), *copy_messages(self._chain[0], self.shard, data)]

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
        self.role, self._former = "primary", self.me
        known = set(self.followers)
        self._follow_anew()
        for server in set(self.followers) - known:
            outputs += self._bring(server, again=True)
        return outputs

    def _took_over(self, message: TookOver) -> list[ChainOutput]:
        if self.role != "handing" or message.epoch < self._handing_since:
            return []
        if not (self.settled or self._given):  # who leads began without what is only here
            self._machine.forget()
            self._log.clear()
        self.role = AFTER_HANDING[place_of(self.me, self._chain, self._copies)]
        self._follow_anew()
        if self.role == "none":
            self._forget()
        return [HandedOver(self.epoch, self.shard), *self._tell_up(missed=True)]
