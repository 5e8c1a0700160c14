"""Infers the network between hosts from measured pairs: ports on one switch, or racks and the trunks between them.

The rate of a pair without other traffic is the minimum of the rates of its two ports and of all cables between them. If
min(port of a, port of b) explains the rate of every pair, the hosts are put on one switch. A pair below that bound,
alone or only while other pairs run, crosses a narrower link: its hosts are in different racks. Racks are then a
colouring of the graph of such pairs (DSATUR, Brelaz 1979; exact where that graph is bipartite or complete multipartite,
as with two racks or with narrow trunks between all racks). The total rate of simultaneous pairs between two racks
distinguishes a shared trunk from separate links.

Hosts whose racks no measurement separates are assigned by their labels, else to the rack with the lowest latency. A
port faster than those of all other hosts is measured at the fastest of their rates.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from psctl.topology.findings import Finding
from psctl.topology.graph import NETWORK, Between
from psctl.topology.network.measurement_rounds import Pair
from psctl.units import format_bit_rate

TOLERANCE = 0.12
"""Part by which a rate may be below its bound: six times the scatter of a good measurement (2%)."""

ALONE = 4
"""Most pairs of the same two racks that are measured again alone, because they cross the same cables."""

SCATTER = 0.1
"""Spread of a pair's repeats above which the pair is measured once more, because a host may have been busy."""

Labels = Mapping[str, Mapping[str, str]]
"""Labels of each host in the cluster file."""


class PairSample(msgspec.Struct, frozen=True):
    """A measurement from host `a` to host `b`: the median of several repeats.

    `rate` is payload bytes/s, `latency` seconds one way, `spread` the range of the repeats divided by their median.
    """

    a: str
    b: str
    rate: float
    latency: float
    spread: float = 0.0


class ConcurrentSamples(msgspec.Struct, frozen=True):
    """Samples that were measured at the same time: one direction of each pair."""

    samples: tuple[PairSample, ...]

    @property
    def pairs(self) -> frozenset[Pair]:
        """The (sender, receiver) pairs."""
        return frozenset((each.a, each.b) for each in self.samples)


class Fabric(msgspec.Struct, frozen=True):
    """The cables between hosts. `racks` has the hosts behind each switch; it is {} where all are on one switch."""

    between: tuple[Between, ...] = ()
    racks: dict[str, tuple[str, ...]] = {}
    findings: tuple[Finding, ...] = ()


class Trunk(msgspec.Struct, frozen=True):
    """The link between two racks: bytes/s of all connections across it, and of one."""

    capacity: float
    single: float


def fastest_samples(series: Iterable[ConcurrentSamples]) -> dict[Pair, PairSample]:
    """Return the fastest sample of each ordered pair: other traffic can only reduce a rate."""
    found: dict[Pair, PairSample] = {}
    for each in (sample for one in series for sample in one.samples):
        known = found.get((each.a, each.b))
        if known is None or each.rate > known.rate:
            found[each.a, each.b] = each
    return found


def further_measurements(
    hosts: Sequence[str], series: Sequence[ConcurrentSamples], labels: Labels | None = None
) -> tuple[tuple[Pair, ...], ...]:
    """Return the further measurements that `infer_fabric` needs, () if none.

    Each is a set of pairs to measure at the same time, in both directions. First come single pairs that other traffic
    may have slowed; once they are measured, sets of pairs that cross between two racks.
    """
    seen = _Measurements(hosts, series, labels or {})
    again = seen.doubtful()
    return tuple((pair,) for pair in again) if again else tuple(seen.crossings())


def infer_fabric(hosts: Sequence[str], series: Sequence[ConcurrentSamples], labels: Labels | None = None) -> Fabric:
    """Return the cables between the hosts.

    Args:
        hosts: their names; hosts without samples are left out.
        series: all measurements.
        labels: labels of the cluster file; they name racks, and assign hosts that rates do not separate.

    Returns:
        Edges of hosts and switches with the bandwidth of the slower direction; findings where the directions differ,
        where one connection does not fill a trunk, and where no racks explain the measurements.
    """
    seen = _Measurements(hosts, series, labels or {})
    racks, trunks = seen.joined(seen.racks())
    uneven = seen.uneven()
    if not trunks or seen.contradicts(trunks):
        odd = seen.unexplained([tuple(seen.hosts)], {})
        return Fabric(_star(seen), {}, (*uneven, *_odd(odd)))
    names = dict(zip(racks, _names(racks, labels or {}, set(hosts)), strict=True))
    edges = [
        Between(host, names[rack], seen.port(host), seen.latencies(rack)[host], measured=True)
        for rack in racks
        for host in rack
    ]
    shared = [
        _single(names[a], names[b], trunk) for (a, b), trunk in trunks.items() if _far(trunk.single, trunk.capacity)
    ]
    findings = (*uneven, *shared, *_odd(seen.unexplained(racks, trunks)))
    return Fabric((*edges, *_trunks(seen, names, trunks)), {names[rack]: rack for rack in racks}, findings)


Rack = tuple[str, ...]
Trunks = Mapping[tuple[Rack, Rack], Trunk]


class _Measurements:
    """All measurements, and the racks and trunks inferred from them."""

    def __init__(self, hosts: Sequence[str], series: Sequence[ConcurrentSamples], labels: Labels) -> None:
        self.best = fastest_samples(series)
        met = {host for pair in self.best for host in pair}
        self.hosts = [host for host in hosts if host in met]
        self.series, self.labels = series, labels
        self.up = {h: _level([s.rate for (a, _), s in self.best.items() if a == h]) for h in self.hosts}
        self.down = {h: _level([s.rate for (_, b), s in self.best.items() if b == h]) for h in self.hosts}
        self.apart = {frozenset((s.a, s.b)) for one in series for s in one.samples if self.slow(s)}
        self.times = Counter(pair for one in series if len(one.samples) == 1 for pair in one.pairs)
        self.runs = Counter(pair for one in series for pair in one.pairs)
        self.singly = {frozenset(pair) for pair in self.times}

    def limit(self, a: str, b: str) -> float:
        """Return the rate that both ports allow."""
        return min(self.up.get(a, 0.0), self.down.get(b, 0.0))

    def slow(self, sample: PairSample) -> bool:
        return sample.rate < (1 - TOLERANCE) * self.limit(sample.a, sample.b)

    def port(self, host: str) -> float:
        """Return the rate of a host's port: its slower direction, or the mean where the two differ by scatter."""
        up, down = self.up[host], self.down[host]
        return min(up, down) if _far(min(up, down), max(up, down)) else (up + down) / 2

    # ---- racks ---------------------------------------------------------------------------------------------------

    def racks(self) -> list[Rack]:
        """Return a colouring of the graph of separate pairs, the most constrained host first."""
        colours: list[list[str]] = []
        left = list(self.hosts)
        while left:
            host = max(left, key=lambda each: (self._against(each, colours), self._degree(each), -left.index(each)))
            left.remove(host)
            open_ = [colour for colour in colours if not any(frozenset((host, one)) in self.apart for one in colour)]
            if open_:
                max(open_, key=lambda colour: self._kinship(host, colour)).append(host)
            else:
                colours.append([host])
        ordered = [tuple(sorted(colour, key=self.hosts.index)) for colour in colours]
        return sorted(ordered, key=lambda rack: self.hosts.index(rack[0]))

    def _against(self, host: str, colours: list[list[str]]) -> int:
        return sum(any(frozenset((host, one)) in self.apart for one in colour) for colour in colours)

    def _degree(self, host: str) -> int:
        return sum(host in pair for pair in self.apart)

    def _kinship(self, host: str, colour: list[str]) -> tuple[int, float]:
        """Return how well a host fits a rack: the number of common labels, then the latency."""
        own = set(self.labels.get(host, {}).items())
        common = sum(len(own & set(self.labels.get(one, {}).items())) for one in colour)
        return common, -statistics.mean(self.latency(host, one) for one in colour)

    # ---- what else to measure ------------------------------------------------------------------------------------

    def doubtful(self) -> list[Pair]:
        """Return pairs that were slow while others ran and are not measured alone yet, at most ALONE of two racks."""
        rack_of = {host: number for number, rack in enumerate(self.racks()) for host in rack}
        done: dict[frozenset[int], int] = {}
        found: list[Pair] = []
        ordered = [pair for pair in itertools.combinations(self.hosts, 2) if frozenset(pair) in self.apart]
        for a, b in sorted(ordered, key=lambda pair: frozenset(pair) not in self.singly):
            crossing = frozenset((rack_of[a], rack_of[b]))
            done[crossing] = done.get(crossing, 0) + 1
            if frozenset((a, b)) not in self.singly and done[crossing] <= ALONE:
                found.append((a, b))
        unsteady = [p for p in itertools.combinations(self.hosts, 2) if self._unsteady(p) or self._unsteady(p[::-1])]
        few = len(unsteady) <= max(2, len(self.hosts) // 2)  # else the whole network is busy: repeats do not help
        return found + [pair for pair in (unsteady if few else ordered) if pair in unsteady and pair not in found]

    def _unsteady(self, pair: Pair) -> bool:
        """Return whether a pair's repeats scatter and it has not been measured again: alone if it was slow alone."""
        sample = self.best.get(pair)
        if sample is None or sample.spread <= SCATTER:
            return False
        return self.times[pair] == 1 if self.slow(sample) else self.runs[pair] == 1

    def crossings(self) -> list[tuple[Pair, ...]]:
        """Return, for each two racks, the most pairs between them that can run at once, unless they ran already."""
        ran = {one.pairs for one in self.series}
        found = [_across(one, other) for one, other in itertools.combinations(self.racks(), 2)]
        return [pairs for pairs in found if len(pairs) > 1 and frozenset(pairs) not in ran]

    # ---- trunks --------------------------------------------------------------------------------------------------

    def trunk(self, one: Rack, other: Rack) -> Trunk | None:
        """Return the trunk between two racks, None if it is too wide to be measured."""
        directions = [self._one_way(one, other), self._one_way(other, one)]
        return min((trunk for trunk in directions if trunk is not None), key=lambda trunk: trunk.capacity, default=None)

    def joined(self, racks: Sequence[Rack]) -> tuple[list[Rack], Trunks]:
        """Merge racks without a narrow trunk between them; return the racks and the trunks between them."""
        left = list(racks)
        while True:
            pairs = list(itertools.combinations(left, 2))
            found = {pair: self.trunk(*pair) for pair in pairs}
            wide = next((pair for pair, trunk in found.items() if trunk is None), None)
            if wide is None:
                return left, {pair: trunk for pair, trunk in found.items() if trunk is not None}
            both = tuple(sorted((*wide[0], *wide[1]), key=self.hosts.index))
            left = [both if rack == wide[0] else rack for rack in left if rack != wide[1]]

    def contradicts(self, trunks: Trunks) -> bool:
        """Return whether a pair was faster than the trunk that it crosses."""
        return any(
            sample.rate > (1 + TOLERANCE) * trunk.capacity
            for (one, other), trunk in trunks.items()
            for (a, b), sample in self.best.items()
            if (a in one and b in other) or (a in other and b in one)
        )

    def _one_way(self, one: Rack, other: Rack) -> Trunk | None:
        crossing = [sample for (a, b), sample in self.best.items() if a in one and b in other]
        alone = [s.rate for s in crossing if self.slow(s) and frozenset((s.a, s.b)) in self.singly]
        single = statistics.median(alone) if alone else None
        pairs = _across(one, other)
        runs = [series.samples for series in self.series if series.pairs == frozenset(pairs)]
        totals = [sum(sample.rate for sample in run) for run in runs]
        total = statistics.median(totals) if totals else 0.0
        if single is not None:
            return Trunk(total if total > (1 + TOLERANCE) * single else single, single)
        wanted = sum(self.limit(a, b) for a, b in pairs)
        all_slow = bool(runs) and all(self.slow(sample) for sample in runs[-1])
        return Trunk(total, total) if all_slow and total < (1 - TOLERANCE) * wanted else None

    def unexplained(self, racks: Sequence[Rack], trunks: Trunks) -> dict[Pair, tuple[float, float]]:
        """Return the rate and bound of pairs whose undisturbed rate is below that of their ports and trunks."""
        rack_of = {host: rack for rack in racks for host in rack}
        found = {}
        for (a, b), sample in self.best.items():
            if frozenset((a, b)) in self.apart - self.singly:
                continue  # measured only while others ran
            trunk = trunks.get((rack_of[a], rack_of[b])) or trunks.get((rack_of[b], rack_of[a]))
            bound = min(self.limit(a, b), trunk.single if trunk and self.slow(sample) else float("inf"))
            if _far(sample.rate, bound):
                found[a, b] = (sample.rate, bound)
        return found

    def uneven(self) -> list[Finding]:
        """Return findings on ports that are faster in one direction, from samples with little scatter."""
        unsteady = {host for pair, sample in self.best.items() if sample.spread > SCATTER for host in pair}
        return [
            Finding(
                f"{host} sends {format_bit_rate(self.up[host])} and receives {format_bit_rate(self.down[host])}",
                "check its NIC and cable (`ethtool`), and limits of the network on one direction",
            )
            for host in self.hosts
            if host not in unsteady and _far(min(self.up[host], self.down[host]), max(self.up[host], self.down[host]))
        ]

    # ---- latency -------------------------------------------------------------------------------------------------

    def latency(self, a: str, b: str) -> float:
        """Return the seconds one way, the minimum of both directions' samples."""
        found = [self.best[pair].latency for pair in ((a, b), (b, a)) if pair in self.best]
        return min(found) if found else 0.0

    def latencies(self, rack: Rack) -> dict[str, float]:
        """Return each host's part of the latency within its rack: the least-squares fit of l(a) + l(b) to every pair.

        A delayed pair distorts the fit, so no part is above the lowest latency of its host, nor below a tenth of it.
        """
        count = len(rack)
        if count == 1:
            return {rack[0]: 0.0}
        sums = {host: sum(self.latency(host, other) for other in rack if other != host) for host in rack}
        if count == 2:
            return {host: sums[host] / 2 for host in rack}
        whole = sum(sums.values()) / 2
        least = {host: min(self.latency(host, other) for other in rack if other != host) for host in rack}
        fitted = {host: (sums[host] - whole / (count - 1)) / (count - 2) for host in rack}
        return {host: min(least[host], max(least[host] / 10, fitted[host])) for host in rack}


def _level(rates: Sequence[float]) -> float:
    """Return the median of the rates near the maximum: the maximum itself is often an outlier."""
    top = max(rates, default=0.0)
    return statistics.median([rate for rate in rates if rate >= (1 - TOLERANCE / 2) * top]) if rates else 0.0


def _far(rate: float, bound: float) -> bool:
    return rate < (1 - TOLERANCE) * bound


def _across(one: Rack, other: Rack) -> tuple[Pair, ...]:
    return tuple(zip(one, other, strict=False))


def _star(seen: _Measurements) -> tuple[Between, ...]:
    near = seen.latencies(tuple(seen.hosts)) if seen.hosts else {}
    return tuple(Between(host, NETWORK, seen.port(host), near[host], measured=True) for host in seen.hosts)


def _trunks(seen: _Measurements, names: Mapping[Rack, str], trunks: Trunks) -> tuple[Between, ...]:
    """Return the edges between racks: uplinks to one switch above more than two racks if they explain all trunks."""
    late = {pair: _over(seen, *pair) for pair in itertools.combinations(names, 2)}
    direct = tuple(
        Between(names[a], names[b], trunk.capacity, late[a, b], measured=True) for (a, b), trunk in trunks.items()
    )
    if len(names) == 2:
        return direct
    uplinks = {rack: max(trunk.capacity for pair, trunk in trunks.items() if rack in pair) for rack in names}
    if any(_far(trunk.capacity, min(uplinks[a], uplinks[b])) for (a, b), trunk in trunks.items()):
        return direct
    half = statistics.mean(late.values()) / 2
    return tuple(Between(name, NETWORK, uplinks[rack], half, measured=True) for rack, name in names.items())


def _over(seen: _Measurements, one: Rack, other: Rack) -> float:
    """Return the latency between two racks beyond the hosts' own parts, seconds one way."""
    mine, theirs = seen.latencies(one), seen.latencies(other)
    beyond = [seen.latency(a, b) - mine[a] - theirs[b] for a in one for b in other]
    return max(0.0, statistics.median(beyond))


def _names(racks: Sequence[Rack], labels: Labels, taken: set[str]) -> list[str]:
    """Return the names of the switches: values of a label that divides the hosts like the racks, else numbers."""
    keys = dict.fromkeys(key for rack in racks for host in rack for key in labels.get(host, {}))
    for key in keys:
        values = [{labels.get(host, {}).get(key) for host in rack} for rack in racks]
        names = [str(value) for each in values for value in each if value is not None]
        fits = all(len(each) == 1 for each in values) and len(set(names)) == len(racks)
        if fits and not {*taken, NETWORK} & set(names):
            return names
    numbers = (f"switch{number}" for number in itertools.count(1))
    return list(itertools.islice((name for name in numbers if name not in taken), len(racks)))


def _single(a: str, b: str, trunk: Trunk) -> Finding:
    one, all_ = format_bit_rate(trunk.single), format_bit_rate(trunk.capacity)
    return Finding(
        f"between {a} and {b} one connection moves {one}, several {all_}",
        "this is normal where several cables share the load; a job with more workers uses more of them",
    )


def _odd(pairs: Mapping[Pair, tuple[float, float]]) -> list[Finding]:
    return [
        Finding(
            f"{a} -> {b} moves {format_bit_rate(rate)}, although their ports carry {format_bit_rate(bound)}",
            "check the cables and routes between these hosts, and measure again with `psctl topo --measure`",
        )
        for (a, b), (rate, bound) in pairs.items()
    ]
