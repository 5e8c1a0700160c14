"""Workers that job a schedule learn where all of them listen, once all do; secrets stay on their host. Under ps those
of one host learn of each other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from psctl.coordinator.state.instructions import Connected, PlanMade, ShardsMade
from psctl.coordinator.state.sum_order import groups_by_place
from psctl.job.training_messages import Decision, Join, MemberReady, Prepare, WorkerAt, WorkerListens, WorkersAt
from psctl.orders import JobOrder
from psctl.types import Address, Compression, Member
from tests.helpers.driven_job import LAYOUT, ORDER, PLAN, S0, W0, W1, DrivenJob, sent


def test_all_get_the_addresses_when_the_last_listens_and_secrets_of_their_own_host_only() -> None:
    job = DrivenJob().running()
    hosts = {rank.member: rank.host for rank in job.machine.job.ranks_of("worker")}
    there = {
        W0: WorkerListens(Address("10.0.0.1", 4000), b"a" * 16),
        W1: WorkerListens(Address("10.0.0.2", 4000), b"b" * 16),
    }
    assert sent(job.receive(W0, there[W0]), WorkersAt) == []
    answers = sent(job.receive(W1, there[W1]), WorkersAt)
    assert [asked for asked, _ in answers] == [W0, W1]
    for asked, answer in answers:
        assert answer.workers == [
            WorkerAt(each.rank, 0, says.address, says.secret if hosts[each] == hosts[asked] else b"")
            for each, says in there.items()
        ]


# ---- ps: workers of one host push together -------------------------------------------------------------------------

W2 = Member("worker", 2)
HERE = {W0: b"a" * 16, W1: b"b" * 16, W2: b"c" * 16}
TWO_HOSTS = replace(ORDER, hosts=[replace(ORDER.hosts[0], workers=2, slots=2), ORDER.hosts[1]])


def decided(order: JobOrder, racks: tuple[str, ...] = ()) -> tuple[DrivenJob, Decision]:
    """DrivenJob up to the decision under ps; worker/0 and worker/1 are on the first host, worker/2 on the next one."""
    job = DrivenJob(order).registered()
    for worker in (W0, W1, W2):
        job.handle(Connected(worker))
        job.receive(worker, Join(1))
        job.receive(worker, Prepare(LAYOUT, ()))
    job.handle(PlanMade("ps", "server", [0], PLAN, racks=racks))
    job.handle(Connected(S0))
    job.receive(S0, Join(102))
    job.receive(S0, MemberReady(Address("10.0.0.1", 4000)))
    found = sent(job.handle(ShardsMade([], [])), Decision)
    assert {member for member, _ in found} == {W0, W1, W2, S0}
    assert len({decision.hosts for _, decision in found}) == 1, "servers and workers sum alike"
    return job, found[0][1]


@pytest.mark.parametrize(
    ("order", "hosts"),
    [
        pytest.param(TWO_HOSTS, ((0, 1),), id="two of three share a host"),
        pytest.param(replace(TWO_HOSTS, staleness=1), (), id="out of step"),
        pytest.param(replace(TWO_HOSTS, compression=Compression("bf16")), (), id="coded"),
        pytest.param(
            replace(TWO_HOSTS, hosts=[replace(ORDER.hosts[0], workers=1), replace(ORDER.hosts[1], workers=2)]),
            ((1, 2),),
            id="the other host",
        ),
    ],
)
def test_the_decision_has_the_ranks_that_share_a_host(order: JobOrder, hosts: tuple[tuple[int, ...], ...]) -> None:
    assert decided(order)[1].hosts == hosts


def test_where_racks_sum_their_workers_get_each_others_addresses_and_servers_have_a_rack() -> None:
    job, decision = decided(TWO_HOSTS, racks=("r1", "r1"))
    assert (decision.hosts, decision.racks) == (((0, 1, 2),), ("r1", "r1", "r1"))
    assert [at.rack for at in decision.assignment.servers] == ["r1"]
    there = {worker: Address(f"10.0.0.{number}", 4000) for number, worker in enumerate((W0, W1, W2), 1)}
    for worker in (W0, W1):
        job.receive(worker, WorkerListens(there[worker], b""))
    found = sent(job.receive(W2, WorkerListens(there[W2], b"")), WorkersAt)
    every = [WorkerAt(number, 0, there[worker], b"") for number, worker in enumerate((W0, W1, W2))]
    assert found == [(worker, WorkersAt(every)) for worker in (W0, W1, W2)]


def test_on_one_host_alone_workers_do_not_push_together() -> None:
    state = DrivenJob(replace(TWO_HOSTS, hosts=[replace(ORDER.hosts[0], workers=3)])).machine.job
    state.plan = PlanMade("ps", "server", [0], PLAN)
    assert groups_by_place(state) == ()


def test_under_ps_only_the_ranks_of_a_host_get_each_others_addresses_one_by_one() -> None:
    job, _ = decided(TWO_HOSTS)
    first = sent(job.receive(W1, WorkerListens(None, HERE[W1])), WorkersAt)
    assert first == [(W1, WorkersAt([WorkerAt(1, 0, None, HERE[W1])]))]
    assert [member for member, _ in sent(job.receive(W2, WorkerListens(None, HERE[W2])), WorkersAt)] == [W2]
    both = WorkersAt([WorkerAt(0, 0, None, HERE[W0]), WorkerAt(1, 0, None, HERE[W1])])
    assert sent(job.receive(W0, WorkerListens(None, HERE[W0])), WorkersAt) == [(W0, both), (W1, both)]


def test_a_replacement_that_was_moved_to_another_groups_host_gets_no_address_of_that_group() -> None:
    job, _ = decided(TWO_HOSTS)
    for worker in (W0, W1):
        job.receive(worker, WorkerListens(None, HERE[worker]))
    state = job.machine.job
    state.remove_rank("worker", 2)
    state.add_rank("worker", 2, 0, 2)
    anew = Member("worker", 2, 1)
    job.handle(Connected(anew))
    alone = WorkersAt([WorkerAt(2, 1, None, b"d" * 16)])
    assert sent(job.receive(anew, WorkerListens(None, b"d" * 16)), WorkersAt) == [(anew, alone)]


def test_a_replacement_gets_the_others_addresses_and_they_get_its_address() -> None:
    job, _ = decided(TWO_HOSTS)
    for worker in (W0, W1):
        job.receive(worker, WorkerListens(None, HERE[worker]))
    state = job.machine.job
    state.remove_rank("worker", 1)
    state.add_rank("worker", 1, 0, 1)
    anew = Member("worker", 1, 1)
    job.handle(Connected(anew))
    both = WorkersAt([WorkerAt(0, 0, None, HERE[W0]), WorkerAt(1, 1, None, b"d" * 16)])
    assert sent(job.receive(anew, WorkerListens(None, b"d" * 16)), WorkersAt) == [(W0, both), (anew, both)]
