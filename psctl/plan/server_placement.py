"""The hosts of the servers of `ps`, and the time of a push and a pull with them.

A server is a separate process on its host. Shards are divided evenly over servers, so a host's share of the vector is
its share of the servers. Servers on idle hosts relieve the workers' ports; with n worker hosts and k < n idle ones the
best split (BytePS, OSDI 2020, theorem 1) gives idle hosts 2(n-1) shares for every n-k of a worker host, which whole
servers approximate.

Workers of one host may push together: to the servers of other hosts they then push one gradient, not one a worker
(ps/dense/client/); each worker pulls separately. Where every host has one worker, the workers of a rack may do so, and
then one of them also pulls for the others (PHub, SoCC 2018): with w workers a rack, 1/w of the bytes crosses between
racks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from psctl.grouping import grouped
from psctl.message_costs import Costs
from psctl.orders import HostOrder
from psctl.plan.compression_cost import Coding, add_coding_time
from psctl.plan.plan_input import PlanInput
from psctl.plan.rank_orders import by_rack, racks
from psctl.plan.simulation.cost_model import costs_on_shared_cores
from psctl.plan.simulation.estimates import LowerBound, lower_bound
from psctl.plan.simulation.flow_simulation import simulate
from psctl.plan.simulation.schedule_timing import Timing, at_pace
from psctl.ps.shards import target
from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.catalog import ScheduleOptions

MOST_A_HOST = 4
"""Most servers on one host in a split: each is a process with its own sums."""

TRANSFERS = 4000
"""Most transfers of one simulation; above it, shards are simulated together."""

MOST_SHARDS = 200
"""Shards beyond which more of them change nothing in how a synchronisation overlaps with compute."""

LARGE = 64
"""Workers up to which a push and a pull are simulated; with more, the busiest port determines the time."""

CROSSING = 1.13
"""Factor of a push and a pull by rack where both cross between racks at the same time. They share each direction of the
cable evenly, so answers wait for pushes of the other direction that fall behind, and a direction is half empty then;
the simulation has both directions alike. Measured on two racks of two hosts, 25 MB: 1.11 to 1.18."""


class ServingMode(msgspec.Struct, frozen=True):
    """The mode in which servers work.

    Args:
        pipelined: a shard is pulled while others are still pushed. Not where servers hold the values: a clock counts
            only when every shard has all of it.
        replicas: number of other servers that each sends updates to; None: one, where there is another.
        coding: the cost of compression.
        sum_by_host: workers of one host push one gradient to servers of other hosts.
        by_rack: workers of one rack do, and one of them pulls for the others.
    """

    pipelined: bool = True
    replicas: int | None = 0
    coding: Coding = Coding()
    sum_by_host: bool = True
    by_rack: bool = False

    def flow_factor(self, workers: int, servers: int) -> float:
        """Return the factor by which flows are longer: servers' ports also carry updates to replicas, which are not
        compressed, and pushes and answers of racks meet."""
        copies = min(servers - 1, 1 if self.replicas is None else self.replicas)
        longer = 1 + copies / (workers if self.pipelined else 2 * workers) / self.coding.both
        return longer * CROSSING if self.by_rack and self.pipelined else longer

    def byte_share(self, workers: Sequence[str], servers: Sequence[str]) -> float:
        """Return the share of the gradients' bytes that a push and a pull count as, with these hosts of workers and
        servers.

        One after the other they count evenly. At the same time, the port that is busiest in one direction decides.
        """
        push, pull = self.coding.push, self.coding.pull
        if not self.pipelined or push == pull:
            return self.coding.both
        here, held = Counter(workers), Counter(servers)
        coded, plain = 0.0, 0.0
        for host in {*here, *held}:
            share = held[host] / len(servers)
            own, others = here[host] * (1 - share), share * (len(workers) - here[host])
            coded = max(coded, own * push + others * pull, own * pull + others * push)
            plain = max(plain, own + others)
        return coded / plain if plain else self.coding.both

    def coding_seconds(self, size: float, workers: int, servers: int, ranks_per_core: float) -> float:
        """Return the seconds in which `size` bytes of gradients are encoded, and decoded by the servers."""
        return size * max(1.0, ranks_per_core) * (self.coding.encode + self.coding.read * workers / max(1, servers))


SUMMING = ServingMode()
"""Servers that sum, for workers that hold the values."""


def time_push_pull(
    inputs: PlanInput, servers: Sequence[str], size: float, mode: ServingMode = SUMMING
) -> tuple[Timing, int, float]:  # fmt: skip
    """Return the time of a push and a pull, its steps, and the bytes that a worker sends.

    Args:
        inputs: the machines and the workers.
        servers: the host of each server.
        size: bytes a worker pushes.
        mode: the mode of the servers.
    """
    measured = inputs.pace("ps")
    flowing = measured.flowing * mode.flow_factor(inputs.world, len(servers))
    pace, whole = msgspec.structs.replace(measured, flowing=flowing), size
    codes = mode.coding_seconds(size, inputs.world, len(servers), inputs.ranks_per_core)
    sent, shards = size * mode.coding.push, _shards_per_server(inputs, servers, size) if mode.pipelined else 1
    servers = _holders(inputs, servers, size)
    size *= mode.byte_share(inputs.hosts, servers)
    places = _places(inputs, mode)
    if mode.sum_by_host:
        sent *= _pushes_per_worker([places[host] for host in inputs.hosts], [places[host] for host in servers])
    if inputs.world > LARGE:
        return add_coding_time(at_pace(_by_ports(inputs, servers, size, mode), pace, whole), codes), 2, sent
    schedule = catalog.build("ps", inputs.world, _options(inputs, servers, shards, mode))
    costs = costs_on_shared_cores(inputs.costs.get("ps", Costs()), schedule, inputs.ranks_per_core)
    timing = simulate(schedule, inputs.network, (*inputs.ranks, *servers), size, costs)
    return add_coding_time(at_pace(timing, pace, whole), codes), 2, sent


def place_servers(
    inputs: PlanInput, hosts: Sequence[HostOrder], wanted: int | None, size: float, mode: ServingMode = SUMMING
) -> list[int]:
    """Return the host index of each server; empty when none may be placed.

    Args:
        inputs: the machines and the workers.
        hosts: the roster.
        wanted: their number, assigned in turn, hosts without workers first, because their ports are idle; None: the
            fastest of servers on those hosts only, on every host that may serve, or with a larger share on idle hosts.
            A single host gets two, so that sums use two cores.
        size: bytes a worker pushes.
        mode: the mode of the servers.
    """
    found = server_placements(hosts, wanted)
    if len(found) < 2:
        return found[0] if found else []
    return min(
        found, key=lambda chosen: time_push_pull(inputs, [hosts[at].name for at in chosen], size, mode)[0].seconds
    )


def server_placements(hosts: Sequence[HostOrder], wanted: int | None) -> list[list[int]]:
    """Return the placements of servers among which the fastest is chosen; none when none may be placed.

    Args:
        hosts: the roster.
        wanted: their number; None: chosen by the plan.
    """
    may = [index for index, host in enumerate(hosts) if host.may_serve]
    if not may or wanted == 0:
        return []
    free = [index for index in may if not hosts[index].workers]
    if wanted is not None:
        order = free + [index for index in may if hosts[index].workers]
        return [sorted(order[turn % len(order)] for turn in range(wanted))]
    if len(hosts) == 1:
        return [[0] * min(2, max(1, hosts[0].workers))]
    return [chosen for chosen in (free, may, _split(hosts, may, free)) if chosen]


def can_sum_by_rack(inputs: PlanInput) -> bool:
    """Return whether gradients may be summed by rack: several racks, one worker a host, and not more workers than a
    push and a pull are simulated for."""
    groups = by_rack(inputs)
    apart = len(set(inputs.hosts)) == inputs.world
    return apart and inputs.world <= LARGE and 1 < len(groups) < inputs.world


def _places(inputs: PlanInput, mode: ServingMode) -> Mapping[str, str]:
    """Return the place of each host whose workers push together: the host itself, or its rack."""
    return racks(inputs) if mode.by_rack else {host.name: host.name for host in inputs.cluster.hosts}


def _options(inputs: PlanInput, servers: Sequence[str], pieces: int, mode: ServingMode) -> ScheduleOptions:
    """Return the options of the schedule of pushes and pulls between these hosts."""
    nodes, places = tuple(range(inputs.world, inputs.world + len(servers))), _places(inputs, mode)
    groups = _groups([places[host] for host in inputs.hosts]) if mode.sum_by_host else {}
    order = {place: index for index, place in enumerate(groups)}
    near = tuple(order.get(places[host], -1) for host in servers) if groups else ()
    together = mode.by_rack and bool(groups)
    return ScheduleOptions(
        servers=nodes, pieces=pieces, groups=tuple(groups.values()), near=near, forwarded=together
    )  # fmt: skip


def _groups(places: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each place that has several; `places`: of each rank."""
    found = grouped((place, rank) for rank, place in enumerate(places))
    return {place: tuple(ranks) for place, ranks in found.items() if len(ranks) > 1}


def _pushes_per_worker(hosts: Sequence[str], servers: Sequence[str]) -> float:
    """Return how many gradients a worker sends servers on average, where the workers of a host, or rack, push
    together."""
    workers, held = Counter(hosts), Counter(servers)
    each = {host: held[host] / len(servers) for host in workers}
    return sum(count * each[host] + 1 - each[host] for host, count in workers.items()) / len(hosts)


def lower_bounds(
    inputs: PlanInput, hosts: Sequence[HostOrder], wanted: int | None, *, sum_by_host: bool = True
) -> list[LowerBound]:
    """Return a lower bound on a push and a pull for each placement of servers. Arguments as of `place_servers`."""
    if inputs.world > LARGE:
        return [LowerBound(0.0, 0.0)]
    costs, found = inputs.costs.get("ps", Costs()), []
    modes = [ServingMode(sum_by_host=sum_by_host)]
    if sum_by_host and can_sum_by_rack(inputs):
        modes.append(ServingMode(by_rack=True))
    for chosen in server_placements(hosts, wanted):
        names = [hosts[at].name for at in chosen]
        for mode in modes:
            schedule = catalog.build("ps", inputs.world, _options(inputs, names, 1, mode))
            found.append(lower_bound(schedule, inputs.network, (*inputs.ranks, *names), costs.alpha))
    return found


def _split(hosts: Sequence[HostOrder], may: Sequence[int], free: Sequence[int]) -> list[int]:
    """Return servers for the best split, rounded to whole servers; empty where there is no such split."""
    busy = [index for index in may if hosts[index].workers]
    if not free or len(free) >= len(busy):
        return []
    times = min(MOST_A_HOST, max(1, round(2 * (len(busy) - 1) / (len(busy) - len(free)))))
    return sorted([*busy, *(index for index in free for _ in range(times))])


def _by_ports(inputs: PlanInput, servers: Sequence[str], size: float, mode: ServingMode) -> Timing:
    """Return the time of the busiest port, or loopback, and of two messages."""
    costs = inputs.costs.get("ps", Costs())
    workers, held = Counter(inputs.hosts), Counter(servers)
    worst, name, wait = 0.0, "", 0.0
    for host in {*workers, *held}:
        away = next((other for other in (inputs.hosts[0], inputs.hosts[-1]) if other != host), None)
        part, others = held[host] / len(servers), inputs.world - workers[host]
        pulled, answered = workers[host] * (1 - part), part * others
        pushed, taken = pulled, answered
        if mode.sum_by_host:
            pushed, taken = min(1, workers[host]) * (1 - part), part * (len(workers) - (workers[host] > 0))
        if mode.pipelined:
            across = size * max(pushed + answered, taken + pulled)
        else:
            across = size * (max(pushed, taken) + max(pulled, answered))
        loads = [(across, away)] if away is not None else []
        loads += [(2 * size * workers[host] * part, host)] if part and workers[host] else []
        for amount, other in loads:
            route = inputs.network.route(host, other)
            rate, link = min((inputs.network.capacities[link], link) for link in route.links)
            wait = max(wait, route.latency)
            if amount / rate > worst:
                worst, name = amount / rate, inputs.network.names[link]
    waiting = 2 * (wait + costs.alpha + 2 * costs.overhead)
    return Timing(worst + waiting, "closed form", name if worst > waiting else "latency", 0, waiting, worst)


def shard_count(inputs: PlanInput, servers: Sequence[str], size: float) -> int:
    """Return the number of shards, as `ps/shards` cuts them; of very many, as many as matter for overlap."""
    return min(MOST_SHARDS, len(_holders(inputs, servers, size)) * _shards_per_server(inputs, servers, size))


def _shard_bytes(inputs: PlanInput, servers: Sequence[str], size: float) -> int:
    """Return the bytes of a shard, as `ps/shards` cuts them."""
    return target(int(size), len(servers), near=len({*inputs.hosts, *servers}) == 1)


def _holders(inputs: PlanInput, servers: Sequence[str], size: float) -> Sequence[str]:
    """Return the servers that hold a shard: of few bytes there are fewer shards than servers."""
    return servers[: max(1, math.ceil(size / _shard_bytes(inputs, servers, size)))]


def _shards_per_server(inputs: PlanInput, servers: Sequence[str], size: float) -> int:
    """Return the shards of a server, as `ps/shards` cuts them."""
    each = _shard_bytes(inputs, servers, size)
    most = max(1, TRANSFERS // (2 * len(servers) * inputs.world))
    return max(1, min(most, math.ceil(size / len(servers) / each)))
