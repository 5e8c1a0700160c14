"""The order of sums: by host where that saves network, sent, in checkpoints, kept by a job that resumes elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from psctl.job import events
from psctl.job.training_messages import Decision, Resume
from tests.helpers.driven_job import ORDER, DrivenJob, appended, notices, sent

SHARED = replace(ORDER, hosts=[replace(ORDER.hosts[0], workers=2), replace(ORDER.hosts[1], workers=0)])
APART = ORDER


def trained(order: Any, sums: dict[str, Any] | None = None, world: int = 2, strategy: str = "ps") -> DrivenJob:
    """A job that trains; from a checkpoint that holds this order of sums."""
    job = DrivenJob(order)
    if sums is not None:
        job.machine.job.resume = Resume("digits-2@8", 8, {"sums": sums, "world": world, "strategy": strategy}, [])
    return job.training()


def order_of(job: DrivenJob) -> tuple[Any, str, dict[str, Any]]:
    """Return the groups that ranks are sent, what the plan event says, and what goes into checkpoints."""
    (_, decision), *_ = sent(job.instructions, Decision)
    return decision.hosts, appended(job.instructions, events.Planned)[-1].sums, decision.sums


def test_ranks_that_share_a_host_are_summed_first_and_that_is_reported_and_recorded() -> None:
    groups, words, recorded = order_of(trained(SHARED))
    assert groups == ((0, 1),)
    assert words == "by host, h0 (0, 1), then the others in rank order"
    assert recorded["groups"] == [[0, 1]]
    assert order_of(trained(APART))[:2] == ((), "in rank order")


def order_notices(job: DrivenJob) -> list[str]:
    return [text for text in notices(job.instructions) if "summed in another order" in text]


@pytest.mark.parametrize(
    ("order", "sums", "expected"),
    [(SHARED, [], ()), (APART, [[0, 1]], ((0, 1),)), (SHARED, [[0, 1]], ((0, 1),))],
)
def test_a_job_that_resumes_on_other_hosts_keeps_the_order_of_its_checkpoint(order, sums, expected) -> None:
    job = trained(order, {"groups": sums, "schedule": {}})
    assert order_of(job)[0] == expected
    assert order_notices(job) == []


def test_groups_that_do_not_fit_are_not_taken_and_another_number_of_workers_groups_anew() -> None:
    for wrong in ([[0, 0]], [[0, 7]]):
        job = trained(SHARED, {"groups": wrong, "schedule": {}})
        assert order_of(job)[0] == ((0, 1),)
        assert len(order_notices(job)) == 1
    job = trained(SHARED, {"groups": [], "schedule": {}}, world=3)
    assert order_of(job)[0] == ((0, 1),)
    assert order_notices(job) == [], "no bits are promised there"


def test_another_strategy_than_the_checkpoints_gives_a_notice_that_bits_may_differ() -> None:
    job = trained(APART, {"groups": [], "schedule": {"rings": [[0, 1]]}}, strategy="ring")
    assert len(order_notices(job)) == 1
