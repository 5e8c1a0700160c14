"""A server's machine: who ordered what, whose part of a checkpoint is whole, and who is waited for."""

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


def test_a_step_is_taken_when_all_pushes_and_all_orders_are_in_shard_by_shard():
    machine = make()
    pull(machine, 0)
    for rank in range(2):
        push(machine, rank, 0)
        push(machine, rank, 1)
    assert machine.on_worker_message(1, Step(0, SGD)) == []
    assert machine.version == 0
    told = machine.on_worker_message(0, Step(0, SGD))
    assert told == [ToWorker(rank, Pushed(shard, 0)) for shard in range(2) for rank in range(2)]
    assert machine.version == 1


def test_a_pull_that_waits_is_answered_by_the_message_that_completes_its_shard():
    machine = make()
    pull(machine, 0)
    for rank in range(2):
        machine.on_worker_message(rank, Step(0, SGD))
    push(machine, 1, 0)
    assert machine.on_worker_message(1, Pull(1, [0, 1], 1, [0, 0])) == []
    taken, acknowledged, answer = push(machine, 0, 0)
    assert taken == ToWorker(0, PushStaged(0, 0))
    assert acknowledged == ToWorker(0, Pushed(0, 0))  # rank 1 hears it by the values
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
def test_a_rank_that_differs_is_told_to_all_and_nothing_is_applied_any_more(theirs, reason, order):
    layout = Layout((ParameterInfo("a", (4,), "float32", 0),), "SGD", ({"lr": 0.1},))
    machine = DenseServer(Terms(layout, 2, "server", base=3), [SHARDS[0]], 0)
    machine.on_assignment(0, [[0]], [[]], [0])
    steps = {0: Step(3, [{"lr": 0.1}]), 1: theirs}
    assert machine.on_worker_message(order[0], steps[order[0]]) == []
    told = machine.on_worker_message(order[1], steps[order[1]])
    assert [(one.rank, one.message.reason) for one in told] == [(0, reason), (1, reason)]
    assert machine.on_worker_message(0, Step(4, [{"lr": 0.1}])) == []
    assert machine.on_worker_connected(1) == [ToWorker(1, Leads(0, [0])), told[1]]


def test_not_a_number_equals_itself_so_that_a_norm_that_overflowed_is_no_disagreement():
    machine = make()
    assert machine.on_worker_message(0, Step(0, SGD, math.nan)) == []
    assert machine.on_worker_message(1, Step(0, SGD, math.nan)) == []


def test_an_optimizer_that_fails_is_told_to_all_with_its_own_words():
    machine = make()
    pull(machine, 0)
    for rank in range(2):
        push(machine, rank, 0)
    bad = [{"lr": "much", "momentum": 0.9}, {"lr": 0.2}]
    machine.on_worker_message(0, Step(0, bad))
    told = machine.on_worker_message(1, Step(0, bad))
    assert isinstance(told[0].message, Refused)
    assert "SGD failed at clock 0: TypeError" in told[0].message.reason


def test_a_saved_step_is_handed_on_once_its_last_shard_has_reached_it():
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


def test_a_server_without_shards_has_its_empty_part_at_once():
    machine = make(owners=(1, 1))
    assert machine.on_worker_message(0, Step(0, SGD, save=True)) == []
    assert machine.on_worker_message(1, Step(0, SGD, save=True)) == [SaveSlices(1, [])]
    assert machine.on_worker_message(1, SaveNow(1)) == []
    assert machine.on_worker_message(1, SaveNow(2)) == [SaveSlices(2, [])]


def test_who_is_waited_for_is_named():
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
def test_an_unknown_shard_or_a_payload_where_none_belongs_is_an_error(message):
    machine = make(owners=(0, 1))
    with pytest.raises(ProtocolError, match="worker/1"):
        machine.receive_buffer_for(1, message, 20)


@pytest.mark.parametrize("message", [Pull(1, [7], 1, [0]), Pull(1, [0], 1, []), Step(0, SGD[:1]), SaveNow(-5)])
def test_a_message_that_cannot_be_meant_is_an_error(message):
    machine = make(owners=(0, 1))
    pull(machine, 0)
    if isinstance(message, SaveNow):
        assert machine.on_worker_message(1, message) == []  # long saved
        return
    with pytest.raises(ProtocolError):
        machine.on_worker_message(1, message)


def test_a_stranger_is_refused():
    with pytest.raises(ProtocolError, match="worker/2 is none of the job's 2 workers"):
        make().on_worker_connected(2)
