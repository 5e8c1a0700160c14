"""The data plane of a worker: its connections to the workers of a schedule, and new ones when a worker was lost.

    worker                                      coordinator
    PlaneBroken(epoch, reason)       ------>    it may know of the loss already
                                     <------    ConnectAgain(epoch + 1): to all workers, replacements included
    WorkerListens(epoch + 1)         ------>
                                     <------    WorkersAt(epoch + 1): when all workers listen
    connects                                    a further loss: ConnectAgain(epoch + 2)

A worker sends WorkerListens when nothing reads or writes its vectors any more. So after WorkersAt no process reads
another one's vectors over an earlier data plane.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from psctl.collectives.data_plane import DataPlane, PlaneMemory
from psctl.collectives.rendezvous import AddressExchange
from psctl.errors import ConnectionFailed, PeerLost
from psctl.job.message import JobMessage
from psctl.job.training_messages import ConnectAgain, NotReplaceable, PlaneBroken, WorkerAt, WorkerListens, WorkersAt
from psctl.schedule.schedule import Schedule
from psctl.types import Address

T = TypeVar("T")

Connect = Callable[[Schedule, Sequence[int], AddressExchange, PlaneMemory | None], DataPlane]
"""Connects to the workers of a schedule, given their hosts, how to learn their addresses, and the memory of a former
data plane."""

_WORKER = re.compile(r"\bworker/(\d+)")

ALL_MADE = "a worker has made all its steps"


class Wait(Protocol):
    """Waits until a function, which is called again with each message, returns something."""

    def __call__(self, look: Callable[[], T | None]) -> T: ...


class PlaneConnections:
    """Makes the data planes of one worker, one after another.

    Args:
        connect: makes one.
        send: sends a message to the coordinator.
        wait: for messages of the coordinator.
    """

    def __init__(self, connect: Connect, send: Callable[[JobMessage], None], wait: Wait) -> None:
        self._connect, self._send, self._wait = connect, send, wait
        self._lock = threading.Lock()
        self._epoch = 0  # of the current plane, or of the one that is being made
        self._wanted = ConnectAgain(0, [])
        self._workers: WorkersAt | None = None
        self._plane: DataPlane | None = None
        self._over = False

    def on_message(self, message: WorkersAt | ConnectAgain) -> None:
        """Handle a message; called by the network thread."""
        if isinstance(message, WorkersAt):
            self._workers = message
            return
        with self._lock:
            if message.epoch <= self._wanted.epoch:
                return
            self._wanted = message
            plane, over = self._plane, self._over
        if over:
            self._send(NotReplaceable(ALL_MADE))
        elif plane is not None:
            plane.abort("a worker is lost")

    def connect(self, schedule: Schedule, hosts: Sequence[int]) -> DataPlane:
        """Make the first data plane.

        Raises:
            ConnectionFailed: a worker cannot be reached.
        """
        plane = self._connect(schedule, hosts, partial(self._exchange, 0), None)
        self._use(plane)
        return plane

    def connect_again(self, schedule: Schedule, former: DataPlane | None, why: str) -> DataPlane:
        """Make the next data plane; as long as workers cannot be reached, another one.

        Args:
            schedule: what is played.
            former: the one that has ended, and was retired; None: this worker replaces a lost one.
            why: the reason of its end.
        """
        memory = former.memory if former is not None else None
        report = PlaneBroken(self._epoch, why) if former is not None else None
        while True:
            if report is not None:
                self._send(report)
            wanted = self._wait(lambda: self._wanted if self._wanted.epoch > self._epoch else None)
            self._epoch = wanted.epoch
            try:
                plane = self._connect(schedule, wanted.hosts, partial(self._exchange, wanted.epoch), memory)
            except ConnectionFailed as error:
                ranks = tuple(sorted({int(rank) for rank in _WORKER.findall(error.where)}))
                report = PlaneBroken(self._epoch, error.message, ranks)
                continue
            if self._use(plane):
                return plane
            plane.retire("a worker is lost")
            report = None

    def end(self) -> None:
        """Note that no sum is made any more: there is nothing to connect for."""
        with self._lock:
            self._over = True
            late = self._wanted.epoch > self._epoch
        if late:
            self._send(NotReplaceable(ALL_MADE))

    def _use(self, plane: DataPlane) -> bool:
        """Use a new data plane unless another one is wanted already; return whether."""
        with self._lock:
            self._plane = plane
            return self._wanted.epoch <= self._epoch

    def _exchange(self, epoch: int, address: Address | None, secret: bytes) -> list[WorkerAt]:
        """Send this worker's address to the others; returns all addresses when all workers listen."""
        self._send(WorkerListens(address, secret, epoch))
        found = self._wait(partial(self._answer, epoch))
        if isinstance(found, WorkersAt):
            return found.workers
        raise PeerLost("a worker was lost while the others connected")

    def _answer(self, epoch: int) -> WorkersAt | ConnectAgain | None:
        if self._wanted.epoch > epoch:
            return self._wanted
        return self._workers if self._workers is not None and self._workers.epoch == epoch else None
