"""`topo -o dot`: the graph as text for graphviz. Pure: document in, text out.

Nested clusters are hosts, NUMA nodes and PCIe switches. The width of an edge is its bandwidth on a logarithmic scale;
derived edges are dashed. Relations of pairs are omitted, because they are no cables. A ring is drawn in its colour over
the cables that it uses, and as arrows where it passes through a switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from psctl.types import Document
from psctl.view import labels
from psctl.view.device_tree import DeviceNode, DeviceTree, device_tree, locate_member, ring_steps, rings_of
from psctl.view.drawing_styles import DEVICE_COLOURS, LineWidths, line_widths, link_colour, ring_colour
from psctl.view.text import one_line


def dot(document: Document) -> str:
    """Return the drawing as text for `dot -Tsvg` and other graphviz tools.

    Args:
        document: as `topo -o json` prints it.
    """
    return "\n".join(_lines(document)) + "\n"


def quoted(text: object) -> str:
    """Return any text as a quoted one-line string of the dot language."""
    escaped = one_line(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _label(*lines: str) -> str:
    return '"' + "\\n".join(quoted(line)[1:-1] for line in lines if line) + '"'


def _lines(document: Document) -> Iterator[str]:
    pens = line_widths(document)
    hosts = {str(host["name"]): host for host in document.get("hosts") or []}
    strategy = document.get("strategy")
    yield "graph topology {"
    yield '  graph [rankdir=TB, fontname="sans-serif", nodesep=0.25, ranksep=0.6]'
    yield '  node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=11]'
    yield '  edge [fontname="sans-serif", fontsize=9, color="#667085"]'
    if strategy:
        head = f"{one_line(strategy['name'])}: {one_line(strategy.get('reason') or '')}"
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
    """The rings that use each pair of devices, and the steps of rings that have no cable."""

    def __init__(self, document: Document, hosts: Mapping[str, Document]) -> None:
        self.left: list[tuple[int, tuple[str, str], tuple[str, str]]] = []
        self.by_pair: dict[frozenset[tuple[str, str]], list[int]] = {}
        strategy = document.get("strategy")
        for index, (group, _) in enumerate(rings_of(strategy)):
            for a, b in ring_steps(strategy, group):
                ends = locate_member(hosts, a), locate_member(hosts, b)
                if ends[0] is not None and ends[1] is not None:
                    self.by_pair.setdefault(frozenset((ends[0], ends[1])), []).append(index)
                    self.left.append((index, ends[0], ends[1]))

    def use_cable(self, host: str, a: str, b: str) -> list[int]:
        """Return the rings over a cable, and count their steps over it as drawn."""
        pair = frozenset(((host, a), (host, b)))
        found = self.by_pair.get(pair, [])
        if found:
            self.left = [step for step in self.left if frozenset(step[1:]) != pair]
        return found

    def arrows(self) -> Iterator[str]:
        """Yield arrows for the steps that no cable was drawn for."""
        for index, a, b in self.left:
            style = f'color="{ring_colour(index)}", style=dashed, dir=forward, constraint=false, penwidth=1.5'
            yield f"  {_id(*a)} -- {_id(*b)} [{style}]"


def _host(host: Document, index: int, pens: LineWidths, rings: _Rings) -> Iterator[str]:
    name = str(host["name"])
    arranged = device_tree(host)
    found = [f"! {what}" + (f" -> {cure}" if cure else "") for what, cure in labels.findings(host)]
    yield f"  subgraph cluster_{index} {{"
    label = _label(one_line(name), ", ".join(labels.host_summary(host)), *found)
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


def _tree(host: str, branch: DeviceNode, path: str) -> Iterator[str]:
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
    label = _label(one_line(device["id"]), *labels.device_details(device))
    dashed = ', style="rounded,filled,dashed"' if device.get("derived") else ""
    return f'{_id(host, str(device["id"]))} [label={label}, fillcolor="{DEVICE_COLOURS[str(device["kind"])]}"{dashed}]'


def _cables(host: str, arranged: DeviceTree, pens: LineWidths, rings: _Rings) -> Iterator[str]:
    for branch in arranged.nodes():
        for below in branch.below:
            if below.link is None:
                ends = f"{_id(host, str(branch.device['id']))} -- {_id(host, str(below.device['id']))}"
                yield f'  {ends} [style=dotted, color="#98a2b3"]'
            else:
                yield _edge(host, str(branch.device["id"]), str(below.device["id"]), below.link, pens, [])
    hubs = {str(hub["id"]) for hub in arranged.hubs}
    for link in arranged.cables:
        a, b = str(link["a"]), str(link["b"])
        a, b = (b, a) if a in hubs else (a, b)  # a hub is drawn below its devices
        yield _edge(
            host,
            a,
            b,
            link,
            pens,
            rings.use_cable(host, a, b),
            lateral=b not in hubs and labels.link_family(link) != "SMP",
        )


def _edge(host: str, a: str, b: str, link: Document, pens: LineWidths, over: list[int], lateral: bool = False) -> str:
    colours = [ring_colour(index) for index in over] or [link_colour(link)]
    attributes = [
        f"{'tooltip' if lateral else 'label'}={quoted(labels.link_text(link))}",
        f"penwidth={pens.inside(link):.1f}",
        f'color="{":".join(colours)}"',
    ]
    attributes += ["style=dashed"] if link.get("derived") else []
    if lateral:  # below the boxes; a label there would lie on other cables
        attributes.append("constraint=false, tailport=s, headport=s")
    elif labels.link_family(link) == "SMP":
        attributes.append("constraint=false")
    return f"  {_id(host, a)} -- {_id(host, b)} [{', '.join(attributes)}]"


def _between(document: Document, hosts: Mapping[str, Document], pens: LineWidths) -> Iterator[str]:
    switches: dict[str, None] = {}
    lines = []
    for link in document.get("between") or []:
        ends = []
        for key in ("a", "b"):
            name = str(link[key])
            if name in hosts:
                ends.append(_id(name, _end_device(hosts[name], link, key == "a")))
            else:
                ends.append(_id("", name))
                switches[name] = None
        ends = ends[::-1] if str(link["a"]) in hosts and str(link["b"]) not in hosts else ends  # switches on top
        kind = {"type": "Ethernet", **link}
        text = " ".join(filter(None, (labels.link_text(kind), labels.format_latency(link), labels.rate_source(link))))
        pen = f'penwidth={pens.between(link):.1f}, color="{link_colour(kind)}"'
        lines.append(f"  {ends[0]} -- {ends[1]} [label={quoted(text)}, {pen}]")
    for name in switches:
        yield f'  {_id("", name)} [label={quoted(name)}, shape=oval, fillcolor="{DEVICE_COLOURS["switch"]}"]'
    yield from lines


def _end_device(host: Document, link: Document, leaves: bool) -> str:
    """Return the device at which a link to other hosts ends: its NIC where that is known, else any device."""
    ids = [str(device["id"]) for device in host.get("devices") or []]
    via = str(link.get("via") or "")
    return via if leaves and via in ids else ids[0] if ids else ""
