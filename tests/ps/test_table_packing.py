"""Copies of a call's rows: one into the message, and none if they are in the message already."""

from __future__ import annotations

import numpy as np
import torch

from psctl.ps.tables.client.key_routes import KeyRoutes
from psctl.ps.tables.reductions import Lanes, array_of
from psctl.ps.tables.row_index import TableRows
from psctl.ps.tables.table_packing import PayloadReader, PayloadWriter, lanes_size, pack
from tests.ps.table_world import World, spec


def test_contiguous_arrays_of_a_writer_are_not_copied_again() -> None:
    lanes = Lanes(torch.arange(12.0, dtype=torch.float32).view(4, 3))
    writer = PayloadWriter(2 * lanes_size(lanes, 2))
    for rows in ([3, 1], [0, 2]):
        writer.rows(array_of(lanes.values), None, np.array(rows))
    half = len(writer.whole) // 2
    payload = pack([writer.whole[:half], writer.whole[half:]])
    assert np.shares_memory(np.frombuffer(payload, dtype=np.uint8), writer.whole)
    reader = PayloadReader(payload)
    assert reader.lanes(2, 3, torch.float32, 0).values.tolist() == [[9, 10, 11], [3, 4, 5]]
    assert reader.lanes(2, 3, torch.float32, 0).values.tolist() == [[0, 1, 2], [6, 7, 8]]


def test_separate_arrays_are_copied_in_order() -> None:
    whole = np.arange(32, dtype=np.uint8)
    for arrays in (
        [whole[16:32], whole[:16]],
        [whole[:8], whole[16:32]],
        [whole[:8], np.arange(8, 16, dtype=np.uint8)],
    ):
        assert bytes(pack(arrays)) == b"".join(array.tobytes() for array in arrays)
    assert bytes(pack([whole[:3], whole[8:11]])) == bytes([0, 1, 2, *[0] * 5, 8, 9, 10, *[0] * 5])
    assert bytes(pack([])) == b""


def test_a_repeated_key_list_is_sent_from_its_cached_copy() -> None:
    world = World(workers=1, servers=2)
    keys, client = np.arange(200), world.clients[0]
    world.push(0, spec(), keys, torch.ones(200))
    world.run()
    kind, route = client.resolve_kind(spec()), client.routes.route_of("", keys)
    (change,) = client.prepare_push([(kind, route, Lanes(torch.ones(200, 1, dtype=torch.float64)))], world.ticket())
    held = next(iter(change.shards.values()))[0].rows.base
    outs = client.send_change(change, 0)
    assert len(outs) == 2
    for out in outs:
        assert np.shares_memory(np.frombuffer(out.payload, dtype=np.uint8), held)
    world.put(0, outs)
    world.run()
    assert world.pull(0, spec(), keys).flatten().tolist() == [2.0] * 200


def test_a_route_groups_shards_by_server_and_restores_the_order_of_keys() -> None:
    routes = KeyRoutes(8)
    routes.group_by_leader([0, 1] * 4)
    keys = np.random.default_rng(3).permutation(500)
    route = routes.route_of("", keys)
    servers = [stop.shard % 2 for stop in route.stops]
    assert servers == sorted(servers)
    assert route.inverse is None
    assert sorted(route.order.tolist()) == list(range(500))
    assert all((keys[stop.at] == stop.keys).all() and (np.diff(stop.keys) > 0).all() for stop in route.stops)
    twice = routes.route_of("", np.array([7, 3, 7, -1]))
    assert twice.unique.tolist() == [-1, 3, 7]
    assert twice.unique[twice.inverse].tolist() == [7, 3, 7, -1]
    routes.group_by_leader([1] * 8)
    assert [stop.shard for stop in routes.route_of("", keys).stops] == list(range(8))


def test_cached_slots_of_a_key_list_are_correct() -> None:
    rows = TableRows(1, torch.float32, 0)
    keys = np.array([5, 9, 2])
    keys.flags.writeable = False
    assert rows.find(keys).tolist() == [-1, -1, -1]
    rows.add(np.array([9, 2, 5]))
    assert rows.find(keys).tolist() == [2, 0, 1]
    rows.add(np.arange(100, 300))
    assert rows.find(keys).tolist() == [2, 0, 1]
    other = np.array([9])
    assert rows.find(other).tolist() == [0]
    other[0] = 2  # it may be written: what was found is not remembered
    assert rows.find(other).tolist() == [1]
