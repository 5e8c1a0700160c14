"""Which server a worker speaks to about each shard, and whether it may already.

The assignment says who leads a shard; a shard is *open* once that server has said so itself (Leads), on the connection
that there is now, by that assignment or a newer one. So nothing is sent to a server that does not know yet that it
leads, and nothing is taken for sent that a broken connection swallowed.
"""

from __future__ import annotations

from collections.abc import Sequence


class ShardRoutes:
    """By shard. Calls must not overlap.

    Args:
        owners: for each shard the rank of the server that leads it.
        servers: all servers of the job.
    """

    def __init__(self, owners: Sequence[int], servers: Sequence[int]) -> None:
        self.owners, self.servers = list(owners), list(servers)
        self.ready_servers: set[int] = set()  # servers that said Leads on this connection
        self.closed_shards: set[int] = set(range(len(self.owners)))  # shards that are not open
        self._epoch = -1
        self._since = [-1] * len(self.owners)  # the assignment that made the owner lead
        self._led: dict[int, dict[int, int]] = {}  # server -> shard -> newest assignment by which it leads

    def on_assignment(self, epoch: int, owners: Sequence[int], servers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Take over an assignment; return the shards whose owner changed, and those of them that are open."""
        if epoch <= self._epoch:
            return [], []
        changed = [shard for shard, owner in enumerate(owners) if owner != self.owners[shard]]
        since = self._epoch + 1  # not all assignments come to a worker
        self._epoch, self.owners, self.servers = epoch, list(owners), list(servers)
        for shard in changed:
            self._since[shard] = since
            self.closed_shards.add(shard)
        return changed, self._open(changed)

    def on_leads(self, server: int, epoch: int, shards: Sequence[int]) -> list[int]:
        """Take in that a server leads shards; return those for which it is to be sent what is outstanding."""
        self.ready_servers.add(server)
        self._led.setdefault(server, {}).update(dict.fromkeys(shards, epoch))
        return self._open([shard for shard in shards if self.owners[shard] == server])

    def _open(self, shards: Sequence[int]) -> list[int]:
        found = [s for s in shards if self._led.get(self.owners[s], {}).get(s, -2) >= self._since[s]]
        self.closed_shards.difference_update(found)
        return found

    def on_server_lost(self, server: int) -> list[int]:
        """Take in that the connection to a server is gone; return its shards."""
        self.ready_servers.discard(server)
        self._led.pop(server, None)
        mine = [shard for shard, owner in enumerate(self.owners) if owner == server]
        self.closed_shards.update(mine)
        return mine
