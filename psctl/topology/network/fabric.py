"""The network between hosts, inferred from measured pairs: ports on one switch, or racks and trunks that join them.

A pair alone moves the least of what its two ports and all cables between them carry. Where min(port of a, port of b)
explains every pair, nothing more can be seen, and the hosts hang on one switch. A pair that stays behind that bound
crosses something narrower, also when it only does while other pairs run: those two hosts are in different racks. Racks
are then a colouring of the graph of such pairs (DSATUR, Brelaz 1979: exact where that graph is bipartite or complete
multipartite, which two racks, or any racks with narrow trunks, make it). What pairs of two racks move all at once tells
a trunk that they share from one that each has to itself.

Hosts whose racks no measurement separates are placed by their labels, else with those of the least latency. A
port that no other host is fast enough to fill shows as the fastest of the others.
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
"""A rate this much below what explains it is another cause's: six times the scatter of a sound measurement (2%)."""

ALONE = 4
"""Pairs of the same two racks that are measured again alone, at most: they cross the same cables."""

SCATTER = 0.1
"""Spread of a pair's repeats above which it is measured once more: a host was busy, perhaps."""

Labels = Mapping[str, Mapping[str, str]]
"""Each host's labels of the cluster file."""


class PairSample(msgspec.Struct, frozen=True):
    """What host `a` moved to host `b`: the median of several repeats.

    `rate` is payload bytes/s, `latency` seconds one way, `spread` the repeats' range as a part of their median.
    """

    a: str
    b: str
    rate: float
    latency: float
    spread: float = 0.0


class ConcurrentSamples(msgspec.Struct, frozen=True):
    """Samples that were taken at the same time: one direction of each pair."""

    samples: tuple[PairSample, ...]

    @property
    def ways(self) -> frozenset[Pair]:
        """The (sender, receiver) pairs."""
        return frozenset((each.a, each.b) for each in self.samples)


class Fabric(msgspec.Struct, frozen=True):
    """The cables between hosts. `racks` has the hosts behind each switch, {} when there is one switch for all."""

    between: tuple[Between, ...] = ()
    racks: dict[str, tuple[str, ...]] = {}
    findings: tuple[Finding, ...] = ()


class Trunk(msgspec.Struct, frozen=True):
    """The link between two racks: bytes/s of all connections across it, and of one."""

    capacity: float
    single: float


def fastest_samples(series: Iterable[ConcurrentSamples]) -> dict[Pair, PairSample]:
    """Return the fastest sample of each ordered pair: other traffic at the time can only have slowed it."""
    found: dict[Pair, PairSample] = {}
    for each in (sample for one in series for sample in one.samples):
        known = found.get((each.a, each.b))
        if known is None or each.rate > known.rate:
            found[each.a, each.b] = each
    return found


def further_measurements(
    hosts: Sequence[str], series: Sequence[ConcurrentSamples], labels: Labels | None = None
) -> tuple[tuple[Pair, ...], ...]:
    """Return what else `infer_fabric` needs measured: sets of pairs, each at once in both directions; () when nothing.

    First, one by one, pairs that others may have slowed; when these are there, all that crosses between two racks.
    """
    seen = _Measurements(hosts, series, labels or {})
    again = seen.doubtful()
    return tuple((pair,) for pair in again) if again else tuple(seen.crossings())


def infer_fabric(hosts: Sequence[str], series: Sequence[ConcurrentSamples], labels: Labels | None = None) -> Fabric:
    """Return the cables between the hosts.

    Args:
        hosts: their names; those without samples are left out.
        series: all that was measured.
        labels: of the cluster file; they name racks, and decide where rates do not.

    Returns:
        edges of hosts and switches, their bandwidth the slower direction's; findings where the two differ, where one
        connection does not fill a trunk, and where no racks explain what was seen.
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
    told = [
        _single(names[a], names[b], trunk) for (a, b), trunk in trunks.items() if _far(trunk.single, trunk.capacity)
    ]
    findings = (*uneven, *told, *_odd(seen.unexplained(racks, trunks)))
    return Fabric((*edges, *_trunks(seen, names, trunks)), {names[rack]: rack for rack in racks}, findings)


Rack = tuple[str, ...]
Trunks = Mapping[tuple[Rack, Rack], Trunk]


class _Measurements:
    """All measurements, and what follows from them."""

    def __init__(self, hosts: Sequence[str], series: Sequence[ConcurrentSamples], labels: Labels) -> None:
        self.best = fastest_samples(series)
        met = {host for pair in self.best for host in pair}
        self.hosts = [host for host in hosts if host in met]
        self.series, self.labels = series, labels
        self.up = {h: _level([s.rate for (a, _), s in self.best.items() if a == h]) for h in self.hosts}
        self.down = {h: _level([s.rate for (_, b), s in self.best.items() if b == h]) for h in self.hosts}
        self.apart = {frozenset((s.a, s.b)) for one in series for s in one.samples if self.slow(s)}
        self.times = Counter(way for one in series if len(one.samples) == 1 for way in one.ways)
        self.runs = Counter(way for one in series for way in one.ways)
        self.singly = {frozenset(way) for way in self.times}

    def limit(self, a: str, b: str) -> float:
        """What both ports let through."""
        return min(self.up.get(a, 0.0), self.down.get(b, 0.0))

    def slow(self, sample: PairSample) -> bool:
        return sample.rate < (1 - TOLERANCE) * self.limit(sample.a, sample.b)

    def port(self, host: str) -> float:
        """The slower direction of a host's port; the mean of both where they are one but for scatter."""
        up, down = self.up[host], self.down[host]
        return min(up, down) if _far(min(up, down), max(up, down)) else (up + down) / 2

    # ---- racks ---------------------------------------------------------------------------------------------------

    def racks(self) -> list[Rack]:
        """Colour the graph of pairs that are apart, the most constrained host first."""
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
        """Return how well a host fits a rack: labels in common, then latency."""
        own = set(self.labels.get(host, {}).items())
        common = sum(len(own & set(self.labels.get(one, {}).items())) for one in colour)
        return common, -statistics.mean(self.latency(host, one) for one in colour)

    # ---- what else to measure ------------------------------------------------------------------------------------

    def doubtful(self) -> list[Pair]:
        """Pairs that were slow while others ran, and were not measured alone yet; few of each two racks."""
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
        few = len(unsteady) <= max(2, len(self.hosts) // 2)  # else the whole network is busy, and stays so
        return found + [pair for pair in (unsteady if few else ordered) if pair in unsteady and pair not in found]

    def _unsteady(self, way: Pair) -> bool:
        """Whether a pair's repeats were far apart and it has had no second chance; one that was slow alone gets it."""
        sample = self.best.get(way)
        if sample is None or sample.spread <= SCATTER:
            return False
        return self.times[way] == 1 if self.slow(sample) else self.runs[way] == 1

    def crossings(self) -> list[tuple[Pair, ...]]:
        """For each two racks as many pairs across as can run at once, where they have not run yet."""
        ran = {one.ways for one in self.series}
        found = [_across(one, other) for one, other in itertools.combinations(self.racks(), 2)]
        return [pairs for pairs in found if len(pairs) > 1 and frozenset(pairs) not in ran]

    # ---- trunks --------------------------------------------------------------------------------------------------

    def trunk(self, one: Rack, other: Rack) -> Trunk | None:
        """Return the trunk between two racks; None when it is too wide to be seen."""
        ways = [self._one_way(one, other), self._one_way(other, one)]
        known = [way for way in ways if way is not None]
        return min(known, key=lambda way: way.capacity) if known else None

    def joined(self, racks: Sequence[Rack]) -> tuple[list[Rack], Trunks]:
        """Make one of racks between which nothing is narrow; return them and the trunks between the others."""
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
        """Whether some pair moved more than the trunk that it would have to cross."""
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
        runs = [series.samples for series in self.series if series.ways == frozenset(pairs)]
        totals = [sum(sample.rate for sample in run) for run in runs]
        total = statistics.median(totals) if totals else 0.0
        if single is not None:
            return Trunk(total if total > (1 + TOLERANCE) * single else single, single)
        wanted = sum(self.limit(a, b) for a, b in pairs)
        all_slow = bool(runs) and all(self.slow(sample) for sample in runs[-1])
        return Trunk(total, total) if all_slow and total < (1 - TOLERANCE) * wanted else None

    def unexplained(self, racks: Sequence[Rack], trunks: Trunks) -> dict[Pair, tuple[float, float]]:
        """Pairs whose rate, measured alone or undisturbed, is not what ports and trunks say: rate and bound of each."""
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
        """Ports that are faster in one direction, by steady samples."""
        unsteady = {host for pair, sample in self.best.items() if sample.spread > SCATTER for host in pair}
        return [
            Finding(
                f"{host} sends {format_bit_rate(self.up[host])} and receives {format_bit_rate(self.down[host])}",
                "look at its NIC and cable (`ethtool`), and at limits that the network sets on one direction",
            )
            for host in self.hosts
            if host not in unsteady and _far(min(self.up[host], self.down[host]), max(self.up[host], self.down[host]))
        ]

    # ---- latency -------------------------------------------------------------------------------------------------

    def latency(self, a: str, b: str) -> float:
        """Seconds one way, the less of both directions' samples."""
        found = [self.best[pair].latency for pair in ((a, b), (b, a)) if pair in self.best]
        return min(found) if found else 0.0

    def latencies(self, rack: Rack) -> dict[str, float]:
        """Each host's part of the latency within its rack: the least-squares fit of l(a) + l(b) to every pair's.

        A pair that was delayed bends the fit; no part is above the least that its host was measured with, nor below a
        tenth of that.
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
    """The rate that the fastest agree on: their median, for the greatest alone would be the luckiest."""
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
    """The edges between racks: one between two; with more, an uplink each to a switch above where that explains all."""
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
    """Seconds that the way between two racks takes beyond the hosts' own parts."""
    mine, theirs = seen.latencies(one), seen.latencies(other)
    beyond = [seen.latency(a, b) - mine[a] - theirs[b] for a in one for b in other]
    return max(0.0, statistics.median(beyond))


def _names(racks: Sequence[Rack], labels: Labels, taken: set[str]) -> list[str]:
    """Names of the switches: the label whose values split the hosts as the racks do, else numbers."""
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
        "nothing is broken where several cables share the load; a job uses more of them with more workers",
    )


def _odd(pairs: Mapping[Pair, tuple[float, float]]) -> list[Finding]:
    return [
        Finding(
            f"{a} -> {b} moves {format_bit_rate(rate)} where their ports would carry {format_bit_rate(bound)}",
            "look at the cables and routes between these two; measure again with `psctl topo --measure`",
        )
        for (a, b), (rate, bound) in pairs.items()
    ]
