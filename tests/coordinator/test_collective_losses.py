"""Lost workers of a collective: one replacement each, and new connections between all workers, numbered by epochs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.collective_losses import SETTLE
from psctl.coordinator.state.instructions import ConnectionLost, FindRestorable, StartMember
from psctl.job import events
from psctl.job.checkpoint_messages import CutAt, CutPosition, ProposeCut
from psctl.job.process_messages import EndProcesses
from psctl.job.table_server_messages import ScriptOpensStore, TablesWanted
from psctl.job.training_messages import (
    ConnectAgain,
    Decision,
    Go,
    Heartbeat,
    MemberReady,
    NotReplaceable,
    PlaneBroken,
    Prepare,
    ScriptFinished,
    Welcome,
    WorkersAt,
)
from psctl.types import Member
from tests.helpers.driven_job import LAYOUT, appended, notices, sent
from tests.helpers.ring_job import RING, W, training


def again(worker: Member) -> Member:
    return replace(worker, incarnation=worker.incarnation + 1)


def test_one_process_is_started_and_the_others_connect_again() -> None:
    job = training()
    new = job.killed(W[1])
    assert [each.member for each in new if isinstance(each, StartMember)] == [again(W[1])]
    assert sent(new, ConnectAgain) == [(worker, ConnectAgain(1, [0, 1, 2])) for worker in (W[0], W[2])]
    assert [event.rank for event in appended(new, events.WorkerLost)] == [1]
    assert not sent(new, EndProcesses)


def test_with_a_part_of_a_sharded_optimizer_lost_all_go_back_to_the_checkpoint() -> None:
    job = training(update="sharded")
    new = [*job.killed(W[1]), *job.wait(2)]
    assert not sent(new, ConnectAgain)
    assert {member for _, each in sent(new, EndProcesses) for member in each.members} == {W[0], W[2]}


def test_a_replacement_learns_all_that_the_others_know() -> None:
    job = training()
    job.killed(W[1])
    new = job.joins(again(W[1]))
    ((_, welcome),) = sent(new, Welcome)
    assert (welcome.world, welcome.hosts) == (3, [0, 1, 2])
    assert welcome.resume is not None
    assert welcome.resume.checkpoint == "", "from another worker, not from a checkpoint"
    new = job.receive(again(W[1]), Prepare(LAYOUT, ()))
    ((to, decision),) = sent(new, Decision)
    assert (to, decision.strategy) == (again(W[1]), "ring")
    assert sent(new, ConnectAgain) == [(again(W[1]), ConnectAgain(1, [0, 1, 2]))]
    assert sent(job.listens_again(W[0], W[2], epoch=1), WorkersAt) == [], "not before all listen"
    answers = sent(job.listens_again(again(W[1]), epoch=1), WorkersAt)
    assert [to for to, _ in answers] == [W[0], again(W[1]), W[2]]
    assert {answer.epoch for _, answer in answers} == {1}
    assert [at.incarnation for at in answers[0][1].workers] == [0, 1, 0]
    new = job.receive(again(W[1]), MemberReady())
    assert [to for to, _ in sent(new, Go)] == [again(W[1])]
    assert job.machine.state == "running"


def test_addresses_of_an_earlier_epoch_count_no_more() -> None:
    job = training()
    job.killed(W[1])
    job.listens_again(W[0], W[2], epoch=1)
    new = job.killed(again(W[1]))
    assert sent(new, ConnectAgain) == [(worker, ConnectAgain(2, [0, 1, 2])) for worker in (W[0], W[2])]
    third = again(again(W[1]))
    job.joins(third)
    job.receive(third, Prepare(LAYOUT, ()))
    late = job.listens_again(W[0], epoch=1)
    assert sent([*late, *job.listens_again(W[2], third, epoch=2)], WorkersAt) == []
    assert len(sent(job.listens_again(W[0], epoch=2), WorkersAt)) == 3


def test_connections_that_break_without_a_loss_are_made_again() -> None:
    job = training()
    new = job.receive(W[0], PlaneBroken(0, "reset", (2,)))
    new += job.receive(W[2], PlaneBroken(0, "reset"))
    assert not sent(new, ConnectAgain), "a loss may be reported in a moment"
    new = job.wait(SETTLE + 0.2)
    assert [to for to, _ in sent(new, ConnectAgain)] == W
    assert job.machine.job.losses.survived == 0
    assert any("do not reach each other" in text for text in notices(job.instructions))
    assert not sent([*job.receive(W[0], PlaneBroken(0, "late")), *job.wait(5)], ConnectAgain), (
        "of an epoch that is over"
    )


def test_a_host_that_others_do_not_reach_is_given_up_after_the_stall() -> None:
    job = training()
    for epoch in range(12):
        job.receive(W[1], PlaneBroken(epoch, "no answer", (2,)))
        job.wait(6)
        for worker in (W[0], W[1], W[2]):
            if worker in job.machine.job.ranks:
                job.receive(worker, Heartbeat(1, "sync: waiting for a worker that is started again", shares=True))
    lost = appended(job.instructions, events.WorkerLost)
    assert len(lost) == 1
    assert lost[0].rank in (1, 2)
    assert job.machine.job.partitions.given_up
    assert FindRestorable() not in job.instructions


@pytest.mark.parametrize(
    "why",
    [
        "its batches are not of psctl's loader", "an optimizer steps apart", "on GPUs", "a store", "a worker has ended",
        "on_worker_loss: restart", "period",
    ],
)  # fmt: skip
def test_where_no_worker_can_give_its_state_all_start_again(why: str) -> None:
    order = RING
    if why == "on_worker_loss: restart":
        order = replace(RING, on_worker_loss="restart")
    if why == "period":
        order = replace(RING, period=4)
    job = training(
        order, shares=why != "its batches are not of psctl's loader", outer=why == "an optimizer steps apart",
        on_gpus=why == "on GPUs",
    )  # fmt: skip
    if why == "a store":
        job.receive(W[0], ScriptOpensStore())
        job.receive(W[0], TablesWanted())
    if why == "a worker has ended":
        job.receive(W[2], ScriptFinished(1))
    new = [*job.killed(W[1]), *job.wait(7)]
    assert not sent(new, ConnectAgain)
    assert sent(new, EndProcesses)


def test_tables_of_rows_that_step_with_the_model_keep_no_worker_from_being_replaced() -> None:
    job = training()
    job.receive(W[0], TablesWanted())
    assert sent(job.killed(W[1]), ConnectAgain)


def test_when_no_worker_has_the_state_all_start_again_and_the_loss_counts_once() -> None:
    job = training()
    job.killed(W[0])
    job.joins(again(W[0]))
    job.receive(again(W[0]), Prepare(LAYOUT, ()))
    new = job.receive(W[1], NotReplaceable("only worker/0 had its objects"))
    new += job.receive(W[2], NotReplaceable("only worker/0 had its objects"))
    assert sent(new, EndProcesses)
    assert len([text for text in notices(new) if "cannot be replaced while the others" in text]) == 1
    assert job.machine.job.losses.survived == 1


def test_the_loss_of_every_worker_restarts_from_the_checkpoint() -> None:
    job = training()
    for worker in W[:2]:
        job.killed(worker)
    new = job.killed(W[2])
    assert not sent(new, ConnectAgain)
    assert sent([*new, *job.wait(7)], EndProcesses)


def test_a_replacement_gets_the_common_step_that_was_agreed_on_before() -> None:
    job = training(replace(RING, checkpoint=replace(RING.checkpoint, every_seconds=1.0)))
    new = job.wait(1.5)
    ((_, asked), *_) = sent(new, ProposeCut)
    for worker in (W[0], W[2]):
        job.receive(worker, CutPosition(asked.ticket, 5))
    new = job.killed(W[1])
    assert [(to, cut.step) for to, cut in sent(new, CutAt)] == [(W[0], 6), (W[2], 6)]
    job.joins(again(W[1]))
    job.receive(again(W[1]), Prepare(LAYOUT, ()))
    new = job.receive(again(W[1]), MemberReady())
    assert [(to, cut.step) for to, cut in sent(new, CutAt)] == [(again(W[1]), 6)]


def test_the_workers_of_a_lost_host_move_to_free_slots() -> None:
    job = training()
    new = job.handle(ConnectionLost(Member("agent", 2), "silent"))
    (start,) = [each for each in new if isinstance(each, StartMember)]
    assert (start.member, start.host) == (again(W[2]), 0)
    assert {tuple(news.hosts) for _, news in sent(new, ConnectAgain)} == {(0, 1, 0)}
