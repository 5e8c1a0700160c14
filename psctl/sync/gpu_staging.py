"""Copies gradients and values of parameters on GPUs to and from host memory, in the order of CUDA streams.

A GPU executes the work of a stream in order, some time later; only events order streams against each other and against
the host. Five rules keep the copies correct:

1. A gradient is copied to the host after it is computed: the stream of copies waits for the work that the current
   stream has when the bucket is full, and for no later work of backward. So copies overlap with backward.
2. A push is sent after its bytes are on the host, that is after the event behind its copies. The thread that launches
   backward does not wait for it; another thread does, and sends the pushes in the order of their calls.
3. Memory that is copied is kept, unchanged, until that event. The queue refers to it (an allocator gives freed
   memory to the current stream, which is ahead of the copies), and a gradient does not change between its push and the
   end of the step, because the end of a step waits for the queue first.
4. New values are written into parameters on the current stream: after all work that reads the old ones, before all
   later work. A separate stream would gain nothing: the host has waited for the values until then, and earlier work
   may still read the old ones.
5. Host memory that values are copied from is not overwritten before the copy is done: a wait for new values, and a push
   (which acknowledges to the server that its values were read), first wait for the event behind the last copies.

Memory is page-locked once, in place: in the segments that processes of this host share (transport/shared_memory.py), so
that a gradient is copied from the GPU to where its sum is made, and a value to the GPU from where its server made it,
without another copy. Memory that cannot be locked is copied through the driver's own buffer, and slower.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from psctl.client.dense_client import ParameterClient
from psctl.ps.pieces import Piece
from psctl.sync.device_copies import CopySpan, CudaCopies, CudaEvents
from psctl.sync.flat_parameters import FlatParameters, gradient_of
from psctl.types import Layout, Shard

SMALLEST_LOCKED = 64 << 10
"""Bytes of the smallest memory that is locked: CUDA copies shorter memory to a buffer of its own in the call."""


class Staging:
    """Copies between devices and the host, and actions that wait for them in order.

    Only the training thread calls `copy_to_host`, `run_after_copies`, `copy_to_devices` and `wait_for_device_copies`.

    Args:
        copies: makes the copies.
        threaded: a thread runs the actions; without one `run_next` and `settle` do.
    """

    def __init__(self, copies: CudaCopies, *, threaded: bool = True) -> None:
        self._copies = copies
        self._locked: set[int] = set()
        self._begun: list[tuple[CudaEvents, Sequence[CopySpan]]] = []  # copies that the next action waits for
        self._queue: deque[tuple[list[tuple[CudaEvents, Sequence[CopySpan]]], Callable[[], object]]] = deque()
        self._running = threading.Lock()  # actions run one after another, in the order of `run_after_copies`
        self._written: list[CudaEvents] = []
        self._error: BaseException | None = None
        self._more = threading.Semaphore(0)
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True, name="psctl-copies") if threaded else None
        if self._thread is not None:
            self._thread.start()

    def lock(self, host: torch.Tensor) -> torch.Tensor:
        """Page-lock the whole storage of `host`, unless it is locked or small; returns `host`."""
        storage = host.untyped_storage()
        if storage.nbytes() >= SMALLEST_LOCKED and storage.data_ptr() not in self._locked:
            self._locked.add(storage.data_ptr())
            self._copies.lock(torch.empty(0, dtype=torch.uint8).set_(storage))
        return host

    def copy_to_host(self, spans: Sequence[CopySpan]) -> None:
        """Begin to copy to the host; tensors that are on the host are copied now."""
        if away := self._on_devices(spans, CopySpan.to_host):
            self._begun.append((self._copies.to_host(away), away))

    def run_after_copies(self, action: Callable[[], object]) -> None:
        """Run `action` when all copies begun so far are done, after earlier actions."""
        begun, self._begun = self._begun + [(event, ()) for event in self._written], []
        self._queue.append((begun, action))
        self._more.release()

    def run_next(self) -> bool:
        """Run the next action on the calling thread, after its copies; False when there is none."""
        with self._running:
            if not self._queue:
                return False
            begun, action = self._queue.popleft()
            if self._error is None:
                try:
                    for event, _ in begun:
                        event.wait()
                    action()
                except BaseException as error:  # noqa: BLE001  raised by `settle`
                    self._error = error
            return True

    def settle(self) -> None:
        """Return when all actions have run; raises the error of one."""
        while self.run_next():
            pass
        if self._error is not None:
            raise self._error

    def copy_to_devices(self, spans: Sequence[CopySpan]) -> None:
        """Begin to copy to devices; later work of the current streams sees the new values."""
        if away := self._on_devices(spans, CopySpan.to_device):
            self._written.append(self._copies.to_devices(away))

    def wait_for_device_copies(self) -> None:
        """Return when the host memory that `copy_to_devices` reads may be overwritten."""
        written, self._written = self._written, []
        for event in written:
            event.wait()

    def close(self) -> None:
        """End the thread and release the host memory; actions that have not run are dropped."""
        self._closed = True
        self._more.release()
        if self._thread is not None:
            self._thread.join(10.0)
        with self._running:
            self._queue.clear()
        self._begun.clear()
        self.wait_for_device_copies()
        self._copies.close()

    def _on_devices(self, spans: Sequence[CopySpan], copy: Callable[[CopySpan], None]) -> list[CopySpan]:
        """Copy the spans whose tensors are on the host; return the others."""
        for span in spans:
            if not self._copies.holds(span.device):
                copy(span)
        return [span for span in spans if self._copies.holds(span.device)]

    def _loop(self) -> None:
        while self._more.acquire() and not self._closed:
            self.run_next()


class GpuParameters(FlatParameters):
    """`FlatParameters` for parameters on GPUs: pushes wait for the copies of their gradients on another thread.

    Args:
        staging: copies; closed with this.
        apart: workers may be clocks apart. A push of an earlier clock, sent again, may then acknowledge that the newest
            values were read, so `read` waits for its copies.
        layout, shards, parameters: as for `FlatParameters`.
    """

    def __init__(
        self, staging: Staging, apart: bool, layout: Layout, shards: Sequence[Shard],
        parameters: Sequence[nn.Parameter],
    ) -> None:  # fmt: skip
        super().__init__(layout, shards, parameters)
        self._staging, self._apart = staging, apart

    def push(self, client: ParameterClient, clock: int, shard: int, weight: float) -> None:
        buffers = client.send_buffer(clock)
        for buffer in buffers.values():
            self._staging.lock(buffer)
        self._staging.run_after_copies(partial(client.push, clock, shard, self.fill(buffers, shard), weight))

    def finish_pushes(self) -> None:
        self._staging.settle()

    def fill(self, flat: Mapping[str, torch.Tensor], shard: int) -> list[bool]:
        held = [(self.parameters[at].grad, piece) for at, piece in self._pieces[shard]]
        self._staging.copy_to_host(
            [
                CopySpan(gradient.detach(), piece.within, self._at(flat, shard, piece))
                for gradient, piece in held
                if gradient is not None
            ]
        )
        return [gradient is not None for gradient, _ in held]

    def read(self, shard: int, values: torch.Tensor, wanted: Container[int] | None) -> None:
        held = [(self.parameters[at], piece) for at, piece in self._pieces[shard] if wanted is None or at in wanted]
        self._copy_to_devices(values, held)

    def read_sums(self, shard: int, values: torch.Tensor, present: bytes, clocks: int) -> bool:
        held = zip(self._pieces[shard], present, strict=True)
        self._copy_to_devices(
            values, [(gradient_of(self.parameters[at]), piece) for (at, piece), there in held if there]
        )
        return True

    def finish_reads(self) -> None:
        self._staging.wait_for_device_copies()

    def close(self) -> None:
        self._staging.close()

    def _copy_to_devices(self, values: torch.Tensor, held: Sequence[tuple[torch.Tensor, Piece]]) -> None:
        self._staging.lock(values)
        self._staging.copy_to_devices(
            [CopySpan(target.detach(), piece.within, values.narrow(0, piece.at, piece.size)) for target, piece in held]
        )
        if self._apart:
            self._staging.wait_for_device_copies()
