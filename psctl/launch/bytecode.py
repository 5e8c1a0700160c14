"""The bytecode of psctl's own modules on this machine, described so that a host that sees these files can use them.

A host compiles the modules that it was sent when processes first import them, 0.15 to 0.7 s of each process of the
first job. This machine has compiled them before, and it is a host itself in local jobs; hosts that share a disk with it
see its files too. So a description of the files is sent with the archive, not the files, which have twice its size. A
host takes them only if they have the digest described (`host_files.copy_bytecode`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

import psctl
from psctl.launch.remote_programs.host_files import BYTECODE_HEADER, bytecode_path


class Bytecode(msgspec.Struct, frozen=True):
    """The compiled modules of a package.

    `folder` holds the package, `tag` and `magic` are of the Python that compiled, `names` are the modules' paths
    without ".py"; `bytes` and `digest` are the length and the SHA-256 of their files, one after the other.
    """

    folder: str
    tag: str
    magic: str
    names: list[str]
    bytes: int
    digest: str


@cache
def psctl_bytecode(files: tuple[str, ...]) -> Bytecode | None:
    """Return the bytecode of psctl's modules; as `find_bytecode`."""
    return find_bytecode(Path(psctl.__file__).resolve().parents[1], files)


def find_bytecode(folder: Path, files: Iterable[str]) -> Bytecode | None:
    """Return the bytecode that is valid for the present sources of modules; None if there is none.

    Args:
        folder: the folder that holds their package; bytecode that lies elsewhere (PYTHONPYCACHEPREFIX) is not found.
        files: the files of the archive that is sent.
    """
    tag = sys.implementation.cache_tag
    if not tag:
        return None
    names, size, digest = [], 0, hashlib.sha256()
    for name in sorted(file.removesuffix(".py") for file in files if file.endswith(".py")):
        try:
            data = Path(bytecode_path(str(folder), name, tag)).read_bytes()
            about = (folder / f"{name}.py").stat()
        except OSError:  # never imported here
            continue
        if data[:BYTECODE_HEADER] == _header(about):
            names.append(name)
            size += len(data)
            digest.update(data)
    magic = importlib.util.MAGIC_NUMBER.hex()
    return Bytecode(str(folder), tag, magic, names, size, digest.hexdigest()) if names else None


def _header(source: os.stat_result) -> bytes:
    """Return the first bytes of a file of bytecode that Python checks by the time and size of its source (PEP 552)."""
    numbers = (0, int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
    return importlib.util.MAGIC_NUMBER + b"".join(number.to_bytes(4, "little") for number in numbers)
