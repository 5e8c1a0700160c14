"""The terms of a step's time (`psctl plan --explain`), each as if it ran alone: what the overlapped prediction hides.

Under `ps` they are the seven of data-parallel training on several machines with several GPUs each: compute; copies from
GPUs to the host; the sum of a host's gradients; pushes; the servers' sum; pulls; copies to the GPUs. The text-book's
path adds a host's gradients on one GPU before the copy; psctl adds them in memory that the host's workers share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from psctl.grouping import grouped
from psctl.message_costs import Costs
from psctl.plan.compression_cost import Coding
from psctl.plan.overlap import FORWARD
from psctl.plan.plan_input import PlanInput
from psctl.plan.simulation.schedule_timing import Timing
from psctl.units import format_bytes, format_rate


class StepTerm(msgspec.Struct, frozen=True):
    """One term: its name, seconds (None: not known), and how they follow."""

    term: str
    seconds: float | None
    how: str


def server_terms(
    inputs: PlanInput, servers: Sequence[str], size: float, compute: float | None, codes: Coding, *,
    sum_by_host: bool, on_gpus: bool, racks: Mapping[str, str] | None = None,
) -> list[StepTerm]:  # fmt: skip
    """Return the seven terms under `ps`.

    Args:
        inputs: the machines and the workers.
        servers: the host of each server.
        size: bytes of a worker's gradients.
        compute: seconds of a step's compute; None: not known.
        codes: of compressed pushes and pulls.
        sum_by_host: gradients of a host's workers are summed before they are pushed.
        on_gpus: gradients are on GPUs.
        racks: the rack of each host, where gradients are summed by rack, of one worker a host; else None.
    """
    costs, workers = inputs.costs.get("ps", Costs()), Counter(inputs.hosts)
    share = {host: count / len(servers) for host, count in Counter(servers).items()}
    together = {host: count for host, count in workers.items() if sum_by_host and count > 1 and len(workers) > 1}
    most = max(together.values(), default=1)
    pushes = [(host, 1 if host in together else count) for host, count in workers.items()]
    pairs = [(host, to) for host in workers for to in share if host != to or not on_gpus]  # else copies are all of it
    taken = dict(pushes)
    pushed = _over_links(inputs, ((host, to, size * codes.push * share[to] * taken[host]) for host, to in pairs))
    pulled = _over_links(inputs, ((to, host, size * codes.pull * share[to] * workers[host]) for host, to in pairs))
    if racks is not None:
        flows = list(_rack_flows(workers, share, racks, size))
        most = max(Counter(racks[host] for host in workers).values())
        pushes = [(host, 1) for host in {racks[host]: host for host in workers}.values()]
        pushed, pulled = _over_links(inputs, flows), _over_links(inputs, ((to, host, part) for host, to, part in flows))
    summed = max(share.values()) * size * sum(count for _, count in pushes)
    latency = costs.alpha + 2 * costs.overhead
    copied = [(place, host) for place, host in zip(inputs.ranks, inputs.hosts, strict=True) if place != host]
    down = _over_links(inputs, ((place, host, size) for place, host in copied)) if on_gpus else (0.0, "")
    up = _over_links(inputs, ((host, place, size) for place, host in copied)) if on_gpus else (0.0, "")
    added = f"{most} of {format_bytes(size)}, the first is copied" if most > 1 else "one worker a host, or summed apart"
    place = "host" if racks is None else "rack"
    return [
        StepTerm("forward and backward", compute, "given" if compute is not None else "not known: give --compute"),
        StepTerm("GPU to host", down[0], _copy(down[1], on_gpus=on_gpus)),
        StepTerm(f"sum of a {place}", (most - 1) * size * costs.gamma, added + _gamma(costs)),
        StepTerm("push", pushed[0] + latency, pushed[1]),
        StepTerm("servers' sum", summed * costs.gamma, f"{format_bytes(summed)} on the busiest host" + _gamma(costs)),
        StepTerm("pull", pulled[0] + latency, pulled[1]),
        StepTerm("host to GPU", up[0], _copy(up[1], on_gpus=on_gpus)),
    ]


def schedule_terms(compute: float | None, timing: Timing, moved: float, buckets: int) -> list[StepTerm]:
    """Return the terms under a collective.

    Args:
        compute: seconds of a step's compute; None: not known.
        timing: of the largest bucket.
        moved: seconds in which bytes of all buckets move and are summed.
        buckets: their number.
    """
    why = "not known: give --compute"
    parts = timing.flowing + timing.summing
    summing = moved * timing.summing / parts if parts else 0.0
    forward = None if compute is None else FORWARD * compute
    backward = None if compute is None else compute - FORWARD * compute
    return [
        StepTerm("forward", forward, "a third of the compute" if compute is not None else why),
        StepTerm("backward", backward, "two thirds" if compute is not None else why),
        StepTerm("messages that wait", timing.waiting * buckets, f"{buckets} buckets, one after another"),
        StepTerm("bytes on links", moved - summing, f"most on {timing.bottleneck}" if timing.bottleneck else ""),
        StepTerm("sums", summing, "on the critical path"),
    ]


def _rack_flows(
    workers: Mapping[str, int], share: Mapping[str, float], racks: Mapping[str, str], size: float
) -> Iterator[tuple[str, str, float]]:  # fmt: skip
    """Yield the flows of a push where racks sum: source, target, bytes. A shard of a server elsewhere goes to the host
    of the rack that collects it, in turn over the shards, and from there to the server; a pull takes the same way back.
    """
    of_rack = grouped((racks[host], host) for host in workers)
    for members in of_rack.values():
        away = 1.0 - sum(share.get(host, 0.0) for host in share if racks[host] == racks[members[0]])
        for host in members:
            for to, part in share.items():
                yield host, to, size * part / (1 if racks[to] == racks[host] else len(members))
            for other in members:
                if other != host:
                    yield host, other, size * away / len(members)


def _over_links(inputs: PlanInput, flows: Iterable[tuple[str, str, float]]) -> tuple[float, str]:
    """Return the seconds of the busiest link, and which it is, when these flows share the links."""
    crossed: dict[int, float] = {}
    for source, target, amount in flows:
        for link in inputs.network.route(source, target).links:
            crossed[link] = crossed.get(link, 0.0) + amount
    capacities, names = inputs.network.capacities, inputs.network.names
    if not crossed:
        return 0.0, "no link is crossed"
    link = max(crossed, key=lambda each: crossed[each] / capacities[each])
    seconds = crossed[link] / capacities[link]
    return seconds, f"{format_bytes(crossed[link])} over {names[link]}, {format_rate(capacities[link])}"


def _copy(how: str, *, on_gpus: bool) -> str:
    return how if on_gpus and how else "gradients are in the host's memory"


def _gamma(costs: Costs) -> str:
    return "" if costs.gamma else "; the cost of sums was not measured (psctl bench)"
