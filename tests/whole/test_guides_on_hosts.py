"""Every command of the guides that needs hosts, on two test hosts.

Not run here, because a test has not what they need:

- docs/checkpoints.md, `s3://bucket/folder`: a bucket of the reader's own; tests/whole/test_uploaded.py uses a server in
  its place;
- docs/slurm.md: a site's scheduler; tests/whole/test_slurm.py runs them with programs in place of sbatch and srun;
- docs/internals/measurements.md: the record of what was measured once, by the commands of docs/performance.md.

GPUs: the commands of docs/gpus.md are run on hosts without any.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_documents import DOCUMENTS, ROOT, WITHOUT_HOSTS, shown
from tests.helpers.running import Psctl, assert_clean, next_event

pytestmark = [pytest.mark.whole, pytest.mark.soak]

COUNTING = ROOT / "tests" / "whole" / "counting"

GUIDES = ("consistency", "data", "gpus", "offline", "performance", "store")

ELSEWHERE = {
    "README": "its commands are the tutorial's",
    "checkpoints": "tests/whole/test_guides.py",
    "exercises": "tests/cli/test_exercises.py",
    "tutorial": "tests/whole/test_tutorial.py",
    "measurements": "the record of what was measured once",
}
"""Documents with commands that need hosts, and where these are run; READMEs of templates: test_templates.py."""

WRITER = """
import os, pathlib
pathlib.Path("plot.png").write_bytes(b"png")
pathlib.Path("notes.txt").write_text(os.environ["RANK"])
"""


def commands_of(guide: str) -> Iterator[list[str]]:
    """Yield the commands of a guide that need hosts."""
    path = ROOT / "docs" / f"{guide}.md"
    free = [words for where, words in WITHOUT_HOSTS if where == path]
    return (words for words in shown(path) if words not in free)


def smaller(words: list[str]) -> list[str]:
    """Return a command with sizes that take seconds on the slow links of test hosts."""
    given = [re.sub(r"^1[KM]B:256MB$", "16KB", word) for word in words]
    return [*given, "--sizes", "16KB"] if words[0] == "bench" and "--sizes" not in words else given


@pytest.fixture(scope="module")
def lab(module_hosts: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Psctl, Any]:
    """Two hosts that are ready, of the current cluster `lab`."""
    hosts = module_hosts(2)
    home = hosts.make_home(tmp_path_factory.mktemp("guides") / "home")
    psctl = Psctl(home.path, environment=home.env)
    cluster = home.path / "lab.yaml"
    cluster.write_text(hosts.cluster_text())
    for words in (["up", "lab.yaml", "--yes"], ["use", "lab.yaml"]):
        done = psctl.run(*words)
        assert done.code == 0, done
    return psctl, hosts


def job_folder(home: Path, name: str, script: str, more: str) -> str:
    """Write a job's folder; return its name."""
    (home / name).mkdir()
    (home / name / "train.py").write_text(script)
    (home / name / "job.yaml").write_text(f"version: 1\nname: {name}\nscript: train.py\nworkers: 2\n{more}\n")
    return name


def test_every_document_is_run_somewhere() -> None:
    needing = {path.stem for path in DOCUMENTS for words in shown(path) if (path, words) not in WITHOUT_HOSTS}
    assert needing - {*GUIDES, *ELSEWHERE, "README"} == set()


@pytest.mark.timeout(2400)  # `--congestion all` measures half a minute for each algorithm of the kernel
@pytest.mark.parametrize("guide", ["consistency", "gpus", "offline", "performance"])
def test_the_commands_of_a_guide_are_run(lab: tuple[Psctl, Any], guide: str) -> None:
    psctl, hosts = lab
    commands = list(commands_of(guide))
    assert commands
    for words in commands:
        done = psctl.run(*smaller(words), timeout=1500)
        assert done.code == 0, f"psctl {shlex.join(words)}: {done}"
        assert (done.out + done.err).strip()
    assert_clean(hosts)


def test_the_commands_of_the_guide_to_data_fetch_what_a_job_wrote(lab: tuple[Psctl, Any]) -> None:
    psctl, _ = lab
    outputs = "outputs: ['*.png', '*.txt']\ncheckpoint: {every: null}"
    folder = job_folder(psctl.home, "digits", WRITER, outputs)
    for _ in range(3):
        assert psctl.run("train", f"{folder}/job.yaml", "-d").code == 0
        assert psctl.run("attach", "digits").code == 0
    for words in commands_of("data"):
        done = psctl.run(*words)
        assert done.code == 0, f"psctl {shlex.join(words)}: {done}"
    assert (psctl.home / "results" / "plot.png").read_bytes() == b"png"
    assert not list((psctl.home / "results").rglob("*.txt")), "only what was asked for"


def test_the_commands_of_the_guide_to_the_store_read_a_job(lab: tuple[Psctl, Any]) -> None:
    psctl, _ = lab
    commands = list(commands_of("store"))
    reads = [words for words in commands if words[:2] == ["store", "JOB"]]
    (export,) = [words for words in commands if words[0] == "checkpoint"]
    assert len(reads) + 1 == len(commands) == 3
    script = (COUNTING / "train.py").read_text()
    for old, new in {'run.store("taken", ': "run.store(", 'push("steps", 1.0)': 'push("w", 1.0)'}.items():
        assert old in script
        script = script.replace(old, new)
    folder = job_folder(psctl.home, "rows", script, "sync: {strategy: ps}\ncheckpoint: {every: 10 steps}")
    slow = ["--set", 'args=["--epochs", "400", "--pause", "0.05"]']
    with psctl.start("train", f"{folder}/job.yaml", "-o", "jsonl", *slow) as process:
        next_event(process, "checkpoint")
        for words in reads:
            given = " ".join(words).replace("JOB", "rows-1").replace("NAME", "default")
            done = psctl.run(*shlex.split(given.replace("[", "").replace("]", "")))
            assert done.code == 0, f"psctl {given}: {done}"
            assert "w" in done.out
        found = {entry["key"]: entry["value"] for entry in json.loads(done.out)["entries"]}
        assert set(found) == {"w", 7, 8} and found["w"][0] >= 1
        assert psctl.run("stop", "rows-1", "--save").code == 0
        process.communicate(timeout=60)
    listed = psctl.run("checkpoint", "list", "rows-1", "-o", "json").document["checkpoints"]
    words = [word.replace("JOB@STEP", f"rows-1@{listed[-1]['step']}") for word in export]
    done = psctl.run(*words)
    assert done.code == 0, f"psctl {shlex.join(words)}: {done}"
    assert (psctl.home / "rows.safetensors").stat().st_size > 1000
