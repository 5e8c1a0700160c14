"""Tables without a network: server minds, clients, and links between them that a test moves message by message.

Messages go through the real encoder, so that what travels is what the wire would carry. A link keeps its order, as a
connection does; `cut` loses what is on it and begins anew, as a broken connection does.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import torch

from psctl.store.reductions import custom, reductions
from psctl.store.table import TableMind
from psctl.store.table_calls import result
from psctl.store.table_client import TableClient
from psctl.store.table_messages import StoreSpec, TableKinds, TableSpec
from psctl.store.table_packing import Assembly, in_parts

DECODER = msgspec.msgpack.Decoder(TableKinds)


class Functions:
    """Reductions by name, users' functions from a dict."""

    def __init__(self, **functions):
        self._functions = {f"mine:{name}": function for name, function in functions.items()}

    def reduction(self, name):
        known = reductions()
        return known[name] if name in known else custom(name, self._functions[name])

    def function(self, name):
        return self._functions[name]


def spec(name="", shape=(1,), dtype="float64", **more) -> TableSpec:
    return TableSpec(name, shape, dtype, **more)


class World:
    """One store: `staleness` None: asp. Links are moved by `run`, in an order that `random` chooses when given."""

    def __init__(
        self, workers=2, servers=2, staleness=None, eager=False, shards=4, functions=None, random=None, group=None
    ) -> None:
        self.functions = functions or Functions()
        group = tuple(range(workers)) if group is None else group
        self.store = StoreSpec("s", staleness, eager, group, shards)
        self.owners = [shard % servers for shard in range(shards)]
        self.random, self.bytes = random, 0
        self.servers = [TableMind(rank, self.functions) for rank in range(servers)]
        self.links: dict[tuple[int, int, bool], deque] = {}
        self.parts: dict[tuple[int, int, bool], Assembly] = {}
        self.clients: list[TableClient] = []
        self.tickets = 0
        for rank in range(workers):
            self.join(rank)

    def join(self, rank: int) -> TableClient:
        """A worker (again): a new process that knows nothing."""
        client = TableClient(self.store, rank, self.owners, self.functions)
        if rank == len(self.clients):
            self.clients.append(client)
        self.clients[rank] = client
        for server in range(len(self.servers)):
            self.cut(rank, server)
        return client

    def cut(self, rank: int, server: int) -> None:
        """The connection breaks, and is made anew."""
        for down in (True, False):
            self.links[rank, server, down] = deque()
            self.parts[rank, server, down] = Assembly()
        self.servers[server].lost(rank)
        self.put(rank, self.clients[rank].anew(server))

    def put(self, rank: int, outs) -> None:
        for out in outs:
            self._queue((rank, out.server, True), out.message, out.payload)

    def _queue(self, link, message, payload) -> None:
        for part, data in in_parts(message, payload):
            data = None if data is None else bytes(data)
            encoded = msgspec.msgpack.encode(part)
            self.bytes += len(encoded) + len(data or b"")
            self.links[link].append((encoded, data))

    def step(self) -> bool:
        """Move one message; False when none is on its way."""
        links = [link for link, queue in self.links.items() if queue]
        if not links:
            return False
        rank, server, up = link = self.random.choice(links) if self.random else links[0]
        encoded, data = self.links[link].popleft()
        message = DECODER.decode(encoded)
        if data is not None:
            self.parts[link].place(message, len(data))[:] = data
        whole = self.parts[link].received(message, len(data or b""))
        if whole is None:
            return True
        if up:
            for send in self.servers[server].received(rank, *whole):
                self._queue((send.worker, server, False), send.message, send.payload)
        else:
            self.put(rank, self.clients[rank].received(server, *whole))
        return True

    def run(self, until=lambda: False) -> None:
        while not until() and self.step():
            pass

    # ---- what a worker does ----

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def push(self, rank: int, table: TableSpec, keys, values, place=0, what="push", index=None) -> int:
        """Push rows (or a tensor) without moving anything; returns the ticket."""
        client = self.clients[rank]
        kind = client.settle(table)
        route = client.routes.of(table.name, np.asarray(keys, dtype=np.int64))
        assert route.plain
        values = torch.as_tensor(values, dtype=kind.dtype).reshape(len(route.unique), -1)
        index = None if index is None else torch.as_tensor(index).reshape(len(route.unique), -1)
        ticket = self.ticket()
        for change in client.push([(kind, route, kind.reduction.lanes(values, index))], ticket, what, place):
            self.put(rank, client.send(change, place))
        return ticket

    def begin(self, rank: int, table: TableSpec, keys):
        """Begin a read; returns it."""
        client = self.clients[rank]
        keys = keys if isinstance(keys, range) else client.routes.of(table.name, np.asarray(keys, dtype=np.int64))
        read, outs = client.read([(client.settle(table), keys)], self.ticket())
        self.put(rank, outs)
        return read

    def done(self, rank: int, read) -> bool:
        return read.ticket in self.clients[rank].finished

    def pull(self, rank: int, table: TableSpec, keys) -> torch.Tensor:
        read = self.begin(rank, table, keys)
        self.run(lambda: self.done(rank, read))
        assert self.done(rank, read), f"worker {rank} waits for ever"
        return result(read.wants[0])[1].values

    def clock(self, rank: int, place=0) -> None:
        self.put(rank, self.clients[rank].advance(place, self.ticket()))
