"""The question with which psctl makes a job's folder on a host (host_files.py, `begin`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def begin_question(folder: Path, wait: float = 60, code: Path | None = None) -> dict[str, Any]:
    """Return the question for a job's folder; its code is an empty folder unless one is given."""
    if code is None:
        code = folder.parents[2] / "code" / "none"
        code.mkdir(parents=True, exist_ok=True, mode=0o700)
        code.parent.chmod(0o700)
        folder.parents[2].chmod(0o700)
    return {
        "folder": str(folder), "claim": True, "wait": wait, "files": str(folder / "files"), "code": str(code),
        "data": [], "links": [],
    }  # fmt: skip
