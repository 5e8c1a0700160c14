"""Two hosts that do not reach each other are named; after `timeouts.stall` one of them is replaced."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import Instruction, PlanMade, ShardsMade, StartMember
from psctl.job import events
from psctl.job.membership_messages import ServerUnreachable
from psctl.job.process_messages import EndProcesses, Register
from psctl.job.training_messages import Heartbeat, MemberReady
from psctl.orders import JobOrder
from psctl.types import Member
from tests.helpers.driven_job import ELASTIC, LAYOUT, PLAN, SHARDS, DrivenJob, S, appended, notices, sent
from tests.helpers.orders import make_hosts

STALL = 60.0
ORDER = replace(ELASTIC, hosts=make_hosts(1, 1, 1, free=1), servers=3, stall_timeout=STALL)
W = [Member("worker", rank) for rank in range(3)]


class ThreeHosts(DrivenJob):
    """Three hosts, each with a worker and a server."""

    def agent_of(self, member: Member) -> Member:
        return Member("agent", self.machine.job.ranks[member].host)


def training(order: JobOrder) -> ThreeHosts:
    job = ThreeHosts(order)
    job.register()
    for worker in W:
        job.prepares(worker, LAYOUT)
    job.handle(PlanMade("ps", "server", [0, 1, 2], PLAN))
    for server in S:
        job.listens(server)
    job.handle(ShardsMade(SHARDS, [8] * 6))
    for worker in W:
        job.receive(worker, MemberReady())
    return job


def stand_still(job: DrivenJob, seconds: float) -> list[Instruction]:
    """Workers that are connected wait for values that do not come."""
    new: list[Instruction] = []
    for _ in range(int(seconds)):
        new += job.wait(1.0)
        for rank in job.machine.job.live("worker"):
            if rank.connected:
                new += job.receive(rank.member, Heartbeat(rank.step, "sync"))
    return new


@pytest.fixture
def job() -> ThreeHosts:
    """h1 and h2 do not reach each other."""
    made = training(ORDER)
    made.receive(W[1], ServerUnreachable(2, 0, "no sign of life for 10 s"))
    made.receive(S[2], ServerUnreachable(1, 0, "no sign of life for 10 s"))
    return made


def test_the_pair_is_named_once(job: ThreeHosts) -> None:
    job.receive(W[2], ServerUnreachable(1, 0, "timed out"))
    pairs = [text for text in notices(job.instructions) if "do not reach each other" in text]
    assert pairs == ["h1 and h2 do not reach each other, though h0 reaches both"]


def test_a_later_partition_of_the_same_pair_is_named_again(job: ThreeHosts) -> None:
    """A notice of the first one would otherwise be all that a person hears of the second."""
    stand_still(job, 20)
    job.receive(W[1], ServerUnreachable(2, 0, "timed out"))
    for step in (1, 2):
        for worker in W:
            job.receive(worker, Heartbeat(step, "compute"))
        job.wait(3.0)
    job.receive(W[1], ServerUnreachable(2, 0, "timed out"))
    pairs = [text for text in notices(job.instructions) if "do not reach each other" in text]
    assert len(pairs) == 2


def test_after_the_stall_one_side_is_replaced(job: ThreeHosts) -> None:
    assert not [each for each in stand_still(job, STALL - 5) if isinstance(each, StartMember)]
    new = stand_still(job, 10)
    starts = {(each.member.role, each.member.rank): each.host for each in new if isinstance(each, StartMember)}
    assert starts.keys() == {("worker", 2), ("server", 2)}
    assert 2 not in starts.values()
    (lost,) = appended(new, events.WorkerLost)
    assert "h1 and it did not reach each other" in lost.reason
    assert job.machine.job.ending is None


def test_the_host_is_not_used_again(job: ThreeHosts) -> None:
    stand_still(job, STALL + 5)
    new = job.receive(Member("agent", 2), Register((W[2], S[2])))
    assert [each.members for _, each in sent(new, EndProcesses)] == [[S[2], W[2]]]
    for member in (W[2], S[2]):
        job.exits(member, -9, agent=Member("agent", 2))
    assert 2 in job.machine.job.lost_hosts


def test_without_slots_elsewhere_the_job_ends_and_names_the_pair() -> None:
    job = training(replace(ORDER, hosts=make_hosts(1, 1, 1)))
    job.receive(W[1], ServerUnreachable(2, 0, "no sign of life for 10 s"))
    stand_still(job, STALL + 20)
    end = job.machine.job.ending
    assert end is not None
    assert "h1 and h2 do not reach each other" in end.failures[0].exception


def test_a_partition_of_the_head_costs_the_other_side() -> None:
    job = training(ORDER)
    job.receive(W[0], ServerUnreachable(1, 0, "no sign of life for 10 s"))
    stand_still(job, STALL + 5)
    assert job.machine.job.lost_hosts == {1}


def test_an_old_report_does_not_explain_a_later_stall(job: ThreeHosts) -> None:
    for second in range(100):
        job.wait(1.0)
        for worker in W:
            job.receive(worker, Heartbeat(second + 1, "compute"))
    stand_still(job, STALL + 20)
    assert not job.machine.job.partitions.given_up
    assert job.machine.job.ending is not None
