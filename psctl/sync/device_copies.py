"""Copies between GPU and host memory, ordered by CUDA streams and events.

gpu_staging.py has the theory. A GPU executes its work some time after the call, so a copy here is only ordered among
other work, and returns events to wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType
from typing import NamedTuple

import torch

from psctl.grouping import grouped

PORTABLE = 1
"""Flag of cudaHostRegister: for all devices of the process, not only for the current one."""


class CopySpan(NamedTuple):
    """Elements of a tensor on a device, and their memory on the host."""

    device: torch.Tensor
    start: int
    """The first element, in the tensor's logical order."""
    host: torch.Tensor
    """Flat, with as many elements of the same type."""

    def to_host(self) -> None:
        """Copy, on the current stream."""
        part = self.device.reshape(-1).narrow(0, self.start, self.host.numel())
        self.host.copy_(part, non_blocking=True)

    def to_device(self) -> None:
        """Copy, on the current stream."""
        target, count = self.device, self.host.numel()
        if target.is_contiguous():
            target.view(-1).narrow(0, self.start, count).copy_(self.host, non_blocking=True)
        elif count == target.numel():
            target.copy_(self.host.view(target.shape), non_blocking=True)
        else:  # a cut tensor with strides of its own (channels_last): through a copy in logical order
            whole = target.reshape(-1)
            whole.narrow(0, self.start, count).copy_(self.host, non_blocking=True)
            target.copy_(whole.view(target.shape))


class CudaCopies:
    """Begins copies; each GPU has a stream for copies to the host.

    Args:
        cuda: torch.cuda.
    """

    def __init__(self, cuda: ModuleType = torch.cuda) -> None:
        self._cuda = cuda
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._locked: list[torch.Tensor] = []
        self._refused = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on a GPU; `to_host` and `to_devices` take no others."""
        return tensor.is_cuda

    def lock(self, host: torch.Tensor) -> None:
        """Page-lock this memory until `close`, so that GPUs copy to and from it directly."""
        if self._refused:
            return
        code = int(self._cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE))
        if code == 0:
            self._locked.append(host)
            return
        self._refused = True
        with suppress(RuntimeError):  # CUDA keeps its last error, and a launch raises it: this one, not the user's next
            self._cuda._sleep(1)
        print(
            f"psctl: {host.nbytes} bytes of memory could not be locked for the GPU (CUDA error {code}), so copies to "
            "and from it are slower; `ulimit -l` and the container's limits say what may be locked",
            file=sys.stderr,
        )

    def to_host(self, spans: Sequence[CopySpan]) -> CudaEvents:
        """Begin to copy to the host: after the current streams' work so far, concurrently with their later work.

        The tensors must be kept, unchanged, until the events.
        """
        events = []
        for device, some in grouped((span.device.device, span) for span in spans).items():
            if device not in self._streams:
                self._streams[device] = self._cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(self._cuda.current_stream(device))
            with self._cuda.stream(stream):
                for span in some:
                    span.to_host()
            events.append(self._behind(stream))
        return CudaEvents(events)

    def to_devices(self, spans: Sequence[CopySpan]) -> CudaEvents:
        """Begin to copy to GPUs, in the order of their current streams.

        The host memory must not change until the events.
        """
        events = []
        for device, some in grouped((span.device.device, span) for span in spans).items():
            for span in some:
                span.to_device()
            events.append(self._behind(self._cuda.current_stream(device)))
        return CudaEvents(events)

    def close(self) -> None:
        """Unlock the host memory; no copy is in progress."""
        for host in self._locked:
            self._cuda.cudart().cudaHostUnregister(host.data_ptr())
        self._locked.clear()

    def _behind(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event behind the work of a stream; a wait for it does not spin."""
        event: torch.cuda.Event = self._cuda.Event(blocking=True)
        event.record(stream)
        return event


class CudaEvents:
    """The events behind some copies."""

    def __init__(self, events: Sequence[torch.cuda.Event]) -> None:
        self._events = events

    def wait(self) -> None:
        """Block the calling thread until the copies are done."""
        for event in self._events:
            event.synchronize()
