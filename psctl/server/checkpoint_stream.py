"""Sends a server's part of a checkpoint to the coordinator, in parts, at the pace at which the network takes them."""

from __future__ import annotations

from typing import Any, Protocol

from psctl.job.checkpoint_messages import SaveBegin, SaveEnd, SavePart
from psctl.ps.messages import PART
from psctl.ps.outputs import Save

QUEUED = 8 << 20
"""Bytes of a checkpoint part that may wait for the network at once, so that beats and answers are not held up."""


class Coordinator(Protocol):
    """What the server needs of its connection to the coordinator; psctl.transport.connect.Peer has it."""

    def send(self, message: Any, payload: memoryview | None = None, *, urgent: bool = False) -> Any: ...
    def flush(self, timeout: float | None = None) -> None: ...


def stream_save(coordinator: Coordinator, save: Save, *, tables: bool = False) -> None:
    """Send one server's part of a checkpoint, at the pace at which the network takes it.

    Raises:
        ConnectionFailed: the coordinator is gone.
    """
    coordinator.send(SaveBegin(save.step, [copied.slice for copied in save.copied], tables=tables))
    queued = 0
    for index, copied in enumerate(save.copied):
        for offset in range(0, len(copied.data), PART):
            part = copied.data[offset : offset + PART]
            coordinator.send(SavePart(save.step, index, offset, tables), part)
            queued += len(part)
            if queued >= QUEUED:
                coordinator.flush()
                queued = 0
    coordinator.send(SaveEnd(save.step, tables))
