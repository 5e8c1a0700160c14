"""What an agent obeys: orders within its own job, and callers of its own user."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from psctl.agent.control_client import call
from psctl.agent.control_socket import ControlSocket
from psctl.agent.coordinator_link import CheckpointCopies
from psctl.agent.spawn import argv_of, refusal_of
from psctl.job.checkpoint_messages import CheckpointCopyBegin
from psctl.job.environment import NAMES, WorkerSeats, server_environment, worker_environment, worker_places
from psctl.job.process_messages import StartProcess
from psctl.orders import AgentOrders, HostOrder
from psctl.types import Address, Member
from tests.helpers.driven_job import ORDER

HOSTS = [HostOrder("h0", "10.0.0.1", "eth0", 4, 0, 2, True, slots=3, rdma="=mlx5_0:1")]
JOB = replace(ORDER, hosts=HOSTS, environment={"COLOUR": "blue", "LD_PRELOAD": "/mine.so"})
ORDERS = AgentOrders(
    job=JOB, host=0, python="/usr/bin/python3", paths=[], workdir="/w", job_dir="/w/jobs/j", code_dir="/w/code",
    authority="ours", certificate="", key="", preauth_secret="", coordinator=None,
    authority_key="", secrets={}, grace=1.0,
)  # fmt: skip
SEATS = WorkerSeats(worker_places(JOB))
USUAL = worker_environment(JOB, SEATS, 1, Address("10.0.0.1", 29500))


WORKER = Member("worker", 1)


def start(member: Member = WORKER, authority: str = "ours", **environment: str) -> StartProcess:
    return StartProcess(member, 2, 1, {**USUAL, **environment}, authority, "certificate", "key")


def test_what_the_coordinator_orders_in_earnest_is_obeyed() -> None:
    assert refusal_of(ORDERS, start(), 1) == ""
    server = StartProcess(Member("server", 0), 2, 0, server_environment(JOB, HOSTS[0], 1), "ours", "", "")
    assert refusal_of(ORDERS, server, 1) == ""
    assert {*USUAL, *server.environment} - {*JOB.environment} <= NAMES


@pytest.mark.parametrize(
    ("order", "running", "why"),
    [
        (start(Member("coordinator", 0)), 0, "a coordinator is not started by order"),
        (start(Member("agent", 0)), 0, "a agent is not started by order"),
        (start(authority="another"), 0, "of another authority"),
        (start(LD_PRELOAD="/theirs.so"), 0, "it sets LD_PRELOAD, which the job file does not"),
        (start(PYTHONSTARTUP="/tmp/x.py", LD_AUDIT="/x.so"), 0, "it sets LD_AUDIT, PYTHONSTARTUP"),
        (start(COLOUR="red"), 0, "it sets COLOUR"),
        (start(), 70, "70 processes run here already"),
    ],
)
def test_what_no_coordinator_of_this_job_orders_is_refused(order: StartProcess, running: int, why: str) -> None:
    assert re.search(why, refusal_of(ORDERS, order, running))


def test_what_runs_stands_in_the_agents_own_orders() -> None:
    assert argv_of(ORDERS, "worker")[2:] == JOB.argv
    assert argv_of(ORDERS, "server")[2:4] == ["-m", "psctl.server.main"]


def test_a_copy_that_begins_ends_the_one_before(tmp_path: Path) -> None:
    copies = CheckpointCopies(tmp_path, JOB)
    for step in range(50):
        assert list(copies.receive(CheckpointCopyBegin(step, {"manifest.json": 1}), None)) == []
    assert len(list((tmp_path / JOB.name).iterdir())) == 1
    copies.discard()


@pytest.mark.parametrize("name", ["../../.ssh/authorized_keys", "/etc/cron.d/x", "a/b", "..", ""])
def test_a_copy_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    (done,) = CheckpointCopies(tmp_path / "root", JOB).receive(CheckpointCopyBegin(5, {name: 1}), None)
    assert "cannot hold a file" in done.problem
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def ear(folder: Path, heard: list[Any]) -> None:
    def answer(request: Any) -> dict[str, Any]:
        heard.append(request)
        return {"accepted": True}

    (folder / "private").mkdir()
    ControlSocket(folder, folder / "private", answer)


def test_the_socket_answers_its_own_user(tmp_path: Path) -> None:
    heard: list[Any] = []
    ear(tmp_path, heard)
    assert call(str(tmp_path), "hello", {}) == {"accepted": True}
    assert (tmp_path / "agent.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process is made by root")
def test_the_socket_does_not_answer_another_user_even_where_its_mode_lets_it_in(tmp_path: Path) -> None:
    heard: list[Any] = []
    folder = Path(f"/tmp/psctl-ear-{os.getpid()}")
    folder.mkdir()
    try:
        ear(folder, heard)
        folder.chmod(0o777)
        (folder / "agent.sock").chmod(0o777)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as caller:
                    caller.connect(str(folder / "agent.sock"))
                    caller.sendall(json.dumps({"command": "stop", "arguments": {}}).encode() + b"\n")
                    status = 0 if caller.recv(100) == b"" else 2
            except (ConnectionResetError, BrokenPipeError):
                status = 0  # hung up before it was read
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert heard == []
        assert call(str(folder), "hello", {}) == {"accepted": True}
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
