"""The choice names every strategy once, says why, and agrees with the closed forms."""

from __future__ import annotations

import pytest

from psctl.orders import CheckpointOrder, HostOrder, JobOrder
from psctl.plan.choose import choose, winners
from psctl.plan.cost import ALPHA, Port, ring, sharded_servers
from psctl.plan.placement import place_servers
from psctl.words import STRATEGIES, Layout, ParameterInfo

SAVE = CheckpointOrder(None, 0, 0.0, 3, None, True, 1)
GBIT = 0.956 * 1e9 / 8


def host(name: str, workers: int = 1, gpus: int = 0, rate: float = GBIT, serve: bool = True) -> HostOrder:
    return HostOrder(name, "10.0.0.1", "eth0", 4, gpus, workers, serve, rate)


def order(*hosts: HostOrder, strategy: str = "auto", servers: int | None = None, update: str = "auto") -> JobOrder:
    return JobOrder(
        "digits-1", ["train.py"], list(hosts), servers, strategy, update, 0, None, 120.0, 300.0, None, 1.0, None, SAVE,
        None, None, "", "", {}, "auto",
    )  # fmt: skip


def test_every_strategy_stands_in_the_plan_exactly_once_and_the_best_is_first() -> None:
    plan = choose(order(host("a"), host("b")), 100_000_000, None, decided=False)
    assert sorted(each.strategy for each in plan.candidates) == sorted(STRATEGIES)
    assert plan.candidates[0].strategy == plan.chosen
    assert all(each.seconds is None and each.why_not for each in plan.candidates if not each.feasible)


def test_sharded_servers_on_the_workers_hosts_cost_what_a_ring_costs() -> None:
    ports = [Port(name, GBIT, 1, 1) for name in "abcd"]
    assert sharded_servers(1e8, ports).seconds - 4 * ALPHA == pytest.approx(2 * 3 / 4 * 1e8 / GBIT)
    assert ring(1e8, ports).seconds - 6 * ALPHA == pytest.approx(2 * 3 / 4 * 1e8 / GBIT)


def test_one_server_for_many_workers_waits_for_its_port() -> None:
    """m workers on one server: 2 m N / B."""
    ports = [Port(f"w{rank}", GBIT, 1, 0) for rank in range(4)] + [Port("s", GBIT, 0, 1)]
    cost = sharded_servers(1e8, ports)
    assert cost.seconds - 4 * ALPHA == pytest.approx(2 * 4 * 1e8 / GBIT)
    assert cost.bottleneck == "s port"


def test_idle_hosts_hold_the_servers_where_that_is_faster() -> None:
    hosts = [host(f"w{rank}") for rank in range(4)] + [host(f"s{rank}", workers=0) for rank in range(4)]
    assert place_servers(hosts, None, 1e8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert place_servers(hosts, 4, 1e8) == [4, 5, 6, 7]


def test_a_host_that_may_not_serve_gets_no_server() -> None:
    assert place_servers([host("a", serve=False), host("b")], 2, 1e6) == [1, 1]
    plan = choose(order(host("a", serve=False), host("b", serve=False)), 1_000_000, None, decided=False)
    assert plan.chosen == "native"
    assert "roles" in plan.reason


def test_what_was_asked_for_is_taken_and_said() -> None:
    plan = choose(order(host("a"), host("b"), strategy="native"), 1_000_000, None, decided=True)
    assert (plan.chosen, plan.reason, plan.servers) == ("native", "strategy: native was asked for", [])


def test_gradients_on_gpus_take_the_engine() -> None:
    assert choose(order(host("a", 2, gpus=2), host("b", 2, gpus=2)), 10**8, None, decided=False).chosen == "native"


def test_an_optimizer_unfit_for_servers_steps_on_workers() -> None:
    layout = Layout((ParameterInfo("w", (3, 5), "float64", 0),), "", ({},))
    plan = choose(order(host("a"), host("b")), None, layout, decided=True)
    assert (plan.size, plan.update) == (120, "worker")


def test_before_the_run_there_is_a_winner_for_each_size() -> None:
    plans = winners(order(host("a"), host("b")))
    assert [plan.size for plan in plans] == sorted(plan.size for plan in plans)
    assert not any(plan.decided for plan in plans)
