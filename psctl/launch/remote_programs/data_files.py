"""Receives the data of jobs on a host, file by file, by content. The program is sent like host_state.py.

A file's content goes to NAME.part/parts/DIGEST as it arrives, and to whole/DIGEST once its hash is right. So what
arrived before an interruption is not sent again; the next psctl asks what is lacking.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from typing import Any, BinaryIO

from psctl.launch.remote_programs.data_store import (
    BLOCK,
    DataStore,
    Manifest,
    hash_file,
    keep_whole,
    link_or_copy,
)

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""

DISK_FULL = errno.ENOSPC
"""Exit status for a full disk."""


def store_of(question: Question) -> DataStore:
    """Return the store that a question names."""
    return DataStore(question["workdir"], question.get("jobs", []))


def check(question: Question) -> Question:
    """Return which sets are here whole, and the id of the disk; with `makes` it gets one where it has none."""
    store = store_of(question)
    if question.get("makes"):
        store.make()
    whole = {name: store.is_whole(name) for name in question["names"]}
    return {"store": store.id(), "whole": whole}


def link(question: Question) -> Question:
    """Make a set of a path of this machine: a link to it."""
    store = store_of(question)
    store.make()
    store.remove(question["name"])
    os.symlink(question["path"], store.path(question["name"]))
    store.write_manifest(question["name"], {"link": question["path"], "label": question["path"]})
    return {}


def need(question: Question) -> Question:
    """Begin a set, or continue one; the manifest comes on standard input.

    Contents of other sets here are linked.

    Returns:
        `busy`: another psctl sends this set; `lacking`: [digest, bytes that are here] of the contents to send;
        `removed`: sets that were removed to make room; `store`: the id of the disk.
    """
    manifest: Manifest = json.load(sys.stdin)
    store, name = store_of(question), question["name"]
    store.make()
    with store.lock(name) as mine:
        if not mine:
            return {"busy": True}
        if store.is_whole(name):
            return {"whole": True, "store": store.id()}
        part = store.path(name, ".part")
        for folder in (part, os.path.join(part, "whole"), os.path.join(part, "parts")):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(os.path.join(part, "manifest.json"), "w", encoding="ascii") as file:
            json.dump(manifest, file)
        sizes = {digest: size for _, size, digest, _ in manifest["files"]}
        lacking = {digest for digest in sizes if not os.path.exists(os.path.join(part, "whole", digest))}
        for digest, path in store.sound_files() if lacking else ():
            if digest in lacking:
                link_or_copy(path, os.path.join(part, "whole", digest))
                lacking.discard(digest)
        begun = {digest: begun_size(os.path.join(part, "parts", digest), sizes[digest]) for digest in lacking}
        removed = store.make_room(sum(sizes[each] - begun[each] for each in lacking), len(manifest["files"]))
        return {"lacking": sorted(begun.items()), "removed": removed, "store": store.id()}


def begun_size(path: str, size: int) -> int:
    """Return how many bytes of a file are here; one that is too long is none of it."""
    try:
        found = os.path.getsize(path)
    except OSError:
        return 0
    return found if found < size or size == 0 else 0


def receive(question: Question) -> Question:
    """Write the contents on standard input: a line with digest, size and offset, then the bytes from there on.

    Returns:
        `busy`: another psctl sends this set; `wrong`: digests of contents that arrived as others.
    """
    store, name, source = store_of(question), question["name"], sys.stdin.buffer
    wrong = []
    with store.lock(name) as mine:
        if not mine:
            return {"busy": True}
        part = store.path(name, ".part")
        while line := source.readline(1000):
            digest, size, offset, executable = json.loads(line)
            if len(digest) != 64 or not digest.isalnum():
                raise ValueError(f"{digest!r} is no digest")
            whole, begun = os.path.join(part, "whole", digest), os.path.join(part, "parts", digest)
            if os.path.exists(whole) or begun_size(begun, size) != offset:
                skip(source, size - offset)  # another psctl has sent it since
                continue
            if write_content(source, begun, size, offset) == digest:
                keep_whole(begun, whole, executable)
            else:
                os.unlink(begun)
                wrong.append(digest)
    return {"wrong": wrong}


def write_content(source: BinaryIO, begun: str, size: int, offset: int) -> str:
    """Write the rest of a file; return the digest of all of it.

    Raises:
        EOFError: the sender ended; what arrived is kept.
    """
    digest = hash_file(begun) if offset else hashlib.sha256()
    with open(begun, "ab" if offset else "wb") as file:
        left = size - offset
        while left:
            block = source.read(min(BLOCK, left))
            if not block:
                raise EOFError(f"{left} of {size} bytes did not arrive")
            file.write(block)
            digest.update(block)
            left -= len(block)
    found: str = digest.hexdigest()
    return found


def skip(source: BinaryIO, count: int) -> None:
    """Read bytes and drop them."""
    while count and (block := source.read(min(BLOCK, count))):
        count -= len(block)


def finish(question: Question) -> Question:
    """Make a complete set of a part whose contents are all here; the answer's `whole` says whether it is one."""
    store, name = store_of(question), question["name"]
    with store.lock(name) as mine:
        if not mine:
            return {"busy": True}
        if store.is_whole(name):
            return {"whole": True}
        part = store.path(name, ".part")
        with open(os.path.join(part, "manifest.json"), encoding="ascii") as file:
            manifest: Manifest = json.load(file)
        if not all(os.path.exists(os.path.join(part, "whole", digest)) for _, _, digest, _ in manifest["files"]):
            return {"whole": False}
        store.finish(name, manifest)
        return {"whole": True}


VERBS = {"check": check, "link": link, "need": need, "receive": receive, "finish": finish}


def main() -> int:
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    os.umask(0o077)
    try:
        print(json.dumps(VERBS[verb](question)))
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
