"""Numbers of many ranks become one, whatever order they come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.coordinator.state.progress import RankReports
from psctl.job.training_messages import StepReport, WorkerReport


def report(step: int, *steps: StepReport) -> WorkerReport:
    return WorkerReport(step, 0, list(steps), 10.0, 0.2, 0.1, (("", 600, 400),), hidden_seconds=0.04)


def test_a_value_is_the_mean_weighted_by_examples_over_the_ranks_that_reported_it() -> None:
    reports = RankReports(0.0)
    reports.add(0, report(1, StepReport(1, 0, 3.0, {"loss": 1.0, "accuracy": 0.5})))
    reports.add(1, report(1, StepReport(1, 0, 1.0, {"loss": 5.0})))
    assert reports.complete({0, 1}) == 1
    assert reports.at(1) == {"accuracy": 0.5, "loss": 2.0}
    assert reports.last_values() == {"accuracy": 0.5, "loss": 2.0}


def test_ranks_without_examples_count_equally() -> None:
    reports = RankReports(0.0)
    reports.add(0, report(1, StepReport(1, 0, 0.0, {"loss": 1.0})))
    reports.add(1, report(1, StepReport(1, 0, 0.0, {"loss": 2.0})))
    assert reports.at(1) == {"loss": 1.5}


def test_a_step_is_complete_when_every_live_rank_has_passed_it() -> None:
    reports = RankReports(0.0)
    reports.add(0, report(3, *[StepReport(step, 0, 1.0, {"loss": 1.0}) for step in (1, 2, 3)]))
    assert reports.complete({0, 1}) is None
    reports.add(1, report(2, StepReport(1, 0, 1.0, {"loss": 1.0})))
    assert reports.complete({0, 1}) == 1
    assert reports.complete({0}) == 3
    reports.finish(1, 3)
    assert reports.complete({0, 1}) == 3


def test_what_one_rank_reports_after_the_last_step_joins_it() -> None:
    reports = RankReports(0.0)
    reports.add(0, report(9, StepReport(9, 0, 1.0, {"loss": 1.0})))
    assert reports.complete({0}) == 9
    reports.add(0, report(9, StepReport(9, 0, 1.0, {"accuracy": 0.97})))
    assert reports.complete({0}) == 9
    assert reports.last_values() == {"accuracy": 0.97, "loss": 1.0}


def test_rates_are_over_the_interval_and_seconds_are_per_step() -> None:
    reports = RankReports(100.0)
    reports.add(0, report(2))
    reports.add(1, report(2))
    rates = reports.rates(102.0)
    assert (rates.examples_per_second, rates.bytes_per_second) == (10.0, 1000.0)
    assert (rates.compute_seconds, rates.sync_seconds) == (pytest.approx(0.1), pytest.approx(0.05))
    assert rates.hidden_seconds == pytest.approx(0.02)
    assert reports.rates(104.0).examples_per_second == 0.0


@given(st.permutations([(rank, step) for rank in range(3) for step in range(1, 5)]))
def test_the_order_of_reports_does_not_matter(order: list[tuple[int, int]]) -> None:
    reports = RankReports(0.0)
    for rank, step in order:
        reports.add(rank, report(step, StepReport(step, 0, 0.1 + rank, {"loss": step / (rank + 0.7)})))
    straight = RankReports(0.0)
    for rank in range(3):
        for step in range(1, 5):
            straight.add(rank, report(step, StepReport(step, 0, 0.1 + rank, {"loss": step / (rank + 0.7)})))
    assert reports.complete({0, 1, 2}) == straight.complete({0, 1, 2}) == 4
    assert reports.last_values() == straight.last_values()
