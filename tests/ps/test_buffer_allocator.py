"""Shared buffers: sums are bitwise equal, readers change no bytes, and no buffer is written while it is read."""

from __future__ import annotations

import itertools

import pytest
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.buffer_allocator import BufferAllocator
from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.clock_ledger import Membership, StepOrder
from psctl.ps.dense.server.dense_shard import DenseShard
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import Leads, Pull, Push, SharedRange, Values
from psctl.ps.outputs import ToWorker
from psctl.ps.pieces import bytes_view, pieces
from psctl.types import Layout, ParameterInfo, Range, Shard

SIZE = 70
GROUPS = [{"lr": 0.1, "momentum": 0.9}]
INFOS = (ParameterInfo("a", (50,), "float32", 0), ParameterInfo("b", (20,), "float32", 0))
SHARD = Shard(0, "float32", Range(0, SIZE))


class SharedList(BufferAllocator):
    """Shares every buffer with the processes in `near`; a place has the buffer's number."""

    def __init__(self, near=()) -> None:
        self.near, self.made = set(near), []

    def zeros(self, count, dtype):
        self.made.append(torch.zeros(count, dtype=dtype))
        return self.made[-1]

    def place_for(self, rank, tensor):
        if rank not in self.near:
            return None
        for number, whole in enumerate(self.made):
            offset = tensor.data_ptr() - whole.data_ptr()
            if 0 <= offset < whole.numel() * 4:
                return SharedRange(number, offset, tensor.numel() * 4)
        return None

    def read(self, at: SharedRange) -> memoryview:
        return bytes_view(self.made[at.segment])[at.offset : at.offset + at.size]


def make(world=3, update="server", staleness=0, memory=None) -> DenseShard:
    layout = Layout(INFOS, "SGD" if update == "server" else "", tuple(GROUPS))
    terms = Terms(layout, world, update, 0, staleness)
    client = DenseShard(terms, SHARD, pieces(layout, [SHARD])[0], allocator=memory)
    client.on_assignment(0, [0], [], lambda server: True)
    client.start_values_buffer(0, 4 * SIZE)[:] = bytes_view(torch.ones(SIZE))
    client.on_start_values()
    return client


def gradient(rank: int, clock: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * clock + rank))


def send(client, rank, clock, data, present=b"\1\1", weight=1.0, landed=None):
    head = Push(0, clock, weight, present, clock if landed is None else landed)
    client.push_buffer_for(rank, head, 4 * SIZE)[:] = bytes_view(data)
    return client.on_push(rank, head, 4 * SIZE)


def share(client, rank, clock, data, present=b"\1\1", weight=1.0, landed=None, offset=0):
    at = SharedRange(0, offset, 4 * SIZE)
    head = Push(0, clock, weight, present, clock if landed is None else landed, at)
    return client.on_push(rank, head, 0, bytes_view(data))


def order(client, clock, scale=None):
    return client.on_step_order(clock, StepOrder(GROUPS, scale, False))


def ask(client, rank, clock, oldest=None, have=-1):
    return client.on_pull(rank, Pull(clock, [0], clock if oldest is None else oldest, [have]))


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize("kinds", list(itertools.product([send, share], repeat=3)))
@pytest.mark.parametrize(
    ("present", "weights"),
    [([b"\1\1"] * 3, [1.0] * 3), ([b"\1\1"] * 3, [0.5, 1.0, 1.5]), ([b"\1\0", b"\0\1", b"\1\1"], [1.0] * 3)],
    ids=["whole", "weighted", "partial"],
)
def test_shared_and_sent_pushes_give_equal_results_and_shared_bytes_stay_unchanged(update, kinds, present, weights):
    expected = None
    for turn in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        for how in (kinds, [send] * 3):
            client = make(update=update)
            for clock in range(2):
                data = [gradient(rank, clock) for rank in range(3)]
                for rank, there in enumerate(present):
                    data[rank][:50].mul_(float("nan") if not there[0] else 1.0)
                before = [one.clone() for one in data]
                for rank in range(3):
                    ask(client, rank, clock)
                for rank in turn:
                    how[rank](client, rank, clock, data[rank], present[rank], weights[rank])
                order(client, clock, scale=0.5)
                for rank in range(3):
                    if how[rank] is share:
                        assert torch.equal(bytes_of(before[rank]), bytes_of(data[rank])), "a reader wrote to it"
                    data[rank].fill_(float("nan"))  # acknowledged: the worker may reuse it
            found = client.state.values.clone()
            assert found.isfinite().all()
            expected = found if expected is None else expected
            assert torch.equal(expected, found)


def bytes_of(tensor):
    return tensor.view(torch.uint8)


def test_one_worker_and_asp_step_from_shared_pushes():
    for staleness in (0, None):
        shared, sent = make(world=1, staleness=staleness), make(world=1, staleness=staleness)
        for clock in range(3):
            data = gradient(0, clock)
            for client, how in ((shared, share), (sent, send)):
                client.on_step_order(clock, StepOrder(GROUPS, 0.5, False, 0 if staleness is None else -1))
                how(client, 0, clock, data.clone())
            assert torch.equal(data, gradient(0, clock))
        assert shared.version == 3
        assert torch.equal(shared.state.values, sent.state.values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offset": 2}, "where 280 bytes"),
        ({"data": torch.zeros(SIZE + 1)}, "where 280 bytes"),
        ({"data": torch.zeros(0)}, "where 280 bytes"),
        ({"present": b"\0\0"}, "where 280 bytes"),
        ({"landed": 7}, "claims version 7"),
        ({"weight": float("inf")}, "weight inf"),
    ],
)
def test_an_invalid_shared_push_is_a_protocol_error_and_changes_no_state(change, reason):
    client = make(world=1)
    with pytest.raises(ProtocolError, match=reason):
        share(client, 0, 0, **{"data": gradient(0, 0), **change})
    assert share(client, 0, 0, gradient(0, 0)), "a correct one is still accepted"


def test_a_shared_push_with_a_payload_is_refused():
    client = make(world=1)
    with pytest.raises(ProtocolError, match="a payload and a place"):
        client.push_buffer_for(0, Push(0, 0, 1.0, b"\1\1", 0, SharedRange(0, 0, 4 * SIZE)), 4 * SIZE)


def test_an_old_or_early_shared_push_is_dropped():
    client = make(world=1)
    assert share(client, 0, 2, gradient(0, 2), landed=0) == [] or client.version == 0
    share(client, 0, 0, gradient(0, 0))
    order(client, 0)
    was = client.state.values.clone()
    share(client, 0, 0, torch.full((SIZE,), 1e6), landed=0)
    assert torch.equal(client.state.values, was)


# ---- values ----


def values_to(outputs, rank) -> list[Values]:
    return [
        one.message
        for one in outputs
        if isinstance(one, ToWorker) and one.rank == rank and isinstance(one.message, Values)
    ]


@pytest.mark.parametrize("update", ["server", "worker"])
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_shared_values_stay_unchanged_until_the_reader_reports_them_landed(update, staleness):
    if staleness is None and update == "worker":
        return  # asp steps on servers
    memory = SharedList(near=[0])
    client = make(world=1, update=update, staleness=staleness, memory=memory)
    reading: dict[int, tuple[SharedRange, bytes]] = {}
    landed = -1
    for clock in range(30):
        for message in values_to(ask(client, 0, clock, oldest=0, have=landed), 0):
            assert message.at is not None
            reading[message.version] = message.at, bytes(memory.read(message.at))
        for version, (at, was) in reading.items():
            assert bytes(memory.read(at)) == was, f"version {version} changed at clock {clock}"
        if clock % 3 == 2:
            landed = max(reading)
            reading = {version: one for version, one in reading.items() if version > landed}
        client.on_step_order(
            clock, StepOrder(GROUPS if update == "server" else [], None, False, 0 if staleness is None else -1)
        )
        share(client, 0, clock, gradient(0, clock), landed=landed)
        for version, (at, was) in reading.items():
            assert bytes(memory.read(at)) == was, f"version {version} changed in the step of clock {clock}"
    assert client.version == 30
    assert len(memory.made) <= 8, "buffers are used again"


def test_shared_values_of_a_disconnected_reader_stay_until_newer_ones_have_landed():
    memory = SharedList(near=[0])
    client = make(world=2, staleness=1, memory=memory)
    (message,) = values_to(ask(client, 0, 0), 0)
    was = bytes(memory.read(message.at))
    client.on_worker_disconnected(0)
    for clock in range(2):
        for rank in range(2):
            share(client, rank, clock, gradient(rank, clock), landed=-1)
        order(client, clock)
    assert client.version == 2
    assert bytes(memory.read(message.at)) == was
    landed = dict.fromkeys(range(2), -1)
    for clock in range(2, 8):
        for rank in range(2):
            found = values_to(ask(client, rank, clock), rank)
            landed[rank] = max([landed[rank], *(one.version for one in found)])
            share(client, rank, clock, gradient(rank, clock), landed=landed[rank])
        order(client, clock)
    assert len(memory.made) <= 4, "it has newer values, so its buffer is used again"


def test_a_removed_member_holds_no_buffer():
    memory = SharedList(near=[0, 1])
    client = make(world=2, memory=memory)
    for rank in range(2):
        ask(client, rank, 0)
    for rank in range(2):
        share(client, rank, 0, gradient(rank, 0), landed=-1)
    order(client, 0)
    client.set_members(Membership.initial(2, 0).changed(1, [1]))
    for clock in range(1, 8):
        ask(client, 1, clock)
        share(client, 1, clock, gradient(1, clock), landed=clock)
        order(client, clock)
    assert client.version == 8
    assert len(memory.made) <= 4


def test_a_worker_that_leaves_reads_its_last_values_while_the_others_step():
    memory = SharedList(near=[0, 1, 2])
    client = make(world=3, memory=memory)
    client.set_members(Membership.initial(3, 0).changed(1, [2]))
    for rank in range(3):
        ask(client, rank, 0)
        share(client, rank, 0, gradient(rank, 0), landed=0)
    order(client, 0)
    (message,) = values_to(ask(client, 0, 1), 0)
    was = bytes(memory.read(message.at))
    client.on_worker_disconnected(1)
    for clock in range(1, 8):
        ask(client, 2, clock)
        share(client, 2, clock, gradient(2, clock), landed=clock)
        order(client, clock)
        assert bytes(memory.read(message.at)) == was, f"they changed in the step of clock {clock}"
    made = len(memory.made)
    client.on_worker_disconnected(0)
    for clock in range(8, 16):
        ask(client, 2, clock)
        share(client, 2, clock, gradient(2, clock), landed=clock)
        order(client, clock)
    assert client.version == 16
    assert len(memory.made) == made


def test_workers_on_other_hosts_receive_payloads():
    client = make(world=2, memory=SharedList(near=[0]))
    (near,), (far,) = ask(client, 0, 0), ask(client, 1, 0)
    assert near.message.at is not None and near.payload is None
    assert far.message.at is None and len(far.payload) == 4 * SIZE


# ---- the worker's end ----


def worker(memory=None, staleness=0) -> DenseClient:
    layout = Layout(INFOS, "SGD", tuple(GROUPS))
    client = DenseClient(Terms(layout, 2, "server", 0, staleness), [SHARD], [0], 0, allocator=memory)
    client.on_server_message(0, Leads(0, [0]))
    return client


def land(client, version, value, clock) -> torch.Tensor:
    shared = torch.full((SIZE,), value)
    client.on_server_message(
        0, Values(0, version, b"\1\1", clock, version, SharedRange(0, 0, 4 * SIZE)), 0, bytes_view(shared)
    )
    return shared


def test_a_push_to_a_server_on_the_same_host_has_a_place():
    memory = SharedList(near=[0])
    client = worker(memory)
    client.pull(0)
    land(client, 0, 1.0, 0)
    client.copy_to_front()
    client.send_buffer(0)["float32"].fill_(3.0)
    (out,) = client.push(0, 0, [True, True], 1.0)
    assert out.payload is None and isinstance(out.message, Push) and out.message.at is not None
    assert torch.frombuffer(memory.read(out.message.at), dtype=torch.float32).eq(3).all()
    memory.near.clear()
    again = client.on_server_message(0, Leads(0, [0]))
    (sent,) = [one for one in again if isinstance(one.message, Push)]
    assert sent.message.at is None and len(sent.payload) == 4 * SIZE, "a new connection may lead to another host"


def test_a_push_without_gradients_has_no_place():
    client = worker(SharedList(near=[0]))
    client.pull(0)
    land(client, 0, 1.0, 0)
    (out,) = client.push(0, 0, [False, False], 1.0)
    assert out.message.at is None and out.payload is None


def test_shared_values_count_as_landed_after_the_copy_to_the_front():
    client = worker(staleness=1)
    client.pull(0)
    land(client, 0, 1.0, 0)
    assert client.front["float32"].eq(0).all()
    assert client.missing_shards(0) == []
    assert client.push(0, 0, [True, True], 1.0)[0].message.landed == -1, "its server must not change it"
    client.copy_to_front()
    assert client.front["float32"].eq(1).all()
    client.pull(1)
    shared = land(client, 1, 2.0, 1)
    assert client.push(1, 0, [True, True], 1.0)[0].message.landed == 0
    client.copy_to_front([0])
    shared.fill_(float("nan"))
    client.copy_to_front()
    assert client.front["float32"].eq(2).all(), "it was copied once"


def test_values_read_in_parts_count_as_landed_after_the_last_part():
    client, taken = worker(staleness=1), []

    def take(shard, values, present, clocks) -> bool:
        taken.append((shard, values.tolist(), present, clocks))
        return len(taken) > 1

    client.pull(0)
    land(client, 0, 1.0, 0)
    client.copy_to_front()
    client.set_value_sink(take)
    client.pull(1)
    land(client, 1, 2.0, 1)
    client.copy_to_front([0])
    assert client.push(0, 0, [True, True], 1.0)[0].message.landed == 0, "its server must not change it"
    client.copy_to_front([0])
    client.copy_to_front([0])
    assert taken == [(0, [2.0] * SIZE, b"\1\1", 1)] * 2, "and is not read again"
    assert client.push(1, 0, [True, True], 1.0)[0].message.landed == 1
    assert client.front["float32"].eq(1).all(), "the front stays as it is"


def test_sent_values_replace_shared_ones():
    client = worker(staleness=1)
    client.pull(0)
    land(client, 0, 1.0, 0)
    client.copy_to_front()
    client.pull(1)
    head = Values(0, 1, b"\1\1", 1, 1)
    client.receive_buffer_for(0, head, 4 * SIZE)[:] = bytes_view(torch.full((SIZE,), 5.0))
    client.on_server_message(0, head, 4 * SIZE)
    assert client.push(0, 0, [True, True], 1.0)[0].message.landed == 1
    client.copy_to_front()
    assert client.front["float32"].eq(5).all()


@pytest.mark.parametrize(("size", "offset"), [(SIZE + 1, 0), (SIZE - 1, 0), (0, 0), (SIZE, 2)])
def test_invalid_shared_values_are_a_protocol_error(size, offset):
    client = worker()
    client.pull(0)
    message = Values(0, 0, b"\1\1", 0, 0, SharedRange(0, offset, 4 * SIZE))
    with pytest.raises(ProtocolError, match="bytes at"):
        client.on_server_message(0, message, 0, bytes_view(torch.zeros(size)))
    with pytest.raises(ProtocolError, match="a payload and a place"):
        client.receive_buffer_for(0, message, 4 * SIZE)
