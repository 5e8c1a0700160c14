"""Plays one rank's part of a schedule on torch tensors, again and again; and a queue that does so beside backward."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from psctl.collectives.channel import Channel
from psctl.collectives.rank_program import make_program
from psctl.collectives.schedule_chunks import VectorChunks
from psctl.collectives.step_executor import SHORT, StepExecutor
from psctl.errors import PeerLost
from psctl.schedule.schedule import Schedule

LENGTHS = 64
"""Lengths of vectors for which the cuts are kept."""


class SchedulePlayer:
    """Plays one rank's part of one schedule, on vectors of any length and type.

    Args:
        schedule: what is played; every rank must play the same.
        rank: which node of it this is.
        channel: moves the bytes.
        short: as `StepExecutor` has it.
    """

    def __init__(self, schedule: Schedule, rank: int, channel: Channel, short: int = SHORT) -> None:
        self.schedule, self.rank = schedule, rank
        self._channel = channel
        self._script = make_program(schedule, rank)
        self._stepped = StepExecutor(self._script, channel, short)
        self._at_once = at_once(schedule)
        self._chunks: dict[int, VectorChunks] = {}
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
                    self._play(vector, self._cut(vector.numel()))
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

    def _play(self, vector: torch.Tensor, chunks: VectorChunks) -> None:
        board = self._channel.board(vector.nbytes) if self._at_once else None
        if board is None:
            self._stepped.play(vector, chunks)
        else:
            chunks.write(self._script.writes[0], self.rank, vector, board.exchange(vector))

    def _cut(self, length: int) -> VectorChunks:
        if length not in self._chunks:
            if len(self._chunks) == LENGTHS:
                self._chunks.clear()
            self._chunks[length] = VectorChunks(self.schedule, length)
        return self._chunks[length]


def at_once(schedule: Schedule) -> bool:
    """Whether all of it is that every rank gets every other's whole vector, and sums them itself."""
    pairs = {(one.source, one.destination) for one in schedule.transfers}
    same = all((one.step, one.chunk, one.action) == (0, 0, "reduce") for one in schedule.transfers)
    return (
        schedule.world == schedule.nodes
        and same
        and len(schedule.transfers) == len(pairs) == schedule.world * (schedule.world - 1) > 0
    )


class PlayQueue:
    """Plays vectors one after another beside backward, on a thread of its own or on that of whoever waits.

    A hand-over between threads costs more than a short sum. So a short vector wakes nobody: it is played when somebody
    waits for it, or when a longer one behind it has woken the thread.

    Args:
        play: sums a vector in place over all ranks.
    """

    def __init__(self, play: Callable[[torch.Tensor], None]) -> None:
        self._play = play
        self._work: deque[tuple[torch.Tensor, PlayTicket]] = deque()
        self._turn = threading.Lock()  # to play: what was put first is played first
        self._wake = threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True, name="psctl-collective")
        self._thread.start()

    def put(self, vector: torch.Tensor, short: int = 0) -> PlayTicket:
        """Have a vector summed; in the same order on every rank.

        Args:
            short: bytes of a vector that wakes nobody.
        """
        ticket = PlayTicket(self._help)
        self._work.append((vector, ticket))
        if vector.nbytes > short:
            self._wake.release()
        return ticket

    def close(self) -> None:
        """End the thread when what was put is played."""
        self._closed = True
        self._wake.release()
        self._thread.join(10.0)

    def _help(self, ticket: PlayTicket) -> None:
        """Play what is next until this one is."""
        while not ticket.over:
            self._next()

    def _loop(self) -> None:
        while not (self._closed and not self._work):
            self._wake.acquire()
            while self._work:
                self._next()

    def _next(self) -> None:
        with self._turn:
            if not self._work:
                return  # another thread has played it meanwhile
            vector, ticket = self._work.popleft()
            try:
                self._play(vector)
            except BaseException as error:  # noqa: BLE001  raised by who waits
                ticket.error = error
            ticket.over = True


class PlayTicket:
    """A vector that is on its way.

    Args:
        help: plays it, unless another thread does.
    """

    def __init__(self, help: Callable[[PlayTicket], None]) -> None:
        self._help = help
        self.over = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Return when it is summed.

        Raises:
            PeerLost: a peer is gone.
        """
        self._help(self)
        if self.error is not None:
            raise self.error
