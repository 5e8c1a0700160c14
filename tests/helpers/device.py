"""A simulated GPU on CPU tensors, whose streams run their work late and in random order.

`Device` is a torch mode: every operation on a tensor of the device is queued in the current stream and runs some time
later; until then its result is NaN. Each stream keeps its order; streams are interleaved at random, subject to events.
`cuda` has the functions of torch.cuda that CudaCopies uses. A stream that reads freed memory of another stream is an
error, because an allocator might have reused it; so is a wait for an event that no stream will record.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map


class FreedMemoryRead(Exception):
    """A stream reads memory of another stream that was freed."""


class NeverRecorded(Exception):
    """The host waits for an event that no stream will record."""


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.work = device, deque()
        device.streams.append(self)

    def wait_event(self, event: Event) -> None:
        token = event.token
        self.work.append((lambda: token.done, lambda: None))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self, stream: Stream) -> None:
        self.token = token = SimpleNamespace(done=False)
        stream.work.append((lambda: True, lambda: setattr(token, "done", True)))

    def synchronize(self) -> None:
        self._device.until(self.token)


class Device(TorchDispatchMode):
    """The simulated GPU.

    Args:
        random: a random.Random, which orders the streams.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the compiler takes seconds to import

    def __init__(self, random) -> None:
        super().__init__()
        self.random = random
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self.locked: dict[int, int] = {}
        self.refuses = self._error = 0  # the result code of page-locking, and CUDA's last error
        self._slow: set[Stream] = set()
        self._turn = threading.RLock()
        self._homes: dict[int, tuple[StorageWeakRef, Stream]] = {}
        self.cuda = SimpleNamespace(
            Stream=lambda device: Stream(self), Event=lambda blocking: Event(self), stream=self._on,
            current_stream=lambda device: self.current, _sleep=self._sleep,
            cudart=lambda: SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister),
        )  # fmt: skip

    # ---- memory ----

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor to the device's current stream; return it."""
        storage = StorageWeakRef(tensor.untyped_storage())
        self._homes[storage.cdata] = storage, self.current
        return tensor

    def home(self, tensor: torch.Tensor) -> Stream | None:
        """Return the stream that owns a tensor's memory; None: the host."""
        found = self._homes.get(tensor.untyped_storage()._cdata)
        return None if found is None or found[0].expired() else found[1]

    def _register(self, start: int, size: int, flags: int) -> int:
        assert start not in self.locked, "locked twice"
        self._error = self.refuses
        if self.refuses:
            return self.refuses
        self.locked[start] = size
        return 0

    def _sleep(self, cycles: int) -> None:
        error, self._error = self._error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def _unregister(self, start: int) -> None:
        del self.locked[start]

    # ---- time ----

    @contextmanager
    def _on(self, stream: Stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def step(self) -> bool:
        """Run one operation of a random stream, slow streams last; return False when none can run."""
        with self._turn:
            return self._step()

    def _step(self) -> bool:
        able = [stream for stream in self.streams if stream.work and stream.work[0][0]()]
        if not able:
            return False
        if self.random.random() < 0.005:
            self._slow = {stream for stream in self.streams if self.random.random() < 0.5}
        quick = [stream for stream in able if stream not in self._slow]
        _, act = self.random.choice(quick or able).work.popleft()
        with _disable_current_modes(), torch.no_grad():
            act()
        return True

    def some(self) -> None:
        """Run a random number of operations."""
        for _ in range(self.random.choice((0, 0, 0, 1, 3, 10))):
            if any(stream not in self._slow for stream in self.streams if stream.work):
                self.step()
            elif self.random.random() < 0.005:
                self._slow = set()

    def until(self, token) -> None:
        while not token.done:
            if not self.step() and not token.done:  # another thread may have run it
                raise NeverRecorded

    def finish(self) -> None:
        """Run all operations."""
        while self.step():
            pass
        assert not any(stream.work for stream in self.streams), "a stream waits for an event that no stream will record"

    # ---- operations ----

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if not any(self.home(one) for one in tensors):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.current.synchronize()
            return func(*args, **kwargs)
        self.some()
        if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments):
            return self._change(func, args, kwargs)
        result = func(*args, **kwargs)  # only the shape of this result is used
        made = _tensors(result)
        held = {one.untyped_storage()._cdata for one in tensors}
        if any(one.untyped_storage()._cdata in held for one in made):
            return result  # a view
        for one in map(self.own, made):
            if one.is_floating_point():
                one.fill_(float("nan"))
        self._later(lambda again, *into: [a.copy_(b) for a, b in zip(into, _tensors(again), strict=True)],
                    func, args, kwargs, made)  # fmt: skip
        return result

    def _change(self, func, args, kwargs):
        """Queue an operation that writes into an argument."""
        assert not func._schema.returns or func._schema.returns[0].alias_info is not None
        self._later(lambda again: None, func, args, kwargs, [])
        away = func is torch.ops.aten.copy_.default and self.home(args[0]) is None
        if away and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
            self.current.synchronize()
        return args[0] if func._schema.returns else None

    def _later(self, put, func, args, kwargs, made) -> None:
        kept_args, kept_kwargs, kept = tree_map(self._kept, (list(args), kwargs, made))

        def act() -> None:
            now_args, now_kwargs, now = tree_map(_now, (kept_args, kept_kwargs, kept), is_leaf=_is_kept)
            put(func(*now_args, **now_kwargs), *now)

        self.current.work.append((lambda: True, act))

    def _kept(self, one):
        """Return a stream's reference to a tensor; it does not keep memory of another stream alive."""
        if not isinstance(one, torch.Tensor):
            return one
        if self.home(one) in (None, self.current):
            return Kept(one.detach(), None, ())
        where = (one.storage_offset(), tuple(one.shape), one.stride())
        return Kept(one.dtype, StorageWeakRef(one.untyped_storage()), where)


def _tensors(tree) -> list[torch.Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, torch.Tensor)]


class Kept:
    def __init__(self, what, storage, where) -> None:
        self.what, self.storage, self.where = what, storage, where


def _is_kept(one) -> bool:
    return isinstance(one, Kept)


def _now(one):
    if not isinstance(one, Kept):
        return one
    if one.storage is None:
        return one.what
    if one.storage.expired():
        raise FreedMemoryRead
    storage = torch.UntypedStorage._new_with_weak_ptr(one.storage.cdata)
    return torch.empty(0, dtype=one.what).set_(storage, *one.where)
