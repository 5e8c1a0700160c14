"""What a worker of a rack may send is checked: lies are refused with the liar's name, or it pushes alone."""

from __future__ import annotations

import pytest

from psctl.errors import ProtocolError
from psctl.ps.dense.client.dense_client_state import DenseClient
from psctl.ps.dense.client.host_collection import ToPeer
from psctl.ps.dense.shard_state import Terms
from psctl.ps.messages import HostPush, Leads, PushAlone, Values, ValuesWanted
from psctl.types import Layout, ParameterInfo, Range, Shard

LAYOUT = Layout((ParameterInfo("a", (8,), "float32", 0),), "SGD", ({"lr": 0.1},))
SHARDS = [Shard(0, "float32", Range(0, 8))]


def client(rank: int) -> DenseClient:
    """Return a worker that has pulled clock 1 after the start values; rank 0 collects the shard."""
    made = DenseClient(Terms(LAYOUT, 2, "server", hosts=((0, 1),), by_rack=True), SHARDS, [0], rank)
    made.on_server_message(0, Leads(0, [0]))
    made.on_peer_connected(1 - rank)
    made.pull(0)
    start = Values(0, 0, b"\1", 0, 0)
    buffer = made.receive_buffer_for(0, start, 32)
    assert buffer is not None
    made.on_server_message(0, start, 32)
    made.pull(1)
    return made


@pytest.mark.parametrize(
    ("message", "data"),
    [
        (ValuesWanted(1, [3], 1), None),
        (ValuesWanted(1, [-1], 1), None),
        (PushAlone(7, 0), None),
        (Values(1, 1, b"\1", 1, 1), memoryview(bytes(32))),
        (Values(0, 1, b"\1", 1, 1), memoryview(bytes(31))),
        (Values(0, 1, b"\1", 1, 1), None),
        (Values(0, 1, b"\1\1", 1, 1), memoryview(bytes(32))),
        (Values(0, 0, b"\1", 1, 0), memoryview(bytes(32))),
    ],
)
def test_a_lie_is_refused_with_the_liars_name(message, data) -> None:
    with pytest.raises(ProtocolError, match="worker/0") as refused:
        client(1).on_peer_message(0, message, data)
    assert refused.value.where == "worker/0"


def test_values_that_are_not_wanted_are_dropped() -> None:
    late = client(1)
    assert late.on_peer_message(0, Values(0, 5, b"\1", 5, 5), memoryview(bytes(32))) == []
    assert late.missing_shards(1) == [0]
    late.on_peer_message(0, Values(0, 1, b"\1", 1, 1), memoryview(bytes(32)))
    assert late.missing_shards(1) == []


@pytest.mark.parametrize("data", [None, memoryview(bytes(28))])
def test_gradients_that_do_not_fit_are_pushed_alone(data) -> None:
    said = client(0).on_peer_message(1, HostPush(0, 0, 1.0, b"\1", None), data)
    assert ToPeer(1, PushAlone(0, 0)) in said
