"""A whole parameter server in one process: real servers, clients, peers and seals over streams in memory.

The coordinator is played by `Coordinator`: it collects what servers send it, and answers LoadWanted from a checkpoint
that another world's coordinator collected.
"""

from __future__ import annotations

import threading
import time
from functools import cache

import torch

from psctl.agent.shm_broker import SegmentServer, pair
from psctl.client.dense_client import ParameterClient
from psctl.client.host_aggregation import HostAggregation
from psctl.client.shared_buffers import SharedBuffers
from psctl.clock import SystemClock
from psctl.errors import PeerLost
from psctl.job.assignment import assign
from psctl.job.checkpoint_messages import LoadEnd, LoadPart, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.membership_messages import Reassign
from psctl.job.training_messages import Decision, Leave, Resume, Welcome, WorkerAt, WorkerListens, WorkersAt
from psctl.ps.permits import PARAMETERS
from psctl.ps.shards import cut, offsets, sizes
from psctl.server.main import Server
from psctl.transport.credentials import Credentials
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.transport.shared_memory import SegmentClient
from psctl.types import Assignment, Layout, Member, ParameterInfo, ServerAt
from tests.helpers.memory_checkpoints import MemoryCheckpoint, Tensors, read_slice
from tests.helpers.memory_stream import MemoryNetwork

LARGEST = 130 << 20
"""Bytes of a segment of shared memory."""
KNOCK = new_secret()

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@cache
def credentials(member: Member) -> Credentials:
    pair = issue(_authority(), "world-1", member, time.time())
    return Credentials("world-1", member, _authority().certificate_pem, pair.certificate_pem, pair.key_pem, KNOCK)


@cache
def _authority():
    return make_authority("world-1", time.time())


class Host:
    """Stands in for an agent that makes shared memory for processes which are threads here."""

    def __init__(self) -> None:
        self._segments = SegmentServer(LARGEST)
        self._children = []

    def sharing(self, member: Member) -> SharedBuffers:
        return SharedBuffers(self.segments(member))

    def segments(self, member: Member) -> SegmentClient:
        ours, theirs = pair()
        thread = threading.Thread(target=self._segments.serve, args=(member, ours), daemon=True)
        thread.start()
        child = SegmentClient(member, theirs)
        self._children.append((child, thread))
        return child

    def close(self) -> None:
        for child, thread in self._children:
            child.close()
            thread.join(10)
            self._segments.ended(child.me)


class Coordinator:
    """Stands in for the connection to the coordinator, as one server sees it."""

    def __init__(self, saved: dict[int, MemoryCheckpoint], checkpoint=None, load_end=None) -> None:
        self.sent: list = []
        self._load_end = load_end or LoadEnd(0)
        self.server: Server | None = None
        self.saved = saved
        self.whole = threading.Condition()
        self.ended: set[int] = set()
        self._checkpoint = checkpoint

    def send(self, message, payload=None, *, urgent=False) -> None:
        self.sent.append(message)
        match message:
            case SaveBegin():
                self.saved.setdefault(message.step, MemoryCheckpoint(message.step)).begin(self, message)
            case SavePart():
                self.saved[message.step].write(self, message, payload)
            case SaveEnd():
                with self.whole:
                    self.ended.add(message.step)
                    self.whole.notify_all()
            case LoadWanted():
                for index, wanted in enumerate(message.slices):
                    data = read_slice(self._checkpoint, wanted)
                    part = LoadPart(0, index, 0)
                    if len(data):
                        self.server.receive_buffer_for(None, part, len(data))[:] = data
                    self.server.on_message(None, part, data)
                self.server.on_message(None, self._load_end, None)

    def flush(self, timeout=None) -> None:
        pass

    def of(self, kind) -> list:
        return [message for message in list(self.sent) if isinstance(message, kind)]

    def wait_saved(self, step: int) -> None:
        with self.whole:
            assert self.whole.wait_for(lambda: step in self.ended, 20), f"no save of step {step}"


class World:
    """Clients (all driven by the test's own thread) and servers of one job.

    Args:
        checkpoint: whole tensors by name, as `checkpoint()` of another world returns them; with the `step` they are of.
        near: tells who is on the one host where memory is shared; the others are elsewhere.
        hosts: workers that share a host, whose gradients are summed before others'.
        folder: where these have lines to each other; None: they have none.
    """

    def __init__(
        self, layout: Layout, workers=1, servers=1, update="server", target=256, checkpoint=None, step=0, trace=None,
        patience=20.0, silence=5.0, decided=True, load_end=None, staleness=0, replicas=0, near=lambda member: True,
        hosts=(), folder=None,
    ) -> None:  # fmt: skip
        self.layout, self.workers = layout, workers
        self._host, self._near = Host(), near
        self.network = MemoryNetwork(silence=silence)
        shards = cut(layout, servers, target)
        resume = None
        if step:
            tensors = [one for one, _ in (checkpoint or {}).values()]
            resume = Resume(f"world-1@{step}", step, {}, tensors)
        self.saved: dict[int, MemoryCheckpoint] = {}
        self.coordinators, self.servers, self._acceptors, self._threads = [], [], [], []
        self.statuses: list[int] = []
        self.dead: set[int] = set()
        for rank in range(servers):
            self._add_server(rank, Coordinator(self.saved, checkpoint, load_end))
        addresses = [acceptor.address for acceptor in self._acceptors]
        chains = assign(sizes(shards), {rank: rank for rank in range(servers)}, replicas)
        alive = [ServerAt(rank, 0, address) for rank, address in enumerate(addresses)]
        first = self.assignment = Assignment(0, chains, [[] for _ in chains], alive)
        self.decision = Decision("ps", update, layout, shards, first, resume, staleness=staleness, hosts=hosts)
        self._folder, self._listening = folder, []
        if decided:
            self.decide()
        self.clients = [self._client(rank, trace, patience) for rank in range(workers)]

    def decide(self) -> None:
        for server in self.servers:
            server.on_message(None, self.decision, None)

    def _add_server(self, rank: int, coordinator: Coordinator) -> None:
        me = Member("server", rank)

        def dial(member, address, handler):
            return self.network.dial(address, credentials(me), member, PARAMETERS, handler)

        server = coordinator.server = Server(me, dial, self._sharing(me))
        acceptor = self.network.acceptor(credentials(me), PARAMETERS, server.dense, server.dense.allow)
        thread = threading.Thread(
            target=lambda: self.statuses.append(server.run(coordinator, acceptor.address)), daemon=True
        )
        thread.start()
        server.on_message(None, Welcome(max(1, self.workers), 0, 0, 1.0), None)
        self.coordinators.append(coordinator)
        self.servers.append(server)
        self._acceptors.append(acceptor)
        self._threads.append(thread)

    def dialler(self, rank: int):
        me = credentials(Member("worker", rank))
        return lambda member, address, handler: self.network.dial(address, me, member, PARAMETERS, handler)

    def _client(self, rank, trace, patience) -> ParameterClient:
        me = Member("worker", rank)
        sharing = self._sharing(me)
        lines = self._folder is not None and any(rank in group for group in self.decision.hosts)
        return ParameterClient(
            me, self.workers, self.decision, self.dialler(rank), SystemClock(), patience, trace,
            report=lambda message: self._tell(me, message), sharing=sharing,
            host=HostAggregation(me, self._folder, sharing) if lines else None,
        )  # fmt: skip

    def _tell(self, me: Member, message) -> None:
        """Handle a worker's message to the coordinator."""
        if isinstance(message, WorkerListens):
            self._listening.append(WorkerAt(me.rank, me.incarnation, None, message.secret))

    def meet(self) -> None:
        """Tell the workers of each host who of it listens."""
        for group in self.decision.hosts:
            told = WorkersAt([at for at in self._listening if at.rank in group])
            for rank in group:
                self.clients[rank].on_membership(told)

    def _sharing(self, member: Member) -> SharedBuffers | None:
        return self._host.sharing(member) if self._near(member) else None

    # ---- who takes part ----

    def kill(self, rank: int) -> None:
        """End a server as kill -9 does: every connection breaks, and its address answers no more."""
        member = Member("server", rank)
        self._acceptors[rank].close()
        self.servers[rank].on_connection_lost(None, PeerLost("killed"))
        for dialler, link in list(self.network._links):
            if member in (dialler, self.network._members.get(link.address)):
                link.kill()
        self._threads[rank].join(20)
        self.dead.add(rank)

    def reassign(self, chains=None, copies=None) -> None:
        """Tell a new assignment, as the coordinator does; by default the old one without the dead."""
        old = self.assignment
        chains = chains or [[rank for rank in chain if rank not in self.dead] for chain in old.chains]
        alive = [at for at in old.servers if at.rank not in self.dead]
        self.assignment = Assignment(old.epoch + 1, chains, copies or [[] for _ in chains], alive)
        for rank, server in enumerate(self.servers):
            if rank not in self.dead:
                server.on_message(None, Reassign(self.assignment), None)
        for client in self.clients:
            client.on_membership(Reassign(self.assignment))

    # ---- one step over all workers ----

    def start(self, values=None) -> None:
        """All workers' `start`; rank 0 blocks for its own values, so the others' pulls follow."""
        self.clients[0].start(values)
        for client in self.clients[1:]:
            client.start(None)

    def push(self, clock: int, gradients: list[dict[int, torch.Tensor]], weights=None) -> None:
        """Push for every rank; `gradients[rank]` maps parameter index to gradient, absent where it has none."""
        for rank in reversed(range(self.workers)):  # last rank first: the sum must wait for rank 0
            client, weight = self.clients[rank], 1.0 if weights is None else weights[rank]
            buffers = client.send_buffer(clock)
            for flat in buffers.values():
                flat.fill_(float("nan"))  # what has no gradient must not be read
            for index, gradient in gradients[rank].items():
                view_of(self.layout, buffers, index).copy_(gradient)
            for shard, held in reversed(list(enumerate(client._state.held))):
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
        for coordinator in self.coordinators:
            coordinator.wait_saved(step)
        return self.saved[step].tensors

    def close(self) -> None:
        for client in self.clients:
            client.close("the test is over")
        for rank, server in enumerate(self.servers):
            if rank not in self.dead:
                server.on_message(None, Leave("the test is over"), None)
        self.join_servers()
        for acceptor in self._acceptors:
            acceptor.close()
        self._host.close()

    def join_servers(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

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
