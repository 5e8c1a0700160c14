"""Consistent hashing: few keys move, chains avoid a second failure, shares are as level as theory says."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.reference.consistent_hashing import SPACE, Ring, assign_hashed, point

_servers = st.dictionaries(st.integers(0, 30), st.integers(0, 4), min_size=1, max_size=8)
_names = st.lists(st.integers(0, 10**6).map(str), min_size=1, max_size=50)


@given(_names, _servers, st.integers(0, 3))
def test_members_are_different_servers_on_as_many_hosts_as_there_are(names, servers, replicas):
    for chain in assign_hashed(names, servers, replicas, virtual=4):
        assert len(chain) == len(set(chain)) == min(replicas + 1, len(servers))
        assert len({servers[rank] for rank in chain}) == min(len(chain), len(set(servers.values())))


@given(_names, _servers, st.integers(31, 40))
def test_only_what_a_joining_server_takes_moves(names, servers, new):
    before = assign_hashed(names, servers, 0)
    after = assign_hashed(names, {**servers, new: 9}, 0)
    assert all(old == now or now == [new] for old, now in zip(before, after, strict=True))


@given(_names, _servers)
def test_the_first_replica_follows_when_the_primary_goes(names, servers):
    servers = dict.fromkeys(servers, 0) | {50: 0, 51: 0}
    chains = assign_hashed(names, servers, 1)
    for name, chain in zip(names, chains, strict=True):
        left = {rank: host for rank, host in servers.items() if rank != chain[0]}
        assert assign_hashed([name], left, 0) == [[chain[1]]]


def test_a_point_belongs_to_the_first_server_at_or_after_it():
    ring = Ring({3: 0, 5: 0}, virtual=1)
    three, five = point("server/3/0"), point("server/5/0")
    low, high = sorted([three, five])
    first, second = (3, 5) if low == three else (5, 3)
    assert [ring.owner(low), ring.owner(low + 1), ring.owner(high), ring.owner(high + 1)] == [
        first, second, second, first,
    ]  # fmt: skip
    assert ring.shares()[second] == (high - low) / SPACE


def test_names_lie_at_the_same_points_in_every_run():
    assert point("server/0/0") == 0x14809B34A3349372


def test_a_server_with_twice_the_points_holds_twice_as_much():
    shares = Ring({0: 0, 1: 1}, virtual={0: 2000, 1: 1000}).shares()
    assert math.isclose(sum(shares.values()), 1)
    assert 1.8 < shares[0] / shares[1] < 2.2


def test_the_fullest_of_a_hundred_is_as_full_as_in_theory():
    for virtual in (16, 64, 256):
        shares = Ring(dict.fromkeys(range(100), 0), virtual).shares()
        spread = 2 * math.log(100) / virtual  # exceeded by one of a hundred servers in one ring of a hundred
        assert 1 < 100 * max(shares.values()) < 1 + math.sqrt(2 * spread) + spread


def test_a_join_moves_the_share_of_the_new_server():
    names = [str(each) for each in range(6000)]
    before = assign_hashed(names, dict.fromkeys(range(9), 0), 0)
    after = assign_hashed(names, dict.fromkeys(range(10), 0), 0)
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    held = Counter(chain[0] for chain in after)
    assert moved == held[9]
    assert 0.5 < moved / 600 < 1.5
