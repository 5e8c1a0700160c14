"""Options of a command line, appended as comments to a job file's text.

Checkpoints and this machine's records store that text, so a job that is read from one is the job that ran.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.spec.job import JobSpec
from psctl.spec.job_file import load_job

NOTE = "# psctl train "
"""The beginning of a comment line that records an option."""


def with_notes(text: str, overrides: Sequence[str], env: Sequence[str]) -> str:
    """Return a job file's text with the values of --set and --env."""
    notes = [*(f"{NOTE}--set {each}" for each in overrides), *(f"{NOTE}--env {each}" for each in env)]
    return text if not notes else "\n".join([text.rstrip("\n"), *notes, ""])


def split_notes(text: str) -> tuple[str, list[str], list[str]]:
    """Remove the options of an earlier command line from a job file; return the rest, its --set and its --env."""
    lines = text.splitlines(keepends=True)
    notes = [line[len(NOTE) :].rstrip("\n") for line in lines if line.startswith(NOTE)]
    rest = "".join(line for line in lines if not line.startswith(NOTE))
    pairs = [note.partition(" ") for note in notes]
    return rest, [what for flag, _, what in pairs if flag == "--set"], [w for flag, _, w in pairs if flag == "--env"]


def load_noted(text: str, source: str) -> JobSpec:
    """Read a job file as `load_job`, with the options that its text records in place of its values."""
    rest, overrides, _ = split_notes(text)
    return load_job(rest, source, overrides)
