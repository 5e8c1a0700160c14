"""Whatever the umask, all that psctl leaves on a disk is for its user alone."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tests.helpers.running import STEADY, Psctl, set_args

pytestmark = pytest.mark.whole

FAILING = """
import os, pathlib
import psctl
run = psctl.init()
pathlib.Path(os.environ["OUT"]).write_text("the user's own")
raise ValueError("on purpose")
"""


def open_to_others(folder: Path) -> list[str]:
    found = [folder, *folder.rglob("*")]
    return [
        f"{each} {each.stat().st_mode:o}" for each in found if not each.is_symlink() and each.stat().st_mode & 0o077
    ]


@pytest.mark.parametrize("mask", ["000", pytest.param("077", marks=pytest.mark.soak)])
def test_a_job_leaves_nothing_that_others_may_read(tmp_path: Path, mask: str) -> None:
    tmp_path.chmod(0o755)
    under = ("sh", "-c", f'umask {mask}; exec "$@"', "sh", sys.executable, "-m", "psctl")
    root = Path(__file__).resolve().parents[2]
    psctl = Psctl(tmp_path, under, {"PYTHONPATH": str(root)})
    done = psctl.run("train", str(STEADY), "--workers", "1", "--servers", "1", *set_args("--epochs", "2"))
    assert done.code == 0, done
    job = tmp_path / "job"
    job.mkdir()
    (job / ".env").write_text("TOKEN=secret-of-the-folder")
    (job / ".env").chmod(0o644)
    (job / "train.py").write_text(FAILING)
    (job / "job.yaml").write_text("name: failing\nscript: train.py\nworkers: 1\n")
    failed = psctl.run("train", str(job / "job.yaml"), "--env", f"OUT={tmp_path}/out", "-o", "jsonl")
    assert failed.code == 1, failed
    kept = tmp_path / ".psctl"
    assert open_to_others(kept) == []
    names = {path.name for path in kept.rglob("*")}
    assert {"record.json", "events.jsonl", "manifest.json", "worker-0.stderr.log", ".env", "errors"} <= names
    written = stat.S_IMODE(os.stat(tmp_path / "out").st_mode)
    assert written == 0o666 & ~int(mask, 8), "what the user's script writes follows the login's umask"
