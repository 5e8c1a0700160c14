"""`python -m psctl.server.main` as a real process over TCP: orders, start, steps, end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from psctl.client.dense_client import ParameterClient
from psctl.clock import SystemClock
from psctl.coordinator.state.instructions import StartMember
from psctl.job.checkpoint_messages import SaveBegin, SaveEnd
from psctl.job.training_messages import Decision, MemberReady
from psctl.process import sealed_memory
from psctl.process.sealed_memory import ENVIRONMENT
from psctl.ps.permits import PARAMETERS
from psctl.transport.connect import dial
from psctl.transport.protocol.preauth import ANSWER
from psctl.types import Member
from tests.helpers.credentials import credentials
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.ps_world import flat_values, make_layout
from tests.helpers.running import ROOT
from tests.helpers.tcp_job import TcpJob

WORKER, SERVER = Member("worker", 0), Member("server", 0)
LAYOUT = msgspec.structs.replace(  # as in a script whose default dtype is float64
    make_layout([((70, 70), "float32", 0)], "AdamW", [{"lr": 0.1}]), scalars="float64"
)


class ServerJob(TcpJob):
    """A job whose server is a process; what its worker does comes from the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.decision: Decision | None = None
        super().__init__(make_order(make_hosts(1)), 4000)

    def start_member(self, start: StartMember) -> None:
        if start.member != SERVER:
            return
        with sealed_memory.holding(msgspec.json.encode(self.orders(SERVER))) as told:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "psctl.server.main"],
                env={
                    **os.environ, ENVIRONMENT: f"{self.folder}/server-0:{told}", "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                },
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[told],
            )  # fmt: skip

    def send(self, member, message) -> None:
        if isinstance(message, Decision):
            self.decision = message
        super().send(member, message)

    def leave(self) -> tuple[int, str]:
        """End the job's worker, and so the job; return the server's exit status and its standard error."""
        self.exits(WORKER)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def job(tmp_path):
    """A job whose server process has its decision."""
    made = ServerJob(tmp_path)
    made.begin()
    made.register()
    made.prepares(WORKER, LAYOUT)
    try:
        made.until(lambda: made.decision, "the decision")
        assert made.machine.job.ranks[SERVER].pid == made.process.pid
        yield made
    finally:
        made.process.kill()
        made.process.communicate()
        made.close()


def test_a_server_process_serves_a_step_saves_it_and_leaves(job):
    me = credentials(WORKER)
    client = ParameterClient(
        WORKER,
        1,
        job.decision,
        lambda member, at, handler: dial(at, me, member, PARAMETERS, handler),
        SystemClock(),
        20.0,
    )
    client.start(flat_values(LAYOUT, [torch.ones(70, 70)]))
    job.receive(WORKER, MemberReady())
    client.send_buffer(0)["float32"].fill_(2.0)
    for shard in range(len(job.decision.shards)):
        client.push(0, shard, [True])
    client.step(0, [{"lr": 0.1}], save=True)
    client.pull(1)
    client.wait(1)
    weight = torch.nn.Parameter(torch.ones(70, 70))
    weight.grad = torch.full((70, 70), 2.0)
    torch.optim.AdamW([weight], lr=0.1).step()
    assert torch.equal(client.landing["float32"], weight.detach().reshape(-1))

    job.receive(WORKER, SaveBegin(1, []))
    job.receive(WORKER, SaveEnd(1))
    saved = job.until(lambda: job.disk.whole, "the checkpoint")[1]
    slices = saved.slices[SERVER, False]
    names = {one.name for one in slices}
    assert names == {"param/layer.0", "optim/layer.0/step", "optim/layer.0/exp_avg", "optim/layer.0/exp_avg_sq"}
    assert {one.dtype for one in slices if one.name.endswith("/step")} == {"float64"}
    assert saved.tensors["param/layer.0"][1] == client.landing["float32"].numpy().tobytes()

    client.close()
    assert job.leave() == (0, "")


def test_a_server_process_ends_when_its_coordinator_is_lost(job):
    job.refuse()
    job.peers[SERVER].close("the head is gone")
    _, errors = job.process.communicate(timeout=60)
    assert job.process.returncode == 1
    assert "server/0 ends: the coordinator is lost" in errors


def test_strangers_at_its_port_are_one_line_of_its_log(job):
    address = job.address_of(SERVER)
    for _ in range(3):
        with socket.create_connection((address.host, address.port), timeout=10) as stranger:
            stranger.sendall(bytes(ANSWER))
            while stranger.recv(100):
                pass
    status, errors = job.leave()
    assert status == 0
    (line,) = errors.splitlines()
    assert line.startswith("psctl: server/0 rejected a connection: 127.0.0.1:")
    assert line.endswith("it did not prove this job's secret: it is not a process of this job")


def test_a_server_refuses_to_start_without_orders():
    environment = {key: value for key, value in os.environ.items() if key != ENVIRONMENT}
    found = subprocess.run(
        [sys.executable, "-m", "psctl.server.main"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stderr) == (2, "psctl: a server is started by psctl's agent, not by hand\n")
