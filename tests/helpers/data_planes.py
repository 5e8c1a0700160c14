"""Data planes of all ranks in one process: real Unix channels and shared memory, streams in memory between hosts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psctl.agent.shm_broker import SegmentServer, pair
from psctl.collectives.data_plane import DataPlane, PlaneMemory
from psctl.collectives.player import SchedulePlayer
from psctl.collectives.stream_pieces import HostStreams, PlaneKinds
from psctl.schedule.schedule import Schedule
from psctl.transport.shared_memory import SegmentClient, SharedAllocator
from psctl.transport.unix_channel import UnixChannel
from psctl.types import Member
from tests.helpers.credentials import credentials
from tests.helpers.memory_stream import MemoryNetwork


def unix_channels(hosts: Sequence[int]) -> list[dict[int, UnixChannel]]:
    """Return each rank's Unix channels to the other ranks of its host."""
    found: list[dict[int, UnixChannel]] = [{} for _ in hosts]
    for one in range(len(hosts)):
        for other in range(one):
            if hosts[one] == hosts[other]:
                left, right = socket.socketpair()
                found[one][other], found[other][one] = (
                    UnixChannel(left, f"worker/{other}"),
                    UnixChannel(right, f"worker/{one}"),
                )
    return found


def streams(hosts: Sequence[int], network: MemoryNetwork) -> list[HostStreams]:
    """Return each rank's sealed streams to ranks of other hosts."""
    found = [HostStreams() for _ in hosts]
    members = [Member("worker", rank) for rank in range(len(hosts))]
    acceptors = [network.acceptor(credentials(me), PlaneKinds, found[me.rank]) for me in members]
    for one in members:
        for other in members[: one.rank]:
            if hosts[one.rank] != hosts[other.rank]:
                network.dial(
                    acceptors[other.rank].address, credentials(one), other, PlaneKinds, found[one.rank], 20.0
                )  # fmt: skip
    for rank, each in enumerate(found):
        assert not each.await_all({r for r in range(len(hosts)) if hosts[r] != hosts[rank]}, 20.0)
    for acceptor in acceptors:
        acceptor.close()
    return found


class DataPlanes:
    """The data planes of all ranks, each used on a thread of its own.

    Args:
        hosts: the host of each rank.
        largest: bytes of a segment at most.
        window: bytes that the receiving end of a stream buffers.
    """

    def __init__(self, hosts: Sequence[int], largest: int = 1 << 26, window: int = 2 << 20) -> None:
        self._largest = largest
        self.world = len(hosts)
        self.network = MemoryNetwork(window, silence=0.2)
        many = len(set(hosts)) > 1
        sealed: list[Any] = streams(hosts, self.network) if many else [None] * self.world
        self.channels = unix_channels(hosts)
        shared = self._memory(hosts)
        self.planes = [
            DataPlane(rank, self.world, self.channels[rank], *shared[rank], sealed[rank]) for rank in range(self.world)
        ]

    def _memory(self, hosts: Sequence[int]) -> list[tuple[PlaneMemory, dict[int, Member]]]:
        agents = {host: SegmentServer(self._largest) for host in hosts}
        members = [Member("worker", rank) for rank in range(len(hosts))]
        self._segments = []
        for me, host in zip(members, hosts, strict=True):
            ours, theirs = pair()
            thread = threading.Thread(target=agents[host].serve, args=(me, ours))
            thread.start()
            self._segments.append((SegmentClient(me, theirs), thread, agents[host]))
        near = [
            {other.rank: other for other in members if other != me and hosts[other.rank] == host}
            for me, host in zip(members, hosts, strict=True)
        ]
        return [
            (PlaneMemory(SharedAllocator(segments, 64)), near[rank])
            for rank, (segments, _, _) in enumerate(self._segments)
        ]

    def buffers(self, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [plane.buffer(length, dtype) for plane in self.planes]

    def play(self, schedule: Schedule, vectors: Sequence[torch.Tensor]) -> list[BaseException | None]:
        players = [SchedulePlayer(schedule, rank, plane) for rank, plane in enumerate(self.planes)]
        return self.all(lambda rank: players[rank].play(vectors[rank]))

    def all(self, do: Callable[[int], Any]) -> list[BaseException | None]:
        """Call `do` for every rank at once; return the error that each raised, or None."""
        errors: list[BaseException | None] = [None] * self.world

        def run(rank: int) -> None:
            try:
                do(rank)
            except BaseException as error:  # noqa: BLE001  checked by the test
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "it hangs"
        return errors

    def __enter__(self) -> DataPlanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert not any(self.all(lambda rank: self.planes[rank].close()))
        for segments, thread, agent in self._segments:
            segments.close()
            thread.join(10)
            agent.ended(segments.me)
