"""Times operations of the store behind MASTER_PORT and the start of a Gloo group; for bench/rendezvous.py."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

OPERATIONS = 500
GROUPS = 5


def median(operation: Callable[[], object], count: int) -> float:
    """Return the median seconds that an operation takes."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        operation()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Groups:
    """Starts Gloo groups, one after the other, each with keys of its own in the store."""

    def __init__(self, connect: Callable[[], dist.TCPStore], rank: int, world: int) -> None:
        self._connect, self._rank, self._world, self._number = connect, rank, world, 0

    def meet(self) -> None:
        """Connect to the store, start a group, use it once, and leave it."""
        self._number += 1
        store = dist.PrefixStore(f"group {self._number}", self._connect())
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=self._world)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()


def main() -> None:
    """Measure on every rank; rank by rank where operations are timed, so that they do not disturb each other."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def connect() -> dist.TCPStore:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))

    began = time.perf_counter()
    store = connect()
    connected = time.perf_counter() - began
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(world)])
    if rank:
        store.wait([f"measured/{rank - 1}"])
    again = median(connect, 20)
    add = median(lambda: store.add("number", 1), OPERATIONS)
    store.set("word", "x" * 64)
    get = median(lambda: store.get("word"), OPERATIONS)
    store.set(f"measured/{rank}", "")
    store.wait([f"measured/{other}" for other in range(world)])
    groups = median(Groups(connect, rank, world).meet, GROUPS)
    found = {"rank": rank, "first": connected, "connect": again, "add": add, "get": get, "group": groups}
    print("measured", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
