"""Templates, short: char-gpt with two workers learns as alone, and writes; resnet learns."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Psctl, set_args

pytestmark = pytest.mark.whole

TEMPLATES = ROOT / "templates"
FOLDER = TEMPLATES / "char-gpt"
SHORT = ("--epochs", "2", "--characters", "30000", "--width", "32", "--layers", "1", "--context", "32")


def test_two_workers_learn_as_one_does_and_it_writes(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PSCTL_")}
    alone = subprocess.run(
        [sys.executable, "train.py", *SHORT], cwd=FOLDER, capture_output=True, text=True, timeout=100, check=True,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = re.search(r"(\d+) steps in .*loss ([0-9.]+) · validation_loss ([0-9.]+)", alone.stderr)
    assert found is not None, alone.stderr
    steps, loss, validation = int(found[1]), float(found[2]), float(found[3])
    run = Psctl(tmp_path).run("train", str(FOLDER / "job.yaml"), "-o", "jsonl", *set_args(*SHORT))
    assert run.code == 0, run
    end = run.events[-1]
    assert end["steps"] == steps
    assert end["metrics"]["loss"] == pytest.approx(loss, rel=0.02)
    assert end["metrics"]["validation_loss"] == pytest.approx(validation, rel=0.02) and validation < 3.3
    written = "\n".join(event["text"] for event in run.of("log") if event["rank"] == "worker/0")
    assert len(written) > 350
    assert len(alone.stdout) > 350


@pytest.mark.soak
def test_the_network_for_pictures_learns_on_two_workers(tmp_path: Path) -> None:
    short = ("--epochs", "5", "--pictures", "1500")
    run = Psctl(tmp_path).run("train", str(TEMPLATES / "resnet" / "job.yaml"), "-o", "jsonl", *set_args(*short))
    assert run.code == 0, run
    assert run.events[-1]["steps"] == 5 * 12
    assert run.events[-1]["metrics"]["accuracy"] > 0.2, "a guess is right in a tenth"
    assert [event for event in run.of("log") if event["text"].startswith("accuracy 0.")]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "library", "line"),
    [("hf-trainer", "transformers", "evaluation loss 0."), ("lightning", "lightning", "accuracy 0.9")],
)
def test_scripts_of_other_libraries_do_the_same_under_torchrun_and_psctl(
    tmp_path: Path, name: str, library: str, line: str
) -> None:
    pytest.importorskip(library)
    folder = tmp_path / name
    shutil.copytree(TEMPLATES / name, folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def last_line(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done
        found = [each for each in done.stdout.splitlines() if each.startswith(line)]
        assert len(found) == 1, done
        return found[0]

    last_line("train.py")
    under_torchrun = last_line("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "train.py")
    run = Psctl(tmp_path).run("train", str(folder / "job.yaml"), "-o", "jsonl", "--env", "OMP_NUM_THREADS=1")
    assert run.code == 0, run
    printed = [event["text"] for event in run.of("log") if event["text"].startswith(line)]
    assert printed == [under_torchrun]
