"""The checkpoints of a job as a shelf: name one (`latest`, `best`, a step), take old ones off."""

from __future__ import annotations

from pathlib import Path

from psctl import errors
from psctl.checkpoint.disk import Disk
from psctl.checkpoint.reader import Found, folder_name, listing
from psctl.checkpoint.retention import best, steps_to_remove
from psctl.checkpoint.writer import temporary


def resolve(root: Path, job: str, which: str, keep_best: tuple[str, str] = ("loss", "min")) -> Path:
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
    complete = [found for found in listing(root, job) if not found.problem]
    step: int | None = None
    if complete and which == "latest":
        step = complete[-1].step
    elif which == "best":
        step = best(((found.step, found.metrics) for found in complete), *keep_best)
    if step is not None:
        return root / job / folder_name(step)
    steps = ", ".join(str(found.step) for found in complete) or "none"
    metric = f" with the metric {keep_best[0]}" if which == "best" else ""
    raise errors.NoSuchCheckpoint(
        f"{job} has no checkpoint {which}{metric}; there are steps: {steps}",
        hint="psctl checkpoint list",
        where=f"{job}@{which}",
    )


def remove(folder: Path, disk: Disk | None = None) -> None:
    """Take one checkpoint away, so that an interrupted removal never leaves a torn one under its name."""
    disk = disk or Disk()
    aside = temporary(folder.with_name(f"{folder.name}-removed"))
    disk.remove(aside)
    disk.rename(folder, aside)
    disk.remove(aside)


def prune(
    root: Path,
    job: str,
    keep: int,
    keep_best: tuple[str, str] | None = None,
    protect: int | None = None,
    disk: Disk | None = None,
) -> list[Found]:
    """Remove a job's older checkpoints as `retention.steps_to_remove` says; return those removed. Torn ones stay."""
    complete = {found.step: found for found in listing(root, job) if not found.problem}
    steps = steps_to_remove([(step, found.metrics) for step, found in complete.items()], keep, keep_best, protect)
    for step in steps:
        remove(Path(complete[step].folder), disk)
    return [complete[step] for step in steps]
