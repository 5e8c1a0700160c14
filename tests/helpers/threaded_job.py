"""A job whose processes are threads of the test: real servers, peers and seals over streams in memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from psctl.agent.shm_broker import SegmentServer, pair
from psctl.client.shared_buffers import SharedBuffers
from psctl.clock import SystemClock
from psctl.coordinator.state.instructions import StartMember
from psctl.job.job_permits import COORDINATION
from psctl.job.message import JobMessage
from psctl.job.process_messages import EndProcesses, ProcessStarted, StopProcesses, StopWanted
from psctl.job.training_messages import Leave
from psctl.orders import JobOrder
from psctl.ps.permits import PARAMETERS
from psctl.server.main import Server
from psctl.transport.connect import Acceptor
from psctl.transport.shared_memory import SegmentClient
from psctl.types import Address, Member
from tests.helpers.credentials import credentials
from tests.helpers.memory_checkpoints import MemoryCheckpoint
from tests.helpers.memory_stream import MemoryNetwork
from tests.helpers.permit_checks import PermitChecks
from tests.helpers.state_machine_driver import CoordinatorDriver

WAIT = 20.0
"""Seconds within which a thread must end."""

LARGEST = 130 << 20
"""Bytes of a segment of shared memory."""


class Host:
    """Makes shared memory for processes, which are threads here, in place of an agent."""

    def __init__(self) -> None:
        self._segments = SegmentServer(LARGEST)
        self._children: list[tuple[SegmentClient, threading.Thread]] = []

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


class Wire:
    """The coordinator's end of a member's connection: a thread of its own calls the handler with each message."""

    def __init__(self, member: Member, handler: Any) -> None:
        self.member, self.handler = member, handler
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: JobMessage, payload: bytes | None = None, *, urgent: bool = False) -> None:
        self._queue.put((message, payload))

    def settle(self) -> None:
        """Wait until the handler has processed all that was sent."""
        done = threading.Event()
        self._queue.put(done)
        assert done.wait(WAIT), f"{self.member} has not handled its messages"

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join(WAIT)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            message, payload = item
            if payload is not None:
                place = self.handler.receive_buffer_for(None, message, len(payload))
                if place is not None:
                    place[:] = payload
            self.handler.on_message(None, message, payload)


class Link:
    """A member's end of its connection, which checks messages against the permits and records them.

    Args:
        job: handles the messages.
        wire: the other end.
    """

    def __init__(self, job: CoordinatorDriver, wire: Wire) -> None:
        self.wire, self.sent = wire, list[JobMessage]()
        self._checked = PermitChecks(COORDINATION, "coordinator", job)
        self._checked.on_connected(wire)

    def send(self, message: JobMessage, payload: memoryview | None = None) -> None:
        self.sent.append(message)
        if payload is not None:
            self._checked.receive_buffer_for(self.wire, message, len(payload))
        self._checked.on_message(self.wire, message, None if payload is None else memoryview(bytes(payload)))

    def of(self, kind: type) -> list[Any]:
        """Return the messages of this kind that were sent."""
        return [message for message in list(self.sent) if isinstance(message, kind)]

    def flush(self, timeout: float | None = None) -> None:
        pass

    def deliver(self, timeout: float) -> None:
        pass

    def close(self, reason: str = "") -> None:
        pass

    def join(self, timeout: float | None = None) -> bool:
        return True


class ThreadedJob(CoordinatorDriver):
    """A job whose servers are threads. A subclass starts workers.

    Args:
        order: the job.
        servers: the host of each server.
        shard_bytes: the size of a shard.
        checkpoint: the checkpoint that the job resumes from.
        network: connects workers and servers.
    """

    def __init__(
        self, order: JobOrder, servers: Sequence[int], shard_bytes: int, checkpoint: MemoryCheckpoint | None,
        network: MemoryNetwork,
    ) -> None:  # fmt: skip
        self.network = network
        self.servers: dict[int, Server] = {}
        """The newest of each rank."""
        self.links: dict[Member, Link] = {}
        self.acceptors: dict[Member, Acceptor] = {}
        self.threads: dict[Member, threading.Thread] = {}
        self.statuses: list[int] = []
        """Exit statuses of servers, in the order of their ends."""
        self._all: list[Server] = []
        self._clock = SystemClock()
        super().__init__(order, servers, shard_bytes, checkpoint)

    def time(self) -> float:
        return self._clock.now()

    def sharing(self, member: Member) -> SharedBuffers | None:
        """Return the memory that a process shares with others of its host; None: all bytes are sent."""
        return None

    def start_worker(self, member: Member) -> None:
        """Start a worker."""
        raise NotImplementedError

    def on_server_end(self, member: Member, status: int) -> None:
        """Report the end of a server, as its agent does."""
        self.exits(member, status)

    def connect(self, member: Member, handler: Any) -> Link:
        """Connect a member to the coordinator; `handler` receives its messages."""
        self.receive(self.agent_of(member), ProcessStarted(member, 1))
        self.links[member] = link = Link(self, Wire(member, handler))
        return link

    def dialler(self, me: Member, permits: Any = PARAMETERS) -> Any:
        """Return the function by which a member connects to servers, or to others that these permits are for."""
        return lambda member, address, handler: self.network.dial(address, credentials(me), member, permits, handler)

    def start_member(self, start: StartMember) -> None:
        if start.member.role == "server":
            self._start_server(start.member)
        else:
            self.start_worker(start.member)

    def _start_server(self, me: Member) -> None:
        server = self.servers[me.rank] = Server(me, self.dialler(me), self.sharing(me))
        self._all.append(server)
        acceptor = self.network.acceptor(credentials(me), PARAMETERS, server.dense, server.dense.allow)
        self.acceptors[me] = acceptor
        self.threads[me] = threading.Thread(target=self._serve, args=(server, acceptor.address), daemon=True)
        self.threads[me].start()

    def _serve(self, server: Server, address: Address) -> None:
        status = server.run(self.connect(server.me, server), address)
        self.statuses.append(status)
        self.on_server_end(server.me, status)

    def send(self, member: Member, message: JobMessage) -> None:
        if isinstance(message, StopProcesses | EndProcesses):
            self.end_processes(message.members if isinstance(message, EndProcesses) else None)
        super().send(member, message)

    def end_processes(self, members: Sequence[Member] | None) -> None:
        """End these processes, None: all, as an agent does with SIGTERM."""
        for server in self._all:
            if members is None or server.me in members:
                server.on_message(None, Leave("its process is ended"), None)

    def settle(self) -> None:
        """Wait until all members have processed what the coordinator sent."""
        for link in list(self.links.values()):
            link.wire.settle()

    def close(self) -> None:
        """End all processes."""
        if not self.status:
            self.receive(Member("agent", 0), StopWanted(save=False, force=True, by="the test"))
        for thread in self.threads.values():
            thread.join(WAIT)
            assert not thread.is_alive()
        for acceptor in self.acceptors.values():
            acceptor.close()
        for link in self.links.values():
            link.wire.end()
