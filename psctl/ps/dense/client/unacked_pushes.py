"""The routes of a worker to its shards' servers, and the pushes and step orders that it may have to send again.

UnackedPushes keeps pushes until they are Pushed, and step orders until all pushes of their clock are. The step order of
clock c is sent to server S when every push of c to another server is staged (PushStaged), and every push of c to S has
been sent: once a server has all ranks' orders, every shard holds every push (messages.Step). A push in a
host sum is sent on another worker's connection, or is dropped, so it must be staged before any order is sent. Where
workers hold the values, a lost worker's clocks are never cut, so nothing is ordered: a shard's sum is sent back while
other shards are still being pushed.

ShardRoutes keeps the owner of each shard, by the newest assignment. A shard is *open* once its owner has sent Leads, on
the present connection, by that assignment or a newer one. So nothing is sent to a server that has not learned yet that
it leads, and nothing that was lost with a broken connection counts as sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.ps.messages import Push, Step


class ShardRoutes:
    """The owner of each shard, and whether the shard is open. Calls must not overlap.

    Args:
        owners: for each shard the rank of the server that leads it.
        servers: all servers of the job.
    """

    def __init__(self, owners: Sequence[int], servers: Sequence[int]) -> None:
        self.owners, self.servers = list(owners), list(servers)
        self.ready_servers: set[int] = set()  # servers that have sent Leads on this connection
        self.closed_shards: set[int] = set(range(len(self.owners)))  # shards that are not open
        self._epoch = -1
        self._since = [-1] * len(self.owners)  # the assignment that made the owner the primary
        self._led: dict[int, dict[int, int]] = {}  # server -> shard -> newest assignment by which it leads

    def on_assignment(self, epoch: int, owners: Sequence[int], servers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Apply an assignment; return the shards with a changed owner, and those of them that are open."""
        if epoch <= self._epoch:
            return [], []
        changed = [shard for shard, owner in enumerate(owners) if owner != self.owners[shard]]
        since = self._epoch + 1  # a worker does not receive every assignment
        self._epoch, self.owners, self.servers = epoch, list(owners), list(servers)
        for shard in changed:
            self._since[shard] = since
            self.closed_shards.add(shard)
        return changed, self._open(changed)

    def on_leads(self, server: int, epoch: int, shards: Sequence[int]) -> list[int]:
        """Record a server's Leads; return the shards for which outstanding messages must be sent to it."""
        self.ready_servers.add(server)
        self._led.setdefault(server, {}).update(dict.fromkeys(shards, epoch))
        return self._open([shard for shard in shards if self.owners[shard] == server])

    def _open(self, shards: Sequence[int]) -> list[int]:
        found = [s for s in shards if self._led.get(self.owners[s], {}).get(s, -2) >= self._since[s]]
        self.closed_shards.difference_update(found)
        return found

    def on_server_lost(self, server: int) -> list[int]:
        """Record the loss of the connection to a server; return its shards."""
        self.ready_servers.discard(server)
        self._led.pop(server, None)
        mine = [shard for shard, owner in enumerate(self.owners) if owner == server]
        self.closed_shards.update(mine)
        return mine


KEPT = 8
"""Clocks for which an order is kept, though all is Pushed, for a server that was not connected; one that saves is kept
until all servers have it."""


class UnackedPushes:
    """Bookkeeping of pushes and step orders, without their bytes. Calls must not overlap.

    Args:
        route: the owners of the shards.
        ordered: each clock has a step order.
    """

    def __init__(self, route: ShardRoutes, *, ordered: bool = True) -> None:
        self._route, self._ordered = route, ordered
        self._pushes: dict[int, dict[int, Push]] = {}  # clock -> shard -> push that is not Pushed
        self._push_count: dict[int, int] = {}  # clock -> number of its pushes
        self._unstaged: dict[int, set[int]] = {}  # clock -> shards
        self._unstaged_by_server: dict[int, dict[int, int]] = {}  # clock -> server -> number of its unstaged shards
        self._in_host_sum: dict[int, set[int]] = {}  # clock -> shards pushed in a host sum
        self._steps: dict[int, Step] = {}
        self._sent: dict[int, set[int]] = {}  # clock -> servers that have the order

    def add_push(self, push: Push) -> None:
        """Record a push that is sent now, or once its shard is open."""
        self._pushes.setdefault(push.clock, {})[push.shard] = push
        self._push_count[push.clock] = self._push_count.get(push.clock, 0) + 1
        if self._ordered:
            self._mark_unstaged(push.clock, push.shard)

    def _mark_unstaged(self, clock: int, shard: int) -> None:
        untaken = self._unstaged.setdefault(clock, set())
        if shard not in untaken:
            untaken.add(shard)
            behind, owner = self._unstaged_by_server.setdefault(clock, {}), self._route.owners[shard]
            behind[owner] = behind.get(owner, 0) + 1

    def note_in_host_sum(self, clock: int, shard: int) -> None:
        """Record that a push is offered for a host sum."""
        if self._ordered:
            self._in_host_sum.setdefault(clock, set()).add(shard)

    def note_separate(self, clock: int, shard: int) -> None:
        """Record that a push is in no host sum."""
        self._in_host_sum.get(clock, set()).discard(shard)

    def unstaged(self, clock: int, shard: int) -> Push | None:
        """Return a push that is not staged (where nothing is ordered: not Pushed); None if it is."""
        if self._ordered and shard not in self._unstaged.get(clock, ()):
            return None
        return self._pushes.get(clock, {}).get(shard)

    @property
    def outstanding(self) -> list[tuple[int, int]]:
        """Return (shard, clock) of the pushes that are not Pushed."""
        return [(shard, clock) for clock, pushes in self._pushes.items() for shard in pushes]

    def add_step(self, step: Step) -> None:
        """Record an order; `ready_orders` returns it when it may be sent."""
        for old in [clock for clock in self._steps if clock < step.clock - KEPT and not self._pushes.get(clock)]:
            if not (self._steps[old].save and self._unordered(old)):
                self._drop(old)
        self._steps[step.clock] = step
        self._sent[step.clock] = set()

    def on_staged(self, clock: int, shard: int) -> None:
        """Record that a push has arrived completely at its primary."""
        untaken = self._unstaged.get(clock)
        if untaken is None or shard not in untaken:
            return
        untaken.discard(shard)
        self.note_separate(clock, shard)
        behind, owner = self._unstaged_by_server[clock], self._route.owners[shard]
        behind[owner] -= 1
        if not behind[owner]:
            del behind[owner]

    def on_pushed(self, clock: int, shard: int) -> None:
        """Record that a shard's pushes up to `clock` are on all of its chain."""
        for known in [known for known in self._pushes if known <= clock]:
            if self._pushes[known].pop(shard, None) is not None and self._ordered:
                self.on_staged(known, shard)
            if not self._pushes[known] and (known in self._steps or not self._ordered):
                self._forget(known)

    def _forget(self, clock: int) -> None:
        """Drop a clock that is all pushed and acknowledged, if every server that needs its order has it."""
        if self._push_count[clock] == len(self._route.owners) and (not self._ordered or not self._unordered(clock)):
            self._drop(clock)

    def _unordered(self, clock: int) -> set[int]:
        """Return the servers that need the order of a clock and lack it: those that lead a shard, and all servers where
        the step is saved, because a checkpoint has a part of each."""
        needed = self._route.servers if self._steps[clock].save else self._route.owners
        return set(needed) - self._sent[clock]

    def _drop(self, clock: int) -> None:
        for book in (
            self._pushes,
            self._push_count,
            self._unstaged,
            self._unstaged_by_server,
            self._in_host_sum,
            self._steps,
            self._sent,
        ):
            book.pop(clock, None)

    def servers_behind(self, clock: int) -> set[int]:
        """Return the servers that have not acknowledged all pushes up to `clock`."""
        if not self._pushes:
            return set()
        owners = self._route.owners
        return {owners[shard] for known, shards in self._pushes.items() if known <= clock for shard in shards}

    def unsettled_servers(self) -> set[int]:
        """Return the servers that lack an order, or have not acknowledged all pushes of an ordered clock."""
        if not self._ordered:
            return {self._route.owners[shard] for pushes in self._pushes.values() for shard in pushes}
        found: set[int] = set()
        for clock in self._steps:
            found.update(self._route.owners[shard] for shard in self._pushes.get(clock, ()))
            found.update(self._unordered(clock))
        return found

    def has_unacknowledged(self, clock: int) -> bool:
        """Return whether some push up to `clock` is not acknowledged."""
        return any(pushes and known <= clock for known, pushes in self._pushes.items())

    def on_assignment(self) -> None:
        """Recount the unstaged shards of each server: owners have changed."""
        for clock, untaken in self._unstaged.items():
            behind: dict[int, int] = {}
            for shard in untaken:
                owner = self._route.owners[shard]
                behind[owner] = behind.get(owner, 0) + 1
            self._unstaged_by_server[clock] = behind

    def to_resend(self, shard: int) -> list[Push]:
        """Return the shard's pushes that must be sent again, the oldest first; none of them counts as staged."""
        clocks = sorted(clock for clock, pushes in self._pushes.items() if shard in pushes)
        for clock in clocks if self._ordered else ():
            self._mark_unstaged(clock, shard)
            self.note_separate(clock, shard)
        return [self._pushes[clock][shard] for clock in clocks]

    def has_orders(self, server: int) -> bool:
        """Return whether a server has the orders of all clocks so far."""
        return all(server in sent for sent in self._sent.values())

    def forget_orders(self, server: int) -> None:
        """Mark all orders as not sent to this server."""
        for sent in self._sent.values():
            sent.discard(server)

    def ready_orders(self) -> list[tuple[int, Step]]:
        """Return the orders that may be sent now, with their servers; they count as sent."""
        found: list[tuple[int, Step]] = []
        for clock in sorted(self._steps) if self._steps else ():
            behind = self._unstaged_by_server.get(clock, {})
            if len(behind) > 1 or self._in_host_sum.get(clock):
                continue
            for server in self._route.servers:
                if server in self._sent[clock] or server not in self._route.ready_servers or behind.keys() - {server}:
                    continue
                if any(self._route.owners[shard] == server for shard in self._route.closed_shards):
                    continue
                self._sent[clock].add(server)
                found.append((server, self._steps[clock]))
        return found
