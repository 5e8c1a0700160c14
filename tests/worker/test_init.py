"""A worker and a server as an agent's children: they join over TCP, find that they share a host, and train there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psctl.agent.shm_broker import OFF, SegmentBroker
from psctl.coordinator.state.instructions import StartMember
from psctl.process.process_orders import ProcessOrders
from psctl.server import main
from psctl.transport.shared_memory import SegmentClient, inherited
from psctl.types import Member
from psctl.worker import init
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.tcp_job import TcpJob

WORKER, SERVER = Member("worker", 0), Member("server", 0)
STEPS = 3


class ChildrenJob(TcpJob):
    """A job whose server is a thread; its worker is the test's own."""

    def __init__(self, update: str, segments: SegmentBroker) -> None:
        self.serving: threading.Thread | None = None
        self._segments = segments
        super().__init__(make_order(make_hosts(1), update=update), 20_000)

    def child(self, member: Member) -> ProcessOrders:
        """Return the orders of a process that inherits the agent's end of its shared memory."""
        with self._segments.opened(member) as descriptor:
            return self.orders(member, os.dup(descriptor))

    def start_member(self, start: StartMember) -> None:
        if start.member == SERVER:
            self.serving = threading.Thread(target=main.serve, args=(self.child(SERVER),))
            self.serving.start()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that trains under `update`: the values at the end, and the bytes that were moved."""
    made: list[Any] = []
    held: list[SegmentClient] = []  # for as long as a process lives; here for as long as the test does

    def inherit(me: Member, descriptor: int | None) -> SegmentClient:
        held.append(inherited(me, descriptor))
        return held[-1]

    for module in (init, main):
        monkeypatch.setattr(module, "inherited", inherit)

    def train(update: str) -> tuple[list[torch.Tensor], int]:
        segments = SegmentBroker()
        job = ChildrenJob(update, segments)
        made.append((segments, job))
        job.begin()
        job.register()
        torch.manual_seed(0)
        run = init.join_job(job.child(WORKER), tmp_path)
        net = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100))
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        moved = -run._synchronizer.bytes_moved
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(4, 100)).square().mean().backward()
            optimizer.step()
        run.wait()
        moved += run._synchronizer.bytes_moved
        run.finish()
        return [one.detach().clone() for one in net.parameters()], moved

    yield train
    for segments, job in made:
        job.exits(WORKER)
        job.serving.join(20)
        job.exits(SERVER)
        job.close()
        for each in held:
            each.close()
        segments.ended(WORKER)
        segments.ended(SERVER)
        assert job.status == "done"
        assert not job.serving.is_alive()


@pytest.mark.parametrize("update", ["server", "worker"])
def test_children_of_one_agent_train_in_shared_memory(job, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near, few = job(update)
    size = sum(one.numel() * one.element_size() for one in near)
    assert few < 0.5 * size, "gradients and values were not sent"
    monkeypatch.setenv(OFF, "off")
    far, many = job(update)
    assert many > 2 * STEPS * size
    assert all(torch.equal(one, other) for one, other in zip(near, far, strict=True))
