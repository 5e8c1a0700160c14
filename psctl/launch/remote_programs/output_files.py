"""Lists and sends what a job's script wrote on a host. The program is sent like host_state.py.

The folder is the one in which the job's workers run. What was sent with the job is left out while it is unchanged, as
is the job's data, which is linked. A link is followed where it leads to another place in the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any

Question = dict[str, Any]
"""A question, or an answer, as JSON has it. Any: only the standard library is there to read one."""

BLOCK = 1 << 18

MOST = 1_000_000
"""Files that are listed."""


def written(folder: str, code: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, what it is) of the files below `folder` that are not as in `code`, in order of name."""
    whole = os.path.realpath(folder)
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        base = os.path.relpath(at, folder)
        for name in sorted(names):
            path = os.path.join(at, name)
            inner = os.path.normpath(os.path.join(base, name))
            try:
                info = os.stat(path)
            except OSError:
                continue  # a link to nothing, or a file that is gone
            if not stat.S_ISREG(info.st_mode) or os.path.commonpath([whole, os.path.realpath(path)]) != whole:
                continue
            if not is_sent(path, os.path.join(code, inner), info):
                yield inner, info


def is_sent(path: str, original: str, info: os.stat_result) -> bool:
    """Return whether a file is as it was sent."""
    try:
        found = os.stat(original)
    except OSError:
        return False
    if os.path.islink(path):
        return os.path.islink(original) and os.readlink(path) == os.readlink(original)
    return (found.st_size, found.st_mtime_ns) == (info.st_size, info.st_mtime_ns)


def listing(question: Question) -> Question:
    """Return [name, size, mtime in ns, inode] of each file that the script wrote; `more`: there are more than MOST."""
    folder, code = os.path.expanduser(question["files"]), os.path.expanduser(question["code"])
    found: list[list[object]] = []
    for name, info in written(folder, code):
        if len(found) == MOST:
            return {"files": found, "more": True}
        found.append([name, info.st_size, info.st_mtime_ns, info.st_ino])
    return {"files": found, "more": False}


def hashes(question: Question) -> Question:
    """Return the SHA-256 of the files whose names are on standard input; "" for one that cannot be read."""
    folder = os.path.expanduser(question["files"])
    found: list[str] = []
    for name in json.load(sys.stdin):
        digest = hashlib.sha256()
        try:
            with open(os.path.join(folder, name), "rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
        except OSError:
            found.append("")
        else:
            found.append(digest.hexdigest())
    return {"hashes": found}


def send(question: Question) -> None:
    """Write the files that standard input names, [name, size, offset] each: the bytes from the offset on.

    Before the bytes is a line with `true`, or with the reason why the file is not sent. After them is a line with the
    SHA-256 of the file's first `size` bytes, or "" where it was changed meanwhile.
    """
    folder, out = os.path.expanduser(question["files"]), sys.stdout.buffer
    for name, size, offset in json.load(sys.stdin):
        digest, at = hashlib.sha256(), 0
        try:
            file = open(os.path.join(folder, name), "rb")  # noqa: SIM115  closed below
        except OSError as error:
            out.write(json.dumps(error.strerror).encode() + b"\n")
            continue
        with file:
            out.write(b"true\n")
            whole = True
            while at < size:
                block = file.read(min(BLOCK, (offset if at < offset else size) - at))
                if not block:  # it became shorter: the reader counts on `size` bytes
                    whole = False
                    block = bytes(min(BLOCK, (offset if at < offset else size) - at))
                if at >= offset:
                    out.write(block)
                digest.update(block)
                at += len(block)
        out.write(json.dumps(digest.hexdigest() if whole else "").encode() + b"\n")
    out.flush()


def main() -> int:
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    if verb == "send":
        send(question)
    else:
        print(json.dumps({"list": listing, "hashes": hashes}[verb](question)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
