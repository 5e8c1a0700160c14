"""Folders as content-addressed archives: the same files give the same name on every machine.

An archive is a tar (sorted, times 0, owner 0, modes 600 or 700) compressed with gzip. Its name is the hash of the tar,
not of the compressed bytes, which depend on the version of zlib. Symbolic links inside the folder are sent as links; a
link that leads outside is refused, because it would be another file on another host.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import psctl
from psctl import errors
from psctl.launch import ignore
from psctl.launch.pins import CONSTRAINTS
from psctl.units import format_bytes

WARN = 100_000_000
"""Bytes of files from which on a folder is sent with a warning."""

LIMIT = 2_000_000_000
"""Bytes of files from which on a folder is refused: data is not sent with code."""


UNPACKED_LIMIT = 2 * LIMIT
"""Bytes of a tar at most: the files of a folder, and what tar adds."""


class Archive:
    """A packed folder, compressed when it is first sent: most hosts have it already.

    Args:
        name: the hash of the tar.
        files: the names in it.
        size: bytes of its files.
        warning: a sentence for the user, or "".
        tar: the uncompressed archive.
        level: of gzip.
        data: the compressed archive, where there is one already.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[str],
        size: int,
        warning: str = "",
        *,
        tar: bytes = b"",
        level: int = 6,
        data: bytes = b"",
    ) -> None:
        self.hash, self.files, self.size, self.warning = name, list(files), size, warning
        self._tar, self._level, self._data = tar, level, data
        self._lock = threading.Lock()

    @property
    def data(self) -> bytes:
        """The compressed archive."""
        with self._lock:  # hosts are sent it by several threads
            if not self._data:
                self._data, self._tar = gzip.compress(self._tar, self._level, mtime=0), b""
            return self._data


def pack_folder(folder: Path, exclude: Sequence[str] = ()) -> Archive:
    """Pack a job's folder.

    Args:
        folder: what to send.
        exclude: patterns as in .gitignore, added to those found in the folder and its repository.

    Raises:
        InvalidFile: the folder is missing, too large, or holds a link that leads outside; the user's fault.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise errors.InvalidFile(f"workdir: {folder} is no folder", hint="name the folder that holds the script")
    entries = list(walk(folder, exclude))
    sizes = {name: path.lstat().st_size for name, path in entries if path.is_file() and not path.is_symlink()}
    size = sum(sizes.values())
    warning = ""
    if size > WARN:
        largest = ", ".join(f"{n} ({format_bytes(sizes[n])})" for n in sorted(sizes, key=lambda n: -sizes[n])[:3])
        warning = f"the job's folder has {format_bytes(size)}, largest: {largest}"
    if size > LIMIT:
        raise errors.InvalidFile(warning, hint="leave data out with `exclude:` in the job file, or .gitignore")
    data = _tar(entries)
    return Archive(_name(data), [name for name, _ in entries], size, warning, tar=data)


def prove(data: bytes, name: str) -> None:
    """Check that a packed archive is the one of this name.

    Raises:
        InvalidFile: it is another one.
    """
    found, size = hashlib.sha256(), 0
    try:
        with gzip.open(io.BytesIO(data)) as unpacked:
            while part := unpacked.read(1 << 20):
                size += len(part)
                if size > UNPACKED_LIMIT:
                    raise errors.InvalidFile(f"an archive of more than {UNPACKED_LIMIT} bytes")
                found.update(part)
    except (OSError, EOFError, zlib.error) as error:
        raise errors.InvalidFile(f"it is not a valid archive: {error}") from error
    if found.hexdigest()[:40] != name:
        raise errors.InvalidFile("its bytes do not match its name")


def pack_psctl() -> Archive:
    """Pack psctl's own package, without templates; it is sent to hosts in place of an installation."""
    root = Path(psctl.__file__).resolve().parent
    entries = [
        (f"psctl/{name}", path)
        for name, path in walk(root, ("_templates/", "_clusters/"))
        if path.is_dir() or path.suffix == ".py" or name == CONSTRAINTS
    ]
    data = _tar([("psctl", root), *entries])
    size = sum(path.stat().st_size for _, path in entries if path.is_file())
    return Archive(_name(data), [name for name, _ in entries], size, tar=data)


def pack_wheels(folder: Path) -> Archive:
    """Pack a wheelhouse: the wheels and source archives that lie directly in it.

    Raises:
        InvalidFile: it is no folder, or holds nothing to install; the user's fault.
    """
    found = sorted(folder.glob("*.whl")) + sorted(folder.glob("*.tar.gz")) if folder.is_dir() else []
    if not found:
        raise errors.InvalidFile(f"runtime.wheelhouse: {folder} holds no wheels", hint="pip download -d FOLDER ...")
    data = _tar([(path.name, path) for path in found])
    return Archive(_name(data), [path.name for path in found], len(data), tar=data, level=1)


def walk(folder: Path, exclude: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, path) of everything that is sent, parents before children, in order of name."""
    top = [rule for pattern in ignore.ALWAYS for rule in ignore.parse(pattern)]
    above, prefix = _rules_above(folder)
    own = [rule for pattern in exclude for rule in ignore.parse(pattern)]
    yield from _walk(folder, "", top, above, prefix, [], own)


def _walk(
    folder: Path,
    at: str,
    top: list[ignore.Rule],
    above: list[ignore.Rule],
    prefix: str,
    found: list[ignore.Rule],
    own: list[ignore.Rule],
) -> Iterator[tuple[str, Path]]:
    gitignore = folder / ".gitignore"
    if gitignore.is_file():
        found = [*found, *ignore.parse(gitignore.read_text(errors="replace"), at)]
    inside = [ignore.Rule(prefix + rule.base, rule.pattern, rule.folders_only, rule.negated) for rule in found]
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name, is_folder = at + entry.name, entry.is_dir(follow_symlinks=False)
        if ignore.is_left_out(name, is_folder, top) or ignore.is_left_out(name, is_folder, own):
            continue
        # `exclude: ["!x"]` overrides .gitignore
        let_in = any(rule.negated and rule.matches(name, is_folder) for rule in own)
        if not let_in and ignore.is_left_out(prefix + name, is_folder, [*above, *inside]):
            continue
        if not (is_folder or entry.is_symlink() or entry.is_file()):
            continue  # sockets, pipes and devices are not sent
        yield name, Path(entry.path)
        if is_folder:
            yield from _walk(Path(entry.path), name + "/", top, above, prefix, found, own)


def _rules_above(folder: Path) -> tuple[list[ignore.Rule], str]:
    """Return the rules of the repository around the folder, and the folder's path in it ("jobs/mnist/").

    Rules that leave the folder itself out are ignored, because the user has named the folder.
    """
    parents = [folder, *folder.parents]
    root = next((parent for parent in parents if (parent / ".git").exists()), None)
    if root is None or root == folder:
        return [], ""
    rules: list[ignore.Rule] = []
    inner = folder.relative_to(root).parts
    for depth in range(len(inner)):
        parent = root.joinpath(*inner[:depth])
        base = "".join(f"{part}/" for part in inner[:depth])
        if (parent / ".gitignore").is_file():
            rules += ignore.parse((parent / ".gitignore").read_text(errors="replace"), base)
        if ignore.is_left_out("/".join(inner[: depth + 1]), True, rules):
            return [], ""
    return rules, "/".join(inner) + "/"


def _tar(entries: list[tuple[str, Path]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        root = _root(entries)
        for name, path in entries:
            _add(tar, name, path, root)
    return buffer.getvalue()


def _root(entries: list[tuple[str, Path]]) -> Path:
    if not entries:
        return Path("/")
    name, path = entries[0]
    return path.parents[len(Path(name).parts) - 1]


def _add(tar: tarfile.TarFile, name: str, path: Path, root: Path) -> None:
    info = tarfile.TarInfo(name)
    if path.is_symlink():
        target = os.readlink(path)
        meant = Path(os.path.normpath(path.parent / target))
        if os.path.isabs(target) or not meant.is_relative_to(root):
            raise errors.InvalidFile(
                f"{path}: a link to {target}, which is outside the job's folder and would not be there on a host",
                hint="put a copy in its place, or leave it out with `exclude:`",
                where=str(path),
            )
        info.type, info.linkname = tarfile.SYMTYPE, os.path.relpath(meant, path.parent)
        tar.addfile(info)
    elif path.is_dir():
        info.type, info.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(info)
    else:
        data = path.read_bytes()
        info.size, info.mode = len(data), 0o700 if os.access(path, os.X_OK) else 0o600
        tar.addfile(info, io.BytesIO(data))


def _name(tar: bytes) -> str:
    return hashlib.sha256(tar).hexdigest()[:40]
