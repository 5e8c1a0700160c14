"""Copies of a checkpoint on further hosts: which hosts get them, and what happens when one fails."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    CheckpointCopyFailed,
    CheckpointUploadEnded,
    ConnectionLost,
    Instruction,
    SendCheckpointCopy,
    TakenOver,
    UploadCheckpoint,
)
from psctl.job import events
from psctl.job.checkpoint_messages import CheckpointCopyDone
from psctl.types import Member
from tests.helpers.driven_job import A0, A1, ORDER, S0, W0, W1, DrivenJob, appended, notices
from tests.helpers.orders import make_hosts

A2, A3 = Member("agent", 2), Member("agent", 3)


def job_of(copies: int, hosts: int = 4) -> DrivenJob:
    slots = [1, 1, 0, 0][:hosts]
    keep = replace(ORDER.checkpoint, copies=copies)
    return DrivenJob(replace(ORDER, hosts=make_hosts(*slots), checkpoint=keep, restarts=3)).training()


def written(job: DrivenJob, step: int = 500) -> list[Instruction]:
    job.saves(step)
    return job.handle(CheckpointCommitted(step, f"/c/{step}"))


def copies(new: list[Instruction]) -> list[SendCheckpointCopy]:
    return [each for each in new if isinstance(each, SendCheckpointCopy)]


def finish(job: DrivenJob) -> None:
    job.exits(W0)
    job.exits(W1)
    job.exits(S0)


@pytest.mark.parametrize(("wanted", "agents"), [(0, []), (1, [A1]), (2, [A1, A2]), (3, [A1, A2, A3])])
def test_as_many_further_hosts_as_wanted_get_a_copy_in_order(wanted: int, agents: list[Member]) -> None:
    new = written(job_of(wanted))
    assert copies(new) == [SendCheckpointCopy(500, agent) for agent in agents]
    assert not any("can hold" in text for text in notices(new))


def test_an_event_names_each_host_that_holds_a_copy() -> None:
    job = job_of(2)
    written(job)
    new = job.receive(A2, CheckpointCopyDone(500)) + job.receive(A1, CheckpointCopyDone(500))
    assert [(each.step, each.place) for each in appended(new, events.CheckpointCopied)] == [(500, "h2"), (500, "h1")]
    assert copies(new) == []
    again = job.receive(A1, CheckpointCopyDone(500))
    assert appended(again, events.CheckpointCopied) == [], "an answer counts once"


def test_another_host_gets_the_copy_that_failed_until_none_is_left() -> None:
    job = job_of(2)
    written(job)
    new = job.receive(A1, CheckpointCopyDone(500, "no space left to write /w/c"))
    assert notices(new) == ["the copy of the checkpoint of step 500 on h1 failed: no space left to write /w/c"]
    assert copies(new) == [SendCheckpointCopy(500, A3)]
    new = job.handle(CheckpointCopyFailed(500, A3, "agent/3 is lost"))
    assert copies(new) == []
    finish(job)
    assert job.machine.state == "stopping", "the end waits for the copy on h2"
    job.receive(A2, CheckpointCopyDone(500))
    assert job.finished.status == "done"


def test_a_lost_host_is_replaced_as_a_holder() -> None:
    job = job_of(2)
    written(job)
    new = job.handle(ConnectionLost(A2, "reset")) + job.wait(60)
    assert any("on h2 failed: the host is lost" in text for text in notices(new))
    assert copies(new) == [SendCheckpointCopy(500, A3)]
    assert copies(written(job, 600)) == [SendCheckpointCopy(600, A1), SendCheckpointCopy(600, A3)]


def test_fewer_hosts_than_copies_are_reported_once_until_their_number_changes() -> None:
    job = job_of(3, hosts=3)
    text = "checkpoint.copies is 3, and 2 further hosts can hold one"
    new = written(job)
    assert notices(new).count(text) == 1
    assert copies(new) == [SendCheckpointCopy(500, A1), SendCheckpointCopy(500, A2)]
    assert text not in notices(written(job, 600))
    job.handle(ConnectionLost(A2, "reset"))
    job.wait(60)
    assert "checkpoint.copies is 3, and 1 further host can hold one" in notices(written(job, 700))


def test_copies_that_a_lost_coordinator_was_sending_are_reported_and_the_next_ones_are_made() -> None:
    job = job_of(2)
    written(job)
    job.receive(A1, CheckpointCopyDone(500))
    new = job.handle(TakenOver(7))
    assert "the copy of the checkpoint of step 500 on h2 failed: the coordinator was lost" in notices(new)
    assert appended(job.receive(A2, CheckpointCopyDone(500)), events.CheckpointCopied) == []


def test_a_host_that_leads_since_a_takeover_gets_no_copy() -> None:
    job = job_of(2)
    job.handle(TakenOver(7, host=1))
    assert copies(written(job)) == [SendCheckpointCopy(500, A2), SendCheckpointCopy(500, A3)]
    assert A0 not in {each.agent for each in copies(job.instructions)}


def uploading() -> DrivenJob:
    keep = replace(ORDER.checkpoint, copies=0, to="s3://bucket/shelf")
    return DrivenJob(replace(ORDER, checkpoint=keep, restarts=3)).training()


def uploads(new: list[Instruction]) -> list[int]:
    return [each.step for each in new if isinstance(each, UploadCheckpoint)]


def test_a_checkpoint_is_written_before_it_is_uploaded_and_the_end_waits_for_that() -> None:
    job = uploading()
    new = written(job)
    assert appended(new, events.CheckpointWritten)[0].path == "/c/500"
    assert uploads(new) == [500]
    finish(job)
    job.wait(120)
    assert job.machine.state == "stopping"
    new = job.handle(CheckpointUploadEnded(500, "s3://bucket/shelf/digits-3/500"))
    assert [each.place for each in appended(new, events.CheckpointCopied)] == ["s3://bucket/shelf/digits-3/500"]
    assert job.finished.status == "done"


def test_a_target_that_refuses_is_reported_and_the_job_goes_on() -> None:
    job = uploading()
    written(job)
    new = job.handle(CheckpointUploadEnded(500, problem="s3://bucket/shelf: no such bucket"))
    assert notices(new) == ["the checkpoint of step 500 is not uploaded: s3://bucket/shelf: no such bucket"]
    assert job.machine.job.checkpoints.last_step == 500
    finish(job)
    assert job.finished.status == "done"


def test_a_new_coordinator_uploads_what_the_lost_one_had_not() -> None:
    job = uploading()
    written(job)
    assert uploads(job.handle(TakenOver(7))) == [500]
    job.handle(CheckpointUploadEnded(500, "there"))
    assert uploads(job.handle(TakenOver(8))) == []
