"""One line in a script for torchrun: DistributedDataParallel's gradients are summed by the planned strategy."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Ended, Psctl, next_event, processes

pytestmark = pytest.mark.whole

SCRIPT = Path(__file__).parent / "ddp_script.py"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.read_text())
    (folder / "job.yaml").write_text("version: 1\nname: plain\nscript: train.py\nworkers: {per_host: 2}\n")
    return folder / "job.yaml"


def train(job: Path, *options: str, **variables: str) -> Ended:
    environment = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    return Psctl(job.parent.parent).run("train", str(job), "-o", "jsonl", *options, *environment)


def parameters(text: str) -> float:
    found = re.search(r"parameters ([0-9.]+)", text)
    assert found, text
    return float(found[1])


@pytest.mark.soak
def test_gradients_are_those_of_ddp_and_steps_count(job: Path) -> None:
    plain = train(job)
    ring = train(job, "--strategy", "ring", ACCELERATE="1")
    assert (plain.code, ring.code) == (0, 0), (plain, ring)
    assert parameters(ring.out) == pytest.approx(parameters(plain.out), rel=1e-6)
    assert plain.of("plan") == []
    assert plain.events[-1]["steps"] == 0
    assert ring.of("plan")[-1]["chosen"] == "ring"
    assert ring.of("plan")[-1]["decided"]
    assert ring.events[-1]["steps"] == 20
    assert {each["why_not"] for each in ring.of("plan")[-1]["candidates"] if each["strategy"] == "ps"} == {
        "gradients come from DistributedDataParallel (psctl.accelerate_ddp), which servers do not sum"
    }


@pytest.mark.soak  # tests/worker/test_joint_layers.py has the layers of prepared models
def test_batch_norm_layers_are_joint_when_the_job_says_so(job: Path) -> None:
    local = train(job, "--workers", "2", ACCELERATE="1", NORM="1")
    joint = train(job, "--workers", "2", "--set", "sync.batchnorm=sync", ACCELERATE="1", NORM="1")
    assert (local.code, joint.code) == (0, 0), (local, joint)
    one, other = (sorted(re.findall(r"running values ([0-9.]+)", each.out)) for each in (local, joint))
    assert len(one) == len(other) == 2
    assert one[0] != one[1]
    assert other[0] == other[1]


@pytest.mark.soak
def test_sums_are_rounded_as_the_job_says(job: Path) -> None:
    plain = train(job)
    rounded = train(job, "--set", "sync.compression=bf16", ACCELERATE="1")
    assert rounded.code == 0, rounded
    assert parameters(rounded.out) != parameters(plain.out)
    assert parameters(rounded.out) == pytest.approx(parameters(plain.out), rel=1e-2)


@pytest.mark.soak
def test_it_does_nothing_under_torchrun(job: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", str(SCRIPT)],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done
    assert parameters(done.stdout) > 0


@pytest.mark.soak
def test_a_lost_worker_starts_all_again_and_what_cannot_be_is_refused(job: Path) -> None:
    psctl = Psctl(job.parent.parent)
    options = ("-o", "jsonl", "--strategy", "ring", "--env", "ACCELERATE=1", "--env", "STEPS=60", "--env", "PAUSE=0.05")
    with psctl.start("train", str(job), *options) as running:
        next_event(running, "progress")
        os.kill(processes(psctl.home, "worker")[-1], signal.SIGKILL)
        lost = next_event(running, "worker-lost")
        assert "signal 9" in lost["reason"]
        end = next_event(running, "finished")
        running.wait(60)
    assert (end["status"], end["exit"]) == ("done", 0), end

    refused = train(job, "--strategy", "ps", "--servers", "1", ACCELERATE="1")
    assert refused.code == 1, refused
    assert "which servers do not sum" in str(refused.events[-1]["failure"])
