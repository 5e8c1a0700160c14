"""The checkpoints of a job: lists them, finds one by name (`latest`, `best`, a step), and removes old ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec

from psctl import errors
from psctl.checkpoint.disk import Disk
from psctl.checkpoint.manifest import Manifest
from psctl.checkpoint.reader import folder_name, open_checkpoint, read_manifest, verify
from psctl.checkpoint.writer import partial_path

_STEP_NAME = re.compile(r"[0-9]{10,18}")

Metrics = Mapping[str, float | None]


class CheckpointRow(TypedDict):
    """A row of `checkpoint list -o json`, and of `checkpoint verify -o json` with `verified`, `problems`, `signed`."""

    id: str
    complete: bool
    job: str
    step: int
    time: float
    bytes: int
    metrics: dict[str, float | None]
    folder: str
    problem: str
    host: NotRequired[str]
    hosts: NotRequired[list[str]]
    verified: NotRequired[bool]
    problems: NotRequired[list[str]]
    signed: NotRequired[str]


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """One checkpoint in a listing; `problem` is why it is not complete, "" where it is. `job` is "" if not known."""

    job: str
    step: int
    time: float
    bytes: int
    metrics: dict[str, float | None]
    folder: str = ""
    problem: str = ""

    def document(self) -> CheckpointRow:
        """Return its row of `checkpoint list -o json`."""
        return {
            "id": f"{self.job}@{self.step}" if self.job else self.folder, "complete": not self.problem,
            "job": self.job, "step": self.step, "time": self.time, "bytes": self.bytes, "metrics": self.metrics,
            "folder": self.folder, "problem": self.problem,
        }  # fmt: skip

    def verified_row(self, problems: list[str]) -> CheckpointRow:
        """Return its row of `checkpoint verify -o json`, given the problems that a verification found."""
        return {**self.document(), "verified": not problems, "problems": problems}


def list_checkpoints(root: Path, job: str | None = None) -> list[ListedCheckpoint]:
    """Return the checkpoints of a job (None: of all) under `<workdir>/checkpoints`, by job and step."""
    jobs = [root / job] if job is not None else sorted(root.iterdir()) if root.is_dir() else []
    result = []
    for folder in jobs:
        steps = [path for path in folder.iterdir() if is_step_folder(path)] if folder.is_dir() else []
        result += [read_entry(path) for path in sorted(steps, key=lambda path: int(path.name))]
    return result


def is_step_folder(folder: Path) -> bool:
    """Return whether a folder's name is that of a step."""
    return _STEP_NAME.fullmatch(folder.name) is not None


def read_entry(folder: Path) -> ListedCheckpoint:
    """Return the listing's row of one checkpoint: in its job's folder, or in any other one, such as one pulled."""
    listed = is_step_folder(folder) and folder.is_dir()
    try:
        manifest = open_checkpoint(folder) if listed else read_manifest(folder)
    except errors.PsctlError as error:
        job, time = (folder.parent.name, folder.stat().st_mtime) if listed else ("", 0.0)
        step = int(folder.name) if folder.name.isdecimal() else 0
        return ListedCheckpoint(job, step, time, 0, {}, str(folder), error.message.removeprefix(f"{folder}: "))
    job, step = (folder.parent.name, int(folder.name)) if listed else (manifest.job, manifest.step)
    return ListedCheckpoint(job, step, manifest.time, manifest.bytes, manifest.metrics, str(folder))


class NewestCheckpoint(msgspec.Struct, frozen=True):
    """The newest checkpoint without faults (None: there is none), and why newer ones were skipped."""

    folder: Path | None
    manifest: Manifest | None
    skipped: tuple[str, ...]


def find_newest_verified(root: Path, job: str) -> NewestCheckpoint:
    """Return a job's newest checkpoint with correct bytes; a job without one is no error."""
    skipped: list[str] = []
    for each in reversed(list_checkpoints(root, job)):
        folder = Path(each.folder)
        faults = verify(folder)
        if not faults:
            return NewestCheckpoint(folder, open_checkpoint(folder), tuple(skipped))
        skipped.append(f"{job}@{each.step} skipped: {faults[0]}")
    return NewestCheckpoint(None, None, tuple(skipped))


def find_checkpoint(root: Path, job: str, which: str, keep_best: tuple[str, str] = ("loss", "min")) -> Path:
    """Return the folder of `JOB@which`.

    Args:
        root: `<workdir>/checkpoints`.
        which: a step's number, `latest` (the newest complete one) or `best` (by `keep_best`: metric, "min" | "max").

    Raises:
        NoSuchCheckpoint: there is none; the message says which ones there are.
    """
    if which.isdecimal():
        folder = root / job / folder_name(int(which))
        if folder.is_dir():
            return folder
    complete = [found for found in list_checkpoints(root, job) if not found.problem]
    step: int | None = None
    if complete and which == "latest":
        step = complete[-1].step
    elif which == "best":
        step = best_step(((found.step, found.metrics) for found in complete), *keep_best)
    if step is not None:
        return root / job / folder_name(step)
    if not complete:
        raise errors.NoSuchCheckpoint(
            f"{job} has no checkpoint",
            hint="`checkpoint: {every: 100 steps}` in the job file has them written; psctl stop --save writes one",
            where=f"{job}@{which}",
        )
    steps = ", ".join(str(found.step) for found in complete)
    metric = f" with the metric {keep_best[0]}" if which == "best" else ""
    raise errors.NoSuchCheckpoint(
        f"{job} has no checkpoint {which}{metric}; there are steps: {steps}",
        hint="psctl checkpoint list",
        where=f"{job}@{which}",
    )


def remove_checkpoint(folder: Path, disk: Disk | None = None) -> None:
    """Remove one checkpoint; an interrupted removal never leaves a part of it under its name."""
    disk = disk or Disk()
    removed = partial_path(folder.with_name(f"{folder.name}-removed"))
    disk.remove(removed)
    disk.rename(folder, removed)
    disk.remove(removed)


def prune(
    root: Path,
    job: str,
    keep: int,
    keep_best: tuple[str, str] | None = None,
    protect: int | None = None,
    disk: Disk | None = None,
) -> list[ListedCheckpoint]:
    """Remove the checkpoints that `steps_to_remove` returns; return their rows. Incomplete ones stay."""
    complete = {found.step: found for found in list_checkpoints(root, job) if not found.problem}
    steps = steps_to_remove([(step, found.metrics) for step, found in complete.items()], keep, keep_best, protect)
    for step in steps:
        remove_checkpoint(Path(complete[step].folder), disk)
    return [complete[step] for step in steps]


def best_step(checkpoints: Iterable[tuple[int, Metrics]], metric: str, mode: str) -> int | None:
    """Return the step with the smallest (mode "min") or largest ("max") metric; of equals the newest.

    Checkpoints without that metric, or where it was not finite, are left out; None when none is left.
    """
    sign = -1.0 if mode == "min" else 1.0
    values = [(sign * value, step) for step, metrics in checkpoints if (value := metrics.get(metric)) is not None]
    return max(values)[1] if values else None


def steps_to_remove(
    checkpoints: Sequence[tuple[int, Metrics]], keep: int, keep_best: tuple[str, str] | None, protect: int | None = None
) -> list[int]:
    """Return the steps to remove, oldest first.

    Args:
        checkpoints: (step, metrics) of the complete ones.
        keep: number of newest checkpoints to keep; at least 1 is kept.
        keep_best: (metric, "min" | "max"): the best one is kept too.
        protect: a step to keep too (the one that the job resumed from).
    """
    stay = set(sorted(step for step, _ in checkpoints)[-max(1, keep) :])
    if keep_best is not None:
        winner = best_step(checkpoints, *keep_best)
        stay |= set() if winner is None else {winner}
    if protect is not None:
        stay.add(protect)
    return sorted(step for step, _ in checkpoints if step not in stay)
