"""The journal of the coordinator: a successor continues as its predecessor would have, or says why not."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from psctl.coordinator import journal as journal_module
from psctl.coordinator.journal import CoordinatorState, Journal, JournalUnreadable, NoCopy, apply, clock_of, restore
from psctl.coordinator.sessions import MemberSessions
from psctl.coordinator.state.instructions import Input, Instruction, MessageReceived, Tick
from psctl.job.process_messages import OutputLines, Register, StopWanted
from psctl.process import journal_files
from psctl.process.journal_files import JOURNAL, SNAPSHOT
from tests.helpers.any_inputs import ROOMY, TIMED, at_their_times
from tests.helpers.driven_job import A0, A1, ORDER, W0, DrivenJob, S, training
from tests.hypothesis_profile import examples

ROOT = Path(__file__).parents[2]


class JournaledJob:
    """A job whose inputs are in a journal; instructions are recorded.

    Args:
        folder: of the journal.
        job: the job.
    """

    def __init__(self, folder: Path, job: DrivenJob) -> None:
        self.job, self.sessions = job, MemberSessions()
        self.journal = Journal(folder, CoordinatorState(0, job.machine, self.sessions), NoCopy())
        self.last: list[Instruction] = []
        """The instructions of the last input."""

    def handle(self, each: Input) -> None:
        self.journal.append([each], self.job.now)
        self.sessions.on_input(each)
        self.last = self.job.handle(each)
        for instruction in self.last:
            self.sessions.on_instruction(instruction)


def messages(sessions: MemberSessions) -> dict[str, tuple[int, int, list[Any]]]:
    """Return all sessions: messages received, the number of the next one, and those that are kept."""
    return {
        str(member): (session.received, session.next, session.unacknowledged())
        for member, session in sessions.by_member.items()
    }


@pytest.fixture
def job(tmp_path: Path) -> JournaledJob:
    """A job that has registered."""
    made = JournaledJob(tmp_path, DrivenJob(ORDER))
    for agent in (A0, A1):
        made.handle(MessageReceived(agent, Register()))
    return made


@settings(max_examples=examples(100), deadline=None)
@given(TIMED, TIMED)
def test_a_successor_continues_as_its_predecessor_would_have(
    tmp_path_factory: pytest.TempPathFactory, before: list[tuple[float, Input]], after: list[tuple[float, Input]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "MOST_INPUTS", 7)
        folder = tmp_path_factory.mktemp("journal")
        first = JournaledJob(folder, training(ROOMY))
        for each in at_their_times(first.job, before):
            first.handle(each)
        found = restore(folder)
        assert found.instructions in ([], first.last), "those before a snapshot were carried out"
        assert messages(found.state.sessions) == messages(first.sessions)
        for each in at_their_times(first.job, after):
            now = first.job.now
            first.handle(each)
            assert apply(found.state, each, now) == first.last
        assert messages(found.state.sessions) == messages(first.sessions)


def test_a_record_that_was_not_written_whole_is_no_input(job: JournaledJob, tmp_path: Path) -> None:
    expected = messages(job.sessions)
    job.handle(MessageReceived(A0, Register()))
    (path,) = tmp_path.glob(f"{JOURNAL}.*")
    whole = path.read_bytes()
    for size in (1, 8, 20):
        path.write_bytes(whole[:-size])
        assert messages(restore(tmp_path).state.sessions) == expected


def test_inputs_after_a_damaged_one_are_not_applied(job: JournaledJob, tmp_path: Path) -> None:
    (path,) = tmp_path.glob(f"{JOURNAL}.*")
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    assert messages(restore(tmp_path).state.sessions) == {}


@pytest.mark.parametrize("damage", ["removed", "empty", "flipped", "foreign"])
def test_a_damaged_snapshot_is_named(job: JournaledJob, tmp_path: Path, damage: str) -> None:
    path = tmp_path / SNAPSHOT
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= damage == "flipped"
    path.write_bytes(b"" if damage == "empty" else data)
    if damage == "removed":
        path.unlink()
    if damage == "foreign":
        foreign = pickle.dumps(Path("/etc/passwd"))
        head = len(foreign).to_bytes(4, "little") + zlib.crc32(foreign).to_bytes(4, "little")
        path.write_bytes(head + foreign)
    with pytest.raises(JournalUnreadable, match=str(path)):
        restore(tmp_path)


def test_a_new_snapshot_replaces_the_journal_before_it(
    job: JournaledJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_INPUTS", 10)
    for _ in range(35):
        job.handle(Tick())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{JOURNAL}.3", SNAPSHOT]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    job.journal.close()
    assert list(tmp_path.iterdir()) == []


def test_many_bytes_of_inputs_lead_to_a_new_snapshot_too(job: JournaledJob, tmp_path: Path) -> None:
    line = "x" * 60_000
    for _ in range(200):
        job.handle(MessageReceived(A0, OutputLines(W0, "stdout", [line])))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1.1 * journal_module.MOST_BYTES + (1 << 20)
    assert messages(restore(tmp_path).state.sessions)["agent/0"][0] == 200


def test_while_the_disk_is_full_there_is_no_journal(
    job: JournaledJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(journal_files.os, "write", lambda file, data: real(file, data[: len(data) // 2]))
    job.handle(Tick())
    assert not job.journal.is_whole
    assert list(tmp_path.iterdir()) == [], "a part of the inputs would lead to another state"
    with pytest.raises(JournalUnreadable, match="No such file"):
        restore(tmp_path)
    monkeypatch.undo()
    with monkeypatch.context() as almost_full:
        almost_full.setattr(journal_module, "SPACE", 1 << 60)
        for _ in range(journal_module.RETRY):
            job.handle(Tick())
    assert not job.journal.is_whole
    for _ in range(journal_module.RETRY):
        job.handle(Tick())
    assert job.journal.is_whole
    assert restore(tmp_path).state.machine.job.registered == {0, 1}


def test_a_successors_journal_has_another_number(job: JournaledJob, tmp_path: Path) -> None:
    found = restore(tmp_path)
    found.state.number += 1
    again = Journal(tmp_path, found.state, NoCopy())
    again.append([MessageReceived(S[0], Register())], found.time)
    twice = restore(tmp_path)
    assert twice.state.number == 1
    assert msgspec.structs.asdict(twice)["time"] == found.time


def test_the_instructions_of_all_inputs_of_the_last_record_are_repeated(job: JournaledJob, tmp_path: Path) -> None:
    alone = restore(tmp_path).state
    given = [Tick(), MessageReceived(A1, StopWanted(False, False, "psctl stop")), Tick()]
    expected = [each for one in given for each in apply(alone, one, job.job.now)]
    job.journal.append(given, job.job.now)
    assert expected
    assert restore(tmp_path).instructions == expected


def test_on_another_host_the_jobs_time_goes_on(job: JournaledJob, tmp_path: Path) -> None:
    """Its monotonic clock says something else: the age of the journal counts."""
    found = restore(tmp_path)
    (path,) = tmp_path.glob(f"{JOURNAL}.*")
    assert clock_of(tmp_path, found, 0) == 0.0, "the host of the snapshot"
    for age, expected in ((7.0, 7.0), (1e6, 600.0), (-50.0, 0.0)):
        os.utime(path, (time.time() - age, time.time() - age))
        assert time.monotonic() + clock_of(tmp_path, found, 1) - found.time == pytest.approx(expected, abs=0.5)
