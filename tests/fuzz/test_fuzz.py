"""Parsers of outside bytes refuse what they cannot read by an error that names the fault, and by nothing else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import ROOT, TARGETS

CRASHES = Path(__file__).parent / "crashes"
SECONDS = 60


@pytest.mark.parametrize("name", TARGETS)
def test_first_inputs_are_read_and_kept_crashes_are_refused(name: str) -> None:
    target = TARGETS[name]
    for data in target.inputs():
        if name.startswith("messages"):  # with empty fields, which some messages refuse
            _refuse_or_read(name, data)
        else:
            target.run(data)
    for path in sorted((CRASHES / name.replace(" ", "-")).glob("*")):
        _refuse_or_read(name, path.read_bytes())


def _refuse_or_read(name: str, data: bytes) -> None:
    with contextlib.suppress(TARGETS[name].errors):
        TARGETS[name].run(data)


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_a_minute_of_fuzzing_finds_no_crash(name: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: make soak installs it")
    command = [sys.executable, "-m", "tests.fuzz.fuzz", name, str(tmp_path), str(SECONDS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS * 3)
    found = [path for path in tmp_path.iterdir() if path.name.startswith(("crash-", "timeout-", "oom-", "slow-"))]
    kept = "; ".join(f"{path.name}: {path.read_bytes()[:200]!r}" for path in found)
    assert ended.returncode == 0, f"{kept}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
