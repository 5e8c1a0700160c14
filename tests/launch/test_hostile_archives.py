"""Archives that would write outside their folder are refused by whatever Python the host has."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from psctl import errors
from psctl.launch.archive import pack_folder
from psctl.launch.host_programs import HOST_FILES, OBJECT, run_program
from psctl.remote.local import LocalShell


def archive_of(*members: tuple[str, bytes, str]) -> tuple[str, bytes]:
    """Return hash and bytes of an archive of (name, type, link target or contents)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, sort, told in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = sort, 0o4777
            data = told.encode() if sort == tarfile.REGTYPE else b""
            info.linkname = "" if data else told
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(buffer.getvalue()).hexdigest()[:40], gzip.compress(buffer.getvalue())


def unpack(tmp_path: Path, name: str, data: bytes) -> Path:
    (tmp_path / "home").mkdir(exist_ok=True)
    shell = LocalShell("here", str(tmp_path / "home"))
    try:
        question = {"folder": str(tmp_path / "code"), "hash": name}
        return Path(run_program(shell, sys.executable, HOST_FILES, "unpack", question, OBJECT, stdin=data)["folder"])
    finally:
        shell.close()


FILE, LINK, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../out", FILE, "x")],
        [("/tmp/psctl-out", FILE, "x")],
        [("a/../../out", FILE, "x")],
        [("up", LINK, "..")],
        [("link", LINK, "/etc")],
        [("a", FOLDER, ""), ("a/link", LINK, "../..")],
        [("a", FOLDER, ""), ("to", LINK, "a"), ("to/file", FILE, "x")],
        [("d", FOLDER, ""), ("a", FOLDER, ""), ("a/b", FOLDER, ""), ("a/b/l", LINK, "../../d"),
         ("a/b/m", LINK, "l/../..")],
        [("one", FILE, "x"), ("two", tarfile.LNKTYPE, "one")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [("device", tarfile.CHRTYPE, "")],
        [("twice", FILE, "x"), ("twice", FILE, "y")],
        [("link", LINK, "x"), ("link", FILE, "y")],
    ],
    ids=lambda members: "+".join(name for name, _, _ in members),
)  # fmt: skip
def test_a_member_that_leads_outside_is_refused(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(errors.CommandFailed):
        unpack(tmp_path, *archive_of(*members))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*before, "code", "home"})
    assert list((tmp_path / "code").iterdir()) == []


def test_links_and_modes_that_are_fine_arrive(tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "a").mkdir(parents=True)
    (job / "run.sh").write_text("echo")
    (job / "run.sh").chmod(0o755)
    (job / "a" / "back").symlink_to("../a/../run.sh")
    archive = pack_folder(job)
    folder = unpack(tmp_path, archive.hash, archive.data)
    assert os.readlink(folder / "a" / "back") == "../run.sh"
    assert (folder / "run.sh").stat().st_mode & 0o7777 == 0o700
    assert (folder / "a").stat().st_mode & 0o7777 == 0o700
    assert (folder / "a" / "back").read_text() == "echo"


def test_a_set_user_id_bit_does_not_travel(tmp_path: Path) -> None:
    folder = unpack(tmp_path, *archive_of(("tool", FILE, "x")))
    assert (folder / "tool").stat().st_mode & 0o7777 == 0o700
