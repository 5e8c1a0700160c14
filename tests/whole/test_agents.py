"""Agents on hosts whose clock is set, whose disk is full, or whose psctl was killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, Psctl, assert_clean, until

pytestmark = pytest.mark.whole


class Plain:
    """Test hosts, and jobs there whose script never imports torch.

    Args:
        hosts: test hosts.
        folder: for psctl's home on the driving side.
        workdir: psctl's folder on the hosts.
    """

    def __init__(self, hosts: Any, folder: Path, workdir: str = "~/.psctl/host") -> None:
        self.hosts, self.folder, self._workdir = hosts, folder, workdir.replace("~", "/root", 1)
        home = hosts.make_home(folder)
        self.psctl = Psctl(home.path, environment=home.env)
        self.cluster = home.path / "cluster.yaml"
        runtime = f"{{python: {hosts.python}, environment: existing, workdir: {workdir}}}"
        text: str = hosts.cluster_text(more=f"runtime: {runtime}\n")
        self.cluster.write_text(text)

    def job(self, script: str, more: str = "") -> Path:
        """Write a job's folder; return its file."""
        folder = self.folder / "plain"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        file = folder / "job.yaml"
        file.write_text(f"version: 1\nname: plain\nscript: train.py\n{more}")
        return file

    def train(self, file: Path, *more: str) -> str:
        """Start a job; return its name."""
        done = self.psctl.run("train", str(file), "-d", "-o", "json", "--cluster", str(self.cluster), *more)
        assert done.code == 0, done
        name: str = done.document["job"]
        return name

    def status(self, job: str) -> dict[str, Any]:
        """Return what `status` says of a job."""
        found: dict[str, Any] = self.psctl.run("status", job, "-o", "json").document["jobs"][0]
        return found

    def events(self, job: str) -> list[dict[str, Any]]:
        """Return the whole lines of a job's event log, which a test may read while it is written."""
        head = next(iter(self.hosts))
        path = self.hosts.path(head, f"{self._workdir}/jobs/{job}/{head}/events.jsonl")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def await_workers(self, job: str, count: int = 1) -> None:
        """Wait until the scripts of so many workers have printed a line."""

        def begun() -> set[str]:
            return {event["rank"] for event in self.events(job) if event["event"] == "log"}

        until(lambda: len(begun()) >= count, 60, name=f"{count} scripts of {job} that print")


ENDLESS = "import threading\nprint('begun', flush=True)\nthreading.Event().wait()\n"


@pytest.mark.soak  # tests/launch/test_host_state.py has a clock that was set
def test_a_clock_that_is_set_hides_no_job(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    """The kernel tells when it booted by the clock: setting that moves the boot, as it does here by a mount."""
    plain = Plain(make_hosts(1), tmp_path / "home")
    file = plain.job(ENDLESS)
    job = plain.train(file)
    plain.await_workers(job)
    moved = "sed 's/^btime .*/btime 1000000000/' /proc/stat > /run/stat && mount --bind /run/stat /proc/stat"
    plain.hosts.exec("h1", ["sh", "-c", moved])
    rows = plain.psctl.run("status", "-o", "json").document
    assert [host["state"] for host in rows["hosts"]] == ["busy"], rows
    assert plain.status(job)["state"] == "running"
    second = plain.psctl.run("train", str(file), "-d", "-o", "json", "--cluster", str(plain.cluster))
    assert second.code == 7, second
    assert job in second.document["error"]["message"]
    down = plain.psctl.run("down", str(plain.cluster), "-o", "json")
    assert down.code == 7, down
    assert plain.status(job)["state"] == "running"
    assert plain.psctl.run("stop", job).code == 0
    assert_clean(plain.hosts)


LOUD = """import os, time
count, line = 0, "x" * 999
while not os.path.exists("/root/enough"):
    for _ in range(100):
        print(line, flush=True)
    count += 1
    with open("/root/count.new", "w") as file:
        file.write(str(count))
    os.rename("/root/count.new", "/root/count")
    time.sleep(0.01)
print("the end", flush=True)
"""
"""Prints until it is told to end; how far it came stands on another disk."""


class Full(Plain):
    """Hosts that psctl has a small disk on, which a script fills.

    Args:
        hosts: test hosts.
        folder: for psctl's home on the driving side.
    """

    def __init__(self, hosts: Any, folder: Path) -> None:
        super().__init__(hosts, folder, workdir="/small/psctl")
        for name in hosts:
            hosts.disk(name, "/small", "32m")

    def fill(self) -> None:
        """Wait until the script has filled the disks, and take what psctl has left of them."""
        fill = ["sh", "-c", "cat /dev/zero >> /small/full"]
        for name in self.hosts:
            until(lambda name=name: self.count(name), 60, name=f"a script on {name} that prints")
            until(lambda name=name: self.free(name) < 1_000_000, 60, name=f"a full disk on {name}")
            self.hosts.exec(name, fill, check=False)
            while self.free(name):  # the coordinator's journal is given up when the disk is full
                self.hosts.exec(name, fill, check=False)

    def free(self, name: str) -> int:
        """Return the bytes that are free on a host's small disk."""
        found = os.statvfs(self.hosts.path(name, "/small"))
        return found.f_bavail * found.f_frsize

    def goes_on(self) -> None:
        """Wait until the script of every host has gone on."""
        before = {name: self.count(name) for name in self.hosts}
        for name in self.hosts:
            until(lambda name=name: self.count(name) > before[name] + 20, name=f"the script on {name} goes on")

    def count(self, name: str) -> int:
        """Return how far the script on a host came."""
        file = self.hosts.path(name, "/root/count")
        return int(file.read_text()) if file.exists() else 0


def test_a_script_that_fills_the_disks_ends_as_it_would_have(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    plain = Full(make_hosts(2), tmp_path / "home")
    job = plain.train(plain.job(LOUD))
    plain.fill()
    plain.goes_on()

    def reports() -> list[str]:
        return [event["text"] for event in plain.events(job) if "the disk of h2 is full" in event.get("text", "")]

    until(reports, 60, name="a notice that the disk of h2 is full")
    assert plain.status(job)["state"] == "running"
    for name in plain.hosts:
        plain.hosts.path(name, "/root/enough").touch()
    run = plain.psctl.run("attach", job, "-o", "jsonl")
    assert run.code == 0, run
    assert (run.events[-1]["event"], run.events[-1]["status"]) == ("finished", "done")
    assert_clean(plain.hosts)
    assert len(reports()) == 1, reports()
    read = plain.psctl.run("logs", job, "-r", "worker:1", "--tail", "3")
    assert read.code == 0, read
    assert "lines were not kept, the disk was full" in read.out
    assert plain.status(job)["state"] == "done"


@pytest.mark.soak  # the one below does so on this machine
def test_a_job_is_stopped_on_disks_without_a_byte_free(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    plain = Full(make_hosts(2), tmp_path / "home")
    job = plain.train(plain.job(LOUD))
    plain.fill()
    plain.goes_on()
    stopped = plain.psctl.run("stop", job, timeout=60)
    assert stopped.code == 0, stopped
    assert plain.status(job)["state"] == "stopped"
    assert plain.events(job)[-1]["event"] == "finished"
    assert_clean(plain.hosts)


def test_a_job_of_this_machine_is_stopped_on_a_disk_without_a_byte_free(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    """psctl runs on the test host itself: its records, event log, logs and sockets lie on one disk."""
    hosts = make_hosts(1)
    plain = Full(hosts, tmp_path / "home")
    for name, text in (("train.py", LOUD), ("job.yaml", "version: 1\nname: plain\nscript: train.py\nworkers: 1\n")):
        hosts.path("h1", "/root/plain").mkdir(exist_ok=True)
        hosts.path("h1", f"/root/plain/{name}").write_text(text)
    inside = ["env", "HOME=/small", f"PYTHONPATH={ROOT}", hosts.python, "-m", "psctl"]
    begun = hosts.exec("h1", [*inside, "train", "/root/plain/job.yaml", "-d", "--cluster", "local"])
    plain.fill()
    plain.goes_on()
    stopped = hosts.exec("h1", [*inside, "stop"], check=False)
    assert stopped.returncode == 0, (begun, stopped)
    status = hosts.exec("h1", [*inside, "status", "-o", "json"], check=False)
    assert status.returncode == 0, status
    assert [job["state"] for job in json.loads(status.stdout)["jobs"]] == ["stopped"]
    left = {path.name for path in hosts.path("h1", "/small/.psctl/host/jobs/plain-1/local").iterdir()}
    assert left == {"agent.log", "coordinator.log", "errors", "events.jsonl", "files", "logs"}


MANY = """import os, threading
for number in range(60_000):
    print(f"line {number:020}")
print("all", flush=True)
while not os.path.exists("/root/enough"):
    threading.Event().wait(0.05)
print("the end", flush=True)
"""


def test_logs_are_read_and_followed_across_segments(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    plain = Plain(make_hosts(1), tmp_path / "home")
    job = plain.train(plain.job(MANY, "logs: {max: 1MB}\n"))
    with plain.psctl.start("logs", job, "-f") as follower:
        assert follower.stdout is not None
        until(lambda: "all" in plain.psctl.run("logs", job, "--tail", "1").out, name="the last of many lines")
        plain.hosts.path("h1", "/root/enough").touch()
        followed = follower.stdout.read().splitlines()
    last = [line for line in followed if "lines left out here" not in line][-1]  # that may be written after it
    assert last.endswith("the end"), followed[-5:]
    kept = plain.psctl.run("logs", job)
    lines = kept.out.splitlines()
    first = int(lines[0].rpartition(" ")[2])
    assert first > 10_000
    assert [int(line.rpartition(" ")[2]) for line in lines[:-2]] == list(range(first, 60_000))
    assert f"worker/0 on h1: the first {first:,} lines of stdout were removed" in kept.err
    found = plain.psctl.run("logs", job, "--grep", f"line {first + 1:020}$")
    assert len(found.out.splitlines()) == 1
    folder = plain.hosts.path("h1", f"/root/.psctl/host/jobs/{job}/h1/logs")
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1_000_000


DYING = """import os, signal, sys
from psctl.launch.jobs import submit
name, number, after = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "after"
whole, calls = getattr(submit._Submission, name), []
def step(*arguments):
    calls.append(1)
    if len(calls) == number and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    found = whole(*arguments)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(submit._Submission, name, step)
sys.argv[1:4] = []
from psctl.cli.main import main
sys.exit(main())
"""
"""psctl, killed before or after the Nth call of a step of the start."""


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(("_write_orders", 1, "before"), marks=pytest.mark.soak),
        pytest.param(("_write_orders", 1, "after"), marks=pytest.mark.soak),
        pytest.param(("_start_agent", 1, "after"), marks=pytest.mark.soak),
        ("_write_orders", 2, "after"),
    ],
)
def test_a_psctl_that_is_killed_while_it_starts_a_job_leaves_nothing(
    make_hosts: Callable[..., Any], tmp_path: Path, step: tuple[str, int, str]
) -> None:
    plain = Plain(make_hosts(2), tmp_path / "home")
    file = plain.job(ENDLESS, "timeouts: {start: 2s}\n")
    assert plain.psctl.run("up", str(plain.cluster)).code == 0
    dying = Psctl(plain.psctl.home, (sys.executable, "-c", DYING, *map(str, step)), plain.psctl.environment)
    died = dying.run("train", str(file), "-d", "--cluster", str(plain.cluster))
    assert died.code == -9, died
    assert_clean(plain.hosts)
    until(lambda: plain.status("plain-1")["state"] == "failed", 60, name="the end of the job")
    assert plain.status("plain-1")["problem"]
    for name in plain.hosts:
        kept = plain.hosts.path(name, "/root/.psctl/host/jobs").rglob("*")
        found = {path.name for path in kept if path.is_file() and "files" not in path.parts}
        assert found <= {"agent.log", "coordinator.log", "events.jsonl"}, f"{name}: {found}"
    job = plain.train(file)  # on the slots of both hosts
    assert plain.psctl.run("stop", job).code == 0


@pytest.mark.soak  # the one above kills it earlier
def test_a_job_is_not_missed_by_a_psctl_that_was_killed_when_all_of_it_was_started(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    """Its record names no process; the agents have records of their own."""
    plain = Plain(make_hosts(2), tmp_path / "home")
    dying = Psctl(
        plain.psctl.home, (sys.executable, "-c", DYING, "_start_agent", "2", "after"), plain.psctl.environment
    )
    file = plain.job(ENDLESS)
    assert dying.run("train", str(file), "-d", "--cluster", str(plain.cluster)).code == -9
    plain.await_workers("plain-1", 2)
    assert plain.status("plain-1")["state"] == "running"
    assert plain.psctl.run("stop").code == 0
    assert plain.status("plain-1")["state"] == "stopped"
    assert_clean(plain.hosts)
