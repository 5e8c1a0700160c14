"""The same script runs alone, under torchrun and under psctl; one written for torchrun runs under psctl too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Psctl

pytestmark = pytest.mark.whole

DIGITS = ROOT / "templates" / "digits"
SHORT = ("--epochs", "5")
"""Of 20 epochs; 0.967 were seen after 4."""


def accuracy(text: str) -> float:
    found = re.findall(r"accuracy[^0-9]*([0-9]+(?:\.[0-9]+)?)", text)
    assert found, text
    value = float(found[-1])
    return value / 100 if value > 1 else value


def plain(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PSCTL_")}
    return subprocess.run(
        command, cwd=DIGITS, env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.soak  # tests/whole/test_restore_numbers.py runs its script alone first
def test_it_runs_alone() -> None:
    run = plain(sys.executable, "train.py", *SHORT)
    assert run.returncode == 0, run.stdout
    assert accuracy(run.stdout) >= 0.95


@pytest.mark.soak  # tests/whole/test_templates.py runs a template under torchrun
def test_it_runs_under_torchrun() -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = plain(*launcher, "train.py", *SHORT)
    assert run.returncode == 0, run.stdout
    assert accuracy(run.stdout) >= 0.95


def test_a_script_written_for_torchrun_runs_under_psctl(tmp_path: Path) -> None:
    psctl = Psctl(tmp_path)
    run = psctl.run("train", str(ROOT / "templates" / "ddp" / "job.yaml"), "-o", "jsonl", timeout=120)
    assert run.code == 0, run
    assert run.events[-1]["status"] == "done"
    assert run.of("log"), "its progress is its log"
    assert all(role["role"] != "server" for event in run.of("started") for role in event["roles"])
