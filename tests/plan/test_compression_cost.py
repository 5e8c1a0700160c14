"""What compression does to a plan: the bytes that really travel, the processors' time, and who can do it at all."""

from __future__ import annotations

import pytest
import torch

from psctl.errors import UsageError
from psctl.plan.choose import Plan, Planner
from psctl.plan.compression_cost import coding
from psctl.plan.plan_input import PlanInput, PlanRequest
from psctl.ps.compression.error_feedback import Coder
from psctl.ps.pieces import Piece
from psctl.types import PLAIN, STRATEGIES, Compression
from tests.plan.test_choose import MBIT, host, names, seconds, star, wired

SIZE = 100_000_000
EVERY = [
    Compression("bf16"), Compression("int8"), Compression("onebit"), Compression("topk", share=0.01),
    Compression("none", skip=0.5), Compression("int8", significance=0.5), Compression("topk", share=0.1, skip=0.5),
]  # fmt: skip


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_what_is_predicted_of_bytes_is_what_codes_take(how: Compression) -> None:
    count = 20_000
    coder, held = Coder(how, torch.float32), [Piece(0, 0, 0, count)]
    residual = torch.zeros(count) if how.feedback else None
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    out = torch.zeros(coder.limit(held), dtype=torch.uint8)
    used = coder.encode(values, held, [True], residual, out)
    assert coding(how, "server").push == pytest.approx(used / (4 * count), rel=0.05)


def planned(how: Compression, strategy: str = "auto", update: str = "auto", idle: int = 0) -> Plan:
    hosts = [*names(4), *(f"idle{index}" for index in range(idle))]
    inputs = PlanInput(wired(star(hosts), hosts), names(4), hosts)
    roster = [host(name, int(name in names(4))) for name in hosts]
    return Planner(inputs, roster, PlanRequest(strategy, update, bucketed=True, compression=how)).plan(SIZE)


def test_halves_take_half_the_wire_under_every_collective() -> None:
    plain, half = planned(PLAIN), planned(Compression("bf16"))
    for name in ("native", "ring", "halving-doubling", "sharded", "double-tree"):
        codes = SIZE * (6e-11 + 1.5e-10)
        assert seconds(half, name) == pytest.approx(seconds(plain, name) / 2 + codes, rel=0.02)
    both = [{each.strategy: each for each in plan.candidates} for plan in (plain, half)]
    assert both[1]["ring"].bytes_per_rank == pytest.approx((both[0]["ring"].bytes_per_rank or 0) / 2)
    assert both[1]["ring"].params["compression"] == "bf16"
    assert "compression" not in both[0]["ring"].params


@pytest.mark.parametrize("how", [each for each in EVERY if not each.halves], ids=str)
def test_what_servers_alone_can_do_leaves_ps_alone(how: Compression) -> None:
    plan = planned(how)
    assert plan.chosen == "ps"
    out = {each.strategy: each.why_not for each in plan.candidates if not each.feasible}
    assert out.keys() == {*STRATEGIES} - {"ps"}
    assert out["native"] == f"compression: {how} is requested, which only servers support"
    with pytest.raises(UsageError, match="is not possible here"):
        planned(how, "ring")


def test_a_push_is_small_and_a_pull_of_values_is_not() -> None:
    once = SIZE / (200 * MBIT)
    plain = seconds(planned(PLAIN, "ps", "server", idle=4), "ps")
    small = seconds(planned(Compression("onebit"), "ps", "server", idle=4), "ps")
    assert small == pytest.approx(plain * (1 + 1 / 32) / 2 + SIZE * 1e-9, rel=0.05)
    halves = seconds(planned(Compression("bf16"), "ps", "worker", idle=4), "ps")
    assert halves == pytest.approx(once / 2, rel=0.1)
    assert 0.9 * once < seconds(planned(Compression("int8"), "ps", "worker", idle=4), "ps") < 1.3 * once
