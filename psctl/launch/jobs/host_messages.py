"""Translates messages of a job's hosts for the machine that submitted it: its own paths, and commands that work there.

A job's folder is sent to hosts, and its workers run in a copy of it, `WORKDIR/jobs/JOB/HOST/files`. Tracebacks and
warnings name files there; users open their own.
Only positions in source files are translated (`File "...", line 12`, `....py:12`): any other path that a process prints
is one on its host. A restored job runs the code of its checkpoint, not that of a folder here; its files are named
relative to their folder.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from psctl import errors
from psctl.job.events import AnyEvent, Finished, Log, StateChanged, WorkerLost
from psctl.job.failures import TRAIN_AGAIN
from psctl.launch.archive import walk
from psctl.launch.clusters import shown_path
from psctl.launch.home import JobRecord
from psctl.spec.noted_options import load_noted
from psctl.types import JsonObject

_MISSING = re.compile(r"ModuleNotFoundError: No module named '(?P<top>\w+)[\w.]*'")

MOST = 20_000
"""Folders that are looked through for the module's file at most."""

_SKIPPED = {".git", "__pycache__", "node_modules", "site-packages", ".venv", "venv"}


class SourcePaths:
    """Translates places in a job's source files from its hosts to this machine.

    Args:
        record: the job.
    """

    def __init__(self, record: JobRecord) -> None:
        self._record = record
        self._mark = f"jobs/{record.job}/"
        self._folder = f"{record.job_folder}/" if record.job_folder else ""
        there = {re.escape(host.files) for host in record.hosts}
        there |= {  # by another name: the workdir may be a link
            rf"[^\s\"'<>=(]*/jobs/{re.escape(record.job)}/{re.escape(host.name)}/files" for host in record.hosts
        }
        prefix = "|".join(sorted(there, key=len, reverse=True))
        self._pattern = re.compile(rf'(?:{prefix})/(?=[^"\n]*?\.pyw?(?:", line \d|:\d))')

    def text(self, text: str) -> str:
        """Return text with the positions in the job's source files as they are named on this machine."""
        if self._mark not in text:
            return text
        return self._pattern.sub(lambda _: self._folder, text)

    def event(self, event: AnyEvent) -> AnyEvent:
        """Return an event with all its texts translated."""
        match event:
            case Log(text=text):
                translated = self.text(text)
                return event if translated is text else msgspec.structs.replace(event, text=translated)
            case StateChanged(last_error=error):
                return msgspec.structs.replace(event, last_error=self.text(error)) if error else event
            case WorkerLost(reason=reason):
                return msgspec.structs.replace(event, reason=self.text(reason))
            case Finished(failure=failure) if failure:
                return msgspec.structs.replace(event, failure=self._failure(failure))
            case _:
                return event

    def _failure(self, failure: JsonObject) -> JsonObject:
        frames = [self._frame(frame) for frame in _texts(failure.get("frames"))]
        tail = [self.text(line) for line in _texts(failure.get("tail"))]
        exception = self.text(str(failure.get("exception") or ""))
        hint = failure.get("hint") or missing_module_cure(exception, self._record)
        return {**failure, "exception": exception, "frames": frames, "tail": tail, "hint": hint}

    def _frame(self, frame: str) -> str:
        """Return a traceback frame with the path of this machine; frames outside the job's folder stay as they are."""
        return self.text(frame) if os.path.isabs(frame) or frame.startswith("<") else self._folder + frame


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def resumed_by(failure: JsonObject, record: JobRecord, options: Sequence[str] = ()) -> JsonObject:
    """Return a failure whose `resume` names the job file on this machine.

    Args:
        failure: `finished.failure`.
        record: the job.
        options: those that `train` needs to run the same job on the same cluster, quoted where they must be.
    """
    source = Path(record.job_source)
    if failure.get("resume") != TRAIN_AGAIN or not source.is_file():
        return failure
    return {**failure, "resume": " ".join(["psctl train", shown_path(source), *options, "--resume latest"])}


# ---- a module that a script could not import -------------------------------------------------------------------------


def missing_module_cure(exception: str, record: JobRecord) -> str:
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
    job = load_noted(record.job_file, record.job_source)
    script_folder = (folder / job.script).parent if job.script else folder
    try:
        sent = {each for each, _ in walk(folder, job.exclude)}
        inside = sorted(_below(folder, name), key=lambda path: (str(path.relative_to(folder)) not in sent, str(path)))
    except OSError:
        return ""  # a part of it cannot be read any more: no advice about files
    for path in inside:
        where = path.relative_to(folder)
        if str(where) not in sent:
            left_out = next(str(each) for each in [*reversed(where.parents), where][1:] if str(each) not in sent)
            return (
                f"{path} was not sent: .gitignore or `exclude:` leaves {left_out} out; "
                f"`exclude: ['!{left_out}']` in the job file lets it in"
            )
        base = os.path.relpath(path.parent, folder)
        if path.parent == script_folder:
            return f"{path} was sent, but it does not contain the imported name"
        return f"{path} was sent, but Python does not look in its folder: `env: {{PYTHONPATH: {base}}}` in the job file"
    near = [Path(record.job_source).parent, *itertools.islice(folder.parents, 2)]
    for path in (found for each in dict.fromkeys(near) for found in _in(each, name)):
        if not path.is_relative_to(folder):
            return f"{path} lies outside the job's folder {folder}: move it there, or widen `workdir:` in the job file"
    return ""


def _below(folder: Path, name: str) -> Iterator[Path]:
    for number, (at, folders, _) in enumerate(os.walk(folder)):
        folders[:] = [each for each in folders if each not in _SKIPPED]
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
        runtime = record.cluster.spec().runtime
    except errors.InvalidFile:
        return f"add the package that provides {name} to runtime.requirements in the cluster file"
    file = record.cluster.source or "the cluster file"
    if runtime.environment == "managed":
        return f"add the package that provides {name} to runtime.requirements in {file}, then psctl up {file}"
    return (
        f"install the package that provides {name} for {runtime.python} on the hosts; "
        f"or `environment: managed` in {file}, with the package in runtime.requirements"
    )
