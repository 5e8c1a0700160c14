"""Times of the parts of a worker's steps, in memory that its agent reads while the worker runs, hangs or is stopped.

The worker writes spans into a ring: the newest replace the oldest. Writing takes a microsecond and no system call, so
it is always on. The agent copies the memory and leaves out spans that may have been overwritten meanwhile. In the other
direction the memory carries one request: to profile the next steps (worker/step_profiler.py).

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("step", "load", "forward", "backward", "compute", "synchronize", "update", "checkpoint", "push", "pull")
"""The parts of a step, by their numbers in memory; compute: where forward and backward are not separate.

push and pull are of parameter servers, and overlap with the others: from the first push of a step until its last one
was given to the connections, and from the request of the values that a step reads until they have arrived.
"""

OVERLAPPING = ("push", "pull")
"""Kinds of spans that other parts of steps hide; a pull may begin before its step."""

MAGIC = b"psctlst1"
SPANS = 32_000
"""Spans that are kept: some thousand steps."""

_HEADER = struct.Struct("<8sQQ")  # magic, number of spans written, request: ticket << 32 | steps
_SPAN = struct.Struct("<QQQQ")  # begin, end, step, kind
_WRITTEN = struct.Struct("<Q")
_START = 64
SIZE = _START + SPANS * _SPAN.size


class StepSpan(NamedTuple):
    """A part of a step; `kind` is one of KINDS, times in nanoseconds."""

    kind: str
    step: int
    begin: int
    end: int


class ProfileRequest(NamedTuple):
    """A request to profile the next steps; its ticket differs from that of the request before."""

    ticket: int
    steps: int


class StepRing:
    """The worker's end.

    Args:
        descriptor: of the memory, `SIZE` bytes.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._memory = mmap.mmap(descriptor, SIZE)
        self._written = 0
        _WRITTEN.pack_into(self._memory, 8, 0)  # a request may have come before
        self._memory[: len(MAGIC)] = MAGIC

    def add(self, kind: int, step: int, begin: int, end: int) -> None:
        """Write a span; `kind` is an index of KINDS."""
        _SPAN.pack_into(self._memory, _START + self._written % SPANS * _SPAN.size, begin, end, step, kind)
        self._written += 1
        _WRITTEN.pack_into(self._memory, 8, self._written)

    def profile_request(self) -> ProfileRequest:
        """Return the newest request; ticket 0: there was none."""
        word = _WRITTEN.unpack_from(self._memory, 16)[0]
        return ProfileRequest(word >> 32, word & 0xFFFFFFFF)


def request_profile(descriptor: int, steps: int) -> None:
    """Request, at the agent's end, a profile of the worker's next steps."""
    ticket = _WRITTEN.unpack(os.pread(descriptor, 8, 16))[0] >> 32
    os.pwrite(descriptor, _WRITTEN.pack((ticket % 0xFFFFFFFF + 1) << 32 | steps), 16)


def read_spans(descriptor: int) -> list[StepSpan]:
    """Return, at the agent's end, the spans that are held, oldest first; none when the worker has not begun."""
    data = os.pread(descriptor, SIZE, 0)
    if len(data) != SIZE or not data.startswith(MAGIC):
        return []
    written = _WRITTEN.unpack(os.pread(descriptor, 8, 8))[0]  # spans that were overwritten meanwhile may be torn
    return list(_spans_in(data, written - SPANS + 1))


def read_new_spans(descriptor: int, seen: int) -> tuple[list[StepSpan], int]:
    """Return, at the agent's end, the spans after span number `seen`, and the number of the last one.

    Of a ring that has been overwritten since then, the newest half is read.
    """
    header = os.pread(descriptor, _HEADER.size, 0)
    if not header.startswith(MAGIC):
        return [], seen
    written = _HEADER.unpack(header)[1]
    spans = []
    for number in range(max(seen, written - SPANS // 2), written):
        place = os.pread(descriptor, _SPAN.size, _START + number % SPANS * _SPAN.size)
        begin, end, step, kind = _SPAN.unpack(place)
        if kind < len(KINDS) and begin <= end:
            spans.append(StepSpan(KINDS[kind], step, begin, end))
    return spans, written


def _spans_in(data: bytes, first: int) -> Iterator[StepSpan]:
    """Yield the spans of a copy, from span number `first` on."""
    for index in range(max(0, first), _WRITTEN.unpack_from(data, 8)[0]):
        begin, end, step, kind = _SPAN.unpack_from(data, _START + index % SPANS * _SPAN.size)
        if kind < len(KINDS) and begin <= end:
            yield StepSpan(KINDS[kind], step, begin, end)


class StepRecorder:
    """Writes the spans of a run's steps; the main thread calls it.

    Args:
        ring: where spans are written; None: nowhere.
    """

    def __init__(self, ring: StepRing | None = None) -> None:
        self._ring = ring
        self._step = 1  # that is in progress
        self._began = self._forward = self._gradient = self._waited = 0

    @property
    def profile_request(self) -> ProfileRequest:
        """The newest request of a profile; ticket 0: there was none."""
        return self._ring.profile_request() if self._ring is not None else ProfileRequest(0, 0)

    def now(self) -> int:
        """Return the time in nanoseconds."""
        return time.monotonic_ns()

    def continue_after(self, step: int) -> None:
        """Begin the step after this one."""
        self._step = step + 1
        self._began = self._forward = self._gradient = self._waited = 0

    def loaded(self, begin: int) -> None:
        """The next batch was fetched, since `begin`; the step begins."""
        self._began = self._began or begin
        self._add("load", begin, self.now())

    def forward(self) -> None:
        """A forward begins."""
        if self._ring is not None and not self._forward:
            self._forward = self.now()
            self._began = self._began or self._forward

    def gradient(self) -> None:
        """A gradient was computed: backward has begun."""
        if self._ring is not None and not self._gradient:
            self._gradient = self.now()

    def synchronized(self, begin: int) -> None:
        """The worker waited for others, since `begin`."""
        if self._gradient and not self._waited:
            self._waited = begin  # backward is over
        self._add("synchronize", begin, self.now())

    def pushed(self, begin: int) -> None:
        """The last push of the step was given to the connections; the first one was made at `begin`."""
        self._add("push", begin, self.now())

    def pulled(self, begin: int, arrived: float) -> None:
        """The values of the step are there: they were requested at `begin`.

        Args:
            arrived: seconds of the monotonic clock; before `begin` where it is not known.
        """
        end = int(arrived * 1e9)
        self._add("pull", begin, end if end >= begin else self.now())

    def saved(self, begin: int) -> None:
        """The worker gave its part of a checkpoint, since `begin`; it is of the step before."""
        self._add("checkpoint", begin, self.now(), self._step - 1)

    def updated(self, begin: int) -> None:
        """The optimizer has stepped, since `begin`: the step ends."""
        if self._ring is None:
            return
        end, began = self.now(), self._forward or self._began
        over = min(self._waited or begin, begin)
        if began and self._gradient:
            self._add("forward", began, self._gradient)
            self._add("backward", self._gradient, max(self._gradient, over))
        elif began:
            self._add("compute", began, max(began, over))
        self._add("update", begin, end)
        self._add("step", self._began or begin, end)
        self.continue_after(self._step)

    def _add(self, kind: str, begin: int, end: int, step: int | None = None) -> None:
        if self._ring is not None:
            self._ring.add(KINDS.index(kind), self._step if step is None else step, begin, end)
