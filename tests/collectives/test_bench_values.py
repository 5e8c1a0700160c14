"""`psctl bench broadcast|...`: every algorithm has the right result, and a wrong one is detected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from psctl.launch.bench.bench_runs import bus_factor
from psctl.schedule.algorithms.collectives import ALGORITHMS
from psctl.schedule.contracts import Collective
from psctl.worker.bench_collectives import ROOT, CollectiveValues, PlayedCollective
from tests.helpers.data_planes import DataPlanes

CASES = [(collective, algorithm) for collective, known in ALGORITHMS.items() for algorithm in known]


@pytest.mark.parametrize(("collective", "algorithm"), CASES, ids=[" by ".join(case) for case in CASES])
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1)], ids=str)
def test_a_played_collective_is_right_and_a_damaged_one_is_not(
    hosts: tuple[int, ...], collective: Collective, algorithm: str
) -> None:
    world, right, damaged = len(hosts), [False] * len(hosts), [True] * len(hosts)
    with DataPlanes(hosts) as planes:

        def run(rank: int) -> None:
            values = CollectiveValues(collective, rank, world, 4099)
            group: Any = None  # the plane moves it
            one = PlayedCollective(
                algorithm, {"chunks": 2}, values, collective, rank, world, planes.planes[rank], group,
                torch.device("cpu"),
            )  # fmt: skip
            for _ in range(2):
                one.vector.copy_(values.mine())
                one.run()
            right[rank] = values.is_right(one.vector)
            one.vector.add_(1)
            damaged[rank] = values.is_right(one.vector)
            one.close()

        assert not any(planes.all(run))
    assert all(right)
    gets = range(world) if collective not in ("gather", "reduce") else [ROOT]
    assert not any(damaged[rank] for rank in gets)


def test_bus_bandwidth_is_counted_as_nccl_tests_count_it() -> None:
    factors = {name: bus_factor(name, 8) for name in ALGORITHMS}  # type: ignore[arg-type]
    assert factors.pop("broadcast") == factors.pop("reduce") == 1.0
    assert set(factors.values()) == {7 / 8}
