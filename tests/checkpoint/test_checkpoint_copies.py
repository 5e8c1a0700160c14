"""Copies, targets, exports and retention of checkpoints."""

from __future__ import annotations

import importlib.util

import pytest
import safetensors
import safetensors.numpy

from psctl import errors
from psctl.checkpoint.catalog import best_step, find_checkpoint, list_checkpoints, prune, steps_to_remove
from psctl.checkpoint.copies import CheckpointReceiver, file_sizes, read_parts
from psctl.checkpoint.export import export_model
from psctl.checkpoint.reader import open_checkpoint, verify
from psctl.checkpoint.upload import CheckpointTarget


def copy_checkpoint(source, folder, disk=None):
    """Copy a checkpoint to another folder, as between two hosts."""
    files = file_sizes(source, open_checkpoint(source))
    receiver = CheckpointReceiver(folder, files, disk)
    try:
        for name, offset, data in read_parts(source, files):
            receiver.write_part(name, offset, data)
        return receiver.finish()
    except BaseException:
        receiver.discard()
        raise


def test_a_copy_has_equal_bytes(save, tmp_path):
    folder, manifest = save(tmp_path / "a")
    there = tmp_path / "b" / "digits-3" / "0000000500"
    assert copy_checkpoint(folder, there) == manifest
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in there.iterdir()}
    assert [path.name for path in there.parent.iterdir()] == ["0000000500"]


def test_a_copy_may_arrive_in_any_order(save, tmp_path):
    folder, manifest = save(tmp_path / "a")
    files = file_sizes(folder, manifest)
    receiver = CheckpointReceiver(tmp_path / "b" / "0000000500", files)
    for name, offset, data in reversed(list(read_parts(folder, files, 64))):
        receiver.write_part(name, offset, data)
    assert receiver.finish() == manifest


def receiving(folder, manifest, there):
    files = file_sizes(folder, manifest)
    return CheckpointReceiver(there, files), list(read_parts(folder, files, 100))


def test_a_copy_with_a_changed_byte_is_refused_and_leaves_no_files(save, tmp_path):
    folder, manifest = save(tmp_path / "a")
    receiver, pieces = receiving(folder, manifest, tmp_path / "b" / "0000000500")
    for name, offset, data in pieces:
        receiver.write_part(name, offset, data[:-1] + b"!" if name == "server-0.safetensors" else data)
    with pytest.raises(errors.CheckpointCorrupt, match=r"the copy of .* is damaged: server-0.safetensors"):
        receiver.finish()
    receiver.discard()
    assert list((tmp_path / "b").iterdir()) == []


def test_a_copy_that_ends_early_is_refused(save, tmp_path):
    folder, manifest = save(tmp_path / "a")
    receiver, pieces = receiving(folder, manifest, tmp_path / "b" / "0000000500")
    for piece in pieces[:-1]:
        receiver.write_part(*piece)
    with pytest.raises(errors.CheckpointIncomplete, match=r"of manifest.json are missing"):
        receiver.finish()
    receiver.discard()


@pytest.mark.parametrize("name", ["../x.json", "/etc/x.json", "run.sh", "", ".json"])
def test_file_names_outside_a_checkpoint_are_refused(tmp_path, name):
    with pytest.raises(errors.CheckpointCorrupt, match="cannot hold a file"):
        CheckpointReceiver(tmp_path / "0000000500", {name: 3})
    assert list(tmp_path.iterdir()) == []


def test_bytes_of_unknown_files_or_outside_of_files_are_refused(tmp_path):
    receiver = CheckpointReceiver(tmp_path / "0000000500", {"state.json": 3})
    with pytest.raises(errors.CheckpointCorrupt, match="unknown file"):
        receiver.write_part("manifest.json", 0, b"x")
    with pytest.raises(errors.CheckpointCorrupt, match=r"bytes \[2:4\] of 3"):
        receiver.write_part("state.json", 2, b"xy")
    receiver.discard()


def test_a_copy_larger_than_the_disk_is_refused_before_the_transfer(tmp_path):
    with pytest.raises(errors.DiskFull, match=r"needs .* bytes, the disk has"):
        CheckpointReceiver(tmp_path / "0000000500", {"worker-0.safetensors": 1 << 60})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_during_a_copy_leaves_no_files(save, disks, tmp_path):
    folder, _ = save(tmp_path / "a")
    with pytest.raises(errors.DiskFull):
        copy_checkpoint(folder, tmp_path / "b" / "0000000500", disks["full_at"](9))
    assert list((tmp_path / "b").iterdir()) == []


def test_an_export_has_the_users_names_and_whole_tensors(save, tmp_path):
    folder, manifest = save(tmp_path)
    size = export_model(folder, manifest, tmp_path / "model.safetensors")
    assert size == (tmp_path / "model.safetensors").stat().st_size
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert sorted(file.keys()) == ["b", "mask", "none", "seen", "w"]
        assert file.get_tensor("w").shape == (3, 4)
        assert file.get_tensor("w").tobytes() == bytes(range(48))
        assert file.get_slice("b").get_dtype() == "BF16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-3", "model.safetensors"]


def test_an_export_onto_a_full_disk_keeps_the_old_file(save, disks, tmp_path):
    folder, manifest = save(tmp_path)
    (tmp_path / "model.safetensors").write_text("old")
    with pytest.raises(errors.DiskFull):
        export_model(folder, manifest, tmp_path / "model.safetensors", disks["full_at"](4))
    assert (tmp_path / "model.safetensors").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-3", "model.safetensors"]


@pytest.fixture(params=["", "file://", "memory://"])
def target(request, tmp_path):
    pytest.importorskip("fsspec")
    return f"{request.param}{tmp_path}/shelf"


def names_at(target, place):
    system, path = pytest.importorskip("fsspec").core.url_to_fs(place)
    return {str(name).rsplit("/", 1)[-1] for name in system.ls(path, detail=False)}


def test_a_target_receives_checkpoints_and_gives_them_back_whole(save, tmp_path, target):
    folder, manifest = save(tmp_path / "a")
    place = CheckpointTarget(target).upload(folder)
    assert place == f"{target}/digits-3/0000000500"
    assert names_at(target, place) == {*manifest.sizes(), "manifest.json"}
    there = CheckpointTarget(target)
    assert there.steps("digits-3") == [500]
    assert there.steps("other-1") == []
    assert there.fetch("digits-3", 500, tmp_path / "b" / "0000000500") == manifest
    assert verify(tmp_path / "b" / "0000000500") == []


def test_an_interrupted_upload_goes_on_after_the_files_that_are_there(save, tmp_path, target, monkeypatch):
    folder, manifest = save(tmp_path / "a")
    system, path = pytest.importorskip("fsspec").core.url_to_fs(target)
    sent = []

    def cut(kind):
        """Let the file system refuse after one more file."""
        put = type(system).put_file

        def put_file(self, source, to, *more, **options):
            if len(sent) >= kind:
                raise ConnectionResetError("the link is cut")
            sent.append(source.rsplit("/", 1)[-1])
            return put(self, source, to, *more, **options)

        return put_file

    with monkeypatch.context() as patched:
        patched.setattr(type(system), "put_file", cut(2))
        with pytest.raises(errors.CheckpointIncomplete, match="the link is cut"):
            CheckpointTarget(target).upload(folder)
    assert CheckpointTarget(target).steps("digits-3") == []
    first = list(sent)
    system.pipe_file(f"{path}/digits-3/0000000500/{first[1]}", b"short")  # a file that has another size by now
    sent.clear()
    with monkeypatch.context() as patched:
        patched.setattr(type(system), "put_file", cut(99))
        place = CheckpointTarget(target).upload(folder)
    assert sorted(sent) == sorted({*manifest.sizes(), "manifest.json"} - {first[0]})
    assert names_at(target, place) == {*manifest.sizes(), "manifest.json"}
    assert CheckpointTarget(target).fetch("digits-3", 500, tmp_path / "c" / "0000000500") == manifest


def test_old_and_unfinished_checkpoints_are_removed_at_the_target(save, tmp_path, target):
    folder, _ = save(tmp_path / "a")
    system, path = pytest.importorskip("fsspec").core.url_to_fs(target)
    shelf = CheckpointTarget(target)
    shelf.upload(folder)
    for step in (100, 200):
        system.makedirs(f"{path}/digits-3/{step:010d}", exist_ok=True)
        system.pipe_file(f"{path}/digits-3/{step:010d}/state.json", b"{}")
    assert shelf.prune("digits-3", 1, None, 500, pending={200}) == [100]
    assert shelf.prune("digits-3", 1, None, 500) == [200]
    assert shelf.steps("digits-3") == [500]


def test_bytes_that_the_target_changed_are_refused(save, tmp_path):
    folder, _ = save(tmp_path / "a")
    place = CheckpointTarget(str(tmp_path / "shelf")).upload(folder)
    victim = next((tmp_path / "shelf").rglob("server-0.safetensors"))
    assert str(victim.parent) == place
    victim.write_bytes(victim.read_bytes()[:-1] + b"!")
    with pytest.raises(errors.CheckpointCorrupt, match="server-0"):
        CheckpointTarget(str(tmp_path / "shelf")).fetch("digits-3", 500, tmp_path / "b" / "0000000500")
    assert list((tmp_path / "b").iterdir()) == []


def test_an_unknown_kind_of_target_and_a_missing_package_are_named():
    pytest.importorskip("fsspec")
    with pytest.raises(errors.UsageError, match='"nosuch"'):
        CheckpointTarget("nosuch://x")
    if importlib.util.find_spec("gcsfs") is None:
        with pytest.raises(errors.PythonMissing, match="needs gcsfs") as raised:
            CheckpointTarget("gs://bucket/shelf")
        assert "gcsfs to runtime.requirements" in raised.value.hint


SAVED = [(100, {"loss": 0.5}), (200, {"loss": 0.1}), (300, {"loss": None}), (400, {"loss": 0.3}), (500, {})]


@pytest.mark.parametrize(
    ("keep", "keep_best", "protect", "removed"),
    [
        (3, None, None, [100, 200]),
        (3, ("loss", "min"), None, [100]),
        (1, ("loss", "max"), None, [200, 300, 400]),
        (2, ("accuracy", "max"), None, [100, 200, 300]),
        (1, None, 200, [100, 300, 400]),
        (9, None, None, []),
        (0, None, None, [100, 200, 300, 400]),
    ],
)
def test_the_newest_the_best_and_the_protected_are_kept(keep, keep_best, protect, removed):
    assert steps_to_remove(SAVED, keep, keep_best, protect) == removed


def test_the_newest_of_equal_metrics_is_best():
    assert best_step([(1, {"loss": 0.5}), (2, {"loss": 0.5})], "loss", "min") == 2
    assert best_step([(1, {"loss": 0.5}), (2, {"loss": 0.5})], "loss", "max") == 2
    assert best_step([(0, {"loss": 0.5})], "loss", "min") == 0


def test_prune_removes_complete_old_checkpoints_and_keeps_incomplete_ones(save, tmp_path):
    for step, loss in ((100, 0.1), (200, 0.9), (300, 0.5), (400, 0.4)):
        save(tmp_path, step=step, metrics={"loss": loss})
    torn, _ = save(tmp_path, step=50)
    (torn / "manifest.json").unlink()
    removed = prune(tmp_path, "digits-3", 1, ("loss", "min"))
    assert [found.step for found in removed] == [200, 300]
    assert [found.step for found in list_checkpoints(tmp_path, "digits-3")] == [50, 100, 400]
    assert len(list((tmp_path / "digits-3").iterdir())) == 3


def test_checkpoints_are_named_by_step_latest_or_best(save, tmp_path):
    for step, loss in ((100, 0.1), (200, 0.9)):
        save(tmp_path, step=step, metrics={"loss": loss})
    torn, _ = save(tmp_path, step=300)
    (torn / "manifest.json").unlink()
    assert find_checkpoint(tmp_path, "digits-3", "latest").name == "0000000200"
    assert find_checkpoint(tmp_path, "digits-3", "best").name == "0000000100"
    assert find_checkpoint(tmp_path, "digits-3", "best", ("loss", "max")).name == "0000000200"
    assert find_checkpoint(tmp_path, "digits-3", "100").name == "0000000100"
    with pytest.raises(errors.NoSuchCheckpoint, match="no checkpoint 150; there are steps: 100, 200"):
        find_checkpoint(tmp_path, "digits-3", "150")
    with pytest.raises(errors.NoSuchCheckpoint, match="best with the metric accuracy"):
        find_checkpoint(tmp_path, "digits-3", "best", ("accuracy", "max"))
    with pytest.raises(errors.NoSuchCheckpoint, match="digits-9 has no checkpoint"):
        find_checkpoint(tmp_path, "digits-9", "latest")


def test_numpy_reads_a_file_with_one_slice_of_a_tensor(save, tmp_path):
    folder, _ = save(tmp_path)
    assert safetensors.numpy.load_file(folder / "worker-0.safetensors")["buffer/seen"].tolist() == 5
    open_checkpoint(folder)
