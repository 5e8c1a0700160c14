"""The parameter server with synchronous clocks as a schedule: workers push chunks, servers add, workers pull the sums.

A server is a helper of its own (dedicated) or one of the ranks (co-located); each carries its share of the vector and
adds in the order of the ranks; only where both kinds serve, a rank's share is added in the order of arrival. With
m workers and n equal servers push and pull take 2 max(N/B_w, mN/(nB_s)), and half of it where they overlap, which
needs pieces; m = n co-located moves what a ring moves. BytePS (OSDI 2020, theorem 1) uses both at once: with n GPU
machines and k CPU machines on equal links, shares of (n-k) and 2(n-1) make all links equally busy, and
t = 2n(n-1)N/((n² + kn - 2k)B), from 2(n-1)/n N/B at k = 0 to N/B at k = n.

Ranks of one host (a group) may add first: a chunk whose server is on another host is then sent from the group once, by
one of them; each rank pulls separately. Ranks of one rack do so too, and there the rank that pushes a chunk also pulls
it for the others (PHub, SoCC 2018): the sums cross between racks once each way.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.schedule.phases import AllGather, all_reduce
from psctl.schedule.schedule import Schedule, Transfer


def balanced_shares(world: int, helpers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the servers and their shares with which all links are equally busy: (servers, shares).

    Args:
        world: number of ranks, each on a machine of its own.
        helpers: number of further machines; those beyond `world` only lighten each other.
    """
    rank, helper = world - helpers, 2 * (world - 1)
    if world == 1:
        rank, helper = 1, 0
    elif helpers >= world:
        rank, helper = 0, 1
    shares = [rank] * world + [helper] * helpers
    pairs = [(node, share) for node, share in enumerate(shares) if share > 0]
    return tuple(node for node, _ in pairs), tuple(share for _, share in pairs)


def pull(world: int, servers: Sequence[int], shares: Sequence[int]) -> AllGather:
    """Return the pull: every server sends its chunk to all workers, each pair on a lane of its own at both ends.

    Where ranks and helpers serve together, a rank serves the others one after another, on one lane.

    Raises:
        ValueError: no server, one named twice, or shares that do not fit; the caller's fault.
    """
    if not servers or len(set(servers)) != len(servers) or len(shares) != len(servers) or min(servers) < 0:
        raise ValueError(f"servers {list(servers)} need a share each, not {list(shares)}")
    lanes = max(world, len(servers))
    mixed = min(servers) < world <= max(servers)
    transfers = []
    for chunk, server in enumerate(servers):
        for rank in (rank for rank in range(world) if rank != server):
            if mixed and server < world:
                # One peer at a time: a port is shared by flow, and many small flows would starve those to the helpers.
                transfers.append(Transfer((rank - server) % world - 1, server, rank, chunk, "copy", lanes))
            else:
                transfers.append(Transfer(0, server, rank, chunk, "copy", (chunk + rank) % lanes))
    return AllGather(tuple(servers), transfers, tuple(shares), max(world, max(servers) + 1))


def _collectors(
    world: int, servers: Sequence[int], groups: Sequence[Sequence[int]], near: Sequence[int]
) -> list[list[int]]:  # fmt: skip
    """Return, for each chunk and rank, the rank of its group that acts for it: itself where the server is near."""
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    found = []
    for chunk in range(len(servers)):
        each = []
        for rank in range(world):
            index = group_of.get(rank, -1)
            direct = index < 0 or near[chunk] == index
            each.append(rank if direct else groups[index][chunk % len(groups[index])])
        found.append(each)
    return found


def _forwarded_pull(
    world: int, servers: Sequence[int], shares: Sequence[int], collectors: Sequence[Sequence[int]]
) -> AllGather:  # fmt: skip
    """Return the pull: every server sends its chunk once to each group, and its collector forwards it."""
    lanes = max(world, len(servers))
    transfers = []
    for chunk, server in enumerate(servers):
        for rank in range(world):
            source = collectors[chunk][rank]
            if source == rank:
                transfers.append(Transfer(0, server, rank, chunk, "copy", (chunk + rank) % lanes))
            else:
                transfers.append(Transfer(1, source, rank, chunk, "copy", (chunk + rank) % lanes))
    return AllGather(tuple(servers), transfers, tuple(shares), max(world, max(servers) + 1))


def _grouped_push(world: int, servers: Sequence[int], collectors: Sequence[Sequence[int]]) -> list[Transfer]:
    """Return the push: each rank to the rank of its group that pushes the group's sum, or directly to the server."""
    lanes = max(world, len(servers))
    transfers = []
    for chunk, server in enumerate(servers):
        for rank in range(world):
            pusher = collectors[chunk][rank]
            if pusher == rank:
                transfers.append(Transfer(1, rank, server, chunk, "reduce", (chunk + rank) % lanes))
            else:
                transfers.append(Transfer(0, rank, pusher, chunk, "reduce", (chunk + rank) % lanes))
    return transfers


def parameter_server(
    world: int,
    servers: Sequence[int],
    shares: Sequence[int] | None = None,
    pieces: int = 1,
    groups: Sequence[Sequence[int]] = (),
    near: Sequence[int] = (),
    forwarded: bool = False,
) -> Schedule:
    """Return the all-reduce through parameter servers.

    Args:
        world: number of workers.
        servers: the nodes that serve: ranks, or helpers from `world` on.
        shares: relative share of each server, positive whole numbers; equal when None.
        pieces: number of parts of each share; with 2 or more, pulls overlap with later pushes.
        groups: ranks that share a host and push together; where there are any, all servers are helpers.
        near: for each server the index of its own host's group; -1: no group.
        forwarded: groups are racks, in which one rank also pulls a chunk for the others.
    """
    parts = tuple(shares or (1,) * len(servers))
    params = {"servers": list(servers), "shares": list(parts), "pieces": pieces}
    collectors = _collectors(world, servers, groups, near) if groups else []
    reduction = _grouped_push(world, servers, collectors) if groups else None
    gather = _forwarded_pull(world, servers, parts, collectors) if forwarded else pull(world, servers, parts)
    return all_reduce("ps", world, gather, reduction=reduction, pieces=pieces, params=params)
