"""Pending values of a wait: the servers that are waited for, and the number of copies meanwhile."""

from __future__ import annotations

import pytest

from psctl.ps.dense.client.pending_values import LEAST, PendingValues
from psctl.types import Range, Shard

MIB = 1 << 20


class Mind:
    """Stands in for a worker's state machine: equal shards, two servers, and the landed versions."""

    def __init__(self, count: int, size: int) -> None:
        words = size // 4
        self.shards = [Shard(at, "float32", Range(at * words, (at + 1) * words)) for at in range(count)]
        self.sizes = [size] * count
        self.owners = [at % 2 for at in range(count)]
        self.landed: set[int] = set()

    def missing_shards(self, clock: int, shards: list[int], exact: bool) -> list[int]:
        assert (clock, exact) == (7, True)
        return [shard for shard in shards if shard not in self.landed]


def test_a_short_wait_ends_when_all_shards_have_landed() -> None:
    machine = Mind(4, LEAST // 4)
    machine.landed.add(1)
    missing = PendingValues(machine, 7, [0, 1, 3], exact=True)
    assert missing.newly_arrived() == [1]
    assert missing.servers_waited_for() == {0, 1}
    machine.landed.add(3)
    assert missing.servers_waited_for() == {0}
    machine.landed.add(0)
    assert missing.servers_waited_for() == set()
    assert missing.newly_arrived() == [0, 3]
    assert missing.left == []


@pytest.mark.parametrize("order", [1, -1])
def test_a_long_wait_copies_each_shard_once_in_few_batches(order: int) -> None:
    machine = Mind(64, 3 * MIB // 2)
    missing = PendingValues(machine, 7, range(64), exact=True)
    copied, goes = [missing.newly_arrived()], 0
    for shard in range(64)[::order]:
        assert missing.servers_waited_for()
        machine.landed.add(shard)
        if not missing.servers_waited_for():
            copied.append(missing.newly_arrived())
            goes += 1
    assert missing.left == []
    assert sorted(shard for some in copied for shard in some) == list(range(64))
    assert goes <= 12
    assert len(copied[1]) == 16
    assert len(copied[-1]) * 3 * MIB // 2 < 2 * LEAST
