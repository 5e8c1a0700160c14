"""The journal of a coordinator: a snapshot of the job's state and all inputs since, from which a successor continues.

The state machine is deterministic: the same inputs at the same times give the same state, the same instructions and the
same numbers of messages. So the state is replicated by its inputs (state machine replication: Schneider, Implementing
fault-tolerant services using the state machine approach, ACM Computing Surveys 22:4, 1990). A successor knows that the
instructions of all inputs but the last were carried out (journaled_state_machine.py), and carries out those of the last
again: messages are numbered (job/message_session.py), events are compared with the end of the event log.

Files: process/journal_files.py. Snapshots and inputs are pickles of psctl's own classes, because the state is a graph
of objects that refer to each other. The folder is readable and writable by its user only, and the reader admits no
other class. A copy of all of it goes to the standby, where there is one (standby_copy.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import Input, Instruction
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.errors import PsctlError
from psctl.process.journal_files import SNAPSHOT, JournalFiles, framed, journal_path, unframed

MOST_INPUTS = 2000
"""Inputs after which a new snapshot is made: some 100 ms to handle them again."""

MOST_BYTES = 4 << 20
"""Bytes of a journal after which a new snapshot is made: printed lines are inputs too."""

RETRY = 100
"""Inputs after which a disk that was full is looked at again."""

SPACE = 2 * MOST_BYTES
"""Bytes that must be free for it then, so that a journal does not come and go with the last bytes."""

LONGEST_AWAY = 600.0
"""Seconds after which it does not matter any more for how long there was no coordinator."""


class JournalUnreadable(PsctlError):
    """The journal is not there or does not hold what it must; the job cannot be continued from it."""


class CoordinatorState(msgspec.Struct):
    """What a snapshot holds."""

    number: int
    """Of the journal with the inputs since."""
    machine: JobStateMachine
    sessions: MemberSessions
    host: int = 0
    """Whose clock the job's time is of."""
    clock: float = 0.0
    """Added to that host's monotonic clock, it gives the job's time."""


class JournalCopy(Protocol):
    """The copy of the journal on the standby."""

    def begin(self, number: int, snapshot: bytes) -> None:
        """Take a framed snapshot, which begins a journal."""

    def append(self, record: bytes) -> None:
        """Take a framed record."""


class NoCopy:
    """The copy of a job that has no standby."""

    def begin(self, number: int, snapshot: bytes) -> None:
        """Nothing."""

    def append(self, record: bytes) -> None:
        """Nothing."""


class Journal:
    """Writes the journal of one coordinator.

    While the disk is full there is none there, and the job does not survive the end of the coordinator's process.

    Args:
        folder: the job's.
        state: a snapshot of it is made at once; its number is that of the first journal, larger than all before.
        copy: gets all that is written.
    """

    def __init__(self, folder: Path, state: CoordinatorState, copy: JournalCopy) -> None:
        self._folder, self._state, self._copy = folder, state, copy
        self._state.number -= 1
        self._files = JournalFiles(folder)
        self._inputs = self._bytes = 0  # since the snapshot
        self._missed = 0  # inputs since the disk was full
        self.make_snapshot()

    @property
    def is_whole(self) -> bool:
        """Whether a successor on this host could continue the job now."""
        return self._files.is_open

    def append(self, given: Sequence[Input], now: float) -> None:
        """Add inputs before they are handled at time `now`."""
        self._inputs += len(given)
        if not self._files.is_open:
            self._missed += len(given)
        has_space = self._missed >= RETRY and _free(self._folder) >= SPACE
        if has_space or self._inputs > MOST_INPUTS or self._bytes > MOST_BYTES:
            self.make_snapshot()
        record = framed(pickle.dumps((now, tuple(given)), pickle.HIGHEST_PROTOCOL))
        self._bytes += len(record)
        if self._files.is_open:
            with contextlib.suppress(OSError):
                self._files.append(record)
        self._copy.append(record)

    def make_snapshot(self) -> None:
        """Begin a new journal with a snapshot of the present state."""
        self._state.number += 1
        data = framed(pickle.dumps(self._state, pickle.HIGHEST_PROTOCOL))
        self._inputs = self._bytes = self._missed = 0
        with contextlib.suppress(OSError):
            self._files.begin(self._state.number, data)
        self._copy.begin(self._state.number, data)

    def close(self) -> None:
        """Remove the files: the job is over."""
        self._files.remove()


class RestoredState(msgspec.Struct):
    """The state that a journal leads to."""

    state: CoordinatorState
    time: float
    """Of the last input."""
    instructions: list[Instruction]
    """Those of the last input: it is unknown which of them were carried out."""


def restore(folder: Path) -> RestoredState:
    """Return the state that the journal in a folder leads to.

    Raises:
        JournalUnreadable: there is no snapshot, or it is damaged.
    """
    try:
        snapshot = (folder / SNAPSHOT).read_bytes()
    except OSError as error:
        raise JournalUnreadable(f"{folder / SNAPSHOT}: {error.strerror}", "start the job again") from error
    try:
        (data,) = unframed(snapshot)
        state = _Unpickler(io.BytesIO(data)).load()
    except (ValueError, pickle.UnpicklingError) as error:
        raise JournalUnreadable(f"{folder / SNAPSHOT} is damaged: {error}", "start the job again") from error
    found = RestoredState(state, state.machine.job.now, [])
    with contextlib.suppress(OSError):  # it was just begun
        for record in unframed(journal_path(folder, state.number).read_bytes()):
            found.time, inputs = _Unpickler(io.BytesIO(record)).load()
            found.instructions = [each for given in inputs for each in apply(state, given, found.time)]
    return found


def clock_of(folder: Path, restored: RestoredState, host: int) -> float:
    """Return what is added to this host's monotonic clock to give the job's time.

    Args:
        folder: of the journal.
        restored: its state.
        host: this host. On another one than before, the job's time goes on by the age of the journal's files.
    """
    state = restored.state
    if state.host == host:
        return state.clock
    path = journal_path(folder, state.number)
    written = (path if path.exists() else folder / SNAPSHOT).stat().st_mtime
    away = min(max(0.0, time.time() - written), LONGEST_AWAY)
    return restored.time + away - time.monotonic()


def apply(state: CoordinatorState, given: Input, now: float) -> list[Instruction]:
    """Handle an input without carrying out the instructions, which are returned."""
    state.sessions.on_input(given)
    instructions = state.machine.handle(given, now)
    for instruction in instructions:
        state.sessions.on_instruction(instruction)
    return instructions


def _free(folder: Path) -> int:
    """Return the bytes that are free on the folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class _Unpickler(pickle.Unpickler):
    """Reads psctl's own classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of psctl, or one of the few others that the state uses."""
        ours = module.startswith("psctl.") and "." not in name
        if ours or (module, name) in (("collections", "deque"), ("msgspec._utils", "rebuild")):
            found = super().find_class(module, name)
            if isinstance(found, type) or not ours:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no class of a journal")
