"""Servers of tables over streams in memory, for the workers of a job that are threads."""

from __future__ import annotations

from typing import Any

from psctl.job.table_server_messages import TablesAssigned, TablesAt
from psctl.kv.store_connections import RemoteServers
from psctl.ps.permits import TABLES
from psctl.server.table_connections import TableConnections
from psctl.types import Assignment, Member, ServerAt
from tests.helpers.credentials import credentials
from tests.helpers.memory_stream import MemoryNetwork


class TableServers:
    """Servers of tables, each shard with a replica on the next server.

    Args:
        network: of the job.
        servers: their number.
        shards: of each store.
    """

    def __init__(self, network: MemoryNetwork, servers: int = 2, shards: int = 8) -> None:
        self._network, self._shards = network, shards
        members = [Member("server", rank) for rank in range(servers)]
        self._servers = [TableConnections(me, self._dial(me)) for me in members]
        self._acceptors = [
            network.acceptor(credentials(me), TABLES, each) for me, each in zip(members, self._servers, strict=True)
        ]
        self.at = [ServerAt(rank, 0, each.address) for rank, each in enumerate(self._acceptors)]
        chains = [[(shard + more) % servers for more in range(min(2, servers))] for shard in range(shards)]
        assigned = Assignment(0, chains, [[] for _ in chains], self.at)
        for server in self._servers:
            server.assign(TablesAssigned(assigned, begins=True))

    def link(self, me: Member) -> RemoteServers:
        """Return a worker's connections to the servers."""
        return RemoteServers(TablesAt(self.at, self._shards), self._dial(me))

    def close(self) -> None:
        """End all servers."""
        for server in self._servers:
            server.close("over")
        for acceptor in self._acceptors:
            acceptor.close()

    def _dial(self, me: Member) -> Any:
        mine = credentials(me)
        return lambda member, address, handler: self._network.dial(address, mine, member, TABLES, handler)
