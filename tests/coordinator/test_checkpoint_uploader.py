"""Uploads of checkpoints: behind saving, again after a refusal, and pruned at the target."""

from __future__ import annotations

import functools
import queue
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from psctl.checkpoint.reader import verify
from psctl.checkpoint.upload import CheckpointTarget
from psctl.coordinator.checkpoint_saver import CheckpointSaver
from psctl.coordinator.checkpoint_uploader import CheckpointUploader
from psctl.coordinator.state.instructions import CheckpointUploadEnded, RestorableFound
from psctl.transport.protocol.authority import sign
from tests.coordinator.test_checkpoint_saver import AUTHORITY, ORDER, Answers, commit, save

pytest.importorskip("fsspec")


class Uploads:
    """A saver and an uploader to a folder that may refuse."""

    def __init__(self, tmp_path: Path, keep: int) -> None:
        self.shelf = tmp_path / "shelf"
        order = replace(ORDER, checkpoint=replace(ORDER.checkpoint, to=str(self.shelf), keep=keep))
        self.written, self.root = Answers(), tmp_path / "head"
        self.ended: queue.SimpleQueue[CheckpointUploadEnded] = queue.SimpleQueue()
        self.saver = CheckpointSaver(self.root, order, self.written.all.put, functools.partial(sign, AUTHORITY))
        self.uploader = CheckpointUploader(self.root / order.name, order, self.ended.put, pauses=(0.01,))

    def write(self, step: int) -> None:
        save(self.saver, step)
        self.saver.commit(commit(step))
        assert self.written.next().problem == ""

    def upload(self, step: int) -> CheckpointUploadEnded:
        self.uploader.upload(step)
        return self.ended.get(timeout=20)

    @property
    def steps(self) -> list[int]:
        return CheckpointTarget(str(self.shelf)).steps("digits-3")


def test_uploaded_checkpoints_are_pruned_as_on_the_head(tmp_path: Path) -> None:
    job = Uploads(tmp_path, keep=2)
    for step in (1, 2, 3):
        job.write(step)
        assert job.upload(step) == CheckpointUploadEnded(step, f"{job.shelf}/digits-3/{step:010d}")
    assert job.steps == [2, 3]
    assert verify(job.shelf / "digits-3" / "0000000003") == []


def test_what_a_target_refused_is_uploaded_when_it_takes_the_next_one(tmp_path: Path) -> None:
    job = Uploads(tmp_path, keep=3)
    job.shelf.write_text("a file is in the way")
    job.write(1)
    refused = job.upload(1)
    assert refused.place == ""
    assert str(job.shelf) in refused.problem
    job.shelf.unlink()
    job.write(2)
    assert {job.upload(2).step, job.ended.get(timeout=20).step} == {1, 2}
    assert job.steps == [1, 2]


def test_a_checkpoint_that_was_removed_meanwhile_is_named(tmp_path: Path) -> None:
    job = Uploads(tmp_path, keep=1)
    job.write(1)
    job.write(2)
    assert job.upload(1) == CheckpointUploadEnded(1, problem="it was removed before it was uploaded")
    assert job.upload(2).problem == ""
    assert job.steps == [2]


def test_a_host_without_checkpoints_continues_from_the_newest_one_at_the_target(tmp_path: Path) -> None:
    job = Uploads(tmp_path, keep=2)
    found: list[Path | None] = []
    job.saver.find_restorable(found.append)
    assert job.written.next() == RestorableFound(None), "the target has none yet"
    for step in (1, 2):
        job.write(step)
        job.upload(step)
    shutil.rmtree(job.root)
    job.saver.find_restorable(found.append)
    answer = job.written.next()
    assert (answer.resume.step, answer.problem) == (2, "")
    assert found == [None, job.root / "digits-3" / "0000000002"]
