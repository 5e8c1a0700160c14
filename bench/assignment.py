"""Balance of shards and bytes moved: the assignment that jobs use, beside consistent hashing.

    python bench/assignment.py

For each number of servers: the fullest server over the mean, and the share of all bytes that is copied when one server
joins and when one leaves (the least possible: 1/(n+1) and 1/n). Shards: 16 a server of 1 to 4 MB (as a model's are),
mean over several leaves. Pure computation: the same on every machine.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from psctl.coordinator.policies.assignment import Chains, assign, missing_copies

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from tests.reference.consistent_hashing import Ring, assign_hashed  # noqa: E402

SERVERS = (2, 3, 5, 10, 20, 50, 100)
SHARDS_A_SERVER = 16
LEAVES = 5


def servers_of(count: int) -> dict[int, int]:
    return {rank: rank for rank in range(count)}


def fullest(sizes: list[int], chains: Chains, servers: dict[int, int]) -> float:
    load = dict.fromkeys(servers, 0)
    for size, chain in zip(sizes, chains, strict=True):
        load[chain[0]] += size
    return max(load.values()) * len(load) / sum(sizes)


def moved(sizes: list[int], before: Chains, after: Chains) -> float:
    new = missing_copies(before, after)
    return sum(size * len(each) for size, each in zip(sizes, new, strict=True)) / sum(sizes)


def remembered(count: int, sizes: list[int]) -> tuple[float, float, float]:
    servers = servers_of(count)
    chains = assign(sizes, servers, 0)
    join = moved(sizes, chains, assign(sizes, servers_of(count + 1), 0, chains))
    leave = 0.0
    for gone in range(min(LEAVES, count)):
        left = {rank: host for rank, host in servers.items() if rank != gone}
        leave += moved(sizes, chains, assign(sizes, left, 0, chains)) / min(LEAVES, count)
    return fullest(sizes, chains, servers), join, leave


def hashed(count: int, sizes: list[int], virtual: int) -> tuple[float, float, float]:
    servers = servers_of(count)
    names = [f"shard/{each}" for each in range(len(sizes))]
    chains = assign_hashed(names, servers, 0, virtual)
    join = moved(sizes, chains, assign_hashed(names, servers_of(count + 1), 0, virtual))
    leave = 0.0
    for gone in range(min(LEAVES, count)):
        left = {rank: host for rank, host in servers.items() if rank != gone}
        leave += moved(sizes, chains, assign_hashed(names, left, 0, virtual)) / min(LEAVES, count)
    return fullest(sizes, chains, servers), join, leave


def keys(count: int, virtual: int) -> tuple[float, float, float]:
    """Hashing keys themselves, as sparse tables without shards would: shares of the circle, exactly."""
    shares = Ring(servers_of(count), virtual).shares()
    more = Ring(servers_of(count + 1), virtual).shares()
    gone = [shares[rank] for rank in range(min(LEAVES, count))]
    return max(shares.values()) * count, more[count], sum(gone) / len(gone)


def main() -> None:
    print(
        "| servers | least moved | psctl's assignment | shards hashed, 64 points | hashed keys, 64 | hashed keys, 256 |"
    )
    print("|---|---|---|---|---|---|")
    for count in SERVERS:
        chance = random.Random(count)
        sizes = [chance.randint(1 << 20, 4 << 20) for _ in range(count * SHARDS_A_SERVER)]
        rows = [remembered(count, sizes), hashed(count, sizes, 64), keys(count, 64), keys(count, 256)]
        cells = " | ".join(f"{full:.2f}, {100 * join:.1f}%, {100 * leave:.1f}%" for full, join, leave in rows)
        print(f"| {count} | {100 / (count + 1):.1f}%, {100 / count:.1f}% | {cells} |", flush=True)


if __name__ == "__main__":
    main()
