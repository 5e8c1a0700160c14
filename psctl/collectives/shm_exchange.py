"""A board in shared memory on which all processes of one host put short vectors for each other to read.

Theory. Each process has a flag and two slots. For vector n it copies its own into slot n mod 2, sets its flag to n,
and waits until all flags are n or more; then it reads the others' slots. Nobody writes slot n mod 2 again before vector
n+2, which it begins when all flags are n+1 or more: everyone has then read vector n. Whoever finds all flags set, the
last to come at least, sets a common word to n and wakes those who sleep on it (futex(2)). So a vector costs a process
two copies and at most one sleep, and no message. Four processes on two busy cores, 4 KB: 0.09 ms; by messages over Unix
sockets 1.6 ms. Spinning or yielding first was no faster there, and held the cores.

Stores and loads must be seen in the order in which they are made: slot before flag by who writes, flag before slot by
who reads. So they are on x86-64, where nothing but a store and a load after it may change places: two who come at once
could each miss the other's flag for the moment that a store takes to be seen, and would sleep no longer than a LOOK.

Elsewhere it is off (`possible`), and these vectors travel as records. On aarch64 any two of these accesses may be seen
the other way round, and a slot be read as it was two vectors ago; the interpreter's stores and loads of shared memory
are plain ones, and nothing that it offers promises to order them for another process. A futex call does so today, but
does not promise it, and who finds all flags set makes none before it reads. It would take a barrier between slot and
flag at both ends, below the interpreter or by membarrier(2), and such a machine to measure it on.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import torch

SLOT = 64 << 10
"""Bytes of a vector at most: everyone reads everyone's, so longer ones are better shared out."""

LINE = 64
"""A flag has a processor's cache line to itself."""

LOOK = 0.02
"""Seconds of sleep after which a process looks whether somebody is gone."""

FUTEX = 202
"""The system call's number on x86-64."""

HALF = 1 << 31
WRAP = (1 << 32) - 1


class _Time(ctypes.Structure):
    """struct timespec"""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ShmExchange:
    """One process's end.

    Args:
        memory: bytes that all share, zeros at first; `room(world)` of them.
        me: the rank of this process.
        world: number of processes, all of this host.
        look: raises when somebody is gone; called while waiting.
    """

    def __init__(self, memory: torch.Tensor, me: int, world: int, look: Callable[[], None]) -> None:
        self._me, self._world, self._look = me, world, look
        head: Any = memory.numpy()
        self._words = memoryview(head)[: LINE * (world + 1)].cast("I")
        self._flags = [rank * LINE // 4 for rank in range(world)]
        self._all = world * LINE // 4  # the word that is slept on
        self._address = ctypes.c_void_p(memory.data_ptr() + 4 * self._all)
        slots = memory[LINE * (world + 1) :].view(2, world, SLOT)
        self._slots = [[slots[turn, rank] for rank in range(world)] for turn in range(2)]
        self._call = ctypes.CDLL(None).syscall
        self._slice = ctypes.byref(_Time(0, int(LOOK * 1e9)))
        self._count = 0

    def exchange(self, vector: torch.Tensor) -> dict[int, torch.Tensor]:
        """Put a vector of SLOT bytes at most, and return all others', which stay as they are until the next one is put.

        Raises:
            RuntimeError: a process is gone.
        """
        size, dtype = vector.nbytes, vector.dtype
        self._count = count = (self._count + 1) & WRAP
        slots = self._slots[count & 1]
        slots[self._me][:size].view(dtype).copy_(vector)
        self._words[self._flags[self._me]] = count
        self._await(count)
        return {rank: slots[rank][:size].view(dtype) for rank in range(self._world) if rank != self._me}

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks that have not put the vector that this process put last."""
        count = self._count
        return tuple(rank for rank, flag in enumerate(self._flags) if (self._words[flag] - count) & HALF)

    def _await(self, count: int) -> None:
        """Return when everyone has put this vector."""
        words = self._words
        for flag in self._flags:
            while (words[flag] - count) & HALF:  # it is behind, also where the count has begun anew
                before = words[self._all]
                if (words[flag] - count) & HALF and self._sleep(before):
                    self._look()
        if words[self._all] != count:
            words[self._all] = count
            self._call(FUTEX, self._address, 1, self._world, None, None, 0)

    def _sleep(self, before: int) -> bool:
        """Sleep until the common word is another; tell whether it is not yet."""
        self._call(FUTEX, self._address, 0, ctypes.c_uint(before), self._slice, None, 0)
        return self._words[self._all] == before


def room(world: int) -> int:
    """Return the bytes that a board takes."""
    return LINE * (world + 1) + 2 * world * SLOT


def possible() -> bool:
    """Whether this machine keeps what a board needs."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"
