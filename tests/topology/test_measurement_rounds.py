"""Every pair is measured once, and no host twice in a round."""

from __future__ import annotations

import itertools

import pytest

from psctl.topology.network.measurement_rounds import rounds


@pytest.mark.parametrize("count", range(18))
def test_every_pair_is_measured_once_in_the_least_number_of_rounds(count: int) -> None:
    hosts = [f"h{index}" for index in range(count)]
    found = rounds(hosts)
    met = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in itertools.combinations(hosts, 2)}
    assert len(found) == (0 if count < 2 else count - 1 if count % 2 == 0 else count)
    for pairs in found:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
