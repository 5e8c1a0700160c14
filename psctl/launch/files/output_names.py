"""Which of a host's files are fetched, and under which names they lie here. Pure.

A name that several hosts have stays as it is where the contents are equal; else each content lies in the folder of the
first worker of its host: `worker-1/out/log.txt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from psctl.grouping import grouped
from psctl.launch import ignore

PARTIAL = ".psctl-partial"
"""The folder of files that are being fetched."""

LONGEST = 4096


class OutputFile(NamedTuple):
    """A file that a script wrote on a host."""

    host: str
    name: str
    size: int
    mtime: int  # ns
    inode: int


def fault(file: OutputFile) -> str:
    """Return why a file that a host names cannot be fetched, or "": its name leads out of the folder, for example."""
    parts = file.name.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\0" in file.name or len(file.name) > LONGEST:
        return "its name is no path inside a folder"
    if parts[0] == PARTIAL:
        return "its name is one that psctl uses"
    return "" if file.size >= 0 and 0 <= file.mtime < 1 << 62 else "its size or time is none"


def selected(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name, or a folder above it, matches the patterns, as those of .gitignore; a later `!` wins."""
    found = not patterns
    above = [str(each) for each in PurePosixPath(name).parents][:-1]
    for rule in (rule for pattern in patterns for rule in ignore.parse(pattern)):
        if rule.matches(name, folder=False) or any(rule.matches(each, folder=True) for each in above):
            found = not rule.negated
    return found


def colliding(files: Iterable[OutputFile]) -> dict[str, list[OutputFile]]:
    """Return the files whose names several hosts have, by name; also a file of one that is a folder of another."""
    by_name = grouped((file.name, file) for file in files)
    folders = {str(above) for name in by_name for above in PurePosixPath(name).parents}
    return {name: found for name, found in by_name.items() if len(found) > 1 or name in folders}


def local_names(
    files: Sequence[OutputFile], contents: Mapping[OutputFile, str], folders: Mapping[str, str]
) -> dict[str, list[OutputFile]]:
    """Return the files by their names here; those of one name have equal contents, and one of them is fetched.

    Args:
        files: all of them.
        contents: the hash of each file whose name several hosts have.
        folders: the folder of each host, for names that several have with different contents.
    """
    tops = {file.name.partition("/")[0] for file in files}
    own: dict[str, str] = {}
    for host, folder in folders.items():
        while folder in tops or folder in own.values():
            folder += "_"
        own[host] = folder
    clashes = colliding(files)
    found: dict[str, list[OutputFile]] = {}
    for file in files:
        if file.name not in clashes:
            found[file.name] = [file]
    for name, several in clashes.items():
        by_content = grouped((contents.get(file) or f"{file.host}:{file.name}", file) for file in several)
        alone = len(by_content) == 1 and len(several) > 1
        for equal in by_content.values():
            found[name if alone else f"{own[equal[0].host]}/{name}"] = list(equal)
    return found
