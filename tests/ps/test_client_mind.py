"""A worker's end: buffers by turns, values that change only in waits, and what breaks the protocol."""

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
    mind = DenseClient(Terms(LAYOUT, 2, "server", base, staleness), SHARDS, [0, 1], 1)
    for shard in (0, 1):
        mind.on_server_message(shard, Leads(0, [shard]))
    return mind


def land(mind: DenseClient, shard: int, version: int, value: float, present=None) -> None:
    asked = mind._received.each[shard].asked
    head = Values(shard, version, present or b"\1" * len(mind.held[shard]), asked, version)
    size = 4 * len(SHARDS[shard].range)
    mind.receive_buffer_for(shard, head, size)[:] = bytes_view(torch.full((size // 4,), value))
    mind.on_server_message(shard, head, size)


def started() -> DenseClient:
    mind = make()
    mind.pull(0)
    for shard in (0, 1):
        land(mind, shard, 0, 1.0)
    mind.copy_to_front()
    return mind


def test_a_pull_asks_each_server_for_its_shards_first_layers_first():
    assert make().pull(0) == [ToServer(0, Pull(0, [0], 0, [-1])), ToServer(1, Pull(0, [1], 0, [-1]))]


def test_values_that_arrive_before_the_wait_stay_in_the_back_until_they_are_shown():
    mind = started()
    mind.pull(1)
    land(mind, 0, 1, 2.0)
    assert mind.front["float32"].eq(1).all()
    assert mind.missing_shards(1) == [1]
    mind.copy_to_front([0])
    assert mind.front["float32"].tolist() == [2.0] * 6 + [1.0] * 3


def test_values_that_arrive_during_the_wait_land_in_place():
    mind = started()
    mind.pull(1)
    mind.set_waiting([1], True)
    land(mind, 1, 1, 3.0)
    assert mind.front["float32"].tolist() == [1.0] * 6 + [3.0] * 3
    mind.set_waiting([1], False)


def test_a_wait_that_begins_in_the_middle_of_a_landing_does_not_tear_it():
    mind = started()
    mind.pull(1)
    head = Values(0, 1, b"\1\1", 1, 1)
    place = mind.receive_buffer_for(0, head, 24)
    place[:8] = bytes_view(torch.full((2,), 5.0))
    mind.set_waiting([0], True)
    place[8:] = bytes_view(torch.full((4,), 5.0))
    assert mind.front["float32"].eq(1).all()
    mind.on_server_message(0, head, 24)
    mind.copy_to_front([0])
    assert mind.front["float32"][:6].eq(5).all()


def test_a_push_leaves_out_of_the_send_buffer_however_long_and_says_what_has_landed():
    size = (5 << 20) + 3
    layout = Layout((ParameterInfo("a", (size,), "float32", 0),), "SGD", ({"lr": 0.1},))
    mind = DenseClient(Terms(layout, 1, "server"), [Shard(0, "float32", Range(0, size))], [0], 0)
    mind.on_server_message(0, Leads(0, [0]))
    mind.pull(0)
    head = Values(0, 0, b"\1", 0, 0)
    mind.receive_buffer_for(0, head, 4 * size)
    mind.on_server_message(0, head, 4 * size)
    (sent,) = mind.push(0, 0, [True], 1.0)
    assert (sent.message, len(sent.payload)) == (Push(0, 0, 1.0, b"\1", 0), 4 * size)
    mind.send_buffer(0)["float32"].fill_(7.0)
    assert torch.frombuffer(sent.payload, dtype=torch.float32).eq(7).all()  # its own memory, no copy


def test_a_push_without_gradients_has_no_payload():
    (only,) = started().push(0, 0, [False, False], 0.0)
    assert only == ToServer(0, Push(0, 0, 0.0, b"\0\0", 0))


def test_a_buffer_is_given_out_again_only_when_its_pushes_are_acknowledged():
    mind = started()
    mind.push(0, 0, [True, True], 1.0)
    mind.push(0, 1, [True], 1.0)
    assert mind.send_buffer(0) is mind.send_buffer(2)
    assert mind.send_buffer(0) is not mind.send_buffer(1)
    assert mind.unacknowledged_servers(-1) == set()
    assert mind.unacknowledged_servers(0) == {0, 1}
    mind.on_server_message(1, Pushed(1, 0))
    assert mind.unacknowledged_servers(0) == {0}


def test_a_push_before_its_values_is_the_callers_error():
    mind = started()
    mind.push(0, 0, [True, True], 1.0)
    with pytest.raises(AssertionError, match="never pulled"):
        mind.missing_shards(1, [0])
    mind.pull(1)
    with pytest.raises(AssertionError, match="before its values have landed"):
        mind.push(1, 0, [True, True], 1.0)


@pytest.mark.parametrize("eager", [True, False])
def test_under_staleness_a_push_may_run_ahead_by_s_clocks(eager):
    mind = DenseClient(Terms(LAYOUT, 2, "server", 0, 1), SHARDS, [0, 0], 1, eager=eager)
    mind.on_server_message(0, Leads(0, [0, 1]))
    mind.pull(0)
    for shard in (0, 1):
        size = 4 * len(SHARDS[shard].range)
        head = Values(shard, 0, b"\1" * len(mind.held[shard]), 0, 0)
        mind.receive_buffer_for(0, head, size)[:] = bytes(size)
        mind.on_server_message(0, head, size)
    mind.copy_to_front()
    mind.push(0, 0, [True, True], 1.0)
    assert mind.pull(1) == ([ToServer(0, Pull(1, [0, 1], 0, [0, 0]))] if eager else [])
    mind.push(1, 0, [True, True], 1.0)
    assert mind.missing_shards(1) == []  # version 0 will do
    assert mind.pull(1, exact=True) == ([] if eager else [ToServer(0, Pull(1, [0, 1], 1, [0, 0]))])
    assert mind.missing_shards(1, exact=True) == [0, 1]
    with pytest.raises(AssertionError, match="before its values"):
        mind.push(2, 0, [True, True], 1.0)


def test_presence_joins_the_pieces_of_a_parameter_and_leaves_frozen_ones_out():
    mind = started()
    mind.pull(1)
    land(mind, 0, 1, 2.0, present=b"\0\1")
    land(mind, 1, 1, 2.0, present=b"\1")
    assert mind.presence(0) == [False, True]


def test_norms_are_summed_over_a_parameters_pieces_in_their_order():
    mind = started()
    mind.on_server_message(1, NormsAnswer(1, 0, [1e-20]))
    assert mind.squared_norms(0) is None
    assert mind.servers_without_norms(0) == {0}
    mind.on_server_message(0, NormsAnswer(0, 0, [None, 1.0]))
    assert mind.squared_norms(0) == {2: 1.0 + 1e-20}


@pytest.mark.parametrize(
    ("server", "message", "size", "reason"),
    [
        (1, Values(1, 1, b"\1", 9, 1), 12, "version 1, which was not asked for"),
        (1, Values(9, 1, b"\1", 1, 1), 12, "there are 2 shards"),
        (1, Values(1, 1, b"\1", 1, 1), 16, "16 bytes where 12 belong"),
        (1, Values(1, 0, b"\1", 1, 0), 12, "version 0, which was not asked for"),
        (1, Values(1, 1, b"\1\1", 1, 1), 12, "values of 2 pieces"),
        (1, Pushed(1, 0), 12, "with a payload"),
    ],
)
def test_a_server_that_breaks_the_protocol_changes_nothing(server, message, size, reason):
    mind = started()
    mind.pull(1)
    with pytest.raises(ProtocolError, match=reason):
        mind.receive_buffer_for(server, message, size)
    land(mind, 1, 1, 4.0)
    mind.copy_to_front()
    assert mind.front["float32"][6:].eq(4).all()


def test_where_workers_step_a_push_asks_for_its_sum_and_a_new_connection_asks_again():
    mind = DenseClient(Terms(LAYOUT, 2, "worker"), SHARDS, [0, 1], 1)
    for shard in (0, 1):
        mind.on_server_message(shard, Leads(0, [shard]))
    assert mind.pull(0) == [ToServer(0, Pull(0, [0], 0, [-1])), ToServer(1, Pull(0, [1], 0, [-1]))]
    for shard in (0, 1):
        land(mind, shard, 0, 1.0)
    mind.copy_to_front()
    (sent,) = mind.push(0, 1, [True], 1.0)
    assert sent.message == Push(1, 0, 1.0, b"\1", 0)
    assert mind.pull(1) == []  # shard 0's push will ask
    mind.on_server_message(1, Pushed(1, 0))  # which says nothing of the sum
    mind.on_server_disconnected(1)
    assert mind.on_server_message(1, Leads(0, [1])) == [ToServer(1, Pull(1, [1], 1, [0]))]
    land(mind, 1, 1, 3.0)
    assert mind.missing_shards(1) == [0]


def test_where_others_push_for_a_worker_it_pulls_by_itself():
    mind = DenseClient(Terms(LAYOUT, 2, "worker", hosts=((0, 1),)), SHARDS, [0, 1], 1)
    for shard in (0, 1):
        mind.on_server_message(shard, Leads(0, [shard]))
    mind.pull(0)
    for shard in (0, 1):
        land(mind, shard, 0, 1.0)
    mind.copy_to_front()
    assert mind.pull(1) == [ToServer(0, Pull(1, [0], 1, [0])), ToServer(1, Pull(1, [1], 1, [0]))]
