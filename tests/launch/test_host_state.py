"""The small programs that hosts are asked with, run as a host runs them: by a Python of their own."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psctl import errors
from psctl.agent import supervisor
from psctl.job.events import (
    CheckpointWritten,
    Finished,
    HostTraffic,
    Log,
    Progress,
    Recovered,
    Recovering,
    Restored,
    Started,
    StateChanged,
    to_line,
)
from psctl.launch.archive import pack_folder
from psctl.launch.host_programs import HOST_FILES, HOST_STATE, OBJECT, program_command, run_program
from psctl.launch.hosts.site import inspect_host
from psctl.remote.local import LocalShell
from psctl.spec.cluster import ClusterSpec, HostSpec, RuntimeSpec
from tests.helpers.job_folders import begin_question
from tests.helpers.running import until


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[LocalShell]:
    (tmp_path / "home").mkdir()
    opened = LocalShell("here", str(tmp_path / "home"))
    yield opened
    opened.close()


def there(shell: LocalShell, verb: str, question: dict[str, Any], program: str = HOST_STATE, stdin: bytes = b"") -> Any:
    return run_program(shell, sys.executable, program, verb, question, OBJECT, stdin=stdin)


def started_of(pid: int) -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:" + Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_an_archive_is_unpacked_once_and_proved(shell: LocalShell, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text("print()")
    archive = pack_folder(tmp_path / "job")
    question = {"folder": str(tmp_path / "code"), "hash": archive.hash, "keep": True}
    assert there(shell, "unpack", question, HOST_FILES, archive.data)["new"] is True
    assert there(shell, "unpack", question, HOST_FILES, archive.data)["new"] is False
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == [archive.hash, f"{archive.hash}.tar.gz"]
    assert (tmp_path / "code" / archive.hash / "train.py").read_text() == "print()"
    wrong = {**question, "hash": hashlib.sha256(b"").hexdigest()[:40]}
    with pytest.raises(errors.CommandFailed, match="expected"):
        there(shell, "unpack", wrong, HOST_FILES, archive.data)


def test_what_killed_processes_unpacked_in_part_is_swept(shell: LocalShell, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text("print()")
    archive = pack_folder(tmp_path / "job")
    code = tmp_path / "w" / "code"
    for name in ("abc.7.ff.part", "def.8.ff.part"):
        (code / name).mkdir(parents=True)
        (code / f"{name}.tar.gz").write_text("half of it")
    (code / "abc.9.ff.part.tar.gz").write_text("half of it")
    lock = os.open(code / "def.8.ff.part", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    in_use = ["def.8.ff.part", "def.8.ff.part.tar.gz"]
    question = {"folder": str(code), "hash": archive.hash, "keep": False}
    there(shell, "unpack", question, HOST_FILES, archive.data)
    assert sorted(path.name for path in code.iterdir()) == sorted([archive.hash, *in_use])
    os.close(lock)
    folder = tmp_path / "w" / "jobs" / "digits-1" / "a"
    there(shell, "begin", begin_question(folder, 0, code / archive.hash), HOST_FILES, b"{}")
    assert [path.name for path in code.iterdir()] == [archive.hash]


def test_orders_without_an_agent_go_in_time(shell: LocalShell, tmp_path: Path) -> None:
    """psctl ended before it started one. An agent that has read them, or a process that is about to be one, stays."""

    def begin(name: str) -> tuple[Path, Path]:
        folder = tmp_path / "w" / "jobs" / name / "a"
        question = begin_question(folder, 0.5)
        return folder, Path(there(shell, "begin", question, HOST_FILES, b"{}")["orders"])

    starting = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
        env={**os.environ, "PSCTL_ORDERS": f"{tmp_path}/w/jobs/digits-3/a/agent"},
    )  # fmt: skip
    read, orders = begin("digits-2")
    orders.unlink()
    about_to, waiting = begin("digits-3")
    left, forgotten = begin("digits-1")
    until(lambda: not left.parent.exists(), name="the end of orders that nobody took")
    assert not forgotten.exists()
    assert waiting.exists()
    starting.kill()
    starting.communicate()
    until(lambda: not about_to.parent.exists(), name="the end of orders whose process ended")
    assert not waiting.exists()
    assert read.exists()


def test_a_job_is_read_from_its_event_log(shell: LocalShell, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    log = [
        Started(time=1.0, job="digits-1", hosts=["a"], roles=[]),
        StateChanged(time=1.5, role="job", rank=0, host="a", state="running"),
        StateChanged(time=2.0, role="worker", rank=1, host="a", state="running", pid=77),
        Log(time=2.0, rank="worker/1", stream="stdout", text='a line with "event":"finished" in it'),
        Log(time=2.5, rank="worker/1", stream="stderr", text="a warning"),
        HostTraffic(time=2.5, host="a", sent=5.0, received=7.0),
        Progress(
            time=3.0, step=40, epoch=1, metrics={}, examples_per_second=1.0, bytes_per_second=1.0, sync_seconds=0.1,
            compute_seconds=0.1, staleness=0,
        ),
    ]  # fmt: skip
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, log)) + b'{"event":"finis')
    mine = {"folder": str(folder), "pid": os.getpid(), "started": started_of(os.getpid())}
    found = there(shell, "digest", {"jobs": [mine]})[str(folder)]
    assert (found["alive"], found["state"], found["progress"]["step"]) == (True, "running", 40)
    assert found["ranks"]["worker/1"]["pid"] == 77
    assert (found["printed"]["time"], found["printed"]["text"]) == (2.0, 'a line with "event":"finished" in it')
    assert found["traffic"]["a"]["received"] == 7.0
    assert "finished" not in found
    with (folder / "events.jsonl").open("wb") as file:
        file.write(to_line(Finished(time=4.0, status="done", exit=0, steps=40, seconds=3.0, metrics={})))
    ticks = mine["started"].partition(":")[2]
    for other in ("boot:1", f"another-boot:{ticks}", mine["started"][:-1]):
        gone = there(shell, "digest", {"jobs": [{**mine, "started": other}]})[str(folder)]
        assert (gone["alive"], gone["finished"]["steps"]) == (False, 40)


def test_steps_before_a_restart_are_not_reported(shell: LocalShell, tmp_path: Path) -> None:
    def state(rank: int, step: int) -> StateChanged:
        return StateChanged(time=2.0, role="worker", rank=rank, host="a", state="running", step=step)

    log = [state(0, 90), state(1, 91), Restored(time=3.0, checkpoint="d-1@80", step=80, lost=11), state(1, 82)]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, log)))
    mine = {"folder": str(tmp_path), "pid": 1, "started": ""}
    found = there(shell, "digest", {"jobs": [mine]})[str(tmp_path)]
    assert [rank["step"] for rank in found["ranks"].values()] == [80, 82]


def test_a_wait_for_hosts_is_reported_until_it_is_over(shell: LocalShell, tmp_path: Path) -> None:
    mine = {"folder": str(tmp_path), "pid": 1, "started": ""}
    log = [Recovering(time=2.0, hosts=["b"], since=2.0, until=602.0), Recovered(time=9.0)]
    (tmp_path / "events.jsonl").write_bytes(to_line(log[0]))
    assert there(shell, "digest", {"jobs": [mine]})[str(tmp_path)]["recovering"]["hosts"] == ["b"]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(to_line, log)))
    assert "recovering" not in there(shell, "digest", {"jobs": [mine]})[str(tmp_path)]


def test_a_checkpoint_is_listed_only_while_it_exists(shell: LocalShell, tmp_path: Path) -> None:
    folder, kept = tmp_path / "job", tmp_path / "checkpoints" / "digits-1" / "0000000040"
    folder.mkdir()
    kept.mkdir(parents=True)
    (kept / "manifest.json").write_text("{}")
    written = CheckpointWritten(time=3.0, step=40, path=str(kept), bytes=8, seconds=0.1)
    (folder / "events.jsonl").write_bytes(to_line(written))
    mine = {"folder": str(folder), "pid": 1, "started": ""}
    assert there(shell, "digest", {"jobs": [mine]})[str(folder)]["checkpoint"]["step"] == 40
    (kept / "manifest.json").unlink()
    assert "checkpoint" not in there(shell, "digest", {"jobs": [mine]})[str(folder)]


def test_only_what_belongs_to_the_job_is_swept(shell: LocalShell, tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    folder = tmp_path / "jobs" / "digits-1" / "a"
    environment = {**os.environ, "PSCTL_ORDERS": f"{folder}/private/worker-0.json"}
    with (
        subprocess.Popen(sleeper, env=environment, stdout=subprocess.PIPE, start_new_session=True) as ours,
        subprocess.Popen(
            sleeper, env={**environment, "PSCTL_ORDERS": f"{folder}0/private/x"}, stdout=subprocess.PIPE
        ) as other,
    ):
        for process in (ours, other):
            assert process.stdout is not None
            process.stdout.readline()
        (folder / "private").mkdir(parents=True)
        for name in ("private/worker-0", "agent.pid", "events.jsonl"):
            (folder / name).write_text("secret")
        left = there(shell, "sweep", {"folder": str(folder), "seconds": 0})["left"]
        assert [each["pid"] for each in left] == [ours.pid]
        subprocess_end = there(shell, "sweep", {"folder": str(folder), "kill": True, "seconds": 5})
        assert subprocess_end["left"] == [] or ours.wait(5) == -signal.SIGKILL
        assert ours.wait(5) == -signal.SIGKILL
        there(shell, "sweep", {"folder": str(folder), "kill": True, "seconds": 5})
        assert [path.name for path in folder.iterdir()] == ["events.jsonl"], "keys and secrets are gone, the log is not"
        assert other.poll() is None
        other.kill()


def test_no_killed_process_sees_another_end(shell: LocalShell, tmp_path: Path) -> None:
    folder, seen = tmp_path / "jobs" / "digits-1" / "a", tmp_path / "seen"
    folder.mkdir(parents=True)
    environment = {**os.environ, "PSCTL_ORDERS": f"{folder}/private/worker-0.json"}
    watch = (
        "import os, select, sys, pathlib; poll = select.poll();"
        "poll.register(os.pidfd_open(int(sys.argv[1])), select.POLLIN);"
        "print(flush=True); poll.poll(); pathlib.Path(sys.argv[2]).touch()"
    )
    with contextlib.ExitStack() as stack:
        sleepers = [stack.enter_context(subprocess.Popen(["sleep", "60"], env=environment)) for _ in range(100)]
        watchers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", watch, str(sleepers[0].pid), seen], env=environment, stdout=subprocess.PIPE
                )
            )
            for _ in range(2)
        ]
        for process in watchers:
            assert process.stdout is not None
            process.stdout.readline()
        there(shell, "sweep", {"folder": str(folder), "kill": True, "seconds": 5})
        assert {process.wait(5) for process in [*sleepers, *watchers]} == {-signal.SIGKILL}
    assert not seen.exists()


def test_logs_are_read_by_role_tail_and_pattern(shell: LocalShell, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-0.stdout.log").write_text("one\ntwo\nthree\n")
    (logs / "worker-1.stdout.log").write_bytes(b"one \xff\n")
    (logs / "server-0.stderr.log").write_text("one\n")

    def read(prefixes: list[str], tail: int | None = None, grep: str | None = None) -> list[list[str]]:
        question = {"folder": str(tmp_path), "prefixes": prefixes, "tail": tail, "grep": grep}
        result = shell.run(program_command(sys.executable, HOST_STATE, "logs", question))
        return [json.loads(line) for line in result.stdout.splitlines()]

    assert read(["worker-0."], tail=2) == [["worker-0.stdout.log", "two"], ["worker-0.stdout.log", "three"]]
    assert read(["worker-"], grep="^one") == [["worker-0.stdout.log", "one"], ["worker-1.stdout.log", "one �"]]
    assert read(["worker-0."], tail=0) == []
    assert len(read([""])) == 5


def test_a_probe_reports_versions_without_importing_and_names_in_use(shell: LocalShell, tmp_path: Path) -> None:
    (tmp_path / "w" / "jobs" / "digits-4").mkdir(parents=True)
    (tmp_path / "w" / "checkpoints" / "digits-9").mkdir(parents=True)
    (tmp_path / "w" / "code" / "abc").mkdir(parents=True)
    question = {"workdir": str(tmp_path / "w"), "codes": ["abc", "def"], "modules": ["msgspec", "no_such_module"]}
    found = there(shell, "probe", question)
    assert found["codes"] == {"abc": True, "def": False}
    assert found["names"] == ["digits-4", "digits-9"]
    assert found["modules"]["no_such_module"] is None
    assert found["modules"]["msgspec"][0].isdigit()
    assert found["jobs"] == []
    assert found["ready"] is None


def test_slots_are_held_by_the_workers_that_a_job_has_here_now(shell: LocalShell, tmp_path: Path) -> None:
    folder = tmp_path / "w" / "jobs" / "digits-4" / "h0"
    folder.mkdir(parents=True)
    lock = supervisor.write_pid(folder)
    (folder / "slots").write_text("2")
    question: dict[str, Any] = {"workdir": str(tmp_path / "w"), "codes": [], "modules": []}
    job = {"job": "digits-4", "folder": str(folder)}
    assert there(shell, "probe", question)["jobs"] == [{**job, "workers": 2}]
    (folder / "slots").write_text("0")  # after psctl scale --workers
    assert there(shell, "probe", question)["jobs"] == [{**job, "workers": 0}]
    os.close(lock)
    assert there(shell, "probe", question)["jobs"] == [], "the process that held the lock has ended"


def test_an_agent_is_known_by_boot_start_and_lock(shell: LocalShell, tmp_path: Path) -> None:
    folder = tmp_path / "w" / "jobs" / "digits-4" / "h0"
    folder.mkdir(parents=True)
    record, environment = folder / "agent.pid", {**os.environ, "PSCTL_ORDERS": f"{folder}/orders.json"}

    def known() -> bool:
        return bool(there(shell, "probe", {"workdir": str(tmp_path / "w"), "codes": [], "modules": []})["jobs"])

    sleeper = [sys.executable, "-c", "print(flush=True); input()"]
    with (
        subprocess.Popen(sleeper, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ours,
        subprocess.Popen(sleeper, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as another,
    ):
        for process in (ours, another):
            assert process.stdout is not None
            process.stdout.readline()
        boot, _, ticks = started_of(ours.pid).partition(":")
        record.write_text(f"{ours.pid} {boot}:{ticks}\n")
        assert not known(), "nobody holds the lock"
        with record.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert known()
            record.write_text(f"{ours.pid} {boot}:{int(ticks) + 1}\n")
            assert not known(), "the process id was given to another process"
            record.write_text(f"{ours.pid} 0a0b0c0d-0000-0000-0000-000000000000:{ticks}\n")
            assert not known(), "the host was started again, and a process has the same id and the same ticks"
        record.write_text(f"{ours.pid} 1000000000.25\n")  # as versions before wrote it, and the clock was set since
        assert known()
        record.write_text(f"{another.pid} 1000000000.25\n")
        assert not known()
        for process in (ours, another):
            process.kill()


def test_files_of_up_are_removed_and_the_rest_stays_unless_all_is_requested(shell: LocalShell, tmp_path: Path) -> None:
    for name in ("code/x", "envs/y", "jobs/digits-1", "checkpoints/digits-1"):
        (tmp_path / "w" / name).mkdir(parents=True)
    (tmp_path / "w" / "ready.json").write_text("{}")
    there(shell, "remove", {"workdir": str(tmp_path / "w"), "all": False}, HOST_FILES)
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["checkpoints", "jobs"]
    there(shell, "remove", {"workdir": str(tmp_path / "w"), "all": True}, HOST_FILES)
    assert not (tmp_path / "w").exists()


def test_modules_on_the_shells_own_path_do_not_count(
    shell: LocalShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "only" / "numpy-99.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 99.0\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    here = (HostSpec(address="here", name="here"),)
    cluster = ClusterSpec(name="lab", hosts=here, source="lab.yaml", runtime=RuntimeSpec(python=sys.executable))
    found = inspect_host(shell, cluster, [])
    assert found.modules["numpy"] not in (None, "99.0"), "agents are started without it"


def test_a_host_of_another_system_is_refused(shell: LocalShell, tmp_path: Path) -> None:
    python = tmp_path / "python"
    words = 'import sys; sys.platform = "darwin"; at = sys.argv.index("-c", 1); code = sys.argv[at + 1]'
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{words}; del sys.argv[1 : at + 2]; exec(code)' \"$@\"\n")
    python.chmod(0o755)
    here = (HostSpec(address="here", name="here"),)
    cluster = ClusterSpec(name="lab", hosts=here, source="lab.yaml", runtime=RuntimeSpec(python=str(python)))
    with pytest.raises(
        errors.PythonMissing, match="its system is darwin, and psctl's processes run on Linux only"
    ) as raised:
        inspect_host(shell, cluster, [])
    assert raised.value.where == shell.name
