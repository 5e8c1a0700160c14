"""Fetches the data of a URL on a host, with the fsspec of the job's Python. The program is sent like host_state.py.

A set of a URL is named by the URL and its content. Its manifest keeps what the place said about each file (size, and
ETag or time); while that is the same, nothing is fetched. A file that came in part continues.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
from typing import Any

from psctl.launch.remote_programs.data_store import BLOCK, DataStore, hash_file, keep_whole, link_or_copy

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""

FileSystem = Any
"""A file system of fsspec, which has no types."""

DISK_FULL, NO_PACKAGE, NOT_FETCHED = errno.ENOSPC, 201, 202
"""Exit statuses: a full disk; a package is missing; the place refused or broke off."""

STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "mtime", "created")
"""Keys under which file systems say what changes with a file's content."""

REPORTED = 1 << 22
"""Bytes after which the progress is printed."""


def open_url(url: str) -> tuple[FileSystem, str]:
    """Return the file system of a URL, and the path in it. Raises ImportError where a package is missing."""
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    return system, path


def files_of(system: FileSystem, path: str) -> tuple[list[tuple[str, str, int, str]], bool]:
    """Return (name in the set, path, size, stamp) of all files at a path, and whether it is one file.

    Raises:
        ValueError: a name leads out of the set, or a file has no size.
    """
    if system.isfile(path):
        found, single = {path: system.info(path)}, True
    else:
        found, single = system.find(path, detail=True), False
    rows = []
    for each, info in sorted(found.items()):
        name = os.path.basename(each.rstrip("/")) if single else each[len(path.rstrip("/")) :].strip("/")
        parts = name.split("/")
        if not all(parts) or {".", ".."} & set(parts) or "\0" in name:
            raise ValueError(f"{each}: no path inside a folder")
        if not isinstance(info.get("size"), int):
            raise ValueError(f"{each}: its size is not known there")
        stamp = next((f"{key}={info[key]}" for key in STAMPS if info.get(key)), "")
        rows.append((name, each, info["size"], stamp))
    if not rows:
        raise FileNotFoundError(errno.ENOENT, "there are no files", path)
    return rows, single


def fetch(question: Question) -> Question:
    """Fetch a URL's files unless they are here; print `=BYTES` that are to come, then `+BYTES` as they come.

    Returns:
        `busy`: another psctl fetches them; `name`, `inner`, `files`, `bytes`: the set; `fetched`: bytes that came.
    """
    store, url = DataStore(question["workdir"], question["jobs"]), question["url"]
    store.make()
    key = "url-" + hashlib.sha256(url.encode()).hexdigest()[:16]
    system, path = open_url(url)
    rows, single = files_of(system, path)
    said = [[name, size, stamp] for name, _, size, stamp in rows]
    with store.lock(key) as mine:
        if not mine:
            return {"busy": True}
        for name in known_sets(store, key):
            manifest = store.manifest(name)
            if manifest and manifest["said"] == said and all(stamp for *_, stamp in said) and store.is_whole(name):
                return answer(name, single, rows, 0)
        return get(store, key, url, system, rows, single, said)


def known_sets(store: DataStore, key: str) -> list[str]:
    """Return the names of the sets of a URL."""
    return sorted(
        name[: -len(".json")]
        for name in os.listdir(store.folder)
        if name.startswith(key + "-") and name.endswith(".json")
    )


def get(
    store: DataStore, key: str, url: str, system: FileSystem, rows: list[tuple[str, str, int, str]], single: bool,
    said: list[list[Any]],
) -> Question:  # fmt: skip
    """Fetch what is not here, and make the set."""
    part = store.path(key, ".part")
    for folder in (part, os.path.join(part, "whole"), os.path.join(part, "parts")):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    here = reusable(store, key)
    parts = {name: part_of(part, url, name, size, stamp) for name, _, size, stamp in rows}
    lacking = sum(
        size - (os.path.getsize(parts[name]) if os.path.exists(parts[name]) else 0)
        for name, _, size, stamp in rows
        if (name, size, stamp) not in here
    )
    store.make_room(max(0, lacking), len(rows))
    print(f"={max(0, lacking)}", flush=True)
    files, fetched = [], 0
    for name, there, size, stamp in rows:
        known = here.get((name, size, stamp))
        if known is not None:
            digest, source = known
            if not os.path.exists(os.path.join(part, "whole", digest)):
                link_or_copy(source, os.path.join(part, "whole", digest))
        else:
            fetched += get_file(system, there, size, parts[name])
            digest = hash_file(parts[name]).hexdigest()
            keep_whole(parts[name], os.path.join(part, "whole", digest))
        files.append([name, size, digest, False])
    content = hashlib.sha256(json.dumps(files).encode("ascii")).hexdigest()[:20]
    name = f"{key}-{content}"
    if not store.is_whole(name):
        os.rename(part, store.path(name, ".part"))
        store.finish(name, {"files": files, "folders": [], "label": f"url:{url}", "said": said})
    else:  # the same content under other stamps
        shutil.rmtree(part)
        store.write_manifest(name, {**(store.manifest(name) or {}), "said": said})
    return answer(name, single, rows, fetched)


def part_of(part: str, url: str, name: str, size: int, stamp: str) -> str:
    """Return where a file arrives: another place for each state of it."""
    return os.path.join(part, "parts", hashlib.sha256(json.dumps([url, name, size, stamp]).encode("ascii")).hexdigest())


def reusable(store: DataStore, key: str) -> dict[tuple[str, int, str], tuple[str, str]]:
    """Return (digest, path) of the sound files of a URL's sets here, by name, size and stamp."""
    sound = {path: digest for digest, path in store.sound_files()}
    found = {}
    for name in known_sets(store, key):
        manifest = store.manifest(name) or {"said": []}
        for inner, size, stamp in manifest["said"]:
            path = os.path.join(store.path(name), inner)
            if stamp and path in sound:
                found[inner, size, stamp] = (sound[path], path)
    return found


def get_file(system: FileSystem, there: str, size: int, begun: str) -> int:
    """Fetch the rest of a file; return its bytes.

    Raises:
        EOFError: fewer bytes came than the place said.
    """
    offset = os.path.getsize(begun) if os.path.exists(begun) else 0
    if offset > size:
        os.unlink(begun)
        offset = 0
    came = unreported = 0
    with open(begun, "ab") as file:
        if offset < size or not size:
            with system.open(there, "rb") as source:
                source.seek(offset) if offset else None
                while offset + came < size and (block := source.read(min(BLOCK, size - offset - came))):
                    file.write(block)
                    came += len(block)
                    unreported += len(block)
                    if unreported >= REPORTED:
                        print(f"+{unreported}", flush=True)
                        unreported = 0
    if offset + came != size:
        raise EOFError(f"{there}: {offset + came} of {size} bytes came")
    print(f"+{unreported}", flush=True)
    return came


def answer(name: str, single: bool, rows: list[tuple[str, str, int, str]], fetched: int) -> Question:
    """Return what psctl is told of a set."""
    total = sum(size for _, _, size, _ in rows)
    inner = rows[0][0] if single else ""
    return {"name": name, "inner": inner, "files": len(rows), "bytes": total, "fetched": fetched}


def main() -> int:
    question = json.loads(sys.argv[2])
    os.umask(0o077)
    os.environ.update(json.load(sys.stdin))  # credentials among them, which must not be on a command line
    try:
        print(json.dumps(fetch(question)))
    except ImportError as error:
        print(error, file=sys.stderr)
        return NO_PACKAGE
    except Exception as error:  # noqa: BLE001  each file system of fsspec has exceptions of its own
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return DISK_FULL if full else NOT_FETCHED
    return 0


if __name__ == "__main__":
    sys.exit(main())
