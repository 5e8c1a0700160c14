"""What goes down the chain from one server: to whom, what each of them has, and the entries that they may still need.

A follower is told what was lost to it again: entries that are kept, else a copy. Nothing of what it says counts before
it has spoken by the newest assignment, nor, after a copy was sent, before it has said that it took that very copy.
"""

from __future__ import annotations

from collections.abc import Callable

from psctl.ps.messages import Forwarded, ReplicaQuery, StateCopy
from psctl.ps.outputs import ChainOutput, ReplicaCaughtUp, ToServer
from psctl.ps.replication.chain_entries import CopyBudget, EntryLog, copy_messages
from psctl.ps.replication.replica_roles import ChainFollower, ReplicaPosition, ReplicatedState

CATCH_UP = 4
"""Entries that a primary may be ahead of a member that is being filled."""


class ChainDownstream:
    """The followers of one server of one shard's chain. Calls must not overlap.

    Args:
        shard: its index.
        standing: what this server is in the newest assignment; the chain keeps it up.
        machine: what is replicated.
        up: tells whether there is a connection to a server.
        window: entries that may be unacknowledged.
        copying: shared by the server's shards.
    """

    def __init__(
        self,
        shard: int,
        standing: ReplicaPosition,
        machine: ReplicatedState,
        up: Callable[[int], bool],
        window: int,
        copying: CopyBudget,
    ) -> None:
        self.followers: dict[int, ChainFollower] = {}
        self.log = EntryLog(shard, machine)
        self._shard, self._position, self._machine, self._up = shard, standing, machine, up
        self._window, self._copying = window, copying
        self._early_reports: dict[int, Forwarded] = {}  # what was said by an assignment that is not known here yet
        self._sent = 0  # copies
        self._base = -1  # the version that was here when the followers became what they are

    # ---- what is known ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that is here and counts; -1: there is none."""
        version = self._machine.version
        return -1 if version is None or self._position.void else version

    @property
    def acknowledged(self) -> int:
        """The version that all that count have; -1: there is none."""
        least = self.version
        for one in self.followers.values():
            if one.counts and one.acked < least:
                least = one.acked
        return least

    @property
    def settled(self) -> bool:
        """Whether all that count have all there is."""
        if not self.followers:
            return self._machine.version is not None and not self._position.void
        version = self.version
        return version >= 0 and self.acknowledged == version

    @property
    def may_append(self) -> bool:
        """Whether the primary may make another entry."""
        if not self.followers:
            return self._position.role == "primary" and self._machine.version is not None
        version, epoch = self.version, self._position.epoch
        if self._position.role != "primary" or version < 0 or version - self.acknowledged >= self._window:
            return False
        for one in self.followers.values():
            if one.counts and (one.told < epoch or one.acked < self._base):
                return False  # it, or one after it, may have what only a dead primary gave it
            if one.filled and version - one.acked >= CATCH_UP:
                return False
        return True

    # ---- who they are -----------------------------------------------------------------------------------------------

    def update_followers(self) -> None:
        """Find who gets entries from here now; what is known of those who did before stays."""
        standing, before = self._position, self.followers
        self.followers, self._base = {}, self.version
        position = standing.chain.index(standing.me) if standing.me in standing.chain else len(standing.chain)
        members = standing.chain[position + 1 : position + 2]
        if standing.role == "handing":
            members = [standing.chain[0], *members]
        for server in members:
            # It says what it has, and what those after it have now, before anything counts as acknowledged.
            known = before.get(server, ChainFollower(True, filled=True))
            known.counts, known.acked = True, known.acked if known.told >= standing.epoch else -1
            # Where nothing is here yet, what it has can only be of a primary that died before it had passed that on to
            # all; the same version number will say something else here. So it is copied to, whatever it has.
            known.filled = known.filled and self._base >= 0
            self.followers[server] = known
        for server in standing.copies if standing.role == "primary" else ():
            self.followers[server] = before.get(server, ChainFollower(False))
        for server in before.keys() - self.followers.keys():
            self._copying.finish(self._shard, server)

    def on_server_disconnected(self, server: int) -> None:
        """The connection to a server is gone. Who was being filled is filled anew, and holds nobody up until then."""
        self._copying.finish(self._shard, server)
        follower = self.followers.get(server)
        if follower is not None and not follower.counts:
            self.followers[server] = ChainFollower(False)

    # ---- down -------------------------------------------------------------------------------------------------------

    def append(self, number: int, head: bytes, payload: memoryview) -> list[ChainOutput]:
        """Pass on an entry that was applied here; `payload` is kept until nobody can ask for it any more."""
        self.log.add(number, head, payload)
        outputs: list[ChainOutput] = []
        for server, follower in self.followers.items():
            if follower.filled and self._up(server):
                outputs += self.log.messages(server, number, self._position.epoch)
        self.prune()
        return outputs

    def start_waiting_copies(self) -> list[ChainOutput]:
        """Begin copies that had to wait for others."""
        waiting = [server for server, follower in self.followers.items() if not follower.filled]
        return [output for server in waiting for output in self.bring(server, again=True)]

    def bring_all(self, known: set[int] | None = None) -> list[ChainOutput]:
        """`bring` to everyone; what was sent to others than the `known` (None: to all) may be lost."""
        servers = list(self.followers)
        return [out for server in servers for out in self.bring(server, again=known is None or server not in known)]

    def bring(self, server: int, *, again: bool) -> list[ChainOutput]:
        """Send a follower what it may lack: all of it, or the entries that it has not acknowledged.

        Args:
            server: whom.
            again: what was sent before may be lost, so a copy that was not acknowledged is begun anew.
        """
        follower, standing = self.followers.get(server), self._position
        if follower is None or self.version < 0 or not self._up(server):
            return []
        paced = not follower.filled and standing.role == "primary"
        if paced and not self._copying.start(self._shard, server, self._machine.copy_limit):
            return []  # `fill`
        if not follower.filled or (again and follower.copy) or self._needs_copy(follower):
            return self._copy(server, follower)
        outputs: list[ChainOutput] = []
        if follower.told < standing.epoch:
            outputs.append(ToServer(server, ReplicaQuery(self._shard, standing.epoch)))
        if follower.told >= 0 or follower.copied >= 0:
            for number in self.log.since(max(follower.has, follower.copied)):
                outputs += self.log.messages(server, number, standing.epoch)
        if follower.counts and standing.role == "primary" and server in standing.copies:
            outputs.append(ReplicaCaughtUp(standing.epoch, self._shard, server))
        return outputs

    def on_new_version(self) -> list[ChainOutput]:
        """Another version stands here than the followers know of: copy it to those that are not on the way to it."""
        strayed = [
            server for server, follower in self.followers.items() if self._needs_copy(follower) or not follower.filled
        ]
        return [out for server in strayed if self._up(server) for out in self._copy(server, self.followers[server])]

    def _copy(self, server: int, follower: ChainFollower) -> list[ChainOutput]:
        head, data = self._machine.snapshot()
        version, epoch = self.version, self._position.epoch
        self._sent += 1
        follower.filled, follower.copied, follower.copy = True, version, f"{self._position.me}.{epoch}.{self._sent}"
        follower.acked = min(follower.acked, version) if follower.counts else version - 1
        begin = StateCopy(self._shard, version, epoch, sum(len(one) for one in data), head, follower.copy)
        return [ToServer(server, begin), *copy_messages(server, self._shard, data)]

    def _needs_copy(self, follower: ChainFollower) -> bool:
        """Tell whether a follower needs a copy: it lacks what is not kept, or has what only a dead primary gave it."""
        version = self.version
        if version < 0 or follower.copy or follower.told < 0:
            return False
        ahead = follower.has > version and self._position.role in ("primary", "member", "handing")
        return ahead or follower.has < self.log.lowest(version)

    def prune(self) -> None:
        """Let go of entries that nobody can ask for any more."""
        version = self.version
        needed = min([version, *(one.acked for one in self.followers.values() if one.filled)])
        if self._position.role != "primary":
            needed = min(needed, version - self._window)
        self.log.drop_below(needed)

    # ---- up ---------------------------------------------------------------------------------------------------------

    def on_forwarded(self, server: int, message: Forwarded) -> tuple[list[ChainOutput], bool]:
        """Take in what a follower has; return what it must be sent, and whether what is known of it changed."""
        follower, epoch = self.followers.get(server), self._position.epoch
        if message.epoch > epoch:
            self._early_reports[server] = message  # it is about a chain that is not known here yet
            return [], False
        if follower is None or message.epoch < epoch or not follower.filled:
            return [], False
        if follower.copy and follower.copy != message.copy:
            return self.bring(server, again=True) if message.missed else [], False
        follower.copy = ""
        self._copying.finish(self._shard, server)
        before, lacks = (follower.acked, follower.has), message.missed or follower.told < message.epoch
        follower.acked, follower.has = max(follower.acked, message.version), message.has
        follower.told = max(follower.told, message.epoch)
        if self._needs_copy(follower):
            return self._copy(server, follower), False
        outputs: list[ChainOutput] = self.bring(server, again=False) if lacks else []
        if not follower.counts and follower.acked == self.version:
            follower.counts = True
            outputs.append(ReplicaCaughtUp(epoch, self._shard, server))
        self.prune()
        return outputs, (follower.acked, follower.has) != before

    def due_reports(self) -> list[tuple[int, Forwarded]]:
        """Return what came before its time, and whose time has come."""
        due = [(server, later) for server, later in self._early_reports.items() if later.epoch <= self._position.epoch]
        for server, _ in due:
            del self._early_reports[server]
        return due
