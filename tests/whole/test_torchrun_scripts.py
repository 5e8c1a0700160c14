"""Scripts for torchrun and of other libraries give the same losses under psctl; psctl's own loop gives DDP's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Psctl

pytestmark = [pytest.mark.whole, pytest.mark.soak]

SCRIPTS = Path(__file__).parent / "scripts"
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def printed(lines: list[str]) -> list[str]:
    """Return the lines that tell a loss."""
    return [line for line in lines if "loss" in line.split()]


def losses(lines: list[str]) -> list[float]:
    """Return the number that ends each line with a loss."""
    return [float(line.split()[-1]) for line in printed(lines)]


def under_torchrun(folder: Path, **variables: str) -> list[str]:
    environment = {**os.environ, **VARIABLES, **variables, "PYTHONPATH": str(ROOT)}
    for _ in range(3):  # torch's threads abort a finished script at times, here too
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "train.py"],
            cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=400,
        )  # fmt: skip
        if "(SIGABRT)" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def under_psctl(folder: Path, *options: str, **variables: str) -> list[str]:
    (folder / "job.yaml").write_text("version: 1\nname: same\nscript: train.py\nworkers: {per_host: 2}\n")
    given = [word for name, value in {**VARIABLES, **variables}.items() for word in ("--env", f"{name}={value}")]
    psctl = Psctl(folder.parent)
    run = psctl.run("train", str(folder / "job.yaml"), "-o", "jsonl", *options, *given, timeout=400)
    assert run.code == 0, run
    return [event["text"] for event in run.of("log") if event["stream"] == "stdout"]


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("nano_gpt", "torch"), ("min_gpt_ddp", "torch"), ("fully_sharded", "torch"), ("tensor_parallel", "torch"),
        ("with_accelerate", "accelerate"), ("lightning_fabric", "lightning"), ("lightning_trainer", "lightning"),
        ("hf_trainer", "transformers"),
    ],
)  # fmt: skip
def test_losses_are_those_under_torchrun(tmp_path: Path, name: str, library: str) -> None:
    pytest.importorskip(library)
    folders = []
    for launcher in ("torchrun", "psctl"):
        folders.append(tmp_path / launcher)
        folders[-1].mkdir()
        shutil.copy(SCRIPTS / f"{name}.py", folders[-1] / "train.py")
    expected = printed(under_torchrun(folders[0]))
    assert len(expected) >= 6, expected
    assert printed(under_psctl(folders[1])) == expected


@pytest.mark.parametrize("strategy", ["native", "ring", "ps"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_psctls_own_loop_gives_the_losses_of_distributed_data_parallel(
    tmp_path: Path, strategy: str, compiled: bool
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("tensorboard")
    if compiled and not (shutil.which("g++") and strategy == "native"):
        pytest.skip("no compiler" if strategy == "native" else "one strategy shows it")
    # compiled without autocast: hooks cut the graph elsewhere than DDP, and inductor rounds to bfloat16 at cuts only
    variables = {
        "COMPILE": str(int(compiled)), "AUTOCAST": str(int(not compiled)),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    folders = [tmp_path / "ddp", tmp_path / "psctl"]
    for folder in folders:
        folder.mkdir()
        shutil.copy(SCRIPTS / "own_loop.py", folder / "train.py")
    expected = losses(under_torchrun(folders[0], DDP="1", **variables))
    options = ["--strategy", strategy, *(["--servers", "1"] if strategy == "ps" else [])]
    found = losses(under_psctl(folders[1], *options, **variables))
    assert len(expected) == 24
    assert expected[-1] < 0.8 * expected[0], "it learns"
    assert found == pytest.approx(expected, rel=1e-6)
