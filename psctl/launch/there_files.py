"""What psctl puts on a host and takes away again; a program sent along like there.py."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from typing import Any

Question = dict[str, Any]

DISK_FULL = 28
"""Exit status for a full disk (errno ENOSPC)."""


def unpack(question: Question) -> Question:
    """Unpack the archive on standard input under `folder`/`hash`, once: proved first, renamed last."""
    data = sys.stdin.buffer.read()
    target = os.path.join(os.path.expanduser(question["folder"]), question["hash"])
    tar = gzip.decompress(data)
    found = hashlib.sha256(tar).hexdigest()[:40]
    if found != question["hash"]:
        raise ValueError(f"the archive came as {found}, expected {question['hash']}")
    if os.path.isdir(target):
        return {"folder": target, "new": False}
    part = f"{target}.{os.getpid()}.{os.urandom(4).hex()}.part"  # hosts that share a disk share no process numbers
    os.makedirs(part)
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(part, filter="data")
            else:
                archive.extractall(part)  # noqa: S202 - its hash was proved: psctl made it
        if question.get("keep"):
            with open(f"{part}.tar.gz", "wb") as file:
                file.write(data)
            os.replace(f"{part}.tar.gz", f"{target}.tar.gz")
        try:
            os.rename(part, target)
        except OSError:
            if not os.path.isdir(target):  # another psctl was faster: the same bytes
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if os.path.exists(f"{part}.tar.gz"):
            os.unlink(f"{part}.tar.gz")
    return {"folder": target, "new": True}


def begin(question: Question) -> Question:
    """Make a job's folder on this host and write the orders on standard input into it, readable by this user only.

    With `claim` the job's name is taken: "taken" comes back when another machine was faster.
    """
    folder = os.path.expanduser(question["folder"])
    parent = os.path.dirname(folder)
    os.makedirs(os.path.dirname(parent), exist_ok=True)
    try:
        os.mkdir(parent)
    except FileExistsError:
        if question["claim"]:
            return {"taken": True}
    os.makedirs(folder, mode=0o700, exist_ok=True)
    descriptor = os.open(os.path.join(folder, "orders.json"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(sys.stdin.buffer.read())
    return {"taken": False}


def discard(question: Question) -> Question:
    """Remove a job's folder on this host after a submission that failed."""
    folder = os.path.expanduser(question["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.rmdir(os.path.dirname(folder))
    except OSError:
        return {"kept": True}  # another host of this machine has its folder there
    return {"kept": False}


def remove(question: Question) -> Question:
    """Remove what `up` put under the workdir; with `all` the jobs and checkpoints too."""
    workdir = os.path.expanduser(question["workdir"])
    parts = ["ready.json", "code", "envs", "wheels"] + (["jobs", "checkpoints"] if question["all"] else [])
    removed = []
    for part in parts:
        path = os.path.join(workdir, part)
        if os.path.isdir(path):
            shutil.rmtree(path)
            removed.append(path)
        elif os.path.exists(path):
            os.unlink(path)
            removed.append(path)
    if question["all"] and os.path.isdir(workdir) and not os.listdir(workdir):
        os.rmdir(workdir)
    return {"removed": removed}


VERBS = {"unpack": unpack, "remove": remove, "begin": begin, "discard": discard}


def main() -> int:
    verb, question = sys.argv[1], json.loads(sys.argv[2])
    try:
        print(json.dumps(VERBS[verb](question)))
    except OSError as error:
        print(error, file=sys.stderr)
        return DISK_FULL if error.errno == DISK_FULL else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
