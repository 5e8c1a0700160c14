"""The numbers of docs/numbers.md are what the product computes: each row of its tables is computed here."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from psctl.plan.allreduce_times import (
    FORMS,
    UniformRates,
    halving_doubling,
    ring,
)
from psctl.plan.simulation.flow_simulation import simulate, simulate_pipeline
from psctl.plan.simulation.routes import SimulatedNetwork, places
from psctl.schedule.algorithms import catalog, collectives, root
from psctl.schedule.algorithms import ring as rings
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.phases import all_reduce
from psctl.schedule.schedule import Schedule, Transfer
from psctl.topology.graph import Between, ClusterGraph, HostGraph, HostNode
from psctl.topology.host.document import read_cluster_document
from tests.reference import barriers
from tests.reference.crossovers import ring_beats_double_tree, ring_beats_halving_doubling
from tests.reference.factored_gradients import (
    Layer,
    factor_numbers,
    factors_to_servers,
    fastest_exchange,
    server_numbers,
    sparse_share,
    sparse_wins,
)
from tests.reference.networks import NO_DELAYS, star
from tests.reference.overlap import finish_times, fused, iteration
from tests.reference.server_times import (
    on_workers,
    push_then_pull,
    rack,
    racks_apart,
    servers_needed,
    seven_steps,
    split,
)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "numbers.md").read_text()

UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "M": 1e6, "steps": 1.0, "%": 0.01,
    "times": 1.0, "servers": 1.0, "machines": 1.0,
}  # fmt: skip

MODEL = 160e6  # bytes, of the seeds' model
DOUBLE, SINGLE = (2, 1, 5, 6, 7, 4, 0, 3), (2, 6, 4, 5, 7, 3, 1, 0)
"""The seeds' rings 1-2-3-4-5-6-7-8 and 1-4-6-3-5-8-2-7 by the numbers that nvidia-smi gives a DGX-1's GPUs."""


def preset(name: str) -> ClusterGraph:
    return read_cluster_document(json.loads((ROOT / "clusters" / f"{name}.json").read_text()))


def without_latency(cluster: ClusterGraph, link: float | None = None) -> ClusterGraph:
    """The machines with no latency, and NVLinks of another rate."""
    hosts = []
    for host in cluster.hosts:
        links = tuple(
            msgspec.structs.replace(
                one, latency=0.0, bandwidth=one.width * link if link and one.width else one.bandwidth
            )
            for one in host.graph.links
        )
        hosts.append(msgspec.structs.replace(host, graph=msgspec.structs.replace(host.graph, links=links)))
    return ClusterGraph(tuple(hosts), cluster.between)


def on(cluster: ClusterGraph, plan: Schedule, size: float, helper: str = "") -> float:
    ranks = [*places(cluster), *([helper] if helper else [])]
    return simulate(plan, SimulatedNetwork(cluster, NO_DELAYS), ranks, size).seconds


def box(plan: Schedule, helper: str = "") -> float:
    return on(without_latency(preset("pcie-box")), plan, MODEL, helper)


def in_pieces(build: Callable[[int], Schedule], helper: str = "") -> float:
    cluster = without_latency(preset("pcie-box"))
    ranks = [*places(cluster), *([helper] if helper else [])]
    return simulate_pipeline(build, 1000, SimulatedNetwork(cluster, NO_DELAYS), ranks, MODEL).seconds


def through_cpu(pieces: int) -> Schedule:
    return all_reduce("cpu", 4, root.broadcast(4, 4), pieces=pieces)


def multicast() -> float:
    """All up to the processor, then one copy down that every GPU reads."""
    up = tuple(one for one in through_cpu(1).transfers if one.action == "reduce")
    down = (Transfer(0, 4, 0, 0, "copy"),)
    return sum(box(Schedule("part", 4, 5, (1,), part), "box") for part in (up, down))


def v100(link: float, both: bool) -> float:
    plan = rings.multi_ring(8, [(DOUBLE, 2), (SINGLE, 1)], both_ways=both)
    return on(without_latency(preset("dgx-1v"), link), plan, MODEL)


def gigabyte(world: int, strategy: str) -> float:
    plan = (
        collectives.build("reduce", world, "root") if strategy == "one way" else catalog.build(strategy, world)
    )  # fmt: skip
    return on(star(world, 1e9, 0.0), plan, 1.2e9)


def servers_of_their_own(workers: int, count: int, pieces: int = 1) -> float:
    """In units of N / B, simulated."""
    options = ScheduleOptions(servers=tuple(range(workers, workers + count)), pieces=pieces)
    plan = catalog.build("ps", workers, options)
    places = [f"node{index}" for index in range(plan.nodes)]
    return simulate(plan, SimulatedNetwork(star(plan.nodes, 1.0, 0.0)), places, 1.0).seconds


def messages(plan: Schedule) -> float:
    """The time of a schedule without bytes, a second a message."""
    return on(star(plan.nodes, 1e9, 1.0), plan, 0.0)


def new_peers(plan: Schedule) -> float:
    """How often rank 0 begins to send to another rank than before."""
    receivers = [one.destination for one in plan.transfers if one.source == 0]
    return float(len([peer for peer, _ in itertools.groupby(receivers)]))


def chain_one_way(world: int) -> Schedule:
    return collectives.build("broadcast", world, "pipelined-chain", options=ScheduleOptions(chunks=1))


def token_lap(world: int) -> Schedule:
    whole = barriers.build("token-ring", world)
    return msgspec.structs.replace(whole, transfers=tuple(one for one in whole.transfers if one.step < world))


def stencil(side: int) -> Schedule:
    """Every rank of a square torus sends its border to its four neighbours, one direction a step."""
    ranks = [(row, column) for row in range(side) for column in range(side)]
    moves = ((0, 1), (0, -1), (1, 0), (-1, 0))
    transfers = sorted(
        Transfer(step, row * side + column, (row + down) % side * side + (column + right) % side, step, "copy")
        for step, (down, right) in enumerate(moves)
        for row, column in ranks
    )
    return Schedule("stencil", side * side, side * side, (1,) * 4, tuple(transfers))


def cabled_in_a_ring(world: int) -> ClusterGraph:
    """Hosts, each on a switch of its own by a wide cable; the switches in a ring."""
    hosts = [f"node{index}" for index in range(world)]
    up = [Between(host, f"switch{index}", 100.0, 0.0) for index, host in enumerate(hosts)]
    around = [Between(f"switch{index}", f"switch{(index + 1) % world}", 1.0, 0.0) for index in range(world)]
    return ClusterGraph(tuple(HostNode(host, HostGraph()) for host in hosts), (*up, *around))


FAST = UniformRates(5e-6, 1 / 12.5e9)  # 100 Gbit/s, 5 us
SQUARE = Layer(4096, 4096)


def first_world_for_servers() -> float:
    return float(next(p for p in range(2, 1000) if fastest_exchange(SQUARE, 32, p, p) == "servers"))


def seven(what: str) -> float:
    """Four machines of four GPUs, four servers, 160 MB, 16 GB/s inside, 1 GB/s outside."""
    return sum(term.seconds for term in seven_steps(4, 4, 4, MODEL, 16e9, 1e9, sharded=True) if term.what == what)


NUMBERS: dict[str, Callable[[], Sequence[float]]] = {
    "one vector over one lane": lambda: [MODEL / 16e9],
    "gathered on one GPU": lambda: [box(catalog.build("root", 4))],
    "gathered on one GPU, in pieces": lambda: [in_pieces(lambda k: all_reduce("r", 4, root.broadcast(4), pieces=k))],
    "gathered on the processor": lambda: [box(catalog.build("cpu", 4), "box")],
    "gathered on the processor, one copy read by all": lambda: [multicast()],
    "gathered on the processor, in pieces": lambda: [in_pieces(through_cpu, "box")],
    "each GPU sums a quarter": lambda: [box(catalog.build("sharded", 4))],
    "ring behind the switch": lambda: [box(catalog.build("ring", 4))],
    "two rings, as printed": lambda: [2 * MODEL / (3 * 18e9)],
    "two rings, one way": lambda: [v100(18e9, both=False)],
    "two rings, both ways": lambda: [v100(18e9, both=True)],
    "two rings, real V100, one way": lambda: [v100(25e9, both=False)],
    "two rings, real V100, both ways": lambda: [v100(25e9, both=True)],
    "star one way, 2 and 10 GPUs": lambda: [gigabyte(world, "one way") for world in (2, 10)],
    "star there and back, 2 and 10 GPUs": lambda: [gigabyte(world, "root") for world in (2, 10)],
    "binomial tree, 2 and 10 GPUs": lambda: [
        FORMS["tree"](world, 1.2e9, UniformRates(0.0, 1e-9)).seconds for world in (2, 10)
    ],
    "ring, 2 and 10 GPUs": lambda: [gigabyte(world, "ring") for world in (2, 10)],
    "star one way and ring, 40 GPUs": lambda: [gigabyte(40, "one way"), gigabyte(40, "ring")],
    "steps of a ring, 2 4 5 8 16 ranks": lambda: [float(catalog.build("ring", p).steps) for p in (2, 4, 5, 8, 16)],
    "steps of halving-doubling, 2 4 8 16 ranks": lambda: [
        float(catalog.build("halving-doubling", p).steps) for p in (2, 4, 8, 16)
    ],
    "steps of halving-doubling, 6 ranks": lambda: [float(catalog.build("halving-doubling", 6).steps)],
    "chain, 4 and 8 ranks, one way": lambda: [messages(chain_one_way(p)) for p in (4, 8)],
    "one server, 1 2 4 8 workers": lambda: [servers_of_their_own(m, 1) for m in (1, 2, 4, 8)],
    "8 workers, 1 2 4 8 servers": lambda: [servers_of_their_own(8, n) for n in (1, 2, 4, 8)],
    "as many servers as workers, 2 4 8": lambda: [servers_of_their_own(m, m) for m in (2, 4, 8)],
    "as many, push and pull at once": lambda: [push_then_pull(8, 8, 1.0, UniformRates(0.0, 1.0), together=True)],
    "servers on the workers, 8": lambda: [on_workers(8, 1.0, UniformRates(0.0, 1.0))],
    "8 machines, 0 1 2 4 8 spare": lambda: [split(8, spare, 1.0, 1.0).seconds for spare in (0, 1, 2, 4, 8)],
    "summed on a spare and on a worker machine, 2 spare": lambda: [
        split(8, 2, 1.0, 1.0).spare,
        split(8, 2, 1.0, 1.0).worker,
    ],
    "barrier by dissemination, 8 ranks": lambda: [messages(barriers.build("dissemination", 8))],
    "barrier by token, one lap, 8 ranks": lambda: [messages(token_lap(8))],
    "barrier by token, with the lap that releases": lambda: [messages(barriers.build("token-ring", 8))],
    "neighbours of a 4 by 4 torus": lambda: [on(star(16, 1e9, 1e-5), stencil(4), 4e6)],
    "new peers of a ring and of halving-doubling, 8 ranks": lambda: [
        new_peers(catalog.build(name, 8)) for name in ("ring", "halving-doubling")
    ],
    "ring overtakes halving-doubling, 6 12 24 ranks": lambda: [
        ring_beats_halving_doubling(p, FAST) for p in (6, 12, 24)
    ],
    "ring overtakes the double tree, 8 64 256 ranks": lambda: [ring_beats_double_tree(p, FAST) for p in (8, 64, 256)],
    "halving-doubling and ring on switches in a ring, 8 ranks": lambda: [
        on(cabled_in_a_ring(8), catalog.build(name, 8), 1.0) for name in ("halving-doubling", "ring")
    ],
    "numbers a worker by servers, a node that is both, factors, factors to servers": lambda: [
        2.0 * 4096 * 4096,
        server_numbers(SQUARE, 8, 8),
        factor_numbers(SQUARE, 32, 8),
        factors_to_servers(SQUARE, 32, 8),
    ],
    "machines from which servers win": lambda: [first_world_for_servers()],
    "sparse gradients of density 0.01, by servers, with and without indices": lambda: [
        sparse_share(0.01, 8, 8),
        sparse_share(0.01, 8, 8, indices_known=True),
    ],
    "sum over the machine's GPUs": lambda: [seven("sum over the machine's GPUs")],
    "GPU to CPU": lambda: [seven("GPU to CPU")],
    "CPU to servers": lambda: [seven("CPU to servers")],
    "servers to CPU": lambda: [seven("servers to CPU")],
    "CPU to GPU": lambda: [seven("CPU to GPU")],
    "spread over the machine's GPUs": lambda: [seven("spread over the machine's GPUs")],
    "all seven": lambda: [sum(term.seconds for term in seven_steps(4, 4, 4, MODEL, 16e9, 1e9, sharded=True))],
    "four layers, backward and communication": lambda: [
        finish_times([3.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 4.0])[0],
        iteration(3.0, [3.0, 2.0, 1.0, 1.0], [1.0, 1.0, 2.0, 4.0]),
    ],
    "100 tensors of 10 KB one by one and fused": lambda: [
        fused(1e-3, 1e-9, [1e4] * 100, together=False),
        fused(1e-3, 1e-9, [1e4] * 100, together=True),
    ],
    "a rack of 8 and its box": lambda: [rack(8, 1e8, 1e9, 1e10)],
    "4 racks of 8, each rack first and flat": lambda: list(racks_apart(4, 8, 1e8, 1e9, 1e10, 1e9)),
    "servers for 10^9 and 10^12 parameters": lambda: [
        float(servers_needed(number, 12, 256e9, copies=2)) for number in (1e9, 1e12)
    ],
}


def rows() -> dict[str, str]:
    """The third cell of each row of the tables, by the first."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")
    ]
    body = [row for row in cells if len(row) == 4 and row[0] not in ("what", "") and not set(row[0]) <= set("-: ")]
    found = {row[0]: row[2] for row in body}
    assert len(found) == len(body), "a row stands twice"
    return found


def test_every_row_is_computed_and_everything_computed_has_a_row() -> None:
    assert set(rows()) == set(NUMBERS)


@pytest.mark.parametrize("what", NUMBERS)
def test_the_row_is_what_the_product_computes(what: str) -> None:
    printed = [
        float(number) * UNITS[unit] for number, unit in re.findall(r"([0-9.]+(?:e[0-9]+)?) ?([a-zA-Z%]*)", rows()[what])
    ]
    computed = list(NUMBERS[what]())
    assert computed == pytest.approx(printed, rel=2e-3), f"{what}: computed {computed}, printed {rows()[what]}"


# -- what the tables can't say


@pytest.mark.parametrize("world", [6, 12])
def test_simulation_finds_the_crossover_of_ring_and_halving_doubling(world: int) -> None:
    at = ring_beats_halving_doubling(world, FAST)
    for size, faster in ((0.9 * at, "halving-doubling"), (1.1 * at, "ring")):
        seconds = {
            name: on(star(world, 12.5e9, 5e-6), catalog.build(name, world), size)
            for name in ("ring", "halving-doubling")
        }
        assert min(seconds, key=seconds.__getitem__) == faster


def test_simulation_finds_that_a_double_tree_wins_for_small_vectors_and_a_ring_for_large_ones() -> None:
    for size, faster in ((1e5, "double-tree"), (1e9, "ring")):
        seconds = {}
        for name in ("ring", "double-tree"):
            chunks = FORMS[name](16, size, FAST).chunks
            plan = catalog.build(name, 16, ScheduleOptions(chunks=chunks))
            seconds[name] = on(star(16, 12.5e9, 5e-6), plan, size)
        assert min(seconds, key=seconds.__getitem__) == faster


def test_a_ring_of_n_ranks_moves_as_much_whatever_n_is_but_waits_longer() -> None:
    forms = [ring(world, 1e8, FAST) for world in range(2, 17)]
    assert max(form.flowing for form in forms) < 1.9 * forms[0].flowing
    assert [form.waiting for form in forms] == pytest.approx([2 * (world - 1) * 5e-6 for world in range(2, 17)])


def test_poseidon_takes_factors_for_large_layers_small_batches_and_few_machines() -> None:
    assert fastest_exchange(SQUARE, 32, 8, 8) == "factors"
    assert fastest_exchange(SQUARE, 32, 200, 200) == "servers"
    assert fastest_exchange(Layer(1000, 4096), 256, 16, 16) == "servers"
    assert fastest_exchange(Layer(64, 9, connected=False), 1, 2, 2) == "servers", "a convolution has no factors"
    # Rebuilding the products is work: with a slow processor the rule must not be fooled by bytes alone.
    assert fastest_exchange(SQUARE, 32, 8, 8, seconds_a_number=1e-9, seconds_an_add=1e-9) == "servers"


def test_factors_win_where_the_batch_of_all_is_less_than_the_layer_is_wide() -> None:
    for workers in (64, 128, 130, 256):
        expected = "factors" if 32 * workers <= 4096 * 1.0 else "servers"
        assert fastest_exchange(SQUARE, 32, workers, workers) == expected


def test_sparse_servers_beat_a_dense_ring_below_the_threshold() -> None:
    assert sparse_wins(0.2, 8) and not sparse_wins(0.4, 8)


def test_nothing_but_the_first_layers_own_part_is_left_when_backward_is_the_longer() -> None:
    backward, sync = [5.0, 5.0, 5.0], [1.0, 2.0, 3.0]
    assert finish_times(backward, sync) == [16.0, 12.0, 8.0]
    assert iteration(1.0, [0.0, 0.0, 1.0], sync) == 1.0 + 1.0 + 6.0, "and all of it when it is the shorter"
    assert iteration(1.0, [], []) == 1.0


def test_seven_steps_are_seven() -> None:
    terms = seven_steps(4, 4, 1, MODEL, 16e9, 1e9, sharded=False, read=0.002)
    assert len(terms) == 7
    assert terms[0].seconds == 0.002
    assert terms[3].seconds == pytest.approx(4 * MODEL / 1e9), "one server: four times as long"


def test_a_split_needs_machines() -> None:
    for machines, spare in ((1, 0), (4, 5), (4, -1)):
        with pytest.raises(ValueError, match="a split needs two machines"):
            split(machines, spare, 1.0, 1.0)


def test_racks_pay_where_the_way_out_is_narrow() -> None:
    narrow, wide = racks_apart(4, 8, 1e8, 1e9, 1e10, 1e9), racks_apart(4, 8, 1e8, 1e9, 1e10, 1e11)
    assert narrow[0] < narrow[1] / 4
    assert wide[0] > 0.5 * wide[1]


def test_halving_doubling_is_the_rings_bytes_in_fewer_steps() -> None:
    assert halving_doubling(8, 1e8, FAST).flowing == pytest.approx(ring(8, 1e8, FAST).flowing)
