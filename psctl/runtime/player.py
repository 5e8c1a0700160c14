"""Plays one rank's part of a schedule on torch tensors, again and again; and a queue that does so beside backward."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from psctl.errors import PeerLost
from psctl.runtime.channel import Channel
from psctl.runtime.chunks import Chunks
from psctl.runtime.script import script
from psctl.runtime.stepped import SHORT, Stepped
from psctl.schedule.transfer import Schedule

LENGTHS = 64
"""Lengths of vectors for which the cuts are kept."""


class Player:
    """Plays one rank's part of one schedule, on vectors of any length and type.

    Args:
        schedule: what is played; every rank must play the same.
        rank: which node of it this is.
        channel: moves the bytes.
        short: as `Stepped` has it.
    """

    def __init__(self, schedule: Schedule, rank: int, channel: Channel, short: int = SHORT) -> None:
        self.schedule, self.rank = schedule, rank
        self._channel = channel
        self._stepped = Stepped(script(schedule, rank), channel, short)
        self._chunks: dict[int, Chunks] = {}
        self._lost: BaseException | None = None

    def play(self, vector: torch.Tensor) -> None:
        """Play the schedule on a vector, in place.

        Args:
            vector: contiguous, one-dimensional; as long and of the same type on every rank.

        Raises:
            PeerLost: a peer is gone; the same again at every later call.
        """
        assert vector.dim() == 1, "a vector"
        assert vector.is_contiguous(), "contiguous"
        if self._lost is None:
            try:
                with torch.no_grad():
                    self._stepped.play(vector, self._cut(vector.numel()))
                return
            except BaseException as error:
                self._lost = error
                self._channel.abort(f"rank {self.rank} gave up: {error}")
                if not isinstance(error, RuntimeError):
                    raise
        raise PeerLost(
            f"rank {self.rank} lost a peer while gradients were summed: {self._lost}",
            "the rank that ended first is named by psctl status",
        ) from self._lost

    def _cut(self, length: int) -> Chunks:
        if length not in self._chunks:
            if len(self._chunks) == LENGTHS:
                self._chunks.clear()
            self._chunks[length] = Chunks(self.schedule, length)
        return self._chunks[length]


class Queue:
    """Plays vectors one after another on a thread of its own, so that backward goes on meanwhile.

    Args:
        play: sums a vector in place over all ranks.
    """

    def __init__(self, play: Callable[[torch.Tensor], None]) -> None:
        self._play = play
        self._work: queue.SimpleQueue[tuple[torch.Tensor, Ticket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="psctl-collective")
        self._thread.start()

    def put(self, vector: torch.Tensor) -> Ticket:
        """Have a vector summed; in the same order on every rank."""
        ticket = Ticket()
        self._work.put((vector, ticket))
        return ticket

    def close(self) -> None:
        """End the thread when what was put is played."""
        self._work.put(None)
        self._thread.join(10.0)

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            vector, ticket = work
            try:
                self._play(vector)
            except BaseException as error:  # noqa: BLE001  raised by who waits
                ticket.end(error)
            else:
                ticket.end(None)


class Ticket:
    """A vector that is on its way."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def end(self, error: BaseException | None) -> None:
        """Note that the vector is summed, or why it is not."""
        self._ended.put(error)

    def wait(self) -> None:
        """Return when it is summed; once.

        Raises:
            PeerLost: a peer is gone.
        """
        error = self._ended.get()
        if error is not None:
            raise error
