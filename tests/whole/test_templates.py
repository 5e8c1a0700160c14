"""Templates, short: char-gpt with two workers learns as alone, and writes; resnet learns."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
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


@pytest.mark.soak  # tests/sparse trains such rows; the other templates run here
@pytest.mark.parametrize(("model", "least"), [("logistic", 0.73), ("deepfm", 0.79)])
def test_sparse_models_tell_sentences_apart(tmp_path: Path, model: str, least: float) -> None:
    arguments = set_args("--model", model, "--epochs", "1" if model == "logistic" else "2", "--batch", "256")
    run = Psctl(tmp_path).run("train", str(TEMPLATES / "ctr" / "job.yaml"), "-o", "jsonl", *arguments)
    assert run.code == 0, run
    assert run.events[-1]["metrics"]["auc"] > least, "a guess has 0.5"
    (said,) = [event["text"] for event in run.of("log") if event["text"].startswith("AUC ")]
    if model == "logistic":
        found = re.search(r"(\d+) of (\d+) weights are not zero", said)
        assert found is not None and 100 < int(found[1]) < 0.5 * int(found[2]), said


def reference_objective(problem, penalty: float) -> float:
    """Minimize the l1 logistic regression by coordinate descent with an active set, to 1e-9 a weight."""
    begin, example, y = problem.begin.tolist(), problem.example.numpy(), problem.labels.numpy()
    places = [example[start:stop] for start, stop in pairwise(begin)]
    signs = [y[at] for at in places]
    weights, margins = [0.0] * problem.features, np.zeros(len(y))

    def sweep(coordinates: Iterable[int]) -> float:
        most = 0.0
        for k in coordinates:
            at, sign, old = places[k], signs[k], weights[k]
            curve = 0.25 * len(at)
            point = old + float((sign / (1 + np.exp(margins[at]))).sum()) / curve
            new = math.copysign(max(0.0, abs(point) - penalty / curve), point)
            if new != old:
                margins[at] += sign * (new - old)
                weights[k], most = new, max(most, abs(new - old))
        return most

    used = [k for k in range(problem.features) if len(places[k])]
    while sweep(used) > 1e-9:
        active = [k for k in used if weights[k]]
        while sweep(active) > 1e-9:
            pass
    return float(np.log1p(np.exp(-margins)).sum() + penalty * sum(map(abs, weights)))


def solve(tmp_path: Path, *words: str) -> tuple[float, int, float]:
    """Run the template l1-path on two workers: its objective, passes, and the part that the filter kept out."""
    run = Psctl(tmp_path).run("train", str(TEMPLATES / "l1-path" / "job.yaml"), "-o", "jsonl", *set_args(*words))
    assert run.code == 0, run
    texts = [event["text"] for event in run.of("log")]
    (found,) = [m for text in texts if (m := re.match(r"objective (\S+) after (\d+) passes, (\S+)% filtered", text))]
    return float(found[1]), int(found[2]), float(found[3])


@pytest.mark.soak
@pytest.mark.parametrize(("tau", "rate"), [("0", "0.8"), ("2", "0.8"), ("8", "0.5")])
def test_the_path_ends_at_the_objective_of_a_single_machine(
    tmp_path: Path, tau: str, rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TEMPLATES / "l1-path"))
    sys.modules.pop("data", None)
    from data import Problem

    expected = reference_objective(Problem(2000, 10_000), 1.5)
    sys.modules.pop("data", None)
    objective, _, filtered = solve(tmp_path, "--tau", tau, "--rate", rate)
    assert abs(objective - expected) <= 1e-6 * expected
    assert filtered > 90


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
            timeout=600,  # alone one takes a minute, beside two other files of soak several
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
