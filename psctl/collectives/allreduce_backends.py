"""Backends that sum a flat vector over all ranks: the engine's all-reduce, or a schedule that is played.

All strategies share the rest: buckets, their order, their overlap with backward, weights (`sync/bucket_allreduce.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from psctl.collectives.channel import BatchChannel, Channel, EngineChannel, LocalChannel, LocalExchange
from psctl.collectives.data_plane import DataPlane
from psctl.collectives.player import SchedulePlayer
from psctl.collectives.schedule_chunks import VectorChunks
from psctl.schedule.schedule import Schedule
from psctl.types import PeerBytes

SHORT = 64 << 10
"""Bytes of a vector whose sum takes less time than to wake another thread."""


BROADCAST = 8 << 20
"""Bytes of tensors that `broadcast` sends together."""

HOST = torch.device("cpu")

UNKNOWN_PEER = ""
"""The name of the peers of bytes that the engine moves: it does not report them."""


Play = Callable[[torch.Tensor], None]
"""Plays a vector in place, together with all ranks."""


class PendingSum(Protocol):
    """A vector whose sum was begun."""

    def wait(self) -> object:
        """Return when it is summed; once. Raises when a rank is lost."""


class AllReduceBackend(Protocol):
    """Sums vectors in place over all ranks, in one order on every rank."""

    world: int
    takes_parts: bool
    """Whether a part of a vector of `buffer` may be summed, too."""

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a vector of zeros that is summed without a copy."""

    def release(self, vector: torch.Tensor) -> None:
        """Take back a vector of `buffer`, whose sums are complete."""

    def put(self, vector: torch.Tensor) -> PendingSum:
        """Begin to sum a vector."""

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        """Bytes that this rank sent to each process and received from it: counted where psctl sends them, else those of
        the schedule, of a peer named ""."""

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks whose bytes a wait lacks now; empty when there is no wait, or they are not known."""

    def close(self) -> None:
        """End threads; no sum is in progress."""


class EngineAllReduce:
    """The engine's own all-reduce.

    Args:
        group: the engine's.
    """

    takes_parts = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.world = dist.get_world_size(group)
        self._sent = 0
        self.waits_for: tuple[int, ...] = ()  # the engine does not report it

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=device)

    def release(self, vector: torch.Tensor) -> None:
        return

    def put(self, vector: torch.Tensor) -> PendingSum:
        work: PendingSum = dist.all_reduce(vector, group=self._group, async_op=True)
        self._sent += 2 * vector.nbytes * (self.world - 1) // self.world  # the engine's ring
        return work

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        return {UNKNOWN_PEER: PeerBytes(self._sent, self._sent)}

    def close(self) -> None:
        return


def broadcast(summing: AllReduceBackend, first: bool, tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite these tensors with rank 0's, bit by bit: their bytes are summed as integers, with zeros of other ranks.

    Args:
        summing: sums vectors on the host.
        first: this is rank 0.
        tensors: the same shapes and types on every rank.
    """
    with torch.no_grad():
        wholes = [each.detach() for each in tensors if each.numel()]
        copies = [each.contiguous() for each in wholes]
        pieces = [each.view(-1).view(torch.uint8) for each in copies]
        size = sum(each.numel() for each in pieces)
        pass_on(summing, size, pieces if first else None, None if first else pieces)
        for whole, copy in zip(wholes, copies, strict=True):
            if copy.data_ptr() != whole.data_ptr():
                whole.copy_(copy)


def pass_on(
    summing: AllReduceBackend, size: int, source: Sequence[torch.Tensor] | None, target: Sequence[torch.Tensor] | None
) -> None:  # fmt: skip
    """Pass bytes of one rank to others: they are summed as integers, with zeros of all other ranks.

    Args:
        summing: sums vectors on the host.
        size: bytes in all.
        source: the bytes, on the rank that passes them; None on others.
        target: where they are written, on a rank that takes them; None on others.
    """
    space = summing.buffer((min(BROADCAST, size) + 3) // 4, torch.int32, HOST)
    for start in range(0, size, BROADCAST):
        count = min(BROADCAST, size - start)
        used = space[: -(-count // 4)]
        used.zero_()
        for place, piece in _overlaps(source or (), start, used.view(torch.uint8)[:count]):
            place.copy_(piece)
        summing.put(used).wait()
        for place, piece in _overlaps(target or (), start, used.view(torch.uint8)[:count]):
            piece.copy_(place)
    summing.release(space)


def _overlaps(
    tensors: Sequence[torch.Tensor], start: int, place: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of `place` and of tensors of bytes that belong together; `place` is at byte `start` of these."""
    at = 0
    for each in tensors:
        low, high = max(at, start), min(at + each.numel(), start + place.numel())
        if low < high:
            yield place[low - start : high - start], each[low - at : high - at]
        at += each.numel()


def compare(summing: AllReduceBackend, me: int, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all ranks, by rank; every rank gives as many."""
    rows = torch.zeros(summing.world, len(numbers), dtype=torch.int64)
    rows[me] = torch.tensor(numbers)
    summing.put(rows.view(-1)).wait()
    return [[int(number) for number in row] for row in rows.tolist()]


class ScheduleAllReduce:
    """A schedule, played on a thread of its own (on GPUs: on a stream of its own) while backward continues.

    The helper of strategy `cpu`, the node behind the ranks, is played in rank 0's process, on memory of the host.

    Args:
        schedule: what is played.
        device: of the vectors; the host where a helper adds (`played_on_host`).
        plane: psctl's own data plane, for vectors on the host; None: the engine's operations.
        group: the engine's process group; None: one is made where `plane` is None. Of Gloo on the host.
        shared: the plane has other users: `close` returns its buffers and leaves it open.
    """

    takes_parts = True

    def __init__(
        self, schedule: Schedule, device: torch.device, plane: DataPlane | None = None,
        group: dist.ProcessGroup | None = None, *, shared: bool = False,
    ) -> None:  # fmt: skip
        self._schedule, self._plane, self._shared = schedule, plane, shared
        self._buffers: list[torch.Tensor] = []
        self._sent = 0
        on_host = device.type == "cpu"
        self._spare: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        if plane is None:
            group = group if group is not None else dist.new_group(backend="gloo" if on_host else "nccl")
            self._rank = dist.get_rank(group)
            dist.barrier(group)  # NCCL requires all ranks in a group's first operation
        else:
            self._rank = plane.me
        self.world = schedule.world
        helpers = range(schedule.world, schedule.nodes) if self._rank == 0 else range(0)
        self._channel = _channel(schedule.nodes, plane, group, on_host=on_host)
        self._players = _players(schedule, [self._rank, *helpers], self._channel)
        self._helper_queues = [PlayQueue() for _ in self._players[1:]]
        self._own = PlayQueue(SHORT) if on_host else StreamQueue()

    def buffer(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._plane is not None:
            self._buffers.append(self._plane.buffer(length, dtype))
            return self._buffers[-1]
        return torch.zeros(length, dtype=dtype, device=device)

    def release(self, vector: torch.Tensor) -> None:
        if self._plane is not None:
            self._buffers = [each for each in self._buffers if each is not vector]
            self._plane.memory.release([vector])

    def put(self, vector: torch.Tensor) -> PendingSum:
        if self._plane is None:
            self._sent += int(self._schedule.sent(vector.nbytes)[self._rank])
        return self._own.put(self.play, vector)

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        if self._plane is None:
            return {UNKNOWN_PEER: PeerBytes(self._sent, self._sent)}
        return self._plane.bytes_by_peer

    @property
    def waits_for(self) -> tuple[int, ...]:
        return self._plane.waits_for if self._plane is not None else ()

    @property
    def plane(self) -> DataPlane:
        """The data plane, which this was made with."""
        assert self._plane is not None, "the engine moves the pieces"
        return self._plane

    def retire(self, reason: str) -> None:
        """End all sums in progress with an error; return when nothing reads or writes their vectors any more.

        Raises:
            PeerLost: a thread did not end in time.
        """
        self.plane.abort(reason)
        for each in (self._own, *self._helper_queues):
            each.close()
        self.plane.retire(reason)

    def close(self) -> None:
        for each in (self._own, *self._helper_queues):
            each.close()
        if self._plane is not None and not self._shared:
            self._plane.close()
        elif self._plane is not None:
            self._plane.memory.release(self._buffers)

    def part_player(self, part: Schedule) -> SchedulePlayer:
        """Return a player of a schedule without helpers, such as a half of this one, over the same connections."""
        return SchedulePlayer(part, self._rank, self._channel)

    def put_play(
        self, part: SchedulePlayer, cut: VectorChunks, vector: torch.Tensor, *, at_once: bool,
        before: Callable[[], object] = lambda: None,
    ) -> PendingSum:  # fmt: skip
        """Begin to play a vector by a `part_player`, after what was put before.

        Args:
            part: the player.
            cut: where the chunks are.
            vector: of `buffer`.
            at_once: wake the thread that plays, whatever the vector's length.
            before: called on the thread, or with the stream, that plays, when what was put before has been played.
        """
        if self._plane is None:
            self._sent += int(part.schedule.sent(vector.nbytes)[self._rank])

        def play(each: torch.Tensor) -> None:
            before()
            part.play(each, cut)

        return self._own.put(play, vector, at_once=at_once)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    def play(self, vector: torch.Tensor) -> None:
        """Sum a vector now, on the calling thread; no other sum is in progress."""
        tickets = [
            queue.put(player.play, self._helpers(vector))
            for queue, player in zip(self._helper_queues, self._players[1:], strict=True)
        ]
        self._players[0].play(vector)
        for each in tickets:
            each.wait()

    def _helpers(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a helper."""
        key = like.numel(), like.dtype
        if key not in self._spare:
            self._spare[key] = self.buffer(*key, like.device)
        return self._spare[key]


def played_on_host(schedule: Schedule, device: torch.device) -> bool:
    """Whether a schedule is played on memory of the host: vectors lie there, or a helper needs them there."""
    return device.type == "cpu" or schedule.nodes > schedule.world


def _channel(nodes: int, plane: DataPlane | None, group: dist.ProcessGroup | None, *, on_host: bool) -> Channel:
    if plane is not None:
        return plane
    assert group is not None, "without a data plane the engine moves the pieces"
    return EngineChannel(group, nodes) if on_host else BatchChannel(group)


def _players(schedule: Schedule, nodes: Sequence[int], outside: Channel) -> list[SchedulePlayer]:
    """Return the players of the nodes in this process; `outside` moves pieces to other processes."""
    if len(nodes) == 1:
        return [SchedulePlayer(schedule, nodes[0], outside)]
    inside = LocalExchange()
    return [SchedulePlayer(schedule, node, LocalChannel(node, nodes, inside, outside)) for node in nodes]


class StreamQueue:
    """Plays vectors on a CUDA stream of its own; the host waits for nothing."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def put(self, play: Play, vector: torch.Tensor, *, at_once: bool = False) -> PendingSum:
        """Put the work of `play` on the stream, after the current stream's work on the vector."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            play(vector)
            done: PendingSum = self._stream.record_event()  # its `wait` makes the current stream wait
        return done

    def close(self) -> None:
        """Wait for what was put."""
        self._stream.synchronize()


class PlayQueue:
    """Plays vectors one after another while backward runs, on a thread of its own or on the thread that waits for one.

    A switch between threads costs more than a short sum. So a short vector does not wake the thread: it is played when
    a thread waits for it, or when a longer one behind it has woken the thread.

    Args:
        short: bytes of a vector, at most, that does not wake the thread.
    """

    def __init__(self, short: int = 0) -> None:
        self._short = short
        self._work: deque[tuple[Play, torch.Tensor, PlayTicket]] = deque()
        self._changed = threading.Condition()
        self._playing = False  # one at a time, in the order of `put`
        self._wake = threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True, name="psctl-collective")
        self._thread.start()

    def put(self, play: Play, vector: torch.Tensor, *, at_once: bool = False) -> PlayTicket:
        """Have a vector played, in the same order on every rank; `at_once`: wake the thread whatever its length."""
        ticket = PlayTicket(self._play_until)
        self._work.append((play, vector, ticket))
        if at_once or vector.nbytes > self._short:
            self._wake.release()
        return ticket

    def close(self) -> None:
        """End the thread when what was put is played."""
        self._closed = True
        self._wake.release()
        self._thread.join(10.0)

    def _play_until(self, ticket: PlayTicket) -> None:
        """Play what is next until this one is played."""
        while not ticket.done:
            self._next(ticket)

    def _loop(self) -> None:
        while not (self._closed and not self._work):
            self._wake.acquire()
            while self._work:
                self._next()

    def _next(self, awaited: PlayTicket | None = None) -> None:
        """Play the next vector, when no other thread plays; not when what this thread waits for is played by then."""
        with self._changed:
            while self._playing:
                if awaited is not None and awaited.done:
                    return  # the thread that plays has gone on to the next vector
                self._changed.wait()
            if not self._work or (awaited is not None and awaited.done):
                return
            self._playing = True
            play, vector, ticket = self._work.popleft()
        try:
            play(vector)
        except BaseException as error:  # noqa: BLE001  raised by the wait
            ticket.error = error
        with self._changed:
            self._playing, ticket.done = False, True
            self._changed.notify_all()


class PlayTicket:
    """A vector that is queued or being played.

    Args:
        play: plays it, unless another thread does.
    """

    def __init__(self, play: Callable[[PlayTicket], None]) -> None:
        self._play_until = play
        self.done = False
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Return when it is played.

        Raises:
            PeerLost: a peer is gone.
        """
        self._play_until(self)
        if self.error is not None:
            raise self.error
