"""What an agent asks the coordinator for psctl, one question at a time: other numbers of processes, rows of a store."""

from __future__ import annotations

import queue
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from psctl.agent.control_socket import ControlRefused
from psctl.agent.coordinator_link import FromCoordinator
from psctl.job.process_messages import ScaleAnswer, ScaleWanted
from psctl.job.table_server_messages import ReadBy, ReadRows, ReadWanted

PATIENCE = 15.0
"""Seconds in which the coordinator must answer."""

READING = 5.0
"""Seconds for a reading: whoever wants the job to stop waits behind it."""


class CoordinatorQueries:
    """Asks on the ear's thread; what the main thread hears of it goes to `heard`.

    Args:
        send: sends to the coordinator; False when there is no connection.
    """

    def __init__(self, send: Callable[[Any], bool]) -> None:
        self._send = send
        self._ticket = 0
        self._answers: queue.SimpleQueue[FromCoordinator] = queue.SimpleQueue()

    def heard(self, answer: FromCoordinator) -> None:
        """Take an answer; one to a former question is dropped when the next is asked."""
        self._answers.put(answer)

    def scale(self, workers: int | None, servers: int | None) -> dict[str, Any]:
        """Ask for other numbers of workers and servers."""
        for answer in self._ask(lambda ticket: ScaleWanted(ticket, workers, servers), PATIENCE):
            if isinstance(answer.message, ScaleAnswer):
                return {name: getattr(answer.message, name) for name in ("workers", "servers", "problem", "hint")}
        raise ControlRefused(f"the coordinator did not answer within {PATIENCE:.0f} s")

    def read(self, store: str, names: list[str], keys: list[int]) -> dict[str, Any]:
        """Ask all servers for keys of a store; `servers` were asked, and those in `answers` have answered in time."""
        asked, found = None, []
        for answer in self._ask(lambda ticket: ReadWanted(ticket, store, names, keys), READING):
            match answer.message:
                case ReadBy(servers=servers):
                    asked = servers
                case ReadRows():
                    told = msgspec.to_builtins(answer.message)
                    found.append({**told, "payload": b64encode(answer.payload).decode()})
            if len(found) == asked:
                break
        return {"servers": asked, "answers": found}

    def _ask(self, make: Callable[[int], Any], patience: float) -> Iterator[FromCoordinator]:
        """Yield what comes in answer until the time is over."""
        self._ticket += 1
        deadline = time.monotonic() + patience
        if not self._send(make(self._ticket)):
            raise ControlRefused("the coordinator is not connected now; ask again")
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                return
            if getattr(answer.message, "ticket", None) == self._ticket:
                yield answer
