"""Table servers and clients without a network: a test delivers their messages one by one.

Messages pass the real encoder, so their bytes are those of the wire. A link keeps the order of messages, as a
connection does; `cut` drops its messages and makes a new one, as after a broken connection. Servers have links to each
other too; `kill` ends a server, `assign` places shards.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from psctl.errors import ProtocolError, UsageError
from psctl.ps.messages import SharedRange
from psctl.ps.outputs import ToServer, ToWorker
from psctl.ps.permits import TABLES
from psctl.ps.table_messages import Fetched, StoreSpec, TableSpec, Update
from psctl.ps.tables.client.calls_in_flight import pooled_route, result
from psctl.ps.tables.client.table_client_state import TableClient
from psctl.ps.tables.reductions import custom, reductions
from psctl.ps.tables.row_bags import RowBags
from psctl.ps.tables.server.table_server import TableServer

DECODER = msgspec.msgpack.Decoder(TABLES.union)


class Functions:
    """Reductions by name, users' functions from a dict."""

    def __init__(self, **functions):
        self._functions = {f"mine:{name}": function for name, function in functions.items()}

    def reduction(self, name):
        known = reductions()
        return known[name] if name in known else custom(name, self.function(name))

    def function(self, name):
        if name not in self._functions:
            raise UsageError(f"no function has the name {name!r}")
        return self._functions[name]


def spec(name="", shape=(1,), dtype="float64", **more) -> TableSpec:
    return TableSpec(name, shape, dtype, **more)


class World:
    """One store; `staleness` None: asp. `run` delivers messages, in an order drawn from `random` if given."""

    def __init__(
        self, workers=2, servers=2, staleness=None, eager=False, shards=4, functions=None, random=None, group=None,
        replicas=0, begins=False, shares=False, full_every=1,
    ) -> None:  # fmt: skip
        self.functions = functions or Functions()
        group = tuple(range(workers)) if group is None else group
        self.store = StoreSpec("s", staleness, eager, group, shards)
        self.random, self.bytes, self.epoch = random, 0, -1
        self.full_every = full_every
        self.shares = shares  # long payloads are in shared memory, and are overwritten as soon as their owner may
        self.shared: list[tuple[int, int, bytearray]] = []  # worker, sequence, bytes that a server reads
        self.servers: dict[int, TableServer] = {}
        self.links: dict[tuple, deque] = {}  # by (sender, receiver)
        self.clients: list[TableClient] = []
        self.steps: dict[int, int] = {}  # newest step that a worker has marked
        self.tickets = 0
        self.reports: list = []  # messages to the coordinator
        self.trace: list[str] | None = None  # every message, when it is there
        for rank in range(servers):
            self.start(rank)
        chains = [[(shard + more) % servers for more in range(replicas + 1)] for shard in range(shards)]
        self.assign(chains)
        for rank in range(servers):
            self.follow(rank, self.servers[rank].start_shards(restored=begins))
        for rank in range(workers):
            self.join(rank)

    def start(self, rank: int) -> TableServer:
        """Start a server (again), with empty state."""
        machine = self.servers[rank] = TableServer(rank, self.functions, self.store.shards, full_every=self.full_every)
        self.meet(rank)
        for worker in range(len(self.clients)):
            self.cut(worker, rank)
        return machine

    def meet(self, rank: int) -> None:
        """Connect a new server with the others."""
        for other in self.servers:
            if other != rank:
                self.connect(("server", rank), ("server", other))

    def kill(self, rank: int) -> None:
        """End a server and drop all messages from it and to it."""
        del self.servers[rank]
        for link in [link for link in self.links if ("server", rank) in link]:
            del self.links[link]
        for other, machine in self.servers.items():
            self.follow(other, machine.on_server_disconnected(rank))

    def assign(self, chains, copies=None) -> None:
        """Deliver an assignment to all servers at once."""
        self.epoch += 1
        for rank, machine in self.servers.items():
            self.follow(
                rank, machine.on_assignment(self.epoch, chains, copies or [[] for _ in chains], list(self.servers))
            )

    def join(self, rank: int) -> TableClient:
        """Start a worker (again), with empty state."""
        client = TableClient(self.store, rank, self.functions)
        self.shared = [each for each in self.shared if each[0] != rank]  # a lost worker writes no more
        if rank == len(self.clients):
            self.clients.append(client)
        self.clients[rank] = client
        self.steps.setdefault(rank, 0)
        for server in self.servers:
            self.cut(rank, server)
        return client

    def connect(self, one, other) -> None:
        """Make a new connection of two servers."""
        for link in ((one, other), (other, one)):
            self.links[link] = deque()
        for me, them in ((one[1], other[1]), (other[1], one[1])):
            self.follow(me, self.servers[me].on_server_disconnected(them))
            self.follow(me, self.servers[me].on_server_connected(them))

    def cut(self, rank: int, server: int) -> None:
        """Break the connection and make a new one."""
        for link in ((("worker", rank), ("server", server)), (("server", server), ("worker", rank))):
            self.links[link] = deque()
        self.servers[server].on_worker_disconnected(rank)
        self.put(rank, self.clients[rank].start_session(server, self.steps[rank]))

    def put(self, rank: int, outs) -> None:
        for out in outs:
            self._queue((("worker", rank), ("server", out.server)), out.message, out.payload)

    def follow(self, rank: int, outputs) -> None:
        """Execute the outputs of a server's state machine."""
        for output in outputs:
            if isinstance(output, ToWorker):
                self._queue((("server", rank), ("worker", output.rank)), output.message, output.payload)
            elif isinstance(output, ToServer):
                link = (("server", rank), ("server", output.server))
                if link in self.links:
                    data = None if output.payload is None else bytes(output.payload)
                    self.links[link].append((msgspec.msgpack.encode(output.message), data))
            else:
                self.reports.append((rank, output))

    def _queue(self, link, message, payload) -> None:
        if link not in self.links:
            return
        if self.shares and isinstance(message, Update | Fetched) and payload is not None and len(payload):
            encoded = msgspec.msgpack.encode(replace(message, at=SharedRange(0, 0, len(payload))))
            self.links[link].append((encoded, bytes(payload)))
            return
        encoded, data = msgspec.msgpack.encode(message), bytes(payload) if payload else None
        self.bytes += len(encoded) + len(data or b"")
        self.links[link].append((encoded, data))

    def step(self) -> bool:
        """Deliver one message; return False when none is in flight."""
        links = [link for link, queue in self.links.items() if queue]
        if not links:
            return False
        link = self.random.choice(links) if self.random else links[0]
        (role, rank), (to, receiver) = link
        encoded, data = self.links[link].popleft()
        message = DECODER.decode(encoded)
        if self.trace is not None:
            self.trace.append(f"{role}/{rank} -> {to}/{receiver}: {message}")
        if role == to == "server":
            self._between(rank, receiver, message, data)
            return True
        received, shared = bytearray(data or b""), getattr(message, "at", None) is not None
        if to == "server":
            if shared:
                self.shared.append((rank, message.sequence, received))
            self.follow(receiver, self.servers[receiver].on_worker_message(rank, message, memoryview(received)))
        else:
            self.put(receiver, self.clients[receiver].on_server_message(rank, message, memoryview(received)))
            if shared:
                received[:] = b"\xa5" * len(received)
            self.overwrite(receiver)
        return True

    def overwrite(self, rank: int) -> None:
        """Overwrite shared buffers of a worker that all shards have applied."""
        left = {change.sequence for change in self.clients[rank].outstanding}
        for each in [each for each in self.shared if each[0] == rank and each[1] not in left]:
            each[2][:] = b"\xa5" * len(each[2])
            self.shared.remove(each)

    def _between(self, server: int, receiver: int, message, data) -> None:
        machine = self.servers[receiver]
        try:
            room = None if data is None else machine.replica_buffer_for(server, message, len(data))
            if room is not None:
                room[:] = data
            self.follow(receiver, machine.on_server_message(server, message, len(data or b"")))
        except ProtocolError:  # as connections do: it ends, and a new one is made
            self.connect(("server", server), ("server", receiver))

    def run(self, until=lambda: False) -> None:
        while not until() and self.step():
            pass

    # ---- what a worker does ----

    def ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def push(self, rank: int, table: TableSpec, keys, values, place=0, what="push", index=None) -> int:
        """Push rows (or a tensor) without delivering messages; return the ticket."""
        client = self.clients[rank]
        kind = client.resolve_kind(table)
        route = client.routes.route_of(table.name, np.asarray(keys, dtype=np.int64))
        assert route.inverse is None, "no key occurs twice"
        values = torch.as_tensor(values, dtype=kind.dtype).reshape(len(route.unique), -1)
        index = None if index is None else torch.as_tensor(index).reshape(len(route.unique), -1)
        ticket = self.ticket()
        for change in client.prepare_push([(kind, route, kind.reduction.lanes(values, index))], ticket, what, place):
            self.put(rank, client.send_change(change, place))
        return ticket

    def push_one(self, rank: int, table: TableSpec, key: int, values, place=0) -> int:
        """Push one row, which may wait in a batch; return the ticket."""
        client, ticket = self.clients[rank], self.ticket()
        kind = client.resolve_kind(table)
        values = torch.as_tensor(values, dtype=kind.dtype).reshape(1, -1)
        self.put(rank, client.push_one(kind, key, kind.reduction.lanes(values), ticket, place))
        return ticket

    def begin_one(self, rank: int, table: TableSpec, key: int) -> int:
        """Begin to read one row; return its ticket, the key in the client's `rows`."""
        client, ticket = self.clients[rank], self.ticket()
        self.put(rank, client.read_one(client.resolve_kind(table), key, ticket))
        return ticket

    def begin(self, rank: int, table: TableSpec, keys, ahead=0):
        """Begin a read, of a clock that is so far ahead; return it."""
        client = self.clients[rank]
        keys = keys if isinstance(keys, range) else client.routes.route_of(table.name, np.asarray(keys, dtype=np.int64))
        read, outs = client.start_read([(client.resolve_kind(table), keys)], self.ticket(), ahead=ahead)
        self.put(rank, outs)
        return read

    def route_bags(self, rank: int, table: TableSpec, keys, bags: RowBags):
        """Return the route of bags of the places of these keys."""
        client = self.clients[rank]
        return pooled_route(client.resolve_kind(table), client.routes.route_of(table.name, keys), bags)

    def push_sums(self, rank: int, route, gradients, place=0) -> None:
        """Push gradients of bags."""
        client = self.clients[rank]
        for change in client.prepare_sums(route, gradients, self.ticket()):
            self.put(rank, client.send_change(change, place))

    def begin_sums(self, rank: int, route):
        """Begin a read of sums of bags; return it."""
        read, outs = self.clients[rank].start_sums(route, self.ticket())
        self.put(rank, outs)
        return read

    def done(self, rank: int, read) -> bool:
        return read.ticket in self.clients[rank].finished

    def pull(self, rank: int, table: TableSpec, keys) -> torch.Tensor:
        read = self.begin(rank, table, keys)
        self.run(lambda: self.done(rank, read))
        assert self.done(rank, read), f"worker {rank} waits for ever"
        return result(read.wants[0])[1].values

    def clock(self, rank: int, place=0, common=False) -> None:
        client = self.clients[rank]
        self.put(rank, client.finish_clocks(client.clock + 1, place, self.ticket(), common=common))

    def mark(self, rank: int, step: int, place=0, common=False) -> None:
        self.steps[rank] = step
        self.put(rank, self.clients[rank].mark_step(place, step, common=common))
