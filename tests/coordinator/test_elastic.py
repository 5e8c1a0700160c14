"""Elastic jobs: as many workers as have slots, between the fewest and the most."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from psctl.coordinator.state.instructions import (
    ConnectionLost,
    FindRestorable,
    PlanMade,
    RestorableFound,
    ShardsMade,
    StartMember,
)
from psctl.coordinator.state.scaling import GROW_AFTER
from psctl.job import events
from psctl.job.checkpoint_messages import ProposeCut
from psctl.job.process_messages import EndProcesses, Register, ScaleWanted
from psctl.job.training_messages import MemberReady, Resume
from psctl.orders import JobOrder
from psctl.types import Member
from tests.helpers.driven_job import ELASTIC, LAYOUT, PLAN, SHARDS, DrivenJob, S, appended, notices, sent
from tests.helpers.orders import make_hosts

HOSTS = make_hosts(1, 1, 1)
RING = replace(
    ELASTIC, hosts=HOSTS, servers=0, strategy="ring", replicas=0, restart_wait=600.0, elastic=(2, 3),
    on_worker_loss="restart",
)  # fmt: skip
PS = replace(ELASTIC, hosts=HOSTS, servers=1, replicas=0, restart_wait=600.0, elastic=(2, 3))
AGENTS = [Member("agent", rank) for rank in range(3)]
W = [Member("worker", rank) for rank in range(3)]
AT_500 = Resume("digits-3@500", 500, {"position": 500}, [])


class ThreeWorkers(DrivenJob):
    """Three hosts with a worker each; under ps the server is on the first."""

    def agent_of(self, member: Member) -> Member:
        return Member("agent", self.machine.job.ranks[member].host)

    def train(self, workers: Sequence[Member], server: Member = S[0]) -> None:
        """The workers start and train."""
        for worker in workers:
            self.prepares(worker, LAYOUT)
        if self.machine.job.order.strategy == "ps":
            self.handle(PlanMade("ps", "server", [0], PLAN))
            self.listens(server)
            self.handle(ShardsMade(SHARDS, [8] * 6))
        else:
            self.handle(PlanMade("ring", "worker", [], replace(PLAN, chosen="ring")))
        for worker in workers:
            self.receive(worker, MemberReady())
        assert self.machine.job.training


def training(order: JobOrder) -> ThreeWorkers:
    job = ThreeWorkers(order)
    job.register()
    job.train(W)
    return job


def lose(job: DrivenJob, *hosts: int) -> None:
    """These hosts are lost."""
    for host in hosts:
        job.handle(ConnectionLost(AGENTS[host], "no sign of life for 5 s"), ConnectionLost(W[host], "reset"))
    job.wait(0.4)


def started(job: DrivenJob, since: int) -> list[tuple[str, int]]:
    """Return the names and hosts of the processes that were ordered since an instruction."""
    new = job.instructions[since:]
    return [(str(each.member), each.host) for each in new if isinstance(each, StartMember)]


def test_a_collective_goes_on_with_fewer_from_the_last_checkpoint() -> None:
    job = training(RING)
    lose(job, 2)
    for member in W[:2]:
        job.exits(member, -15)
    assert FindRestorable() in job.instructions
    assert not appended(job.instructions, events.Recovering)
    since = len(job.instructions)
    job.handle(RestorableFound(AT_500))
    assert started(job, since) == [("worker/0", 0), ("worker/1", 1)]


def test_with_fewer_than_the_fewest_it_waits() -> None:
    job = training(RING)
    lose(job, 1, 2)
    job.exits(W[0], -15)
    assert [each.hosts for each in appended(job.instructions, events.Recovering)] == [["h1", "h2"]]
    assert FindRestorable() in job.receive(AGENTS[1], Register())


def test_it_takes_more_when_a_host_is_back() -> None:
    job = training(RING)
    lose(job, 2)
    for member in W[:2]:
        job.exits(member, -15)
    job.handle(RestorableFound(AT_500))
    job.train([replace(each, incarnation=1) for each in W[:2]])
    job.receive(AGENTS[2], Register())
    assert not sent(job.wait(GROW_AFTER - 1), ProposeCut)
    new = job.wait(2)
    assert len(sent(new, ProposeCut)) == 2
    assert any("slots are free: from 2 to 3 workers" in text for text in notices(new))
    for member in W[:2]:
        job.exits(replace(member, incarnation=1), 0)
    since = len(job.instructions)
    job.handle(RestorableFound(replace(AT_500, step=600)))
    assert started(job, since) == [("worker/0", 0), ("worker/1", 1), ("worker/2", 2)]


def test_under_ps_the_others_continue_at_once() -> None:
    job = training(PS)
    since = len(job.instructions)
    lose(job, 2)
    assert not sent(job.instructions[since:], EndProcesses)
    assert not started(job, since)
    assert [event.rank for event in appended(job.instructions, events.WorkerLost)] == [2]
    assert len(job.machine.job.live("worker")) == 2


def test_under_ps_fewer_than_the_fewest_do_not_continue() -> None:
    job = training(replace(PS, elastic=(3, 3)))
    lose(job, 2)
    assert sent(job.instructions, EndProcesses)


def test_a_scaled_elastic_job_does_not_grow_beyond_the_number_that_was_asked_for() -> None:
    job = training(PS)
    job.receive(AGENTS[0], ScaleWanted(1, 2, None))
    for member in [*W, S[0]]:
        job.exits(member, 0)
    job.handle(RestorableFound(AT_500))
    job.train([replace(each, incarnation=1) for each in W[:2]], replace(S[0], incarnation=1))
    assert not sent(job.wait(3 * GROW_AFTER), ProposeCut)
