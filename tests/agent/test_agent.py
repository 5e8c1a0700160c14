"""Agents, coordinator and workers as real processes on this machine: every way that a job ends, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from psctl.agent import head_services
from psctl.agent.control_client import call
from psctl.agent.supervisor import end_job
from psctl.checkpoint.reader import verify
from psctl.job import events
from psctl.orders import AgentOrders, CheckpointOrder, ExportOrder
from psctl.process.leader_file import read_leader
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Address, Member
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.running import until

ROOT = Path(__file__).parents[2]
WAIT = 40.0
"""Seconds that anything may take here; all of it takes a few."""


class Cluster:
    """Agents of one job on addresses of this machine."""

    def __init__(self, folder: Path, script: str, workers: tuple[int, ...] = (1, 1), **more: Any) -> None:
        self.folder, self.name = folder, f"try-{os.getpid()}-{folder.name[-12:]}"
        (folder / "code").mkdir()
        (folder / "code" / "train.py").write_text(script)
        hosts = [
            replace(host, address=f"127.0.0.{index + 2}", interface="lo")
            for index, host in enumerate(make_hosts(*workers))
        ]
        keep = CheckpointOrder(None, 0, more.pop("every", 0.0), 3, None, on_stop=more.pop("on_stop", False), copies=1)
        settings: dict[str, Any] = {
            "servers": None, "strategy": "native", "update": "auto", "start_timeout": 20.0, "stall_timeout": 60.0,
            "report_seconds": 0.2, "restarts": 0, "environment": {"COLOUR": "blue"}, "argv": ["train.py", "a b"],
        }  # fmt: skip
        self.secrets, self.grace = more.pop("secrets", {}), more.pop("grace", 2.0)
        self.order = make_order(
            hosts, name=self.name, checkpoint=keep, code_hash="0" * 8, job_file="name: try", **{**settings, **more}
        )
        self.authority = make_authority(self.name, time.time())
        self.preauth_secret = new_secret()
        self.supervisors: list[subprocess.Popen[bytes]] = []
        self.kills = 0
        """Coordinators that `kill_coordinator` has killed."""

    def job_dir(self, host: int) -> Path:
        return self.folder / f"host{host}" / "jobs" / self.name / f"h{host}"

    def start(self) -> Cluster:
        coordinator = None
        for host in range(len(self.order.hosts)):
            self._start(host, coordinator)
            if host == 0 and len(self.order.hosts) > 1:
                found = until(lambda: self.call(0, "hello").get("coordinator"), WAIT, name="the coordinator's address")
                coordinator = Address(**found)
        return self

    def _start(self, host: int, coordinator: Address | None) -> None:
        pair = issue(self.authority, self.name, Member("agent", host), time.time())
        orders = AgentOrders(
            job=self.order, host=host, python=sys.executable, paths=[str(ROOT)],
            workdir=str(self.folder / f"host{host}"), job_dir=str(self.job_dir(host)),
            code_dir=str(self.folder / "code"), authority=self.authority.certificate_pem,
            certificate=pair.certificate_pem, key=pair.key_pem, preauth_secret=self.preauth_secret,
            coordinator=coordinator,
            authority_key=self.authority.key_pem if host == 0 else "", secrets=self.secrets, grace=self.grace,
        )  # fmt: skip
        self.job_dir(host).mkdir(parents=True)
        path = self.job_dir(host) / "orders.json"
        path.write_bytes(msgspec.json.encode(orders))
        path.chmod(0o600)
        with (self.job_dir(host) / "agent.log").open("wb") as log:
            self.supervisors.append(
                subprocess.Popen(
                    [sys.executable, "-m", "psctl.agent.main", str(path)],
                    cwd=self.job_dir(host),
                    start_new_session=True,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "TRY": self.name},
                )
            )

    def call(self, host: int, command: str, **arguments: Any) -> dict[str, Any]:
        return call(str(self.job_dir(host)), command, arguments)

    def log(self) -> list[Any]:
        path = self.job_dir(0) / "events.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [events.from_line(line) for line in lines]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.log() if isinstance(event, kind)]

    def finished(self) -> events.Finished:
        """Wait for the end of everything and return the last event."""
        for supervisor in self.supervisors:
            if (
                supervisor.wait(WAIT) < 0
            ):  # it was killed: its agent, which no process waits for, ends the job by itself
                until(lambda: self.processes() == [], WAIT, name="the agents' own ends")
        found = self.of(events.Finished)
        assert len(found) == 1, self.logs()
        assert self.log()[-1] == found[0]
        self.nothing_is_left()
        last: events.Finished = found[0]
        return last

    def printed(self, text: str) -> events.Log:
        def seen() -> list[Any]:
            return [event for event in self.of(events.Log) if text in event.text]

        found: events.Log = until(seen, WAIT, name=f"{text!r} in the log")[0]
        return found

    def pid(self, role: str, rank: int = 0) -> int:
        def running() -> list[int]:
            return [
                event.pid
                for event in self.of(events.StateChanged)
                if (event.role, event.rank) == (role, rank) and event.pid
            ]

        found: int = until(running, WAIT, name=f"{role}/{rank} to run")[0]
        return found

    def kill_coordinator(self) -> None:
        """Kill the present coordinator once it has reported its start."""
        count = len(self.coordinators())
        pid: int = until(lambda: self.coordinators()[self.kills :], WAIT, name=f"coordinator {count}")[0]
        self.kills += 1
        os.kill(pid, signal.SIGKILL)

    def coordinators(self) -> list[int]:
        """Return the processes of all coordinators until now."""
        found = [event for event in self.of(events.StateChanged) if event.role == "coordinator"]
        return [event.pid for event in found if event.pid is not None and event.state == "running"]

    def processes(self) -> list[psutil.Process]:
        """All processes of this job, known by a variable that every one of them inherits."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TRY") == self.name:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def nothing_is_left(self) -> None:
        left = [(each.pid, each.cmdline()) for each in self.processes()]
        assert left == [], left
        for host in range(len(self.supervisors)):
            names = {path.name for path in self.job_dir(host).iterdir()}
            assert names & {"private", "agent.sock", "agent.pid", "events.jsonl.kept"} == set()

    def logs(self) -> str:
        paths = [path for path in self.folder.rglob("*") if path.suffix in (".log", ".jsonl") and path.is_file()]
        return "\n".join(f"---- {path}\n{path.read_text()}" for path in sorted(paths))

    def end(self) -> None:
        for supervisor in self.supervisors:
            supervisor.kill()
            supervisor.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(script: str, workers: tuple[int, ...] = (1, 1), **more: Any) -> Cluster:
        made.append(Cluster(tmp_path, script, workers, **more))
        return made[0].start()

    yield make
    for each in made:
        each.end()


TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), **os.environ}))
print("to stderr", file=sys.stderr)
"""


def test_a_plain_script_runs_on_every_host_in_torchruns_environment(cluster: Callable[..., Cluster]) -> None:
    job = cluster(TELL, workers=(2, 0, 1))
    last = job.finished()
    assert (last.status, last.exit, last.failure) == ("done", 0, None), job.logs()
    told = {event.rank: json.loads(event.text) for event in job.of(events.Log) if event.stream == "stdout"}
    assert sorted(told) == ["worker/0", "worker/1", "worker/2"]
    third = told["worker/2"]
    expected = {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "3", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": job.name, "PSCTL_JOB": job.name, "PSCTL_ROLE": "worker", "PSCTL_HOST": "h2",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1", "COLOUR": "blue",
    }  # fmt: skip
    assert {name: third[name] for name in expected} == expected
    assert told["worker/1"]["LOCAL_RANK"] == "1"
    ports = [int(told[f"worker/{rank}"]["MASTER_PORT"]) for rank in range(3)]
    assert ports[0] == ports[1] != ports[2] != 0, "each host has its own"
    assert third["argv"] == ["train.py", "a b"]
    assert third["cwd"] == str(job.folder / "code")
    assert "PSCTL_LIFELINE" not in third
    log = job.job_dir(2) / "logs" / "worker-2.stderr.log"
    assert log.read_text() == "to stderr\n"
    assert isinstance(job.log()[0], events.Started)


def test_a_script_that_raises_is_named_with_its_own_frames_and_the_others_are_stopped(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(
        "import os, time\n\n"
        "def step(n):\n    if os.environ['RANK'] == '1':\n        raise ValueError(f'NaN loss {n}')\n"
        "    time.sleep(60)\n\nprint('hello')\nstep(7)\n"
    )
    last = job.finished()
    assert (last.status, last.exit) == ("failed", 1)
    failure = last.failure
    assert failure is not None
    assert (failure["role"], failure["rank"], failure["host"], failure["status"]) == ("worker", 1, "h1", 1)
    assert failure["exception"] == "ValueError: NaN loss 7"
    assert failure["frames"] == [
        "train.py:9 in <module>: step(7)",
        "train.py:5 in step: raise ValueError(f'NaN loss {n}')",
    ]
    assert failure["tail"][-1] == "ValueError: NaN loss 7"
    assert failure["stopped"] == ["worker/0"]
    assert (failure["checkpoint"], failure["resume"]) == (None, None)
    assert failure["log"] == f"psctl logs {job.name} -r worker:1"
    lost = job.of(events.WorkerLost)
    assert [(event.rank, event.reason) for event in lost] == [(1, "ValueError: NaN loss 7")]
    states = {event.rank: event.state for event in job.of(events.StateChanged) if event.role == "worker"}
    assert states == {0: "stopped", 1: "failed"}


def test_a_bad_exit_status_fails_the_job(cluster: Callable[..., Cluster]) -> None:
    last = cluster("import sys; sys.exit(3)", workers=(1,)).finished()
    assert (last.status, last.exit) == ("failed", 1)
    assert last.failure is not None
    assert (last.failure["status"], last.failure["exception"]) == (3, "SystemExit: 3")


FAMILY = """
import multiprocessing, os, signal, sys, time
from multiprocessing import shared_memory

def child():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)

if __name__ == "__main__":
    memory = shared_memory.SharedMemory(os.environ["PSCTL_JOB"] + os.environ["RANK"], create=True, size=4096)
    for _ in range(2):
        multiprocessing.get_context("fork").Process(target=child).start()
    print("up", flush=True)
    time.sleep(60)
"""

VICTIMS = [
    "coordinator",
    "agent on the head",
    "supervisor elsewhere",
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("worker", "supervisor on the head", "agent elsewhere")),
]


def test_a_killed_worker_makes_all_start_again_from_the_last_checkpoint(cluster: Callable[..., Cluster]) -> None:
    job = cluster(WORKER, environment={"STEPS": "150"}, every=0.3, restarts=3)
    until(lambda: job.of(events.CheckpointWritten), WAIT, name="a checkpoint")
    os.kill(job.pid("worker", 1), signal.SIGKILL)
    last = job.finished()
    assert (last.status, last.exit, last.steps) == ("done", 0, 150), job.logs()
    assert [(event.rank, event.reason) for event in job.of(events.WorkerLost)] == [(1, "killed by signal 9 (SIGKILL)")]
    (restored,) = job.of(events.Restored)
    assert restored.checkpoint == f"{job.name}@{restored.step}"
    starts = sorted(event.text for event in job.of(events.Log) if event.text.startswith("start"))
    assert starts == ["start 0 0", "start 0 0", *[f"start 1 {restored.step}"] * 2]
    assert restored.step in [event.step for event in job.of(events.CheckpointWritten)]
    assert restored.lost >= 0


def test_killed_coordinators_are_replaced_and_the_job_goes_on(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    job = cluster(WORKER, environment={"STEPS": "2000", "KILLS": "", "HOLD": str(go_on)}, every=0.3)
    until(lambda: len(job.of(events.Progress)) > 2, WAIT, name="progress")
    for _ in range(3):
        job.kill_coordinator()
        until(lambda: len(job.coordinators()) > job.kills, WAIT, name="a successor")
        time.sleep(head_services.QUICK + 1.0)  # another kill right after a start would count as its own failure
    go_on.touch()  # however slow the machine is, the job does not end before the last kill
    last = job.finished()
    assert (last.status, last.exit, last.steps) == ("done", 0, 2000), job.logs()
    assert job.of(events.WorkerLost) == job.of(events.Restored) == []
    starts = sorted(event.text for event in job.of(events.Log) if event.text.startswith("start"))
    assert starts == ["start 0 0", "start 0 0"], "no worker was started again"
    assert len([event for event in job.of(events.Notice) if "a new one continues the job" in event.text]) == 3
    for event in job.of(events.CheckpointWritten):
        assert not Path(event.path).exists() or verify(Path(event.path)) == [], "retained ones are whole"
    assert [path.name for path in job.job_dir(0).glob("coordinator.*")] == ["coordinator.log"], "no journal is left"


def test_the_host_that_leads_after_the_head_is_lost_exports_the_whole_log(cluster: Callable[..., Cluster]) -> None:
    script = "import time\nprint('begun', flush=True)\ntime.sleep(60)"
    exports = ExportOrder(tensorboard="")
    job = cluster(script, workers=(0, 1, 1), exports=exports, restarts=3, restart_wait=20.0)

    def written(host: int) -> list[Path]:
        return list(job.job_dir(host).glob("tensorboard/events.out.*"))

    until(lambda: written(0), WAIT, name="the head's event file")
    job.printed("begun")

    def standby() -> bool:
        found = read_leader(job.job_dir(0))
        return found is not None and found.standby is not None

    until(standby, WAIT, name="the standby")
    supervisor = psutil.Process(job.supervisors[0].pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: written(1) or written(2), WAIT, name="the successor's event file")
    leader = 1 if written(1) else 2
    assert not written(3 - leader)
    first = (job.job_dir(leader) / "events.jsonl").read_bytes().splitlines()[0]
    assert first == (job.job_dir(0) / "events.jsonl").read_bytes().splitlines()[0]


@pytest.mark.parametrize("victim", VICTIMS)
def test_whichever_process_is_killed_the_job_ends_and_nothing_is_left(
    cluster: Callable[..., Cluster], victim: str
) -> None:
    job = cluster(FAMILY)
    until(lambda: len([event for event in job.of(events.Log) if event.text == "up"]) == 2, WAIT, name="both workers")
    host = 1 if "elsewhere" in victim else 0
    supervisor = job.supervisors[host].pid
    agent = psutil.Process(supervisor).children()[0]
    pids = {"worker": job.pid("worker", 1), "agent": agent.pid, "supervisor": supervisor}
    if victim == "coordinator":  # it is started again, unless it ends at once each time
        for _ in range(head_services.MOST_QUICK):
            job.kill_coordinator()
    else:
        os.kill(pids[victim.split()[0]], signal.SIGKILL)
    last = job.finished()
    assert (last.status, last.exit) == ("failed", 1)
    assert last.failure is not None
    said = last.failure["exception"]
    expected = {
        "worker": "killed by signal 9 (SIGKILL)",
        "coordinator": "psctl's coordinator: killed by signal 9 (SIGKILL)",
        "agent on the head": "psctl's agent on the head was lost: killed by signal 9",
        "supervisor on the head": "psctl's supervisor on the head was lost",
    }
    if victim in expected:
        assert said == expected[victim]
    else:  # an agent whose supervisor died ends its worker first: that news may come before the lost connection
        assert said.startswith("HostLost: h1 is lost") or (last.failure["host"] == "h1" and "signal" in said), said
    if victim == "worker":
        assert (last.failure["role"], last.failure["rank"], last.failure["stopped"]) == ("worker", 1, ["worker/0"])
    assert [path.name for path in Path("/dev/shm").iterdir() if job.name in path.name] == []


@pytest.mark.parametrize("force", [False, True])
def test_a_stop_ends_everything_and_is_no_failure(cluster: Callable[..., Cluster], force: bool) -> None:
    stubborn = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    job = cluster(stubborn if force else stubborn.replace("SIG_IGN", "SIG_DFL"), grace=30.0)
    job.printed("up")
    began = time.monotonic()
    assert job.call(1, "stop", force=force) == {"accepted": True}
    last = job.finished()
    assert (last.status, last.exit, last.failure) == ("stopped", 1, None)
    assert time.monotonic() - began < job.grace, "no process was waited for that long"
    assert job.call(0, "hello")["error"]["code"] == "gone"


def test_sigterm_to_one_hosts_agent_stops_the_job(cluster: Callable[..., Cluster]) -> None:
    job = cluster("import time; print('up', flush=True); time.sleep(60)")
    until(lambda: len(job.of(events.Log)) == 2, WAIT, name="both workers")
    job.supervisors[1].terminate()
    last = job.finished()
    assert (last.status, last.exit) == ("stopped", 143)


def test_secrets_reach_the_script_and_are_struck_out_of_its_logs(cluster: Callable[..., Cluster]) -> None:
    job = cluster(
        "import os\nprint('key', os.environ['KEY'])\nraise ValueError(os.environ['KEY'])",
        workers=(1,),
        secrets={"KEY": "hunter22"},
    )
    job.finished()
    kept = [path for path in job.job_dir(0).rglob("*") if path.is_file()]
    assert {"worker-0.json", "worker-0.stderr.log", "events.jsonl"} <= {path.name for path in kept}
    assert [path for path in kept if b"hunter22" in path.read_bytes()] == []
    assert job.printed("key").text == "key ***"


def test_keys_and_secrets_are_on_no_disk_even_when_all_processes_are_killed(cluster: Callable[..., Cluster]) -> None:
    key = "-----BEGIN PRIVATE KEY-----\nQUJDREVG"
    job = cluster(
        "import os, time\nprint(os.environ['KEY'], flush=True)\ntime.sleep(600)", workers=(1, 1), secrets={"KEY": key}
    )
    until(
        lambda: len({event.rank for event in job.of(events.Log) if event.text == "***"}) == 2, WAIT, name="both workers"
    )

    def shown() -> list[str]:
        words = [
            each.encode()
            for each in ("PRIVATE KEY", "QUJDREVG", job.preauth_secret, *job.authority.key_pem.splitlines())
        ]
        files = [path for path in job.folder.rglob("*") if path.is_file()]
        assert {"agent.log", "events.jsonl", "worker-0.stdout.log"} <= {path.name for path in files}  # these stay
        return [f"{path}: {word!r}" for path in files for word in words if word in path.read_bytes()]

    assert shown() == []
    for process in job.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with another one
            process.kill()
    until(lambda: job.processes() == [], WAIT, name="the end of all processes")
    assert shown() == []


def test_a_flood_of_lines_is_cut_down_for_followers_and_kept_whole_in_the_file(cluster: Callable[..., Cluster]) -> None:
    job = cluster("for n in range(20_000): print('line', n)", workers=(1,))
    job.finished()
    passed_on = [event for event in job.of(events.Log) if event.text.startswith("line")]
    assert 0 < len(passed_on) < 5_000
    assert any("lines left out here" in event.text for event in job.of(events.Log))
    file = (job.job_dir(0) / "logs" / "worker-0.stdout.log").read_text().splitlines()
    assert file == [f"line {n}" for n in range(20_000)]


def test_a_script_that_cannot_be_started_is_reported(cluster: Callable[..., Cluster]) -> None:
    job = cluster("print()", workers=(1,), argv=["missing.py"])
    last = job.finished()
    assert last.failure is not None
    assert "missing.py" in last.failure["exception"]


def test_a_full_port_range_ends_the_job_with_its_own_code(cluster: Callable[..., Cluster]) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        job = cluster("print()", workers=(1,), ports=(port, port))
        last = job.finished()
    assert (last.status, last.exit) == ("failed", 7)
    assert last.failure is not None
    assert f"no free port on 127.0.0.2 in {port}-{port}" in last.failure["exception"]
    assert last.failure["code"] == "port-taken"


def test_a_job_that_runs_too_long_is_timed_out(cluster: Callable[..., Cluster]) -> None:
    last = cluster("import time; time.sleep(60)", workers=(1,), total_timeout=1.0).finished()
    assert (last.status, last.exit) == ("failed", 5)
    assert last.failure is not None
    assert last.failure["exception"].startswith("TimedOut: the job has run for 1 s")


def test_the_engine_uses_the_agents_store_as_rendezvous(cluster: Callable[..., Cluster]) -> None:
    job = cluster(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nt = torch.ones(2)\n"
        "dist.all_reduce(t)\nprint('sum', t.tolist())\ndist.destroy_process_group()\n"
    )
    assert job.finished().status == "done", job.logs()
    assert len([event for event in job.of(events.Log) if event.text == "sum [2.0, 2.0]"]) == 2


HOLD = "import os, time\nprint('port', os.environ['MASTER_PORT'], flush=True)\ntime.sleep(60)\n"

STRANGER = """
import socket, sys
for host, port in (place.rsplit(":", 1) for place in sys.argv[1:]):
    try:
        with socket.create_connection((host, int(port)), 0.5) as connection:
            connection.settimeout(10)
            connection.sendall(b"\\0" * 64)
            print("answered" if connection.recv(1) else "closed")
    except OSError as error:
        print(type(error).__name__)
"""


def as_stranger(*places: str) -> list[str]:
    """Connect to each place as another user; return what came of it."""
    python = [shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin") or sys.executable, "-I", "-c", STRANGER]
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    run = subprocess.run([*python, *places], capture_output=True, text=True, check=True, **nobody)
    return run.stdout.split()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_another_user_reaches_no_store_and_starts_no_process(cluster: Callable[..., Cluster]) -> None:
    job = cluster(HOLD)
    until(
        lambda: len([event for event in job.of(events.Log) if event.text.startswith("port ")]) == 2,
        WAIT,
        name="both ports",
    )
    ports = {e.rank: int(e.text.split()[1]) for e in job.of(events.Log) if e.text.startswith("port ")}
    head, other = ports["worker/0"], ports["worker/1"]
    reset = {"closed", "ConnectionResetError", "BrokenPipeError"}
    assert set(as_stranger(f"127.0.0.1:{head}", f"127.0.0.1:{other}")) <= reset
    assert not [each for each in job.processes() if "psctl.agent.torch_store_host" in each.cmdline()]
    for host in (0, 1):
        log = (job.job_dir(host) / "agent.log").read_text()
        assert "MASTER_PORT rejected a connection: a process of user 65534" in log
    with socket.create_connection(("127.0.0.1", other), 10):  # the same in the name of our own user
        until(
            lambda: any("psctl.agent.torch_store_host" in each.cmdline() for each in job.processes()),
            WAIT,
            name="the store",
        )
    job.call(0, "stop", force=True)
    job.finished()


@pytest.mark.parametrize(
    ("status", "log", "why"),
    [
        (70, "Traceback ...\nRuntimeError: no thread\n", "status 70: RuntimeError: no thread (agent.log)"),
        (70, "", "status 70: agent.log is empty"),
        (70, None, "status 70: agent.log: No such file or directory"),
        (-9, "one line\n", "killed by signal 9"),
    ],
)
def test_the_end_of_a_job_names_the_agents_exception(status: int, log: str | None, why: str, tmp_path: Path) -> None:
    orders = AgentOrders(
        job=make_order(make_hosts(1)), host=0, python=sys.executable, paths=[], workdir=str(tmp_path),
        job_dir=str(tmp_path), code_dir=str(tmp_path), authority="", certificate="", key="", preauth_secret="",
        coordinator=None, authority_key="", secrets={}, grace=1.0,
    )  # fmt: skip
    if log is not None:
        (tmp_path / "agent.log").write_text(log)
    end_job(orders, status)
    last = [events.from_line(line) for line in (tmp_path / events.FILE).read_bytes().splitlines()][-1]
    assert isinstance(last, events.Finished)
    assert last.failure is not None
    assert why in str(last.failure).replace(f"{tmp_path}/", "")


def test_a_store_that_ends_by_itself_is_told_to_the_job(cluster: Callable[..., Cluster]) -> None:
    job = cluster(
        "import os, socket, time\n"
        "while not os.path.exists('../go'): time.sleep(0.05)\n"
        "def met():\n"
        "    place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "    with socket.create_connection(place, 10) as line: return line.recv(1)\n"
        "for _ in range(3): print('met', met())\n"
    )
    (job.job_dir(0) / "torch.py").write_text("raise SystemExit(3)")  # the store's process has this folder as cwd
    (job.folder / "go").touch()
    assert job.finished().status == "done", job.logs()
    told = [event.text for event in job.of(events.Notice)]
    assert [text.partition("; ")[0] for text in told] == [
        "MASTER_PORT refuses connections, because torch's store cannot be used: its process ended with status 3"
    ]


@pytest.mark.soak  # it imports torch in five processes, one after the other
def test_a_killed_store_is_restarted_for_later_clients(cluster: Callable[..., Cluster]) -> None:
    job = cluster(
        "import os, time, psutil, torch, torch.distributed as dist\n"
        "def meet():\n"
        "    dist.init_process_group('gloo')\n    t = torch.ones(2)\n    dist.all_reduce(t)\n"
        "    print('sum', t.tolist())\n    dist.destroy_process_group()\n"
        "def store():\n"
        "    found = [p for p in psutil.process_iter(['cmdline', 'ppid'])\n"
        "             if 'psctl.agent.torch_store_host' in (p.info['cmdline'] or []) and p.info['ppid']"
        " == os.getppid()]\n"
        "    return found[0]\n"
        "def lives(process):\n"  # it may be gone between any two questions
        "    try: return process.status() != psutil.STATUS_ZOMBIE\n"
        "    except psutil.NoSuchProcess: return False\n"
        "meet()\n"
        "if os.environ['RANK'] == '0':\n"
        "    first = store()\n    first.kill()\n"
        "    while lives(first): time.sleep(0.05)\n"
        "    open(__file__ + '.killed', 'w').close()\n"
        "while not os.path.exists(__file__ + '.killed'): time.sleep(0.05)\n"  # else it would meet in the old one
        "meet()\n"
    )
    assert job.finished().status == "done", job.logs()
    assert len([event for event in job.of(events.Log) if event.text == "sum [2.0, 2.0]"]) == 4


WORKER = '''
"""Speaks psctl's messages as a worker does, without torch."""
import os, queue, sys, time
from psctl.job import checkpoint_messages, training_messages
from psctl.job.job_permits import COORDINATION
from psctl.transport.credentials import Credentials
from psctl.transport.connect import dial
from psctl.process.coordinator_connection import CoordinatorConnection
from psctl.process.process_orders import read_orders
from psctl.types import Layout, Member, ParameterInfo, TensorSlice

orders = read_orders()
received = queue.SimpleQueue()

class Handler:
    def on_connected(self, peer): pass
    def receive_buffer_for(self, peer, message, size): return None
    def on_message(self, peer, message, payload): received.put(message)
    def on_connection_lost(self, peer, error): os._exit(1)

def receive(kind):
    while True:
        message = received.get()
        if isinstance(message, kind): return message
        if isinstance(message, checkpoint_messages.ProposeCut):  # after the last step, in its checkpoint
            peer.send(checkpoint_messages.CutPosition(message.ticket, steps))

credentials = Credentials(orders.job, orders.member, orders.authority, orders.certificate, orders.key,
                          orders.preauth_secret)
peer = CoordinatorConnection(
    Handler(), lambda handler: dial(orders.coordinator, credentials, Member("coordinator", 0), COORDINATION, handler))
rank, steps = orders.member.rank, int(os.environ.get("STEPS", "1000000"))
peer.send(training_messages.Join(os.getpid()))
first = welcome.resume.step if (welcome := receive(training_messages.Welcome)).resume else 0
print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], first, flush=True)
shape = (3,) if os.environ.get("ODD") == str(rank) else (2,)
peer.send(training_messages.Prepare(Layout((ParameterInfo("w", shape, "float32", 0),), "SGD", ({"lr": 0.1},)), ()))
decision = receive(training_messages.Decision)
assert decision.strategy == "native"
peer.send(training_messages.MemberReady())
receive(training_messages.Go)
piece = TensorSlice("param/w", "float32", (2,), 0, 2)

def save(step):
    pieces, state = ([piece], {"position": step}) if rank == 0 else ([], None)
    peer.send(checkpoint_messages.SaveBegin(step, pieces, state))
    if rank == 0:
        peer.send(checkpoint_messages.SavePart(step, 0, 0), b"\\0" * 8)
    peer.send(checkpoint_messages.SaveEnd(step))
    if step not in saved:
        problem = receive(checkpoint_messages.CheckpointSaved).problem
        assert problem == "" or "KILLS" in os.environ, problem

cut, saved = None, set()
for step in range(first + 1, steps + 1):
    time.sleep(0.01)
    while step == steps - 100 and "HOLD" in os.environ and not os.path.exists(os.environ["HOLD"]):
        time.sleep(0.01)
    numbers = [training_messages.StepReport(step, 0, 1.0 + rank, {"loss": float(rank)})]
    peer.send(training_messages.WorkerReport(step, 0, numbers, 1.0 + rank, 0.01, 0.0, (("", 8, 0),), rested=step))
    waiting = False
    while waiting or not received.empty():
        message = received.get()
        if isinstance(message, checkpoint_messages.ProposeCut):
            peer.send(checkpoint_messages.CutPosition(message.ticket, step + 1))
            waiting = True
        if isinstance(message, checkpoint_messages.CutAt):
            cut, waiting = message, False
        # rank 0 was faster: it is whole before this rank has finished the step
        if isinstance(message, checkpoint_messages.CheckpointSaved):
            assert message.problem == "" or "KILLS" in os.environ, message.problem
            saved.add(message.step)
    if cut and step == cut.step:
        if cut.save: save(step)
        if cut.stop: break
else:
    if not (cut and cut.save and cut.step == steps): save(steps)  # nobody saves a step twice
peer.send(training_messages.ScriptFinished(step))
peer.flush(5)
print("end", step, flush=True)
'''


def test_workers_that_use_psctl_report_save_and_end(cluster: Callable[..., Cluster]) -> None:
    job = cluster(WORKER, environment={"STEPS": "60"})
    last = job.finished()
    assert (last.status, last.exit, last.steps) == ("done", 0, 60), job.logs()
    assert last.metrics == {"loss": pytest.approx(2 / 3)}  # weighted by examples
    plan = job.of(events.Planned)
    assert [(event.chosen, event.decided, event.world) for event in plan] == [("native", True, 2)]
    steps = [event.step for event in job.of(events.Progress)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 60
    saved = job.of(events.CheckpointWritten)
    assert [event.step for event in saved] == [60]
    assert verify(Path(saved[0].path)) == []
    copy = job.folder / "host1" / "checkpoints" / job.name / "0000000060"
    assert verify(copy) == []


def test_a_stop_with_save_cuts_all_workers_at_one_step(cluster: Callable[..., Cluster]) -> None:
    job = cluster(WORKER)
    until(lambda: job.of(events.Progress), WAIT, name="training")
    job.call(0, "stop", save=True, by="Ctrl-C")
    last = job.finished()
    assert (last.status, last.exit, last.failure) == ("stopped", 130, None), job.logs()
    ends = {event.text for event in job.of(events.Log) if event.text.startswith("end")}
    assert ends == {f"end {last.steps}"}
    assert [event.step for event in job.of(events.CheckpointWritten)] == [last.steps]


def test_models_that_differ_are_refused_with_the_first_difference(cluster: Callable[..., Cluster]) -> None:
    job = cluster(WORKER, environment={"ODD": "1"})
    last = job.finished()
    assert last.status == "failed"
    assert last.failure is not None
    assert last.failure["rank"] == 1
    assert (
        "parameter 0 is w [3] float32 in group 0, on worker/0 it is w [2] float32 in group 0"
        in last.failure["exception"]
    )


def test_a_lost_worker_is_named_before_the_ranks_that_lost_their_connection_to_it(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(WORKER)
    until(lambda: job.of(events.Progress), WAIT, name="training")
    os.kill(job.pid("worker", 1), signal.SIGKILL)
    last = job.finished()
    assert last.failure is not None
    assert last.failure["rank"] == 1
    assert [*last.failure["stopped"], *(each["rank"] for each in last.failure["failed"])] == ["worker/0"]
    assert last.failure["step"] > 0
