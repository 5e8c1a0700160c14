"""The order of sums: by host where that saves network, told, in checkpoints, kept by a job that goes on elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from psctl.job import events
from psctl.job.training_messages import Decision, Resume
from tests.coordinator.play import ORDER, Play, appended, told

SHARED = replace(ORDER, hosts=[replace(ORDER.hosts[0], workers=2), replace(ORDER.hosts[1], workers=0)])
APART = ORDER


def trained(order: Any, sums: dict[str, Any] | None = None, world: int = 2, strategy: str = "ps") -> Play:
    """A job that trains; from a checkpoint that holds this order of sums."""
    play = Play(order)
    if sums is not None:
        play.mind.job.resume = Resume("digits-2@8", 8, {"sums": sums, "world": world, "strategy": strategy}, [])
    return play.training()


def order_of(play: Play) -> tuple[Any, str, dict[str, Any]]:
    """Return the groups that ranks are told, what the plan event says, and what goes into checkpoints."""
    (_, decision), *_ = told(play.said, Decision)
    return decision.hosts, appended(play.said, events.Planned)[-1].sums, decision.sums


def notices(play: Play) -> list[str]:
    return [event.text for event in appended(play.said, events.Notice) if "summed in another order" in event.text]


def test_ranks_that_share_a_host_are_summed_first_and_that_is_told_and_recorded() -> None:
    groups, words, recorded = order_of(trained(SHARED))
    assert groups == ((0, 1),)
    assert words == "by host, h0 (0, 1), then the others in rank order"
    assert recorded["groups"] == [[0, 1]]
    assert order_of(trained(APART))[:2] == ((), "in rank order")


@pytest.mark.parametrize(
    ("order", "sums", "expected"),
    [(SHARED, [], ()), (APART, [[0, 1]], ((0, 1),)), (SHARED, [[0, 1]], ((0, 1),))],
)
def test_a_job_that_goes_on_on_other_hosts_sums_as_its_checkpoint_says(order, sums, expected) -> None:
    play = trained(order, {"groups": sums, "schedule": {}})
    assert order_of(play)[0] == expected
    assert notices(play) == []


def test_groups_that_do_not_fit_are_not_taken_and_another_number_of_workers_groups_anew() -> None:
    for wrong in ([[0, 0]], [[0, 7]]):
        play = trained(SHARED, {"groups": wrong, "schedule": {}})
        assert order_of(play)[0] == ((0, 1),)
        assert len(notices(play)) == 1
    play = trained(SHARED, {"groups": [], "schedule": {}}, world=3)
    assert order_of(play)[0] == ((0, 1),)
    assert notices(play) == [], "no bits are promised there"


def test_another_strategy_than_the_checkpoints_says_that_bits_may_differ() -> None:
    play = trained(APART, {"groups": [], "schedule": {"rings": [[0, 1]]}}, strategy="ring")
    assert len(notices(play)) == 1
