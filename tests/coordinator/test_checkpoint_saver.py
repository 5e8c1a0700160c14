"""Checkpoints as they come together on the head and as copies on another host."""

from __future__ import annotations

import functools
import os
import queue
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from psctl.agent.coordinator_link import CheckpointCopies
from psctl.checkpoint import manifest
from psctl.checkpoint.reader import open_checkpoint, read_state, verify
from psctl.coordinator import checkpoint_saver
from psctl.coordinator.checkpoint_saver import CheckpointSaver, folder_of
from psctl.coordinator.state.instructions import CheckpointCommitted, CheckpointCopyFailed, CommitCheckpoint
from psctl.errors import PeerLost
from psctl.job.checkpoint_messages import CheckpointCopyDone, SaveBegin, SavePart
from psctl.job.training_messages import Resume
from psctl.orders import CheckpointOrder
from psctl.transport.protocol.authority import has_signed, make_authority, sign
from psctl.types import Member, TensorSlice
from tests.helpers.orders import make_hosts, make_order

AGENT = Member("agent", 1)

ORDER = make_order(
    make_hosts(1), name="digits-3", seed=7, job_file="name: digits",
    checkpoint=CheckpointOrder(None, 500, 0.0, 2, None, True, 1),
)  # fmt: skip


class Answers:
    """What a saver answered."""

    def __init__(self) -> None:
        self.all: queue.SimpleQueue[CheckpointCommitted | CheckpointCopyFailed] = queue.SimpleQueue()

    def next(self) -> Any:
        return self.all.get(timeout=20)


class Wire:
    """A peer whose other end is another host's receiver of copies."""

    def __init__(self, copies: CheckpointCopies) -> None:
        self.copies = copies
        self.done: queue.SimpleQueue[CheckpointCopyDone] = queue.SimpleQueue()

    def send(self, message: Any, payload: Any = None) -> bool:
        for answer in self.copies.receive(message, memoryview(payload) if payload is not None else None):
            self.done.put(answer)
        return True

    def pending(self) -> int:
        return 0


class CutWire(Wire):
    """The same, but the link is cut."""

    def pending(self) -> int:
        return 1 << 30

    def flush(self, timeout: float) -> None:
        raise PeerLost("agent/1 is lost")


def piece(name: str, start: int, stop: int) -> TensorSlice:
    return TensorSlice(name, "float32", (4,), start, stop)


def save(saver: CheckpointSaver, step: int, *, whole: bool = True) -> None:
    saver.begin("worker/0", SaveBegin(step, [], {"position": 3}))
    saver.begin("server/0", SaveBegin(step, [piece("param/w", 0, 4)]))
    saver.end("worker/0", step)
    saver.part("server/0", SavePart(step, 0, 0), memoryview(b"\1" * 8))
    if whole:
        saver.part("server/0", SavePart(step, 0, 8), memoryview(b"\2" * 8))
    saver.end("server/0", step)


AUTHORITY = make_authority("digits-3", 1e9)


def commit(step: int) -> CommitCheckpoint:
    return CommitCheckpoint(step, 1, 2, 1, "ps", "server", {"loss": 0.5})


@pytest.fixture
def head(tmp_path: Path) -> tuple[CheckpointSaver, Answers, Path]:
    answers = Answers()
    return (
        CheckpointSaver(tmp_path / "head", ORDER, answers.all.put, functools.partial(sign, AUTHORITY)),
        answers,
        tmp_path / "head",
    )


def test_parts_of_several_senders_become_one_verified_checkpoint(head: tuple[CheckpointSaver, Answers, Path]) -> None:
    saver, answers, root = head
    save(saver, 500)
    saver.commit(commit(500))
    written = answers.next()
    assert (written.step, written.problem, written.path) == (500, "", str(root / "digits-3" / "0000000500"))
    manifest = open_checkpoint(Path(written.path))
    assert (manifest.metrics, manifest.world, manifest.seed, manifest.job_file) == ({"loss": 0.5}, 2, 7, "name: digits")
    assert read_state(Path(written.path), manifest) == {"position": 3}


def test_a_manifest_is_signed_by_the_authority_of_its_job(head: tuple[CheckpointSaver, Answers, Path]) -> None:
    saver, answers, _ = head
    save(saver, 500)
    saver.commit(commit(500))
    data = (Path(answers.next().path) / "manifest.json").read_bytes()
    found = manifest.signature_of(data)
    assert found is not None
    assert has_signed(AUTHORITY.certificate_pem, *found)
    assert not has_signed(make_authority("digits-3", 1e9).certificate_pem, *found)
    assert not has_signed(AUTHORITY.certificate_pem, found[0] + b"x", found[1])


def test_a_checkpoint_with_a_hole_is_given_up_and_leaves_nothing(head: tuple[CheckpointSaver, Answers, Path]) -> None:
    saver, answers, root = head
    save(saver, 500, whole=False)
    assert "did not send bytes [8:16] of param/w" in answers.next().problem
    saver.commit(commit(500))
    assert answers.next().problem == "it was given up"
    assert list((root / "digits-3").iterdir()) == []


def test_a_checkpoint_without_a_parameter_of_the_model_is_given_up(head: tuple[CheckpointSaver, Answers, Path]) -> None:
    saver, answers, root = head
    save(saver, 500)
    saver.commit(replace(commit(500), parameters=["w", "bias"]))
    assert answers.next().problem == "no part of it holds bias: shards moved while it was taken"
    assert list((root / "digits-3").iterdir()) == []


def test_a_part_that_comes_when_the_checkpoint_is_made_whole_begins_no_other(
    head: tuple[CheckpointSaver, Answers, Path],
) -> None:
    saver, answers, root = head
    save(saver, 500)
    saver.commit(commit(500))
    saver.begin("server/1", SaveBegin(500, []))
    saver.end("server/1", 500)
    assert answers.next().problem == ""
    assert [path.name for path in (root / "digits-3").iterdir()] == ["0000000500"]


def test_a_commit_waits_for_a_part_that_is_still_arriving(head: tuple[CheckpointSaver, Answers, Path]) -> None:
    saver, answers, _ = head
    save(saver, 500)
    saver.begin("server/1", SaveBegin(500, [piece("param/late", 0, 4)]))
    saver.commit(commit(500))
    with pytest.raises(queue.Empty):
        answers.all.get(timeout=0.2)
    saver.part("server/1", SavePart(500, 0, 0), memoryview(b"\3" * 16))
    saver.end("server/1", 500)
    written = answers.next()
    assert written.problem == ""
    assert {piece.name for file in open_checkpoint(Path(written.path)).files for piece in file.slices} >= {"param/late"}


@pytest.mark.parametrize("ends", ["its connection breaks", "nothing more comes", "it sends too little"])
def test_a_commit_gives_up_a_part_that_does_not_end(
    head: tuple[CheckpointSaver, Answers, Path], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, answers, root = head
    monkeypatch.setattr(checkpoint_saver, "PART_TIMEOUT", 0.2 if ends == "nothing more comes" else 60.0)
    save(saver, 500)
    saver.begin("server/1", SaveBegin(500, [piece("param/late", 0, 4)]))
    saver.commit(commit(500))
    assert not saver.discard(500), "its commit answers"
    if ends == "its connection breaks":
        saver.interrupt("server/1", 500)
    elif ends == "it sends too little":
        saver.end("server/1", 500)
    assert re.search("did not send (all|bytes)", answers.next().problem)
    assert list((root / "digits-3").iterdir()) == []
    with pytest.raises(queue.Empty):
        answers.all.get(timeout=0.1)


def test_old_ones_are_pruned(head: tuple[CheckpointSaver, Answers, Path]) -> None:
    saver, answers, root = head
    for step in (1, 2, 3):
        save(saver, step)
        saver.commit(commit(step))
        answers.next()
    assert sorted(path.name for path in (root / "digits-3").iterdir()) == ["0000000002", "0000000003"]


def test_a_copy_is_proved_and_pruned_on_its_host(head: tuple[CheckpointSaver, Answers, Path], tmp_path: Path) -> None:
    saver, answers, _ = head
    wire = Wire(CheckpointCopies(tmp_path / "other", ORDER))
    for step in (1, 2, 3):
        save(saver, step)
        saver.commit(commit(step))
        answers.next()
        saver.copy(step, AGENT, wire)  # type: ignore[arg-type]
        assert wire.done.get(timeout=20) == CheckpointCopyDone(step)
    assert answers.all.empty(), "its agent answers for a copy that was sent"
    there = sorted((tmp_path / "other" / "digits-3").iterdir())
    assert [path.name for path in there] == ["0000000002", "0000000003"]
    assert verify(there[1]) == []


def test_a_copy_whose_link_is_cut_or_whose_host_is_lost_is_reported(
    head: tuple[CheckpointSaver, Answers, Path], tmp_path: Path
) -> None:
    saver, answers, _ = head
    copies = CheckpointCopies(tmp_path / "other", ORDER)
    save(saver, 1)
    saver.commit(commit(1))
    answers.next()
    saver.copy(1, AGENT, CutWire(copies))  # type: ignore[arg-type]
    assert answers.next() == CheckpointCopyFailed(1, AGENT, "agent/1 is lost")
    saver.copy(1, AGENT, None)
    assert answers.next().problem == "its host is not connected"
    copies.discard()
    assert list((tmp_path / "other" / "digits-3").iterdir()) == []


def test_more_checkpoints_than_can_be_written_at_once_are_given_up(tmp_path: Path) -> None:
    answers = Answers()
    saver = CheckpointSaver(tmp_path, ORDER, answers.all.put, functools.partial(sign, AUTHORITY))
    for step in range(70):
        saver.begin("worker/0", SaveBegin(step, []))
    assert {answers.next().problem for _ in range(6)} == {"64 checkpoints are being written already"}
    assert len(list((tmp_path / "digits-3").iterdir())) == 64
    saver.part("worker/0", SavePart(69, 0, 0), memoryview(b"1"))  # what still comes of it is dropped
    assert answers.all.empty()
    for step in range(64):
        saver.discard(step)


def test_a_job_that_starts_removes_what_killed_writers_left_on_its_hosts(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    for root in (tmp_path / "head", tmp_path / "other"):
        (root / "older-1" / f"0000000500.{os.uname().nodename}.{process.pid}.partial").mkdir(parents=True)
    CheckpointSaver(tmp_path / "head", ORDER, Answers().all.put, functools.partial(sign, AUTHORITY))
    CheckpointCopies(tmp_path / "other", ORDER)
    for root in (tmp_path / "head", tmp_path / "other"):
        assert list((root / "older-1").iterdir()) == []


def test_the_folder_that_a_job_continues_from_follows_from_the_checkpoints_name(tmp_path: Path) -> None:
    order = make_order(
        make_hosts(1), name="digits-4", resume="/elsewhere/digits-3/0000000500", resume_id="digits-3@500"
    )
    given = Resume("digits-3@500", 500, {}, [])
    assert folder_of(tmp_path, order, None) is None
    assert folder_of(tmp_path, order, given) == Path("/elsewhere/digits-3/0000000500")
    assert folder_of(tmp_path, order, replace(given, checkpoint="digits-4@7", step=7)) == (
        tmp_path / "digits-4" / "0000000007"
    )
