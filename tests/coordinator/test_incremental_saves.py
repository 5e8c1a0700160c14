"""Checkpoints whose tables continue those of an earlier one: on the head, as copies, at a target."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from psctl.agent.coordinator_link import CheckpointCopies
from psctl.checkpoint.disk import Disk
from psctl.checkpoint.manifest import LINKED_FORMAT, Manifest
from psctl.checkpoint.reader import open_checkpoint, verify
from psctl.checkpoint.upload import CheckpointTarget
from psctl.coordinator.checkpoint_saver import CheckpointSaver
from psctl.coordinator.state.instructions import CheckpointCommitted, SendCheckpointCopy
from psctl.errors import CheckpointIncomplete
from psctl.job.checkpoint_messages import CheckpointCopyDone, SaveBegin, SavePart
from psctl.job.table_server_messages import TablesReady, TablesSaved, TablesWanted
from psctl.transport.protocol.authority import make_authority, sign
from psctl.types import Address, TensorSlice
from tests.coordinator.test_checkpoint_saver import AGENT, ORDER, Answers, Wire, commit
from tests.coordinator.test_copies_on_hosts import A1, A2, copies, job_of, written
from tests.helpers.driven_job import S0, W0, DrivenJob, sent

AUTHORITY = make_authority("digits-3", 1e9)
BASE, CHANGES = b"\1" * 50_000, b"\2" * 50


class Head:
    """A saver, and what two servers send it: the halves of a store."""

    def __init__(self, root: Path, **checkpoint: Any) -> None:
        self.answers, self.root = Answers(), root / "digits-3"
        order = replace(ORDER, checkpoint=replace(ORDER.checkpoint, **checkpoint))
        self.saver = CheckpointSaver(root, order, self.answers.all.put, functools.partial(sign, AUTHORITY))

    def save(self, step: int, base: int | None = None, *, servers: tuple[int, ...] = (0, 1)) -> CheckpointCommitted:
        self.saver.begin("worker/0", SaveBegin(step, [], {}))
        self.saver.end("worker/0", step)
        for server in servers:
            added = "" if base is None else f"+{step}"
            place = f"store/s/{server << 30:08x}-{(server + 1) << 30:08x}{added}"
            data = BASE if base is None else CHANGES
            slices = [TensorSlice(f"{place}/about", "uint8", (2,), 0, 2),
                      TensorSlice(f"{place}/integers/rows", "uint8", (len(data),), 0, len(data))]  # fmt: skip
            source = f"tables/{server}"
            self.saver.begin(source, SaveBegin(step, slices, tables=True, base=base))
            self.saver.part(source, SavePart(step, 0, 0, tables=True), memoryview(b"{}"))
            self.saver.part(source, SavePart(step, 1, 0, tables=True), memoryview(data))
            self.saver.end(source, step)
        self.saver.commit(commit(step))
        return self.answers.next()

    def folder(self, step: int) -> Path:
        return self.root / f"{step:010d}"

    def manifest(self, step: int) -> Manifest:
        return open_checkpoint(self.folder(step))


def inodes(folder: Path) -> dict[int, str]:
    return {path.stat().st_ino: path.name for path in folder.iterdir()}


def test_a_checkpoint_has_the_files_that_it_continues_and_needs_no_other_one(tmp_path: Path) -> None:
    head = Head(tmp_path)
    whole = head.save(500)
    assert (whole.problem, whole.written) == ("", whole.bytes)
    changed = head.save(600, 500)
    assert changed.problem == ""
    assert changed.bytes > 100_000 > 2000 > changed.written > 100
    assert inodes(head.folder(600)).keys() & inodes(head.folder(500)).keys()
    last = head.save(700, 600)
    assert last.can_continue
    assert not head.folder(500).exists(), "two are kept"
    manifest = head.manifest(700)
    assert (manifest.format, manifest.earlier_steps) == (LINKED_FORMAT, [500, 600])
    assert manifest.sizes().keys() == {
        "state.json", *(f"tables-{at}{of}.safetensors" for at in (0, 1) for of in ("", "-at-500", "-at-600")),
        "worker-0.safetensors",
    }  # fmt: skip
    assert verify(head.folder(700)) == []
    assert head.manifest(700).written == last.written
    assert head.save(800).problem == ""
    assert head.manifest(800).format == 1


def test_damage_of_a_linked_file_is_found_in_each_checkpoint_that_has_it(tmp_path: Path) -> None:
    head = Head(tmp_path)
    head.save(500)
    head.save(600, 500)
    with (head.folder(500) / "tables-1.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    assert "tables-1.safetensors" in verify(head.folder(500))[0]
    assert "tables-1-at-500.safetensors" in verify(head.folder(600))[0]


def test_changes_to_a_checkpoint_that_is_gone_are_given_up_and_nothing_is_based_on_it(tmp_path: Path) -> None:
    head = Head(tmp_path)
    head.save(500)
    found = head.save(700, 600)
    assert "0000000600" in found.problem
    assert not found.can_continue
    assert head.answers.next().problem == "it was given up"
    assert sorted(path.name for path in head.root.iterdir()) == ["0000000500"]


def test_a_store_with_a_hole_is_given_up(tmp_path: Path) -> None:
    found = Head(tmp_path).save(500, servers=(1,))
    assert "no part of it holds the hash values from 00000000 on of store s" in found.problem
    assert not found.can_continue
    found = Head(tmp_path).save(600, servers=(0,))
    assert "no part of it holds the hash values from 40000000 on of store s" in found.problem


def test_a_full_disk_leaves_the_base_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(tmp_path)
    head.save(500)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        found = head.save(600, 500)
    assert "no space left" in found.problem
    assert found.can_continue


def test_a_disk_without_links_copies_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    head = Head(tmp_path)
    head.save(500)
    assert head.save(600, 500).problem == ""
    assert verify(head.folder(600)) == []
    assert not inodes(head.folder(600)).keys() & inodes(head.folder(500)).keys()


def test_a_file_that_was_removed_cannot_be_linked(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(CheckpointIncomplete, match="was removed"):
        Disk().link(tmp_path / "none", tmp_path / "other", folder)
    os.close(folder)


# ---- copies --------------------------------------------------------------------------------------------------------


class CountingWire(Wire):
    """Counts the bytes that are sent."""

    bytes = 0

    def send(self, message: Any, payload: Any = None) -> bool:
        self.bytes += 0 if payload is None else len(payload)
        return super().send(message, payload)


def test_a_copy_shares_the_files_that_its_host_has(tmp_path: Path) -> None:
    head = Head(tmp_path / "head")
    wire = CountingWire(CheckpointCopies(tmp_path / "other", ORDER))
    there = tmp_path / "other" / "digits-3"
    head.save(500)
    head.saver.copy(500, AGENT, wire)  # type: ignore[arg-type]
    assert wire.done.get(timeout=20) == CheckpointCopyDone(500)
    before, wire.bytes = wire.bytes, 0
    head.save(600, 500)
    head.saver.copy(600, AGENT, wire, 500)  # type: ignore[arg-type]
    assert wire.done.get(timeout=20) == CheckpointCopyDone(600)
    assert wire.bytes < before - 90_000
    assert verify(there / "0000000600") == []
    assert inodes(there / "0000000600").keys() & inodes(there / "0000000500").keys()
    head.save(700, 600)
    head.saver.copy(700, AGENT, wire, 400)  # type: ignore[arg-type]
    assert wire.done.get(timeout=20) == CheckpointCopyDone(700), "without the head's 400 all is sent"
    assert verify(there / "0000000700") == []


def test_a_host_without_the_earlier_copy_or_with_another_one_refuses(tmp_path: Path) -> None:
    head = Head(tmp_path / "head")
    head.save(500)
    head.save(600, 500)
    wire = Wire(CheckpointCopies(tmp_path / "other", ORDER))
    head.saver.copy(600, AGENT, wire, 500)  # type: ignore[arg-type]
    assert "0000000500" in wire.done.get(timeout=20).problem
    head.saver.copy(500, AGENT, wire)  # type: ignore[arg-type]
    assert not wire.done.get(timeout=20).problem
    for name in ("tables-0.safetensors", "tables-1.safetensors"):
        with (tmp_path / "other" / "digits-3" / "0000000500" / name).open("r+b") as file:
            file.truncate(10)
    head.saver.copy(600, AGENT, wire, 500)  # type: ignore[arg-type]
    assert "ends at byte 10" in wire.done.get(timeout=20).problem
    assert not (tmp_path / "other" / "digits-3" / "0000000600").exists()


def with_tables(**order: Any) -> DrivenJob:
    job = job_of(2)
    job.receive(W0, TablesWanted())
    job.receive(S0, TablesReady(Address("h0", 7)))
    return job


def test_a_copy_that_shares_files_is_sent_completely_when_it_fails() -> None:
    job = with_tables()
    assert copies(written(job)) == [SendCheckpointCopy(500, A1), SendCheckpointCopy(500, A2)]
    job.receive(A1, CheckpointCopyDone(500))
    assert copies(written(job, 600)) == [SendCheckpointCopy(600, A1, 500), SendCheckpointCopy(600, A2)]
    new = job.receive(A1, CheckpointCopyDone(600, "no earlier checkpoint here has it"))
    assert copies(new) == [SendCheckpointCopy(600, A1)]
    new = job.receive(A1, CheckpointCopyDone(600, "no space left"))
    assert [each.agent.rank for each in copies(new)] == [3]


# ---- what servers are told -----------------------------------------------------------------------------------------


def test_servers_are_told_of_the_newest_checkpoint_that_they_may_continue() -> None:
    job = with_tables()
    job.machine.job.order = replace(
        job.machine.job.order, checkpoint=replace(job.machine.job.order.checkpoint, full_every=5)
    )

    def told(answer: CheckpointCommitted) -> list[int]:
        job.saves(answer.step)
        return [message.step for _, message in sent(job.handle(answer), TablesSaved)]

    assert told(CheckpointCommitted(500, "/c/500")) == [500]
    assert told(CheckpointCommitted(600, problem="no space left")) == []
    assert told(CheckpointCommitted(700, problem="500 is gone", can_continue=False)) == [-1]
    assert told(CheckpointCommitted(800, "/c/800", can_continue=False)) == [-1]


# ---- at a target ---------------------------------------------------------------------------------------------------


def test_a_target_copies_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    head = Head(tmp_path / "head")
    head.save(500)
    head.save(600, 500)
    target = CheckpointTarget(f"file://{tmp_path}/target")
    uploaded: list[str] = []
    files = type(fsspec.filesystem("file"))
    put = files.put_file

    def put_file(self: Any, source: str, to: str, *more: Any, **options: Any) -> Any:
        uploaded.append(source.rsplit("/", 1)[-1])
        return put(self, source, to, *more, **options)

    monkeypatch.setattr(files, "put_file", put_file)
    target.upload(head.folder(500))
    uploaded.clear()
    target.upload(head.folder(600))
    assert sorted(uploaded) == [
        "manifest.json", "state.json", "tables-0.safetensors", "tables-1.safetensors", "worker-0.safetensors",
    ]  # fmt: skip
    fetched = target.fetch("digits-3", 600, tmp_path / "back" / "0000000600")
    assert fetched == head.manifest(600)
    head.save(700, 600)
    target.remove("digits-3", 600)
    uploaded.clear()
    target.upload(head.folder(700))
    assert len(uploaded) == 9, "what is gone there is uploaded"
    assert target.fetch("digits-3", 700, tmp_path / "back" / "0000000700") == head.manifest(700)
