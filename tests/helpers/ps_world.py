"""A whole parameter server in one process: real servers, clients, peers and seals over streams in memory.

The coordinator is the job's state machine; the test's thread runs the workers' scripts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from psctl.client.dense_client import ParameterClient
from psctl.client.host_aggregation import HostAggregation
from psctl.client.host_connections import HostConnections
from psctl.client.rack_connections import RackConnections
from psctl.client.shared_buffers import SharedBuffers, private_buffers
from psctl.clock import SystemClock
from psctl.coordinator.state.instructions import StartMember
from psctl.errors import PeerLost
from psctl.job.membership_messages import Reassign
from psctl.job.message import JobMessage
from psctl.job.process_messages import ScaleWanted
from psctl.job.training_messages import Decision, Join, MemberReady, Prepare, WorkersAt
from psctl.orders import JobOrder
from psctl.ps.permits import RACK
from psctl.ps.pieces import pieces
from psctl.ps.shards import offsets
from psctl.server.main import Server
from psctl.types import Assignment, Layout, Member, ParameterInfo
from tests.helpers.credentials import credentials
from tests.helpers.memory_checkpoints import MemoryCheckpoint, Tensors
from tests.helpers.memory_stream import MemoryNetwork
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.threaded_job import WAIT, Host, Link, ThreadedJob

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ServersJob(ThreadedJob):
    """A job with servers only: the test acts for the workers, and lost servers are not replaced."""

    def __init__(
        self, order: JobOrder, servers: int, shard_bytes: int, checkpoint: MemoryCheckpoint | None,
        network: MemoryNetwork, near: Callable[[Member], bool],
    ) -> None:  # fmt: skip
        self.host, self._near = Host(), near
        self.workers: list[Member] = []
        self.held: list[tuple[Member, JobMessage]] | None = None
        """Decisions that are held back from servers; None: none is held back."""
        super().__init__(order, list(range(servers)), shard_bytes, checkpoint, network)

    def sharing(self, member: Member) -> SharedBuffers | None:
        return self.host.sharing(member) if self._near(member) else None

    def start_worker(self, member: Member) -> None:
        self.workers.append(member)

    def start_member(self, start: StartMember) -> None:
        if start.member.incarnation == 0:
            super().start_member(start)

    def on_server_end(self, member: Member, status: int) -> None:
        """Do nothing: the test reports losses."""

    def send(self, member: Member, message: JobMessage) -> None:
        if self.held is not None and member.role == "server" and isinstance(message, Decision):
            self.held.append((member, message))
        else:
            super().send(member, message)

    def decide(self) -> None:
        """Send servers the decisions that were held back."""
        held, self.held = self.held, None
        for member, message in held or ():
            self.send(member, message)


class WorkerEnd:
    """A worker's end of its connection to the coordinator."""

    def __init__(self) -> None:
        self.decision: Decision | None = None
        self.decided = threading.Event()
        self.workers_at = WorkersAt([])
        self.client: ParameterClient | None = None

    def receive_buffer_for(self, peer: None, message: JobMessage, size: int) -> None:
        return None

    def on_message(self, peer: None, message: JobMessage, payload: memoryview | None) -> None:
        match message:
            case Decision():
                self.decision = message
                self.decided.set()
            case WorkersAt():
                self.workers_at = message
            case Reassign() if self.client is not None:
                self.client.on_membership(message)


class World:
    """The clients, called by the test's thread, and servers of one job. Each server shares a host with its worker.

    Args:
        layout: the model.
        workers: number of clients.
        servers: their number.
        update: where the optimizer steps.
        target: bytes of a shard.
        checkpoint: whole tensors by name and their step, as `checkpoint()` of another world returns them.
        trace: called by the clients for each push.
        patience: seconds that a client waits for a lost server.
        silence: seconds until a cut is detected.
        decided: whether servers get the decision at once.
        load_problem: why the checkpoint cannot be read.
        staleness: clocks that a worker may be ahead.
        replicas: of each shard.
        near: returns whether a member is on the one host with shared memory; all others have hosts of their own.
        hosts: workers that share a host, whose gradients are summed before others'.
        folder: folder of the sockets between these workers; None: they are not connected.
        racks: the rack of each worker, each with a host of its own; `hosts` has the workers of each.
        in_backward: some shards are stepped before the others are pushed.
    """

    def __init__(
        self, layout: Layout, workers: int = 1, servers: int = 1, update: str = "server", target: int = 256,
        checkpoint: Tensors | None = None, step: int = 0, trace: Any = None, patience: float = 20.0,
        silence: float = 5.0, decided: bool = True, load_problem: str = "", staleness: int | None = 0,
        replicas: int = 0, near: Callable[[Member], bool] = lambda member: True,
        hosts: Sequence[Sequence[int]] = (), folder: Path | None = None, racks: tuple[str, ...] = (),
        in_backward: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.workers = layout, workers
        self.network = MemoryNetwork(silence=silence)
        resumed = None
        if step:
            resumed = MemoryCheckpoint(step)
            resumed.tensors = checkpoint or {}
        seats = [len(group) for group in hosts if not racks] or [1] * max(1, workers)
        seats += [0] * (servers - len(seats))
        order = make_order(
            make_hosts(*seats), servers=servers, update=update, staleness=staleness, replicas=replicas, restarts=99,
            on_worker_loss="wait", step_in_backward=in_backward,
        )  # fmt: skip
        self.job = ServersJob(order, servers, target, resumed, self.network, near)
        self.job.load_problem, self.job.racks = load_problem, racks
        self.job.held = None if decided else []
        self.dead: set[int] = set()
        self._lost: set[int] = set()
        self.job.begin()
        self.job.register()
        self._ends = {member: WorkerEnd() for member in self.job.workers}
        for member, end in self._ends.items():
            link = self.job.connect(member, end)
            link.send(Join(1))
            link.send(Prepare(layout, ()))
        first = self._ends[Member("worker", 0)]
        assert first.decided.wait(WAIT), "no decision"
        assert first.decision is not None
        self.decision, self._folder = first.decision, folder
        self.held = pieces(layout, self.decision.shards)  # by shard
        assert [tuple(group) for group in self.decision.hosts] == [tuple(group) for group in hosts]
        self.clients = [self._client(Member("worker", rank), trace, patience) for rank in range(workers)]

    def decide(self) -> None:
        self.job.decide()

    def _client(self, me: Member, trace: Any, patience: float) -> ParameterClient:
        sharing, end = self.job.sharing(me), self._ends[me]
        lines = self._folder is not None and any(me.rank in group for group in self.decision.hosts)
        connections = partial(HostConnections, me, self._folder)
        if self.decision.racks:
            dial = self.job.dialler(me, RACK)
            connections = partial(RackConnections, me, dial, partial(self._listen, me), 1 << 20)
        end.client = ParameterClient(
            me, self.workers, self.decision, self.job.dialler(me), SystemClock(), patience, trace,
            report=self.job.links[me].send, sharing=sharing,
            host=HostAggregation(me, connections, sharing or private_buffers(me)) if lines else None,
        )  # fmt: skip
        return end.client

    def _listen(self, me: Member, handler: Any, allow: Any) -> Any:
        return self.network.acceptor(credentials(me), RACK, handler, allow)

    def dialler(self, rank: int) -> Any:
        """Return the function by which a worker connects to servers."""
        return self.job.dialler(Member("worker", rank))

    def meet(self) -> None:
        """Send the workers of each host the addresses of the others."""
        self.job.settle()
        for end in self._ends.values():
            end.client.on_membership(end.workers_at)

    # ---- members ----

    @property
    def servers(self) -> dict[int, Server]:
        """By rank."""
        return self.job.servers

    @property
    def assignment(self) -> Assignment:
        """The newest."""
        return self.job.machine.job.shards.placement.assignment

    def server_link(self, rank: int) -> Link:
        """Return a server's end of its connection to the coordinator."""
        return self.job.links[Member("server", rank)]

    def kill(self, rank: int) -> None:
        """End a server as kill -9 does: every connection breaks, and nothing listens at its address."""
        member = Member("server", rank)
        self.job.acceptors[member].close()
        self.servers[rank].on_connection_lost(None, PeerLost("killed"))
        self.network.kill(member)
        self.job.threads[member].join(20)
        self.dead.add(rank)

    def reassign(self) -> None:
        """Report the dead servers to the coordinator, and send its new assignment to all others."""
        for rank in sorted(self.dead - self._lost):
            self._lost.add(rank)
            self.job.killed(Member("server", rank))
        self.job.settle()

    def scale(self, servers: int) -> None:
        """Change the number of servers during training."""
        self.job.receive(Member("agent", 0), ScaleWanted(1, None, servers))

    # ---- one step over all workers ----

    def start(self, values=None) -> None:
        """Call `start` of all workers; rank 0 waits for its own values first."""
        self.clients[0].start(values)
        for client in self.clients[1:]:
            client.start(None)
        for member in self._ends:
            self.job.links[member].send(MemberReady())

    def push(self, clock: int, gradients: list[dict[int, torch.Tensor]], weights=None) -> None:
        """Push for every rank; `gradients[rank]` maps parameter index to gradient, absent where the rank has none."""
        for rank in reversed(range(self.workers)):  # last rank first: the sum must wait for rank 0
            client, weight = self.clients[rank], 1.0 if weights is None else weights[rank]
            buffers = client.send_buffer(clock)
            for flat in buffers.values():
                flat.fill_(float("nan"))  # elements without a gradient must not be read
            for index, gradient in gradients[rank].items():
                view_of(self.layout, buffers, index).copy_(gradient)
            for shard, held in reversed(list(enumerate(self.held))):
                client.push(clock, shard, [piece.parameter in gradients[rank] for piece in held], weight)

    def step(self, clock: int, groups, scale=None, save=False) -> None:
        """Order the step on every rank, where servers step, and wait for its values."""
        if self.decision.update == "server":
            for client in self.clients:
                client.step(clock, groups, scale, save)
        self.pull(clock + 1)

    def pull(self, clock: int) -> None:
        for client in self.clients:
            client.pull(clock)
        for client in self.clients:
            client.wait(clock)

    def parameter(self, rank: int, index: int) -> torch.Tensor:
        """What worker `rank` reads as parameter `index` (under update: worker its joint gradient)."""
        return view_of(self.layout, self.clients[rank].landing, index)

    def checkpoint(self, step: int) -> Tensors:
        """Return the tensors that the servers have saved, once all have sent their parts."""
        clock, senders = SystemClock(), {server.me for server in self.servers.values()}
        end = clock.now() + WAIT
        while step not in (saved := self.job.disk.open) or not senders <= saved[step].ended:
            assert clock.now() < end, f"no save of step {step}"
            clock.sleep(0.002)
        return saved[step].tensors

    def close(self) -> None:
        for client in self.clients:
            client.close("the test is over")
        self.job.close()
        self.job.host.close()

    def join_servers(self) -> None:
        for server in self.servers.values():
            self.job.threads[server.me].join(20)
            assert not self.job.threads[server.me].is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def view_of(layout: Layout, flat: dict[str, torch.Tensor], index: int) -> torch.Tensor:
    info, start = layout.parameters[index], offsets(layout)[index]
    return flat[info.dtype].narrow(0, start, info.size).view(info.shape)


def make_layout(parameters, optimizer: str, groups) -> Layout:
    """`parameters`: (shape, dtype, group) each; group None: frozen."""
    infos = [
        ParameterInfo(f"layer.{index}", tuple(shape), dtype, -1 if group is None else group, group is not None)
        for index, (shape, dtype, group) in enumerate(parameters)
    ]
    return Layout(tuple(infos), optimizer, tuple(groups))


def flat_values(layout: Layout, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Lay the trainable parameters' values flat, as a worker's `start` takes them."""
    found: dict[str, list[torch.Tensor]] = {}
    for info, value in zip(layout.parameters, values, strict=True):
        if info.trainable:
            found.setdefault(info.dtype, []).append(value.reshape(-1))
    return {dtype: torch.cat(parts) for dtype, parts in found.items()}
