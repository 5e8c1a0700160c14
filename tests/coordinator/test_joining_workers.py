"""Workers that join and leave while the others train: what the state machine asks for, and what it gives up."""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state.instructions import CommitCheckpoint, ConnectionLost, Instruction
from psctl.coordinator.state.joining_workers import RETRY, TOGETHER
from psctl.coordinator.state.scaling import GROW_AFTER
from psctl.job import events
from psctl.job.checkpoint_messages import CutAt, CutPosition, ProposeCut, SaveBegin, SaveEnd
from psctl.job.membership_messages import (
    ExamplesShared,
    LostWorkerClocks,
    Members,
    MembersSet,
    NextClock,
    NextClockWanted,
)
from psctl.job.process_messages import EndProcesses, HoldSlots, ProcessFailure, ScaleWanted, StopWanted
from psctl.job.table_server_messages import TablesAt, TablesWanted
from psctl.job.training_messages import Decision, Go, Heartbeat, Leave, MemberReady, Prepare, ScriptFinished, Welcome
from psctl.types import Layout, Member, ParameterInfo
from tests.helpers.driven_job import (
    A0,
    A1,
    ELASTIC,
    LAYOUT,
    SHARDS,
    W0,
    W1,
    DrivenJob,
    S,
    appended,
    asks,
    notices,
    sent,
    started,
)
from tests.helpers.orders import make_hosts

W2, W3 = Member("worker", 2), Member("worker", 3)
ROOMY = replace(ELASTIC, hosts=make_hosts(1, 1, free=1))
OTHER = Layout((ParameterInfo("w", (3,), "float32", 0),), "SGD", ({"lr": 0.1},))


class RoomyJob(DrivenJob):
    """Two workers train on three servers; each host has one more slot."""

    def agent_of(self, member: Member) -> Member:
        return Member("agent", self.machine.job.ranks[member].host)

    def beats(self, step: int = 5) -> RoomyJob:
        """The workers report that their batches are psctl's."""
        for worker in self.machine.job.live("worker"):
            self.receive(worker.member, Heartbeat(step, "compute", shares=True))
        return self

    def answers(self, *clocks: int, ticket: int = 1) -> list[Instruction]:
        """The workers, in order, answer with the first clocks that they have not begun."""
        new = []
        for worker, clock in zip((W0, W1), clocks, strict=False):
            new += self.receive(worker, NextClock(ticket, clock))
        return new

    def set_members(self, ticket: int = 1) -> list[Instruction]:
        """The servers know the new members."""
        return [each for server in S for each in self.receive(server, MembersSet(ticket))]


def roomy(order=ROOMY) -> RoomyJob:
    job = RoomyJob(order)
    job.training([0, 1, 0], SHARDS)
    return job.beats()


def joined(order=ROOMY) -> RoomyJob:
    """Worker 2 has joined at clock 8."""
    job = roomy(order)
    assert asks(job, workers=3).problem == ""
    job.prepares(W2, LAYOUT)
    job.answers(7, 8)
    job.set_members()
    return job


def test_a_worker_joins_at_a_clock_that_none_has_begun_when_all_servers_know_it() -> None:
    job = roomy()
    since = len(job.instructions)
    assert asks(job, workers=3).problem == ""
    assert started(job.instructions[since:]) == [(W2, 0)]
    assert not sent(job.instructions[since:], ProposeCut), "no other worker starts again"
    new = job.prepares(W2, LAYOUT)
    assert [(member, one.world) for member, one in sent(new, Welcome)] == [(W2, 2)]
    assert sorted(member for member, _ in sent(new, NextClockWanted)) == [W0, W1]
    new = job.answers(7, 8)
    assert sent(new, Members) == [(server, Members(8, [0, 1, 2], 1)) for server in S]
    assert not sent(new, ExamplesShared), "a server that does not know the new member would apply a clock without it"
    new = job.receive(S[0], MembersSet(1)) + job.receive(S[1], MembersSet(1))
    assert not sent(new, ExamplesShared)
    new = job.receive(S[2], MembersSet(1))
    shared = ExamplesShared(1, 8, [0, 1, 2], {})
    assert sent(new, ExamplesShared) == [(W0, shared), (W1, shared), (W2, shared)]
    ((member, decision),) = sent(new, Decision)
    assert (member, decision.resume.step, decision.resume.checkpoint) == (W2, 8, "")
    assert [event.rank for event in appended(new, events.WorkerJoined)] == [2]
    assert notices(new) == ["worker/2 on h0 joined; 3 workers share the examples from step 9 on"]
    assert [host.workers for host in job.machine.job.order.hosts] == [2, 1]
    new = job.receive(W2, MemberReady())
    assert [member for member, _ in sent(new, Go)] == [W2]
    assert notices(new) == ["worker/2 on h0 trains"]


def test_workers_that_join_together_are_taken_in_together() -> None:
    job = roomy()
    asks(job, workers=4)
    assert not sent(job.prepares(W2, LAYOUT), NextClockWanted)
    assert sent(job.prepares(W3, LAYOUT), NextClockWanted)
    assert sent(job.answers(3, 3), Members)[0][1].ranks == [0, 1, 2, 3]


def test_one_that_is_late_does_not_keep_others_waiting() -> None:
    job = roomy()
    asks(job, workers=4)
    job.prepares(W2, LAYOUT)
    assert sent(job.wait(TOGETHER + 0.2), NextClockWanted)
    assert sent(job.answers(3, 3), Members)[0][1].ranks == [0, 1, 2]
    job.set_members()
    job.receive(W2, MemberReady())
    assert sent(job.prepares(W3, LAYOUT), NextClockWanted)


def test_one_that_fails_is_given_up_and_the_others_never_notice() -> None:
    job = roomy()
    asks(job, workers=3)
    job.joins(W2)
    failure = ProcessFailure("worker/2", "h0", 1, 0.0, 0, "ValueError: no data here")
    new = job.exits(W2, 1, failure.exception)
    assert any("worker/2 on h0, which was to join, is given up" in text for text in notices(new))
    assert not sent(new, EndProcesses)
    assert not appended(job.instructions, events.WorkerLost)
    assert job.machine.job.ending is job.machine.job.restart is None
    assert asks(job, workers=3).problem == "", "it may be tried again"


def test_one_that_ends_while_the_members_change_is_left_out() -> None:
    job = roomy()
    asks(job, workers=3)
    job.prepares(W2, LAYOUT)
    job.answers(7, 8)
    job.exits(W2, -9)
    new = job.set_members(ticket=1)
    assert sent(new, ExamplesShared) == [], "that was the answer for the members with it"
    shared = sent(job.instructions, ExamplesShared)
    assert shared == [(W0, ExamplesShared(1, 8, [0, 1], {})), (W1, ExamplesShared(1, 8, [0, 1], {}))]
    assert sent(job.instructions, Members)[-1][1] == Members(8, [0, 1])


def test_one_whose_model_differs_is_ended() -> None:
    job = roomy()
    asks(job, workers=3)
    new = job.prepares(W2, OTHER)
    assert [(agent, one.members) for agent, one in sent(new, EndProcesses)] == [(A0, [W2])]
    assert any("its model differs from that of the others" in text for text in notices(new))
    assert not sent(new, NextClockWanted)


def test_one_that_does_not_prepare_in_time_is_ended() -> None:
    job = roomy()
    asks(job, workers=3)
    job.joins(W2)
    assert not sent(job.wait(ROOMY.start_timeout - 1), EndProcesses)
    job.beats(6)
    assert [one.members for _, one in sent(job.wait(2), EndProcesses)] == [[W2]]


def test_one_whose_host_is_lost_is_given_up() -> None:
    hosts = make_hosts(1, 1, free=1)
    job = roomy(replace(ROOMY, hosts=[replace(hosts[0], slots=1), hosts[1]]))
    asks(job, workers=3)
    job.joins(W2)
    new = job.handle(ConnectionLost(A1, "reset"))
    assert "worker/2 on h1, which was to join, is given up: h1 is lost" in notices(new)
    assert not [event for event in appended(new, events.WorkerLost) if event.rank == 2]


def test_the_others_finish_first() -> None:
    job = roomy()
    asks(job, workers=3)
    job.prepares(W2, LAYOUT)
    new = job.receive(W0, ScriptFinished(8))
    assert [one.members for _, one in sent(new, EndProcesses)] == [[W2]]
    job.receive(W1, NextClock(1, 8))
    assert not [member for member, _ in sent(job.instructions, Decision) if member == W2]


def test_another_scale_waits_until_all_train() -> None:
    job = roomy()
    asks(job, workers=3)
    assert asks(job, workers=4).problem == "worker/2 on h0 is being started"
    job.prepares(W2, LAYOUT)
    job.answers(7, 8)
    job.set_members()
    assert asks(job, workers=4).problem == "worker/2 on h0 is being started again"
    job.receive(W2, MemberReady())
    job.beats(9)
    assert asks(job, workers=4).problem == ""


def test_a_stop_that_saves_waits_for_the_change() -> None:
    job = roomy()
    asks(job, workers=3)
    job.prepares(W2, LAYOUT)
    new = job.receive(A0, StopWanted(save=True, force=False, by="you"))
    assert not sent(new, ProposeCut)
    assert "the stop waits until the workers have changed" in notices(new)


def test_the_workers_with_the_highest_numbers_leave() -> None:
    job = joined()
    job.receive(W2, MemberReady())
    job.beats(9)
    new = job.receive(A0, ScaleWanted(7, 1, None))
    assert sorted(member for member, _ in sent(new, NextClockWanted)) == [W0, W1, W2]
    new = job.answers(9, 10, ticket=2) + job.receive(W2, NextClock(2, 10))
    assert sent(new, Members) == [(server, Members(10, [0])) for server in S]
    assert [one for _, one in sent(new, ExamplesShared)] == [ExamplesShared(2, 10, [0], {})] * 3
    assert notices(new) == ["worker/1, worker/2 left; 1 workers share the examples from step 11 on"]
    for member in (W1, W2):
        job.receive(member, ScriptFinished(10))
        job.exits(member, 0)
    assert sent(job.instructions, HoldSlots)[-2:] == [(A1, HoldSlots(0)), (A0, HoldSlots(1))]
    assert not appended(job.instructions, events.WorkerLost)
    assert job.machine.job.ending is None
    assert [host.workers for host in job.machine.job.order.hosts] == [1, 0]


def test_one_that_is_killed_before_its_last_clock_is_replaced_to_make_it() -> None:
    job = joined()
    job.receive(W2, MemberReady())
    job.beats(9)
    job.receive(A0, ScaleWanted(7, 2, None))
    job.answers(9, 10, ticket=2)
    job.receive(W2, NextClock(2, 10))
    since = len(job.instructions)
    job.exits(W2, -9)
    assert [member for member, _ in started(job.instructions[since:])] == [replace(W2, incarnation=1)]


def test_one_that_is_killed_after_its_last_clock_is_not_replaced() -> None:
    job = roomy()
    job.receive(A0, ScaleWanted(7, 1, None))
    job.answers(9, 10)
    job.exits(W1, -9)
    anew = replace(W1, incarnation=1)
    for server, shards in zip(S, ([0, 1], [2], [3, 4, 5]), strict=True):
        held = dict.fromkeys(shards, 9)
        new = job.receive(server, LostWorkerClocks(1, 0, held, held))
    assert [(agent, one.members) for agent, one in sent(new, EndProcesses)] == [(A1, [anew])]
    assert [message for member, message in sent(job.joins(anew), Leave) if member == anew]
    job.exits(anew, 1)
    assert job.machine.job.ending is job.machine.job.restart is None
    assert len(appended(job.instructions, events.WorkerLost)) == 1


def test_a_store_that_is_opened_after_workers_have_joined_is_refused() -> None:
    job = joined()
    ((member, answer),) = sent(job.receive(W0, TablesWanted()), TablesAt)
    assert (member, answer.servers) == (W0, [])
    assert "after workers have joined" in answer.problem


def test_a_checkpoint_does_not_wait_for_one_that_joined_after_its_step() -> None:
    job = joined()
    job.receive(W2, MemberReady())

    def save(step: int, *members: Member) -> list[int]:
        new = [
            each for one in members for each in job.receive(one, SaveBegin(step, [])) + job.receive(one, SaveEnd(step))
        ]
        new += job.wait(3)
        return [each.step for each in new if isinstance(each, CommitCheckpoint)]

    assert save(8, W0, W1, *S) == [8]
    assert save(9, W0, W1, *S) == []
    assert save(9, W2) == [9]
    assert [each.world for each in job.instructions if isinstance(each, CommitCheckpoint)] == [2, 3]


def test_a_common_step_that_was_asked_for_before_lies_before_the_first_clock() -> None:
    job = roomy(replace(ROOMY, checkpoint=replace(ROOMY.checkpoint, every_seconds=2.0)))
    asks(job, workers=3)
    job.joins(W2)
    assert len(sent(job.wait(2.1), ProposeCut)) == 2, "it is not asked"
    job.receive(W2, Prepare(LAYOUT, ()))
    new = job.answers(7, 8)
    assert not sent(new, Members)
    job.receive(W0, CutPosition(1, 8))
    new = job.receive(W1, CutPosition(1, 9))
    assert [one.step for _, one in sent(new, CutAt)] == [10, 10]
    assert sent(new, Members)[0][1].clock == 10


def test_a_restart_ends_those_that_join() -> None:
    job = roomy()
    asks(job, workers=3)
    job.joins(W2)
    since = len(job.instructions)
    job.killed(S[0])
    job.killed(S[1])
    job.wait(0.5)
    ended = [member for _, one in sent(job.instructions[since:], EndProcesses) for member in one.members]
    assert W2 in ended
    job.exits(W2, -15)
    assert job.machine.job.joining.members == []


def test_where_examples_cannot_be_divided_anew_all_start_again() -> None:
    plain = RoomyJob(ROOMY)
    plain.training([0, 1, 0], SHARDS)
    tables = roomy()
    tables.receive(W0, TablesWanted())
    for job in (plain, tables):
        since = len(job.instructions)
        assert asks(job, workers=3).problem == ""
        assert sent(job.instructions[since:], ProposeCut)
        assert any("which start again from a common step" in text for text in notices(job.instructions[since:]))


def test_an_elastic_job_waits_longer_after_each_worker_that_did_not_join() -> None:
    job = roomy(replace(ROOMY, elastic=(1, 3)))
    new = job.wait(GROW_AFTER + 1)
    assert [member for member, _ in started(new)] == [W2]
    job.exits(W2, 1, "no data here")
    assert not started(job.beats(6).wait(RETRY - 1))
    new = job.beats(7).wait(GROW_AFTER + 2)
    assert [member for member, _ in started(new)] == [replace(W2, incarnation=1)]
