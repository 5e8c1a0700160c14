"""Reads of checkpoints: any range of any tensor, every damage named, the newest correct one found."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import stat
import struct
from pathlib import Path

import msgspec
import pytest

from psctl import errors
from psctl.checkpoint import manifest as manifests
from psctl.checkpoint.catalog import find_newest_verified, list_checkpoints
from psctl.checkpoint.disk import checksum
from psctl.checkpoint.manifest import Manifest, whole_tensors
from psctl.checkpoint.reader import MOST_EXTRA, open_checkpoint, read_slice, read_state, verify
from psctl.types import TensorSlice
from tests.hypothesis_profile import SEARCH


@pytest.mark.parametrize("chunk", [4, 8, 20, 1 << 19])
def test_any_range_is_assembled_from_any_slices(chunk, save, tmp_path):
    folder, manifest = save(tmp_path)
    for start, stop in itertools.combinations_with_replacement(range(13), 2):
        parts = list(read_slice(folder, manifest, TensorSlice("param/w", "float32", (3, 4), start, stop), chunk))
        assert b"".join(data for _, data in parts) == bytes(range(start * 4, stop * 4))
        assert all(len(data) <= chunk for _, data in parts)
        ends = list(itertools.accumulate(len(data) for _, data in parts))
        assert [offset for offset, _ in parts] == [0, *ends][: len(parts)]


def test_a_scalar_of_two_servers_is_read_once(save, tmp_path):
    folder, manifest = save(tmp_path)
    scalar = TensorSlice("optim/w/step", "float32", (), 0, 1)
    assert list(read_slice(folder, manifest, scalar)) == [(0, b"\x00\x00\x80\x3f")]
    assert [tensor.name for tensor in whole_tensors(manifest)].count("optim/w/step") == 1


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (TensorSlice("param/v", "float32", (3, 4), 0, 12), "digits-3@500 has no tensor param/v"),
        (TensorSlice("param/w", "float32", (4, 4), 0, 16), r"param/w is float32 \[3, 4\] in digits-3@500, float32 \[4"),
        (TensorSlice("param/w", "float64", (3, 4), 0, 12), "float64 .* is wanted"),
        (TensorSlice("param/w", "float32", (3, 4), 0, 13), r"no elements \[0:13\]"),
    ],
)
def test_a_tensor_that_does_not_match_the_checkpoint_is_named(save, tmp_path, wanted, text):
    folder, manifest = save(tmp_path)
    with pytest.raises(errors.UsageError, match=text):
        list(read_slice(folder, manifest, wanted))


STRIDE = 1 if SEARCH else 11


def flipped(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


def test_every_flipped_byte_is_detected(save, tmp_path):
    folder, _ = save(tmp_path)
    copy = tmp_path / "copy"
    for name in sorted(path.name for path in folder.iterdir()):
        size = (folder / name).stat().st_size
        for place in range(0, size, STRIDE):
            shutil.copytree(folder, copy)
            flipped(copy / name, place)
            assert verify(copy), f"byte {place} of {name}"
            shutil.rmtree(copy)


def test_the_tensor_with_changed_bytes_is_named(save, tmp_path):
    folder, manifest = save(tmp_path)
    file = next(f for f in manifest.files if f.name == "server-1.safetensors")
    piece = next(s for s in file.slices if s.name == "param/w")
    flipped(folder / file.name, piece.offset + 3)
    assert verify(folder) == ["server-1.safetensors: bytes of param/w[5:12] were changed"]


def test_changed_headers_and_states_are_named(save, tmp_path):
    folder, _ = save(tmp_path)
    flipped(folder / "server-0.safetensors", 30)
    flipped(folder / "state.json", 3)
    assert verify(folder) == [
        "state.json: its bytes were changed",
        "server-0.safetensors: bytes of header were changed",
    ]


def test_a_huge_header_length_allocates_no_memory(save, tmp_path):
    folder, _ = save(tmp_path)
    path = folder / "server-0.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
    assert verify(folder) == ["server-0.safetensors: bytes of header were changed"]


@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        (lambda f: (f / "manifest.json").unlink(), errors.CheckpointIncomplete, "it has no manifest.json"),
        (
            lambda f: (f / "server-0.safetensors").unlink(),
            errors.CheckpointIncomplete,
            "server-0.safetensors is missing",
        ),
        (lambda f: (f / "state.json").unlink(), errors.CheckpointIncomplete, "state.json is missing"),
        (
            lambda f: (f / "worker-0.safetensors").write_bytes((f / "worker-0.safetensors").read_bytes()[:-1]),
            errors.CheckpointIncomplete,
            "worker-0.safetensors ends at byte",
        ),
        (
            lambda f: (f / "worker-0.safetensors").write_bytes((f / "worker-0.safetensors").read_bytes() + b"x"),
            errors.CheckpointCorrupt,
            "worker-0.safetensors has .* bytes, it had",
        ),
        (lambda f: flipped(f / "manifest.json", 200), errors.CheckpointCorrupt, "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_bytes(b""), errors.CheckpointCorrupt, "manifest.json is damaged"),
        (lambda f: (f / "manifest.json").write_bytes(b"\x80\xff" * 99), errors.CheckpointCorrupt, "is damaged"),
    ],
    ids=["no-manifest", "no-tensors", "no-state", "short", "long", "flipped", "empty", "garbage"],
)
def test_damage_is_detected_when_a_checkpoint_is_opened(save, tmp_path, damage, kind, text):
    folder, _ = save(tmp_path)
    damage(folder)
    with pytest.raises(kind, match=text):
        open_checkpoint(folder)
    assert verify(folder)


def test_an_extra_file_is_named(save, tmp_path):
    folder, _ = save(tmp_path)
    (folder / "notes.txt").write_text("mine")
    assert verify(folder) == ["notes.txt is not part of it"]
    open_checkpoint(folder)


def test_a_symbolic_link_is_not_accepted_as_a_file(save, tmp_path):
    folder, _ = save(tmp_path)
    (folder / "state.json").rename(tmp_path / "elsewhere")
    (folder / "state.json").symlink_to(tmp_path / "elsewhere")
    assert "state.json: it is no regular file" in verify(folder)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "worker-0.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link", "socket"])
def test_only_regular_files_are_opened(save, tmp_path, monkeypatch, name, kind):
    folder, manifest = save(tmp_path)
    victim = folder / name
    victim.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(victim)  # to open it would wait for a writer for ever
    elif kind == "device":
        os.symlink("/dev/zero", victim) if os.getuid() else os.mknod(victim, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    elif kind == "socket":
        monkeypatch.chdir(folder)  # an address has room for a short path only
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)
    else:
        victim.symlink_to(tmp_path / "elsewhere")
    assert verify(folder) == [f"{name}: it is no regular file"]
    with pytest.raises(errors.CheckpointCorrupt, match="no regular file"):
        open_checkpoint(folder)
    if name == "state.json":
        with pytest.raises(OSError, match="no regular file"):
            read_state(folder, manifest)


def test_a_too_large_manifest_is_not_read(save, tmp_path):
    folder, _ = save(tmp_path)
    os.truncate(folder / "manifest.json", manifests.MAX_MANIFEST + 1)
    assert verify(folder) == [f"manifest.json: it has {manifests.MAX_MANIFEST + 1} bytes, more than any may"]


def test_a_hostile_manifest_is_refused_at_low_cost(save, tmp_path):
    folder, manifest = save(tmp_path)
    file = manifest.files[0]
    many = tuple(msgspec.structs.replace(file, name=f"f{number}.safetensors", slices=()) for number in range(70_000))
    rewrite(folder, files=many)
    assert verify(folder) == ["manifest.json names 70000 files, more than 65536"]
    wide = msgspec.structs.replace(file.slices[0], shape=(1,) * 100_000)
    rewrite_from(folder, manifest, files=(msgspec.structs.replace(file, slices=(wide,)),))
    assert "100000 dimensions" in verify(folder)[0]
    rewrite_from(folder, manifest, files=(msgspec.structs.replace(file, header=1 << 40, size=1 << 40, slices=()),))
    assert "a header cannot have 1099511627776 bytes" in verify(folder)[0]
    rewrite_from(folder, manifest, state=msgspec.structs.replace(manifest.state, size=1 << 40))
    assert "1099511627776 bytes of state" in verify(folder)[0]
    for number in range(300):
        (folder / f"extra{number}").touch()
    rewrite_from(folder, manifest)
    assert len(verify(folder)) == MOST_EXTRA


def rewrite_from(folder: Path, manifest: Manifest, **changes: object) -> None:
    (folder / "manifest.json").write_bytes(manifests.encode(msgspec.structs.replace(manifest, **changes)))


def rewrite(folder: Path, **changes: object) -> None:
    """Write a contradictory manifest with a correct checksum, as a hostile or faulty writer would."""
    manifest = open_checkpoint(folder)
    (folder / "manifest.json").write_bytes(manifests.encode(msgspec.structs.replace(manifest, **changes)))


def with_first_slice(folder: Path, **changes: object) -> None:
    manifest = open_checkpoint(folder)
    first = manifest.files[0]
    piece = msgspec.structs.replace(first.slices[0], **changes)
    rewrite(folder, files=(msgspec.structs.replace(first, slices=(piece, *first.slices[1:])), *manifest.files[1:]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offset": 1 << 60}, "lies at byte"),
        ({"size": 1 << 60}, "cannot have"),
        ({"stop": 99}, "is no part of shape"),
        ({"dtype": "float31"}, "unknown dtype"),
        ({"stop": 4, "size": 16}, "lies at byte|are missing|end at byte"),
    ],
)
def test_wrong_numbers_in_a_manifest_are_refused(save, tmp_path, changes, text):
    folder, _ = save(tmp_path)
    with_first_slice(folder, **changes)
    with pytest.raises(errors.CheckpointCorrupt, match=text):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b.safetensors", "server-1.safetensors", ".x"])
def test_file_names_outside_the_folder_are_refused(save, tmp_path, name):
    folder, manifest = save(tmp_path)
    rewrite(folder, files=(msgspec.structs.replace(manifest.files[0], name=name), *manifest.files[1:]))
    with pytest.raises(errors.CheckpointCorrupt, match="cannot be one of a checkpoint"):
        open_checkpoint(folder)


def test_a_later_format_is_refused_as_a_version_mismatch(save, tmp_path):
    folder, _ = save(tmp_path)
    rewrite(folder, format=3)
    with pytest.raises(errors.VersionMismatch, match="written in format 3, this psctl reads formats 1 and 2"):
        open_checkpoint(folder)


def test_a_manifest_without_fields_is_reported_as_corrupt(tmp_path):
    rest = b' "format": 1}\n'
    data = b'{"checksum":"' + checksum(rest).encode() + b'",\n' + rest
    with pytest.raises(errors.CheckpointCorrupt, match="missing required field"):
        manifests.decode(data, "somewhere")


def test_the_listing_has_complete_and_incomplete_checkpoints_and_no_temporary_ones(save, tmp_path):
    save(tmp_path, step=100)
    folder, _ = save(tmp_path, step=200)
    (folder / "state.json").unlink()
    (tmp_path / "digits-3" / "0000000300.host.1.partial").mkdir()
    (tmp_path / "digits-3" / "stray").mkdir()
    first, second = list_checkpoints(tmp_path, "digits-3")
    assert (first.step, first.problem, second.step, second.problem) == (100, "", 200, "state.json is missing")
    assert first.document() == {
        "id": "digits-3@100", "job": "digits-3", "step": 100, "time": 1700000000.5, "bytes": first.bytes,
        "complete": True, "metrics": {"loss": 0.25}, "folder": first.folder, "problem": "",
    }  # fmt: skip
    assert second.document()["complete"] is False
    assert list_checkpoints(tmp_path) == [first, second]
    assert list_checkpoints(tmp_path, "other-1") == []
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_the_newest_correct_checkpoint_is_found_and_skipped_ones_are_named(save, tmp_path):
    save(tmp_path, step=100)
    second, manifest = save(tmp_path, step=200)
    flipped(second / "server-0.safetensors", manifest.files[0].size - 1)
    third, _ = save(tmp_path, step=300)
    (third / "manifest.json").unlink()
    newest = find_newest_verified(tmp_path, "digits-3")
    assert newest.manifest is not None
    assert newest.manifest.step == 100
    assert newest.folder == tmp_path / "digits-3" / "0000000100"
    assert newest.skipped[0].startswith("digits-3@300 skipped: it has no manifest.json")
    assert newest.skipped[1].startswith("digits-3@200 skipped: server-0.safetensors: bytes of")


def test_a_job_without_checkpoints_gives_no_error(tmp_path):
    assert find_newest_verified(tmp_path, "digits-1").folder is None
