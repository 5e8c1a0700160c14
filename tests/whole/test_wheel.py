"""psctl works from a built wheel in an environment where nothing of the work tree can be seen."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers.running import ROOT, Psctl

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Psctl:
    """A new environment with the wheel; the dependencies are shown to it by a path file, for torch takes a minute."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    place = folder / "environment"
    venv.create(place, with_pip=True)
    [packages] = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run([place / "bin/python", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    return Psctl(folder, program=(str(place / "bin/psctl"),))


def test_templates_and_clusters_travel_in_the_wheel(installed: Psctl) -> None:
    assert installed.run("--version").out.strip().endswith("0.1.0")
    assert installed.run("init", "mine", "--template", "digits").code == 0
    assert installed.run("validate", "mine/job.yaml", "mine/cluster.yaml").code == 0


def test_a_job_trains_from_the_wheel_alone(installed: Psctl, tmp_path: Path) -> None:
    made = installed.run("init", str(tmp_path / "job"), "--template", "minimal")
    assert made.code == 0, made
    run = installed.run("train", str(tmp_path / "job" / "job.yaml"), "-o", "jsonl", timeout=120)
    assert run.code == 0, run
    assert run.events[-1]["status"] == "done"
