"""What is said of a module that a job's script could not import."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from psctl.job.events import Finished
from psctl.launch.home import HostRecord, JobRecord, KnownCluster
from psctl.launch.jobs.host_messages import SourcePaths, missing_module_cure

JOB = "version: 1\nname: mine\nscript: train.py\nexclude: [data/]\n"
CLUSTER = "version: 1\nname: lab\nhosts: [h1]\n"
EXCEPTION = "ModuleNotFoundError: No module named 'model.net'"
CURE = "add the package that provides model to runtime.requirements in /etc/lab.yaml, then psctl up /etc/lab.yaml"


@pytest.fixture
def record(tmp_path: Path) -> JobRecord:
    folder = tmp_path / "all" / "mine"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("import model.net")
    (folder / "job.yaml").write_text(JOB)
    return JobRecord(
        job="mine-1", name="mine", created=1.0, cluster=KnownCluster("lab", "/etc/lab.yaml", CLUSTER, 0.0),
        hosts=[HostRecord("h1", "/w", "/w/jobs/mine-1/h1", "python3", "/w/code/1")], job_file=JOB,
        job_source=str(folder / "job.yaml"), job_folder=str(folder), code_hash="1", checkpoints="",
    )  # fmt: skip


def test_a_package_is_added_to_what_the_cluster_file_requires(record: JobRecord) -> None:
    assert missing_module_cure(EXCEPTION, record) == CURE
    assert missing_module_cure("ValueError: No module named 'model'", record) == ""
    ended = Finished(
        time=1.0, status="failed", exit=1, steps=0, seconds=1.0, metrics={}, failure={"exception": EXCEPTION}
    )
    shown = SourcePaths(record).event(ended)
    assert isinstance(shown, Finished)
    assert shown.failure is not None
    assert shown.failure["hint"] == CURE


def test_where_psctl_installs_nothing_the_cure_is_another(record: JobRecord) -> None:
    existing = CLUSTER + "runtime: {environment: existing, python: /opt/py}\n"
    known = KnownCluster("lab", "/etc/lab.yaml", existing, 0.0)
    said = missing_module_cure(EXCEPTION, replace(record, cluster=known))
    assert said.startswith("install the package that provides model for /opt/py on the hosts")
    assert "runtime.requirements" in said
    here = missing_module_cure(EXCEPTION, replace(record, cluster=KnownCluster("local", "", "", 0.0)))
    assert here == f"install the package that provides model: {sys.executable} -m pip install model"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("data/model.py", "data/model.py was not sent: .gitignore or `exclude:` leaves data out; `exclude: ['!data']`"),
        ("lib/model/net.py", "lib/model was sent, but Python does not look in its folder: `env: {PYTHONPATH: lib}`"),
        ("../model.py", "model.py lies outside the job's folder"),
        ("../../model/net.py", "model lies outside the job's folder"),
        ("model/other.py", "model was sent, but it does not contain the imported name"),
        (".venv/lib/model.py", CURE),  # another environment's is no file of the user's
    ],
)
def test_a_file_of_that_name_is_found_where_it_lies(record: JobRecord, place: str, said: str) -> None:
    path = Path(record.job_folder, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    assert said in missing_module_cure(EXCEPTION, record)


def test_a_removed_folder_gives_no_message_on_files(record: JobRecord, tmp_path: Path) -> None:
    assert missing_module_cure(EXCEPTION, replace(record, job_folder=str(tmp_path / "gone"))) == CURE
    assert missing_module_cure(EXCEPTION, replace(record, job_folder="")) == CURE
