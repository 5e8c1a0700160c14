"""The worker's state machine: alternating buffers, values that change only in waits, and protocol errors."""

from __future__ import annotations

import pytest
import torch

from psctl.errors import ProtocolError
from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import Leads, NormsAnswer, Pull, Push, Pushed, Values
from psctl.ps.outputs import ToServer
from psctl.ps.pieces import bytes_view
from psctl.types import Layout, ParameterInfo, Range, Shard

LAYOUT = Layout(
    (
        ParameterInfo("a", (4,), "float32", 0),
        ParameterInfo("frozen", (9,), "float32", 0, trainable=False),
        ParameterInfo("b", (5,), "float32", 0),
    ),
    "SGD",
    ({"lr": 0.1},),
)
SHARDS = [Shard(0, "float32", Range(0, 6)), Shard(1, "float32", Range(6, 9))]  # b is cut: pieces a, b | b


def make(base=0, staleness=0) -> DenseClient:
    client = DenseClient(Terms(LAYOUT, 2, "server", base, staleness), SHARDS, [0, 1], 1)
    for shard in (0, 1):
        client.on_server_message(shard, Leads(0, [shard]))
    return client


def land(client: DenseClient, shard: int, version: int, value: float, present=None) -> None:
    asked = client._received.each[shard].asked
    head = Values(shard, version, present or b"\1" * len(client.held[shard]), asked, version)
    size = 4 * len(SHARDS[shard].range)
    client.receive_buffer_for(shard, head, size)[:] = bytes_view(torch.full((size // 4,), value))
    client.on_server_message(shard, head, size)


def started() -> DenseClient:
    client = make()
    client.pull(0)
    for shard in (0, 1):
        land(client, shard, 0, 1.0)
    client.copy_to_front()
    return client


def test_a_pull_requests_the_shards_of_each_server_first_layers_first():
    assert make().pull(0) == [ToServer(0, Pull(0, [0], 0, [-1])), ToServer(1, Pull(0, [1], 0, [-1]))]


def test_values_received_before_the_wait_stay_in_the_back_buffer():
    client = started()
    client.pull(1)
    land(client, 0, 1, 2.0)
    assert client.front["float32"].eq(1).all()
    assert client.missing_shards(1) == [1]
    client.copy_to_front([0])
    assert client.front["float32"].tolist() == [2.0] * 6 + [1.0] * 3


def test_values_received_during_the_wait_are_written_to_the_front():
    client = started()
    client.pull(1)
    client.set_waiting([1], True)
    land(client, 1, 1, 3.0)
    assert client.front["float32"].tolist() == [1.0] * 6 + [3.0] * 3
    client.set_waiting([1], False)


def test_a_wait_that_begins_during_a_transfer_does_not_tear_values():
    client = started()
    client.pull(1)
    head = Values(0, 1, b"\1\1", 1, 1)
    place = client.receive_buffer_for(0, head, 24)
    place[:8] = bytes_view(torch.full((2,), 5.0))
    client.set_waiting([0], True)
    place[8:] = bytes_view(torch.full((4,), 5.0))
    assert client.front["float32"].eq(1).all()
    client.on_server_message(0, head, 24)
    client.copy_to_front([0])
    assert client.front["float32"][:6].eq(5).all()


def test_a_push_of_any_size_is_sent_from_the_send_buffer_with_the_landed_version():
    size = (5 << 20) + 3
    layout = Layout((ParameterInfo("a", (size,), "float32", 0),), "SGD", ({"lr": 0.1},))
    client = DenseClient(Terms(layout, 1, "server"), [Shard(0, "float32", Range(0, size))], [0], 0)
    client.on_server_message(0, Leads(0, [0]))
    client.pull(0)
    head = Values(0, 0, b"\1", 0, 0)
    client.receive_buffer_for(0, head, 4 * size)
    client.on_server_message(0, head, 4 * size)
    (sent,) = client.push(0, 0, [True], 1.0)
    assert (sent.message, len(sent.payload)) == (Push(0, 0, 1.0, b"\1", 0), 4 * size)
    client.send_buffer(0)["float32"].fill_(7.0)
    assert torch.frombuffer(sent.payload, dtype=torch.float32).eq(7).all()  # its own memory, no copy


def test_a_push_without_gradients_has_no_payload():
    (only,) = started().push(0, 0, [False, False], 0.0)
    assert only == ToServer(0, Push(0, 0, 0.0, b"\0\0", 0))


def test_a_send_buffer_is_reused_only_after_its_pushes_are_acknowledged():
    client = started()
    client.push(0, 0, [True, True], 1.0)
    client.push(0, 1, [True], 1.0)
    assert client.send_buffer(0) is client.send_buffer(2)
    assert client.send_buffer(0) is not client.send_buffer(1)
    assert client.unacknowledged_servers(-1) == set()
    assert client.unacknowledged_servers(0) == {0, 1}
    client.on_server_message(1, Pushed(1, 0))
    assert client.unacknowledged_servers(0) == {0}


def test_a_push_before_its_values_is_a_caller_error():
    client = started()
    client.push(0, 0, [True, True], 1.0)
    with pytest.raises(AssertionError, match="never pulled"):
        client.missing_shards(1, [0])
    client.pull(1)
    with pytest.raises(AssertionError, match="before its values have landed"):
        client.push(1, 0, [True, True], 1.0)


def test_under_staleness_a_push_may_run_ahead_by_s_clocks():
    client = DenseClient(Terms(LAYOUT, 2, "server", 0, 1), SHARDS, [0, 0], 1)
    client.on_server_message(0, Leads(0, [0, 1]))
    client.pull(0)
    for shard in (0, 1):
        size = 4 * len(SHARDS[shard].range)
        head = Values(shard, 0, b"\1" * len(client.held[shard]), 0, 0)
        client.receive_buffer_for(0, head, size)[:] = bytes(size)
        client.on_server_message(0, head, size)
    client.copy_to_front()
    client.push(0, 0, [True, True], 1.0)
    assert client.pull(1) == [ToServer(0, Pull(1, [0, 1], 0, [0, 0]))]
    client.push(1, 0, [True, True], 1.0)
    assert client.missing_shards(1) == []  # version 0 will do
    assert client.pull(1, exact=True) == []
    assert client.missing_shards(1, exact=True) == [0, 1]
    with pytest.raises(AssertionError, match="before its values"):
        client.push(2, 0, [True, True], 1.0)


def test_presence_combines_the_pieces_of_a_parameter_and_excludes_frozen_ones():
    client = started()
    client.pull(1)
    land(client, 0, 1, 2.0, present=b"\0\1")
    land(client, 1, 1, 2.0, present=b"\1")
    assert client.presence(0) == [False, True]


def test_norms_are_summed_over_the_pieces_of_a_parameter_in_order():
    client = started()
    client.on_server_message(1, NormsAnswer(1, 0, [1e-20]))
    assert client.squared_norms(0) is None
    assert client.servers_without_norms(0) == {0}
    client.on_server_message(0, NormsAnswer(0, 0, [None, 1.0]))
    assert client.squared_norms(0) == {2: 1.0 + 1e-20}


@pytest.mark.parametrize(
    ("server", "message", "size", "reason"),
    [
        (1, Values(1, 1, b"\1", 9, 1), 12, "version 1, which was not requested"),
        (1, Values(9, 1, b"\1", 1, 1), 12, "there are 2 shards"),
        (1, Values(1, 1, b"\1", 1, 1), 16, "16 bytes where 12 belong"),
        (1, Values(1, 0, b"\1", 1, 0), 12, "version 0, which was not requested"),
        (1, Values(1, 1, b"\1\1", 1, 1), 12, "values of 2 pieces"),
        (1, Pushed(1, 0), 12, "with a payload"),
    ],
)
def test_a_server_protocol_error_changes_no_state(server, message, size, reason):
    client = started()
    client.pull(1)
    with pytest.raises(ProtocolError, match=reason):
        client.receive_buffer_for(server, message, size)
    land(client, 1, 1, 4.0)
    client.copy_to_front()
    assert client.front["float32"][6:].eq(4).all()


def test_under_update_worker_a_push_requests_its_sum_and_a_new_connection_repeats_the_request():
    client = DenseClient(Terms(LAYOUT, 2, "worker"), SHARDS, [0, 1], 1)
    for shard in (0, 1):
        client.on_server_message(shard, Leads(0, [shard]))
    assert client.pull(0) == [ToServer(0, Pull(0, [0], 0, [-1])), ToServer(1, Pull(0, [1], 0, [-1]))]
    for shard in (0, 1):
        land(client, shard, 0, 1.0)
    client.copy_to_front()
    (sent,) = client.push(0, 1, [True], 1.0)
    assert sent.message == Push(1, 0, 1.0, b"\1", 0)
    assert client.pull(1) == []  # shard 0's push will ask
    client.on_server_message(1, Pushed(1, 0))  # which does not contain the sum
    client.on_server_disconnected(1)
    assert client.on_server_message(1, Leads(0, [1])) == [ToServer(1, Pull(1, [1], 1, [0]))]
    land(client, 1, 1, 3.0)
    assert client.missing_shards(1) == [0]


def test_a_worker_in_a_host_sum_sends_its_own_pull():
    client = DenseClient(Terms(LAYOUT, 2, "worker", hosts=((0, 1),)), SHARDS, [0, 1], 1)
    for shard in (0, 1):
        client.on_server_message(shard, Leads(0, [shard]))
    client.pull(0)
    for shard in (0, 1):
        land(client, shard, 0, 1.0)
    client.copy_to_front()
    assert client.pull(1) == [ToServer(0, Pull(1, [0], 1, [0])), ToServer(1, Pull(1, [1], 1, [0]))]


@pytest.mark.parametrize("ending", ["its bytes end", "its connection ends"])
def test_values_of_a_new_owner_wait_for_the_last_bytes_of_the_former_owner(ending):
    """A shard moves while its values still arrive: two readers never write one buffer at a time."""
    client = make(staleness=2)
    client.pull(0)
    for shard in (0, 1):
        land(client, shard, 0, 1.0)
    client.copy_to_front()
    client.pull(1)
    old, new = Values(0, 1, b"\1\1", 1, 1), Values(0, 2, b"\1\1", 1, 2)
    former = client.receive_buffer_for(0, old, 24)
    assert former is not None
    client.on_assignment(1, [1, 1], [0, 1])
    assert client.on_server_message(1, Leads(1, [0, 1])) == [ToServer(1, Pull(1, [0, 1], 0, [0, 0]))]
    assert client.receive_buffer_for(1, new, 24) is None
    assert client.on_server_message(1, new, 24) == []
    former[:] = bytes_view(torch.full((6,), 7.0))
    outputs = client.on_server_message(0, old, 24) if "bytes" in ending else client.on_server_disconnected(0)
    assert outputs == [ToServer(1, Pull(1, [0], 0, [0]))]
    client.receive_buffer_for(1, new, 24)[:] = bytes_view(torch.full((6,), 5.0))
    client.on_server_message(1, new, 24)
    client.copy_to_front()
    assert client.front["float32"][:6].eq(5).all()
