"""The journal of a coordinator: a snapshot of the job's state and all inputs since, from which a successor continues.

The state machine is deterministic: the same inputs at the same times give the same state, the same instructions and the
same numbers of messages. So the state is replicated by its inputs (state machine replication: Schneider, Implementing
fault-tolerant services using the state machine approach, ACM Computing Surveys 22:4, 1990). A successor knows that the
instructions of all inputs but the last were carried out (journaled_state_machine.py), and carries out those of the last
again: messages are numbered (job/message_session.py), events are compared with the end of the event log.

A write without fsync outlasts a killed process, not a host without power, which ends a coordinator on that host anyway.

Files in the job's folder: `coordinator.snapshot` is replaced as a whole, and names its journal by a number;
`coordinator.journal.N` has the inputs since, each with its length and checksum. Snapshots and inputs are pickles of
psctl's own classes, because the state is a graph of objects that refer to each other. The folder is readable and
writable by its user only, and the reader admits no other class.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import msgspec

from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import Input, Instruction
from psctl.coordinator.state.job_state_machine import JobStateMachine
from psctl.errors import PsctlError

SNAPSHOT = "coordinator.snapshot"

JOURNAL = "coordinator.journal"

MOST_INPUTS = 2000
"""Inputs after which a new snapshot is made: some 100 ms to handle them again."""

MOST_BYTES = 4 << 20
"""Bytes of a journal after which a new snapshot is made: printed lines are inputs too."""

RETRY = 100
"""Inputs after which a disk that was full is looked at again."""

ROOM = 2 * MOST_BYTES
"""Bytes that must be free for it then, so that a journal does not come and go with the last bytes."""

_HEAD = 8  # bytes: length and checksum of what follows


class JournalUnreadable(PsctlError):
    """The journal is not there or does not hold what it must; the job cannot be continued from it."""


class CoordinatorState(msgspec.Struct):
    """What a snapshot holds."""

    number: int
    """Of the journal with the inputs since."""
    machine: JobStateMachine
    sessions: MemberSessions


class Journal:
    """Writes the journal of one coordinator.

    While the disk is full there is none, and the job does not survive the coordinator's end.

    Args:
        folder: the job's.
        machine, sessions: the state; a snapshot of it is made at once.
        number: of the first journal; larger than that of all before.
    """

    def __init__(self, folder: Path, machine: JobStateMachine, sessions: MemberSessions, number: int = 0) -> None:
        self._folder, self._machine, self._sessions = folder, machine, sessions
        self._number = number - 1
        self._inputs = self._bytes = 0  # since the snapshot
        self._file = -1
        self._make_snapshot()

    @property
    def is_whole(self) -> bool:
        """Whether a successor could continue the job now."""
        return self._file >= 0

    def append(self, given: Input, now: float) -> None:
        """Add an input before it is handled at time `now`."""
        self._inputs += 1
        if self._file < 0:
            if self._inputs % RETRY == 0 and _free(self._folder) >= ROOM:
                self._make_snapshot()
        elif self._inputs > MOST_INPUTS or self._bytes > MOST_BYTES:
            self._make_snapshot()
        if self._file >= 0:
            record = _framed(pickle.dumps((now, given), pickle.HIGHEST_PROTOCOL))
            try:
                written = os.write(self._file, record)
            except OSError:
                written = 0
            self._bytes += written
            if written < len(record):
                self._give_up()

    def close(self) -> None:
        """Remove the files: the job is over."""
        self._give_up()

    def _make_snapshot(self) -> None:
        """Begin a new journal with a snapshot of the present state."""
        number = self._number + 1
        state = CoordinatorState(number, self._machine, self._sessions)
        data = _framed(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))
        path, new = self._folder / SNAPSHOT, self._folder / f"{SNAPSHOT}.new"
        try:
            file = os.open(_journal(self._folder, number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                new.touch(0o600)
                new.write_bytes(data)
                new.replace(path)
            except OSError:
                os.close(file)
                raise
        except OSError:
            self._give_up()
            return
        if self._file >= 0:
            os.close(self._file)
        _journal(self._folder, self._number).unlink(missing_ok=True)
        self._number, self._inputs, self._bytes, self._file = number, 0, 0, file

    def _give_up(self) -> None:
        """Remove what is there: a part of the inputs is worth nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        for name in (SNAPSHOT, f"{SNAPSHOT}.new"):
            (self._folder / name).unlink(missing_ok=True)
        for path in self._folder.glob(f"{JOURNAL}.*"):
            with contextlib.suppress(OSError):
                path.unlink()


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
        (state,) = _records(snapshot)
    except (ValueError, pickle.UnpicklingError) as error:
        raise JournalUnreadable(f"{folder / SNAPSHOT} is damaged: {error}", "start the job again") from error
    found = RestoredState(state, state.machine.job.now, [])
    with contextlib.suppress(OSError):  # it was just begun
        for time, given in _records(_journal(folder, state.number).read_bytes()):
            found.time = time
            found.instructions = apply(state, given, time)
    return found


def apply(state: CoordinatorState, given: Input, now: float) -> list[Instruction]:
    """Handle an input without carrying out the instructions, which are returned."""
    state.sessions.on_input(given)
    instructions = state.machine.handle(given, now)
    for instruction in instructions:
        state.sessions.on_instruction(instruction)
    return instructions


def _journal(folder: Path, number: int) -> Path:
    return folder / f"{JOURNAL}.{number}"


def _free(folder: Path) -> int:
    """Return the bytes that are free on the folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def _records(data: bytes) -> Any:
    """Yield the records that are whole, up to the first that is not: the writer was killed while it wrote that."""
    at = 0
    while at + _HEAD <= len(data):
        size, check = (int.from_bytes(data[at + each : at + each + 4], "little") for each in (0, 4))
        at += _HEAD
        record = data[at : at + size]
        if len(record) < size or zlib.crc32(record) != check:
            return
        yield _Unpickler(io.BytesIO(record)).load()
        at += size


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
