"""Suggests the strategy that `topo` shows: the choice of the plan, with the groups of devices that it forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from psctl.errors import InvalidFile
from psctl.message_costs import MeasuredCosts
from psctl.plan.choose import UNKNOWN, Plan, planner_for_cluster
from psctl.plan.feasibility import ONE_WORKER
from psctl.plan.plan_input import PlanInput, PlanRequest, plan_input_of_cluster
from psctl.plan.simulation.cost_model import FREE, engine_costs, paces_of
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.topology.graph import ClusterGraph, HostNode, Suggestion
from psctl.units import format_bytes

Named = tuple[tuple[str, ...], ...]
_UNLINKED = "no path between the ranks is known, so the engine decides"

Trees = tuple[tuple[tuple[str, str], ...], ...]


def suggest(cluster: ClusterGraph, measured: MeasuredCosts | None = None) -> Suggestion | None:
    """Return the strategy that `plan` chooses on these machines for gradients of UNKNOWN bytes.

    Args:
        cluster: the hosts and the links between them.
        measured: the costs of messages that `up` or `bench` measured; None for machines from a file, for which only
            the latencies of the file count.

    Returns:
        The strategy, the reason and the groups; None if no host may run a worker.
    """
    if not any("worker" in host.roles for host in cluster.hosts):
        return None
    try:
        inputs = _inputs(cluster, measured)
    except InvalidFile:
        return Suggestion("native", _UNLINKED)
    if any(_unlinked(host) for host in cluster.hosts):
        return Suggestion("native", _UNLINKED)
    plan = planner_for_cluster(inputs, PlanRequest(bucketed=measured is not None)).plan(UNKNOWN, whole=False)
    groups, shares, trees = _groups(plan, inputs)
    reason = plan.reason if plan.reason == ONE_WORKER else f"{format_bytes(UNKNOWN)} of gradients: {plan.reason}"
    return Suggestion(plan.chosen, reason + _unknown(inputs), groups, shares, trees)


def _unlinked(host: HostNode) -> bool:
    """Return whether a host has several GPUs without any known link."""
    return "worker" in host.roles and len(host.graph.of_kind("gpu")) > 1 and not host.graph.links


def _inputs(cluster: ClusterGraph, measured: MeasuredCosts | None) -> PlanInput:
    if measured is None:
        return plan_input_of_cluster(cluster, costs=FREE)
    gpus = any(host.graph.of_kind("gpu") for host in cluster.hosts if "worker" in host.roles)
    found = plan_input_of_cluster(cluster)
    known = measured.for_ranks(dict(Counter(found.hosts)))
    found.costs, found.paces = engine_costs(gpus, known.engines), paces_of(known.paces)
    return found


def _groups(plan: Plan, inputs: PlanInput) -> tuple[Named, tuple[float, ...], Trees]:
    """Return the groups of the chosen strategy, the part of the bytes that each carries, and the edges of its trees."""
    several = len(inputs.cluster.hosts) > 1
    name = [place if several else place.rpartition("/")[2] for place in inputs.ranks]
    row = next(each for each in plan.candidates if each.strategy == plan.chosen)
    if plan.chosen == "ps":
        held: Counter[str] = Counter(msgspec.convert(row.params["hosts"], list[str]))
        return tuple((host,) for host in held), _parts(held.values()), ()
    known = {key: value for key, value in row.params.items() if key in ScheduleOptions.__struct_fields__}
    options = msgspec.convert(known, ScheduleOptions)
    if options.rings:
        rings = tuple(tuple(name[rank] for rank in order) for order, _ in options.rings)
        return rings, _parts(weight for _, weight in options.rings), ()
    if options.trees:
        grown = tuple((root, *(child for _, child in edges)) for root, edges, _ in options.trees)
        trees = tuple(tuple((name[a], name[b]) for a, b in edges) for _, edges, _ in options.trees)
        named = tuple(tuple(name[rank] for rank in ranks) for ranks in grown)
        return named, _parts(weight for _, _, weight in options.trees), trees
    groups = options.groups or (options.order or tuple(range(inputs.world)),)
    return tuple(tuple(name[rank] for rank in group) for group in groups), _parts([1] * len(groups)), ()


def _parts(weights: Iterable[int]) -> tuple[float, ...]:
    known = list(weights)
    return tuple(weight / sum(known) for weight in known)


def _unknown(inputs: PlanInput) -> str:
    """Return a warning where the ranks' routes contain links of unknown rate."""
    network = inputs.network
    first = inputs.ranks[0]
    crossed = {link for place in inputs.ranks[1:] for link in network.route(first, place).links}
    names = sorted({" - ".join(sorted(network.names[link].split(" -> "))) for link in crossed & network.assumed})
    if not names:
        return ""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"; the rate of {', '.join(names[:2])}{more} is not known and was assumed"
