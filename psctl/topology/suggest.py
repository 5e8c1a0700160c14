"""Which way to synchronise suits a topology, and why, from the cables alone.

Every way that applies is laid over the cables (module `traffic`), and the one that takes the least time for a size of
gradient is suggested; of those within a hundredth of it, the simplest. This is a first word: nothing is simulated, and
no software's overhead is known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from psctl.topology import traffic
from psctl.topology.graph import ClusterGraph, HostNode, Suggestion
from psctl.topology.islands import Groups, Level, hierarchy, name, ranks
from psctl.topology.placing import holders
from psctl.topology.rings import Rings, rings
from psctl.topology.roads import Roads
from psctl.topology.traffic import Phase
from psctl.topology.trees import Packing, all_reduce
from psctl.topology.wires import Wires, wires
from psctl.units import format_bytes, format_seconds

SIZE = 100e6
"""Bytes of a gradient when nobody says another size."""

ALIKE = 0.01
"""Times that differ by less than this part are alike."""

ORDER = (
    "sharded", "multi-ring", "ring", "bidirectional-ring", "hierarchical", "halving-doubling", "packed-trees", "ps",
    "double-tree", "recursive-doubling", "one-shot", "root", "cpu",
)  # fmt: skip
"""Ways from simple to involved: the first of those that are alike is taken."""

CROWD = 64
"""Ranks above which nobody sends to everyone."""

PIECES = (1, 2, 4, 8, 16)
"""A hierarchy in pieces runs its levels beside each other."""


class Candidate(msgspec.Struct, frozen=True):
    """A way that applies: its name, predicted seconds, groups and shares as of Suggestion, and what to say of it."""

    name: str
    seconds: float
    groups: Groups
    shares: tuple[float, ...]
    why: str
    trees: tuple[tuple[tuple[str, str], ...], ...] = ()


Linked = Mapping[str, tuple[Wires, Rings, Packing]]
"""Each host's direct links, by its name, and the rings and trees over them."""


def suggest(cluster: ClusterGraph, size: float = SIZE) -> Suggestion:
    """Suggest a way to synchronise.

    Args:
        cluster: hosts and what lies between them. Ranks are the GPUs of hosts that may hold workers, or these hosts.
        size: bytes of the gradient.

    Returns:
        A name of words.STRATEGIES and a sentence. With less than two ranks: `native`, and that there is nothing to do.
    """
    found = candidates(cluster, size)
    if not found:
        everyone = ranks(cluster)
        if len(everyone) < 2:
            what = "there is one rank" if everyone else "there is no rank"
            return Suggestion(
                "native", f"{what}: nothing to synchronise", (everyone,) if everyone else (), (1.0,) * len(everyone)
            )
        return Suggestion("native", "no way between the ranks is known: it is left to the engine", (everyone,), (1.0,))
    best = found[0]
    return Suggestion(best.name, _reason(best, found, size, Roads(cluster)), best.groups, best.shares, best.trees)


def candidates(cluster: ClusterGraph, size: float = SIZE) -> tuple[Candidate, ...]:
    """Return the ways that apply, the best first; none with less than two ranks. Arguments as of `suggest`."""
    everyone = _ordered(cluster)
    if len(everyone) < 2:
        return ()
    roads, several = Roads(cluster), len(cluster.hosts) > 1
    linked = {host.name: _linked(host, several) for host in cluster.hosts}
    found = _flat(everyone, [ident for group in _ringed(everyone, linked) for ident in group], size, roads)
    if several:
        found += _served(cluster, everyone, size, roads, linked)
    inside = next((host for host in cluster.hosts if set(everyone) <= set(linked[host.name][0].nodes)), None)
    if inside is None:
        found.append(
            _one("double-tree", traffic.double_tree(everyone, size), everyone, roads, "two trees need few steps")
        )
    else:
        found += _crowded(everyone, size, roads) if len(everyone) <= CROWD else []
        found += _direct(linked[inside.name], size, roads)
        found += _central(inside, several, everyone, size, roads)
    found += [_hierarchical(level, everyone, size, roads, linked) for level in hierarchy(cluster)]
    possible = [one for one in found if math.isfinite(one.seconds)]
    least = min((one.seconds for one in possible), default=0.0)
    return tuple(sorted(possible, key=lambda one: (_rank(one, least), one.seconds)))


def _rank(one: Candidate, least: float) -> int:
    """Place among those that are alike; the others come after them."""
    return ORDER.index(one.name) if one.seconds <= least * (1 + ALIKE) else len(ORDER)


def _ordered(cluster: ClusterGraph) -> tuple[str, ...]:
    """The ranks such that those of a group stand together, level by level."""
    everyone = ranks(cluster)
    levels = hierarchy(cluster)[::-1]
    place = [{ident: at for at, group in enumerate(level.groups) for ident in group} for level in levels]
    return tuple(sorted(everyone, key=lambda ident: tuple(at[ident] for at in place)))


def _one(name: str, phases: Sequence[Phase], order: Sequence[str], roads: Roads, why: str) -> Candidate:
    return Candidate(name, traffic.seconds(phases, roads), (tuple(order),), (1.0,), why)


def _ringed(order: Sequence[str], linked: Linked) -> list[Sequence[str]]:
    """The ranks, those of a host in the order of its widest ring."""
    found: dict[str, Sequence[str]] = {}
    for net, rung, _ in linked.values():
        if rung.rings and set(net.nodes) <= set(order):
            found |= dict.fromkeys(net.nodes, rung.rings[0].order)
    return list(dict.fromkeys(tuple(found.get(ident, (ident,))) for ident in order))


def _flat(order: Sequence[str], ring: Sequence[str], size: float, roads: Roads) -> list[Candidate]:
    """Ways that ask for nothing but ranks."""
    rows = [
        ("ring", traffic.ring(ring, size), ring, "each rank talks to its two neighbours in a ring alone"),
        ("bidirectional-ring", traffic.ring(ring, size, both=True), ring, "half of the bytes go each way round a ring"),
        (
            "halving-doubling",
            traffic.halving_doubling(order, size),
            order,
            f"it takes only {_rounds(len(order))} steps",
        ),
        ("recursive-doubling", traffic.recursive_doubling(order, size), order, "so few bytes that steps count"),
    ]
    return [_one(name, phases, ranks, roads, why) for name, phases, ranks, why in rows]


def _crowded(order: Sequence[str], size: float, roads: Roads) -> list[Candidate]:
    """Ways in which all send to all."""
    count = len(order)
    why = f"each of the {count} GPUs sums 1/{count} of the gradient for all"
    return [
        _one("sharded", traffic.sharded(order, size), order, roads, why),
        _one("one-shot", traffic.one_shot(order, size), order, roads, "so few bytes that one step with all is best"),
    ]


def _rounds(count: int) -> int:
    rounds = count.bit_length() - 1
    return 2 * rounds + (0 if count == 1 << rounds else 2)


def _linked(host: HostNode, several: bool) -> tuple[Wires, Rings, Packing]:
    """The direct links of a host's GPUs, and the rings and trees over them, by the names of the ranks."""
    net = wires(host.graph)
    net = msgspec.structs.replace(net, nodes=tuple(name(host.name, ident, several) for ident in net.nodes))
    return net, rings(net), all_reduce(net)


def _direct(linked: tuple[Wires, Rings, Packing], size: float, roads: Roads) -> list[Candidate]:
    """Rings and trees over direct links."""
    net, found, packed = linked
    rows = []
    if found.rings and not net.ports and len(net.nodes) > 2:
        groups = tuple(ring.order for ring in found.rings)
        spent = traffic.seconds(traffic.multi_ring(found, size), roads)
        rows.append(Candidate("multi-ring", spent, groups, found.shares, _ring_words(net, found)))
    if packed.trees and len(net.nodes) > 2:
        groups = tuple((tree.root, *(child for _, child in tree.edges)) for tree in packed.trees)
        spent = traffic.seconds(traffic.packed_trees(packed, size), roads)
        why, edges = _tree_words(net, found, packed), tuple(tree.edges for tree in packed.trees)
        rows.append(Candidate("packed-trees", spent, groups, packed.shares, why, edges))
    return rows


def _ring_words(net: Wires, found: Rings) -> str:
    total = sum(units for _, _, units in net.links)
    used = found.width * len(net.nodes)
    what = "one ring" if len(found.rings) == 1 else f"{len(found.rings)} rings that share no link"
    return f"{what} through all {len(net.nodes)} GPUs keep {used} of their {total} direct links busy both ways"


def _tree_words(net: Wires, found: Rings, packed: Packing) -> str:
    why = "rings leave links idle" if found.rings else f"no ring over direct links visits all {len(net.nodes)} GPUs"
    if len(packed.trees) == 1:
        return f"{why}, but a tree of them does"
    return f"{why}, but {len(packed.trees)} trees over them carry as much as {_fraction(packed.total)} links"


def _fraction(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _central(host: HostNode, several: bool, order: Sequence[str], size: float, roads: Roads) -> list[Candidate]:
    """One place gathers: the first GPU, or the first processor."""
    rows = [_one("root", traffic.root(order, size, order[0]), order, roads, "one GPU gathers and spreads")]
    cpus = host.graph.of_kind("cpu")
    if cpus:
        phases = traffic.root(order, size, name(host.name, cpus[0].id, several))
        rows.append(_one("cpu", phases, order, roads, "the processor gathers and spreads"))
    return rows


def _hierarchical(level: Level, order: Sequence[str], size: float, roads: Roads, linked: Linked) -> Candidate:
    """Sum within each group, each rank's part across the groups, spread within."""
    groups = [tuple(sorted(group, key=order.index)) for group in level.groups]
    parts = min(len(group) for group in groups)
    heads = [[group[slot] for group in groups] for slot in range(parts)]
    outer = min(
        (_together([way(ranks, size / parts) for ranks in heads]) for way in (traffic.ring, traffic.halving_doubling)),
        key=lambda phases: traffic.seconds(phases, roads),
    )
    inner = [_within(group, size, roads, linked) for group in groups if len(group) > 1]
    spent = _levels(inner, outer, roads)
    kinds = {
        "nvlink": "NVLink islands",
        "pcie": "PCIe switches",
        "numa": "processors",
        "host": "hosts",
        "rack": "racks",
    }
    why = f"{len(groups)} {kinds[level.kind]} each sum inside first, where cables are faster, then among each other"
    return Candidate("hierarchical", spent, tuple(groups), (1 / len(groups),) * len(groups), why)


def _levels(inner: Sequence[Sequence[Phase]], outer: Sequence[Phase], roads: Roads) -> float:
    """Seconds of groups that sum inside, across, and spread inside; in so many pieces as is fastest.

    In pieces the levels run beside each other: only the fullest cable and the slowest level count, but every piece
    waits for its messages.
    """
    inside = max((traffic.seconds(phases, roads) for phases in inner), default=0.0)
    outside = traffic.seconds(outer, roads)
    fullest = traffic.busy(traffic.loads([*outer, *(phase for phases in inner for phase in phases)], roads), roads)
    waiting = traffic.seconds([_empty(phase) for phase in (*outer, *max(inner, key=len, default=()))], roads)
    longest = max(inside, outside, fullest)
    in_pieces = [longest + (inside + outside - longest) / pieces + waiting * (pieces - 1) for pieces in PIECES]
    return min(inside + outside, *in_pieces)


def _empty(phase: Phase) -> Phase:
    return msgspec.structs.replace(phase, moves=tuple((a, b, 0.0) for a, b, _ in phase.moves))


def _within(group: Sequence[str], size: float, roads: Roads, linked: Linked) -> tuple[Phase, ...]:
    """The fastest way within a group."""
    ways = [traffic.ring(group, size)]
    if len(group) <= CROWD:
        ways.append(traffic.sharded(group, size))
    for net, found, packed in linked.values():
        if set(net.nodes) == set(group) and not net.ports and len(group) > 2:
            ways += [traffic.multi_ring(found, size)] if found.rings else []
            ways += [traffic.packed_trees(packed, size)] if packed.trees else []
    return min(ways, key=lambda phases: traffic.seconds(phases, roads))


def _together(ways: Sequence[Sequence[Phase]]) -> tuple[Phase, ...]:
    """The same phases of several sets of ranks at the same time."""
    return tuple(
        msgspec.structs.replace(rows[0], moves=tuple(move for phase in rows for move in phase.moves))
        for rows in zip(*ways, strict=True)
    )


def _served(cluster: ClusterGraph, order: Sequence[str], size: float, roads: Roads, linked: Linked) -> list[Candidate]:
    """Servers on hosts by BytePS's split; ranks of one host sum among themselves first, each sends its part."""
    parts = {one.host: float(one.share) for one in holders(cluster)}
    hosts: dict[str, list[str]] = {}
    for ident in order:
        hosts.setdefault(ident.partition("/")[0], []).append(ident)
    if not parts or (len(order) > len(hosts) and not parts.keys() - hosts.keys()):
        return []
    slots = min(len(own) for own in hosts.values())
    ways = [traffic.servers([own[slot] for own in hosts.values()], parts, size / slots) for slot in range(slots)]
    inner = [_within(own, size, roads, linked) for own in hosts.values() if len(own) > 1]
    spare = len(parts.keys() - hosts.keys())
    why = f"{spare} hosts without workers lend their cables as servers" if spare else "each host sums a part for all"
    spent = _levels(inner, _together(ways), roads)
    groups, shares = tuple((host,) for host in parts), tuple(parts.values())
    return [Candidate("ps", spent, groups, shares, why)]


def _reason(best: Candidate, found: Sequence[Candidate], size: float, roads: Roads) -> str:
    slower = [one for one in found if one.seconds > best.seconds * (1 + ALIKE) and one.name != best.name]
    others = [*slower[:1], *(one for one in slower[1:] if one.name in ("root", "cpu"))]
    against = ", ".join(f"{format_seconds(one.seconds)} ({one.name})" for one in others)
    text = f"{best.why}: {format_bytes(size)} take {format_seconds(best.seconds)}"
    if against:
        text += f", against {against}"
    if roads.unknown:
        cables = sorted({" - ".join(sorted(arc[1:])) for arc in roads.unknown})
        more = f" and {len(cables) - 2} more" if len(cables) > 2 else ""
        text += f"; the rate of {', '.join(cables[:2])}{more} is not known and was assumed"
    return text
