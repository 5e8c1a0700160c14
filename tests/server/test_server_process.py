"""`python -m psctl.server.main` as a real process over TCP: orders, start, steps, end."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys

import msgspec
import pytest
import torch

from psctl.client.dense_client import ParameterClient
from psctl.clock import SystemClock
from psctl.job.checkpoint_messages import SaveBegin, SaveEnd, SavePart
from psctl.job.job_permits import COORDINATION
from psctl.job.training_messages import Decision, Heartbeat, Join, Leave, MemberReady, Welcome
from psctl.process import sealed_memory
from psctl.process.process_orders import ProcessOrders
from psctl.process.sealed_memory import ENVIRONMENT
from psctl.ps.permits import PARAMETERS
from psctl.ps.shards import cut
from psctl.transport.connect import Acceptor, dial
from psctl.transport.protocol.preauth import ANSWER
from psctl.types import Address, Member
from tests.helpers.assignments import first_assignment
from tests.helpers.ps_world import credentials, flat_values, make_layout
from tests.helpers.running import ROOT, UNTRACED


class Coordinator:
    """The handler of the server's connection: keeps its messages for the test."""

    def __init__(self) -> None:
        self.messages: queue.Queue = queue.Queue()
        self.peer = None

    def on_connected(self, peer) -> None:
        self.peer = peer

    def receive_buffer_for(self, peer, message, size) -> None:
        return None

    def on_message(self, peer, message, payload) -> None:
        if not isinstance(message, Heartbeat):
            self.messages.put((message, bytes(payload or b"")))

    def on_connection_lost(self, peer, error) -> None:
        self.messages.put((error, b""))

    def next(self, kind):
        message, payload = self.messages.get(timeout=30)
        assert isinstance(message, kind), message
        return message, payload


@pytest.fixture
def started(tmp_path):
    """Return a registered server process: (coordinator, process, address)."""
    coordinator = Coordinator()
    acceptor = Acceptor("127.0.0.1", None, credentials(Member("coordinator", 0)), COORDINATION, coordinator)
    me = credentials(Member("server", 0))
    orders = ProcessOrders(
        job="world-1", member=me.member, world=1, host="here", local_rank=0, coordinator=acceptor.address,
        bind="127.0.0.1", ports=None, authority=me.authority, certificate=me.certificate, key=me.key,
        preauth_secret=me.preauth_secret, congestion="auto", error_file="", segments=None,
    )  # fmt: skip
    with sealed_memory.holding(msgspec.json.encode(orders)) as descriptor:
        process = subprocess.Popen(
            [sys.executable, "-m", "psctl.server.main"],
            env={
                **os.environ, ENVIRONMENT: f"{tmp_path}/server-0:{descriptor}", "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([UNTRACED, str(ROOT)]),
            },
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[descriptor],
        )  # fmt: skip
    try:
        assert coordinator.next(Join)[0].pid == process.pid
        coordinator.peer.send(Welcome(1, 0, 0, 1.0, training=True))
        yield coordinator, process, coordinator.next(MemberReady)[0].address
    finally:
        process.kill()
        process.communicate()
        acceptor.close()
        if coordinator.peer is not None:
            coordinator.peer.close("the test is over")
            coordinator.peer.join(5)


def test_a_server_process_applies_a_step_saves_it_and_exits(started):
    coordinator, process, address = started
    assert isinstance(address, Address)
    layout = make_layout([((70, 70), "float32", 0)], "AdamW", [{"lr": 0.1}])
    layout = msgspec.structs.replace(layout, scalars="float64")  # as in a script whose default dtype is float64
    shards = cut(layout, 1, 4000)
    decision = Decision("ps", "server", layout, shards, first_assignment([0] * len(shards), [address]))
    coordinator.peer.send(decision)
    me = credentials(Member("worker", 0))
    client = ParameterClient(
        me.member,
        1,
        decision,
        lambda member, at, handler: dial(at, me, member, PARAMETERS, handler),
        SystemClock(),
        20.0,
    )
    client.start(flat_values(layout, [torch.ones(70, 70)]))
    client.send_buffer(0)["float32"].fill_(2.0)
    for shard in range(len(shards)):
        client.push(0, shard, [True])
    client.step(0, [{"lr": 0.1}], save=True)
    client.pull(1)
    client.wait(1)
    weight = torch.nn.Parameter(torch.ones(70, 70))
    weight.grad = torch.full((70, 70), 2.0)
    torch.optim.AdamW([weight], lr=0.1).step()
    assert torch.equal(client.landing["float32"], weight.detach().reshape(-1))

    begin, _ = coordinator.next(SaveBegin)
    assert begin.step == 1
    names = {one.name for one in begin.slices}
    assert names == {"param/layer.0", "optim/layer.0/step", "optim/layer.0/exp_avg", "optim/layer.0/exp_avg_sq"}
    assert {one.dtype for one in begin.slices if one.name.endswith("/step")} == {"float64"}
    parts = [coordinator.next(SavePart) for _ in begin.slices]
    values = b"".join(data for part, data in parts if begin.slices[part.index].name == "param/layer.0")
    assert values == client.landing["float32"].numpy().tobytes()
    coordinator.next(SaveEnd)

    coordinator.peer.send(Leave("the job is done"))
    client.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_server_process_ends_when_its_coordinator_is_lost(started):
    coordinator, process, _ = started
    coordinator.peer.close("the head is gone")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "server/0 ends: the coordinator is lost" in errors


def test_unauthenticated_connections_are_one_line_of_the_log(started):
    coordinator, process, address = started
    for _ in range(3):
        with socket.create_connection((address.host, address.port), timeout=10) as stranger:
            stranger.sendall(bytes(ANSWER))
            while stranger.recv(100):
                pass
    coordinator.peer.send(Leave("the job is done"))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    (line,) = errors.splitlines()
    assert line.startswith("psctl: server/0 rejected a connection: 127.0.0.1:")
    assert line.endswith("it did not prove this job's secret: it is not a process of this job")


def test_a_server_refuses_to_start_without_orders():
    environment = {key: value for key, value in os.environ.items() if key != ENVIRONMENT}
    found = subprocess.run(
        [sys.executable, "-m", "psctl.server.main"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (found.returncode, found.stderr) == (2, "psctl: a server is started by psctl's agent, not by hand\n")
