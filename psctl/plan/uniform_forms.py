"""Closed forms in place of simulations with very many ranks: the machines are treated as one uniform network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from psctl.message_costs import Costs
from psctl.plan import allreduce_times, rank_orders
from psctl.plan.plan_input import PlanInput
from psctl.schedule.algorithms.catalog import ScheduleOptions

LARGE = 64
"""Ranks up to which candidates are simulated."""


class UniformForms:
    """The closed forms of given machines. What they need of the machines is computed once.

    Args:
        inputs: the machines.
        port: bytes/s of each rank's port.
    """

    def __init__(self, inputs: PlanInput, port: Sequence[float]) -> None:
        self._inputs = inputs
        far = [inputs.network.route(inputs.ranks[0], place).latency for place in inputs.ranks[1:]]
        self._wait = max(far, default=0.0)
        self._rate = rank_orders.least_outward_rate(inputs) if inputs.world > LARGE else min(port)
        self._ring_betas: dict[tuple[int, ...], float] = {}

    def rates(self, costs: Costs) -> allreduce_times.UniformRates:
        """Return the machines as one uniform network: the slowest port, the longest wait.

        Args:
            costs: of messages, besides their bytes.
        """
        wait = self._wait + costs.alpha + 2 * costs.overhead
        return allreduce_times.UniformRates(wait, 1 / self._rate, costs.gamma)

    def form(self, name: str, options: ScheduleOptions, size: float, costs: Costs) -> allreduce_times.Form:
        """Return the closed form of a strategy.

        Args:
            name: of the schedule.
            options: of the schedule.
            size: bytes of the vector.
            costs: of messages, besides their bytes.
        """
        rates, world = self.rates(costs), self._inputs.world
        if name in ("ring", "multi-ring", "bidirectional-ring"):
            orders = [order for order, _ in options.rings] or [options.order or tuple(range(world))]
            return allreduce_times.ring(world, size, msgspec.structs.replace(rates, beta=self._ring_beta(orders[0])))
        if name == "hierarchical":
            return self._hierarchical(options.groups, size, rates)
        if name == "packed-trees":
            return allreduce_times.sharded(world, size, rates)
        return allreduce_times.FORMS[name](world, size, rates)

    def _hierarchical(
        self, groups: rank_orders.Groups, size: float, rates: allreduce_times.UniformRates
    ) -> allreduce_times.Form:
        inner = msgspec.structs.replace(rates, beta=max(self._ring_beta(group) for group in groups))
        largest = max(map(len, groups))
        heads = tuple(group[0] for group in groups)
        across = msgspec.structs.replace(rates, beta=self._ring_beta(heads) * largest)
        return allreduce_times.hierarchical(len(groups), largest, size, inner, across)

    def _ring_beta(self, order: tuple[int, ...]) -> float:
        """Return the seconds of a byte in a ring in which all ranks send at once, by the most crossed link."""
        if order not in self._ring_betas:
            ranks, network = self._inputs.ranks, self._inputs.network
            count: Counter[int] = Counter()
            for at, rank in enumerate(order):
                other = order[(at + 1) % len(order)]
                if other != rank:
                    count.update(network.route(ranks[rank], ranks[other]).links)
            times = (crossed / network.capacities[link] for link, crossed in count.items())
            self._ring_betas[order] = max(times, default=0.0)
        return self._ring_betas[order]
