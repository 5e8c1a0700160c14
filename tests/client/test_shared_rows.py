"""Rows within a host are read in shared memory; no buffer is written while a process may read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psctl.client.shared_buffers import SMALLEST, SharedRows
from psctl.errors import ProtocolError
from psctl.kv.store_connections import REPORT_EVERY
from psctl.ps.table_messages import AnswersRead, Fetched
from psctl.transport.shared_memory import SegmentClient
from psctl.types import Member
from tests.helpers.threaded_job import Host
from tests.kv.test_store import Net

SIZE = 2 * SMALLEST


@pytest.fixture
def host():
    made = Host()
    yield made
    made.close()


def address(array) -> int:
    return array.ctypes.data


def test_a_buffer_is_free_when_its_last_view_is_released(host: Host) -> None:
    memory = SharedRows(host.segments(Member("worker", 0)))
    first = memory.allocate(SIZE - 8)
    where, view = address(first), torch.from_numpy(first[8:16])
    del first
    second = memory.allocate(SIZE)
    assert address(second) != where
    del view
    assert address(memory.allocate(SIZE - 100)) == where
    assert len(memory.allocate(SIZE - 100)) == SIZE - 100
    assert memory.allocate(SIZE).flags.writeable


def test_without_shared_memory_and_for_short_messages_bytes_are_sent(host: Host) -> None:
    payload = memoryview(bytearray(SIZE))
    for memory in (
        SharedRows(SegmentClient(Member("worker", 0), None)),
        SharedRows(host.segments(Member("worker", 1))),
    ):
        assert len(memory.allocate(SIZE)) == SIZE
        assert memory.share(0, Fetched("s", 1, []), payload) is None
        assert memory.share(0, Fetched("s", 1, []), memory.allocate(SIZE).data) is None, (
            "no process of this host is connected"
        )


@pytest.mark.parametrize("consistency", ["asp", "bsp", {"ssp": 1}])
def test_shared_rows_equal_the_pushed_and_pulled_rows(host: Host, consistency) -> None:
    with Net(2, consistency=consistency, host=host) as net:
        keys = torch.randperm(400)

        def script(store):
            right = torch.zeros(400, 1024)
            for turn in range(12):
                rows = torch.full((400, 1024), float(turn + 1)) + keys[:, None]
                store.push(keys, rows)
                rows.fill_(-1)
                right += 2 * (turn + 1 + keys[:, None])
                if consistency != "asp":
                    store.clock()
                if consistency == "bsp":
                    assert torch.equal(store.pull(keys), right)
            store.flush()
            return right

        right = net.run(script)[0]
        for store in net.stores:
            if consistency != "asp":
                net.run(lambda store: store.clock())
        found = net.run(lambda store: (store.pull(keys), store.pull(range(400))))
        for rows, (there, in_range) in found:
            assert torch.equal(rows, right)
            assert torch.equal(in_range, right[torch.argsort(keys)])
            assert there.tolist() == list(range(400))
        assert all(server.unread[rank] for server in net.servers for rank in range(2)), "no message reports that alone"
        net.run(lambda store: store.wait(store.push(keys, torch.zeros(400, 1024))))
        if consistency != "asp":  # else it may be laid over what is read
            net.run(lambda store: store.clock())
        assert not any(held for server in net.servers for held in server.unread.values()), (
            "it was reported with the next message"
        )
        sharing = [memory for memory in net.memories if any(memory._allocator._free.values())]
        assert len(sharing) == 4, "all four ends have shared buffers, and all are free again"
        if consistency == "asp":  # no payload was sent over the streams
            assert all(peer.bytes_received < 400 * 4096 for server in net.servers for peer in server.peers.values())


def test_many_read_answers_are_reported_without_another_message(host: Host) -> None:
    with Net(1, servers=1, host=host) as net:
        links, server = net.links[0], net.servers[0]
        ((peer, state),) = links._states.items()
        server.unread[0].extend([memoryview(b"")] * REPORT_EVERY)
        for _ in range(1, REPORT_EVERY):
            links._count_read(peer, state)
            assert state.unreported
        links._count_read(peer, state)
        assert not state.unreported
        net.stores[0].wait(net.stores[0].push("w", torch.ones(1)))  # so the server has received everything before
        assert not server.unread[0]


def test_a_worker_that_reports_unshared_answers_as_read_is_refused(host: Host) -> None:
    with Net(1, host=host) as net:
        peer = net.servers[0].peers["worker", 0]
        with pytest.raises(ProtocolError, match="reports 3 answers as read, of 0"):
            net.servers[0].on_message(peer, AnswersRead(3), None)


def test_answers_of_a_disconnected_reader_stay_until_it_cannot_read_them(host: Host) -> None:
    with Net(1, host=host) as net:
        store, keys, server = net.stores[0], np.arange(400), net.servers[0]
        store.wait(store.push(keys, torch.ones(400, 1024)))
        store.pull(keys)
        peer = server.peers["worker", 0]
        held = memoryview(b"as if it were read")
        server.unread[0].append(held)
        peer.close("cut")
        assert torch.equal(store.pull(keys), torch.ones(400, 1024))
        assert held not in server.unread[0], "it came anew"
        server.unread[0].append(held)
        store.close()
        peer = server.peers["worker", 0]
        net.links[0].close("the worker is lost")
        assert peer.join(10)
        assert held in server.unread[0]
        server.end_worker(0, 0)
        assert 0 not in server.unread
