"""The command line inside the tests' own process: what `python -m psctl` prints and returns, without starting one."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from psctl.cli import app


@dataclass(frozen=True)
class Told:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def psctl(
    home: Path, *arguments: str, code: int = 0, given: str = "", cwd: Path | None = None, **environment: str
) -> Told:
    """Run a command under a HOME of its own, in that folder unless `cwd` is another; `given` is its standard input."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryFile("w+") as stdin:
        stdin.write(given)
        stdin.seek(0)
        for name in [name for name in os.environ if name.startswith(("PSCTL_", "FORCE_"))]:
            patch.delenv(name)
        for name, value in {"HOME": str(home), "PSCTL_HOME": str(home / "state"), **environment}.items():
            patch.setenv(name, value)
        patch.chdir(cwd or home)
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        found = app.run(list(arguments))
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    assert found == code, f"exit {found}\n{texts[0]}\n{texts[1]}"
    return Told(found, *texts)
