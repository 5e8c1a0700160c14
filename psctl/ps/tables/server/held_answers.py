"""What a server of tables has said to workers and may not send yet: what it rests on is not on all of the chain.

Nobody may learn of an update that could still be lost. So each message names the versions of shards that it rests on,
and leaves when all replicas have them; messages to one worker leave in the order in which they were said, or an older
reading could overtake the word that a newer push is done. When a shard is led by another server, what was said of it is
taken back; whoever was to hear it asks there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from psctl.ps.outputs import ToWorker
from psctl.ps.table_messages import ClocksFinished, Done, Fetched, StoreLeads, TableDescribed

READERS = -1
"""In the place of a worker: who looks from outside the job (snapshot_reads.py)."""


class HeldAnswer(msgspec.Struct):
    """One message that waits. `again`: how to answer anew, of these shards, what was asked."""

    send: ToWorker
    rests_on: dict[int, int]  # shard -> version
    again: Callable[[set[int]], Any] | None = None


class HeldAnswers:
    """Messages by worker.

    Args:
        acknowledged: returns the version of a shard that is on all of its chain.
    """

    def __init__(self, acknowledged: Callable[[int], int]) -> None:
        self._acknowledged = acknowledged
        self._queues: dict[int, deque[HeldAnswer]] = {}

    def add(self, send: ToWorker, rests_on: Mapping[int, int], again: Callable[[set[int]], Any] | None = None) -> None:
        """Say something as soon as it is sure."""
        self._queues.setdefault(send.rank, deque()).append(HeldAnswer(send, dict(rests_on), again))

    def count_waiting(self, worker: int) -> int:
        """Return how much was said to a worker that may not be sent yet."""
        return len(self._queues.get(worker, ()))

    def release(self) -> list[ToWorker]:
        """Return what may be sent now."""
        found = []
        for worker, queue in list(self._queues.items()):
            while queue and all(self._acknowledged(shard) >= at for shard, at in queue[0].rests_on.items()):
                found.append(queue.popleft().send)
            if not queue:
                del self._queues[worker]
        return found

    def forget(self, worker: int, store: str | None = None) -> None:
        """A worker's connection, or its session with a store, is over."""
        kept = [
            said
            for said in self._queues.pop(worker, ())
            if store not in (None, getattr(said.send.message, "store", None))
        ]
        if kept:
            self._queues[worker] = deque(kept)

    def take_back(self, shard: int) -> None:
        """A shard is led by another: take back what was said of it, and answer anew what was asked of others too."""
        anew = []
        for worker, queue in list(self._queues.items()):
            kept: deque[HeldAnswer] = deque()
            for said in queue:
                left = said.rests_on.pop(shard, None) is None
                if not left and said.again is not None:
                    anew.append((said.again, set(said.rests_on)))
                elif left or _without(said, shard):
                    kept.append(said)
            self._queues[worker] = kept
        for again, shards in anew:
            again(shards)


def _without(said: HeldAnswer, shard: int) -> bool:
    """Take a shard out of a message; False when nothing is left of it."""
    message = said.send.message
    if isinstance(message, Fetched):
        return False  # rows that nobody asked for
    if isinstance(message, StoreLeads):
        left: list[Any] = [each for each in message.shards if each.shard != shard]
    else:
        assert isinstance(message, Done | TableDescribed | ClocksFinished), "these are about shards"
        left = [each for each in message.shards if each != shard]
    said.send = ToWorker(said.send.rank, replace(message, shards=left), said.send.payload)
    return bool(left)
