"""Exchange of short vectors between all processes of one host, through shared memory.

Each process has a flag and two slots. For vector n it copies its own into slot n mod 2, sets its flag to n, and waits
until all flags are n or more; then it reads the others' slots. A process writes slot n mod 2 again for vector n+2 only,
which it begins when all flags are n+1 or more: all processes have then read vector n. A process that finds all flags
set (the last one always does) sets a common futex to n and wakes the processes that sleep on it (futex(2)). So a vector
costs a process two copies, at most one sleep and no message. Four processes on two busy cores, 4 KB: 0.09 ms; by
messages over Unix sockets 1.6 ms. Spinning or yielding before the sleep was no faster there, and kept the cores busy.

Stores and loads must be visible in program order: the writer's slot before its flag, the flag before the slot for the
reader. x86-64 guarantees this; it reorders only a store with a later load. Two processes that arrive at the same time
could each miss the other's flag while its store is not visible yet, and would sleep for at most CHECK_PERIOD seconds.

On other processors it is not used (`is_supported`), and these vectors are sent as records. On aarch64 any two of these
accesses may be reordered, and a slot could be read as it was two vectors ago; the interpreter's accesses to shared
memory are plain, and it offers no ordering for other processes. A futex call orders them in practice, but does not
promise it, and a process that finds all flags set makes no call before it reads. Support would need a barrier between
slot and flag at both ends, below the interpreter or by membarrier(2), and such a machine to measure it on.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

import torch

SLOT = 64 << 10
"""Bytes of a vector, at most: every process reads all vectors, so a schedule is faster for longer ones."""

LINE = 64
"""Bytes of a processor's cache line; each flag has its own."""

CHECK_PERIOD = 0.02
"""Seconds of sleep after which a process checks whether another process has ended."""

FUTEX = 202
"""The system call's number on x86-64."""

HALF = 1 << 31
WRAP = (1 << 32) - 1


class _Time(ctypes.Structure):
    """struct timespec"""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ShmExchange:
    """One process's part of the exchange.

    Args:
        memory: `exchange_size(world)` bytes that all processes share: zeros, or flags that are all equal.
        me: the rank of this process.
        world: number of processes, all on this host.
        check_peers: raises an exception when a process has ended; called while waiting.
    """

    def __init__(self, memory: torch.Tensor, me: int, world: int, check_peers: Callable[[], None]) -> None:
        self._me = me
        self._world = world
        self._check_peers = check_peers
        self._words = memory.numpy().data[: LINE * (world + 1)].cast("I")
        self._flags = [rank * LINE // 4 for rank in range(world)]
        self._all = world * LINE // 4  # the common futex
        self._address = ctypes.c_void_p(memory.data_ptr() + 4 * self._all)
        slots = memory[LINE * (world + 1) :].view(2, world, SLOT)
        self._slots = [[slots[turn, rank] for rank in range(world)] for turn in range(2)]
        self._call = ctypes.CDLL(None).syscall
        self._slice = ctypes.byref(_Time(0, int(CHECK_PERIOD * 1e9)))
        self._count = self._words[self._flags[me]]

    def exchange(self, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Write a vector of at most SLOT bytes, and return the others' by rank, which are valid until the next call.

        Raises:
            RuntimeError: a process has ended.
        """
        size, dtype = vector.nbytes, vector.dtype
        self._count = count = (self._count + 1) & WRAP
        slots = self._slots[count & 1]
        slots[self._me][:size].view(dtype).copy_(vector)
        self._words[self._flags[self._me]] = count
        self._await(count)
        return {rank: slots[rank][:size].view(dtype) for rank in range(self._world) if rank != self._me}

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that have not written the vector that this process wrote last."""
        count = self._count
        return tuple(rank for rank, flag in enumerate(self._flags) if (self._words[flag] - count) & HALF)

    def _await(self, count: int) -> None:
        """Wait until all processes have written this vector."""
        words = self._words
        for flag in self._flags:
            while (words[flag] - count) & HALF:  # it is behind, also after the count has wrapped
                before = words[self._all]
                if (words[flag] - count) & HALF and self._sleep(before):
                    self._check_peers()
        if words[self._all] != count:
            words[self._all] = count
            self._call(FUTEX, self._address, 1, self._world, None, None, 0)

    def _sleep(self, before: int) -> bool:
        """Sleep until the futex differs from `before`, at most CHECK_PERIOD seconds; return whether it is equal."""
        self._call(FUTEX, self._address, 0, ctypes.c_uint(before), self._slice, None, 0)
        return self._words[self._all] == before


def exchange_size(world: int) -> int:
    """Return the bytes of shared memory for `world` processes."""
    return LINE * (world + 1) + 2 * world * SLOT


def is_supported() -> bool:
    """Return whether this machine orders memory accesses as the exchange needs it."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"
