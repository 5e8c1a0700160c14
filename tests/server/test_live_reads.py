"""What a server answers the job's readers about its tables."""

from __future__ import annotations

import pytest

from psctl.errors import MessageRefused
from psctl.process.user_functions import JobFunctions
from psctl.ps.table_messages import KeysRead, ReadKeys
from psctl.ps.tables.server.table_server import TableServer
from psctl.server.live_reads import LiveReads, as_sent, queue_of


def reads() -> LiveReads:
    state = TableServer(0, JobFunctions(), 2)
    state.on_assignment(0, [[0]] * 2, [[]] * 2, [0])
    state.start_shards(restored=False)
    return LiveReads(state)


def test_a_store_that_is_not_there_is_answered_without_rows() -> None:
    (output,) = reads().on_read(3, ReadKeys(7, "items", ""), memoryview(bytes(16)))
    shown = as_sent(output)
    assert isinstance(shown.message, KeysRead)
    assert (shown.rank, shown.message.ticket, shown.message.led, shown.message.spec) == (3, 7, [0, 1], None)
    assert shown.payload is None


@pytest.mark.parametrize(("table", "size"), [("", 9), ("weights", 8)], ids=["no list of keys", "keys of a named key"])
def test_a_payload_that_is_no_list_of_keys_is_refused(table: str, size: int) -> None:
    with pytest.raises(MessageRefused, match="a payload of"):
        reads().on_read(3, ReadKeys(7, "items", table), memoryview(bytes(size)))


def test_queues_of_readers_are_no_ranks_of_workers() -> None:
    assert {queue_of(reader) for reader in range(3)} == {-2, -3, -4}
    assert [queue_of(queue_of(reader)) for reader in range(3)] == [0, 1, 2]
