"""The server's state machine: step orders, parts of checkpoints, and the ranks that are waited for."""

from __future__ import annotations

import math

import pytest
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.server.dense_server import DenseServer
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import (
    Leads,
    NormsQuery,
    Pull,
    Push,
    Pushed,
    PushStaged,
    Refused,
    SaveNow,
    StartValues,
    Step,
    Values,
    WaitAnswer,
    WaitQuery,
)
from psctl.ps.outputs import SaveSlices, ToWorker
from psctl.ps.pieces import bytes_view
from psctl.types import Layout, ParameterInfo, Range, Shard

GROUPS = [{"lr": 0.1, "momentum": 0.9, "betas": [0.9, 0.99]}, {"lr": 0.2}]
SHARDS = [Shard(0, "float32", Range(0, 4)), Shard(1, "float32", Range(4, 9))]
LAYOUT = Layout(
    (ParameterInfo("a", (4,), "float32", 0), ParameterInfo("b", (5,), "float32", 1)),
    "SGD",
    ({"lr": 0.1, "momentum": 0.9}, {"lr": 0.2}),
)
SGD = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.2}]


def make(owners=(0, 0), rank=0, world=2, started=True) -> DenseServer:
    machine = DenseServer(Terms(LAYOUT, world, "server"), SHARDS, rank)
    machine.on_assignment(0, [[owner] for owner in owners], [[] for _ in owners], [0, 1])
    for index in machine.shards if started else ():
        size = 4 * len(SHARDS[index].range)
        machine.receive_buffer_for(0, StartValues(index), size)[:] = bytes(size)
        machine.on_worker_message(0, StartValues(index), size)
    return machine


def push(machine: DenseServer, rank: int, shard: int, clock: int = 0) -> list:
    size = 4 * len(SHARDS[shard].range)
    message = Push(shard, clock, 1.0, b"\1", clock)
    place = machine.receive_buffer_for(rank, message, size)
    if place is not None:
        place[:] = bytes_view(torch.ones(size // 4))
    return machine.on_worker_message(rank, message, size)


def pull(machine: DenseServer, clock: int) -> None:
    for rank in range(2):
        machine.on_worker_message(rank, Pull(clock, list(machine.shards), clock, [-1] * len(machine.shards)))


def test_each_shard_steps_when_all_pushes_and_orders_have_arrived():
    machine = make()
    pull(machine, 0)
    for rank in range(2):
        push(machine, rank, 0)
        push(machine, rank, 1)
    assert machine.on_worker_message(1, Step(0, SGD)) == []
    assert machine.version == 0
    outputs = machine.on_worker_message(0, Step(0, SGD))
    assert outputs == [ToWorker(rank, Pushed(shard, 0)) for shard in range(2) for rank in range(2)]
    assert machine.version == 1


def test_a_waiting_pull_is_answered_when_its_shard_is_complete():
    machine = make()
    pull(machine, 0)
    for rank in range(2):
        machine.on_worker_message(rank, Step(0, SGD))
    push(machine, 1, 0)
    assert machine.on_worker_message(1, Pull(1, [0, 1], 1, [0, 0])) == []
    taken, acknowledged, answer = push(machine, 0, 0)
    assert taken == ToWorker(0, PushStaged(0, 0))
    assert acknowledged == ToWorker(0, Pushed(0, 0))  # the values imply it for rank 1
    assert (answer.rank, answer.message) == (1, Values(0, 1, b"\1", 1, 1))


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (Step(3, [{"lr": 0.3}]), "optimizer group 0: lr is 0.1 on worker/0 and 0.3 on worker/1 (clock 3)"),
        (Step(3, [{}]), "optimizer group 0: lr is 0.1 on worker/0 and None on worker/1 (clock 3)"),
        (Step(3, [{"lr": 0.1}], 0.5), "worker/0 scales the gradient by None, worker/1 by 0.5 (clock 3)"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_order_that_differs_is_refused_to_all_ranks_and_stops_the_job(theirs, reason, order):
    layout = Layout((ParameterInfo("a", (4,), "float32", 0),), "SGD", ({"lr": 0.1},))
    machine = DenseServer(Terms(layout, 2, "server", base=3), [SHARDS[0]], 0)
    machine.on_assignment(0, [[0]], [[]], [0])
    steps = {0: Step(3, [{"lr": 0.1}]), 1: theirs}
    assert machine.on_worker_message(order[0], steps[order[0]]) == []
    outputs = machine.on_worker_message(order[1], steps[order[1]])
    assert [(one.rank, one.message.reason) for one in outputs] == [(0, reason), (1, reason)]
    assert machine.on_worker_message(0, Step(4, [{"lr": 0.1}])) == []
    assert machine.on_worker_connected(1) == [ToWorker(1, Leads(0, [0])), outputs[1]]


def test_orders_with_nan_scales_agree():
    machine = make()
    assert machine.on_worker_message(0, Step(0, SGD, math.nan)) == []
    assert machine.on_worker_message(1, Step(0, SGD, math.nan)) == []


def test_an_optimizer_error_is_sent_to_all_ranks_with_its_message():
    machine = make()
    pull(machine, 0)
    for rank in range(2):
        push(machine, rank, 0)
    bad = [{"lr": "much", "momentum": 0.9}, {"lr": 0.2}]
    machine.on_worker_message(0, Step(0, bad))
    outputs = machine.on_worker_message(1, Step(0, bad))
    assert isinstance(outputs[0].message, Refused)
    assert "SGD failed at clock 0: TypeError" in outputs[0].message.reason


def test_a_checkpoint_part_is_returned_when_the_last_shard_reaches_its_step():
    machine = make()
    pull(machine, 0)
    for rank in range(2):
        push(machine, rank, 0)
        machine.on_worker_message(rank, Step(0, SGD, save=True))
    assert machine.version == 0
    push(machine, 1, 1)
    outputs = push(machine, 0, 1)
    (save,) = [output for output in outputs if isinstance(output, SaveSlices)]
    assert save.step == 1
    assert [copied.slice.name for copied in save.copied] == ["param/a", "optim/a/momentum_buffer", "param/b"]


def test_a_version_can_be_saved_after_its_step_and_only_once():
    machine = make()
    (save,) = machine.on_worker_message(1, SaveNow(0))
    assert (save.step, len(save.copied)) == (0, 2)
    assert machine.on_worker_message(0, SaveNow(0)) == []
    assert machine.on_worker_message(0, SaveNow(1)) == []
    pull(machine, 0)
    found = []
    for rank in range(2):
        found += machine.on_worker_message(rank, Step(0, SGD))
        found += push(machine, rank, 0) + push(machine, rank, 1)
    assert [output.step for output in found if isinstance(output, SaveSlices)] == [1]


def test_a_server_without_shards_returns_an_empty_part_immediately():
    machine = make(owners=(1, 1))
    assert machine.on_worker_message(0, Step(0, SGD, save=True)) == []
    assert machine.on_worker_message(1, Step(0, SGD, save=True)) == [SaveSlices(1, [])]
    assert machine.on_worker_message(1, SaveNow(1)) == []
    assert machine.on_worker_message(1, SaveNow(2)) == [SaveSlices(2, [])]


def test_a_wait_answer_names_the_missing_ranks():
    machine = make()
    pull(machine, 0)
    push(machine, 0, 0)
    push(machine, 0, 1)
    assert machine.on_worker_message(0, WaitQuery(1)) == [
        ToWorker(0, WaitAnswer(1, [0, 1]))
    ]  # no order from 0, nothing from 1
    machine.on_worker_message(0, Step(0, SGD))
    assert machine.on_worker_message(0, WaitQuery(1)) == [ToWorker(0, WaitAnswer(1, [1]))]
    assert machine.on_worker_message(0, WaitQuery(0)) == [ToWorker(0, WaitAnswer(0, []))]


@pytest.mark.parametrize(
    "message",
    [Push(7, 0, 1.0, b"\1", 0), Push(-1, 0, 1.0, b"\1", 0), NormsQuery(0)],
)
def test_unknown_shards_and_unexpected_payloads_are_protocol_errors(message):
    machine = make(owners=(0, 1))
    with pytest.raises(ProtocolError, match="worker/1"):
        machine.receive_buffer_for(1, message, 20)


@pytest.mark.parametrize("message", [Pull(1, [7], 1, [0]), Pull(1, [0], 1, []), Step(0, SGD[:1]), SaveNow(-5)])
def test_a_contradictory_message_is_a_protocol_error(message):
    machine = make(owners=(0, 1))
    pull(machine, 0)
    if isinstance(message, SaveNow):
        assert machine.on_worker_message(1, message) == []  # long saved
        return
    with pytest.raises(ProtocolError):
        machine.on_worker_message(1, message)
