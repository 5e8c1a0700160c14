"""`topo -o dot`: the graph as text for graphviz. Pure: document in, text out.

Nested clusters are hosts, NUMA nodes and PCIe switches. An edge's pen is as wide as its bandwidth, on a logarithmic
scale within the picture; what is derived is dashed. Relations of pairs are left out: they are no cables. A ring is
drawn in its colour over the cables that it uses; where it uses none of its own (through a switch), as arrows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from psctl.view import labels
from psctl.view.inside import Branch, Inside, inside, place, rings_of, steps
from psctl.view.paint import KINDS, RINGS, Pens, colour_of, widths_of
from psctl.view.text import one_line

Document = Mapping[str, Any]


def dot(document: Document) -> str:
    """Return the drawing as text that `dot -Tsvg` and its kin read.

    Args:
        document: as `topo -o json` prints it.
    """
    return "\n".join(_lines(document)) + "\n"


def quoted(text: object) -> str:
    """Return any text as a quoted string of the dot language, on one line, without anything that it would obey."""
    escaped = one_line(str(text)).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _label(*lines: str) -> str:
    return '"' + "\\n".join(quoted(line)[1:-1] for line in lines if line) + '"'


def _lines(document: Document) -> Iterator[str]:
    pens = widths_of(document)
    hosts = {str(host["name"]): host for host in document.get("hosts") or []}
    strategy = document.get("strategy")
    yield "graph topology {"
    yield '  graph [rankdir=TB, fontname="sans-serif", nodesep=0.25, ranksep=0.6]'
    yield '  node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=11]'
    yield '  edge [fontname="sans-serif", fontsize=9, color="#667085"]'
    if strategy:
        head = f"{one_line(str(strategy['name']))}: {one_line(str(strategy.get('reason') or ''))}"
        yield f"  label={quoted(head)}; labelloc=b"
    rings = _Rings(document, hosts)
    for index, host in enumerate(hosts.values()):
        yield from _host(host, index, pens, rings)
    yield from _between(document, hosts, pens)
    yield from rings.arrows()
    yield "}"


def _id(host: str, device: str) -> str:
    return quoted(f"{host}/{device}")


class _Rings:
    """Which rings go over which pair of devices of which host, and which of their steps have no cable of their own."""

    def __init__(self, document: Document, hosts: Mapping[str, Document]) -> None:
        self.left: list[tuple[int, tuple[str, str], tuple[str, str]]] = []
        self.over: dict[frozenset[tuple[str, str]], list[int]] = {}
        strategy = document.get("strategy")
        for index, (group, _) in enumerate(rings_of(strategy)):
            for a, b in steps(strategy, group):
                ends = place(hosts, a), place(hosts, b)
                if ends[0] is not None and ends[1] is not None:
                    self.over.setdefault(frozenset((ends[0], ends[1])), []).append(index)
                    self.left.append((index, ends[0], ends[1]))

    def take(self, host: str, a: str, b: str) -> list[int]:
        """Return the rings over a cable, which are then drawn."""
        pair = frozenset(((host, a), (host, b)))
        found = self.over.get(pair, [])
        if found:
            self.left = [step for step in self.left if frozenset(step[1:]) != pair]
        return found

    def arrows(self) -> Iterator[str]:
        """Yield the steps that go through switches."""
        for index, a, b in self.left:
            style = f'color="{RINGS[index % len(RINGS)]}", style=dashed, dir=forward, constraint=false, penwidth=1.5'
            yield f"  {_id(*a)} -- {_id(*b)} [{style}]"


def _host(host: Document, index: int, pens: Pens, rings: _Rings) -> Iterator[str]:
    name = str(host["name"])
    arranged = inside(host)
    found = [f"! {what}" + (f" -> {cure}" if cure else "") for what, cure in labels.findings(host)]
    yield f"  subgraph cluster_{index} {{"
    label = _label(labels.named(name), ", ".join(labels.head(host)), *found)
    yield f'    style=rounded; labelloc=t; color="#98a2b3"; label={label}'
    if not host.get("devices"):
        yield f"    {_id(name, '')} [shape=point, style=invis]"
    for number, root in enumerate(arranged.roots):
        if root.below:
            yield f"    subgraph cluster_{index}_{number} {{"
            yield '      style="rounded,filled"; color="#d0d5dd"; fillcolor="#f9fafb"; label=""'
            yield from (f"      {line}" for line in _tree(name, root, f"{index}_{number}"))
            yield "    }"
        else:
            yield f"    {_node(name, root.device)}"
    yield from (f"    {_node(name, hub)}" for hub in arranged.hubs)
    yield "  }"
    yield from _cables(name, arranged, pens, rings)


def _tree(host: str, branch: Branch, path: str) -> Iterator[str]:
    yield _node(host, branch.device)
    for number, below in enumerate(branch.below):
        if below.below:
            yield f"subgraph cluster_{path}_{number} {{"
            yield '  style="rounded,dashed"; color="#d0d5dd"; label=""'
            yield from (f"  {line}" for line in _tree(host, below, f"{path}_{number}"))
            yield "}"
        else:
            yield _node(host, below.device)


def _node(host: str, device: Document) -> str:
    label = _label(labels.named(device["id"]), *labels.about(device))
    dashed = ', style="rounded,filled,dashed"' if device.get("derived") else ""
    return f'{_id(host, str(device["id"]))} [label={label}, fillcolor="{KINDS[str(device["kind"])]}"{dashed}]'


def _cables(host: str, arranged: Inside, pens: Pens, rings: _Rings) -> Iterator[str]:
    for branch in arranged.branches():
        for below in branch.below:
            if below.link is None:
                ends = f"{_id(host, str(branch.device['id']))} -- {_id(host, str(below.device['id']))}"
                yield f'  {ends} [style=dotted, color="#98a2b3"]'
            else:
                yield _edge(host, str(branch.device["id"]), str(below.device["id"]), below.link, pens, [])
    hubs = {str(hub["id"]) for hub in arranged.hubs}
    for link in arranged.cables:
        a, b = str(link["a"]), str(link["b"])
        a, b = (b, a) if a in hubs else (a, b)  # a hub stands below its devices
        yield _edge(
            host, a, b, link, pens, rings.take(host, a, b), beside=b not in hubs and labels.kind_of(link) != "SMP"
        )


def _edge(host: str, a: str, b: str, link: Document, pens: Pens, over: list[int], beside: bool = False) -> str:
    colours = [RINGS[index % len(RINGS)] for index in over] or [colour_of(link)]
    words = [
        f"{'tooltip' if beside else 'label'}={quoted(labels.cable(link))}",
        f"penwidth={pens.inside(link):.1f}",
        f'color="{":".join(colours)}"',
    ]
    words += ["style=dashed"] if link.get("derived") else []
    if beside:  # below the boxes; a label there would lie on other cables
        words.append("constraint=false, tailport=s, headport=s")
    elif labels.kind_of(link) == "SMP":
        words.append("constraint=false")
    return f"  {_id(host, a)} -- {_id(host, b)} [{', '.join(words)}]"


def _between(document: Document, hosts: Mapping[str, Document], pens: Pens) -> Iterator[str]:
    switches: dict[str, None] = {}
    lines = []
    for link in document.get("between") or []:
        ends = []
        for key in ("a", "b"):
            name = str(link[key])
            if name in hosts:
                ends.append(_id(name, _door(hosts[name], link, key == "a")))
            else:
                ends.append(_id("", name))
                switches[name] = None
        ends = ends[::-1] if str(link["a"]) in hosts and str(link["b"]) not in hosts else ends  # switches stand on top
        kind = {"type": "Ethernet", **link}
        words = " ".join(filter(None, (labels.cable(kind), labels.latency(link), labels.certainty(link))))
        pen = f'penwidth={pens.between(link):.1f}, color="{colour_of(kind)}"'
        lines.append(f"  {ends[0]} -- {ends[1]} [label={quoted(words)}, {pen}]")
    for name in switches:
        yield f'  {_id("", name)} [label={quoted(name)}, shape=oval, fillcolor="{KINDS["switch"]}"]'
    yield from lines


def _door(host: Document, link: Document, leaves: bool) -> str:
    """Return the device of a host that a cable to others ends at: its NIC where that is known, else any device."""
    ids = [str(device["id"]) for device in host.get("devices") or []]
    via = str(link.get("via") or "")
    return via if leaves and via in ids else ids[0] if ids else ""
