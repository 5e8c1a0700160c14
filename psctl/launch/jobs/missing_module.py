"""Says how a module that a job's script could not import comes to its hosts: as a file of the user's or a package."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from psctl import errors
from psctl.launch.archive import walk
from psctl.launch.home import JobRecord
from psctl.spec.cluster import load_cluster
from psctl.spec.job import load_job

_MISSING = re.compile(r"ModuleNotFoundError: No module named '(?P<top>\w+)[\w.]*'")

MOST = 20_000
"""Folders that are looked through for the module's file at most."""

_PASSED = {".git", "__pycache__", "node_modules", "site-packages", ".venv", "venv"}


def cure(exception: str, record: JobRecord) -> str:
    """Return what to do about an exception that is a missing module's, "" about any other.

    Args:
        exception: "ModuleNotFoundError: No module named 'x.y'".
        record: the job; where its folder is still there, the module is looked for in it and beside it.
    """
    match = _MISSING.match(exception)
    if match is None:
        return ""
    return _as_file(match["top"], record) or _as_package(match["top"], record)


def _as_file(name: str, record: JobRecord) -> str:
    folder = Path(record.job_folder)
    if not record.job_folder or not folder.is_dir():
        return ""
    job = load_job(record.job_file, record.job_source)
    place = (folder / job.script).parent if job.script else folder
    try:
        sent = {each for each, _ in walk(folder, job.exclude)}
        inside = sorted(_below(folder, name), key=lambda path: (str(path.relative_to(folder)) not in sent, str(path)))
    except OSError:
        return ""  # a part of it cannot be read any more; then nothing is said of files
    for path in inside:
        where = path.relative_to(folder)
        if str(where) not in sent:
            left_out = next(str(each) for each in [*reversed(where.parents), where][1:] if str(each) not in sent)
            return (
                f"{path} was not sent: .gitignore or `exclude:` leaves {left_out} out; "
                f"`exclude: ['!{left_out}']` in the job file lets it in"
            )
        base = os.path.relpath(path.parent, folder)
        if path.parent == place:
            return f"{path} was sent; what is asked of it is not in it"
        return f"{path} was sent, but Python does not look in its folder: `env: {{PYTHONPATH: {base}}}` in the job file"
    near = [Path(record.job_source).parent, *itertools.islice(folder.parents, 2)]
    for path in (found for each in dict.fromkeys(near) for found in _in(each, name)):
        if not path.is_relative_to(folder):
            return f"{path} lies outside the job's folder {folder}: move it there, or widen `workdir:` in the job file"
    return ""


def _below(folder: Path, name: str) -> Iterator[Path]:
    for number, (at, folders, _) in enumerate(os.walk(folder)):
        folders[:] = [each for each in folders if each not in _PASSED]
        yield from _in(Path(at), name)
        if number > MOST:
            return


def _in(folder: Path, name: str) -> Iterator[Path]:
    """Yield the file or the package of that name in a folder."""
    if (folder / f"{name}.py").is_file():
        yield folder / f"{name}.py"
    if (folder / name).is_dir() and any((folder / name).glob("*.py")):
        yield folder / name


def _as_package(name: str, record: JobRecord) -> str:
    if not record.cluster.text:
        return f"install the package that provides {name}: {sys.executable} -m pip install {name}"
    try:
        runtime = load_cluster(record.cluster.text, record.cluster.source).runtime
    except errors.InvalidFile:
        return f"add the package that provides {name} to runtime.requirements in the cluster file"
    file = record.cluster.source or "the cluster file"
    if runtime.environment == "managed":
        return f"add the package that provides {name} to runtime.requirements in {file}, then psctl up {file}"
    return (
        f"install the package that provides {name} for {runtime.python} on the hosts; "
        f"or `environment: managed` in {file}, with the package in runtime.requirements"
    )
