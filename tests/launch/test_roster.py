"""Seats for workers: slots are kept to, ranks follow hosts, and a refusal names the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl import errors
from psctl.launch.home import HostRecord
from psctl.launch.placement.roster import (
    AgentKeys,
    Machine,
    agent_orders,
    assign_workers,
    free_of,
    job_order,
    servers_of,
    slots_of,
)
from psctl.spec.cluster import ClusterSpec, HostSpec
from psctl.spec.job import Elastic, JobSpec, PerHost
from psctl.types import Address


def machine(name: str, gpus: int = 0, busy: dict[str, int] | None = None) -> Machine:
    return Machine(name, "10.0.0.1", "eth0", 8, gpus, 1e9, busy or {})


def cluster(*hosts: HostSpec) -> ClusterSpec:
    return ClusterSpec(name="lab", hosts=hosts, source="lab.yaml")


def host(name: str, slots: int | None = None, roles: tuple[str, ...] = ("worker", "server")) -> HostSpec:
    return HostSpec(address=name, name=name, slots=slots, roles=roles)


def job(workers: object = "auto", servers: object = "auto", strategy: str = "ps") -> JobSpec:
    text = JobSpec(name="digits", script="train.py", workers=workers, servers=servers)  # type: ignore[arg-type]
    sync = type(text.sync)(strategy=strategy)
    return JobSpec(name="digits", script="train.py", workers=workers, servers=servers, sync=sync)  # type: ignore[arg-type]


THREE = cluster(host("a"), host("b"), host("c"))
MIXED = {"a": machine("a", gpus=4), "b": machine("b", gpus=2), "c": machine("c")}
IDLE = {name: machine(name) for name in "abc"}


def seats(spec: ClusterSpec, machines: dict[str, Machine], wanted: JobSpec) -> list[tuple[str, int]]:
    return [(each.name, each.workers) for each in assign_workers(spec, machines, wanted).hosts]


@pytest.mark.parametrize(
    ("spec", "machines", "workers", "expected"),
    [
        (THREE, IDLE, "auto", [("a", 1), ("b", 1), ("c", 1)]),
        (THREE, IDLE, 2, [("a", 1), ("b", 1), ("c", 0)]),
        (THREE, MIXED, "auto", [("a", 4), ("b", 2), ("c", 1)]),
        (cluster(host("a", slots=4)), IDLE, "auto", [("a", 1)]),
        (cluster(host("a", slots=4)), IDLE, 4, [("a", 4)]),
        (cluster(host("a", slots=2), host("b", slots=2)), IDLE, PerHost(per_host=2), [("a", 2), ("b", 2)]),
        (cluster(host("a", slots=2), host("b", slots=2)), IDLE, Elastic(min=1, max=3), [("a", 2), ("b", 1)]),
        (cluster(host("a", slots=2), host("b", slots=2)), IDLE, Elastic(min=1, max=9), [("a", 2), ("b", 2)]),
        (cluster(host("a", roles=("server",)), host("b")), IDLE, "auto", [("b", 1), ("a", 0)]),
        (cluster(HostSpec(address="local", name="a", slots=8)), IDLE, "auto", [("a", 2)]),
        (cluster(HostSpec(address="local", name="a", slots=1)), IDLE, "auto", [("a", 1)]),
    ],
)  # fmt: skip
def test_workers_are_placed_as_requested(
    spec: ClusterSpec, machines: dict[str, Machine], workers: object, expected: list[tuple[str, int]]
) -> None:
    assert seats(spec, machines, job(workers)) == expected


def test_under_native_a_host_without_workers_takes_no_part() -> None:
    assert seats(THREE, IDLE, job(2, strategy="native")) == [("a", 1), ("b", 1)]


def test_too_few_slots_is_an_error_with_the_numbers() -> None:
    with pytest.raises(errors.InvalidFile, match=r"4 workers do not fit: cluster lab has 3 slots \(a 1, b 1, c 1\)"):
        assign_workers(THREE, IDLE, job(4))
    with pytest.raises(errors.InvalidFile, match="do not fit"):
        assign_workers(THREE, IDLE, job(PerHost(per_host=2)))
    with pytest.raises(errors.InvalidFile, match="9 workers do not fit"):
        assign_workers(THREE, IDLE, job(Elastic(min=9, max=10)))


def test_slots_that_a_running_job_holds_are_not_given_out() -> None:
    machines = {**IDLE, "a": machine("a", busy={"mlp-4": 1})}
    assert seats(THREE, machines, job(2)) == [("b", 1), ("a", 0), ("c", 1)]
    with pytest.raises(errors.JobRunning, match=r"3 workers need slots .* 2 free on lab \(mlp-4 on a\)") as raised:
        assign_workers(THREE, machines, job(3))
    assert raised.value.exit == 7
    assert "psctl stop mlp-4" in raised.value.hint
    with pytest.raises(errors.JobRunning):
        assign_workers(THREE, machines, job("auto"))
    machines["b"], machines["c"] = machine("b", busy={"mlp-4": 1}), machine("c", busy={"gpt-2": 1})
    with pytest.raises(errors.JobRunning, match=r"\(mlp-4 on a, b; gpt-2 on c\)"):
        assign_workers(THREE, machines, job(3))


def test_a_host_with_gpus_that_another_job_uses_is_full() -> None:
    assert free_of(host("a"), machine("a", gpus=8, busy={"mlp-4": 1})) == 0
    assert free_of(host("a"), machine("a", gpus=8)) == 8


def test_a_cluster_of_servers_alone_cannot_train() -> None:
    with pytest.raises(errors.InvalidFile, match="no host may hold a worker"):
        assign_workers(cluster(host("a", roles=("server",))), IDLE, job())


ROLES = st.sampled_from([("worker",), ("server",), ("worker", "server")])
hosts_of = st.lists(
    st.tuples(st.integers(0, 8), st.none() | st.integers(1, 6), ROLES),
    min_size=1, max_size=6,
)  # fmt: skip


@given(hosts_of, st.integers(1, 40), st.integers(0, 3))
def test_every_worker_gets_one_slot_or_the_refusal_is_right(
    rows: list[tuple[int, int | None, tuple[str, ...]]], workers: int, held: int
) -> None:
    spec = cluster(*(host(f"h{index}", slots, roles) for index, (_, slots, roles) in enumerate(rows)))
    machines = {
        f"h{i}": machine(f"h{i}", gpus, {"other-1": held} if held and i == 0 else {})
        for i, (gpus, _, _) in enumerate(rows)
    }
    total = sum(slots_of(each, machines[each.name]) for each in spec.hosts)
    free = sum(free_of(each, machines[each.name]) for each in spec.hosts)
    try:
        found = assign_workers(spec, machines, job(workers))
    except errors.JobRunning:
        assert free < workers <= total
    except errors.InvalidFile:
        assert workers > total
    else:
        assert found.world == workers
        assert found.hosts[0].workers > 0
        for each in found.hosts:
            taken = spec.host(each.name)
            assert taken is not None
            assert each.workers <= free_of(taken, machines[each.name])


def test_orders_have_all_of_the_job_and_the_authoritys_key_goes_to_the_head_alone() -> None:
    wanted = job(2, PerHost(per_host=1))
    found = assign_workers(THREE, IDLE, wanted)
    assert servers_of(wanted, sum(host.may_serve for host in found.hosts)) == 3
    order = job_order("digits-3", THREE, wanted, found, code_hash="abc", environment={"A": "b"})
    assert (order.argv, order.servers, order.checkpoint.every_steps) == (["train.py"], 3, 500)
    place = HostRecord("a", "/w", "/w/jobs/digits-3/a", "/usr/bin/python3", "/w/code/p")
    head = agent_orders(order, 0, place, AgentKeys("CA", "cert", "key", "secret", "CA-key"), None, {"TOKEN": "s"})
    other = agent_orders(
        order, 1, place, AgentKeys("CA", "cert", "key", "secret"), Address("10.0.0.1", 5000), {"TOKEN": "s"}
    )
    assert (head.authority_key, other.authority_key) == ("CA-key", "")
    assert (head.preauth_secret, other.preauth_secret) == ("secret", "secret")
    assert head.paths == ["/w/code/p"]
