"""Machine trouble: each gives the promised exit code and one clear message, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import STEADY, Ended, Psctl, next_event, rest_of, set_args, until

pytestmark = pytest.mark.whole


class Lab:
    """Hosts, a psctl with their cluster, and the checks after every fault."""

    def __init__(self, hosts: Any, folder: Path) -> None:
        self.hosts = hosts
        self.home = hosts.make_home(folder)
        self.psctl = Psctl(self.home.path, environment=self.home.env)
        self.cluster = self.home.path / "cluster.yaml"
        self.write()

    def write(self, more: str = "") -> None:
        self.cluster.write_text(self.hosts.cluster_text(more=more))

    def train(self, *arguments: str, timeout: float = 90) -> Ended:
        return self.psctl.run(
            "train", str(STEADY), "--cluster", str(self.cluster), "-o", "jsonl", "--servers", "1", *arguments,
            timeout=timeout,
        )  # fmt: skip

    def clean(self, but: tuple[str, ...] = ()) -> None:
        for name in self.hosts:
            if name not in but:
                until(
                    lambda name=name: not self.hosts.leftovers(name), 25,
                    name=f"{name} is left with {self.hosts.leftovers(name)}",
                )  # fmt: skip


@pytest.fixture(scope="module")
def shared(module_hosts: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Two hosts for all faults; the last one costs a host."""
    return Lab(module_hosts(2), tmp_path_factory.mktemp("lab") / "home")


@pytest.fixture
def lab(shared: Lab) -> Any:
    shared.write()
    yield shared
    shared.clean()


def error_of(run: Ended) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.out.splitlines()[-1])["error"]
    assert document["exit"] == run.code
    assert document["message"]
    assert document["hint"]
    assert "\n" not in document["message"]
    return document


def test_a_changed_host_key(lab: Lab) -> None:
    known = lab.home.known_hosts.read_text()
    try:
        first, second = (line.split()[2] for line in known.splitlines()[:2])
        lab.home.known_hosts.write_text(known.replace(second, first))
        run = lab.train()
    finally:
        lab.home.known_hosts.write_text(known)
    assert run.code == 8, run
    assert error_of(run)["code"] == "host-key-changed"
    assert "h2" in error_of(run)["message"]


def test_an_unknown_host_key(lab: Lab) -> None:
    known = lab.home.known_hosts.read_text()
    try:
        lab.home.known_hosts.write_text("")
        run = lab.train()
    finally:
        lab.home.known_hosts.write_text(known)
    assert run.code == 8, run
    assert error_of(run)["code"] == "host-key-unknown"


def test_an_unreachable_host(lab: Lab) -> None:
    lab.hosts.cut("h2")
    try:
        lab.write("ssh: {connect_timeout: 2s}\n")
        run = lab.train()
    finally:
        lab.hosts.heal("h2")
    assert run.code == 3, run
    assert error_of(run)["code"] == "host-unreachable"
    assert "h2" in error_of(run)["message"]


def test_a_host_without_python(lab: Lab) -> None:
    lab.write("runtime: {python: python3.99, environment: existing}\n")
    run = lab.train()
    assert run.code == 4, run
    assert error_of(run)["code"] == "python-missing"


def test_a_full_disk(lab: Lab) -> None:
    lab.hosts.disk("h2", "/small", "64k")
    lab.write(f"runtime: {{python: {lab.hosts.python}, environment: existing, workdir: /small/psctl}}\n")
    run = lab.train()
    lab.hosts.exec("h2", ["umount", "/small"])
    assert run.code == 4, run
    assert error_of(run)["code"] == "disk-full"
    assert "h2" in error_of(run)["message"]


def test_a_full_port_range(lab: Lab) -> None:
    hold = (
        "import socket, time\n"
        f"held = [socket.create_server(('{lab.hosts['h1'].address}', port)) for port in range(29400, 29403)]\n"
        "time.sleep(60)\n"
    )
    holder = subprocess.Popen([*lab.hosts.command("h1"), lab.hosts.python, "-c", hold])
    try:
        until(lambda: {29400, 29401, 29402} <= lab.hosts.ports("h1"), 10)
        lab.write("network: {ports: 29400-29402}\n")
        run = lab.train()
    finally:
        for pid, line in lab.hosts.processes("h1"):
            if "create_server" in line:
                lab.hosts.exec("h1", ["kill", "-9", str(pid)])
        holder.wait()
    assert run.code == 7, run
    assert "29400-29402" in run.out
    assert "port-taken" in run.out


def test_a_script_that_raises_at_step_7_on_rank_1(lab: Lab) -> None:
    run = lab.train(*set_args("--raise-at", "7"))
    assert run.code == 1, run
    finished = run.events[-1]
    assert (finished["event"], finished["status"], finished["exit"]) == ("finished", "failed", 1)
    failure = finished["failure"]
    assert "ValueError: NaN loss at step 7" in failure["exception"]
    assert any("train.py" in frame and "disturb" in frame for frame in failure["frames"])
    assert not any("/psctl/process/" in frame or "/psctl/worker/" in frame for frame in failure["frames"])
    assert failure["host"] == "h2"
    assert failure["step"] == 7
    shown = lab.psctl.run("attach", "steady")
    assert shown.code == 1
    for needle in ("worker/1", "h2", "step 7", "ValueError: NaN loss", "psctl logs"):
        assert needle in shown.err, shown


@pytest.mark.soak
def test_a_script_that_hangs(lab: Lab) -> None:
    run = lab.train("--set", "timeouts.stall=3s", *set_args("--hang-at", "7"))
    assert run.code == 5, run
    finished = run.events[-1]
    assert (finished["status"], finished["exit"]) == ("failed", 5)
    assert "worker/1" in json.dumps(finished["failure"])


def test_a_script_that_is_not_there(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("version: 1\nname: gone\nscript: nowhere.py\n")
    run = lab.psctl.run("train", str(tmp_path / "job.yaml"), "--cluster", str(lab.cluster), "-o", "json")
    assert run.code == 2, run
    assert error_of(run)["where"].startswith(str(tmp_path / "job.yaml") + ":3")


KINDS = {
    "psctl": "",
    "agent": "psctl.agent.main",
    "coordinator": "psctl.coordinator.main",
    "server": "psctl.server.main",
    "worker": "bootstrap.py train.py",
}


def pids_of(lab: Lab, kind: str) -> list[tuple[str, int]]:
    """Return the processes of a kind by host, without the shells that start them, whose arguments name it too."""
    return [
        (name, pid)
        for name in lab.hosts
        for pid, line in lab.hosts.processes(name)
        if KINDS[kind] in line and Path(line.split()[0]).name.startswith("python")
    ]


def kill(lab: Lab, process: Any, kind: str) -> None:
    if kind == "psctl":
        process.send_signal(signal.SIGKILL)
        process.wait()
        return
    name, pid = until(lambda: pids_of(lab, kind), 30, name=f"a process of kind {kind}")[-1]
    lab.hosts.exec(name, ["kill", "-9", str(pid)], check=False)


OFTEN = ("agent", "start")
"""In every `make test`; all others in `make soak`.

tests/agent/test_agent.py kills the others, and this one later, where no host is needed, test_hosts_job.py psctl,
test_restore_numbers.py a server that has a replica.
"""


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(kind, when, marks=() if (kind, when) == OFTEN else pytest.mark.soak)
        for kind in KINDS
        for when in ("start", "step", "save")
    ],
)
def test_kill_9_of_any_process_at_any_time_leaves_nothing_behind(lab: Lab, kind: str, when: str) -> None:
    every = "1 steps" if when == "save" else "10 steps"
    arguments = set_args("--epochs", "400", "--pause", "0.02", "--loaders", "1", "--width", "64")
    common = ("--cluster", str(lab.cluster), "-o", "jsonl", "--servers", "1", "--set", f"checkpoint.every={every}")
    arguments += ["--set", "restart.max=0"]  # a worker or server that is lost is the end of this job
    with lab.psctl.start("train", str(STEADY), *common, *arguments) as process:
        if when == "start":
            until(lambda: pids_of(lab, "coordinator"), 30)
        else:
            next_event(process, "progress" if when == "step" else "checkpoint")
        kill(lab, process, kind)
        if kind == "coordinator":  # another one continues
            next_event(process, "checkpoint" if when == "save" else "progress")
            assert lab.psctl.run("stop", "steady").code == 0
            assert json.loads(rest_of(process)[0].splitlines()[-1])["status"] == "stopped"
        elif kind != "psctl":
            out, err = rest_of(process)
            assert process.returncode == 1, f"{out}\n{err}"
            last = json.loads(out.splitlines()[-1])
            if when == "start" and "error" in last:  # the job was not there yet: the error stands in its place
                assert last["error"]["exit"] == 1, last
                assert last["error"]["hint"], last
            else:
                assert (last["event"], last["status"]) == ("finished", "failed"), last
    if kind == "psctl":
        job = "steady"
        state = until(
            lambda: (lab.psctl.run("status", job, "-o", "json").document["jobs"] or [{}])[0].get("state")
            if when != "start" else "any", 30,
        )  # fmt: skip
        assert state in ("running", "any")
        stopped = lab.psctl.run("stop", job, "--force")
        assert stopped.code in (0, 6), stopped


def test_a_host_that_loses_power(shared: Lab) -> None:
    """The last of this file: its hosts are shared."""
    shared.write()
    slow = ["--servers", "1", "--set", "restart.wait=0s", *set_args("--epochs", "200", "--pause", "0.05")]
    with shared.psctl.start("train", str(STEADY), "--cluster", str(shared.cluster), "-o", "jsonl", *slow) as process:
        next_event(process, "progress")
        shared.hosts.crash("h2")
        begin = time.monotonic()
        finished = next_event(process, "finished")
        assert time.monotonic() - begin < 20
        assert process.wait(30) == 1
    assert finished["status"] == "failed"
    assert "h2" in json.dumps(finished["failure"])
    shared.clean(but=("h2",))
