"""Data planes of workers that are threads: real channels and streams, which a worker may be killed in the midst of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psctl.collectives.channel import Parcel, PendingTransfer
from psctl.collectives.data_plane import ArrivedPiece, DataPlane
from psctl.collectives.rendezvous import Rendezvous
from psctl.process.process_orders import ProcessOrders
from psctl.transport.shared_memory import SegmentClient
from psctl.types import Address, Member
from tests.helpers.credentials import credentials
from tests.helpers.job_world import Killed
from tests.helpers.threaded_job import Host


def process_orders(me: Member, world: int = 3) -> ProcessOrders:
    """Return the orders of a worker that listens on this machine only."""
    mine = credentials(me)
    return ProcessOrders(
        job=mine.job, member=me, world=world, host="h", local_rank=0, coordinator=Address("127.0.0.1", 1),
        bind="127.0.0.1", ports=None, authority=mine.authority, certificate=mine.certificate, key=mine.key,
        preauth_secret=mine.preauth_secret, congestion="auto", sealed=True, error_file="", segments=None,
    )  # fmt: skip


class DyingPlane:
    """A data plane at which its worker is killed when it is called the n-th time.

    Args:
        plane: the real one.
        left: its worker's calls that are left; empty: it lives.
    """

    def __init__(self, plane: DataPlane, left: list[int]) -> None:
        self._plane, self._left = plane, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def _count(self) -> None:
        if self._left:
            self._left[0] -= 1
            if self._left[0] < 0:
                self._left.clear()
                raise Killed

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[PendingTransfer]:
        self._count()
        return self._plane.post(sends, receives)

    def next_piece(self, peer: int, tag: int) -> ArrivedPiece:
        self._count()
        return self._plane.next_piece(peer, tag)


class DyingPlanes:
    """The data planes of a job's workers.

    Args:
        folder: of sockets.
        hosts: of each rank, so that some are connected by channels and some by streams.
        deaths: (rank, incarnation) -> calls of its data planes, from `arm` on, after which it is killed.
        shared: processes of one host have shared memory.
    """

    def __init__(
        self, folder: Path, hosts: Sequence[int], deaths: Mapping[tuple[int, int], int], *, shared: bool = False
    ) -> None:
        self._folder, self._hosts = folder, list(hosts)
        self._deaths = dict(deaths)
        self._left: dict[tuple[int, int], list[int]] = {}
        self._host = Host() if shared else None
        self._made: dict[Member, list[DataPlane]] = {}
        for rank in range(len(hosts)):  # made once, before threads ask for them
            for incarnation in range(4):
                credentials(Member("worker", rank, incarnation))
        for host in set(hosts):
            (folder / str(host)).mkdir()

    def connector(self, me: Member, purpose: str = "line") -> Any:
        segments = self._host.segments(me) if self._host is not None else SegmentClient(me, None)
        folder = self._folder / str(self._hosts[me.rank])

        def connect(schedule: Any, hosts: Any, exchange: Any, memory: Any) -> Any:
            rendezvous = Rendezvous(process_orders(me), credentials(me), segments, folder, self._hosts, purpose)
            plane = rendezvous.make(schedule, exchange, memory)
            self._made.setdefault(me, []).append(plane)
            if purpose != "line":  # deaths are counted in calls of the strategy's plane
                return plane
            return DyingPlane(plane, self._left.setdefault((me.rank, me.incarnation), []))

        return connect

    def arm(self) -> None:
        """Begin to count calls."""
        while self._deaths:
            key, calls = self._deaths.popitem()
            self._left.setdefault(key, []).append(calls)

    def kill(self, member: Member) -> None:
        """End the connections of a worker, as its end does."""
        for plane in self._made.get(member, []):
            plane.abort("its process ended")

    def close(self) -> None:
        """Release shared memory."""
        if self._host is not None:
            self._host.close()
