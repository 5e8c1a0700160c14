"""The time of a step: compute, and the part of the synchronisation that it hides, by strategy."""

from __future__ import annotations

import msgspec
import pytest

from psctl.errors import UsageError
from psctl.plan.choose import choose
from psctl.plan.overlap import after_period, pushed_and_pulled, summed_in_backward, without_waiting
from psctl.types import DIVISIBLE
from tests.plan.test_choose import host, names, order


def test_one_bucket_is_summed_when_backward_has_ended() -> None:
    assert summed_in_backward(3.0, [1.0], [0.5]).seconds == pytest.approx(3.5)
    assert summed_in_backward(3.0, [1.0], [0.5]).hidden == pytest.approx(0.0)


def test_all_but_the_last_bucket_may_be_hidden() -> None:
    step = summed_in_backward(3.0, [1.0] * 4, [0.4] * 4)  # a quarter of 2 s of backward takes longer than a sum
    assert step.seconds == pytest.approx(3.4)
    assert step.hidden == pytest.approx(1.2)


def test_sums_longer_than_backward_follow_one_another() -> None:
    step = summed_in_backward(3.0, [1.0] * 4, [1.0] * 4)
    assert step.seconds == pytest.approx(1.0 + 0.5 + 4.0)
    assert step.hidden == pytest.approx(1.5)


def test_the_recursion_of_the_literature() -> None:
    """C_i = max(C_(i-1), B_i) + c_i, with unequal parts."""
    parts, times = [1.0, 4.0, 5.0], [0.3, 0.9, 0.2]
    end, computed = 0.0, 0.0
    for part, seconds in zip(parts, times, strict=True):
        computed += part
        end = max(end, 2.0 * computed / 10.0) + seconds
    assert summed_in_backward(3.0, parts, times).seconds == pytest.approx(1.0 + end)


def test_values_are_pulled_while_the_next_forward_computes() -> None:
    """With many shards: max(2/3 C, push) + max(1/3 C, pull), as steps with `ps` were measured to be."""
    for compute, pushing, pulling in [(3.0, 1.0, 0.5), (3.0, 4.0, 2.0), (3.0, 1.0, 2.0), (0.3, 1.0, 1.0)]:
        step = pushed_and_pulled(compute, pushing, pulling, 2000)
        whole = max(2 / 3 * compute, pushing) + max(compute / 3, pulling)
        assert step.seconds == pytest.approx(whole, rel=1e-2)
        assert step.hidden == pytest.approx(compute + pushing + pulling - step.seconds)
    assert pushed_and_pulled(3.0, 1.0, 1.0, 1).seconds == pytest.approx(5.0), "one shard overlaps with nothing"


@pytest.mark.parametrize(
    ("compute", "half", "seconds"),
    [
        (3.0, 1.5, 3.0),  # compute as long as both halves: all is hidden
        (3.0, 1.0, 3.0),  # forward hides the values alone
        (3.0, 1.75, 3.5),  # 0.25 s of backward are left, and as much less is left to forward
        (3.0, 2.5, 5.0),  # the links never rest
    ],
)
def test_values_also_travel_in_backward_where_some_buckets_step_there(compute, half, seconds) -> None:
    step = pushed_and_pulled(compute, half, half, 2000, in_backward=True)
    assert step.seconds == pytest.approx(seconds, rel=1e-2)
    assert step.hidden == pytest.approx(compute + 2 * half - step.seconds)
    assert step.seconds <= pushed_and_pulled(compute, half, half, 2000).seconds


def test_no_wait_and_periods() -> None:
    assert without_waiting(2.0, 3.0).seconds == 3.0
    assert without_waiting(2.0, 0.5).hidden == 0.5
    assert after_period(2.0, 1.0, 4).seconds == 2.25


SIZE = 100_000_000


def planned(**changes):
    return choose(msgspec.structs.replace(order(*map(host, names(4))), **changes), SIZE, None, decided=False)


def test_a_plan_compares_steps_where_their_compute_is_known() -> None:
    alone, known = planned(), planned(compute=2.0)
    assert all(row.step_seconds is None for row in alone.candidates)
    before = {row.strategy: row for row in alone.candidates}
    for row in known.candidates:
        if row.feasible:
            assert row.seconds == before[row.strategy].seconds, "the synchronisation itself is as long"
            assert row.step_seconds == pytest.approx(2.0 + row.seconds - row.hidden_seconds, abs=1e-6)
            assert 0 <= row.hidden_seconds <= row.seconds + 1e-9
    feasible = [row for row in known.candidates if row.feasible]
    rest = [row.step_seconds for row in feasible if row.strategy != known.chosen]
    assert rest == sorted(rest)
    assert "times are of a step with 2 s of compute" in known.reason
    assert {row.strategy: row for row in feasible}["ring"].hidden_seconds > 0.2


def steps(plan):
    return {row.strategy: row.step_seconds for row in plan.candidates if row.feasible}


def test_a_sharded_optimizer_hides_half_of_the_sum_behind_the_next_forward() -> None:
    whole, parts = planned(compute=1.0, update="worker"), planned(compute=1.0, update="sharded")
    assert (whole.update, parts.update) == ("worker", "sharded")
    assert steps(parts)["ring"] < 0.95 * steps(whole)["ring"]
    assert parts.reason.endswith("; each worker steps a part of the parameters")
    refused = {row.strategy: row.why_not for row in parts.candidates if not row.feasible}
    assert set(DIVISIBLE).isdisjoint(refused)
    assert refused["tree"] == "update: sharded is requested, which needs a sum that is divided among the workers"
    assert refused["ps"] == "update: sharded is requested, but under ps the servers step"


def test_the_plan_shards_the_optimizer_where_the_compute_is_known_and_that_is_faster() -> None:
    known = {"compute": 1.0, "strategy": "ring"}
    assert planned(**known, update="auto").update == "sharded"
    requested = steps(planned(**known, update="sharded"))["ring"]
    assert steps(planned(**known, update="auto"))["ring"] == pytest.approx(requested, rel=0.03)
    assert planned(strategy="ring", update="auto").update == "worker", "the compute is not known"
    assert planned(**known, update="worker").update == "worker"
    assert planned(**known, update="auto", bucket=0).update == "worker"
    assert planned(strategy="ring", update="auto", compute=3.0).update == "worker", "backward hides all of it"
    what = msgspec.structs.replace(order(*map(host, names(4))), update="auto", **known)
    assert choose(what, SIZE, None, decided=True, in_parts=False).update == "worker"
    assert choose(what, SIZE, None, decided=True, hooked=True).update == "worker"


def test_steps_in_backward_are_predicted_for_schedules_alone() -> None:
    known = {"compute": 1.3, "update": "sharded"}
    late, early = planned(**known), planned(**known, step_in_backward=True)
    assert steps(early)["ring"] < 0.95 * steps(late)["ring"]
    assert steps(early)["native"] == steps(late)["native"]


def test_servers_of_their_own_return_values_while_others_are_pushed() -> None:
    late = pushed_and_pulled(3.0, 2.0, 2.0, 20)
    beside = pushed_and_pulled(3.0, 1.5, 1.5, 20, in_backward=True)
    apart = pushed_and_pulled(3.0, 2.0, 2.0, 20, in_backward=True, apart=True)
    assert late.seconds == pytest.approx(4.15, abs=0.1)
    assert beside.seconds == pytest.approx(pushed_and_pulled(3.0, 1.5, 1.5, 20).seconds - 0.5, abs=0.1)
    assert apart.seconds == pytest.approx(2.0 + 1.0 + 0.1, abs=0.1)


@pytest.mark.parametrize(("free", "compute"), [(0, 1.3), (2, 0.5)], ids=["beside workers", "on hosts of their own"])
def test_steps_in_backward_are_predicted_for_servers_that_step(free: int, compute: float) -> None:
    hosts = [host(name, workers=int(place < 4)) for place, name in enumerate(names(4 + free))]
    what = msgspec.structs.replace(order(*hosts, servers=free or None), compute=compute, update="server", strategy="ps")
    late, early = (
        steps(choose(msgspec.structs.replace(what, step_in_backward=given), SIZE, None, decided=True))["ps"]
        for given in (False, True)
    )
    assert early < 0.95 * late


def test_one_worker_steps_alone() -> None:
    plan = choose(msgspec.structs.replace(order(host("h0")), update="sharded"), SIZE, None, decided=True)
    assert (plan.chosen, plan.update) == ("native", "worker")


def test_a_sharded_optimizer_is_none_of_a_loop_with_ddp() -> None:
    what = msgspec.structs.replace(order(*map(host, names(4))), update="sharded")
    with pytest.raises(UsageError, match="DistributedDataParallel leaves the optimizer to the script"):
        choose(what, SIZE, None, decided=True, hooked=True)


def test_small_buckets_hide_more() -> None:
    def ring(**changes):
        plan = planned(compute=4.0, strategy="ring", **changes)
        return next(row for row in plan.candidates if row.strategy == "ring")

    assert ring(bucket=4_000_000).hidden_seconds > ring(bucket=100_000_000).hidden_seconds + 0.5


def test_a_period_hides_nothing_and_a_staleness_all() -> None:
    period = {row.strategy: row for row in planned(compute=2.0, period=4).candidates}
    assert period["ring"].step_seconds == pytest.approx(2.0 + period["ring"].seconds / 4, rel=1e-6)
    stale = {row.strategy: row for row in planned(compute=9.0, staleness=2).candidates}
    assert stale["ps"].step_seconds == pytest.approx(9.0)


def test_the_halves_of_strategy_sharded_are_played_in_one_piece() -> None:
    assert planned(strategy="sharded", update="worker").options["pieces"] > 1
    parts = planned(strategy="sharded", update="sharded")
    assert "pieces" not in parts.options, "the default"
    assert next(row for row in parts.candidates if row.strategy == "sharded").params.keys() >= {"update", "buckets"}


def test_buckets_are_smaller_where_the_optimizer_is_sharded_unless_their_size_is_given() -> None:
    def count(**changes):
        rows = {row.strategy: row for row in planned(strategy="ring", **changes).candidates}
        return rows["ring"].params["buckets"]

    assert count(update="worker") == 5
    assert count(update="sharded") == count(update="auto", compute=1.0) == 26
    assert count(update="sharded", bucket=25_000_000) == count(update="worker", bucket=25_000_000) == 5
