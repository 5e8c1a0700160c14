"""Coded pushes: repeated ones have the same bytes, and sums are bitwise equal under faults."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from psctl.errors import ProtocolError
from psctl.ps.compression.error_feedback import Coder
from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.clock_ledger import StepOrder
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import Leads, Push, SharedRange, Values
from psctl.ps.outputs import ToServer, ToWorker
from psctl.ps.pieces import bytes_view, pieces
from psctl.types import Compression, Layout, ParameterInfo, Range, Shard
from tests.ps.world import World

CLOCKS = 5
KINDS = {
    "bf16": Compression("bf16"),
    "int8": Compression("int8"),
    "onebit": Compression("onebit"),
    "topk": Compression("topk", share=0.1),
    "skip": Compression("none", skip=0.5),
    "mixed": Compression("onebit", skip=0.25, significance=0.5),
}
SIZES = (3000, 40)
INFOS = tuple(ParameterInfo(f"p{n}", (size,), "float32", 0) for n, size in enumerate(SIZES))
SHARD = Shard(0, "float32", Range(0, sum(SIZES)))
HELD = pieces(Layout(INFOS, "", ()), [SHARD])[0]


@cache
def undisturbed(kind: str) -> torch.Tensor:
    world = World(0, 2, 2, CLOCKS, compression=KINDS[kind])
    world.run()
    return world.values()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_faults_and_moves_leave_coded_training_bitwise_equal(kind: str, seed: int) -> None:
    world = World(seed, 3, 2, CLOCKS, replicas=1, compression=KINDS[kind])
    for _ in range(4):
        world.run(steps=world.random.randrange(60))
        world.connect(world.random.randrange(2), world.random.randrange(3))
    world.add(7, [0, 1])
    world.run(until=lambda: world.caught_up(7))
    world.move(7)
    world.run(steps=world.random.randrange(100))
    world.kill(world.random.choice([0, 1, 2]))
    world.run()
    world.copies_agree()
    assert torch.equal(world.values(), undisturbed(kind))


@pytest.mark.parametrize("kind", ["bf16", "skip"])
def test_a_replaced_worker_replays_bitwise_without_error_feedback(kind: str) -> None:
    world = World(3, 2, 2, CLOCKS, compression=KINDS[kind])
    world.run(until=lambda: min(one.clock for one in world.workers.values()) >= 2)
    world.run(steps=30)
    world.replace(1)
    world.run()
    assert torch.equal(world.values(), undisturbed(kind))


def terms(kind: str, world: int, update: str = "worker", staleness: int | None = 0) -> Terms:
    layout = Layout(INFOS, "SGD" if update == "server" else "", ({"lr": 1.0},))
    return Terms(layout, world, update, 0, staleness, KINDS[kind])


def client(kind: str, rank: int, world: int) -> DenseClient:
    machine = DenseClient(terms(kind, world), [SHARD], [0], rank)
    machine.on_assignment(0, [0], [0])
    machine.on_server_message(0, Leads(0, [0]))
    machine.pull(0)
    values = Values(0, 0, bytes(2), 0, 0)
    machine.receive_buffer_for(0, values, 4 * SHARD.range.stop)
    machine.on_server_message(0, values, 4 * SHARD.range.stop)
    assert not machine.missing_shards(0)
    machine.copy_to_front()
    return machine


def server(kind: str, world: int, update: str = "worker", staleness: int | None = 0) -> DenseShard:
    machine = DenseShard(terms(kind, world, update, staleness), SHARD, HELD)
    machine.on_assignment(0, [0], [], lambda _: True)
    machine.start_values_buffer(0, 4 * SHARD.range.stop)[:] = bytes_view(torch.zeros(SHARD.range.stop))
    machine.on_start_values()
    return machine


def gradient(rank: int, clock: int = 0) -> torch.Tensor:
    return torch.randn(SHARD.range.stop, generator=torch.Generator().manual_seed(10 * clock + rank))


def pushed(machine: DenseClient, clock: int, values: torch.Tensor, present=(True, True)) -> list:
    machine.send_buffer(clock)["float32"].copy_(values)
    machine.send_buffers.encode(clock, 0, present)
    outs = machine.push(clock, 0, present, 1.0)
    machine.send_buffer(clock)["float32"].fill_(-9)  # gradients may go once they are coded
    return outs


def texts(outs: list) -> list:
    """Return a push and a copy of its bytes."""
    wanted = [one for one in outs if isinstance(one.message, Push)]
    return [(one.message, bytes(one.payload or b"")) for one in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_push_has_the_same_bytes_and_updates_the_residual_once(kind: str) -> None:
    machine = client(kind, 0, 1)
    first = texts(pushed(machine, 0, gradient(0)))
    left = {name: each.clone() for name, each in machine.send_buffers.residual.items()}
    assert sum(len(data) for _, data in first) < 4 * SHARD.range.stop
    for epoch in (1, 2):
        machine.on_server_disconnected(0)
        assert texts(machine.on_server_message(0, Leads(epoch, [0]))) == first
    assert all(torch.equal(left[name], each) for name, each in machine.send_buffers.residual.items())


def deliver(machine: DenseShard, rank: int, outs: list) -> list:
    answers = []
    for one in outs:
        size = len(one.payload or b"")
        if size:
            machine.push_buffer_for(rank, one.message, size)[:] = one.payload
        answers += machine.on_push(rank, one.message, size)
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_adds_decoded_pushes_in_rank_order(kind: str) -> None:
    machine, workers = server(kind, 3), [client(kind, rank, 3) for rank in range(3)]
    expected = torch.zeros(SHARD.range.stop)
    coder = Coder(KINDS[kind], torch.float32)
    outs = [pushed(each, 0, gradient(rank), (True, rank != 1)) for rank, each in enumerate(workers)]
    for rank, each in enumerate(workers):
        coder.add(each.send_buffers.sent_bytes(0, 0).tensor, HELD, [1, int(rank != 1)], expected, 1.0)
    for rank in (2, 0, 1):  # rank 2's is staged
        deliver(machine, rank, outs[rank])
    machine.on_step_order(0, StepOrder([], None, False))
    assert machine.version == 1
    got, expected = machine.state.values, expected / 3
    assert torch.equal(got, expected.to(torch.bfloat16).float() if kind == "bf16" else expected)


def test_transferred_pushes_stay_coded() -> None:
    old, new, worker = server("int8", 2), server("int8", 2), client("int8", 1, 2)
    deliver(old, 1, pushed(worker, 0, gradient(1)))  # staged: rank 0's is missing
    head, data = old.staging.staged_state()
    assert len(data) == len(worker.send_buffers.sent_bytes(0, 0).bytes)
    new.staging.restore_staged(head, data)
    zero = pushed(client("int8", 0, 2), 0, gradient(0))
    for machine in (old, new):
        deliver(machine, 0, zero)
        machine.on_step_order(0, StepOrder([], None, False))
    assert torch.equal(old.state.values, new.state.values)


def test_a_coded_push_is_read_in_shared_memory() -> None:
    sent, shared = server("onebit", 1), server("onebit", 1)
    worker = client("onebit", 0, 1)
    outs = pushed(worker, 0, gradient(0))
    deliver(sent, 0, outs)
    size = len(worker.send_buffers.sent_bytes(0, 0).bytes)
    head = Push(0, 0, 1.0, b"\1\1", 0, SharedRange(0, 0, size))
    shared.on_push(0, head, 0, worker.send_buffers.sent_bytes(0, 0).bytes)
    for machine in (sent, shared):
        machine.on_step_order(0, StepOrder([], None, False))
    assert torch.equal(sent.state.values, shared.state.values)
    assert sent.state.values.any()


def test_under_asp_each_coded_push_is_one_step() -> None:
    machine, worker = server("topk", 1, "server", None), client("topk", 0, 1)
    outs = pushed(worker, 0, gradient(0))
    expected = torch.zeros(SHARD.range.stop)
    Coder(KINDS["topk"], torch.float32).add(worker.send_buffers.sent_bytes(0, 0).tensor, HELD, [1, 1], expected, 1.0)
    deliver(machine, 0, outs)
    machine.on_step_order(0, StepOrder([{"lr": 1.0}], None, False, 0))
    torch.testing.assert_close(machine.state.values, -expected)


def test_sums_are_sent_to_stepping_workers_in_16_bits_rounded_once() -> None:
    machine, worker = server("bf16", 1), client("bf16", 0, 1)
    outputs = deliver(machine, 0, pushed(worker, 0, gradient(0)))
    answer = [one for one in outputs if isinstance(one, ToWorker) and isinstance(one.message, Values)]
    assert [len(one.payload) for one in answer] == [2 * SHARD.range.stop]
    worker.set_waiting([0], True)  # even so they land in the back
    worker.receive_buffer_for(0, answer[0].message, len(answer[0].payload))[:] = answer[0].payload
    worker.on_server_message(0, answer[0].message, len(answer[0].payload))
    assert not worker.missing_shards(1)
    worker.copy_to_front()
    assert torch.equal(worker.front["float32"], gradient(0).to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(1 << 20), "push of 1048576 bytes where"),
        (b"\7" * 40, "no code of its gradients"),
        (b"", "no code of its gradients"),
    ],
)
def test_an_invalid_code_is_a_protocol_error_and_changes_no_state(data: bytes, reason: str) -> None:
    machine, worker = server("onebit", 1), client("onebit", 0, 1)
    right = pushed(worker, 0, gradient(0))
    head = Push(0, 0, 1.0, b"\1\1", 0)
    with pytest.raises(ProtocolError, match=reason):
        deliver(machine, 0, [ToServer(0, head, memoryview(data))])
    undisturbed = server("onebit", 1)
    for one in (machine, undisturbed):
        deliver(one, 0, right)  # the right one is still taken
        one.on_step_order(0, StepOrder([], None, False))
    assert torch.equal(machine.state.values, undisturbed.state.values)
    assert machine.state.values.any()
