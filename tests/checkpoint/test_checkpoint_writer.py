"""A checkpoint is complete or absent: written bytes are read back, and an incomplete one is not listed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl import errors
from psctl.checkpoint.catalog import find_newest_verified, list_checkpoints
from psctl.checkpoint.disk import Disk
from psctl.checkpoint.manifest import whole_tensors
from psctl.checkpoint.partial_files import ReceivedRanges
from psctl.checkpoint.reader import open_checkpoint, read_slice, read_state, verify
from psctl.checkpoint.writer import EXPORT_SUFFIX, CheckpointWriter, remove_abandoned, remove_abandoned_for
from psctl.types import TensorSlice
from tests.hypothesis_profile import examples


def contents(folder, manifest):
    return {t.name: b"".join(data for _, data in read_slice(folder, manifest, t)) for t in whole_tensors(manifest)}


def test_a_written_checkpoint_holds_every_tensor_to_the_byte(save, tmp_path):
    folder, manifest = save(tmp_path)
    assert open_checkpoint(folder) == manifest
    assert verify(folder) == []
    assert contents(folder, manifest) == {
        "param/w": bytes(range(48)),
        "optim/w/exp_avg": bytes(range(100, 148)),
        "optim/w/step": b"\x00\x00\x80\x3f",
        "param/b": b"\x01\x02\x03\x04\x05\x06",
        "buffer/mask": b"\x01\x00\x01",
        "buffer/seen": b"\x05" + b"\x00" * 7,
        "buffer/none": b"",
    }


def test_the_manifest_describes_the_run(save, tmp_path):
    folder, manifest = save(tmp_path)
    assert (manifest.id, manifest.world, manifest.servers, manifest.seed) == ("digits-3@500", 2, 2, 7)
    assert manifest.job_file == "version: 1\nname: digits\n"
    assert manifest.bytes == sum(p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json")
    assert read_state(folder, manifest) == {"step": 500, "scheduler": {"best": float("inf")}}
    json.loads((folder / "manifest.json").read_text())


def test_safetensors_itself_reads_the_files(save, tmp_path):
    folder, _ = save(tmp_path)
    tensors = safetensors.numpy.load_file(folder / "server-0.safetensors")
    assert tensors["param/w[0:5]"].tobytes() == bytes(range(20))
    assert tensors["optim/w/step"].shape == ()
    with safetensors.safe_open(folder / "worker-0.safetensors", "np") as file:
        assert file.get_slice("buffer/none").get_shape() == [0, 4]
        assert file.metadata() == {"format": "pt", "psctl": "digits-3@500 worker/0"}
    names = dict(safetensors.deserialize((folder / "server-1.safetensors").read_bytes()))
    assert names["param/b"]["dtype"] == "BF16"


def test_only_the_folder_with_the_final_name_remains(save, tmp_path):
    folder, _ = save(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["0000000500"]


def test_a_non_finite_metric_is_kept_as_null(save, tmp_path):
    folder, _ = save(tmp_path, metrics={"loss": float("nan"), "accuracy": 0.5})
    assert open_checkpoint(folder).metrics == {"loss": None, "accuracy": 0.5}


def count_operations(save, disks, root: Path) -> int:
    disk = disks["counting"](lambda count, name: None)
    save(root, disk=disk)
    return disk.count


KILLER = """
import os, sys
from pathlib import Path
from tests.checkpoint.conftest import dies_at, write
root = Path(sys.argv[1])
for number in range(1, int(sys.argv[2]) + 1):
    write(root / str(number), step=400)
    if (child := os.fork()) == 0:
        write(root / str(number), step=500, disk=dies_at(number))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
"""


def test_a_kill_before_any_operation_leaves_the_old_or_a_complete_new_checkpoint(save, disks, tmp_path):
    total = count_operations(save, disks, tmp_path / "count")
    assert total > 40
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path), str(total)], check=True, cwd=root)
    seen = []
    for number in range(1, total + 1):
        root = tmp_path / str(number)
        steps = [found.step for found in list_checkpoints(root, "digits-3")]
        assert all(verify(Path(found.folder)) == [] for found in list_checkpoints(root, "digits-3"))
        newest = find_newest_verified(root, "digits-3")
        assert newest.manifest is not None
        assert newest.manifest.step == steps[-1]
        removed = remove_abandoned(root)
        assert len(removed) == (1 if steps == [400] and number > 1 else 0)
        assert sorted(p.name for p in (root / "digits-3").iterdir()) == [f"{step:010d}" for step in steps]
        seen.append(steps)
    assert seen == [[400]] * (total - 1) + [[400, 500]]  # only the sync of the parent folder comes after the rename


def test_a_full_disk_at_any_operation_is_reported_and_leaves_no_files(save, disks, tmp_path):
    total = count_operations(save, disks, tmp_path / "count")
    for number in range(1, total + 1):
        root = tmp_path / str(number)
        save(root, step=400)
        disk = disks["full_at"](number)
        if number > total - 3:  # folder's names, rename, folder's names: the room was there already
            save(root, step=500, disk=disk)
            continue
        with pytest.raises(errors.DiskFull, match="no space left to write"):
            save(root, step=500, disk=disk)
        assert [p.name for p in (root / "digits-3").iterdir()] == ["0000000400"]


def test_a_disk_that_refuses_for_another_reason_names_the_file(save, tmp_path):
    (tmp_path / "digits-3").write_text("a file where a folder should be")
    with pytest.raises(errors.CheckpointIncomplete, match=r"could not write .*digits-3"):
        save(tmp_path)


def test_a_kill_during_a_save_leaves_the_old_checkpoint(tmp_path, save):
    save(tmp_path, step=400)
    code = (
        "import sys\nfrom pathlib import Path\nfrom psctl.checkpoint.writer import CheckpointWriter\n"
        "from psctl.types import TensorSlice\n"
        "w = CheckpointWriter(Path(sys.argv[1]), 'digits-3', 500)\n"
        "w.open_file('worker/0', [TensorSlice('param/w', 'float32', (4,), 0, 4)])\n"
        "w.write_part('worker/0', 0, 0, b'1234')\nprint('half', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "digits-3" / "0000000500")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        assert remove_abandoned(tmp_path) == []  # its writer lives
        process.kill()
        process.wait()
    assert [found.step for found in list_checkpoints(tmp_path, "digits-3")] == [400]
    assert len(remove_abandoned(tmp_path)) == 1


def test_writing_a_step_again_keeps_a_complete_checkpoint(save, tmp_path):
    folder, _ = save(tmp_path, metrics={"loss": 1.0})
    save(tmp_path, metrics={"loss": 2.0})
    assert open_checkpoint(folder).metrics == {"loss": 1.0}
    assert [path.name for path in folder.parent.iterdir()] == ["0000000500"]


def test_writing_a_step_again_replaces_a_damaged_checkpoint(save, tmp_path):
    folder, _ = save(tmp_path)
    (folder / "state.json").write_bytes(b"{}")
    save(tmp_path, metrics={"loss": 2.0})
    assert verify(folder) == []
    assert open_checkpoint(folder).metrics == {"loss": 2.0}
    assert [path.name for path in folder.parent.iterdir()] == ["0000000500"]


W = TensorSlice("param/w", "float32", (8,), 0, 8)


def half(start, stop, name="param/w", dtype="float32", shape=(8,)):
    piece = TensorSlice(name, dtype, shape, start, stop)
    return piece, bytes((stop - start) * 4)


@pytest.mark.parametrize(
    ("pieces", "kind", "text"),
    [
        ([half(0, 4), half(5, 8)], errors.CheckpointIncomplete, r"param/w: elements \[4:5\] are missing"),
        ([half(0, 4), half(4, 7)], errors.CheckpointIncomplete, r"param/w: elements \[7:8\] are missing"),
        ([half(1, 4), half(4, 8)], errors.CheckpointIncomplete, r"param/w: elements \[0:1\] are missing"),
        ([half(0, 5), half(4, 8)], errors.CheckpointCorrupt, r"param/w: elements \[4:5\] are there twice"),
        ([half(0, 8), half(0, 8)], errors.CheckpointCorrupt, r"param/w: elements \[0:8\] are there twice"),
        ([half(0, 4), half(4, 8, dtype="int32")], errors.CheckpointCorrupt, "param/w: senders disagree on its dtype"),
        ([half(0, 4), half(4, 8, shape=(2, 4))], errors.CheckpointCorrupt, "param/w: senders disagree on its dtype or"),
    ],
)
def test_slices_that_do_not_cover_a_tensor_once_are_named(save, tmp_path, pieces, kind, text):
    with pytest.raises(kind, match=text):
        save(tmp_path, senders={f"server/{rank}": [piece] for rank, piece in enumerate(pieces)})
    assert list((tmp_path / "digits-3").iterdir()) == []


def test_servers_that_hold_different_values_of_a_scalar_are_named(save, tmp_path, senders):
    piece, _ = senders["server/1"][3]
    senders["server/1"][3] = (piece, b"\x00\x00\x00\x40")
    with pytest.raises(errors.CheckpointCorrupt, match="optim/w/step: senders hold different values"):
        save(tmp_path, senders=senders)


def begun(tmp_path) -> CheckpointWriter:
    writer = CheckpointWriter(tmp_path / "0000000001", "digits-3", 1)
    writer.open_file("server/0", [W])
    return writer


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda w: w.write_part("server/0", 1, 0, b"1234"), "server/0 sent slice 1 of 1"),
        (lambda w: w.write_part("server/0", -1, 0, b"1234"), "server/0 sent slice -1 of 1"),
        (lambda w: w.write_part("server/0", 0, 30, b"1234"), r"server/0 sent bytes \[30:34\] of 32 for param/w"),
        (lambda w: w.write_part("server/0", 0, -4, b"1234"), r"server/0 sent bytes \[-4:0\] of 32"),
        (
            lambda w: (w.write_part("server/0", 0, 0, b"1234"), w.write_part("server/0", 0, 3, b"1")),
            "twice for param/w",
        ),
        (lambda w: w.write_part("server/1", 0, 0, b"1234"), "server/1 sent a part of step 1 before begin"),
        (lambda w: w.open_file("server/0", []), "server/0 began the checkpoint of step 1 twice"),
        (lambda w: w.open_file("server/1", [W, W]), "param/w: sent twice by one sender"),
        (lambda w: w.open_file("../../etc", [W]), "is no sender of a checkpoint"),
        (lambda w: w.open_file("server/1", [TensorSlice("x", "int8", (4,), 2, 9)]), "does not lie in a tensor"),
    ],
)
def test_a_sender_that_breaks_the_order_is_named(tmp_path, act, text):
    writer = begun(tmp_path)
    with pytest.raises(errors.CheckpointCorrupt, match=text):
        act(writer)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_an_unsupported_dtype_is_refused_by_name(tmp_path):
    with pytest.raises(errors.UsageError, match="dtype complex128"):
        begun(tmp_path).open_file("server/1", [TensorSlice("x", "complex128", (1,), 0, 1)])


def test_a_sender_that_ends_early_is_named_with_the_tensor(tmp_path):
    writer = begun(tmp_path)
    writer.write_part("server/0", 0, 0, bytes(8))
    with pytest.raises(errors.CheckpointIncomplete, match=r"server/0 did not send bytes \[8:32\] of param/w"):
        writer.finish_file("server/0")
    with pytest.raises(errors.CheckpointIncomplete, match="server/0 did not send all"):
        writer.commit(
            time=0.0, world=1, servers=0, strategy="native", update="worker", seed=0, epoch=0, state={}, metrics={},
            code_hash="", job_file="",
        )  # fmt: skip
    writer.discard()


def test_discard_after_commit_changes_nothing(save, feed, facts, senders, tmp_path):
    writer = CheckpointWriter(tmp_path / "digits-3" / "0000000500", "digits-3", 500)
    feed(writer, senders)
    writer.commit(**facts)
    writer.discard()
    assert verify(tmp_path / "digits-3" / "0000000500") == []


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": {1: 2}}, "state['a'] is a dict with the key 1"),
        ({"a": [0, (1,)]}, "state['a'][1] is a tuple"),
        ({"rng": b"x"}, "state['rng'] is a bytes"),
    ],
)
def test_a_state_that_json_would_change_is_refused_with_its_path(save, tmp_path, state, path):
    with pytest.raises(errors.UsageError) as caught:
        save(tmp_path, state=state)
    assert path in caught.value.message


@given(order=st.permutations(range(6)))
@settings(max_examples=examples(60))
def test_parts_of_a_slice_may_come_in_any_order(order, tmp_path_factory):
    data = bytes(range(24))
    path = tmp_path_factory.mktemp("any") / "file"
    path.write_bytes(b"head" + data)
    arrivals, straight = ReceivedRanges(24), ReceivedRanges(24)
    straight.add(0, memoryview(data))
    for index in order[:-1]:
        assert arrivals.add(index * 4, memoryview(data[index * 4 : index * 4 + 4])) == ""
    gap = arrivals.missing()
    assert gap is not None
    assert (gap.start, gap.stop) == (order[-1] * 4, order[-1] * 4 + 4)
    assert arrivals.add(order[0] * 4 + 1, memoryview(b"x")) != ""
    assert arrivals.add(order[-1] * 4, memoryview(data[order[-1] * 4 : order[-1] * 4 + 4])) == ""
    assert arrivals.missing() is None
    with path.open("rb") as file:
        assert arrivals.checksum(file.fileno(), 4) == straight.checksum(file.fileno(), 4)


def test_parts_of_senders_may_be_interleaved_in_every_way(tmp_path, facts):
    for number, order in enumerate(itertools.permutations([("server/0", 0), ("server/0", 4), ("server/1", 0)])):
        writer = CheckpointWriter(tmp_path / "j" / f"{number:010d}", "j", number)
        writer.open_file("server/0", [TensorSlice("param/w", "int8", (12,), 0, 8)])
        writer.open_file("server/1", [TensorSlice("param/w", "int8", (12,), 8, 12)])
        for source, offset in order:
            at = offset if source == "server/0" else 8
            writer.write_part(source, 0, offset, bytearray(range(at, at + 4)))
        writer.finish_file("server/1")
        writer.finish_file("server/0")
        manifest = writer.commit(**facts)
        assert contents(writer.folder, manifest) == {"param/w": bytes(range(12))}


def gone() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def left(folder: Path, name: str, *, old: bool = False) -> Path:
    """Make the remains of a killed writer: a folder with a file in it, or one file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(EXPORT_SUFFIX) or EXPORT_SUFFIX in name:
        path.write_bytes(b"half")
    else:
        path.mkdir()
        (path / "worker-0.safetensors").write_bytes(b"half")
    if old:
        for each in (*path.glob("*"), path):
            os.utime(each, (1e9, 1e9))
    return path


def test_files_of_ended_writers_are_swept_and_those_of_running_ones_kept(save, tmp_path):
    save(tmp_path)
    here, ended = os.uname().nodename, gone()
    for name in (f"0000000600.{here}.{ended}.partial", f"0000000500-removed.{here}.{ended}.partial"):
        left(tmp_path / "other-1", name)
    left(tmp_path / "digits-3", f"0000000500.77.export.{here}.{ended}.partial")
    for name in ("0000000600.carried.77.partial", "0000000600.elsewhere.77.partial", "0000000500.77.export"):
        left(tmp_path / "digits-3", name)
        left(tmp_path / "other-1", name, old=True)
    left(tmp_path / "digits-3", f"0000000700.{here}.{os.getpid()}.partial")
    outside = left(tmp_path / "mine", "precious", old=True)
    (tmp_path / "digits-3" / f"0000000800.{here}.{ended}.partial").symlink_to(outside)
    (tmp_path / "linked").symlink_to(tmp_path / "other-1")
    assert sorted(remove_abandoned(tmp_path)) == sorted([
        f"0000000600.{here}.{ended}.partial", f"0000000500-removed.{here}.{ended}.partial",
        f"0000000500.77.export.{here}.{ended}.partial",
        "0000000600.carried.77.partial", "0000000600.elsewhere.77.partial", "0000000500.77.export",
    ])  # fmt: skip
    assert [found.step for found in list_checkpoints(tmp_path, "digits-3")] == [500]
    assert (outside / "worker-0.safetensors").exists()
    assert len(list((tmp_path / "digits-3").iterdir())) == 6
    assert sorted(path.name for path in (tmp_path / "other-1").iterdir()) == []


def test_a_locked_folder_is_never_swept(tmp_path):
    """Process numbers of another container, or reused ones, do not identify the writer."""
    path = tmp_path / "digits-3" / f"0000000500.{os.uname().nodename}.{gone()}.partial"
    held = Disk().make_folder(path)
    os.utime(path, (1e9, 1e9))
    assert remove_abandoned(tmp_path) == []
    os.close(held)
    assert remove_abandoned(tmp_path) == [path.name]


def test_files_of_a_killed_pull_or_export_are_swept_by_the_next(tmp_path):
    here, ended = os.uname().nodename, gone()
    for name in ("digits-3@500", "digits-3@5000", "digits-3@[0-9]"):
        left(tmp_path, f"{name}.{here}.{ended}.partial")
    assert remove_abandoned_for(tmp_path / "digits-3@500") == [f"digits-3@500.{here}.{ended}.partial"]
    assert remove_abandoned_for(tmp_path / "digits-3@[0-9]") == [f"digits-3@[0-9].{here}.{ended}.partial"]
    assert remove_abandoned_for(tmp_path / "none" / "digits-3@500") == []


@pytest.mark.parametrize(("refusal", "fails"), [(errno.EINVAL, False), (errno.EOPNOTSUPP, False), (errno.EIO, True)])
def test_a_disk_that_syncs_no_folders_holds_checkpoints(save, tmp_path, monkeypatch, refusal, fails):
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(refusal, os.strerror(refusal))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(errors.CheckpointIncomplete) if fails else contextlib.nullcontext():
        folder, manifest = save(tmp_path)
        assert open_checkpoint(folder) == manifest
