"""Translates what a job's hosts tell for the machine that submitted it: paths of its own folder, commands that work.

A job's folder is sent to hosts as `WORKDIR/code/HASH`. Tracebacks and warnings name files there; people want to open
their own. Only places in source files are translated (`File "...", line 12`, `....py:12`): any other path that a
process prints is one on its host. A restored job runs the code of its checkpoint, not that of a folder here; its files
are named relative to their folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from psctl.job.events import AnyEvent, Finished, Log, StateChanged, WorkerLost
from psctl.job.failures import TRAIN_AGAIN
from psctl.launch.clusters import shown_path
from psctl.launch.home import JobRecord
from psctl.launch.jobs import missing_module


class SourcePaths:
    """Translates places in a job's source files from its hosts to this machine.

    Args:
        record: the job.
    """

    def __init__(self, record: JobRecord) -> None:
        self._record = record
        self._hash = record.code_hash
        self._folder = f"{record.job_folder}/" if record.job_folder else ""
        there = {re.escape(f"{host.workdir}/code/{self._hash}") for host in record.hosts}
        there.add(rf"[^\s\"'<>=(]*/code/{re.escape(self._hash)}")  # by another name: the workdir may be a link
        prefix = "|".join(sorted(there, key=len, reverse=True))
        self._pattern = re.compile(rf'(?:{prefix})/(?=[^"\n]*?\.pyw?(?:", line \d|:\d))')

    def text(self, text: str) -> str:
        """Return text with places in the job's source files as they are named here."""
        if not self._hash or self._hash not in text:
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

    def _failure(self, failure: dict[str, Any]) -> dict[str, Any]:
        frames = [self._frame(str(frame)) for frame in failure.get("frames") or []]
        tail = [self.text(str(line)) for line in failure.get("tail") or []]
        exception = self.text(str(failure.get("exception") or ""))
        hint = failure.get("hint") or missing_module.cure(exception, self._record)
        return {**failure, "exception": exception, "frames": frames, "tail": tail, "hint": hint}

    def _frame(self, frame: str) -> str:
        """A frame of the job's own files is relative to their folder; others are absolute, or `<string>:1`."""
        return self.text(frame) if os.path.isabs(frame) or frame.startswith("<") else self._folder + frame


def resumed_by(failure: dict[str, Any], record: JobRecord, options: Sequence[str] = ()) -> dict[str, Any]:
    """Return a failure whose `resume` names the job file as it is here.

    Args:
        failure: `finished.failure`.
        record: the job.
        options: those that `train` needs to run the same job on the same cluster, quoted where they must be.
    """
    source = Path(record.job_source)
    if failure.get("resume") != TRAIN_AGAIN or not source.is_file():
        return failure
    return {**failure, "resume": " ".join(["psctl train", shown_path(source), *options, "--resume latest"])}
