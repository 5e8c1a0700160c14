"""Chains: balanced, spread over hosts, and few copies are made when servers come and go."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from psctl.coordinator.policies.assignment import assign, missing_copies, without


def holdings(sizes, chains, servers):
    found = dict.fromkeys(servers, 0)
    for size, chain in zip(sizes, chains, strict=True):
        for server in chain:
            found[server] += size
    return found


def primaries(sizes, chains, servers):
    return holdings(sizes, [chain[:1] for chain in chains], servers)


def apart(load):
    return max(load.values()) - min(load.values())


def made(before, after):
    return sum(len(each) for each in missing_copies(before, after))


def check(sizes, servers, replicas, chains):
    """What always holds, whatever the hosts."""
    hosts = len(set(servers.values()))
    for chain in chains:
        assert len(chain) == len(set(chain)) == min(replicas + 1, len(servers))
        assert set(chain) <= set(servers)
        assert len({servers[server] for server in chain}) == min(len(chain), hosts)


def check_level(sizes, servers, chains):
    assert apart(holdings(sizes, chains, servers)) <= max(sizes)
    assert apart(primaries(sizes, chains, servers)) <= max(sizes)


_sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=60)
_alone = st.integers(1, 8).map(lambda count: {rank: rank for rank in range(count)})  # a server a host
_even = st.tuples(st.integers(2, 4), st.integers(1, 3)).map(
    lambda shape: {rank: rank % shape[0] for rank in range(shape[0] * shape[1])}
)
_any = st.lists(st.integers(0, 3), min_size=1, max_size=8).map(lambda hosts: dict(enumerate(hosts)))


@given(_sizes, st.one_of(_alone, _even), st.integers(0, 3))
def test_holdings_and_primaries_are_level_to_within_the_largest_shard(sizes, servers, replicas):
    chains = assign(sizes, servers, replicas)
    check(sizes, servers, replicas, chains)
    check_level(sizes, servers, chains)


@given(_sizes, _any, st.integers(0, 3))
def test_members_of_a_chain_are_on_different_hosts_whatever_the_hosts(sizes, servers, replicas):
    chains = assign(sizes, servers, replicas)
    check(sizes, servers, replicas, chains)
    assert assign(sizes, servers, replicas, chains) == chains, "nothing changed, so nothing moves"


@given(_sizes, st.integers(0, 3), st.lists(st.integers(0, 9), min_size=1, max_size=9, unique=True), st.data())
def test_after_any_joins_and_deaths_all_is_level_again(sizes, replicas, ranks, data):
    servers = {rank: rank for rank in ranks}
    chains = assign(sizes, servers, replicas)
    for _ in range(4):
        ranks = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9, unique=True))
        servers = {rank: rank for rank in ranks}
        chains = assign(sizes, servers, replicas, chains)
        check(sizes, servers, replicas, chains)
        assert apart(holdings(sizes, chains, servers)) <= max(sizes)
        # Its holders stay where they can, and one of them leads: [2, 92, 92, 93] can come apart by 94.
        assert apart(primaries(sizes, chains, servers)) <= 2 * max(sizes)


@given(_sizes, st.lists(_any, min_size=2, max_size=5), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_hosts_and_replicas_may_change_too(sizes, stages, replicas):
    chains = None
    for servers, count in zip(stages, replicas, strict=False):
        chains = assign(sizes, servers, count, chains)
        check(sizes, servers, count, chains)


@given(_sizes, st.integers(2, 8), st.integers(1, 3), st.data())
def test_the_next_of_the_chain_is_primary_after_a_death(sizes, count, replicas, data):
    servers = {rank: rank for rank in range(count)}
    chains = assign(sizes, servers, replicas)
    dead = data.draw(st.integers(0, count - 1))
    left = without(chains, [dead])
    assert all(old[1:] == new for old, new in zip(chains, left, strict=True) if old[0] == dead)
    assert all(left)


def can_be_level(members, servers):
    """Is there a choice of primaries that gives each server as many as the others, to within one?"""
    few = len(members) // len(servers)
    for chosen in itertools.product(*members):
        count = Counter(chosen)
        if all(few <= count[server] <= few + 1 for server in servers) and apart({s: count[s] for s in servers}) <= 1:
            return True
    return False


def fewest(before, servers, depth):
    """The least number of new copies with which equal shards, and their primaries, lie level: by trying everything."""
    choices = [
        [(len(set(members) - set(old)), members) for members in itertools.combinations(sorted(servers), depth)]
        for old in before
    ]
    best = len(before) * depth + 1
    for picked in itertools.product(*choices):
        cost = sum(new for new, _ in picked)
        members = [each for _, each in picked]
        held = Counter(itertools.chain(*members))
        if cost < best and apart({s: held[s] for s in servers}) <= 1 and can_be_level(members, servers):
            best = cost
    return best


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.randoms(use_true_random=False))
def test_equal_shards_make_as_few_copies_as_the_brute_force_finds(shards, count, later, replicas, chance):
    """From any chains whatever, level or not: joins, deaths and both at once."""
    before = [chance.sample(range(count), min(replicas + 1, count)) for _ in range(shards)]
    servers = {rank: rank for rank in chance.sample(range(5), later)}
    after = assign([7] * shards, servers, replicas, before)
    check_level([7] * shards, servers, after)
    assert made(before, after) == fewest(before, servers, min(replicas + 1, later))


@given(_sizes, st.integers(2, 7), st.integers(0, 2), st.booleans())
def test_no_single_copy_could_have_been_left_where_it_was(sizes, count, replicas, joins):
    servers = {rank: rank for rank in range(count)}
    chains = assign(sizes, servers, replicas)
    now = {rank: rank for rank in range(count + 1 if joins else count - 1)}
    after = assign(sizes, now, replicas, chains)
    for shard, (old, new) in enumerate(zip(chains, after, strict=True)):
        for came, went in itertools.product(set(new) - set(old), (set(old) - set(new)) & set(now)):
            other = [list(chain) for chain in after]
            other[shard] = [went if server == came else server for server in new]
            assert apart(holdings(sizes, other, now)) > max(sizes) or apart(primaries(sizes, other, now)) > max(
                sizes
            ), (shard, came, went)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2))
def test_a_joining_server_takes_its_share_and_nothing_else_moves(each, count, replicas):
    depth = min(replicas, count - 1) + 1
    sizes = [10] * (each * count * (count + 1))
    chains = assign(sizes, {rank: rank for rank in range(count)}, depth - 1)
    after = assign(sizes, {rank: rank for rank in range(count + 1)}, depth - 1, chains)
    assert made(chains, after) == each * count * depth
    assert {server for new in missing_copies(chains, after) for server in new} == {count}
    handed = sum(old[0] != new[0] for old, new in zip(chains, after, strict=True))
    assert handed == each * count


def test_a_hundred_servers_are_assigned_in_a_moment():
    chance = random.Random(3)
    sizes = [chance.randint(1, 4 << 20) for _ in range(1600)]
    servers = {rank: rank // 2 for rank in range(100)}
    chains = assign(sizes, servers, 1)
    after = assign(sizes, {rank: host for rank, host in servers.items() if rank != 17}, 1, chains)
    lost = sum(17 in chain for chain in chains)
    assert made(chains, after) <= 1.5 * lost
