"""Hosts whose Python lacks what psctl needs get it from a wheelhouse, without network, and lose it again at `down`."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import Psctl, until

pytestmark = pytest.mark.whole

NEEDED = ("msgspec>=0.21", "cryptography>=47", "psutil>=5.9", "numpy>=1.26")
BASE = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "PSCTL_JOB", "PSCTL_ROLE", "PSCTL_HOST",
)  # fmt: skip
SCRIPT = f"""
import json, os, pathlib, sys
import msgspec, numpy, psutil
try:
    import torch
    sys.exit("torch is here, and nobody asked for it")
except ModuleNotFoundError:
    pass
told = {{name: os.environ[name] for name in {TORCHRUN}}}
told["python"], told["numpy"], told["msgspec"] = sys.prefix, numpy.__file__, msgspec.__file__
told["words"] = len(pathlib.Path("words.txt").read_text().split())
print("told", json.dumps(told), flush=True)
"""


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of all that psctl needs on a host but torch, and of pip."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*pip, "--timeout", "10", "-d", str(folder), *NEEDED, "pip"], capture_output=True, text=True,
            check=False, timeout=100,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.skip("pip download did not end in 100 s")
    if done.returncode != 0:
        pytest.skip(f"pip cannot download the wheels: {done.stderr.strip()[-300:]}")
    return folder


class Site:
    """One test host, a psctl with its cluster, and a job that needs no torch."""

    def __init__(self, hosts: Any, folder: Path, wheels: Path, runtime: str) -> None:
        self.hosts = hosts
        home = hosts.make_home(folder / "home")
        self.psctl = Psctl(home.path, environment=home.env)
        self.cluster = folder / "cluster.yaml"
        self.cluster.write_text(
            f"version: 1\nname: bare\nruntime: {{{runtime}, torch: none, wheelhouse: {wheels}}}\n"
            "hosts: [{address: h1, slots: 2}]\n"
        )
        self.folder = folder
        (folder / "job").mkdir()
        (folder / "job" / "job.yaml").write_text("version: 1\nname: plain\nscript: train.py\nworkers: 2\n")
        (folder / "job" / "train.py").write_text(SCRIPT)
        (folder / "job" / "words.txt").write_text("eight words stand in this file for reading\n")

    def up(self, *more: str) -> tuple[str, list[str]]:
        run = self.psctl.run("up", str(self.cluster), "-o", "json", *more)
        assert run.code == 0, run
        [host] = run.document["hosts"]
        return host["state"], host["actions"]

    def train(self) -> list[dict[str, str]]:
        """Run the job; return what its two workers told."""
        run = self.psctl.run("train", str(self.folder / "job" / "job.yaml"), "-o", "jsonl")
        assert run.code == 0, run
        assert (run.events[-1]["status"], run.events[-1]["exit"]) == ("done", 0), run
        told = []
        for rank in range(2):
            log = self.psctl.run("logs", "plain", "-r", f"worker:{rank}")
            [line] = [line for line in log.out.splitlines() if "told {" in line]
            told.append(json.loads(line[line.index("{") :]))
        return told

    def purge(self) -> None:
        assert self.psctl.run("down", "--purge", "--yes").code == 0
        assert not self.hosts.path("h1", "/root/.psctl/host").exists()
        until(lambda: not self.hosts.leftovers("h1"), 20, name=f"h1 is left with {self.hosts.leftovers('h1')}")

    def listing(self, folder: str) -> dict[str, tuple[int, int]]:
        """Every file under a folder of the host, with its size and the time of its last change.

        Not those that Python itself keeps beside what it imports.
        """
        top = self.hosts.path("h1", folder)
        found = {path: path.lstat() for path in top.rglob("*") if not path.is_dir() and path.suffix != ".pyc"}
        return {str(path.relative_to(top)): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def check_environment(told: list[dict[str, str]]) -> None:
    for rank, each in enumerate(told):
        assert (each["RANK"], each["LOCAL_RANK"], each["ROLE_RANK"]) == (str(rank),) * 3
        assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["ROLE_WORLD_SIZE"]) == ("2",) * 3
        assert (each["GROUP_RANK"], each["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert (each["PSCTL_JOB"], each["PSCTL_HOST"], each["PSCTL_ROLE"]) == ("plain-1", "h1", "worker")
        assert each["words"] == 8
    assert told[0]["MASTER_ADDR"] == told[1]["MASTER_ADDR"]
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"] != "0"


@pytest.mark.soak
def test_managed_makes_an_environment_from_the_wheelhouse_and_a_job_without_torch_runs_in_it(
    make_hosts: Any, tmp_path: Path, wheelhouse: Path
) -> None:
    site = Site(make_hosts(1), tmp_path, wheelhouse, f"python: {BASE}, environment: managed")
    _, planned = site.up("--dry-run")
    assert not site.hosts.path("h1", "/root/.psctl").exists()
    state, actions = site.up()
    assert (state, actions) == ("created", planned)
    assert [action.split()[0] for action in actions] == ["send", "send", "make", "install", "write"]
    assert not any("torch" in action for action in actions)
    assert site.up() == ("unchanged", [])
    told = site.train()
    check_environment(told)
    for each in told:
        assert each["python"].startswith("/root/.psctl/host/envs/")
        assert each["numpy"].startswith(each["python"])
    assert site.up() == ("unchanged", [])
    site.purge()


@pytest.mark.soak
def test_existing_gets_only_what_is_missing_and_stays_as_it_was(
    make_hosts: Any, tmp_path: Path, wheelhouse: Path
) -> None:
    site = Site(make_hosts(1), tmp_path, wheelhouse, "python: ~/own/bin/python, environment: existing")
    site.hosts.exec("h1", [BASE, "-m", "venv", "--without-pip", "/root/own"])
    [packages] = site.hosts.path("h1", "/root/own/lib").glob("python*/site-packages")
    for name in ("numpy", "msgspec"):
        [wheel] = wheelhouse.glob(f"{name}-*.whl")
        zipfile.ZipFile(wheel).extractall(packages)
    before = site.listing("/root/own")

    state, actions = site.up()
    assert state == "created"
    [install] = [action for action in actions if action.startswith("install")]
    for name in ("cryptography", "psutil"):
        assert name in install
    for name in ("numpy", "msgspec", "torch"):
        assert name not in install
    assert site.up() == ("unchanged", [])
    told = site.train()
    check_environment(told)
    for each in told:
        assert each["python"].startswith("/root/.psctl/host/envs/")
        assert each["numpy"].startswith("/root/own/")
        assert each["msgspec"].startswith("/root/own/")
    added = {name.split("/")[4] for name in site.listing("/root/.psctl/host/envs") if name.count("/") > 4}
    assert {"cryptography", "psutil"} <= added
    assert not {"numpy", "msgspec", "torch"} & added
    site.purge()
    assert site.listing("/root/own") == before
