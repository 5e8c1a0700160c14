"""Measured times become the costs that later plans use: for the measured ranks they are predicted as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from psctl.job.bench_messages import BenchRow
from psctl.launch.bench import bench_runs, cost_fitting, message_bench
from psctl.launch.bench.bench_runs import BenchPlan, BenchRequest, BenchResult
from psctl.launch.bench.message_bench import MESSAGES
from psctl.launch.home import Home
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import calibration
from tests.launch.test_link_measurement import cluster, reached

NAMES = ("a", "b", "c", "d")
SLOWER = {"tree": 0.3, "ring": 2.0, "recursive-doubling": 1.5}
"""By strategy: measured over first predicted time; of the others it is 1.4."""


def machines(home: Path, slots: int = 1) -> ReachedCluster:
    hosts = ", ".join(f"{{address: {name}, slots: {slots}}}" for name in NAMES)
    return reached(*NAMES, home=Home(home), chosen=cluster("", f"[{hosts}]"))


def outlook(found: ReachedCluster, workers: int) -> BenchPlan:
    return bench_runs.plan_of(found, BenchRequest("allreduce", [4_000], [], workers=str(workers)))


def results(plan: BenchPlan, sizes: tuple[int, ...]) -> list[BenchResult]:
    """What a bench would have measured."""
    found = []
    for size in sizes:
        for each in plan.plan(size).candidates:
            if not each.feasible or each.strategy == "ps":
                continue
            assert each.seconds is not None
            seconds = SLOWER.get(each.strategy, 1.4) * each.seconds
            row = BenchRow("allreduce", each.strategy, size, plan.inputs.world, [seconds], True)
            found.append(BenchResult(row, each.seconds))
    return found


def test_measured_times_are_predicted_afterwards_and_decide(tmp_path: Path) -> None:
    found, sizes = machines(tmp_path / "home"), (4_000, 64_000, 1_000_000)
    before = outlook(found, 4)
    measured = results(before, sizes)
    fitted = cost_fitting.calibrate(found, before, measured)
    assert set(fitted) == {"gloo", "psctl"}
    after = outlook(found, 4)
    for each in measured:
        assert after.predicted(each.row.strategy, each.row.bytes) == pytest.approx(each.median, rel=0.01)
    for size in (4_000, 64_000):
        assert before.chosen(size) != after.chosen(size) == "tree"


def test_later_times_replace_those_of_the_same_size_and_others_stay(tmp_path: Path) -> None:
    found = machines(tmp_path / "home")
    plan = outlook(found, 4)
    cost_fitting.calibrate(found, plan, results(plan, (4_000, 64_000)))
    seconds = 2 * (plan.predicted("tree", 4_000) or 0.0)
    slow = BenchResult(BenchRow("allreduce", "tree", 4_000, 4, [seconds], True), None)
    wrong = BenchResult(BenchRow("allreduce", "ring", 4_000, 4, [9.0], False), None)
    cost_fitting.calibrate(found, plan, [slow, wrong])
    ranks = dict.fromkeys(NAMES, 1)
    kept = {(each.strategy, each.bytes): each.seconds for each in calibration.sums_of(found, ranks)}
    assert {size for _, size in kept} == {4_000, 64_000}
    assert kept["tree", 4_000] == seconds
    assert kept["ring", 4_000] < 1.0
    assert outlook(found, 4).predicted("tree", 4_000) == pytest.approx(seconds, rel=0.01)


def test_other_ranks_are_planned_with_the_fitted_costs(tmp_path: Path) -> None:
    found = machines(tmp_path / "home", slots=2)
    plan = outlook(found, 8)
    cost_fitting.calibrate(found, plan, results(plan, (4_000, 64_000, 1_000_000)))
    [known] = calibration.load(found).groups
    four = outlook(found, 4)
    assert four.inputs.costs["psctl"] == known.costs.engines["psctl"]
    assert all(not pace.measured for pace in four.inputs.paces.values())
    assert any(pace.measured for pace in outlook(found, 8).inputs.paces.values())


def test_up_measures_likely_strategies_on_all_slots_the_shortest_last(tmp_path: Path) -> None:
    found = machines(tmp_path / "home", slots=2)
    assert message_bench.workers_of(found) == 8
    plan = outlook(found, 8)
    [job] = plan.jobs(MESSAGES)
    assert [each.bytes for each in job.question.rounds[:4]] == [1_000_000, 256_000, 64_000, 4_000]
    assert job.question.effort == MESSAGES.effort
    for each in job.question.rounds[:4]:
        seconds = [plan.predicted(name, each.bytes) or 0.0 for name in each.strategies]
        likely = [each for each in seconds if each <= 3 * seconds[0]]
        assert likely == sorted(likely)
        assert len(seconds) - len(likely) <= 1
        assert "native" in each.strategies
        assert "ps" not in each.strategies
    many = machines(tmp_path / "home", slots=40)
    assert message_bench.workers_of(many) == message_bench.MOST_RANKS


def test_half_of_the_ranks_measure_once_more_among_themselves(tmp_path: Path) -> None:
    found = machines(tmp_path / "home", slots=2)
    whole, half = outlook(found, 8), outlook(found, 4)
    assert message_bench.part_of(whole.inputs.hosts) == 4
    assert half.inputs.hosts == whole.inputs.hosts[:4]
    [job] = whole.jobs(MESSAGES, [half])
    assert [(each.bytes, each.ranks) for each in job.question.rounds] == [
        (1_000_000, None), (256_000, None), (64_000, None), (4_000, None), (64_000, 4), (4_000, 4), (4_000, None),
    ]  # fmt: skip
    assert all("ps" not in each.strategies for each in job.question.rounds[:-1])
    for each in job.question.rounds[4:-1]:
        rows = {row.strategy: row.params for row in half.plan(each.bytes).candidates}  # their own options
        assert each.strategies == {name: rows[name] for name in each.strategies}
        assert len(each.strategies) >= 3
    assert message_bench.part_of(("a",) * 4 + ("b",) * 4) is None  # it would have one host
    assert message_bench.part_of(("a", "b", "c", "d")) is None  # it would have two ranks
    assert message_bench.part_of(("a", "b", "c", "d", "e", "f", "g")) == 3


def test_one_measurement_of_servers_determines_what_their_messages_cost(tmp_path: Path) -> None:
    """Not how long they wait alone: their processor time would stay, and a megabyte be predicted too short."""
    found = machines(tmp_path / "home")
    before = outlook(found, 4)

    def measured(size: int, part: float) -> BenchResult:
        seconds = before.predicted("ps", size)
        assert seconds is not None
        return BenchResult(BenchRow("allreduce", "ps", size, 4, [part * seconds], True), seconds)

    assert not cost_fitting.calibrate(found, before, [measured(100_000_000, 1.3)])  # that shows the links' rates only
    home = machines(tmp_path / "other")
    fitted = cost_fitting.calibrate(home, before, [measured(4_000, 0.3)])["ps"].costs
    assumed = before.inputs.costs["ps"]
    assert fitted.alpha < assumed.alpha and fitted.overhead < assumed.overhead
    after = outlook(home, 4)
    assert after.predicted("ps", 4_000) == pytest.approx(0.3 * (before.predicted("ps", 4_000) or 0.0), rel=0.01)
    assert after.inputs.pace("ps").waiting == pytest.approx(1.0, abs=0.2)


def test_costs_of_different_ranks_are_kept_side_by_side(tmp_path: Path) -> None:
    found, sizes = machines(tmp_path / "home"), (4_000, 64_000, 1_000_000)
    four, two = outlook(found, 4), outlook(found, 2)
    measured = {4: results(four, sizes), 2: results(two, sizes)}
    cost_fitting.calibrate(found, four, measured[4])
    before = calibration.load(found)
    cost_fitting.calibrate(found, two, measured[2])
    assert calibration.load(found).groups[:1] == before.groups
    for workers, rows in measured.items():
        after = outlook(found, workers)
        for each in rows:
            assert after.predicted(each.row.strategy, each.row.bytes) == pytest.approx(each.median, rel=0.01)
    fewer = reached(*NAMES[:3], home=found.home, chosen=found.chosen)  # one host does not answer
    cost_fitting.calibrate(fewer, outlook(fewer, 3), results(outlook(fewer, 3), sizes))
    assert len(calibration.load(found).groups) == 3


def test_servers_are_measured_last_at_the_smallest_size(tmp_path: Path) -> None:
    found = machines(tmp_path / "home")
    [job] = outlook(found, 4).jobs(MESSAGES)
    assert (job.strategy, job.servers) == ("ps", "1")
    assert (job.question.rounds[-1].bytes, job.question.rounds[-1].strategies) == (4_000, {"ps": {}})
    assert [each.bytes for each in job.question.rounds if "ps" in each.strategies] == [4_000]


def test_no_servers_are_measured_where_no_host_may_hold_one(tmp_path: Path) -> None:
    found = reached("a", "b", home=Home(tmp_path / "home"), chosen=cluster("", "[{address: a, roles: [worker]}, "
        "{address: b, roles: [worker]}]"))  # fmt: skip
    [job] = outlook(found, 2).jobs(MESSAGES)
    assert job.strategy == "native"
    assert all("ps" not in each.strategies for each in job.question.rounds)
