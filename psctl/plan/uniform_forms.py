"""Closed forms in place of simulations with very many ranks: the machines are treated as one uniform network."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.plan import allreduce_times, rank_orders
from psctl.plan.plan_input import PlanInput
from psctl.plan.simulation.schedule_timing import Costs
from psctl.schedule.algorithms.catalog import ScheduleOptions

LARGE = 64
"""Ranks up to which candidates are simulated."""


def uniform_rates(inputs: PlanInput, port: Sequence[float], costs: Costs) -> allreduce_times.UniformRates:
    """Return the machines as one uniform network: the slowest port, the longest wait.

    Args:
        inputs: the machines.
        port: bytes/s of each rank's port.
        costs: of messages, besides their bytes.
    """
    far = [inputs.network.route(inputs.ranks[0], place).latency for place in inputs.ranks[1:]]
    wait = max(far, default=0.0) + costs.alpha + 2 * costs.overhead
    narrowest = rank_orders.least_outward_rate(inputs) if inputs.world > LARGE else min(port)
    return allreduce_times.UniformRates(wait, 1 / narrowest, costs.gamma)


def closed_form(
    inputs: PlanInput, port: Sequence[float], name: str, options: ScheduleOptions, size: float, costs: Costs
) -> allreduce_times.Form:  # fmt: skip
    """Return the closed form of a strategy; arguments as of `uniform_rates` and of a schedule."""
    rates = uniform_rates(inputs, port, costs)
    if name in ("ring", "multi-ring", "bidirectional-ring"):
        orders = [order for order, _ in options.rings] or [options.order or tuple(range(inputs.world))]
        return allreduce_times.ring(
            inputs.world, size, msgspec.structs.replace(rates, beta=_ring_beta(inputs, orders[0]))
        )
    if name == "hierarchical":
        return _hierarchical_form(inputs, options, size, rates)
    if name == "packed-trees":
        return allreduce_times.sharded(inputs.world, size, rates)
    return allreduce_times.FORMS[name](inputs.world, size, rates)


def _hierarchical_form(
    inputs: PlanInput, options: ScheduleOptions, size: float, rates: allreduce_times.UniformRates
) -> allreduce_times.Form:
    groups = options.groups
    inner = msgspec.structs.replace(rates, beta=max(_ring_beta(inputs, group) for group in groups))
    heads = [group[0] for group in groups]
    across = msgspec.structs.replace(rates, beta=_ring_beta(inputs, heads) * max(map(len, groups)))
    return allreduce_times.hierarchical(len(groups), max(map(len, groups)), size, inner, across)


def _ring_beta(inputs: PlanInput, order: Sequence[int]) -> float:
    """Return the seconds of a byte in a ring in which all ranks send at once, by the most crossed link."""
    count: dict[int, int] = {}
    for at, rank in enumerate(order):
        other = order[(at + 1) % len(order)]
        if other != rank:
            for link in inputs.network.route(inputs.ranks[rank], inputs.ranks[other]).links:
                count[link] = count.get(link, 0) + 1
    return max((times / inputs.network.capacities[link] for link, times in count.items()), default=0.0)
