"""Checkpoints found, proved, brought here and carried to another host, through the tool that runs there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from psctl import errors
from psctl.checkpoint.reader import verify
from psctl.checkpoint.writer import CheckpointWriter
from psctl.launch.checkpoints import checkpoint_actions
from psctl.launch.checkpoints.checkpoint_listing import holders, list_all
from psctl.launch.clusters import ChosenCluster
from psctl.launch.home import Home, HostRecord, JobRecord, KnownCluster
from psctl.remote.fleet import Fleet
from psctl.remote.local import LocalShell
from psctl.types import HostName, TensorSlice

ROOT = Path(__file__).resolve().parent.parent.parent
JOB_FILE = "name: digits\nscript: train.py\ncheckpoint: {keep_best: {metric: accuracy, mode: max}}\n"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[LocalShell]:
    opened = LocalShell("here", str(tmp_path))
    yield opened
    opened.close()


def record(workdir: Path) -> JobRecord:
    host = HostRecord("here", str(workdir), str(workdir / "jobs/digits-1/here"), sys.executable, str(ROOT))
    return JobRecord(
        job="digits-1", name="digits", created=0.0, cluster=KnownCluster("lab", "", "", 0.0), hosts=[host],
        job_file=JOB_FILE, job_source="job.yaml", job_folder="/", code_hash="c0de",
        checkpoints=str(workdir / "checkpoints"),
    )  # fmt: skip


def save(workdir: Path, step: int, accuracy: float) -> Path:
    folder = workdir / "checkpoints" / "digits-1" / f"{step:010d}"
    writer = CheckpointWriter(folder, "digits-1", step)
    writer.open_file("worker/0", [TensorSlice("param/w", "float32", (4,), 0, 4)])
    writer.write_part("worker/0", 0, 0, bytes(range(16)))
    writer.finish_file("worker/0")
    writer.commit(
        time=100.0 + step, world=2, servers=1, epoch=1, strategy="ps", update="server", seed=0, code_hash="c0de",
        metrics={"accuracy": accuracy}, job_file=JOB_FILE, state={"step": step},
    )  # fmt: skip
    return folder


def test_a_checkpoint_is_found_by_step_latest_and_best(shell: LocalShell, tmp_path: Path) -> None:
    job = record(tmp_path)
    for step, accuracy in ((10, 0.9), (20, 0.8), (30, 0.7)):
        save(tmp_path, step, accuracy)
    found = checkpoint_actions.locate(shell, job, "20")
    folder = Path(found.folder)
    assert found.id == "digits-1@20"
    assert {"name": "param/w", "dtype": "float32", "shape": [4]} in found.brief["tensors"]
    assert sorted(found.brief["files"]) == sorted(path.name for path in folder.iterdir())
    assert (found.brief["bytes"], found.brief["folder"]) == (found.manifest.bytes, str(folder))
    assert checkpoint_actions.locate(shell, job, "latest").step == 30
    assert checkpoint_actions.locate(shell, job, "best").step == 10
    with pytest.raises(errors.NoSuchCheckpoint, match="there are steps: 10, 20, 30"):
        checkpoint_actions.locate(shell, job, "7")
    assert [row["step"] for row in checkpoint_actions.prune(shell, job, 1)] == [20]


def test_a_damaged_one_is_named_and_passed_over(shell: LocalShell, tmp_path: Path) -> None:
    job = record(tmp_path)
    save(tmp_path, 10, 0.9)
    folder = save(tmp_path, 20, 0.8)
    victim = next(folder.glob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(errors.CheckpointCorrupt, match=victim.name):
        checkpoint_actions.verify(shell, checkpoint_actions.locate(shell, job, "20"))
    assert victim.name in checkpoint_actions.examine(shell, job, "20")["problems"][0]
    told: list[str] = []
    found = checkpoint_actions.newest(shell, job, told.append)
    assert found is not None
    assert found.step == 10
    assert "digits-1@20 skipped" in told[0]
    (folder / "manifest.json").unlink()
    with pytest.raises(errors.CheckpointIncomplete):
        checkpoint_actions.locate(shell, job, "20")


def test_it_is_brought_here_whole(shell: LocalShell, tmp_path: Path) -> None:
    save(tmp_path / "w", 10, 0.9)
    found = checkpoint_actions.locate(shell, record(tmp_path / "w"), "10")
    target = checkpoint_actions.pull(shell, found, tmp_path / "mine")
    assert target == tmp_path / "mine" / "digits-1@10"
    assert verify(target) == []
    with pytest.raises(errors.UsageError, match="exists already"):
        checkpoint_actions.pull(shell, found, tmp_path / "mine")
    out = tmp_path / "model.safetensors"
    assert checkpoint_actions.export(shell, found, out) == out.stat().st_size
    assert [path.name for path in (tmp_path / "w/checkpoints/digits-1").iterdir()] == ["0000000010"]


def test_it_is_carried_to_a_host_that_lacks_it_and_a_good_copy_there_is_used(shell: LocalShell, tmp_path: Path) -> None:
    save(tmp_path / "old", 10, 0.9)
    found = checkpoint_actions.locate(shell, record(tmp_path / "old"), "10")
    other = record(tmp_path / "new").head
    root = str(tmp_path / "new" / "checkpoints")
    folder = checkpoint_actions.bring(shell, found, shell, other)
    assert folder == f"{root}/digits-1/0000000010"
    assert verify(Path(folder)) == []
    before = Path(folder).stat().st_ino
    assert checkpoint_actions.bring(shell, found, shell, other) == folder
    assert Path(folder).stat().st_ino == before


def test_a_copy_on_another_host_replaces_one_of_a_lost_or_damaged_head(tmp_path: Path) -> None:
    head, other = record(tmp_path / "head"), record(tmp_path / "other")
    job = msgspec.structs.replace(
        head, hosts=[head.head, msgspec.structs.replace(other.head, name="other")], cluster=KnownCluster("x", "", "", 0)
    )
    good = save(tmp_path / "other", 10, 0.9)
    reached = {"here": True}

    def connect(chosen: ChosenCluster, names: Sequence[str] | None) -> Fleet:
        shells = {HostName(name): LocalShell(name, str(tmp_path)) for name in names or () if reached.get(name, True)}
        gone = errors.HostUnreachable("here: no route", where="here")
        return Fleet(dict(shells), {HostName(name): gone for name in names or () if name not in shells})

    home = Home(tmp_path)
    assert checkpoint_actions.find(home, job, "latest", connect).host.name == "other"
    torn = save(tmp_path / "head", 10, 0.9)
    assert checkpoint_actions.find(home, job, "10", connect).host.name == "here"
    victim = next(torn.glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert checkpoint_actions.find(home, job, "10", connect).host.name == "other"
    reached["here"] = False
    assert checkpoint_actions.find(home, job, "10", connect).folder == str(good)
    (good / "manifest.json").unlink()
    with pytest.raises(errors.HostUnreachable, match="no route"):
        checkpoint_actions.find(home, job, "10", connect)


def test_copies_are_listed_where_the_head_is_not_reached(tmp_path: Path) -> None:
    head, other = record(tmp_path / "head"), record(tmp_path / "other")
    job = msgspec.structs.replace(head, hosts=[head.head, msgspec.structs.replace(other.head, name="other")])
    lone = msgspec.structs.replace(head, job="digits-2", hosts=[head.head])
    save(tmp_path / "head", 10, 0.9)
    save(tmp_path / "head", 20, 0.9)
    save(tmp_path / "other", 20, 0.9)
    reached = {"here", "other"}

    def connect(_: ChosenCluster, names: Sequence[str] | None) -> Fleet:
        shells = {HostName(name): LocalShell(name, str(tmp_path)) for name in names or () if name in reached}
        failed = {HostName(name): errors.HostUnreachable(f"{name}: no route") for name in names or ()}
        return Fleet(dict(shells), {name: error for name, error in failed.items() if name not in shells})

    def listed() -> tuple[list[tuple[str, str]], list[str], list[str]]:
        found = list_all(Home(tmp_path), [job, lone], connect)
        return [(row["id"], row["host"]) for row in found.rows], found.notes, list(found.missing)

    assert listed() == ([("digits-1@10", "here"), ("digits-1@20", "here")], [], [])
    reached.remove("here")
    note = "digits-1: its head here is not reached (no route); these are the copies on other"
    assert listed() == ([("digits-1@20", "other")], [note], ["digits-2"])
    reached.clear()
    assert listed() == ([], [], ["digits-1", "digits-2"])


def test_each_checkpoint_is_listed_with_the_hosts_that_hold_it_and_pruned_on_all(tmp_path: Path) -> None:
    names = ("here", "second", "third")
    records = {name: record(tmp_path / name) for name in names}
    hosts = [msgspec.structs.replace(records[name].head, name=name) for name in names]
    job = msgspec.structs.replace(records["here"], hosts=hosts)
    for name, steps in (("here", (10, 20, 30)), ("second", (20, 30)), ("third", (10, 20))):
        for step in steps:
            save(tmp_path / name, step, step / 100)
    torn = tmp_path / "second/checkpoints/digits-1/0000000030/manifest.json"
    torn.rename(torn.with_name("gone"))
    lost: set[str] = set()

    def connect(_: ChosenCluster, names: Sequence[str] | None) -> Fleet:
        wanted = [HostName(name) for name in names or ()]
        failed = {name: errors.HostUnreachable(f"{name}: no route") for name in wanted if name in lost}
        return Fleet({name: LocalShell(name) for name in wanted if name not in lost}, failed)  # type: ignore[arg-type]

    home = Home(tmp_path)
    listed = {row["step"]: row["hosts"] for row in list_all(home, [job], connect).rows}
    assert listed == {10: ["here", "third"], 20: ["here", "second", "third"], 30: ["here"]}
    assert holders(home, job, "here", 20, connect) == ["here", "second", "third"]

    lost.add("here")
    listed = {row["step"]: row["hosts"] for row in list_all(home, [job], connect).rows}
    assert listed == {10: ["third"], 20: ["second", "third"], 30: []}, "a step's row is there once"
    torn.with_name("gone").rename(torn)
    assert checkpoint_actions.find(home, job, "latest", connect).id == "digits-1@30", "the newest of all copies"
    lost.add("second")
    assert checkpoint_actions.find(home, job, "latest", connect).host.name == "third"
    assert checkpoint_actions.find(home, job, "best", connect).step == 20

    lost -= {"here", "second"}
    lost.add("third")
    with connect(None, ["second", "third"]) as fleet:  # type: ignore[arg-type]
        removed, failed = checkpoint_actions.prune_copies(fleet, job, 1)
    assert removed == {"second": [20]}
    assert failed == {"third": "third: no route"}
