"""More trouble, of the sort that must be lived through, or that is hard to tell from another's."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import STEADY, Ended, Psctl, until

pytestmark = pytest.mark.whole

LONG = '--set=args=["--epochs", "4000", "--pause", "0.02"]'

KINDS = {
    "worker": "bootstrap.py train.py",
    "server": "psctl.server.main",
    "coordinator": "psctl.coordinator.main",
}

STRANGER = """
import hmac, json, os, pathlib, socket, ssl, sys, time
host, ports = sys.argv[1], [int(port) for port in sys.argv[2].split(",")]

def link_of(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""

def listens(port):
    try:
        socket.create_connection((host, port), 3).close()
    except ConnectionRefusedError:  # it listens on loopback alone
        return False
    return True

ports = [port for port in ports if listens(port)]
assert ports, "nobody listens"
orders = [path for path in pathlib.Path("/proc").glob("[0-9]*/fd/*") if "psctl-orders" in link_of(path)]
secret = bytes.fromhex(json.loads(orders[0].read_bytes())["preauth_secret"])
nobody = ssl.create_default_context()
nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
overheard = bytes(32)

def right(line):
    global overheard
    overheard = hmac.digest(secret, b"psctl preauth 1" + line.recv(24, socket.MSG_WAITALL), "sha256")
    return overheard

def drip(line):
    for byte in right(line)[:-1]:
        line.sendall(bytes([byte]))
        time.sleep(0.01)

sorts = {
    "noise": lambda line: line.sendall(os.urandom(100_000)),
    "http": lambda line: line.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n"),
    "a part of TLS": lambda line: line.sendall(b"\\x16\\x03\\x01"),
    "TLS": nobody.wrap_socket,
    "wrong": lambda line: line.sendall(hmac.digest(os.urandom(32), line.recv(24), "sha256")),
    "right, then noise": lambda line: line.sendall(right(line) + os.urandom(100_000)),
    "overheard": lambda line: line.sendall(overheard),
    "dripped": drip,
    "right, without a certificate": lambda line: (line.sendall(right(line)), nobody.wrap_socket(line).recv(1)),
}
for port in ports:
    for name, sort in sorts.items():
        try:
            with socket.create_connection((host, port), 3) as line:
                line.settimeout(1)
                sort(line)
                print(port, name, line.recv(100))
        except (OSError, ValueError) as refused:
            print(port, name, refused)
held = [socket.create_connection((host, port), 3) for port in ports for _ in range(200)]
print("held", len(held))
"""


class Followed:
    """A job in training, and how far it is, by its progress events."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under our hands when a test has failed
            for line in self.process.stdout:
                self.events.append(json.loads(line))

    @property
    def step(self) -> int:
        return max((each["step"] for each in self.events if each.get("event") == "progress"), default=0)

    def goes_on(self, steps: int = 20, seconds: float = 40) -> None:
        before = self.step
        until(lambda: self.step >= before + steps or self.process.poll() is not None, seconds, name="more steps")
        assert self.process.poll() is None, self.events[-1]

    def ended(self, seconds: float = 60) -> dict[str, Any]:
        self.process.wait(seconds)
        self._thread.join(10)
        return self.events[-1]


class Lab:
    """Hosts and a psctl with their cluster."""

    def __init__(self, hosts: Any, folder: Path) -> None:
        self.hosts = hosts
        home = hosts.make_home(folder)
        self.psctl = Psctl(home.path, environment=home.env)
        self.cluster = home.path / "cluster.yaml"
        self.cluster.write_text(hosts.cluster_text())

    def train(self, job: Path, *arguments: str) -> subprocess.Popen[str]:
        return self.psctl.start("train", str(job), "--cluster", str(self.cluster), "-o", "jsonl", *arguments)

    @contextmanager
    def training(self) -> Iterator[Followed]:
        """A long training; at the end it has lost no rank, stops on request and leaves nothing."""
        with self.train(STEADY, LONG) as process:
            job = Followed(process)
            job.goes_on(seconds=60)
            yield job
            assert not [each for each in job.events if each["event"].endswith("-lost")]
            assert self.psctl.run("stop", "steady").code == 0
            assert job.ended()["status"] == "stopped"
        self.clean()

    def signal(self, kind: str, signal: str) -> None:
        found = [(name, pid) for name in self.hosts for pid, line in self.hosts.processes(name) if KINDS[kind] in line]
        name, pid = found[-1]
        self.hosts.exec(name, ["kill", f"-{signal}", str(pid)])

    def clean(self) -> None:
        for name in self.hosts:
            until(lambda name=name: not self.hosts.leftovers(name), 30, name=f"{name} is left with something")


@pytest.mark.soak
def test_faults_that_training_survives(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    """Links cut without a word for 4 s, processes that stand still for 8 s."""
    lab = Lab(make_hosts(2), tmp_path / "home")
    with lab.training() as job:
        for host in ("h2", "h1"):
            lab.hosts.cut(host)
            time.sleep(4)
            lab.hosts.heal(host)
            job.goes_on()
        for kind in KINDS:
            lab.signal(kind, "STOP")
            time.sleep(8)
            lab.signal(kind, "CONT")
            job.goes_on()


@pytest.mark.soak
def test_training_continues_whatever_unauthenticated_peers_do_at_its_ports(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    """With no proof of the secret, a wrong, an overheard, a dripping one, and the right one without a certificate."""
    lab = Lab(make_hosts(2), tmp_path / "home")
    with lab.training() as job:
        for host in lab.hosts:
            ports = ",".join(str(port) for port in lab.hosts.ports(host))
            address = lab.hosts[host].address
            told = lab.hosts.exec("h2", [lab.hosts.python, "-c", STRANGER, address, ports], timeout=120)
            assert all(word in told.stdout for word in ("right, without a certificate", "held")), told
            job.goes_on()


@pytest.mark.soak
def test_a_link_that_stays_cut_ends_the_job_in_time_and_both_sides_clean_up(
    make_hosts: Callable[..., Any], tmp_path: Path
) -> None:
    lab = Lab(make_hosts(2), tmp_path / "home")
    with lab.train(STEADY, LONG, "--servers", "1", "--set", "restart.wait=0s") as process:
        job = Followed(process)
        job.goes_on(seconds=60)
        lab.hosts.cut("h2")
        until(lambda: job.events[-1]["event"] == "finished", 15)  # 7 s, on processors without other work
        failure = job.events[-1]["failure"]
        assert "HostLost: h2 is lost" in failure["exception"]
        until(lambda: not lab.hosts.leftovers("h2"), 25, name="h2 is left with something")
        assert job.ended()["exit"] == 1
    lab.clean()


BODY = """
import os, subprocess, sys, time
import torch
import psctl

run = psctl.init()
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(960, 4))
for (x,) in run.loader(data, batch_size=16):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    run.report(loss=loss)
    if run.step == 7 and run.rank == 1:
        {what}
"""


def run_here(folder: Path, what: str, *arguments: str) -> Ended:
    """Train a script that does `what` on rank 1 after step 7, on this machine."""
    (folder / "train.py").write_text(BODY.format(what=what))
    (folder / "job.yaml").write_text("version: 1\nname: odd\nscript: train.py\nworkers: 2\nservers: 1\n")
    return Psctl(folder).run("train", "job.yaml", "-o", "jsonl", *arguments)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ps", "native"])
def test_a_rank_that_leaves_in_mid_training_is_named_not_the_ranks_that_wait_for_it(
    tmp_path: Path, strategy: str
) -> None:
    run = run_here(tmp_path, "break", "--strategy", strategy)
    assert run.code == 1, run
    failure = run.events[-1]["failure"]
    assert (failure["role"], failure["rank"], failure["step"]) == ("worker", 1, 7)
    assert "worker/1 on local left after step 7, while others continue" in failure["exception"]
    assert "break" in failure["hint"]


@pytest.mark.soak
def test_daemons_of_a_script_end_with_it(tmp_path: Path) -> None:
    token = f"3{time.time_ns() % 10**7}"
    run = run_here(tmp_path, f'subprocess.Popen(["sleep", "{token}"], start_new_session=True)', "--strategy", "ps")
    assert run.code == 0, run
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not re.search(rf"sleep {token}$", lines, re.MULTILINE)


@pytest.mark.soak  # tests/agent/test_log_pump.py and tests/view/test_view_text.py hold the parts
def test_a_script_that_prints_what_no_terminal_should_see_harms_nothing(tmp_path: Path) -> None:
    what = r'os.write(1, bytes(range(256)) + b"\x1b[2J\n"); os.write(1, b"y" * 300_000); print("x" * 99, flush=True)'
    run = run_here(tmp_path, what, "--strategy", "ps")
    assert run.code == 0, run
    assert run.of("log")


@pytest.mark.soak
def test_the_files_of_a_killed_checkpoint_writer_are_removed_with_the_job(tmp_path: Path) -> None:
    folder = tmp_path / ".psctl" / "host" / "checkpoints" / "odd-1"
    make = f'os.makedirs(f"{folder}/0000000099.{{os.uname().nodename}}.4194305.partial")'
    run = run_here(tmp_path, make, "--strategy", "ps")
    assert run.code == 0, run
    assert [each.name for each in folder.iterdir()] == ["0000000060"]
