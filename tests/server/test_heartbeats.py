"""Heartbeats of a server that waits for the coordinator."""

from __future__ import annotations

import threading

from psctl.job.message import JobMessage
from psctl.job.training_messages import Heartbeat, Leave
from psctl.server.main import Server
from psctl.types import Address, Member


class SlowCoordinator:
    """A connection to the coordinator whose sends of heartbeats wait until the server has received a message."""

    def __init__(self) -> None:
        self.server = Server(Member("server", 0))
        self.received: list[bool] = []

    def send(self, message: JobMessage) -> None:
        if isinstance(message, Heartbeat):
            leave = (None, Leave("the test ends"), None)
            reader = threading.Thread(target=self.server.on_message, args=leave, daemon=True)
            reader.start()
            reader.join(10)
            self.received.append(not reader.is_alive())


def test_a_heartbeat_that_is_not_sent_yet_keeps_no_message_out() -> None:
    coordinator = SlowCoordinator()
    assert coordinator.server.run(coordinator, Address("127.0.0.1", 1)) == 0  # type: ignore[arg-type]
    assert coordinator.received == [True]
