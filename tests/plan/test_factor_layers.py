"""Which linear layers send factors in place of gradients: the formulas, and the choice of a job."""

from __future__ import annotations

import msgspec
import pytest

from psctl.errors import UsageError
from psctl.orders import JobOrder
from psctl.plan.choose import choose
from psctl.plan.factor_layers import CORE, GPU, factored_layers, operations_per_second
from psctl.types import Layout, ParameterInfo
from tests.plan.test_choose import MBIT, host, order

FAST = 1e30
"""Operations a second: products take no time."""


def linear(name: str, out: int, in_: int, **changes: bool) -> ParameterInfo:
    return ParameterInfo(name, (out, in_), "float32", 0, **{"linear": True, **changes})


def layout(*parameters: ParameterInfo) -> Layout:
    return Layout(parameters, "SGD", ())


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_square_layer_is_sent_so_while_the_rows_of_all_ranks_are_fewer_than_half_its_side(world: int) -> None:
    side = 4096
    most = side // (2 * world)
    for rows, expected in ((most - 1, ("fc",)), (most, ())):
        found = factored_layers(layout(linear("fc", side, side)), world, rows, 4, 1e-9, FAST)
        assert found.names == expected


def test_the_bytes_are_those_of_the_vectors_that_are_summed() -> None:
    found = factored_layers(layout(linear("a", 1000, 2000), linear("b", 10, 10)), 4, 8, 4, 1e-9, FAST)
    assert (found.names, found.dense, found.factors) == (("a",), 4 * 2_000_000, 4 * 4 * 8 * 3000)


def test_products_that_take_longer_than_the_bytes_are_left() -> None:
    one = layout(linear("fc", 4096, 4096))
    spared = 4 * (4096 * 4096 - 4 * 32 * 8192)
    more = 2 * 3 * 32 * 4096 * 4096
    even = more / (spared * 1e-9)
    assert factored_layers(one, 4, 32, 4, 1e-9, even * 1.01).names == ("fc",)
    assert factored_layers(one, 4, 32, 4, 1e-9, even * 0.99).names == ()


def test_other_parameters_and_frozen_ones_are_not_considered() -> None:
    given = layout(linear("tied", 4096, 4096, linear=False), linear("frozen", 4096, 4096, trainable=False))
    assert factored_layers(given, 2, 1, 4, 1e-9, FAST).names == ()


def test_the_slowest_rank_counts() -> None:
    hosts = [host("a", workers=1), host("b", workers=2), host("c", workers=0)]  # of four cores each
    assert operations_per_second(hosts, on_gpus=False) == 2 * CORE
    assert operations_per_second(hosts, on_gpus=True) == GPU


def job(rows: int | None, **changes: object) -> JobOrder:
    hosts = [host(f"h{index}", rate=500 * MBIT) for index in range(4)]
    return msgspec.structs.replace(order(*hosts), factor_rows=rows, update="worker", **changes)


MODEL = layout(linear("wide", 4096, 4096), linear("narrow", 64, 64), ParameterInfo("bias", (4096,), "float32", 0))


def test_a_job_on_slow_links_sends_factors_and_says_so() -> None:
    plain = choose(job(None), None, MODEL, decided=True)
    assert plain.factors == ()
    plan = choose(job(16), None, MODEL, decided=True)
    assert plan.factors == ("wide",)
    assert plan.reason.endswith("; gradients of 1 linear layer are sent as factors: 2.1 MB for 67.1 MB")
    assert plan.event(0.0).factors == ["wide"]
    assert plan.size == plain.size, "bytes of gradients"
    assert plan.seconds < plain.seconds / 10
    ps = {each.strategy: each.seconds for each in plan.candidates}["ps"]
    assert ps == {each.strategy: each.seconds for each in plain.candidates}["ps"], "servers receive gradients"


def test_nothing_changes_where_no_layer_gains() -> None:
    assert choose(job(1000), None, MODEL, decided=True) == choose(job(None), None, MODEL, decided=True)
    assert choose(job(16), None, None, decided=False) == choose(job(None), None, None, decided=False)


def test_gradients_of_distributed_data_parallel_come_without_factors() -> None:
    with pytest.raises(UsageError, match=r"sync\.factor_rows with gradients from DistributedDataParallel"):
        choose(job(16), None, MODEL, decided=True, hooked=True)
