"""The copy of the coordinator's state on the standby: the agent's end. A coordinator that is started here continues it.

The event log and the journal are in the job's folder, where they are on the leader's host too. The key of the job's
authority, which a leader needs, stays in memory.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from psctl.job import events
from psctl.job.leadership_messages import ReplicaBegin, ReplicaLog, ReplicaRecord, ReplicaSnapshot, ReplicaStored
from psctl.process.journal_files import JournalFiles

ReplicaMessage = ReplicaBegin | ReplicaLog | ReplicaSnapshot | ReplicaRecord


class StateReplica:
    """Stores what the leader sends; called on the reader thread of the connection to it.

    Args:
        job_dir: the job's folder on this host.
    """

    def __init__(self, job_dir: Path) -> None:
        self._log = job_dir / events.FILE
        self._files = JournalFiles(job_dir)
        self._copy, self._stored = -1, -1
        self._parts: list[bytes] = []  # of a record or a snapshot
        self.authority_key = ""
        """PEM; "" while there is no copy."""

    def receive(self, message: ReplicaMessage, payload: memoryview | None) -> ReplicaStored | None:
        """Store a message; return the answer if it completes a record."""
        data = b"" if payload is None else bytes(payload)
        if isinstance(message, ReplicaBegin):
            self._copy, self._stored, self.authority_key = message.copy, -1, message.authority_key
            self._parts.clear()
        if message.copy != self._copy:
            return None  # of a copy that could not be stored
        try:
            return self._store(message, data)
        except OSError as error:
            self.discard()
            return ReplicaStored(message.copy, 0, f"{self._log.parent}: {error.strerror or error}")

    def _store(self, message: ReplicaMessage, data: bytes) -> ReplicaStored | None:
        match message:
            case ReplicaBegin():
                self._files.remove()
                self._log.touch(0o600)
                self._log.write_bytes(b"")
            case ReplicaLog():
                with self._log.open("ab", buffering=0) as file:
                    if file.write(data) < len(data):
                        raise OSError("the disk is full")
            case ReplicaSnapshot(sequence=sequence) | ReplicaRecord(sequence=sequence):
                if sequence != self._stored + 1:
                    raise OSError(f"record {sequence} came after {self._stored}")
                self._parts.append(data)
                if message.whole:
                    whole = b"".join(self._parts)
                    self._parts.clear()
                    if isinstance(message, ReplicaSnapshot):
                        self._files.begin(message.number, whole)
                    else:
                        self._files.append(whole)
                    self._stored = sequence
                    return ReplicaStored(message.copy, sequence)
        return None

    def release(self) -> str:
        """Leave the files to a coordinator that is started here; return the authority's key."""
        self._copy = -1
        return self.authority_key

    def discard(self) -> None:
        """Remove the copy."""
        if self._copy < 0:
            return
        self._copy, self.authority_key = -1, ""
        self._parts.clear()
        with contextlib.suppress(OSError):
            self._files.remove()
            self._log.unlink(missing_ok=True)
