"""The choice of a strategy, with every candidate and the reason."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.job.events import Candidate, Planned
from psctl.orders import HostOrder, JobOrder
from psctl.plan.cost import Cost, ring, sharded_servers
from psctl.plan.placement import place_servers, ports
from psctl.units import format_bytes, format_seconds
from psctl.words import BUILT_STRATEGIES, STRATEGIES, Layout

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of the types that gradients have."""

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
"""Where `winners` looks when the size of the model is not known yet."""

TIE = 1.05
"""Predictions closer than this are one: nominal rates are no better."""


class Plan(msgspec.Struct, frozen=True):
    """How gradients are synchronised and why.

    `servers` has the host index of each server, empty unless `chosen` is ps. `size` is bytes of gradients a worker.
    """

    size: int
    world: int
    chosen: str
    update: str
    servers: list[int]
    reason: str
    decided: bool
    candidates: list[Candidate]

    def event(self, time: float) -> Planned:
        """Return the plan as the event of the job's log."""
        return Planned(
            time=time, size=self.size, world=self.world, chosen=self.chosen, reason=self.reason,
            decided=self.decided, candidates=self.candidates,
        )  # fmt: skip


def gradient_bytes(layout: Layout) -> int:
    """Return the bytes of one worker's gradients."""
    return sum(each.size * WIDTHS.get(each.dtype, 4) for each in layout.parameters if each.trainable)


def choose(order: JobOrder, size: int | None, layout: Layout | None, decided: bool) -> Plan:
    """Choose the strategy of a job.

    Args:
        order: the job with its hosts, and what the user asked for (`strategy`, `update`, `servers`).
        size: bytes of gradients a worker; None takes the layout's, or the job's own `size`, or 100 MB.
        layout: what `prepare` was given; None before the run.
        decided: whether this is the run's own decision.

    Returns:
        the plan: all candidates, best first, every strategy's name once.
    """
    known = size if size is not None else gradient_bytes(layout) if layout is not None else order.size
    size = known if known is not None else 100_000_000
    update = _update(order, layout)
    servers = place_servers(order.hosts, order.servers, size)
    candidates = sorted(
        (_candidate(name, order, size, servers, update) for name in STRATEGIES),
        key=lambda each: (not each.feasible, each.seconds if each.seconds is not None else 0.0),
    )
    chosen, reason = _pick(order, candidates, size)
    candidates.sort(key=lambda each: (not each.feasible, each.strategy != chosen and order.strategy == "auto"))
    return Plan(
        size=size, world=_world(order.hosts), chosen=chosen, update=update if chosen == "ps" else "worker",
        servers=servers if chosen == "ps" else [], reason=reason, decided=decided, candidates=candidates,
    )  # fmt: skip


def winners(order: JobOrder, sizes: Sequence[int] = SIZES) -> list[Plan]:
    """Return the plan for each of several sizes, for a job whose size is not known before it runs."""
    return [choose(order, size, None, decided=False) for size in sizes]


def _world(hosts: Sequence[HostOrder]) -> int:
    return sum(host.workers for host in hosts)


def _update(order: JobOrder, layout: Layout | None) -> str:
    if order.update != "auto":
        return order.update
    return "worker" if layout is not None and not layout.optimizer else "server"


def _candidate(name: str, order: JobOrder, size: int, servers: list[int], update: str) -> Candidate:
    why_not = _why_not(name, order, servers)
    if why_not is not None:
        return Candidate(name, {}, None, None, None, None, False, why_not)
    cost: Cost
    if name == "ps":
        cost = sharded_servers(size, ports(order.hosts, servers))
        params: dict[str, object] = {"servers": len(servers), "update": update}
    else:
        cost = ring(size, ports(order.hosts))
        params = {}
    seconds = round(cost.seconds, 9)  # what is equal but for rounding is a tie
    return Candidate(name, params, seconds, cost.steps, cost.bytes_per_rank, cost.bottleneck, True, None)


def _why_not(name: str, order: JobOrder, servers: list[int]) -> str | None:
    if name not in BUILT_STRATEGIES:
        return "not in this version"
    if name == "ps" and not servers:
        return "servers: 0 was asked for" if order.servers == 0 else "no host may hold a server (roles)"
    if name == "native" and order.update == "server":
        return "update: server was asked for, and collectives update on workers"
    return None


def _pick(order: JobOrder, candidates: list[Candidate], size: int) -> tuple[str, str]:
    by_name = {each.strategy: each for each in candidates}
    if order.strategy != "auto":
        return order.strategy, f"strategy: {order.strategy} was asked for"
    feasible = [each for each in candidates if each.feasible]
    if len(feasible) == 1:
        only, other = feasible[0], by_name["native" if feasible[0].strategy == "ps" else "ps"]
        return only.strategy, f"{only.strategy}, for {other.strategy} is out: {other.why_not}"
    ps, native = by_name["ps"], by_name["native"]
    assert ps.seconds is not None
    assert native.seconds is not None
    what = f"{format_bytes(size)} of gradients"
    if _world(order.hosts) == 1:
        return "native", "one worker has nothing to synchronise"
    if any(host.gpus for host in order.hosts):
        return "native", "gradients lie on GPUs, where the engine's own all-reduce moves them without a copy"
    if ps.seconds <= native.seconds * TIE:
        return "ps", (
            f"{what}: servers take {format_seconds(ps.seconds)}, the engine's ring {format_seconds(native.seconds)}, "
            f"and pushes start while backward still runs"
        )
    return "native", (
        f"{what}: the engine's ring takes {format_seconds(native.seconds)}, servers {format_seconds(ps.seconds)} "
        f"(they wait for {ps.bottleneck})"
    )
