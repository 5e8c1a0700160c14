"""Tab completion answers from this machine's records, quickly, without SSH and torch."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psctl.cli.shared.completion import rejoined
from psctl.launch.home import Home, HostRecord, JobRecord, KnownCluster, ReportedRank
from psctl.types import STRATEGIES

ROOT = Path(__file__).resolve().parent.parent.parent


def record(job: str, created: float, cluster: KnownCluster, checkpoints: str) -> JobRecord:
    host = HostRecord("h1", "/w", f"/w/jobs/{job}/h1", "python3", "/w/code")
    ranks = [*(ReportedRank("worker", rank) for rank in (0, 1)), ReportedRank("agent", 0)]
    name = job.rpartition("-")[0]
    return JobRecord(job, name, created, cluster, [host], "", "job.yaml", ".", "c0de", checkpoints, ranks=ranks)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with two clusters, and a job on each of this machine and lab."""
    kept = Home(tmp_path / "state")
    lab = KnownCluster("lab", "/lab.yaml", "name: lab\nhosts: [h1]\n", 0.0)
    kept.save_cluster(lab)
    for step in ("0000000100", "0000000200"):
        (tmp_path / "checkpoints" / "digits-1" / step).mkdir(parents=True)
    for job, created, cluster in (("digits-1", 1.0, KnownCluster("local", "", "", 0.0)), ("mlp-2", 2.0, lab)):
        (tmp_path / "state" / "jobs" / job).mkdir(parents=True, mode=0o700)
        kept.save_record(record(job, created, cluster, str(tmp_path / "checkpoints")))
    kept.save_steps("mlp-2", [7])
    (tmp_path / "job.yaml").write_text("")
    (tmp_path / "other").mkdir()
    return tmp_path


def complete(home: Path, *words: str) -> list[str]:
    """What bash is offered for the last word, given in the words that bash makes."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PSCTL_")}
    done = subprocess.run(
        [sys.executable, "-m", "psctl"], capture_output=True, text=True, check=False, cwd=home,
        env={
            **clean, "PYTHONPATH": str(ROOT), "HOME": str(home), "PSCTL_HOME": str(home / "state"),
            "_PSCTL_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(("psctl", *words)),
            "COMP_CWORD": str(len(words)),
        },
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("stop", ""), ["digits", "mlp", "mlp-2", "digits-1"]),
        (("logs", "dig"), ["digits", "digits-1"]),
        (("logs", "mlp", "-r", "worker"), ["worker", "worker:0", "worker:1"]),
        (("logs", "mlp", "-r", "worker", ":"), ["0", "1"]),
        (("checkpoint", "show", "digits"), [f"digits-1@{which}" for which in ("latest", "best", "200", "100")]),
        (("checkpoint", "show", "digits-1", "@"), ["latest", "best", "200", "100"]),
        (("checkpoint", "restore", "mlp-2", "@", "7"), ["7"]),
        (("train", "job.yaml", "--resume", "l"), ["latest"]),
        (("train", "job.yaml", "--cluster", "l"), ["local", "lab"]),
        (("train", ""), ["job.yaml", "checkpoints/", "other/", "state/"]),
        (("up", "job"), ["job.yaml"]),
        (("train", "job.yaml", "--strategy", "rin"), ["ring"]),
        (("init", "--template", "d"), ["ddp", "digits"]),
        (("-o", "json", "use", "la"), ["lab"]),
    ],
)
def test_names_are_offered(home: Path, words: tuple[str, ...], offered: list[str]) -> None:
    assert sorted(complete(home, *words)) == sorted(offered)


def test_every_strategy_is_offered(home: Path) -> None:
    assert complete(home, "train", "job.yaml", "--strategy", "") == ["auto", *STRATEGIES]


def test_it_is_quick_and_loads_neither_torch_nor_ssh(home: Path) -> None:
    code = (
        "import sys\nfrom psctl.cli.app import run\nrun([])\n"
        "bad = {'torch', 'paramiko', 'numpy', 'cryptography'} & set(sys.modules)\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    asked = {"_PSCTL_COMPLETE": "complete_bash", "COMP_WORDS": "psctl\ncheckpoint\nshow\nd", "COMP_CWORD": "3"}
    environment = {**os.environ, **asked, "PYTHONPATH": str(ROOT), "PSCTL_HOME": str(home / "state")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "digits-1@latest" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


@pytest.mark.parametrize(
    ("words", "at", "joined"),
    [
        (["psctl", "show", "digits-1", "@", "5"], 4, (["psctl", "show", "digits-1@5"], 2, "digits-1@")),
        (["psctl", "show", "digits-1", "@"], 3, (["psctl", "show", "digits-1@"], 2, "digits-1@")),
        (["psctl", "logs", "x", "-r", "worker", ":", "1"], 2, (["psctl", "logs", "x", "-r", "worker:1"], 2, "")),
        (["psctl", "logs", ""], 2, (["psctl", "logs", ""], 2, "")),
    ],
)
def test_words_that_bash_takes_apart_are_joined(words: list[str], at: int, joined: object) -> None:
    assert rejoined(words, at) == joined


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_for_bash_calls_psctl(home: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "psctl", "--show-completion", "bash"], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    ).stdout  # fmt: skip
    program = home / "psctl"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} PSCTL_HOME={home}/state exec {sys.executable} -m psctl "$@"\n')
    program.chmod(0o755)
    script = f'{shown}\nCOMP_WORDS=(psctl checkpoint show mlp-2 @ "")\nCOMP_CWORD=5\n_psctl_completion {program}\n'
    script += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["latest", "best", "7"]


def test_hosts_of_the_ssh_configuration_are_offered(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host node-a node-b *.lab !x\n  Port 22\nhost = gate\nHostName not-this\n")
    assert complete(home, "init", "mine", "--hosts", "n") == ["node-a", "node-b"]
    assert complete(home, "init", "mine", "--hosts", "node-a,") == ["node-a,node-b", "node-a,gate"]
    (home / ".ssh" / "config").unlink()
    assert complete(home, "init", "mine", "--hosts", "n") in ([], [""])
