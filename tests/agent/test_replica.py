"""The copy of the coordinator's state on the standby: what is acknowledged can be continued from, on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from psctl.agent.replica import StateReplica
from psctl.coordinator.journal import CoordinatorState, Journal, NoCopy, restore
from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import MessageReceived, Tick
from psctl.job import events
from psctl.job.leadership_messages import ReplicaBegin, ReplicaLog, ReplicaRecord, ReplicaSnapshot, ReplicaStored
from psctl.job.process_messages import Register
from psctl.process import journal_files
from psctl.process.journal_files import journal_path
from tests.helpers.driven_job import A0, A1, ORDER, DrivenJob


@pytest.fixture
def journal(tmp_path: Path) -> tuple[bytes, list[bytes]]:
    """A snapshot, and the records after it."""
    job, folder = DrivenJob(ORDER), tmp_path / "leader"
    folder.mkdir()
    made = Journal(folder, CoordinatorState(0, job.machine, MemberSessions()), NoCopy())
    records, before = [], 0
    for inputs in ([Tick()], [MessageReceived(A0, Register()), MessageReceived(A1, Register())]):
        made.append(inputs, job.now)
        data = journal_path(folder, 0).read_bytes()
        records.append(data[before:])
        before = len(data)
    return (folder / journal_files.SNAPSHOT).read_bytes(), records


def receive(replica: StateReplica, message: Any, data: bytes = b"") -> ReplicaStored | None:
    return replica.receive(message, memoryview(data))


@pytest.fixture
def replica(tmp_path: Path, journal: tuple[bytes, list[bytes]]) -> StateReplica:
    """A copy with the snapshot."""
    (tmp_path / "standby").mkdir()
    made = StateReplica(tmp_path / "standby")
    assert receive(made, ReplicaBegin(4, "key")) is None
    assert receive(made, ReplicaLog(4), b'{"event":"notice"}\n') is None
    half = len(journal[0]) // 2
    assert receive(made, ReplicaSnapshot(4, 0, False, 0), journal[0][:half]) is None
    assert receive(made, ReplicaSnapshot(4, 0, True, 0), journal[0][half:]) == ReplicaStored(4, 0)
    return made


def test_a_coordinator_continues_from_it(
    replica: StateReplica, journal: tuple[bytes, list[bytes]], tmp_path: Path
) -> None:
    for sequence, record in enumerate(journal[1], start=1):
        assert receive(replica, ReplicaRecord(4, sequence, True), record) == ReplicaStored(4, sequence)
    assert replica.release() == "key"
    replica.discard()
    assert restore(tmp_path / "standby").state.sessions.agents == [A0, A1]
    assert (tmp_path / "standby" / events.FILE).read_bytes() == b'{"event":"notice"}\n'


def test_a_record_that_does_not_follow_is_not_stored(
    replica: StateReplica, journal: tuple[bytes, list[bytes]], tmp_path: Path
) -> None:
    answer = receive(replica, ReplicaRecord(4, 2, True), journal[1][1])
    assert answer is not None
    assert "record 2 came after 0" in answer.problem
    assert receive(replica, ReplicaRecord(4, 1, True), journal[1][0]) is None, "the copy is over"
    assert list((tmp_path / "standby").iterdir()) == []
    assert replica.authority_key == ""


def test_messages_of_an_earlier_copy_are_ignored(replica: StateReplica, journal: tuple[bytes, list[bytes]]) -> None:
    assert receive(replica, ReplicaRecord(3, 1, True), journal[1][0]) is None
    assert receive(replica, ReplicaRecord(4, 1, True), journal[1][0]) == ReplicaStored(4, 1)


def test_a_full_disk_is_reported(
    replica: StateReplica, journal: tuple[bytes, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = journal_files.os.write
    monkeypatch.setattr(journal_files.os, "write", lambda file, data: real(file, data[: len(data) // 2]))
    answer = receive(replica, ReplicaRecord(4, 1, True), journal[1][0])
    assert answer is not None
    assert "bytes were written" in answer.problem


def test_nothing_is_left_after_the_job(replica: StateReplica, tmp_path: Path) -> None:
    replica.discard()
    assert list((tmp_path / "standby").iterdir()) == []
