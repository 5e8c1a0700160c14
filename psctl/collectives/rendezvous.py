"""Connects the processes of one schedule: Unix channels within a host, TCP streams between hosts.

Only ranks with messages between them in the schedule connect; of two, the one with the higher rank dials. Within a host
both ends prove the secrets that they sent to the coordinator, and the socket is in a folder that only this user can
enter. Between hosts both prove their identities by certificates, and the coordinator reports the current incarnation of
each worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from psctl.collectives.data_plane import DataPlane, PlaneMemory
from psctl.collectives.stream_pieces import HostStreams, PlaneKinds
from psctl.errors import ConnectionFailed, PeerLost
from psctl.job.training_messages import WorkerAt
from psctl.process.process_orders import ProcessOrders
from psctl.process.rejected_connections import RejectionLog
from psctl.schedule.schedule import Schedule
from psctl.transport.connect import Acceptor, dial
from psctl.transport.credentials import Credentials
from psctl.transport.shared_memory import SegmentClient, SharedAllocator
from psctl.transport.unix_channel import ChannelListener, UnixChannel
from psctl.types import Address, Member

CACHE_LINE = 64
"""Alignment of vectors, a processor's cache line, so that no two vectors share one."""

CONNECT_TIMEOUT = 20.0
"""Seconds for all connections of one process to be made."""

AddressExchange = Callable[[Address | None, bytes], Sequence[WorkerAt]]
"""Sends this process's address and secret to the coordinator; returns those of all workers."""


def partners(schedule: Schedule, me: int) -> set[int]:
    """Return the ranks that a rank exchanges messages with; rank 0's process also runs the helpers after the ranks."""
    process = [*range(schedule.world), *(0 for _ in range(schedule.nodes - schedule.world))]
    pairs = {(process[each.source], process[each.destination]) for each in schedule.messages()}
    return {other for pair in pairs if me in pair for other in pair if other != me}


class Rendezvous:
    """Connects this process to the ranks that it exchanges messages with.

    Args:
        orders: this process's.
        credentials: this process's.
        segments: makes memory that processes of this host share.
        folder: a folder that only this user can enter, the same for all processes of this host.
        hosts: the number of each rank's host.
        purpose: keeps the sockets of different uses apart.
    """

    def __init__(
        self,
        orders: ProcessOrders,
        credentials: Credentials,
        segments: SegmentClient,
        folder: Path,
        hosts: Sequence[int],
        purpose: str = "line",
    ) -> None:
        self._orders, self._purpose = orders, purpose
        self._credentials = credentials
        self._segments = segments
        self._folder = folder
        self._hosts = hosts
        self._me = orders.member.rank
        self._workers: dict[int, WorkerAt] = {}
        self._workers_known = threading.Event()
        self._deadline = 0.0

    def make(self, schedule: Schedule, exchange: AddressExchange, memory: PlaneMemory | None = None) -> DataPlane:
        """Connect to all partners, and return the data plane.

        Args:
            schedule: what is to be played.
            exchange: sends this process's address and returns those of all workers.
            memory: of a former data plane of this process.

        Raises:
            ConnectionFailed: a partner cannot be reached, or does not connect in time; names it.
        """
        others = partners(schedule, self._me)
        near = {rank for rank in others if self._hosts[rank] == self._hosts[self._me]}
        streams = HostStreams() if others != near else None
        acceptor = self._acceptor(streams) if streams is not None else None
        listener = ChannelListener(self._folder, self._orders.member, self._purpose)
        channels: dict[int, UnixChannel] = {}
        try:
            found = exchange(acceptor.address if acceptor is not None else None, listener.secret)
            self._workers = {each.rank: each for each in found}
            self._deadline = time.monotonic() + CONNECT_TIMEOUT
            self._workers_known.set()
            self._connect(listener, near, channels)
            if streams is not None:
                self._connect_hosts(streams, others - near)
        except BaseException:
            for channel in channels.values():
                channel.close()
            if streams is not None:
                streams.close("it could not connect to all", 0.0)
            raise
        finally:
            listener.close()
            if acceptor is not None:
                acceptor.close()
        members = {rank: Member("worker", rank, self._workers[rank].incarnation) for rank in near}
        memory = memory or PlaneMemory(SharedAllocator(self._segments, CACHE_LINE))
        return DataPlane(self._me, schedule.world, channels, memory, members, streams, self._hosts)

    def _remaining(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    # ---- within the host -----------------------------------------------------------------------------------------

    def _connect(self, listener: ChannelListener, near: set[int], channels: dict[int, UnixChannel]) -> None:
        """Add a channel to each of these ranks."""
        for rank in sorted(rank for rank in near if rank < self._me):
            channels[rank] = listener.connect(self._workers[rank], self._remaining())
        missing = {rank for rank in near if rank > self._me}
        while missing:
            known = [self._workers[rank] for rank in missing]
            try:
                worker, channel = listener.accept(lambda known=known: known, self._remaining(), self._remaining())  # type: ignore[misc]
            except TimeoutError:
                raise _missing(missing) from None
            except ConnectionFailed:  # not a worker of this job; the others may still connect
                continue
            missing.remove(worker.rank)
            channels[worker.rank] = channel

    # ---- between hosts -------------------------------------------------------------------------------------------

    def _acceptor(self, streams: HostStreams) -> Acceptor:
        return Acceptor(
            self._orders.bind, self._orders.ports, self._credentials, PlaneKinds, streams, self._rejection_reason,
            self._orders.congestion, refused=RejectionLog(str(self._orders.member)), sealed=self._orders.sealed,
        )  # fmt: skip

    def _rejection_reason(self, member: Member) -> str | None:
        """Return why a member may not connect: only the newest incarnation of a worker may."""
        self._workers_known.wait(CONNECT_TIMEOUT)  # the peer may get the coordinator's answer first
        worker = self._workers.get(member.rank)
        if member.role != "worker" or worker is None or worker.incarnation != member.incarnation:
            return f"{member} of incarnation {member.incarnation} does not take part"
        return None

    def _connect_hosts(self, streams: HostStreams, far: set[int]) -> None:
        for rank in sorted(rank for rank in far if rank < self._me):
            at = self._workers[rank]
            if at.address is None:
                raise PeerLost(f"worker/{rank} does not listen for other hosts", where=f"worker/{rank}")
            member = Member("worker", rank, at.incarnation)
            dial(
                at.address, self._credentials, member, PlaneKinds, streams, self._remaining(), self._orders.congestion,
                sealed=self._orders.sealed,
            )  # fmt: skip
        missing = streams.await_all(far, self._remaining())
        if missing:
            raise _missing(missing)


def _missing(ranks: Iterable[int]) -> PeerLost:
    names = ", ".join(f"worker/{rank}" for rank in sorted(ranks))
    return PeerLost(f"{names}: not connected within {CONNECT_TIMEOUT:g} s", where=names)
