"""Fabrics are simulated with scatter, measured as psctl measures, and must come out as they were built."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from psctl.topology.network.fabric import ConcurrentSamples, Fabric, PairSample, further_measurements, infer_fabric
from psctl.topology.network.measurement_rounds import Pair, rounds

G = 125e6
HOP = 20e-6


def both(pairs: Sequence[Pair]) -> list[list[Pair]]:
    return [list(pairs), [(b, a) for a, b in pairs]]


class World:
    """A tree of full-duplex cables: hosts on switches, switches on others. Flows share them max-min fairly."""

    def __init__(
        self, above: Mapping[str, tuple[str, float]], seed: int, down: Mapping[str, float] | None = None
    ) -> None:
        self.above, self.down, self.chance = above, down or {}, random.Random(seed)

    def way(self, a: str, b: str) -> list[tuple[str, str]]:
        """The cables from a to b, by their lower end and direction."""
        up, down = self._path(a), self._path(b)
        while up and down and up[-1] == down[-1]:
            up.pop(), down.pop()
        return [(each, "up") for each in up] + [(each, "down") for each in down]

    def _path(self, host: str) -> list[str]:
        path = [host]
        while path[-1] in self.above:
            path.append(self.above[path[-1]][0])
        return path[:-1]

    def share(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """Max-min fair rates of flows that run at once: the fullest cable's flows are settled first."""
        left = {pair: self.way(*pair) for pair in pairs}
        room: dict[tuple[str, str], float] = {}
        for cable in dict.fromkeys(cable for way in left.values() for cable in way):  # no set: in the same order always
            rate = self.above[cable[0]][1]
            room[cable] = self.down.get(cable[0], rate) if cable[1] == "down" else rate
        rates: dict[Pair, float] = {}
        while left:
            loads = {cable: [pair for pair, way in left.items() if cable in way] for cable in room}
            cable = min((c for c in room if loads[c]), key=lambda c: room[c] / len(loads[c]))
            fair = room[cable] / len(loads[cable])
            for pair in loads[cable]:
                rates[pair] = fair
                for crossed in left.pop(pair):
                    room[crossed] -= fair
        return rates

    def series(self, pairs: Sequence[Pair]) -> list[ConcurrentSamples]:
        return [ConcurrentSamples(tuple(self.sample(way) for way in self.share(ways).items())) for ways in both(pairs)]

    def sample(self, shared: tuple[Pair, float]) -> PairSample:
        (a, b), rate = shared
        late = HOP * len(self.way(a, b)) * self.chance.gauss(1, 0.02)
        return PairSample(a, b, rate * self.chance.gauss(1, 0.02), late, 0.02)

    def measure(self, hosts: Sequence[str], labels: Mapping[str, Mapping[str, str]] | None = None) -> Fabric:
        series = [each for pairs in rounds(hosts) for each in self.series(pairs)]
        for _ in range(4):
            asked = further_measurements(hosts, series, labels)
            series += [each for pairs in asked for each in self.series(pairs)]
            if not asked:
                break
        else:
            raise AssertionError(f"asks for ever: {asked}")
        return infer_fabric(hosts, series, labels)


def star(rates: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    return {host: ("core", rate) for host, rate in rates.items()}


def racks(trunk: float, *groups: Sequence[str], port: float = G) -> dict[str, tuple[str, float]]:
    built = {host: (f"sw{number}", port) for number, group in enumerate(groups) for host in group}
    return built | {f"sw{number}": ("core", trunk) for number in range(len(groups))}


def edges(fabric: Fabric) -> dict[tuple[str, str], float]:
    return {(each.a, each.b): each.bandwidth or 0.0 for each in fabric.between}


def near(found: Mapping[tuple[str, str], float], wanted: Mapping[tuple[str, str], float], part: float = 0.05) -> None:
    assert found.keys() == wanted.keys()
    for edge, rate in wanted.items():
        assert found[edge] == pytest.approx(rate, rel=part), edge


def played(hosts: Sequence[str], sample: Callable[[str, str], PairSample]) -> Fabric:
    """Measure where each pair gets the same whatever else runs."""
    asked: Sequence[Sequence[Pair]] = rounds(hosts)
    series: list[ConcurrentSamples] = []
    while asked:
        series += [ConcurrentSamples(tuple(sample(*way) for way in ways)) for pairs in asked for ways in both(pairs)]
        asked = further_measurements(hosts, series)
    return infer_fabric(hosts, series)


SEEDS = range(50)
FOUR = ("a1", "a2", "b1", "b2")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [2, 3, 6, 9])
def test_equal_hosts_are_a_star(seed: int, count: int) -> None:
    rates = {f"h{index}": G for index in range(count)}
    fabric = World(star(rates), seed).measure(list(rates))
    near(edges(fabric), {(host, "network"): G for host in rates})
    assert all(each.measured for each in fabric.between)
    assert (fabric.racks, fabric.findings) == ({}, ())
    for each in fabric.between:
        assert each.latency == pytest.approx(HOP, rel=0.25)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_host_is_a_slow_port_and_no_rack(seed: int) -> None:
    rates = {"h1": G, "h2": G / 10, "h3": G, "h4": G / 2, "h5": G}
    fabric = World(star(rates), seed).measure(list(rates))
    near(edges(fabric), {(host, "network"): rate for host, rate in rates.items()})
    assert fabric.findings == ()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_two_racks_share_a_slower_trunk(seed: int, size: int) -> None:
    one, two = [f"a{n}" for n in range(size)], [f"b{n}" for n in range(size)]
    mixed = [host for pair in zip(one, two, strict=True) for host in pair]
    fabric = World(racks(G / 2, one, two), seed).measure(mixed)
    hosts = {(host, "switch1"): G for host in one} | {(host, "switch2"): G for host in two}
    near(edges(fabric), hosts | {("switch1", "switch2"): G / 2}, 0.06)
    assert fabric.racks == {"switch1": tuple(one), "switch2": tuple(two)}
    assert fabric.findings == ()
    trunk = fabric.between[-1]
    assert trunk.latency == pytest.approx(2 * HOP, rel=0.3)


@pytest.mark.parametrize("seed", SEEDS)
def test_racks_have_the_names_of_their_labels(seed: int) -> None:
    labels = {"a1": {"rack": "r1", "kind": "x"}, "a2": {"rack": "r1"}, "b1": {"rack": "r2"}, "b2": {"rack": "r2"}}
    fabric = World(racks(G / 2, FOUR[:2], FOUR[2:]), seed).measure(FOUR, labels)
    assert fabric.racks == {"r1": ("a1", "a2"), "r2": ("b1", "b2")}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trunk_as_fast_as_one_port_shows_when_all_use_it(seed: int) -> None:
    fabric = World(racks(G, FOUR[:2], FOUR[2:]), seed).measure(FOUR)
    wanted = {("a1", "switch1"): G, ("a2", "switch1"): G, ("b1", "switch2"): G, ("b2", "switch2"): G}
    near(edges(fabric), wanted | {("switch1", "switch2"): G}, 0.06)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trunk_that_carries_all_ports_is_no_trunk(seed: int) -> None:
    fabric = World(racks(2 * G, FOUR[:2], FOUR[2:]), seed).measure(FOUR)
    near(edges(fabric), {(host, "network"): G for host in FOUR})
    assert fabric.findings == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_host_in_a_rack_stays_where_its_label_puts_it(seed: int) -> None:
    built = racks(G / 2, ("a1", "a2", "a3"), ("b1", "b2", "b3")) | {"b3": ("sw1", G / 10)}
    hosts = ["a1", "a2", "a3", "b1", "b2", "b3"]
    fabric = World(built, seed).measure(hosts, {host: {"rack": host[0]} for host in hosts})
    assert fabric.racks == {"a": ("a1", "a2", "a3"), "b": ("b1", "b2", "b3")}
    assert edges(fabric)["b3", "b"] == pytest.approx(G / 10, rel=0.06)
    assert edges(fabric)["a", "b"] == pytest.approx(G / 2, rel=0.06)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_host_without_a_label_goes_where_it_is_near(seed: int) -> None:
    built = racks(G / 2, ("a1", "a2", "a3"), ("b1", "b2", "b3")) | {"b3": ("sw1", G / 10)}
    fabric = World(built, seed).measure(["a1", "a2", "a3", "b1", "b2", "b3"])
    assert fabric.racks == {"switch1": ("a1", "a2", "a3"), "switch2": ("b1", "b2", "b3")}


@pytest.mark.parametrize("seed", SEEDS)
def test_three_racks_hang_on_uplinks(seed: int) -> None:
    groups = [("a1", "a2"), ("b1", "b2"), ("c1", "c2")]
    built = racks(G / 2, *groups) | {"sw2": ("core", G / 4)}
    fabric = World(built, seed).measure([host for group in groups for host in group])
    found = edges(fabric)
    uplinks = [found[f"switch{number}", "network"] for number in (1, 2, 3)]
    assert uplinks == pytest.approx([G / 2, G / 2, G / 4], rel=0.06)
    assert fabric.racks == {f"switch{n}": group for n, group in enumerate(groups, 1)}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_port_that_is_slower_one_way_counts_as_its_slower_way_and_is_reported(seed: int) -> None:
    fabric = World(star(dict.fromkeys(FOUR, G)), seed, down={"a2": G / 2}).measure(FOUR)
    near(edges(fabric), {(host, "network"): G / 2 if host == "a2" else G for host in FOUR}, 0.06)
    assert [each.what.split()[0] for each in fabric.findings] == ["a2"]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_with_its_own_cable_between_racks_is_no_shared_trunk(seed: int) -> None:
    """Connections alone get half a port across, and all at once each still does."""
    chance = random.Random(seed)

    def sample(a: str, b: str) -> PairSample:
        return PairSample(a, b, (G if a[0] == b[0] else G / 2) * chance.gauss(1, 0.02), HOP)

    hosts = ["a1", "a2", "a3", "b1", "b2", "b3"]
    fabric = played(hosts, sample)
    assert edges(fabric)["switch1", "switch2"] == pytest.approx(1.5 * G, rel=0.06)
    assert "one connection moves" in fabric.findings[0].what


@pytest.mark.parametrize("seed", SEEDS)
def test_one_deviating_pair_is_reported_and_makes_no_racks(seed: int) -> None:
    chance = random.Random(seed)

    def sample(a: str, b: str) -> PairSample:
        return PairSample(a, b, (G / 3 if {a, b} == {"a1", "b2"} else G) * chance.gauss(1, 0.02), HOP)

    fabric = played(FOUR, sample)
    assert set(edges(fabric)) == {(host, "network") for host in FOUR}
    assert {each.what.split(" moves")[0] for each in fabric.findings} == {"a1 -> b2", "b2 -> a1"}


def test_a_pair_that_others_slowed_is_measured_again_alone() -> None:
    world = World(racks(G / 2, FOUR[:2], FOUR[2:]), 0)
    asked = further_measurements(FOUR, [each for pairs in rounds(FOUR) for each in world.series(pairs)])
    assert set(asked) == {((a, b),) for a in FOUR[:2] for b in FOUR[2:]}


def test_a_pair_that_was_unsteady_gets_a_second_chance() -> None:
    def all_(slow: float, spread: float, again: int) -> list[ConcurrentSamples]:
        fast = [
            ConcurrentSamples((PairSample(a, b, G, HOP),)) for a, b in (("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"))
        ]
        return [
            *fast,
            *[ConcurrentSamples((PairSample(a, b, slow, HOP, spread),)) for a, b in (("a", "c"), ("c", "a"))] * again,
        ]

    hosts = ("a", "b", "c")
    assert further_measurements(hosts, all_(G / 2, 0.5, 1)) == ((("a", "c"),),)
    assert further_measurements(hosts, all_(G, 0.5, 1)) == ((("a", "c"),),)
    assert (
        further_measurements(hosts, all_(G / 2, 0.02, 1))
        == further_measurements(hosts, all_(G / 2, 0.5, 2))
        == further_measurements(hosts, all_(G, 0.5, 2))
        == ()
    )


def test_where_most_pairs_are_unsteady_none_is_measured_again() -> None:
    ways = [(a, b) for a in "abcdef" for b in "abcdef" if a != b]
    assert further_measurements("abcdef", [ConcurrentSamples((PairSample(a, b, G, HOP, 0.5),)) for a, b in ways]) == ()


def test_many_slow_pairs_of_two_racks_are_not_all_measured_alone() -> None:
    one, two = [f"a{n}" for n in range(8)], [f"b{n}" for n in range(8)]
    world = World(racks(G / 2, one, two), 0)
    asked = further_measurements([*one, *two], [each for pairs in rounds([*one, *two]) for each in world.series(pairs)])
    assert len(asked) == 4


def test_nothing_measured_is_nothing_known() -> None:
    assert infer_fabric(["a", "b"], []) == Fabric()
    assert further_measurements(["a", "b"], []) == ()


def test_a_pair_that_was_delayed_takes_no_latency_from_a_third_host() -> None:
    late = {("a", "b"): 5e-3, ("a", "c"): 1e-4, ("b", "c"): 1e-4}
    series = [
        ConcurrentSamples((PairSample(x, y, G, seconds, 0.0),))
        for (a, b), seconds in late.items()
        for x, y in both_ways(a, b)
    ]
    parts = {each.a: each.latency for each in infer_fabric(["a", "b", "c"], series, {}).between}
    assert all(part is not None and 1e-5 <= part <= 1e-4 for part in parts.values()), parts


def both_ways(a: str, b: str) -> list[Pair]:
    return [(a, b), (b, a)]
