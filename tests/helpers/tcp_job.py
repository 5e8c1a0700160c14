"""A job whose processes connect over TCP to a coordinator in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psctl.clock import SystemClock
from psctl.job.job_permits import COORDINATION
from psctl.orders import JobOrder
from psctl.process.process_orders import ProcessOrders
from psctl.transport.connect import Acceptor
from psctl.types import Address, Member
from tests.helpers.credentials import credentials
from tests.helpers.state_machine_driver import ME, CoordinatorDriver


class TcpJob(CoordinatorDriver):
    """A job of one worker and one server on this machine. A subclass starts its processes.

    Args:
        order: the job.
        shard_bytes: the size of a shard.
    """

    def __init__(self, order: JobOrder, shard_bytes: int) -> None:
        self._clock = SystemClock()
        super().__init__(order, [0], shard_bytes)
        self._acceptor = Acceptor("127.0.0.1", None, credentials(ME), COORDINATION, self)

    def time(self) -> float:
        return self._clock.now()

    def orders(self, member: Member, segments: int | None = None) -> ProcessOrders:
        """Return the orders of a process."""
        mine = credentials(member)
        return ProcessOrders(
            job=mine.job, member=member, world=1, host="here", local_rank=0, coordinator=self._acceptor.address,
            bind="127.0.0.1", ports=None, authority=mine.authority, certificate=mine.certificate, key=mine.key,
            congestion="auto", sealed=True, preauth_secret=mine.preauth_secret, error_file="", segments=segments,
        )  # fmt: skip

    def address_of(self, member: Member) -> Address | None:
        """Return where a server listens, once it does."""
        ranks = self.machine.job.ranks
        return ranks[member].address if member in ranks else None

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """Return the first result of `found` that is true."""
        end = self._clock.now() + 30.0
        while not (value := found()):
            assert self._clock.now() < end, f"in vain: {what}"
            self._clock.sleep(0.005)
        return value

    def refuse(self) -> None:
        """Accept no more connections."""
        self._acceptor.close()

    def close(self) -> None:
        self._acceptor.close()
        for peer in list(self.peers.values()):
            peer.close("the test is over")
            peer.join(5)
