"""A host that sees the sender's bytecode takes it, and only if it is the bytecode that the sender described."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl.launch.archive import Archive, pack_folder, pack_psctl
from psctl.launch.bytecode import Bytecode, find_bytecode, psctl_bytecode
from psctl.launch.host_programs import HOST_FILES, OBJECT, run_program
from psctl.remote.local import LocalShell


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of this machine: two modules are compiled, one is not, and one was changed since."""
    made = tmp_path / "here" / "pack"
    (made / "inner").mkdir(parents=True)
    for name in ("__init__", "inner/__init__", "inner/compiled", "changed", "new"):
        (made / f"{name}.py").write_text(f"NAME = {name!r}\n")
        if name != "new":
            py_compile.compile(str(made / f"{name}.py"))
    (made / "changed.py").write_text("NAME = 'it is another'\n")
    return made


@pytest.fixture
def unpacked(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Unpack an archive as a host does; return the folder."""
    (tmp_path / "home").mkdir()
    shell = LocalShell("here", str(tmp_path / "home"))

    def unpack(archive: Archive, bytecode: Bytecode | None, python: str = sys.executable) -> Path:
        question = {"folder": str(tmp_path / "code"), "hash": archive.hash, "bytecode": msgspec.to_builtins(bytecode)}
        done = run_program(shell, python, HOST_FILES, "unpack", question, OBJECT, stdin=archive.data)
        assert done["new"] is True
        return Path(str(done["folder"]))

    yield unpack
    shell.close()


def caches(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.rglob("*.pyc"))


def described(package: Path) -> Bytecode:
    found = find_bytecode(package.parent, pack_folder(package.parent).files)
    assert found is not None
    return found


def test_only_bytecode_that_is_valid_for_its_source_is_described(package: Path) -> None:
    assert described(package).names == ["pack/__init__", "pack/inner/__init__", "pack/inner/compiled"]


def test_a_package_that_was_never_imported_has_none(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "new.py").write_text("")
    assert find_bytecode(tmp_path, ["pack/new.py"]) is None


def test_modules_that_are_not_sent_are_not_described(package: Path) -> None:
    """An installed psctl has its templates compiled too, which hosts are not sent."""
    found = find_bytecode(package.parent, ["pack/__init__.py", "pack/data.txt", "pack/gone.py"])
    assert found is not None
    assert found.names == ["pack/__init__"]


def test_psctl_describes_its_own_modules() -> None:
    found = psctl_bytecode(tuple(pack_psctl().files))
    if sys.flags.dont_write_bytecode:
        pytest.skip("no bytecode is written here")
    assert found is not None
    assert "psctl/launch/bytecode" in found.names


def test_a_host_that_sees_it_imports_it_without_compiling(package: Path, unpacked: Any) -> None:
    folder = unpacked(pack_folder(package.parent), described(package))
    assert caches(folder) == ["__init__", "__init__", "compiled"]
    before = {path: path.read_bytes() for path in folder.rglob("*.pyc")}
    for path in folder.rglob("*.py"):
        os.utime(path, (1, 1))  # it is not compared
    code = "import pack.inner.compiled as it, pack.changed; print(it.NAME, it.__file__, pack.changed.NAME)"
    options = ["-P", "--check-hash-based-pycs", "always"]
    ran = subprocess.run(
        [sys.executable, *options, "-c", code], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert ran.stdout.split(maxsplit=2) == ["inner/compiled", f"{folder}/pack/inner/compiled.py", "it is another\n"]
    assert {path: path.read_bytes() for path in before} == before  # Python writes again what it does not accept


def test_modes_are_the_users_alone(package: Path, unpacked: Any) -> None:
    folder = unpacked(pack_folder(package.parent), described(package))
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.pyc")} == {0o600}


def changed_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "harm", [Path.unlink, changed_byte, pipe, endless], ids=["missing", "changed", "pipe", "endless"]
)
def test_other_files_at_that_path_are_not_taken(harm: Callable[[Path], None], package: Path, unpacked: Any) -> None:
    archive, known = pack_folder(package.parent), described(package)
    harm(Path(importlib.util.cache_from_source(str(package / "inner" / "compiled.py"))))
    assert caches(unpacked(archive, known)) == []


def test_another_python_compiles_by_itself(package: Path, unpacked: Any) -> None:
    known = msgspec.structs.replace(described(package), magic="00000000")
    assert caches(unpacked(pack_folder(package.parent), known)) == []


def test_where_it_cannot_be_written_the_modules_are_there_without_it(
    package: Path, unpacked: Any, tmp_path: Path
) -> None:
    """As on a full disk: here a file may have as many bytes as the largest module."""
    (package / "large.py").write_text("".join(f"A{number} = 'a{number}'\n" for number in range(2000)))
    py_compile.compile(str(package / "large.py"))
    archive, known = pack_folder(package.parent), described(package)
    size = (package / "large.py").stat().st_size
    assert Path(importlib.util.cache_from_source(str(package / "large.py"))).stat().st_size > size + 1024
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -f {size // 512 + 1}\nexec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    folder = unpacked(archive, known, str(limited))
    assert caches(folder) == []
    assert (folder / "pack" / "large.py").stat().st_size == size
