"""Which servers hold which shard while a job trains: deaths, promotions, new replicas, joins, leaves. Pure.

What is so now (`chains`, `copies`) and what is wanted (the goal, from assignment.py) are two things, and every change
of what is so is a new assignment with a higher epoch. From the one to the other:

    copy        the goal's new members of a shard are filled by its primary; nothing else changes yet
    take over   all of them have caught up (CaughtUp): the goal's chain stands. When that has another head, and the one
                before lives, it is a *hand-over*: servers hear of it first, and workers when the head before has said
                HandedOver, so that no push is taken by two
    death       the dead are struck out of all chains; the next of a chain is its head at once, with what it has. The
                goal is made anew from what is left. A chain without a member left is lost: the job must restart

Theory. Let a push be acknowledged when it is on every member of its chain. A chain changes by a death (members are
removed), or at a take-over, whose new members have the newest clock when they are taken in, and every later one by the
order of the connection. So each member of a chain, always, holds every acknowledged push: a promotion loses none. Two
servers never acknowledge for one shard: the old head of a hand-over is silent before workers and the new head are told
(the coordinator waits for its word, or for its death), and one that is dead to the coordinator but lives cannot
acknowledge, since its successors refuse older epochs. No shard moves twice at once: as long as a hand-over is awaited
nothing but deaths changes a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psctl.job.assignment import assign, missing_copies, without
from psctl.types import Assignment, ServerAt


class ServerPlace(msgspec.Struct, frozen=True):
    """A server that listens, and the number of its host."""

    at: ServerAt
    host: int


class ShardPlacement:
    """The shards of a job and their servers.

    Args:
        sizes: bytes of each shard.
        replicas: copies of each shard beyond the first.
        servers: those that listen.
        epoch: of the first assignment.
    """

    def __init__(self, sizes: Sequence[int], replicas: int, servers: Iterable[ServerPlace], epoch: int = 0) -> None:
        self.sizes, self.replicas, self.epoch = list(sizes), replicas, epoch
        self.places = {place.at.rank: place for place in servers}
        self.chains = assign(self.sizes, self._hosts(), replicas)
        self.copies: list[list[int]] = [[] for _ in sizes]
        self.handing: dict[int, int] = {}  # shard -> the head before, whose word is awaited
        self.leaving: set[int] = set()
        self.servers_told = self.workers_told = epoch  # the newest epoch that they may know
        self._goal = self.chains
        self._moving = False  # is the goal another than the chains?
        self._since: dict[tuple[int, int], int] = {}  # (shard, server being filled) -> since which epoch
        self._caught: set[tuple[int, int]] = set()

    @property
    def assignment(self) -> Assignment:
        """What is so now."""
        at = [place.at for _, place in sorted(self.places.items())]
        return Assignment(self.epoch, [list(each) for each in self.chains], [list(each) for each in self.copies], at)

    @property
    def settled(self) -> bool:
        """Is what is wanted so?"""
        return not self.handing and not self._moving

    @property
    def spare(self) -> int:
        """How many servers may die at once, whichever they are, and every shard still has a member."""
        return min((len(chain) for chain in self.chains), default=1) - 1

    # ---- what happens ------------------------------------------------------------------------------------------

    def survives(self, gone: Iterable[int]) -> bool:
        """Whether each shard has another member when these servers are dead."""
        dead = set(gone) & self.places.keys()
        return all(without(self.chains, dead)) and dead != self.places.keys()

    def lost(self, gone: Iterable[int]) -> bool:
        """Servers are dead; return False, and change nothing, when a shard or the last server is lost with them."""
        dead = set(gone) & self.places.keys()
        if not self.survives(dead):
            return False
        chains = without(self.chains, dead)
        if dead:
            anew = {shard for shard, chain in enumerate(chains) if chain[0] != self.chains[shard][0]}
            # Who leads now fills its copies anew: that one was caught up with the dead says nothing of the next.
            self._since = {key: epoch for key, epoch in self._since.items() if key[0] not in anew}
            self._caught = {key for key in self._caught if key[0] not in anew}
            self.chains = chains
            self.handing = {  # where the heir died the head before may lead again, and has nothing to hand over
                shard: before
                for shard, before in self.handing.items()
                if before not in dead and self.chains[shard][0] != before
            }
            for server in dead:
                del self.places[server]
            self.leaving -= dead
            self._plan()
        return True

    def joined(self, place: ServerPlace) -> None:
        """A server listens that has nothing yet."""
        self.places[place.at.rank] = place
        self._plan()

    def leave(self, servers: Iterable[int]) -> None:
        """These servers are to hold nothing any more."""
        self.leaving |= set(servers) & self.places.keys()
        assert self.leaving != self.places.keys(), "shards need a server"
        self._plan()

    def caught_up(self, epoch: int, shard: int, server: int) -> None:
        """A server that is being filled has the newest clock."""
        if 0 <= shard < len(self.copies) and server in self.copies[shard] and epoch >= self._since[shard, server]:
            self._caught.add((shard, server))

    def handed_over(self, shard: int, server: int) -> None:
        """The head before is silent."""
        if self.handing.get(shard) == server:
            del self.handing[shard]

    # ---- what follows ------------------------------------------------------------------------------------------

    def advance(self, patient: bool) -> None:
        """Let the goal's chains stand where all their members have caught up.

        Args:
            patient: wait for all shards, so that one assignment tells it all.
        """
        if self.handing:
            return
        moving = [shard for shard, goal in enumerate(self._goal) if goal != self.chains[shard]]
        ready = [s for s in moving if all((s, server) in self._caught for server in self.copies[s])]
        if not ready or (patient and len(ready) < len(moving)):
            return
        for shard in ready:
            before, self.chains[shard] = self.chains[shard][0], self._goal[shard]
            if self.chains[shard][0] != before:
                self.handing[shard] = before
        self._copy()

    def may_go(self) -> list[int]:
        """Return the servers that were to leave, hold nothing, and are not waited for; they are forgotten."""
        if not self.leaving or self.handing or self.workers_told != self.epoch:
            return []
        needed = {server for chain in [*self.chains, *self.copies] for server in chain}
        free = sorted(self.leaving - needed)
        for server in free:
            del self.places[server]
            self.leaving.discard(server)
        if free:
            self.epoch += 1
        return free

    def news_for_servers(self) -> Assignment | None:
        """Return what servers have to be told now, once."""
        if self.servers_told == self.epoch:
            return None
        self.servers_told = self.epoch
        return self.assignment

    def news_for_workers(self) -> Assignment | None:
        """Return what workers have to be told now, once; nothing while a hand-over is awaited."""
        if self.handing or self.workers_told == self.epoch:
            return None
        self.workers_told = self.epoch
        return self.assignment

    def _hosts(self) -> Mapping[int, int]:
        return {rank: place.host for rank, place in self.places.items()}

    def _plan(self) -> None:
        if self.leaving == self.places.keys():
            self.leaving.clear()  # those that were to stay died
        hosts = {rank: host for rank, host in self._hosts().items() if rank not in self.leaving}
        self._goal = assign(self.sizes, hosts, self.replicas, self.chains)
        self._copy()

    def _copy(self) -> None:
        """Begin the copies that the goal needs; those under way go on."""
        self.epoch += 1
        self._moving = self.chains != self._goal
        self.copies = missing_copies(self.chains, self._goal)
        wanted = {(shard, server) for shard, found in enumerate(self.copies) for server in found}
        self._since = {key: self._since.get(key, self.epoch) for key in sorted(wanted)}
        self._caught &= wanted
