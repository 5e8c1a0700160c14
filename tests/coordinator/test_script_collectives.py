"""Workers connect for the collectives of scripts at the first call; from then on a lost worker has all start again."""

from __future__ import annotations

import pytest

from psctl.coordinator.state.instructions import CollectivesPlanned, Instruction, PlanCollectives, SendMessage
from psctl.job.training_messages import CollectiveChoice, ListenForRanks, RankListens, RanksAt, RanksWanted
from psctl.types import Address, Member
from tests.helpers.driven_job import W0, W1, DrivenJob, asks
from tests.helpers.driven_job import training as training_with_servers
from tests.helpers.ring_job import W, training

CHOICES = [CollectiveChoice("broadcast", 1 << 20, "tree")]


def sent(found: list[Instruction], kind: type) -> dict[Member, object]:
    return {
        each.member: each.message for each in found if isinstance(each, SendMessage) and isinstance(each.message, kind)
    }


def listens(rank: int) -> RankListens:
    return RankListens(Address(f"10.0.0.{rank}", 4000), bytes([rank] * 16))


def test_the_first_call_has_all_workers_listen_and_connect_when_the_plan_is_there() -> None:
    job = training()
    asked = job.receive(W[1], RanksWanted())
    assert set(sent(asked, ListenForRanks)) == set(W) and any(isinstance(each, PlanCollectives) for each in asked)
    assert not sent(job.receive(W[0], RanksWanted()), ListenForRanks)  # once
    for rank in (2, 0, 1):
        assert not sent(job.receive(W[rank], listens(rank)), RanksAt)
    found = sent(job.handle(CollectivesPlanned(3, CHOICES)), RanksAt)
    assert set(found) == set(W)
    for rank, member in enumerate(W):
        at = found[member]
        assert isinstance(at, RanksAt) and at.choices == CHOICES and not at.problem
        assert [each.address for each in at.workers] == [Address(f"10.0.0.{each}", 4000) for each in range(3)]
        assert [bool(each.secret) for each in at.workers] == [each == rank for each in range(3)]  # one worker a host


def test_a_plan_for_another_number_of_workers_does_not_count() -> None:
    job = training()
    job.receive(W[0], RanksWanted())
    for rank in range(3):
        job.receive(W[rank], listens(rank))
    assert not sent(job.handle(CollectivesPlanned(4, CHOICES)), RanksAt)
    assert sent(job.handle(CollectivesPlanned(3, [])), RanksAt)


def test_a_worker_that_joins_later_is_asked_then() -> None:
    job = DrivenJob().running()
    job.joins(W0)
    assert set(sent(job.receive(W0, RanksWanted()), ListenForRanks)) == {W0}
    assert W1 in sent(job.joins(W1), ListenForRanks)


@pytest.mark.parametrize("calls", [False, True])
def test_after_a_call_a_lost_worker_has_all_start_again_under_a_ring(calls: bool) -> None:
    job = training()
    if calls:
        job.receive(W[0], RanksWanted())
    job.killed(W[2])
    assert (job.machine.job.restart is not None) == calls


@pytest.mark.parametrize("calls", [False, True])
def test_after_a_call_a_lost_worker_has_all_start_again_under_ps(calls: bool) -> None:
    job = training_with_servers()
    if calls:
        job.receive(W0, RanksWanted())
    job.killed(W1)
    assert (job.machine.job.restart is not None) == calls


def test_after_a_call_the_number_of_workers_is_fixed() -> None:
    job = training_with_servers()
    job.receive(W0, RanksWanted())
    assert "call collectives" in asks(job, workers=1).problem


def test_a_call_after_another_script_has_ended_is_refused_with_the_reason() -> None:
    job = training()
    job.machine.job.ranks[W[1]].finished = True
    answer = sent(job.receive(W[0], RanksWanted()), RanksAt)[W[0]]
    assert isinstance(answer, RanksAt) and "worker/1" in answer.problem and "end of its script" in answer.problem
    assert not job.machine.job.collectives.wanted
    assert answer.workers == []
