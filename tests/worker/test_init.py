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
from psctl.job.checkpoint_messages import CheckpointSaved, SaveEnd
from psctl.job.job_permits import COORDINATION
from psctl.job.training_messages import Decision, Go, Join, Leave, MemberReady, Prepare, ScriptFinished, Welcome
from psctl.process.process_orders import ProcessOrders
from psctl.ps.shards import cut
from psctl.server import main
from psctl.transport.connect import Acceptor
from psctl.transport.shared_memory import SegmentClient, inherited
from psctl.types import Member
from psctl.worker import init
from tests.helpers.assignments import first_assignment
from tests.helpers.credentials import credentials

WORKER, SERVER = Member("worker", 0), Member("server", 0)
STEPS = 3


class Coordinator:
    """Decides for one server; its connections' handler."""

    def __init__(self, update: str) -> None:
        self.update, self.peers, self.address = update, dict[Member, Any](), None
        self.listens, self.over = threading.Event(), threading.Event()

    def on_connected(self, peer: Any) -> None:
        self.peers[peer.member] = peer

    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> None:
        return None

    def on_connection_lost(self, peer: Any, error: Exception) -> None:
        return

    def on_message(self, peer: Any, message: Any, payload: Any) -> None:
        match message:
            case Join():
                peer.send(Welcome(1, 0, 0, 1.0))
            case MemberReady() if peer.member == SERVER:
                self.address = message.address
                self.listens.set()
            case Prepare():
                assert self.address is not None
                shards = cut(message.layout, 1, 20_000)
                first = first_assignment([0] * len(shards), [self.address])
                for each in (SERVER, WORKER):
                    self.peers[each].send(Decision("ps", self.update, message.layout, shards, first))
            case MemberReady():
                peer.send(Go())
            case SaveEnd() if peer.member == WORKER:
                peer.send(CheckpointSaved(message.step))
            case ScriptFinished():
                self.over.set()


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

    def orders(member: Member, at: Any, segments: SegmentBroker) -> ProcessOrders:
        mine = credentials(member)
        with segments.opened(member) as descriptor:
            own = os.dup(descriptor)
        return ProcessOrders(
            job=mine.job, member=member, world=1, host="here", local_rank=0, coordinator=at, bind="127.0.0.1",
            ports=None, authority=mine.authority, certificate=mine.certificate, key=mine.key, congestion="auto",
            preauth_secret=mine.preauth_secret, error_file="", segments=own,
        )  # fmt: skip

    def train(update: str) -> tuple[list[torch.Tensor], int]:
        segments, coordinator = SegmentBroker(), Coordinator(update)
        acceptor = Acceptor("127.0.0.1", None, credentials(Member("coordinator", 0)), COORDINATION, coordinator)
        serving = threading.Thread(target=main.serve, args=(orders(SERVER, acceptor.address, segments),))
        serving.start()
        made.append((segments, coordinator, acceptor, serving))
        assert coordinator.listens.wait(20)
        torch.manual_seed(0)
        run = init.join_job(orders(WORKER, acceptor.address, segments), tmp_path)
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
    for segments, coordinator, acceptor, serving in made:
        coordinator.peers[SERVER].send(Leave("the test is over"))
        serving.join(20)
        acceptor.close()
        for peer in coordinator.peers.values():
            peer.close("the test is over")
            peer.join(5)
        for each in held:
            each.close()
        segments.ended(WORKER)
        segments.ended(SERVER)
        assert coordinator.over.is_set() and not serving.is_alive()


@pytest.mark.parametrize("update", ["server", "worker"])
def test_children_of_one_agent_train_in_shared_memory(job, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    near, few = job(update)
    size = sum(one.numel() * one.element_size() for one in near)
    assert few < 0.5 * size, "gradients and values were not sent"
    monkeypatch.setenv(OFF, "off")
    far, many = job(update)
    assert many > 2 * STEPS * size
    assert all(torch.equal(one, other) for one, other in zip(near, far, strict=True))
