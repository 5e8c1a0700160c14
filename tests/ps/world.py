"""Server and client state machines connected in memory: a seed draws the order of all messages.

Each connection keeps the order of its messages; connections are independent. A payload is read when it is delivered,
so bytes that were overwritten before arrive torn. Tests act as the coordinator: `assign`, `kill`, `move`.
"""

from __future__ import annotations

import random
from collections import deque

import torch

from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.dense.shard_state import Terms
from psctl.ps.outputs import HeldPushes, LeadMoved, ReplicaCaughtUp, SaveSlices, ToServer, ToWorker
from psctl.ps.shards import cut, spaces
from psctl.types import PLAIN, Layout, ParameterInfo

SIZES = (7, 130, 40)
GROUPS = [{"lr": 0.05, "betas": [0.9, 0.999], "weight_decay": 0.01}]
LAYOUT = Layout(
    tuple(ParameterInfo(f"p{i}", (size,), "float32", 0) for i, size in enumerate(SIZES)), "Adam", (GROUPS[0],)
)
SHARDS = cut(LAYOUT, 2, target_bytes=256)


class Stuck(AssertionError):
    """No message is in flight, and the run has not ended."""


class Worker:
    """A worker that computes a gradient from the values it reads, its rank and the clock."""

    def __init__(self, world: World, rank: int, base: int, clocks: int) -> None:
        self.world, self.rank, self.base, self.clock, self.clocks = world, rank, base, base, clocks
        terms = Terms(
            LAYOUT, world.workers_, "server", base, world.staleness, world.compression, in_backward=world.in_backward
        )
        self.machine = DenseClient(terms, SHARDS, world.owners(), rank, sorted(world.servers))
        self.phase = "pull"
        self.unpushed: list[int] = []

    def begin(self) -> None:
        if self.rank == 0 and self.base == 0:
            values = {"float32": torch.linspace(-1, 1, spaces(LAYOUT)["float32"])}
            self.world.out(self, self.machine.send_start_values(values))

    def act(self) -> bool:
        """Execute what can be done now; return whether there was anything."""
        machine, clock = self.machine, self.clock
        if self.phase == "pull":
            machine.copy_to_front()
            self.world.out(self, machine.pull(clock))
            self.phase = "done" if clock == self.clocks and self.world.staleness is None else "wait"
            return True
        if self.phase == "wait":
            if machine.missing_shards(clock, exact=clock == self.clocks and self.world.staleness == 0):
                return False
            machine.copy_to_front()
            self.phase = "done" if clock == self.clocks else "push"
            return True
        if self.phase == "push":
            if machine.unacknowledged_servers(clock - machine.buffer_count):
                return False
            values, to = machine.front["float32"], machine.send_buffer(clock)["float32"]
            noise = torch.randn(len(to), generator=torch.Generator().manual_seed(100 * clock + self.rank))
            to.copy_(values * 0.1 + noise)
            if self.world.in_backward:
                self.world.out(self, machine.order_in_backward(clock, GROUPS))
            self.unpushed, self.phase = list(range(len(SHARDS))), "backward"
            return True
        if self.phase == "backward":
            shard = self.unpushed.pop()
            machine.send_buffers.encode(clock, shard, [True] * len(machine.held[shard]))
            self.world.out(self, machine.push(clock, shard, [True] * len(machine.held[shard]), 1.0))
            if shard in machine.shards_in_backward:
                self.world.out(self, machine.pull_in_backward(clock + 1, shard))
            if not self.unpushed:
                self.world.out(self, machine.order_step(clock, GROUPS, None, clock + 1 in self.world.saves))
                self.clock, self.phase = clock + 1, "pull"
            return True
        return False


class World:
    def __init__(
        self, seed: int, servers: int, workers: int, clocks: int, *, replicas=0, staleness=0, saves=(),
        compression=PLAIN, in_backward=0.0,
    ) -> None:  # fmt: skip
        self.compression, self.in_backward = compression, in_backward
        self.random, self.staleness, self.workers_, self.saves = random.Random(seed), staleness, workers, saves
        self.clocks, self.epoch = clocks, 0
        self.servers = {rank: self._server(rank) for rank in range(servers)}
        chain = [[(j + k) % servers for k in range(replicas + 1)] for j in range(len(SHARDS))]
        self.chains, self.copies = chain, [[] for _ in SHARDS]
        self.queues: dict[tuple, deque] = {}
        self.instructions: list = []
        self.saved: dict[int, dict[str, bytes]] = {}
        self.fronts: list[int] = []
        self.workers = {rank: Worker(self, rank, 0, clocks) for rank in range(workers)}
        for a in sorted(self.servers):
            for b in sorted(self.servers):
                if a != b:
                    self.follow(a, self.servers[a].on_server_connected(b))
        self.assign()
        for rank in sorted(self.workers):
            self.connect(rank)
            self.workers[rank].begin()

    def _server(self, rank: int) -> DenseServer:
        terms = Terms(
            LAYOUT, self.workers_, "server", 0, self.staleness, self.compression, in_backward=self.in_backward
        )
        return DenseServer(terms, SHARDS, rank)

    def owners(self) -> list[int]:
        return [chain[0] for chain in self.chains]

    # ---- the coordinator ------------------------------------------------------------------------------------------

    def assign(self, *, tell_workers: bool = True) -> None:
        self.epoch += 1
        for rank, machine in sorted(self.servers.items()):
            self.follow(rank, machine.on_assignment(self.epoch, self.chains, self.copies, list(self.servers)))
        if tell_workers:
            self.tell_workers()

    def tell_workers(self) -> None:
        for worker in self.workers.values():
            self.out(worker, worker.machine.on_assignment(self.epoch, self.owners(), sorted(self.servers)))

    def kill(self, server: int) -> None:
        del self.servers[server]
        self.queues = {key: queue for key, queue in self.queues.items() if ("s", server) not in key}
        for worker in self.workers.values():
            worker.machine.on_server_disconnected(server)
        for rank, machine in sorted(self.servers.items()):
            self.follow(rank, machine.on_server_disconnected(server))
        self.chains = [[one for one in chain if one != server] for chain in self.chains]
        self.copies = [[one for one in some if one != server] for some in self.copies]
        self.assign()

    def connect(self, rank: int, server: int | None = None) -> None:
        """Break a worker's connection to one server (None: all servers) and make a new one."""
        for one in self.servers if server is None else [server]:
            self.queues.pop((("w", rank), ("s", one)), None)
            self.queues.pop((("s", one), ("w", rank)), None)
            self.workers[rank].machine.on_server_disconnected(one)
            self.servers[one].on_worker_disconnected(rank)
            self.follow(one, self.servers[one].on_worker_connected(rank))

    def reconnect_servers(self, a: int, b: int) -> None:
        for one, other in ((a, b), (b, a)):
            self.queues.pop((("s", one), ("s", other)), None)
        for one, other in ((a, b), (b, a)):
            self.follow(one, self.servers[one].on_server_disconnected(other))
        for one, other in ((a, b), (b, a)):
            self.follow(one, self.servers[one].on_server_connected(other))

    def held(self, rank: int) -> tuple[int, int]:
        """Kill a worker; return the cut, and the newest version of a shard."""
        del self.workers[rank]
        self.queues = {key: queue for key, queue in self.queues.items() if ("w", rank) not in key}
        clocks: dict[int, int] = {}
        versions: dict[int, int] = {}
        for _, machine in sorted(self.servers.items()):
            machine.on_worker_disconnected(rank)
            for held in machine.on_worker_lost(rank):
                assert isinstance(held, HeldPushes)
                clocks |= held.clocks
                versions |= held.versions
        assert sorted(clocks) == list(range(len(SHARDS)))
        return min(clocks.values()), max(versions.values())

    def replace(self, rank: int) -> None:
        cut_at, newest = self.held(rank)
        assert newest <= cut_at + 1, "no shard is beyond the cut"
        self.start_again(rank, cut_at)

    def start_again(self, rank: int, cut_at: int) -> None:
        """Start a worker that was killed, after the last clock of it that counts."""
        for server, machine in sorted(self.servers.items()):
            self.follow(server, machine.count_until(rank, cut_at))
        worker = self.workers[rank] = Worker(self, rank, cut_at + 1, self.clocks)
        self.out(worker, worker.machine.on_assignment(self.epoch, self.owners(), sorted(self.servers)))
        self.connect(rank)

    def caught_up(self, server: int) -> bool:
        """Return whether a server has been filled with all of its shards of this assignment."""
        done = {one.shard for one in self.instructions if isinstance(one, ReplicaCaughtUp) and one.server == server}
        return done >= {shard for shard, copies in enumerate(self.copies) if server in copies}

    def add(self, server: int, shards: list[int]) -> None:
        """Start a server and have it filled."""
        self.servers[server] = self._server(server)
        for other in sorted(self.servers):
            if other != server:
                self.follow(other, self.servers[other].on_server_connected(server))
                self.follow(server, self.servers[server].on_server_connected(other))
        for rank in sorted(self.workers):
            self.connect(rank, server)
        for shard in shards:
            self.copies[shard] = [server]
        self.instructions.clear()
        self.assign()

    def move(self, server: int) -> None:
        """Make the server the primary of its shards; workers get the assignment after all transfers."""
        moving = [shard for shard, copies in enumerate(self.copies) if server in copies]
        for shard in moving:
            self.copies[shard] = []
            self.chains[shard] = [server, *self.chains[shard][1:]]
        self.instructions.clear()
        self.assign(tell_workers=False)
        self.run(until=lambda: {one.shard for one in self.instructions if isinstance(one, LeadMoved)} >= set(moving))
        self.tell_workers()

    # ---- the network ----------------------------------------------------------------------------------------------

    def out(self, worker: Worker, outs) -> None:
        for one in outs:
            self.queues.setdefault((("w", worker.rank), ("s", one.server)), deque()).append((one.message, one.payload))

    def follow(self, server: int, instructions) -> None:
        for one in instructions:
            if isinstance(one, ToWorker):
                if one.rank in self.workers:
                    key = (("s", server), ("w", one.rank))
                    self.queues.setdefault(key, deque()).append((one.message, one.payload))
            elif isinstance(one, ToServer):
                if one.server in self.servers:
                    key = (("s", server), ("s", one.server))
                    self.queues.setdefault(key, deque()).append((one.message, one.payload))
            elif isinstance(one, SaveSlices):
                parts = self.saved.setdefault(one.step, {})
                for part in one.copied:
                    parts[f"{part.slice.name}[{part.slice.start}]"] = bytes(part.data)
            else:
                self.instructions.append(one)

    def deliver(self, key) -> None:
        (_, sender), (kind, receiver) = key
        message, payload = self.queues[key].popleft()
        if not self.queues[key]:
            del self.queues[key]
        size = 0 if payload is None else len(payload)
        if kind == "w":
            worker = self.workers[receiver]
            place = worker.machine.receive_buffer_for(sender, message, size) if size else None
            if place is not None:
                place[:] = payload
            self.out(worker, worker.machine.on_server_message(sender, message, size))
            return
        machine, worker = self.servers[receiver], key[0][0] == "w"
        place = (
            (machine.receive_buffer_for if worker else machine.replica_buffer_for)(sender, message, size)
            if size
            else None
        )
        if place is not None:
            place[:] = payload
        self.follow(
            receiver, (machine.on_worker_message if worker else machine.on_server_message)(sender, message, size)
        )

    def step(self) -> bool:
        """Deliver one message or execute one act of a worker; return False when there is neither."""
        chances: list = [*self.queues, *self.workers]
        self.random.shuffle(chances)
        for chance in chances:
            if isinstance(chance, tuple):
                self.deliver(chance)
                return True
            if self.workers[chance].act():
                return True
        return False

    def run(self, steps: int | None = None, until=None) -> None:
        """Run for some steps, until a condition holds, or to the end."""
        taken = 0
        while steps is None or taken < steps:
            if until is not None and until():
                return
            if not self.step():
                if until is None:
                    break
                raise Stuck({rank: (one.clock, one.phase) for rank, one in self.workers.items()})
            taken += 1
        if steps is None and until is None and any(one.phase != "done" for one in self.workers.values()):
            raise Stuck({rank: (one.clock, one.phase) for rank, one in self.workers.items()})

    def values(self) -> torch.Tensor:
        """Return the concatenated values of all shards at their primaries."""
        return torch.cat([self.servers[self.chains[s.index][0]].shards[s.index].state.values for s in SHARDS])

    def copies_agree(self) -> None:
        """Check that all members of each chain have bitwise equal state."""
        for shard, chain in enumerate(self.chains):
            states = [self.servers[one].shards[shard].state for one in chain]
            for other in states[1:]:
                assert other.version == states[0].version
                assert other.snapshot()[1] == states[0].snapshot()[1]


assert len(SHARDS) >= 3
