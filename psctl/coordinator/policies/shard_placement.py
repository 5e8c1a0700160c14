"""The servers of each shard while a job trains: losses, promotions, new replicas, joins, releases. Pure.

The present chains and the goal (made by assignment.py) differ, and every change of the present chains is a new
assignment with a higher epoch. The steps from the present to the goal:

    copy        the primary of a shard fills the goal's new members; nothing else changes yet
    take over   all new members have caught up: the goal's chain is valid. When it has another primary, and the former
                one runs, it is a *transfer*: servers get the assignment first, and workers when the former primary has
                confirmed it, so that no push is applied by two servers
    loss        lost servers are removed from all chains; the next member of a chain is its primary at once, with its
                present state. The goal is made anew. A chain without members is lost: the job must restart

Theory. A push is acknowledged when it is on every member of its chain. A chain changes by a loss (members are
removed), or at a take-over, whose new members have the newest clock when they are added, and every later one by the
order of the connection. So each member of a chain, always, holds every acknowledged push: a promotion loses none. Two
servers never acknowledge for one shard: the former primary of a transfer has stopped before workers and the new primary
get the assignment (the coordinator waits for its confirmation, or for its loss), and one that is lost to the
coordinator but still runs cannot acknowledge, since its successors refuse older epochs. No shard moves twice at once:
while a transfer is awaited nothing but a loss changes a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psctl.coordinator.policies.assignment import assign, missing_copies, without
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
        self.sizes = list(sizes)
        self.replicas = replicas
        self.epoch = epoch
        self.places = {place.at.rank: place for place in servers}
        self.chains = assign(self.sizes, self._hosts(), replicas)
        self.copies: list[list[int]] = [[] for _ in sizes]
        self.transfers: dict[int, int] = {}  # shard -> the primary before, whose confirmation is awaited
        self.leaving: set[int] = set()
        self.announced = epoch  # the newest epoch that servers may have
        self._announced_to_workers = epoch
        self.goal = self.chains  # the chains that shards move to
        self._moving = False  # whether the goal differs from the chains
        self._moved_at = 0.0  # when the chains last changed in `advance`
        self._copied_since: dict[tuple[int, int], int] = {}  # (shard, server being filled) -> since which epoch
        self._caught_up: set[tuple[int, int]] = set()

    @property
    def assignment(self) -> Assignment:
        """The present assignment."""
        at = [place.at for _, place in sorted(self.places.items())]
        return Assignment(self.epoch, [list(each) for each in self.chains], [list(each) for each in self.copies], at)

    @property
    def settled(self) -> bool:
        """Whether the goal is reached."""
        return not self.transfers and not self._moving

    @property
    def tolerated_losses(self) -> int:
        """How many servers, whichever they are, may be lost at once so that every shard still has a member."""
        return min((len(chain) for chain in self.chains), default=1) - 1

    # ---- changes -----------------------------------------------------------------------------------------------

    def survives(self, lost: Iterable[int]) -> bool:
        """Whether each shard has another member without these servers."""
        gone = set(lost) & self.places.keys()
        return all(without(self.chains, gone)) and gone != self.places.keys()

    def remove_lost(self, lost: Iterable[int]) -> bool:
        """Remove lost servers; return False, with nothing changed, if a shard or the last server is lost with them."""
        gone = set(lost) & self.places.keys()
        if not self.survives(gone):
            return False
        if not gone:
            return True
        chains = without(self.chains, gone)
        promoted = {shard for shard, chain in enumerate(chains) if chain[0] != self.chains[shard][0]}
        # A promoted primary fills its copies anew: that one had caught up with the lost primary proves nothing.
        self._copied_since = {key: epoch for key, epoch in self._copied_since.items() if key[0] not in promoted}
        self._caught_up = {key for key in self._caught_up if key[0] not in promoted}
        self.chains = chains
        self.transfers = {  # where the new primary was lost, the one before may lead again and transfers nothing
            shard: before
            for shard, before in self.transfers.items()
            if before not in gone and self.chains[shard][0] != before
        }
        for server in gone:
            del self.places[server]
        self.leaving -= gone
        self._make_goal()
        return True

    def add_server(self, place: ServerPlace) -> None:
        """Add a server that listens and holds nothing yet."""
        self.places[place.at.rank] = place
        self._make_goal()

    def release(self, servers: Iterable[int]) -> None:
        """Move all shards off these servers."""
        self.leaving |= set(servers) & self.places.keys()
        assert self.leaving != self.places.keys(), "shards need a server"
        self._make_goal()

    def on_caught_up(self, epoch: int, shard: int, server: int) -> None:
        """A server that is being filled has the newest clock."""
        is_filled = 0 <= shard < len(self.copies) and server in self.copies[shard]
        if is_filled and epoch >= self._copied_since[shard, server]:
            self._caught_up.add((shard, server))

    def on_transferred(self, shard: int, server: int) -> None:
        """The primary before a transfer is silent."""
        if self.transfers.get(shard) == server:
            del self.transfers[shard]

    def advance(self, patient: bool, now: float = 0.0) -> bool:
        """Make the goal's chains valid where all their members have caught up; return whether any chain changed.

        Args:
            patient: wait for all shards, so that one assignment announces them all.
            now: seconds.
        """
        if self.settled or self.transfers:
            return False
        moving = [shard for shard, goal in enumerate(self.goal) if goal != self.chains[shard]]
        ready = [s for s in moving if all((s, server) in self._caught_up for server in self.copies[s])]
        if not ready or (patient and len(ready) < len(moving)):
            return False
        for shard in ready:
            before, self.chains[shard] = self.chains[shard][0], self.goal[shard]
            if self.chains[shard][0] != before:
                self.transfers[shard] = before
        self._moved_at = now
        self.move_to(self.goal)
        return True

    def late_transfer(self, now: float, limit: float) -> str:
        """Return the server whose confirmation of a transfer is more than `limit` seconds late, or ""."""
        late = self.transfers and now - self._moved_at >= limit
        return f"server/{next(iter(self.transfers.values()))}" if late else ""

    def forget_released(self) -> list[int]:
        """Return the released servers that hold nothing and are not waited for, and forget them."""
        if not self.leaving or self.transfers or self._announced_to_workers != self.epoch:
            return []
        needed = {server for chain in [*self.chains, *self.copies] for server in chain}
        free = sorted(self.leaving - needed)
        for server in free:
            del self.places[server]
            self.leaving.discard(server)
        if free:
            self.epoch += 1
        return free

    # ---- announcements -----------------------------------------------------------------------------------------

    def news_for_servers(self) -> Assignment | None:
        """Return the assignment if servers have not been sent it yet, else None."""
        if self.announced == self.epoch:
            return None
        self.announced = self.epoch
        return self.assignment

    def news_for_workers(self) -> Assignment | None:
        """Return the assignment if workers have not been sent it yet, else None; None while a transfer is awaited."""
        if self.transfers or self._announced_to_workers == self.epoch:
            return None
        self._announced_to_workers = self.epoch
        return self.assignment

    def _hosts(self) -> Mapping[int, int]:
        return {rank: place.host for rank, place in self.places.items()}

    def _make_goal(self) -> None:
        if self.leaving == self.places.keys():
            self.leaving.clear()  # those that were to stay are lost
        hosts = {rank: host for rank, host in self._hosts().items() if rank not in self.leaving}
        self.move_to(assign(self.sizes, hosts, self.replicas, self.chains))

    def move_to(self, goal: list[list[int]]) -> None:
        """Start the copies that the chains `goal` need; those in progress continue."""
        self.goal = goal
        self.epoch += 1
        self._moving = self.chains != self.goal
        self.copies = missing_copies(self.chains, self.goal)
        wanted = {(shard, server) for shard, found in enumerate(self.copies) for server in found}
        self._copied_since = {key: self._copied_since.get(key, self.epoch) for key in sorted(wanted)}
        self._caught_up &= wanted
