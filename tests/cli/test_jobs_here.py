"""Jobs on this machine, started, followed, left and ended as a user does it; the script does nothing but wait."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.inside import psctl
from tests.helpers.running import until

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.whole

WAIT = (
    "import os, time\nprint('rank', os.environ['RANK'], flush=True)\ntime.sleep(float(os.environ.get('NAP', '60')))\n"
)
RAISE = "import os\nprint('here we go', flush=True)\nraise ValueError(f'no good on {os.environ[\"RANK\"]}')\n"


class User:
    """A user with an own home and two job files."""

    def __init__(self, home: Path) -> None:
        self.home = home
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PSCTL_", "FORCE_"))}
        self.environment = {**clean, "PYTHONPATH": str(ROOT), "HOME": str(home), "TERM": "xterm"}
        for name, script in (("wait", WAIT), ("raise", RAISE)):
            (home / name).mkdir()
            (home / name / "train.py").write_text(script)
            (home / name / "job.yaml").write_text(
                f"name: {name}\nscript: train.py\nworkers: 1\nsync: {{strategy: native}}\ntimeouts: {{stall: 60s}}\n"
            )

    def start(self, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "psctl", *arguments], cwd=self.home, env=self.environment, text=True,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )  # fmt: skip

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command that starts no job, without a process of its own."""
        return psctl(self.home, *arguments, code=code, PSCTL_HOME=str(self.home / ".psctl")).stdout

    def document(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "-o", "json", code=code))

    def train(self, *arguments: str, code: int = 0) -> Any:
        """Start a job; return its document."""
        with self.start("train", *arguments, "-o", "json") as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return json.loads(out)

    def left(self) -> list[str]:
        """Processes of jobs under this home."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if f"{self.home}/.psctl" in line and ("-m psctl." in line or "process/bootstrap.py" in line):
                found.append(line)
        return found


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    made = User(tmp_path)
    yield made
    for process in psutil.process_iter(["cmdline"]):
        if f"{tmp_path}/.psctl" in " ".join(process.info["cmdline"] or []):
            process.kill()


def running(user: User, job: str) -> bool:
    ranks = user.document("status", job)["jobs"][0]["ranks"]
    return any(rank["role"] == "worker" and rank["state"] == "running" for rank in ranks)


def read_until(process: subprocess.Popen[str], needle: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if needle in line:
            return lines
    raise AssertionError(f"{needle!r} never came; {''.join(lines)}{process.stderr and process.stderr.read()}")


def test_a_detached_job_is_seen_refused_twice_read_and_stopped(user: User) -> None:
    job = user.train("wait", "-d")["job"]
    assert job == "wait-1"
    until(lambda: running(user, job))
    status = user.document("status")
    assert status["jobs"][0]["state"] == "running"
    assert status["hosts"][0]["state"] == "busy"
    slots = len(os.sched_getaffinity(0))
    held = user.train("wait", "--workers", str(slots), code=7)["error"]
    assert held["code"] == "job-running"
    assert "wait-1" in held["message"]
    assert user.document("down", code=7)["error"]["code"] == "job-running"
    asked = user.document("down", "--force", code=2)["error"]
    assert "end running jobs: wait-1 on local: not asked" in asked["message"]
    assert running(user, job)
    until(lambda: "rank 0" in user.run("logs", "-r", "worker:0"))
    stopped = user.document("stop")
    assert stopped == {"job": job, "state": "stopped", "was": "running", "left": [], "checkpoint": None}
    assert user.left() == []
    assert user.document("stop", job)["was"] == "stopped"
    followed = user.document("logs", job, "-f")["lines"]
    assert [line["text"] for line in followed if line["rank"] == "worker/0"] == ["rank 0"]
    attached = user.run("attach", job, "-o", "jsonl", code=1).splitlines()
    assert json.loads(attached[0])["event"] == "started"
    assert json.loads(attached[-1])["status"] == "stopped"
    assert [(each["job"], each["state"]) for each in user.document("jobs")["jobs"]] == [(job, "stopped")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_away_from_a_terminal_a_signal_stops_the_job(user: User, number: int, code: int) -> None:
    with user.start("train", "wait", "-o", "jsonl") as process:
        read_until(process, '"rank 0"')
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["status"], last["exit"], process.returncode) == ("finished", "stopped", code, code), err
    assert user.left() == []


def test_an_interrupt_that_detaches_leaves_the_job_and_a_killed_psctl_does_too(user: User) -> None:
    with user.start("train", "wait", "--on-interrupt", "detach", "-o", "jsonl") as process:
        read_until(process, '"rank 0"')
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
    with user.start("attach", "-o", "jsonl") as process:
        read_until(process, '"rank 0"')
        process.kill()
    assert running(user, "wait-1")
    with user.start("attach", "-o", "jsonl") as process:
        read_until(process, '"rank 0"')
        user.run("stop", "--force")
        out, _ = process.communicate(timeout=60)
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["status"], process.returncode) == ("finished", "stopped", 1)
    assert user.left() == []


def test_at_a_terminal_ctrl_c_detaches_twice_stops(user: User) -> None:
    ours, theirs = pty.openpty()
    with user.start("train", "wait", stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        until(lambda: (user.home / ".psctl/jobs/wait-1/record.json").exists())
        until(lambda: running(user, "wait-1"))
        process.send_signal(signal.SIGINT)
        screen = ""
        while process.poll() is None:
            screen += _read(ours)
        assert process.returncode == 0, screen
        assert "psctl attach wait-1" in screen
    assert running(user, "wait-1")
    ours, theirs = pty.openpty()
    with user.start("attach", stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        screen = ""
        while "wait-1" not in screen:
            screen += _read(ours)
        process.send_signal(signal.SIGINT)
        while "again" not in screen:
            screen += _read(ours)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            screen += _read(ours)
        assert process.returncode == 130, screen
    assert user.document("jobs")["jobs"][0]["state"] == "stopped"
    assert user.left() == []


def _read(descriptor: int) -> str:
    try:
        return os.read(descriptor, 65536).decode(errors="replace")
    except OSError:  # the other end is closed
        return ""


def test_a_script_that_raises_ends_with_its_exception_and_code_1(user: User) -> None:
    with user.start("train", "raise") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert out == ""
    for needle in ("raise-1 failed", "worker/0", "ValueError: no good on 0", "train.py", "psctl logs raise-1"):
        assert needle in err, err
    document = user.document("attach", "raise", code=1)
    assert (document["job"], document["status"], document["exit"]) == ("raise-1", "failed", 1)
    assert "ValueError" in document["failure"]["exception"]
    assert user.left() == []


def test_two_psctl_at_once_start_two_jobs(user: User) -> None:
    user.environment["NAP"] = "0.2"
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two slots")
    starts = [user.start("train", "wait", "--env", "NAP=0.2", "-o", "jsonl") for _ in range(2)]
    jobs = set()
    for process in starts:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        jobs.add(json.loads(out.splitlines()[0])["job"])
    assert jobs == {"wait-1", "wait-2"}
    assert user.left() == []


def test_a_submission_that_fails_leaves_no_job(user: User) -> None:
    (user.home / "wait" / "job.yaml").write_text("name: wait\nscript: train.py\nenv: {NOT_SET_ANYWHERE: }\n")
    error = user.train("wait", code=2)["error"]
    assert "NOT_SET_ANYWHERE" in error["message"]
    assert user.document("jobs") == {"jobs": []}
