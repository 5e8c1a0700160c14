"""The agent's side of stack dumps: signals its children to write their threads' stacks, and reads the dumps."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from psctl.agent.processes import AgentChild
from psctl.agent.supervisor import stat_fields
from psctl.job.process_messages import Stacks
from psctl.process import stack_dump
from psctl.process.secret_masking import Secrets
from psctl.types import Member

WAIT = 2.0
"""Seconds within which a process must write its stacks; it takes milliseconds."""

POLL_SECONDS = 0.05
"""Seconds between two checks of a dump's size; a dump that has not grown in between is complete."""

MOST = 256 << 10
"""Bytes of a dump that are read."""

FRAMES = 40
"""Frames of a thread that are reported, at most."""

THREADS = 16
"""Threads that are reported, at most."""

LINE = 300
"""Characters of a frame's line that are reported, at most."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class StackDumps:
    """Collects the stacks of an agent's children; called on the agent's main thread.

    Args:
        folder: the job's code; frames of files below it are the user's.
        secrets: values that are masked in lines.
    """

    def __init__(self, folder: str, secrets: Secrets) -> None:
        self._folder = folder
        self._secrets = secrets
        self._memory: dict[Member, int] = {}

    @contextlib.contextmanager
    def opened(self, member: Member) -> Iterator[int]:
        """Open a child's memory for dumps; yields the descriptor that the child inherits and writes to."""
        self.ended(member)
        self._memory[member] = os.memfd_create("psctl-stacks", os.MFD_CLOEXEC)
        yield self._memory[member]

    def ended(self, member: Member) -> None:
        """Release the memory of a child that has ended or could not be started."""
        descriptor = self._memory.pop(member, None)
        if descriptor is not None:
            os.close(descriptor)

    def ask(self, children: Sequence[tuple[AgentChild, Member]], send: Callable[[Stacks], object]) -> None:
        """Request the stacks of these children; `send` is called with each answer, on this thread or another."""
        asked: list[tuple[Member, int, int]] = []
        for child, member in children:
            descriptor = self._memory.get(member)
            if descriptor is None or not stack_dump.armed(child.pid):
                send(Stacks(member, (), (), "it does not run Python code yet, or no longer"))
                continue
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)  # of the child's descriptor too, which is the same open file
            child.signal(stack_dump.NUMBER)
            asked.append((member, child.pid, os.dup(descriptor)))
        if asked:
            threading.Thread(target=self._answer, args=(asked, send), name="psctl stacks", daemon=True).start()

    def _answer(self, asked: Sequence[tuple[Member, int, int]], send: Callable[[Stacks], object]) -> None:
        end = time.monotonic() + WAIT
        for member, pid, descriptor in asked:
            try:
                text = _read(descriptor, end)
            finally:
                os.close(descriptor)
            threads = [self._lines(each) for each in threads_of(text) if not _waits_for_end(each)][-THREADS:]
            if threads:
                *others, main = threads  # the oldest thread, the main one, is written last
                send(Stacks(member, main, tuple(others)))
            else:
                send(Stacks(member, (), (), _missing_reason(pid)))

    def _lines(self, frames: Sequence[tuple[str, int, str]]) -> tuple[str, ...]:
        """Return a line for each of the user's own frames, outermost first; for all frames when none is the user's."""
        own, every = [], []
        for path, number, name in reversed(frames):
            inside = path.startswith(self._folder + os.sep)
            where = os.path.relpath(path, self._folder) if inside else path
            source = linecache.getline(path, number).strip() if inside and os.path.isfile(path) else ""
            line = self._secrets.mask_text(f"{where}:{number} in {name}" + (f": {source}" if source else ""))[:LINE]
            every.append(line)
            if inside:
                own.append(line)
        return tuple((own or every)[-FRAMES:])


def threads_of(dump: str) -> list[list[tuple[str, int, str]]]:
    """Return each thread's frames in a dump of faulthandler: (file, line, function), innermost first."""
    found: list[list[tuple[str, int, str]]] = []
    for line in dump.splitlines():
        frame = _FRAME.match(line)
        if frame is not None and found:
            found[-1].append((frame[1], int(frame[2]), frame[3]))
        elif line.startswith(("Thread ", "Current thread ")):
            found.append([])
    return [frames for frames in found if frames]


def _waits_for_end(frames: Sequence[tuple[str, int, str]]) -> bool:
    """Return whether it is the thread that every process has to be ended by (process/end_signal.py)."""
    return any(name == "await_end" and path.endswith(f"{os.sep}end_signal.py") for path, _, name in frames)


def _read(descriptor: int, end: float) -> str:
    """Return a dump once it has stopped growing, or at time `end`."""
    before = -1
    while True:
        size = os.fstat(descriptor).st_size
        if (size and size == before) or time.monotonic() >= end:
            return os.pread(descriptor, min(size, MOST), 0).decode(errors="replace")
        before = size
        time.sleep(POLL_SECONDS)


def _missing_reason(pid: int) -> str:
    """Return why a process has written no dump."""
    try:
        state = stat_fields(pid)[0]
    except (OSError, IndexError):
        return "the process has ended"
    if state in "Tt":
        return "the process is stopped by a signal (SIGSTOP) or a debugger: kill -CONT continues it"
    if state == "D":
        return "the process waits inside the kernel, as for a disk or a file server that does not answer"
    return f"the process wrote none within {WAIT:.0f} s"
