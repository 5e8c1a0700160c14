"""Gradients and values of parameters on GPUs, on their way to and from the host's memory, in the order of streams.

Theory. A GPU runs what a stream was given in that order, some time later; only events order streams among each other
and against the host. Five things must hold, and each is one line here:

1. A gradient is copied to the host after it is computed: the stream of copies waits for what the current one holds
   when the bucket is whole, and for nothing that backward gives it later. So copies run beside backward.
2. A push leaves when its bytes have arrived: not before the event behind its copies. Whoever launches backward does
   not wait for that; a thread does, and hands the pushes on in the order in which they were begun.
3. What is copied lives, and stays as it is, until then. The queue holds it (an allocator gives freed memory to the
   current stream, which is ahead of the copies), and nobody changes a gradient between its push and the end of the
   step; whatever ends a step waits for the queue first.
4. New values are written into parameters in the order of the current stream: after all that reads the old ones, before
   all that is given later. A stream of their own would gain nothing: the host has waited for the values until then,
   and what was launched before may read the old ones.
5. The host's memory that values come from is not written anew before they are copied: whoever lets new ones land waits
   for the event behind the last copies, and so does a push, which tells a server that its values were read.

Memory is page-locked once, where it lies: in the segments that processes of this host share
(transport/shared_memory.py), so that
a gradient goes from the GPU to where its sum is made, and a value to the GPU from where its server made it, without
another copy. What cannot be locked is copied all the same, through the driver's own buffer, and slower.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from psctl.ps.dense.client.receive_buffers import Take
from psctl.ps.pieces import Piece
from psctl.sync.device_copies import CopyEvent, CopySpan, DeviceCopies
from psctl.sync.flat_parameters import Client, FlatParameters
from psctl.types import Number

LITTLE = 64 << 10
"""Bytes of memory that is not worth locking: CUDA takes what is as short aside at once."""


class Staging:
    """Copies that something waits for. `down`, `then`, `up` and `arrived` are for the thread that trains.

    Args:
        copies: makes them.
        wake: told that there is something to hand on.
    """

    def __init__(self, copies: DeviceCopies, wake: Callable[[], object] = lambda: None) -> None:
        self._copies, self._wake = copies, wake
        self._locked: set[int] = set()
        self._begun: list[tuple[CopyEvent, Sequence[CopySpan]]] = []  # copies that `then` is to wait for
        self._queue: deque[tuple[list[tuple[CopyEvent, Sequence[CopySpan]]], Callable[[], object]]] = deque()
        self._turn = threading.Lock()  # to hand on: what was begun first is handed on first
        self._written: list[CopyEvent] = []
        self._error: BaseException | None = None

    def lock(self, host: torch.Tensor) -> torch.Tensor:
        """Page-lock all of the memory that this is a part of, unless that was done or it is little; returns `host`."""
        storage = host.untyped_storage()
        if storage.nbytes() >= LITTLE and storage.data_ptr() not in self._locked:
            self._locked.add(storage.data_ptr())
            self._copies.lock(torch.empty(0, dtype=torch.uint8).set_(storage))
        return host

    def down(self, spans: Sequence[CopySpan]) -> None:
        """Begin to copy to the host; what is there already is copied now."""
        for span in spans:
            if not self._copies.holds(span.device):
                span.to_host()
        away = [span for span in spans if self._copies.holds(span.device)]
        if away:
            self._begun.append((self._copies.down(away), away))

    def then(self, action: Callable[[], object]) -> None:
        """Have `action` called when all that was begun is copied, and what came before was handed on."""
        begun, self._begun = self._begun + [(mark, ()) for mark in self._written], []
        self._queue.append((begun, action))
        self._wake()

    def next(self) -> bool:
        """Hand on what is next, on the calling thread; False when there is nothing."""
        with self._turn:
            if not self._queue:
                return False
            begun, action = self._queue.popleft()
            if self._error is None:
                try:
                    for mark, _ in begun:
                        mark.wait()
                    action()
                except BaseException as error:  # noqa: BLE001  raised by who settles
                    self._error = error
            return True

    def settle(self) -> None:
        """Return when all is handed on; raises what an action raised."""
        while self.next():
            pass
        if self._error is not None:
            raise self._error

    def up(self, spans: Sequence[CopySpan]) -> None:
        """Begin to copy to devices; what the current streams are given from now on sees it."""
        for span in spans:
            if not self._copies.holds(span.device):
                span.to_device()
        away = [span for span in spans if self._copies.holds(span.device)]
        if away:
            self._written.append(self._copies.up(away))

    def read(self) -> None:
        """Return when the host's memory that `up` read may be written again."""
        written, self._written = self._written, []
        for mark in written:
            mark.wait()

    def close(self) -> None:
        """Let go of the host's memory; what was not handed on is not any more."""
        with self._turn:
            self._queue.clear()
        self._begun.clear()
        self.read()
        self._copies.close()


class GpuParameters(FlatParameters):
    """As `FlatParameters`, for parameters on GPUs: `fill` begins to copy, and what is pushed leaves through `Staged`.

    Args:
        staging: copies.
        apart: workers may be apart, so that a push of an earlier clock, sent again, may say that the newest values were
            read: `read` then waits for its copies.
        rest: what `FlatParameters` is made of.
    """

    direct = True

    def __init__(self, staging: Staging, apart: bool, *rest: Any) -> None:
        super().__init__(*rest)
        self._staging, self._apart = staging, apart

    def fill(self, flat: Mapping[str, torch.Tensor], shard: int) -> list[bool]:
        held = [(self.parameters[at].grad, piece) for at, piece in self._pieces[shard]]
        self._staging.down(
            [
                CopySpan(gradient.detach(), piece.within.start, self._at(flat, shard, piece))
                for gradient, piece in held
                if gradient is not None
            ]
        )
        return [gradient is not None for gradient, _ in held]

    def read(self, shard: int, values: torch.Tensor, wanted: Container[int] | None) -> None:
        held = [(self.parameters[at], piece) for at, piece in self._pieces[shard] if wanted is None or at in wanted]
        self._up(values, held)

    def read_sums(self, shard: int, values: torch.Tensor, present: bytes, clocks: int) -> bool:
        held = [
            (_gradient(self.parameters[at]), piece)
            for (at, piece), there in zip(self._pieces[shard], present, strict=True)
            if there
        ]
        self._up(values, held)
        return True

    def _up(self, values: torch.Tensor, held: Sequence[tuple[torch.Tensor, Piece]]) -> None:
        self._staging.lock(values)
        self._staging.up(
            [
                CopySpan(target.detach(), piece.within.start, values.narrow(0, piece.at.start, len(piece.at)))
                for target, piece in held
            ]
        )
        if self._apart:
            self._staging.read()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad


class Staged:
    """A parameter client whose send buffers are filled by copies, and whose values are copied on; see `Client`.

    Args:
        client: whose buffers they are.
        staging: copies, beside a thread that hands on.
        end: ends that thread.
    """

    def __init__(self, client: Client, staging: Staging, end: Callable[[], object] = lambda: None) -> None:
        self._client, self._staging, self._end = client, staging, end
        self.base, self.landing, self.residual = client.base, client.landing, client.residual

    @property
    def seconds_waiting(self) -> float:
        return self._client.seconds_waiting

    @property
    def seconds_under_way(self) -> float:
        return self._client.seconds_under_way

    @property
    def bytes_moved(self) -> int:
        return self._client.bytes_moved

    @property
    def doing(self) -> str:
        return self._client.doing

    def start(self, values: Mapping[str, torch.Tensor] | None) -> None:
        self._staging.read()
        self._client.start(values)

    def sending(self, clock: int) -> dict[str, torch.Tensor]:
        flat = self._client.sending(clock)
        for buffer in flat.values():
            self._staging.lock(buffer)
        return flat

    def push(self, clock: int, shard: int, present: Sequence[bool], weight: float = 1.0) -> None:
        self._staging.then(partial(self._client.push, clock, shard, present, weight))

    def step(
        self, clock: int, groups: Sequence[Mapping[str, Number]], scale: float | None = None, save: bool = False
    ) -> None:
        self._staging.settle()
        self._client.step(clock, groups, scale, save)

    def norms(self, clock: int) -> dict[int, float]:
        self._staging.settle()
        return self._client.norms(clock)

    def pull(self, clock: int) -> None:
        self._staging.read()
        self._client.pull(clock)

    def wait(self, clock: int, shards: Sequence[int] | None = None, *, exact: bool = False) -> None:
        self._staging.settle()
        self._staging.read()
        self._client.wait(clock, shards, exact=exact)

    def held(self, shards: Sequence[int]) -> int:
        return self._client.held(shards)

    def deliver(self, take: Take) -> None:
        self._client.deliver(take)

    def presence(self, clock: int) -> list[bool]:
        return self._client.presence(clock)

    def told(self, message: Any) -> None:
        self._client.told(message)

    def put_aside(self, clock: int, data: bytes) -> None:
        self._client.put_aside(clock, data)

    def aside(self, clock: int) -> bytes:
        return self._client.aside(clock)

    def save(self, version: int) -> None:
        self._client.save(version)

    def settle(self) -> None:
        self._staging.settle()
        self._client.settle()

    def close(self, reason: str = "") -> None:
        self._end()
        self._staging.close()
        self._client.close(reason)


class Hand:
    """The thread that hands on what a `Staging` holds."""

    def __init__(self) -> None:
        self._more = threading.Semaphore(0)
        self._over = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is something to hand on."""
        self._more.release()

    def begin(self, next: Callable[[], bool]) -> None:
        """Call `next` after each `wake`."""

        def loop() -> None:
            while self._more.acquire() and not self._over:
                next()

        self._thread = threading.Thread(target=loop, daemon=True, name="psctl-copies")
        self._thread.start()

    def end(self) -> None:
        """End the thread."""
        self._over = True
        self._more.release()
        if self._thread is not None:
            self._thread.join(10.0)


def staged(client: Client, copies: DeviceCopies, apart: bool, *rest: Any) -> tuple[Client, FlatParameters]:
    """Return a client and a Flat for parameters on GPUs.

    Args:
        client: the real one.
        copies: makes copies.
        apart: workers may be apart (DeviceFlat).
        rest: what `FlatParameters` is made of.
    """
    hand = Hand()
    staging = Staging(copies, hand.wake)
    hand.begin(staging.next)
    return Staged(client, staging, hand.end), GpuParameters(staging, apart, *rest)
