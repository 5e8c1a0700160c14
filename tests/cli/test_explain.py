"""`psctl explain`, and the reference made of the same topics."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from psctl.cli.app import make_command
from psctl.cli.shared.topics import EXITS, error_codes, topics
from psctl.errors import PsctlError
from psctl.spec.cluster import OF_SLURM, load_cluster
from psctl.spec.decode import places_of
from psctl.spec.job import JobSpec
from psctl.spec.job_file import load_job
from psctl.spec.key_reference import KeyEntry, entries
from tests.cli.inside import psctl

ROOT = Path(__file__).resolve().parent.parent.parent


def with_example(key: KeyEntry) -> str:
    """Return a whole file with the example of a key."""
    top = key.path.partition(".")[0]
    hosts = "hosts: [{address: a, name: node-a, labels: {rack: r1}}, {address: b, labels: {rack: r2}}]"
    job, cluster = {"name": "name: digits", "script": "script: train.py"}, {"name": "name: lab", "hosts": hosts}
    lines = job if key.file == "job.yaml" else cluster
    if top in ("exec", "steps"):
        lines["kind"] = "kind: command"
        lines["exec"] = "exec: 'run {host} {command}'"
    if key.file == "cluster.yaml" and top in OF_SLURM:
        lines["kind"] = "kind: slurm"
        lines.pop("hosts")
    lines.pop("script" if top == "module" else top, None)
    return "\n".join([*lines.values(), key.example, ""])


@pytest.mark.parametrize("key", [key for key in entries() if key.example], ids=lambda key: f"{key.file}:{key.path}")
def test_the_example_of_every_key_is_valid(key: KeyEntry) -> None:
    text = with_example(key)
    load = load_job if key.file == "job.yaml" else load_cluster
    load(text, key.file)


def test_every_key_is_explained_with_its_values_and_default() -> None:
    found = [key for key in entries() if key.file == "job.yaml" and key.value != "-"]
    assert {key.path.rpartition(".")[2] for key in found} == set(places_of(JobSpec))
    for key in found:
        assert key.text and key.value, key
    by_path = {key.path: key for key in found}
    assert by_path["restart.wait"].default == "10m"
    assert by_path["logs.max"].default == "1GB"
    assert by_path["name"].default == ""
    assert by_path["checkpoint.every"].default == "500 steps"


def test_every_error_has_a_cause_and_a_cure_and_every_exit_code_a_meaning() -> None:
    for code, kinds in error_codes().items():
        assert kinds[0].__doc__, code
        assert kinds[0] is PsctlError or kinds[0].cure != PsctlError.cure, f"{code} has no cure of its own"
        assert kinds[0].exit in EXITS
    assert len({each.name + each.kind for each in topics(make_command())}) == len(topics(make_command()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sync.consistency"], ["bsp: all workers step together", "default:  bsp"]),
        (["on_worker_loss"], ["restart.on_worker_loss (key of job.yaml)"]),
        (["slots"], ["hosts.slots (key of cluster.yaml)"]),
        (["8"], ["host key unknown or changed", "host-key-changed"]),
        (["host-key-changed"], ["ssh-keygen -R HOST", "exit code 8"]),
        (["internal"], ["one that psctl did not expect", "a defect of psctl"]),
        (["version-mismatch"], ["a clock differs", "psctl up"]),
        (["no-such-job"], ["it has ended", "psctl jobs"]),
        (["checkpoint", "restore"], ["Usage: psctl checkpoint restore"]),
        (["progress"], ["examples_per_second: number"]),
        (["env"], ["key of job.yaml"]),
        (["network.encryption"], ["default:  on", "for networks that nobody else reaches"]),
    ],
)
def test_a_topic_is_explained(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    done = psctl(tmp_path, "explain", *words)
    assert done.returncode == 0, done.stderr
    for each in expected:
        assert each in done.stdout
    topics = json.loads(psctl(tmp_path, "explain", *words, "-o", "json").stdout)["topics"]
    assert all(set(each) == {"name", "kind", "text"} for each in topics)


def test_an_unknown_topic_names_the_nearest_and_no_topic_lists_all(tmp_path: Path) -> None:
    done = psctl(tmp_path, "explain", "sync.consitency", code=2)
    assert 'did you mean "sync.consistency"?' in done.stderr
    listed = psctl(tmp_path, "explain").stdout
    assert "checkpoint restore" in listed and "host-key-changed" in listed


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / ".ci" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    made = generator().pages()
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert set(written) == set(made)
    for name, text in made.items():
        assert written[name] == text.rstrip("\n") + "\n", f"{name}: run COLUMNS=100 python .ci/reference.py"
    assert not re.search(r"0x[0-9a-f]{6}", "".join(made.values())), "no address of an object"
