"""One shard: equal bytes in every order of arrival, old pushes acknowledged and dropped, no torn reads."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.ps.dense.clock_ledger import StepOrder
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import NormsAnswer, Pull, Push, Pushed, PushStaged, Values
from psctl.ps.outputs import Snapshot, ToWorker
from psctl.ps.pieces import bytes_view, pieces
from psctl.types import Layout, ParameterInfo, Range, Shard
from tests.hypothesis_profile import examples

GROUPS = [{"lr": 0.1, "momentum": 0.9}]


def make(world=3, size=70, update="server", optimizer="SGD", staleness=0, started=True) -> DenseShard:
    infos = (ParameterInfo("a", (size - 20,), "float32", 0), ParameterInfo("b", (20,), "float32", 0))
    layout = Layout(infos, optimizer if update == "server" else "", tuple(GROUPS))
    shard = Shard(0, "float32", Range(0, size))
    machine = DenseShard(Terms(layout, world, update, 0, staleness), shard, pieces(layout, [shard])[0])
    machine.on_assignment(0, [0], [], lambda server: True)
    if started:
        values = torch.ones(size)
        machine.start_values_buffer(0, 4 * size)[:] = bytes_view(values)
        machine.on_start_values()
    return machine


def gradient(rank: int, clock: int, size: int = 70) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(10 * clock + rank))


def push(machine, rank, clock, present=b"\1\1", landed=None, weight=1.0, size=70, data=None):
    message = Push(0, clock, weight, present, clock if landed is None else landed)
    view = bytes_view(gradient(rank, clock, size) if data is None else data) if any(present) else memoryview(b"")
    place = machine.push_buffer_for(rank, message, len(view)) if len(view) else None
    if place is not None:
        place[:] = view
    return machine.on_push(rank, message, len(view))


def order(machine, clock, scale=None, save=False):
    return machine.on_step_order(clock, StepOrder(GROUPS, scale, save))


def read(outputs, rank, size=70) -> torch.Tensor:
    """Return the values that were sent to a rank."""
    found = [one for one in outputs if isinstance(one, ToWorker) and one.rank == rank]
    data = [one.payload for one in found if isinstance(one.message, Values)]
    return torch.frombuffer(bytearray(data[-1]), dtype=torch.float32) if data else torch.zeros(size)


def ask(machine, rank, clock, staleness=0):
    return machine.on_pull(rank, Pull(clock, [0], max(0, clock - staleness), [-1]))


def pull(machine, clock, world=3):
    """Pull for every rank, as workers do before a step."""
    return [output for rank in range(world) for output in ask(machine, rank, clock)]


EVENTS = [("push", 0), ("push", 1), ("push", 2), ("order", 0)]


def outcome(sequence) -> torch.Tensor:
    machine = make()
    pull(machine, 0)
    for what, rank in sequence:
        if what == "push":
            push(machine, rank, 0)
        else:
            order(machine, 0)
    return read(ask(machine, 0, 1), 0)


def test_every_order_of_arrival_gives_bitwise_equal_values():
    found = [outcome(sequence) for sequence in permutations(EVENTS)]
    assert all(torch.equal(found[0], other) for other in found)
    expected = torch.ones(70) - 0.1 * ((gradient(0, 0) + gradient(1, 0)) + gradient(2, 0)) / 3
    torch.testing.assert_close(found[0], expected)


@settings(max_examples=examples(60))
@given(st.data())
def test_duplicates_and_old_clocks_are_acknowledged_and_change_no_value(data):
    machine, clean = make(), make()
    for clock in range(3):
        for one in (machine, clean):
            pull(one, clock)
        for what, rank in EVENTS:
            push(clean, rank, clock) if what == "push" else order(clean, clock)
        events = data.draw(st.permutations(EVENTS))
        done = []
        for what, rank in events:
            if what == "push":
                push(machine, rank, clock)
                done.append(rank)
            else:
                order(machine, clock)
            for again in data.draw(st.lists(st.sampled_from(done), max_size=2)) if done else []:
                old = data.draw(st.integers(0, clock))
                garbage = torch.full((70,), 1e9)
                assert ToWorker(again, PushStaged(0, old)) in push(machine, again, old, data=garbage)
    assert torch.equal(read(ask(machine, 0, 3), 0), read(ask(clean, 0, 3), 0))


def test_an_early_push_is_staged_until_rank_0_has_pushed():
    machine = make()
    pull(machine, 0)
    order(machine, 0)
    assert push(machine, 2, 0) == [ToWorker(2, PushStaged(0, 0))]
    assert push(machine, 1, 0) == [ToWorker(1, PushStaged(0, 0))]
    assert machine.version == 0
    assert push(machine, 0, 0) == [ToWorker(0, PushStaged(0, 0)), *(ToWorker(rank, Pushed(0, 0)) for rank in range(3))]
    assert machine.version == 1


def test_a_clock_is_applied_only_after_its_order():
    machine = make(world=1)
    ask(machine, 0, 0)
    push(machine, 0, 0)
    assert machine.version == 0
    assert ask(machine, 0, 1) == []  # not yet
    answered = order(machine, 0)
    assert machine.version == 1
    assert [type(output.message) for output in answered] == [Values]


def test_a_pull_is_answered_with_a_version_at_most_s_old():
    machine = make(staleness=2)
    assert read(ask(machine, 1, 2, staleness=2), 1).eq(1).all()
    assert ask(machine, 1, 3, staleness=2) == []
    assert machine.missing_ranks(3) == [0, 1, 2]


def test_missing_pushes_are_named_by_rank():
    machine = make()
    pull(machine, 0)
    push(machine, 1, 0)
    assert machine.missing_ranks(1) == [0, 2]
    assert machine.missing_ranks(0) == []


def test_an_absent_gradient_counts_as_zero_for_any_bytes():
    machine = make(world=2, update="worker")
    pull(machine, 0, 2)
    broken = gradient(0, 0)
    broken[50:] = float("nan")
    push(machine, 0, 0, present=b"\1\0", data=broken)
    push(machine, 1, 0)
    order(machine, 0)
    found = read(ask(machine, 0, 1), 0)
    assert torch.equal(found[:50], (gradient(0, 0)[:50] + gradient(1, 0)[:50]) / 2)
    assert torch.equal(found[50:], gradient(1, 0)[50:] / 2)


def test_a_shard_without_gradients_sends_no_bytes():
    machine = make(world=2, update="worker")
    pull(machine, 0, 2)
    push(machine, 0, 0, present=b"\0\0")
    push(machine, 1, 0, present=b"\0\0")
    order(machine, 0)
    (answer,) = ask(machine, 1, 1)
    assert answer.message == Values(0, 1, b"\0\0", 1, 1)
    assert read([answer], 1).eq(0).all()


def test_norms_are_of_the_mean_gradient_and_none_without_a_gradient():
    machine = make(world=2)
    pull(machine, 0, 2)
    push(machine, 0, 0, present=b"\1\0")
    assert machine.on_norms_query(1, 0) == []
    (answer,) = push(machine, 1, 0, present=b"\1\0")[1:]
    mean = (gradient(0, 0) + gradient(1, 0))[:50] / 2
    assert answer == ToWorker(1, NormsAnswer(0, 0, [float(mean.double().square().sum()), None]))
    assert [output.rank for output in machine.on_norms_query(0, 0)] == [0]


def test_the_next_step_does_not_write_values_in_transmission():
    machine = make(world=1)
    on_its_way = ask(machine, 0, 0)
    push(machine, 0, 0, landed=-1)  # the worker does not hold version 0 yet
    order(machine, 0)
    assert machine.version == 1
    assert read(on_its_way, 0).eq(1).all()
    assert not read(ask(machine, 0, 1), 0).eq(1).all()


def test_landed_values_are_updated_in_place():
    machine = make(world=1)
    before = machine.state.values.data_ptr()
    ask(machine, 0, 0)
    push(machine, 0, 0, landed=0)
    order(machine, 0)
    assert machine.state.values.data_ptr() == before


def test_under_update_worker_buffers_rotate_without_a_copy():
    machine, seen = make(world=2, update="worker"), set()
    for clock in range(8):
        pull(machine, clock, 2)
        push(machine, 0, clock)
        push(machine, 1, clock)
        order(machine, clock)
        seen.add(machine.state.values.data_ptr())
    assert len(seen) <= 3
    assert len(machine.state._free) <= 3


def test_a_large_shard_is_pushed_and_answered_in_one_message():
    size = (2 << 20) + 33
    machine = make(world=1, size=size, update="worker")
    ask(machine, 0, 0)
    push(machine, 0, 0, size=size)
    order(machine, 0)
    answer = ask(machine, 0, 1)
    assert [type(output.message) for output in answer] == [Values]
    assert torch.equal(read(answer, 0, size), gradient(0, 0, size))


def test_an_interrupted_push_is_received_from_the_start():
    machine = make(world=1, update="worker")
    ask(machine, 0, 0)
    machine.push_buffer_for(0, Push(0, 0, 1.0, b"\1\1", 0), 280)[:200] = bytes(200)
    machine.on_worker_disconnected(0)
    ask(machine, 0, 0)
    push(machine, 0, 0)
    order(machine, 0)
    assert torch.equal(read(ask(machine, 0, 1), 0), gradient(0, 0))


def test_a_saved_step_is_a_copy_that_later_steps_do_not_change():
    machine = make(world=1)
    ask(machine, 0, 0)
    push(machine, 0, 0)
    (snapshot,) = [output for output in order(machine, 0, save=True) if isinstance(output, Snapshot)]
    assert (snapshot.step, snapshot.shard) == (1, 0)
    saved = {copied.slice.name: bytes(copied.data) for copied in snapshot.copied}
    assert set(saved) == {"param/a", "param/b", "optim/a/momentum_buffer", "optim/b/momentum_buffer"}
    ask(machine, 0, 1)
    push(machine, 0, 1)
    order(machine, 1)
    assert {copied.slice.name: bytes(copied.data) for copied in snapshot.copied} == saved


@pytest.mark.parametrize(
    ("message", "size", "reason"),
    [
        (Push(0, 0, 1.0, b"\1\1", 0), 284, "284 bytes where 280 belong"),
        (Push(0, 0, 1.0, b"\1", 0), 280, "push for 1 pieces where 2 are"),
        (Push(0, 0, 1.0, b"\1\2", 0), 280, "push for 2 pieces"),
        (Push(0, 0, float("nan"), b"\1\1", 0), 280, "weight nan"),
        (Push(0, 0, -1.0, b"\1\1", 0), 280, "weight -1"),
        (Push(0, 0, 1.0, b"\1\1", 7), 280, "claims version 7"),
        (Push(0, 0, 1.0, b"\0\0", 0), 280, "280 bytes where 0 belong"),
    ],
)
def test_an_invalid_push_is_a_protocol_error_and_changes_no_state(message, size, reason):
    machine = make(world=2)
    pull(machine, 0, 2)
    push(machine, 0, 0)
    with pytest.raises(ProtocolError, match=reason):
        machine.push_buffer_for(1, message, size)
    assert machine.push_buffer_for(1, Push(0, 1, 1.0, b"\1\1", 0), 280) is None  # it skips a clock: it will come again
    push(machine, 1, 0)
    order(machine, 0)
    clean = make(world=2)
    pull(clean, 0, 2)
    for rank in range(2):
        push(clean, rank, 0)
    order(clean, 0)
    assert torch.equal(read(ask(machine, 0, 1), 0), read(ask(clean, 0, 1), 0))


def test_start_values_with_dropped_bytes_do_not_count():
    machine = make(started=False)
    machine.on_assignment(1, [1], [], lambda server: False)
    assert not machine.leads
    assert machine.start_values_buffer(0, 280) is None
    machine.on_assignment(2, [0], [], lambda server: False)  # it leads before the last of the dropped bytes are here
    assert machine.leads
    assert machine.on_start_values() == []
    assert machine.version is None
    machine.start_values_buffer(0, 280)[:] = bytes_view(torch.ones(70))
    machine.on_start_values()
    assert machine.version == 0


def test_start_values_are_accepted_once_and_from_rank_0():
    machine = make(started=False)
    with pytest.raises(ProtocolError, match="worker/1, shard 0: sent start values"):
        machine.start_values_buffer(1, 280)
    with pytest.raises(ProtocolError, match="start values"):
        machine.start_values_buffer(0, 284)
    with pytest.raises(ProtocolError, match="before there are start values"):
        machine.push_buffer_for(0, Push(0, 0, 1.0, b"\1\1", -1), 280)
    assert ask(machine, 2, 0) == []
    machine.start_values_buffer(0, 280)[:] = bytes_view(torch.ones(70))
    assert [output.rank for output in machine.on_start_values()] == [2]
    assert machine.start_values_buffer(0, 280) is None  # sent again after a broken connection


def test_under_update_worker_a_repeated_push_is_answered_with_its_sum_again():
    machine = make(world=2, update="worker")
    pull(machine, 0, 2)
    assert push(machine, 1, 0) == []
    machine.on_worker_disconnected(1)  # rank 1 connects again, and repeats its push
    assert push(machine, 1, 0) == []
    mean = (gradient(0, 0) + gradient(1, 0)) / 2
    answers = push(machine, 0, 0)
    assert [(one.rank, one.message) for one in answers] == [(rank, Values(0, 1, b"\1\1", 1, 1)) for rank in (0, 1)]
    assert all(torch.equal(read(answers, rank), mean) for rank in (0, 1))
    machine.on_worker_disconnected(1)
    assert torch.equal(read(push(machine, 1, 0), 1), mean)
    assert push(machine, 0, 1) == []  # not by what stood there before
