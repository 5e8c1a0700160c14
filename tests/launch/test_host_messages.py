"""What a job's hosts tell, as the machine names it that submitted the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from psctl.job.events import Finished, Log, StateChanged
from psctl.launch.home import HostRecord, JobRecord, KnownCluster
from psctl.launch.jobs.host_messages import SourcePaths, resumed_by

HASH = "5f" * 32
THERE = "/var/psctl/my host/jobs/mine-1/h1/files"
HOST = HostRecord("h1", "/var/psctl/my host", "/var/psctl/my host/jobs/mine-1/h1", "python3", "/c")
RECORD = JobRecord(
    job="mine-1", name="mine", created=1.0, cluster=KnownCluster("lab", "", "", 0.0), hosts=[HOST], job_file="",
    job_source="/home/me/mine/job.yaml", job_folder="/home/me/mine", code_hash=HASH, checkpoints="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f'  File "{THERE}/train.py", line 12, in step', '  File "/home/me/mine/train.py", line 12, in step'),
        (f'  File "{THERE}/my model/net.py", line 3', '  File "/home/me/mine/my model/net.py", line 3'),
        (f"{THERE}/train.py:12: UserWarning: slow", "/home/me/mine/train.py:12: UserWarning: slow"),
        ("at /link/jobs/mine-1/h1/files/train.py:7 in f", "at /home/me/mine/train.py:7 in f"),  # the workdir is a link
        (f"saved to {THERE}/out.pt", f"saved to {THERE}/out.pt"),  # a file on the host, not one here
        (f"running {THERE}/train.py", f"running {THERE}/train.py"),
        ('  File "/usr/lib/python3/torch/nn.py", line 4', '  File "/usr/lib/python3/torch/nn.py", line 4'),
    ],
)
def test_places_in_the_jobs_source_files_are_named_as_here(said: str, shown: str) -> None:
    assert SourcePaths(RECORD).text(said) == shown
    event = SourcePaths(RECORD).event(Log(time=1.0, rank="worker/0", stream="stderr", text=said))
    assert isinstance(event, Log)
    assert event.text == shown


def test_a_failures_frames_name_files_of_this_machine() -> None:
    frames = ["train.py:88 in main: step(model)", "/usr/lib/x.py:3 in f", "<string>:1 in <module>"]
    failure = {"exception": f"ValueError: {THERE}/a.py:3", "frames": frames, "tail": [f"{THERE}/train.py:1: bad"]}
    ended = Finished(time=1.0, status="failed", exit=1, steps=3, seconds=1.0, metrics={}, failure=failure)
    shown = SourcePaths(RECORD).event(ended)
    assert isinstance(shown, Finished)
    assert shown.failure == {
        "exception": "ValueError: /home/me/mine/a.py:3",
        "frames": ["/home/me/mine/train.py:88 in main: step(model)", *frames[1:]],
        "tail": ["/home/me/mine/train.py:1: bad"],
        "hint": "",
    }


def test_files_of_a_restored_job_are_named_relative_to_their_folder() -> None:
    paths = SourcePaths(replace(RECORD, job_folder=""))
    assert paths.text(f'File "{THERE}/train.py", line 12') == 'File "train.py", line 12'
    state = StateChanged(
        time=1.0, role="worker", rank=0, host="h1", state="failed", last_error=f"E: {THERE}/train.py:12"
    )
    assert paths.event(state) == replace(state, last_error="E: train.py:12")


def failure(**more: Any) -> dict[str, Any]:
    return {"resume": "psctl train JOB.yaml --resume latest", **more}


def test_the_command_that_trains_again_names_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "my jobs" / "job.yaml"
    source.parent.mkdir()
    source.write_text("")
    record = replace(RECORD, job_source=str(source))
    assert resumed_by(failure(), record)["resume"] == f"psctl train '{source}' --resume latest"
    options = ["--set", "seed=1", "--cluster", "lab"]
    assert resumed_by(failure(), record, options)["resume"] == (
        f"psctl train '{source}' --set seed=1 --cluster lab --resume latest"
    )
    monkeypatch.chdir(source.parent)
    assert resumed_by(failure(), record)["resume"] == "psctl train job.yaml --resume latest"
    source.unlink()
    assert resumed_by(failure(), record) == failure()
    restore = {"resume": "psctl checkpoint restore mine-1@5"}
    assert resumed_by(restore, record) == restore
