"""Requests for the shards of streams: to the coordinator in a job, to a list in this process otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from psctl.errors import UsageError
from psctl.job.activity import waiting
from psctl.job.message import JobMessage
from psctl.job.stream_messages import (
    BatchSize,
    BatchTaken,
    CoordinatorStreamMessage,
    NoShardLeft,
    OpenShards,
    ShardGiven,
    ShardPosition,
    ShardWanted,
    StreamEnded,
    StreamOpened,
    StreamPosition,
)
from psctl.worker.plane_connections import Wait

T = TypeVar("T")

MOST_SIZES = 256
"""Batches whose sizes are kept."""

Answer = ShardPosition | NoShardLeft | StreamEnded


class ShardSource(Protocol):
    """Gives shards to this worker."""

    @property
    def sized(self) -> bool:
        """Whether the examples of a batch over all workers become known."""

    @property
    def activity(self) -> str:
        """What this worker waits for, as `activity.waiting` says it; "": nothing."""

    def open(self, opened: StreamOpened) -> StreamPosition:
        """Begin to read; return what is open.

        Raises:
            UsageError: the stream cannot be read; the message has the reason.
        """

    def want(self, wanted: ShardWanted) -> Answer:
        """Return a shard to read, or why there is none."""

    def take(self, taken: BatchTaken) -> Callable[[], int]:
        """Report a batch; return a function that waits for the examples of the batch over all workers."""


class ShardRequests:
    """Requests to the coordinator, and its answers.

    Args:
        send: sends a message to the coordinator.
        wait: waits for an answer.
    """

    def __init__(self, send: Callable[[JobMessage], object], wait: Wait) -> None:
        self._send, self._wait = send, wait
        self._position: StreamPosition | None = None
        self._answers: list[Answer] = []
        self._sizes: dict[tuple[int, int, int], int] = {}
        self._sized = False
        self.activity = ""

    def on_message(self, message: CoordinatorStreamMessage) -> None:
        """Take an answer; network thread."""
        match message:
            case StreamPosition():
                self._position = message
            case ShardGiven(shard=shard):
                self._answers.append(shard)
            case NoShardLeft() | StreamEnded():
                self._answers.append(message)
            case BatchSize(stream=stream, epoch=epoch, batch=batch, examples=examples):
                self._sizes[stream, epoch, batch] = examples
                while len(self._sizes) > MOST_SIZES:  # of a script that uses no weights
                    del self._sizes[next(iter(self._sizes))]

    def open(self, opened: StreamOpened) -> StreamPosition:
        self._position = None
        self._send(opened)
        found = self._until(lambda: self._position, "the coordinator")
        if found.problem:
            raise UsageError(f"run.stream: {found.problem}", found.hint)
        self._sized = found.sized
        return found

    def want(self, wanted: ShardWanted) -> Answer:
        self._answers.clear()
        self._send(wanted)
        return self._until(lambda: self._answers or None, "a shard, or the examples of other workers")[0]

    def take(self, taken: BatchTaken) -> Callable[[], int]:
        self._send(taken)
        key = (taken.stream, taken.epoch, taken.batch)
        return lambda: self._size(key)

    @property
    def sized(self) -> bool:
        """Whether the coordinator sends the examples of each batch."""
        return self._sized

    def _size(self, key: tuple[int, int, int]) -> int:
        return self._until(lambda: self._sizes.get(key), "the number of examples of other workers")

    def _until(self, look: Callable[[], T | None], what: str) -> T:
        self.activity = waiting(what)
        try:
            return self._wait(look)
        finally:
            self.activity = ""


class LocalShards:
    """The shards of a worker that is alone.

    Args:
        world: ranks; more than one are torchrun's, which share nothing.
    """

    sized = True
    activity = ""

    def __init__(self, world: int) -> None:
        self._world = world
        self._epochs: dict[int, int] = {}
        self._left: dict[int, list[ShardPosition]] = {}
        self._open: dict[int, OpenShards] = {}

    def open(self, opened: StreamOpened) -> StreamPosition:
        if self._world > 1:
            raise UsageError(
                "run.stream under torchrun, where no process gives the shards to ranks",
                "start the script with psctl train, or alone (python train.py)",
            )
        stream = opened.stream
        if self._epochs.get(stream) != opened.epoch:
            self._epochs[stream] = opened.epoch
            self._left[stream] = [ShardPosition(place) for place in reversed(range(opened.shards))]
            self._open[stream] = ()
        return StreamPosition(stream, opened.epoch, opened.batch, self._open[stream], sized=True)

    def want(self, wanted: ShardWanted) -> Answer:
        left = self._left[wanted.stream]
        if left:
            return left.pop()
        at = (wanted.stream, wanted.epoch, wanted.batch)
        return NoShardLeft(*at) if wanted.examples else StreamEnded(*at)

    def take(self, taken: BatchTaken) -> Callable[[], int]:
        self._open[taken.stream] = taken.open
        return lambda: taken.examples
