"""The choice has every strategy once with the reason, and reaches the bounds of uneven networks."""

from __future__ import annotations

import msgspec
import pytest

from psctl.errors import UsageError
from psctl.message_costs import Costs, MeasuredCosts, MeasuredRanks, RanksCosts
from psctl.orders import CheckpointOrder, HostOrder, JobOrder
from psctl.plan.candidates import TIE
from psctl.plan.choose import Plan, Planner, choose, planner_for_job
from psctl.plan.plan_input import PlanInput, PlanRequest, nominal_cluster, plan_input_of_job
from psctl.plan.server_placement import time_push_pull
from psctl.plan.simulation.cost_model import ALPHA, ENGINES
from psctl.plan.summed_steps import buckets
from psctl.schedule.algorithms import catalog
from psctl.topology.graph import Between, ClusterGraph, Device, HostGraph, HostNode, Link
from psctl.topology.host.document import cluster_document
from psctl.types import BUCKET, FIRST_BUCKET, STRATEGIES, Layout, ParameterInfo

SAVE = CheckpointOrder(None, 0, 0.0, 3, None, True, 1)
GBIT = 0.956 * 1e9 / 8
MBIT = 0.956 * 1e6 / 8
SIZE = 100_000_000


def host(name: str, workers: int = 1, gpus: int = 0, rate: float = GBIT, serve: bool = True) -> HostOrder:
    return HostOrder(name, "10.0.0.1", "eth0", 4, gpus, workers, serve, rate)


def order(*hosts: HostOrder, strategy: str = "auto", servers: int | None = None, update: str = "auto") -> JobOrder:
    return JobOrder(
        "digits-1", ["train.py"], list(hosts), servers, strategy, update, 0, None, 120.0, 300.0, None, 1.0, None, SAVE,
        None, None, "", "", {}, "auto",
    )  # fmt: skip


def names(count: int) -> list[str]:
    return [f"h{index}" for index in range(count)]


def wired(cables: dict[tuple[str, str], float], hosts: list[str]) -> ClusterGraph:
    between = tuple(Between(a, b, rate * MBIT, 0.0, measured=True) for (a, b), rate in cables.items())
    return ClusterGraph(tuple(HostNode(name, HostGraph()) for name in hosts), between)


def planned(cables: dict[tuple[str, str], float], ranks: list[str], idle: int = 0) -> Plan:
    """Plan 100 MB on wires alone: no message costs anything but its bytes."""
    hosts = list(dict.fromkeys([*ranks, *(f"idle{index}" for index in range(idle))]))
    inputs = PlanInput(wired(cables, hosts), ranks, hosts)
    roster = [host(name, ranks.count(name)) for name in hosts]
    return Planner(inputs, roster, PlanRequest()).plan(SIZE)


def seconds(plan: Plan, name: str) -> float:
    found = next(each.seconds for each in plan.candidates if each.strategy == name)
    assert found is not None
    return found


def star(hosts: list[str], rate: float = 200.0, **slow: float) -> dict[tuple[str, str], float]:
    return {(name, "network"): slow.get(name, rate) for name in hosts}


# ---- the aims: what auto takes beside the engine's ring ----------------------------------------------------------


@pytest.mark.parametrize(("count", "rate"), [(4, 200), (8, 200), (4, 500), (8, 500)])
def test_equal_hosts_take_what_psctl_carries_at_the_ring_bound(count: int, rate: float) -> None:
    plan = planned(star(names(count), rate), names(count))
    assert plan.chosen != "native"
    assert "; over psctl's own sealed connections" in plan.reason
    assert "its traffic is neither encrypted nor authenticated" in plan.reason
    bound = 2 * (count - 1) / count * SIZE / (rate * MBIT)
    assert seconds(plan, "native") == pytest.approx(bound)
    assert plan.seconds is not None
    assert plan.seconds <= TIE * bound


def test_the_engine_is_taken_on_cpus_only_where_nothing_else_comes_near_it() -> None:
    """What psctl carries is as fast within a twentieth, or slower by more, as its messages cost more."""
    ranks, chosen, reasons = names(4), {}, {}
    for alpha in (0.0, 1.0):
        costs = {"gloo": Costs(), "psctl": Costs(alpha=alpha), "ps": Costs(alpha=alpha)}
        inputs = PlanInput(wired(star(ranks), ranks), ranks, [], costs)
        planner = Planner(inputs, [host(name, serve=False) for name in ranks], PlanRequest())
        plan = planner.plan(SIZE)
        chosen[alpha], reasons[alpha] = plan.chosen, plan.reason
        assert planner.winner(SIZE).chosen == plan.chosen
    assert chosen[0.0] != "native"
    assert chosen[1.0] == "native"
    assert "over Gloo, which psctl neither encrypts nor authenticates" in reasons[1.0]


def gpu_hosts(*hosts: str) -> JobOrder:
    """Return a job of a GPU a host."""
    graph = HostGraph((Device("GPU0", "gpu"),))
    between = tuple(Between(name, "network", 200 * MBIT, 0.0, measured=True) for name in hosts)
    document = cluster_document(ClusterGraph(tuple(HostNode(name, graph) for name in hosts), between))
    return msgspec.structs.replace(order(*(host(name, gpus=1) for name in hosts)), topology=document)


def test_on_gpus_the_engine_is_taken_of_what_is_as_fast_for_it_carries_all_alike() -> None:
    plan = choose(gpu_hosts(*names(4)), SIZE, None, decided=True)
    assert plan.chosen == "native"
    assert plan.reason.endswith("; over NCCL, which psctl neither encrypts nor authenticates")


# ---- network: require_encryption -----------------------------------------------------------------------------------


def encrypted(wanted: JobOrder) -> JobOrder:
    return msgspec.structs.replace(wanted, require_encryption=True)


def test_where_encryption_is_required_the_engine_carries_nothing_between_hosts() -> None:
    plan = choose(encrypted(order(*map(host, names(3)))), SIZE, None, decided=True)
    out = {each.strategy: each.why_not for each in plan.candidates if not each.feasible}
    assert plan.chosen != "native"
    assert out["native"] == "network: require_encryption: true, and between hosts it goes over Gloo, which is not"
    assert "ring" not in out


def test_where_encryption_is_required_gpus_of_several_hosts_take_servers() -> None:
    plan = choose(encrypted(gpu_hosts(*names(3))), SIZE, None, decided=True)
    assert plan.chosen == "ps"
    assert {each.strategy for each in plan.candidates if each.feasible} == {"ps"}
    why = {each.why_not for each in plan.candidates if each.strategy == "ring"}
    assert why == {"network: require_encryption: true, and between hosts it goes over NCCL, which is not"}
    none = msgspec.structs.replace(encrypted(gpu_hosts(*names(3))), servers=0)
    with pytest.raises(UsageError, match="require_encryption"):
        choose(none, SIZE, None, decided=True)


def test_where_gradients_lie_counts_and_not_what_the_hosts_have() -> None:
    wanted = encrypted(order(*map(host, names(3)), strategy="ring"))
    assert choose(wanted, SIZE, None, decided=True, on_gpus=False).chosen == "ring"
    with pytest.raises(UsageError, match=r"strategy: ring .* require_encryption: true, .* over NCCL, which is not"):
        choose(wanted, SIZE, None, decided=True, on_gpus=True)
    plan = choose(encrypted(gpu_hosts(*names(3))), SIZE, None, decided=True, on_gpus=False)
    assert "ring" in {each.strategy for each in plan.candidates if each.feasible}


def test_within_one_host_nothing_needs_encryption() -> None:
    plan = choose(encrypted(order(host("a", 3))), SIZE, None, decided=True)
    assert all(each.feasible for each in plan.candidates if each.strategy in ("native", "ring", "ps"))
    assert choose(encrypted(order(host("a"))), SIZE, None, decided=True).chosen == "native"


def test_a_strategy_that_encryption_rules_out_is_refused_where_it_is_requested() -> None:
    wanted = encrypted(order(host("a"), host("b"), strategy="native"))
    said = "strategy: native is not possible here: network: require_encryption: true"
    with pytest.raises(UsageError, match=said):
        choose(wanted, SIZE, None, decided=False)
    with pytest.raises(UsageError, match=said):
        planner_for_job(wanted).check()
    planner_for_job(msgspec.structs.replace(wanted, strategy="ring")).check()
    planner_for_job(msgspec.structs.replace(wanted, strategy="auto")).check()
    planner_for_job(encrypted(order(host("a"), strategy="ring"))).check()


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_slow_host_sends_once_and_gets_once(count: int) -> None:
    plan = planned(star(names(count), h1=40.0), names(count))
    engine, bound = 2 * (count - 1) / count, 1.0
    assert seconds(plan, "native") * 40 * MBIT / SIZE == pytest.approx(engine)
    assert plan.seconds is not None
    assert bound <= plan.seconds * 40 * MBIT / SIZE < 1.08
    if count > 3:
        assert seconds(plan, "native") / plan.seconds >= 1.4


def test_two_racks_gain_what_the_link_between_them_allows() -> None:
    cables = {("h0", "r1"): 500.0, ("h1", "r1"): 500.0, ("h2", "r2"): 500.0, ("h3", "r2"): 500.0, ("r1", "r2"): 200.0}
    plan = planned(cables, names(4))
    assert plan.seconds is not None
    assert seconds(plan, "native") / plan.seconds >= 1.4
    assert plan.seconds >= SIZE / (200 * MBIT)
    assert "r1 -> r2" in plan.reason or "r2 -> r1" in plan.reason
    assert plan.chosen == "hierarchical", "answers of servers wait for pushes of the other direction"


def test_servers_are_pushed_to_once_a_rack_where_the_way_between_is_narrow() -> None:
    def served(between: float, sums: str = "auto", ranks: int = 6) -> Plan:
        hosts = names(6)
        cables = {(name, f"r{1 + (at > 2)}"): 500.0 for at, name in enumerate(hosts)} | {("r1", "r2"): between}
        inputs = PlanInput(wired(cables, hosts), [hosts[at % 6] for at in range(ranks)], hosts)
        roster = [host(name, ranks // 6) for name in hosts]
        return Planner(inputs, roster, PlanRequest(strategy="ps", update="worker", sums=sums)).plan(SIZE)

    together, apart = served(100.0), served(100.0, "host")
    assert together.racks == ("r1",) * 3 + ("r2",) * 3
    assert "summed in each rack" in together.reason
    assert apart.racks == ()
    assert together.seconds is not None
    assert apart.seconds is not None
    assert 2.5 < apart.seconds / together.seconds <= 3.1, "three workers a rack"
    assert together.seconds >= SIZE / (100 * MBIT), "half of the values each way, pushed and pulled at once"
    assert served(5000.0).racks == ()
    assert served(5000.0, "rack").racks
    with pytest.raises(UsageError, match="sums: rack is requested, which needs several racks"):
        served(100.0, "rack", ranks=12)


def test_racks_dealt_round_gain_more() -> None:
    cables = {("h0", "r1"): 500.0, ("h1", "r2"): 500.0, ("h2", "r1"): 500.0, ("h3", "r2"): 500.0, ("r1", "r2"): 200.0}
    plan = planned(cables, names(4))
    assert plan.seconds is not None
    assert seconds(plan, "native") / plan.seconds >= 2.8


@pytest.mark.parametrize(("dealt", "aim"), [(False, 1.12), (True, 2.1)])
def test_two_workers_a_host_send_through_its_port_once(dealt: bool, aim: float) -> None:
    ranks = names(4) * 2 if dealt else [name for name in names(4) for _ in range(2)]
    plan = planned(star(names(4)), ranks)
    assert plan.seconds is not None
    assert seconds(plan, "native") / plan.seconds >= aim
    assert plan.seconds >= 1.5 * SIZE / (200 * MBIT)


@pytest.mark.parametrize(("idle", "aim"), [(2, 1.15), (4, 1.4), (8, 1.4)])
def test_idle_hosts_serve(idle: int, aim: float) -> None:
    hosts = [*names(4), *(f"idle{index}" for index in range(idle))]
    plan = planned(star(hosts), names(4), idle=idle)
    assert plan.chosen == "ps"
    assert plan.seconds is not None
    assert seconds(plan, "native") / plan.seconds >= aim
    assert set(plan.servers) >= set(range(4, 4 + min(idle, 4)))
    assert plan.update == "worker"


def test_servers_that_hold_the_values_are_pulled_from_when_all_is_pushed_and_replicas_cost_their_bytes() -> None:
    hosts = [*names(4), *(f"idle{index}" for index in range(4))]
    inputs = PlanInput(wired(star(hosts), hosts), names(4), hosts)
    roster = [host(name, int(name in names(4))) for name in hosts]

    def ps(update: str, replicas: int) -> float:
        return seconds(Planner(inputs, roster, PlanRequest("ps", update, replicas=replicas)).plan(SIZE), "ps")

    once = SIZE / (200 * MBIT)
    assert ps("worker", 0) == pytest.approx(once, rel=0.1)
    assert 1.7 * once < ps("server", 0) <= 2 * once
    assert ps("server", 1) == pytest.approx((1 + 1 / 8) * ps("server", 0), rel=0.01)
    assert ps("auto", 0) == ps("server", 0), "what was asked for keeps what servers are for"


# ---- what a plan says ----------------------------------------------------------------------------------------------


def test_every_strategy_stands_in_the_plan_exactly_once_and_the_best_is_first() -> None:
    plan = choose(order(host("a"), host("b")), SIZE, None, decided=False)
    assert sorted(each.strategy for each in plan.candidates) == sorted(STRATEGIES)
    assert plan.candidates[0].strategy == plan.chosen
    assert all(each.seconds is None and each.why_not for each in plan.candidates if not each.feasible)
    times = [each.seconds for each in plan.candidates[1:] if each.seconds is not None]
    assert times == sorted(times)


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(5, marks=pytest.mark.soak)])
def test_options_build_the_schedule_that_was_predicted(world: int) -> None:
    hosts = [host(name, rate=GBIT if index else GBIT / 5) for index, name in enumerate(names(world))]
    for name in set(STRATEGIES) - {"native", "ps", "cpu"}:
        plan = choose(order(*hosts, strategy=name), 30_000_000, None, decided=True)
        if world == 1:
            assert (plan.chosen, plan.reason) == ("native", "one worker has nothing to synchronise")
            continue
        told = msgspec.convert(msgspec.json.decode(msgspec.json.encode(plan.options)), catalog.ScheduleOptions)
        schedule = catalog.build(plan.chosen, world, told)
        row = next(each for each in plan.candidates if each.strategy == name)
        assert (plan.chosen, schedule.steps) == (name, row.steps)
        assert row.bytes_per_rank == pytest.approx(max(schedule.sent(30_000_000)[:world]))


def test_native_and_ps_need_no_options() -> None:
    for name in ("native", "ps"):
        assert choose(order(host("a"), host("b"), strategy=name), SIZE, None, decided=True).options == {}


def test_within_a_twentieth_the_simplest_is_taken() -> None:
    """Of equal predictions native, then ps, then the fastest."""
    hosts, ranks = names(4), names(4)
    inputs = PlanInput(wired(star(hosts), hosts), ranks, hosts, {"gloo": Costs(alpha=0.0)})
    found = {
        row.strategy: row.seconds
        for row in Planner(inputs, [host(name) for name in hosts], PlanRequest()).plan(SIZE).candidates
    }
    assert found["ring"] == pytest.approx(found["native"])
    slower = Costs(alpha=0.06 * (found["native"] or 0) / 6)
    inputs = PlanInput(wired(star(hosts), hosts), ranks, hosts, {"gloo": slower})
    assert Planner(inputs, [host(name) for name in hosts], PlanRequest()).plan(SIZE).chosen == "ps"
    assert Planner(inputs, [host(name) for name in hosts], PlanRequest(servers=0)).plan(SIZE).chosen not in (
        "native",
        "ps",
    )
    assert TIE == 1.05


def test_small_messages_take_few_steps() -> None:
    """Within a factor of two of what was measured with four hosts that share two cores, and of two ranks of one host:
    0.06 ms alone, 0.18 ms beside others, through shared memory."""
    plan = choose(order(*map(host, names(4))), 4096, None, decided=False)
    assert plan.chosen == "recursive-doubling"
    assert 3.5e-3 <= seconds(plan, "native") <= 7e-3
    assert 1e-3 <= seconds(plan, "recursive-doubling") <= 2e-3
    plan = choose(order(host("a", 2)), 4096, None, decided=False)
    assert 3.5e-4 <= seconds(plan, "native") <= 1.4e-3
    assert 0.6e-4 <= seconds(plan, "one-shot") <= 1.2e-4
    assert 0.8e-3 <= seconds(plan, "ps") <= 3.4e-3


def test_what_was_measured_stands_in_for_what_is_assumed() -> None:
    known = MeasuredCosts((MeasuredRanks({"elsewhere": 1}, RanksCosts({"gloo": Costs(1e-5)})),))
    measured = msgspec.structs.replace(order(*map(host, names(4))), costs=known)
    assert choose(measured, 4096, None, decided=False).chosen == "native"
    assert plan_input_of_job(measured).costs["psctl"] == ENGINES["psctl"]


def test_measured_links_in_the_order_decide() -> None:
    slow = cluster_document(wired(star(names(4), h3=40.0), names(4)))
    plain = order(*map(host, names(4)))
    assert choose(plain, SIZE, None, decided=True).chosen in ("ps", "ring", "sharded")
    plan = choose(msgspec.structs.replace(plain, topology=slow), SIZE, None, decided=True)
    assert plan.chosen not in ("native", "ring")
    assert "h3" in plan.reason


def test_hosts_that_the_topology_lacks_are_nominal() -> None:
    other = cluster_document(wired(star(["x", "y"]), ["x", "y"]))
    wanted = msgspec.structs.replace(order(host("a"), host("b")), topology=other)
    assert plan_input_of_job(wanted).ranks == ("a", "b")


def test_ranks_sit_on_gpus_where_there_are_enough() -> None:
    graph = HostGraph(
        (Device("GPU0", "gpu"), Device("GPU1", "gpu"), Device("SW0", "switch")),
        (Link("GPU0", "SW0", "PCIe", 16e9), Link("GPU1", "SW0", "PCIe", 16e9)),
    )
    document = cluster_document(ClusterGraph((HostNode("a", graph),)))
    two = msgspec.structs.replace(order(host("a", 2, gpus=2)), topology=document)
    assert (plan_input_of_job(two).ranks, plan_input_of_job(two).engine) == (("a/GPU0", "a/GPU1"), "nccl")
    three = msgspec.structs.replace(order(host("a", 3, gpus=2)), topology=document)
    assert (plan_input_of_job(three).ranks, plan_input_of_job(three).engine) == (("a", "a", "a"), "gloo")


def test_the_processor_adds_up_for_ranks_of_one_host_alone() -> None:
    [row] = [each for each in choose(order(host("a", 4)), SIZE, None, False).candidates if each.strategy == "cpu"]
    assert row.feasible
    with pytest.raises(UsageError, match="several hosts"):
        choose(order(host("a"), host("b"), strategy="cpu"), SIZE, None, decided=True)


def test_a_host_that_may_not_serve_gets_no_server() -> None:
    plan = choose(order(host("a", serve=False), host("b"), strategy="ps", servers=2), 1_000_000, None, decided=False)
    assert plan.servers == [1, 1]
    plan = choose(order(host("a", serve=False), host("b", serve=False)), SIZE, None, decided=False)
    assert plan.chosen not in ("ps", "native")
    assert "roles" in plan.reason


def test_the_requested_strategy_is_taken_and_named_in_the_reason() -> None:
    plan = choose(order(host("a"), host("b"), strategy="native"), 1_000_000, None, decided=True)
    said = "strategy: native is requested; over Gloo, which psctl neither encrypts nor authenticates"
    assert (plan.chosen, plan.reason, plan.servers) == ("native", said, [])


def test_the_reason_names_a_strategy_that_replan_took() -> None:
    asked = msgspec.structs.replace(order(host("a"), host("b"), strategy="ring"), replan=True, compute=0.01)
    plan = choose(asked, 1_000_000, None, decided=True)
    assert plan.chosen == "ring"
    assert plan.reason.startswith("sync.replan took ring, when the first steps had been measured; over psctl's own")


def test_update_on_servers_leaves_ps_alone() -> None:
    plan = choose(order(host("a"), host("b"), update="server"), 1_000_000, None, decided=True)
    assert (plan.chosen, plan.update) == ("ps", "server")
    assert {each.strategy for each in plan.candidates if each.feasible} == {"ps"}
    with pytest.raises(UsageError, match="update: server"):
        choose(order(host("a"), host("b"), update="server", servers=0), 1_000_000, None, decided=True)


def test_workers_apart_leave_ps_with_the_optimizer_on_servers() -> None:
    apart = msgspec.structs.replace(order(host("a"), host("b")), staleness=4)
    plan = choose(apart, 1_000_000, None, decided=True)
    assert (plan.chosen, plan.update) == ("ps", "server")
    others = {each.why_not for each in plan.candidates if each.strategy != "ps"}
    assert others == {"consistency: {ssp: 4} is requested, but collectives are bsp"}


def test_servers_that_are_requested_by_number_are_used() -> None:
    plan = choose(order(host("a"), host("b"), servers=1), 1_000, None, decided=True)
    assert (plan.chosen, plan.servers) == ("ps", [0])
    assert {each.strategy for each in plan.candidates if each.feasible} == {"ps"}
    assert choose(order(host("a"), servers=1), 1_000, None, decided=True).chosen == "ps"
    assert choose(order(host("a"), host("b"), strategy="ring", servers=1), 1_000, None, decided=True).chosen == "ring"


def test_an_optimizer_unfit_for_servers_steps_on_workers() -> None:
    layout = Layout((ParameterInfo("w", (3, 5), "float64", 0),), "", ({},))
    plan = choose(order(host("a"), host("b"), strategy="ps"), None, layout, decided=True)
    assert (plan.size, plan.update) == (120, "worker")


def test_gradients_travel_in_buckets_in_training() -> None:
    assert buckets(1000) == (1000,)
    assert buckets(FIRST_BUCKET + BUCKET + 5) == (FIRST_BUCKET, BUCKET, 5)
    assert sum(buckets(123_456_789)) == 123_456_789
    assert buckets(7_000_000, 3_000_000) == (FIRST_BUCKET, 3_000_000, 7_000_000 - 3_000_000 - FIRST_BUCKET)
    assert buckets(1000, 400) == (400, 400, 200)
    divided = msgspec.structs.replace(order(*map(host, names(4)), strategy="ring"), bucket=1_000_000)
    small = choose(divided, SIZE, None, decided=False)
    assert {row.params.get("buckets") for row in small.candidates if row.strategy == "ring"} == {-(-SIZE // 10**6)}
    plan = choose(order(*map(host, names(4))), SIZE, None, decided=False)
    [row] = [each for each in plan.candidates if each.strategy == "native"]
    alone = Planner(plan_input_of_job(order(*map(host, names(4)))), [], PlanRequest(servers=0)).plan(SIZE)
    step = 6 * (ENGINES["gloo"].alpha + 2 * ENGINES["gloo"].overhead + ALPHA)
    assert row.params["buckets"] == 5
    assert seconds(plan, "native") == pytest.approx(seconds(alone, "native") + 4 * step, rel=2e-3)


def test_hosts_of_one_kernel_share_its_processors() -> None:
    def crowd(*kernels: str) -> float:
        hosts = [
            msgspec.structs.replace(host(name), cores=2, kernel=one)
            for name, one in zip(names(4), kernels, strict=True)
        ]
        return plan_input_of_job(order(*hosts)).ranks_per_core

    assert crowd("a", "a", "a", "a") == 2.0
    assert crowd("a", "b", "c", "d") == crowd("", "", "", "") == 0.5
    assert crowd("a", "a", "a", "b") == 1.5


def test_gradients_of_distributed_data_parallel_go_by_collectives() -> None:
    plan = choose(order(*map(host, names(3))), SIZE, None, decided=True, hooked=True)
    assert plan.chosen != "ps"
    (why,) = {each.why_not for each in plan.candidates if each.strategy == "ps"}
    assert why == "gradients come from DistributedDataParallel (psctl.accelerate_ddp), which servers do not sum"
    with pytest.raises(UsageError, match="which servers do not sum"):
        choose(order(*map(host, names(3)), strategy="ps"), SIZE, None, decided=True, hooked=True)
    local = msgspec.structs.replace(order(*map(host, names(3)), strategy="ring"), period=4)
    with pytest.raises(UsageError, match="sums at every step"):
        choose(local, SIZE, None, decided=True, hooked=True)


def test_few_bytes_are_on_one_server() -> None:
    """4 kB are one shard: further servers take no part in a push and a pull."""
    hosts = [host(f"h{index}") for index in range(4)]
    inputs = PlanInput(nominal_cluster(hosts), names(4), names(4), {"ps": Costs(1e-4, 1e-4)}, {}, 2.0)
    one, four = (time_push_pull(inputs, names(4)[:count], 4096)[0].seconds for count in (1, 4))
    assert four == one
    assert time_push_pull(inputs, names(4), 4_000_000)[0].seconds < time_push_pull(inputs, ["h0"], 4_000_000)[0].seconds
