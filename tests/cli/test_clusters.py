"""The current cluster, how commands name their target, and what may be removed without a question."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from psctl.cli.shared.context import Context
from psctl.cli.shared.global_options import GlobalOptions
from psctl.errors import UsageError
from psctl.launch.home import Home, HostRecord, JobRecord, KnownCluster
from tests.checkpoint.conftest import write
from tests.cli.inside import psctl

ROOT = Path(__file__).resolve().parent.parent.parent

JOB = "name: digits\nscript: train.py\n"


def cluster(folder: Path, name: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\nruntime: {{environment: existing, python: {sys.executable}, workdir: ./{name}-hosts}}\n"
        "hosts: [{address: local}]\n"
    )
    return path.name


def current(folder: Path) -> str | None:
    return Home(folder / "state").current()


def known(folder: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads(psctl(folder, "clusters", "-o", "json").stdout)["clusters"]
    assert all(set(row) == {"name", "file", "current", "hosts", "state"} for row in rows)
    return {row["name"]: row for row in rows}


def next_of(text: str) -> str:
    return next(line for line in text.splitlines() if "Next: " in line).partition("Next: ")[2]


def test_up_and_use_alone_change_the_current_cluster(tmp_path: Path) -> None:
    one, two = cluster(tmp_path, "one"), cluster(tmp_path, "two")
    psctl(tmp_path, "doctor", one)
    psctl(tmp_path, "topo", one)
    psctl(tmp_path, "plan", "--cluster", one, "--size", "1MB")
    assert current(tmp_path) is None
    psctl(tmp_path, "up", one)
    assert current(tmp_path) == "one"
    psctl(tmp_path, "doctor", two)
    assert current(tmp_path) == "one"
    used = psctl(tmp_path, "use", two)
    assert (current(tmp_path), used.stderr.splitlines()[0]) == ("two", "cluster: two (1 host)")
    psctl(tmp_path, "use", "one")
    assert current(tmp_path) == "one"
    psctl(tmp_path, "use", "local")
    assert json.loads(psctl(tmp_path, "doctor", "-o", "json").stdout)["cluster"] == "local"
    psctl(tmp_path, "use", "nowhere", code=6)


def test_clusters_are_listed_with_file_hosts_and_state(tmp_path: Path) -> None:
    one, two = cluster(tmp_path, "one"), cluster(tmp_path, "two")
    assert [(row["name"], row["current"], row["file"]) for row in known(tmp_path).values()] == [("local", True, None)]
    psctl(tmp_path, "up", one)
    psctl(tmp_path, "use", two)
    rows = known(tmp_path)
    assert rows["one"] == {
        "name": "one", "file": str(tmp_path / one), "current": False, "hosts": ["local"], "state": "ready",
    }  # fmt: skip
    assert (rows["two"]["current"], rows["two"]["state"], rows["local"]["current"]) == (True, "new", False)
    with (tmp_path / one).open("a") as file:
        file.write("# another line\n")
    (tmp_path / two).unlink()
    assert [known(tmp_path)[name]["state"] for name in ("one", "two")] == ["changed", "file-missing"]
    assert "one\t\t1\tits file was changed since" in psctl(tmp_path, "clusters").stdout


def test_a_cluster_that_is_down_in_part_is_reported_as_partial(tmp_path: Path) -> None:
    (tmp_path / "half.yaml").write_text(
        f"name: half\nruntime: {{environment: existing, python: {sys.executable}, workdir: ./half-hosts}}\n"
        "hosts: [{address: local}, gone.invalid]\n"
    )
    psctl(tmp_path, "up", "half.yaml", code=10)
    assert (known(tmp_path)["half"]["state"], current(tmp_path)) == ("partial", "half")
    psctl(tmp_path, "down", code=10)
    assert (known(tmp_path)["half"]["state"], current(tmp_path)) == ("partial", "half")


def test_what_acts_names_its_cluster_once_unless_quiet(tmp_path: Path) -> None:
    (tmp_path / "three.yaml").write_text("name: lab\nhosts: [a.invalid, b.invalid, c.invalid]\n")
    for words in (["up"], ["doctor"], ["down"], ["train", "job.yaml", "--dry-run", "--cluster"]):
        (tmp_path / "job.yaml").write_text(JOB)
        (tmp_path / "train.py").write_text("")
        said = psctl(tmp_path, *words, "three.yaml", code=3).stderr
        assert said.splitlines().count("cluster: lab (3 hosts)") == 1, said
        assert "cluster:" not in psctl(tmp_path, *words, "three.yaml", "-q", code=3).stderr
    assert psctl(tmp_path, "up", "--dry-run").stderr.startswith("cluster: local (this machine)\n")


def test_next_is_the_command_that_trains_on_this_cluster(tmp_path: Path) -> None:
    one, two = cluster(tmp_path, "one"), cluster(tmp_path, "two")
    assert next_of(psctl(tmp_path, "doctor", one).stderr) == "psctl train JOB.yaml --cluster one.yaml"
    assert next_of(psctl(tmp_path, "up", one).stderr) == "psctl train JOB.yaml"
    assert next_of(psctl(tmp_path, "doctor", two).stderr) == "psctl train JOB.yaml --cluster two.yaml"
    assert next_of(psctl(tmp_path, "doctor", "local").stderr) == "psctl train JOB.yaml --cluster local"
    assert next_of(psctl(tmp_path, "up", one, PSCTL_CLUSTER="local").stderr) == "psctl train JOB.yaml --cluster one"
    (tmp_path / "job.yaml").write_text(JOB)
    assert next_of(psctl(tmp_path, "doctor").stderr) == "psctl train job.yaml"
    (tmp_path / "job.yaml").write_text(f"{JOB}cluster: ./two.yaml\n")
    assert next_of(psctl(tmp_path, "doctor").stderr) == "psctl train job.yaml --cluster one"
    assert next_of(psctl(tmp_path, "doctor", two).stderr) == "psctl train job.yaml"
    assert next_of(psctl(tmp_path, "up", "local").stderr) == "psctl train job.yaml --cluster local"


def test_nothing_is_purged_where_no_question_can_be_asked(tmp_path: Path) -> None:
    one = cluster(tmp_path, "one")
    psctl(tmp_path, "up", one)
    kept = tmp_path / "one-hosts" / "checkpoints" / "digits-1" / "whole"
    kept.parent.mkdir(parents=True)
    kept.write_text("weights")
    for more in ([], ["--no-input"], ["--force"]):
        refused = psctl(tmp_path, "down", "one", "--purge", *more, "-o", "json", code=2)
        error = json.loads(refused.stdout)["error"]
        assert error["code"] == "usage"
        assert "./one-hosts with all logs and checkpoints from local" in error["message"]
        assert error["hint"] == " ".join(["psctl down one --purge", *more, "-o json --yes"])
        assert kept.exists()
        assert current(tmp_path) == "one"
    psctl(tmp_path, "down", "one", "--purge", "-y")
    assert not kept.exists()
    assert current(tmp_path) is None


def test_checkpoints_are_pruned_only_after_a_confirmation(tmp_path: Path) -> None:
    folder = str(tmp_path / "hosts")
    for step in (100, 200, 300):
        write(Path(folder) / "checkpoints", step)
    host = HostRecord("local", folder, f"{folder}/jobs/digits-3/local", sys.executable, str(ROOT))
    record = JobRecord(
        "digits-3", "digits", 1.0, KnownCluster("local", "", "", 0.0), [host], JOB, "job.yaml", ".", "c0de",
        f"{folder}/checkpoints", state="done", exit=0,
    )  # fmt: skip
    Home(tmp_path / "state").save_record(record)
    refused = psctl(tmp_path, "checkpoint", "prune", "digits", "--keep", "1", code=2).stderr
    assert "remove 2 of digits-3's checkpoints: digits-3@100, digits-3@200: not asked" in refused
    assert "hint: psctl checkpoint prune digits --keep 1 --yes" in refused
    assert len(os.listdir(f"{folder}/checkpoints/digits-3")) == 3
    psctl(tmp_path, "checkpoint", "prune", "digits", "--keep", "3")  # nothing is lost, so nothing is asked
    psctl(tmp_path, "checkpoint", "prune", "digits", "--keep", "1", "--yes")
    assert os.listdir(f"{folder}/checkpoints/digits-3") == ["0000000300"]


def test_a_question_at_a_terminal_is_answered_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    context = Context(GlobalOptions(), {}, ["down", "--purge"])
    with os.fdopen(theirs) as stdin, os.fdopen(ours, "wb", buffering=0) as typing:
        monkeypatch.setattr(sys, "stdin", stdin)
        for answer in ("n", "", "maybe"):
            typing.write(f"{answer}\n".encode())
            with pytest.raises(UsageError, match="nothing was done"):
                context.confirm("remove everything")
        typing.write(b"y\n")
        context.confirm("remove everything")
