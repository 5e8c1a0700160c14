"""Assigns shards to servers: equal loads in bytes, the fewest copies moved, replicas on hosts that fail separately.

The *chain* of a shard is the servers that hold it, primary first. The requirements on the chains, in this order:

1. The members of a chain are different servers, and on different hosts as far as there are hosts: the loss of a host
   is one failure, and must not remove two copies.
2. Holdings (bytes of all copies on a server: memory, and the traffic along the chains) differ between any two servers
   by at most the largest shard; so do the bytes that a server is primary of (pushed to it and pulled from it by
   workers) where chains are new. After joins and losses a shard may have too few holders to choose from: the
   difference is then larger, but less than twice the largest shard in all tested cases.
3. Few copies are made: a new copy of a shard costs its bytes on the wire. Then few primaries change: that costs a
   transfer of the role, of milliseconds, and no bytes when the new primary is a replica already.

Theory. Loads that differ by at most the largest shard are easy to find: while servers f and e differ by more, some
shard is on f and not on e (otherwise f's shards would be a subset of e's, and f not the fuller one). Moving any such
shard narrows the gap, since its weight w is below the gap g: the sum of the squares of the loads falls by
2w(g-w) > 0. So levelling terminates, within the bound. Finding the *fewest* moves is, for shards of different sizes,
as hard as PARTITION. For equal shards it is a flow problem, and the greedy rule here (fullest to emptiest, copies that
are new anyway first, through a third server where the direct move is not permitted) reached the minimum of an
exhaustive search in every small case tested. For shards of different sizes a last pass reverts every move that the
bound does not need, so no single move of the result is unnecessary. Primaries are levelled in the same manner along
*paths of roles*: f transfers the role for a shard to a replica g of it, g transfers the role for another shard to e,
and so on; breadth first, so that the fewest roles change. Two copies are exchanged only where no such path exists.

Where hosts have different numbers of servers, requirement 1 may conflict with 2 (two hosts, of three servers and one:
with one replica the single server holds a copy of everything); then no move or pair of moves that 1 permits would
narrow a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

Chains = list[list[int]]
"""By shard: server ranks, primary first."""


def assign(
    sizes: Sequence[int], servers: Mapping[int, int], replicas: int, before: Sequence[Sequence[int]] | None = None
) -> Chains:
    """Return the chain of every shard.

    Args:
        sizes: bytes of each shard.
        servers: the present servers: rank -> number of its host.
        replicas: copies of each shard beyond the first; as many as there are other servers at most.
        before: the present chains, which may name lost servers; None when no server holds anything. The next member of
            a chain replaces a lost primary.
    """
    assert servers, "shards need a server"
    table = _Table(sizes, servers, replicas, before)
    table.fill()
    table.spread()
    table.level_holdings()
    table.level_primaries()
    table.revert_needless_moves()
    return table.chains


def without(chains: Sequence[Sequence[int]], gone: Iterable[int]) -> Chains:
    """Return the chains without the lost servers, the next member as primary; a chain may become empty."""
    lost = set(gone)
    return [[server for server in chain if server not in lost] for chain in chains]


def missing_copies(now: Sequence[Sequence[int]], goal: Sequence[Sequence[int]]) -> Chains:
    """Return, by shard, the servers that must receive a copy before the chains of `goal` are in force."""
    return [[server for server in new if server not in old] for old, new in zip(now, goal, strict=True)]


class _Table:
    """The chains while they are being changed, and the resulting loads."""

    def __init__(
        self, sizes: Sequence[int], servers: Mapping[int, int], replicas: int, before: Sequence[Sequence[int]] | None
    ) -> None:
        self.sizes, self.host = sizes, servers
        self.depth = min(replicas + 1, len(servers))
        self.largest = max(sizes, default=0)
        self.before = [list(chain) for chain in before] if before is not None else [[] for _ in sizes]
        self.chains: Chains = [[server for server in chain if server in servers] for chain in self.before]
        self.held: dict[int, set[int]] = {server: set() for server in sorted(servers)}
        self.load = dict.fromkeys(self.held, 0)  # bytes held
        self.first = dict.fromkeys(self.held, 0)  # bytes that the server is primary of
        for shard, chain in enumerate(self.chains):
            for server in chain:
                self.held[server].add(shard)
                self.load[server] += sizes[shard]
            if chain:
                self.first[chain[0]] += sizes[shard]

    # ---- single changes ------------------------------------------------------------------------------------------

    def _add(self, shard: int, server: int) -> None:
        """Append a server to a chain."""
        if not self.chains[shard]:
            self.first[server] += self.sizes[shard]
        self.chains[shard].append(server)
        self.held[server].add(shard)
        self.load[server] += self.sizes[shard]

    def _move(self, shard: int, source: int, target: int) -> None:
        """Replace `source` by `target` in a chain."""
        size, chain = self.sizes[shard], self.chains[shard]
        place = chain.index(source)
        chain[place] = target
        self.held[source].remove(shard)
        self.held[target].add(shard)
        self.load[source] -= size
        self.load[target] += size
        if place == 0:
            self.first[source] -= size
            self.first[target] += size

    def _promote(self, shard: int, server: int) -> None:
        """Make a member of a chain its primary; the others keep their order."""
        chain = self.chains[shard]
        self.first[chain[0]] -= self.sizes[shard]
        chain.remove(server)
        chain.insert(0, server)
        self.first[server] += self.sizes[shard]

    def _legal(self, shard: int, source: int, target: int) -> bool:
        """Whether `target` may replace `source`: it is not in the chain, which keeps its number of hosts."""
        chain = self.chains[shard]
        if target in chain:
            return False
        others = {self.host[server] for server in chain if server != source}
        return self.host[target] not in others or self.host[source] in others

    def _cost(self, shard: int, source: int, target: int) -> int:
        """Return how many more copies are made when `target` replaces `source`: -1, 0 or 1."""
        held = self.before[shard]
        return (target not in held) - (source not in held)

    # ---- required copies -----------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Make chains as long as required: drop surplus replicas, add missing ones, first copies before second ones."""
        order = sorted(range(len(self.sizes)), key=lambda shard: (-self.sizes[shard], shard))
        for shard in order:
            while len(self.chains[shard]) > self.depth:
                self._drop(shard)
        for depth in range(self.depth):
            for shard in order:
                if len(self.chains[shard]) <= depth:
                    self._add(shard, self._emptiest(shard))

    def _drop(self, shard: int) -> None:
        """Remove a replica: one that shares a host first, then that of the fullest server."""
        chain = self.chains[shard]
        hosts = [self.host[server] for server in chain]
        server = max(chain[1:], key=lambda each: (hosts.count(self.host[each]), self.load[each], each))
        chain.remove(server)
        self.held[server].remove(shard)
        self.load[server] -= self.sizes[shard]

    def _emptiest(self, shard: int) -> int:
        """Return the least loaded server outside the chain, on a host outside the chain if there is one."""
        chain = self.chains[shard]
        taken = {self.host[server] for server in chain}
        return min(
            (server for server in self.held if server not in chain),
            key=lambda server: (self.host[server] in taken, self.load[server], server),
        )

    def spread(self) -> None:
        """Move replicas that share a host although another host is free, as after a host has joined."""
        reach = min(self.depth, len(set(self.host.values())))
        for shard, chain in enumerate(self.chains):
            while len({self.host[server] for server in chain}) < reach:
                hosts = [self.host[server] for server in chain]
                double = next(place for place in reversed(range(len(hosts))) if hosts[place] in hosts[:place])
                self._move(shard, chain[double], self._emptiest(shard))

    # ---- holdings ------------------------------------------------------------------------------------------------

    def _gaps(self, load: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Yield pairs (fuller, emptier) that differ by more than the largest shard, roughly the widest first."""
        ordered = sorted(load, key=lambda server: (load[server], server))
        for full in reversed(ordered):
            for empty in ordered:
                if load[full] - load[empty] <= self.largest:
                    break
                yield full, empty

    def level_holdings(self) -> None:
        """Move copies until loads differ by at most the largest shard, as far as hosts permit."""
        while any(self._narrow(full, empty) for full, empty in self._gaps(self.load)):
            pass

    def _narrow(self, full: int, empty: int) -> bool:
        """Move a copy from a full server to an empty one, or through a third if that saves a copy or is needed."""
        gap = self.load[full] - self.load[empty]
        shard = self._best(full, empty, gap)
        saves = any(full not in self.before[each] for each in self.held[full])
        if shard is not None and (not saves or self._cost(shard, full, empty) <= 0):
            self._move(shard, full, empty)
            return True
        for third in self.held:
            if third not in (full, empty) and self._move_through_third(full, third, empty, free_only=shard is not None):
                return True
        if shard is not None:
            self._move(shard, full, empty)
        return shard is not None

    def _best(self, source: int, target: int, gap: float, barred: int = -1) -> int | None:
        """Return the shard whose move makes the fewest copies, then best closes the gaps of the loads."""
        lead = self.first[source] - self.first[target]

        def key(shard: int) -> tuple[int, float, int, int]:
            size = self.sizes[shard]
            after = abs(lead - 2 * size) if self.chains[shard][0] == source else abs(lead)
            return self._cost(shard, source, target), abs(2 * size - gap), after, shard

        movable = (s for s in self.held[source] if self.sizes[s] and s != barred and self._legal(s, source, target))
        return min(movable, key=key, default=None)

    def _move_through_third(self, full: int, third: int, empty: int, free_only: bool) -> bool:
        """Move a shard from `full` to `third` and another from `third` to `empty`, if that evens out their loads."""
        last = self._best(third, empty, self.load[full] - self.load[empty])
        if last is None:
            return False
        size = self.sizes[last]
        first = self._best(full, third, 2 * size, barred=last)
        if first is None:
            return False
        if free_only and self._cost(first, full, third) + self._cost(last, third, empty) > 0:
            return False
        loads = (self.load[full], self.load[third], self.load[empty])
        change = (-self.sizes[first], self.sizes[first] - size, size)
        if sum((load + delta) ** 2 for load, delta in zip(loads, change, strict=True)) >= sum(x * x for x in loads):
            return False
        self._move(first, full, third)
        self._move(last, third, empty)
        return True

    # ---- primaries -----------------------------------------------------------------------------------------------

    def level_primaries(self) -> None:
        """Change roles, and where that is not enough exchange copies, until primaries are as level as holdings."""
        while any(self._transfer_roles(full, empty) for full, empty in self._gaps(self.first)) or any(
            self._exchange(full, empty) for full, empty in self._gaps(self.first)
        ):
            pass

    def _transfer_roles(self, full: int, empty: int) -> bool:
        """Transfer the primary role along the shortest path of roles from a full server to an empty one."""
        cause: dict[int, int] = {full: full}  # by server: the server that would transfer a role to it
        queue = deque([full])
        while queue and empty not in cause:
            server = queue.popleft()
            for shard in sorted(self.held[server]):
                if self.chains[shard][0] == server and self.sizes[shard]:
                    for member in self.chains[shard][1:]:
                        if member not in cause:
                            cause[member] = server
                            queue.append(member)
        if empty not in cause:
            return False
        path = [empty]
        while path[-1] != full:
            path.append(cause[path[-1]])
        path.reverse()
        wanted = (self.first[full] - self.first[empty]) / 2
        steps: list[tuple[int, int]] = []
        change = dict.fromkeys(path, 0)
        for source, target in pairwise(path):
            shard = min(
                (s for s in self.held[source] if self.chains[s][0] == source and target in self.chains[s][1:]),
                key=lambda s: (self.sizes[s] == 0, abs(self.sizes[s] - wanted), s),
            )
            wanted = self.sizes[shard]
            steps.append((shard, target))
            change[source] -= self.sizes[shard]
            change[target] += self.sizes[shard]
        if sum((self.first[each] + change[each]) ** 2 - self.first[each] ** 2 for each in path) >= 0:
            return False
        for shard, target in steps:
            self._promote(shard, target)
        return True

    def _exchange(self, full: int, empty: int) -> bool:
        """Move a primary copy to `empty` and a replica back from it, so that holdings stay level."""
        gap = self.first[full] - self.first[empty]
        given = [s for s in self.held[full] if self.chains[s][0] == full and 0 < self.sizes[s] < gap]
        for shard in sorted(given, key=lambda s: (self._cost(s, full, empty), abs(2 * self.sizes[s] - gap), s)):
            if not self._legal(shard, full, empty):
                continue
            taken = min(
                (s for s in self.held[empty] if self.chains[s][0] != empty and self._legal(s, empty, full)),
                key=lambda s: (self._cost(s, empty, full), abs(self.sizes[s] - self.sizes[shard]), s),
                default=None,
            )
            if taken is None:
                continue
            spread = self._spread_after({full: self.sizes[taken] - self.sizes[shard]}, empty)
            if spread <= max(self.largest, self._spread_after({}, empty)):
                self._move(shard, full, empty)
                self._move(taken, empty, full)
                return True
        return False

    def _spread_after(self, change: dict[int, int], other: int) -> int:
        """Return the spread of holdings after `change`, with the opposite change on server `other`."""
        load = self.load.copy()
        for server, bytes_ in change.items():
            load[server] += bytes_
            load[other] -= bytes_
        return max(load.values()) - min(load.values())

    # ---- unnecessary moves ---------------------------------------------------------------------------------------

    def revert_needless_moves(self) -> None:
        """Revert moves of copies and roles wherever the loads allow it."""
        for shard in sorted(range(len(self.sizes)), key=lambda each: (-self.sizes[each], each)):
            for new in [server for server in self.chains[shard] if server not in self.before[shard]]:
                for old in self.before[shard]:
                    if old in self.host and new in self.chains[shard] and self._legal(shard, new, old):
                        self._try_revert_move(shard, new, old)
        for shard, chain in enumerate(self.chains):
            first = next((server for server in self.before[shard] if server in self.host), None)
            if first is not None and first in chain[1:]:
                self._try_revert_role(shard, first)

    def _try_revert_move(self, shard: int, new: int, old: int) -> None:
        bounds = self._bounds()
        self._move(shard, new, old)
        if not self._within(bounds):
            self._move(shard, old, new)

    def _try_revert_role(self, shard: int, old: int) -> None:
        bounds, chain = self._bounds(), list(self.chains[shard])
        self._promote(shard, old)
        if not self._within(bounds):
            self._promote(shard, chain[0])
            self.chains[shard] = chain

    def _bounds(self) -> tuple[int, int]:
        """Return the permitted spread of holdings and of primaries: the present one, or the largest shard if larger."""
        return max(self.largest, _apart(self.load)), max(self.largest, _apart(self.first))

    def _within(self, bounds: tuple[int, int]) -> bool:
        return _apart(self.load) <= bounds[0] and _apart(self.first) <= bounds[1]


def _apart(load: Mapping[int, int]) -> int:
    return max(load.values()) - min(load.values())
