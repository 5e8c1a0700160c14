"""Workers of one host push together: the plan counts one gradient a host to servers of others."""

from __future__ import annotations

import msgspec
import pytest

from psctl.plan import server_placement
from psctl.plan.choose import Planner
from psctl.plan.plan_input import PlanInput, PlanRequest
from psctl.plan.server_placement import ServingMode, time_push_pull
from psctl.schedule.algorithms import parameter_server as servers
from psctl.types import Compression
from tests.plan.test_choose import MBIT, SIZE, host, names, star, wired

ONCE = SIZE / (200 * MBIT)
HOSTS = [*names(4), *(f"idle{index}" for index in range(4))]
TWO = [name for name in names(4) for _ in range(2)]


def inputs(ranks: list[str]) -> PlanInput:
    return PlanInput(wired(star(HOSTS), HOSTS), ranks, HOSTS)


@pytest.mark.parametrize("large", [False, True], ids=["simulated", "by ports"])
@pytest.mark.parametrize(
    ("where", "pipelined", "together", "apart"),
    [
        # out of a host: its pushes to the other three quarters, beside a quarter of the values for six workers
        pytest.param(names(4), True, 0.75 + 1.5, 1.5 + 1.5, id="on their hosts, at once"),
        pytest.param(names(4), False, 0.75 + 1.5, 1.5 + 1.5, id="on their hosts, in turn"),
        pytest.param(HOSTS[4:], True, 2, 2, id="on idle hosts, at once: pulls are in the way"),
        pytest.param(HOSTS[4:], False, 1 + 2, 2 + 2, id="on idle hosts, in turn"),
    ],
)
def test_a_host_pushes_one_gradient_to_servers_of_others_and_pulls_for_each(
    where: list[str], pipelined: bool, together: float, apart: float, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(server_placement, "LARGE", 1)
    how = ServingMode(pipelined)
    for one, factor in ((how, together), (msgspec.structs.replace(how, sum_by_host=False), apart)):
        timing, _, sent = time_push_pull(inputs(TWO), where, SIZE, one)
        assert timing.seconds == pytest.approx(factor * ONCE, rel=0.12)
        alone = 0.25 if where == names(4) else 0.0
        assert sent == pytest.approx(SIZE * (1.0 if one is not how else alone + (1 - alone) / 2))


def test_one_worker_a_host_is_as_ever() -> None:
    for where in (names(4), HOSTS[4:]):
        for how in (ServingMode(), ServingMode(pipelined=False)):
            apart = msgspec.structs.replace(how, sum_by_host=False)
            assert time_push_pull(inputs(names(4)), where, SIZE, how) == time_push_pull(
                inputs(names(4)), where, SIZE, apart
            )


def test_the_schedule_adds_up_in_the_host_first_and_goes_alone_to_its_own_server() -> None:
    plan = servers.parameter_server(3, (3, 4), groups=((0, 1),), near=(0, -1))
    up = [(one.step, one.source, one.destination) for one in plan.transfers if one.action == "reduce"]
    by_chunk = [{pair for pair, one in zip(up, plan.transfers, strict=False) if one.chunk == chunk} for chunk in (0, 1)]
    assert by_chunk[0] == {(1, 0, 3), (1, 1, 3), (1, 2, 3)}
    assert by_chunk[1] == {(0, 0, 1), (1, 1, 4), (1, 2, 4)}


@pytest.mark.parametrize(
    "asked",
    [
        PlanRequest("ps", compression=Compression("bf16")),
        PlanRequest("ps", "server", staleness=2),
        PlanRequest("ps", staleness=None),
    ],
)
def test_what_is_coded_or_out_of_step_goes_alone(asked: PlanRequest) -> None:
    roster = [host(name, TWO.count(name)) for name in HOSTS]
    found = Planner(inputs(TWO), roster, asked).plan(SIZE)
    plain = Planner(inputs(TWO), roster, PlanRequest("ps", found.update)).plan(SIZE)
    ours, theirs = (next(row for row in plan.candidates if row.strategy == "ps") for plan in (found, plain))
    assert ours.bytes_per_rank is not None
    assert theirs.bytes_per_rank is not None
    assert ours.bytes_per_rank >= SIZE / 2
    assert theirs.bytes_per_rank <= 0.63 * SIZE
