"""One host as a panel of an SVG: processors on top, switches below, GPUs and NICs in one row, direct links below it.

Each part of the tree has the width of its children, so parts never overlap. NICs of one switch are drawn in stacks,
because some machines have more NICs than GPUs. Direct links are arcs below the row; an NVSwitch is a bar below it.
Rings are drawn over the arcs that they use; their steps through a switch are dashed arcs.
"""

from __future__ import annotations

from collections.abc import Sequence

from psctl.grouping import grouped
from psctl.types import Document
from psctl.view import labels
from psctl.view.device_tree import INNER, DeviceTree, device_tree
from psctl.view.drawing_styles import DEVICE_COLOURS, LineWidths, link_colour, ring_colour
from psctl.view.pictures.canvas import FAINT, INK, Area, Canvas, Point, fold_text, text_width
from psctl.view.pictures.svg_layout import (
    DROP,
    GAP,
    LEVEL,
    LINE_HEIGHT,
    PAD,
    SPINE,
    STACK,
    BoxContents,
    BoxNode,
    collect_heights,
    finding_marks,
    make_node,
    row_height,
    set_positions,
    set_spans,
)
from psctl.view.text import one_line

Pair = tuple[str, str]

WARN = "#b54708"


class HostPanel:
    """The layout of a host; `width` and `height` are known before drawing.

    Args:
        host: an entry of `topo -o json`'s hosts.
        pens: line widths of this picture.
        rings: (ring, from, to) for each step of a ring between two devices of this host.
        uplinks: a line of text for each link that leaves the host.
    """

    def __init__(
        self, host: Document, pens: LineWidths, rings: Sequence[tuple[int, str, str]], uplinks: Sequence[str]
    ) -> None:
        self.host, self.pens, self.rings = host, pens, list(rings)
        self.inside: DeviceTree = device_tree(host)
        self.findings = labels.findings(host)
        self.marks = finding_marks(host, self.findings)
        self.roots = self._place()
        self.nodes = {str(node.branch.device["id"]): node for root in self.roots for node in root.all()}
        inner = sum(root.span for root in self.roots) + self.apart * max(0, len(self.roots) - 1)
        self.width = max(300.0, inner + 2 * PAD, text_width(one_line(host["name"]), 14, True) + 70)
        self.head = self._head(uplinks)
        self.top = PAD + 20 + sum(size * LINE_HEIGHT for _, size, _ in self.head) + 18
        self.below = self._levels()
        self.height = self.below + self._under() + self._notes_height() + PAD

    # ---- layout -------------------------------------------------------------------------------------------------

    def _head(self, uplinks: Sequence[str]) -> list[tuple[str, float, str]]:
        width = self.width - 2 * PAD
        summary = "" if self.host.get("error") else " · ".join([*labels.host_summary(self.host), *self._alike()])
        lines = [(part, 11.0, FAINT) for part in fold_text(summary, width, 11)] if summary else []
        return lines + [
            (part, 10.0, link_colour({"type": "Ethernet"})) for up in uplinks for part in fold_text(up, width, 10)
        ]

    def _alike(self) -> list[str]:
        """Return the name of the processors for the head, if all have the same."""
        names = {str(d.get("name") or "") for d in self.host.get("devices") or [] if d["kind"] == "cpu"}
        return [one_line(names.pop())] if len(names) == 1 and "" not in names else []

    def _place(self) -> list[BoxNode]:
        devices = self.host.get("devices") or []
        same = {kind for kind in ("cpu", "gpu") if len({d.get("name") for d in devices if d["kind"] == kind}) < 2}
        contents = BoxContents(same, sum(device["kind"] == "nic" for device in devices) <= STACK, self.marks)
        cpus = sum(root.device["kind"] == "cpu" for root in self.inside.roots)
        joined = any(labels.link_family(link) == "SMP" for link in self.inside.cables)
        self.apart = 78.0 if cpus == 2 and joined else 18.0
        nodes = [make_node(root, contents) for root in self.inside.roots]
        for kind in ("gpu", "nic"):  # boxes of one kind have one width
            boxes = [node for root in nodes for node in root.all() if node.branch.device["kind"] == kind]
            widest = max((node.width for node in boxes), default=0.0)
            for node in boxes:
                node.width = widest
        for node in nodes:
            set_spans(node)
        return nodes

    def _levels(self) -> float:
        """Set all positions; return the bottom of the row of leaves."""
        found: dict[int, float] = {}
        for root in self.roots:
            collect_heights(root, 0, found)
        up = self._over()
        tops, y = {}, self.top + up
        for level in sorted(found):
            tops[level] = y
            y += found[level] + LEVEL
        row = max((row_height(node) for root in self.roots for node in root.all()), default=0.0)
        bare = [root for root in self.roots if str(root.branch.device["kind"]) not in INNER]
        row = max([row, *(root.height for root in bare)])
        bottom = y + row if row else y - LEVEL if found else self.top
        inner = sum(root.span for root in self.roots) + self.apart * max(0, len(self.roots) - 1)
        x = (self.width - inner) / 2
        for root in self.roots:
            set_positions(root, x, 0, tops, bottom)
            x += root.span + self.apart
        return bottom + (8 if self.roots else 0)

    def _over(self) -> float:
        """Return the height above the processors for links between more than two of them."""
        smp = self._smp()
        return 0.0 if len(smp) < 2 else 38.0 if len(labels.cable_lines(smp, [])[0][1]) == 1 else 70.0

    def _smp(self) -> list[Document]:
        cpus = {str(d["id"]) for d in self.host.get("devices") or [] if d["kind"] == "cpu"}
        return [link for link in self.inside.cables if {str(link["a"]), str(link["b"])} <= cpus]

    def _direct(self) -> list[Document]:
        hubs = {str(hub["id"]) for hub in self.inside.hubs}
        smp = {id(link) for link in self._smp()}
        return [x for x in self.inside.cables if id(x) not in smp and not {str(x["a"]), str(x["b"])} & hubs]

    def _arcs_height(self) -> float:
        """Return the height of the arcs below the row, with their margin."""
        pairs = [(str(link["a"]), str(link["b"])) for link in self._direct()] + [
            (a, b) for _, a, b in self._free_steps()
        ]
        return max((16 + _depth(self.nodes[a], self.nodes[b]) for a, b in pairs), default=0.0)

    def _free_steps(self) -> list[tuple[int, str, str]]:
        """Return the steps of rings that use no direct link."""
        own = {frozenset((str(link["a"]), str(link["b"]))) for link in self._direct()}
        return [step for step in self.rings if frozenset(step[1:]) not in own and {step[1], step[2]} <= set(self.nodes)]

    def _under(self) -> float:
        return self._arcs_height() + 60.0 * len(self.inside.hubs)

    def _notes(self) -> list[tuple[int, list[str]]]:
        width = self.width - 2 * PAD - 20
        return [
            (number, fold_text(what + (f" → {cure}" if cure else ""), width, 10))
            for number, (what, cure) in enumerate(self.findings, 1)
        ]

    def _notes_height(self) -> float:
        return sum(10 * LINE_HEIGHT * len(lines) + 6 for _, lines in self._notes()) + (8 if self.findings else 0)

    # ---- drawing -------------------------------------------------------------------------------------------------

    def draw(self, canvas: Canvas, x: float, y: float) -> None:
        """Draw the panel with its upper left corner at a point."""
        canvas.ground(Area(x, y, self.width, self.height), "#ffffff", "#98a2b3", 10)
        for node in self.nodes.values():
            node.x += x
            node.y += y
        base = y + PAD + 14
        canvas.text(x + PAD, base, one_line(self.host["name"]), 14, INK, True)
        if self.findings:
            canvas.badge(x + self.width - PAD - 7, base - 5, str(len(self.findings)), WARN)
        for text, size, colour in self.head:
            base += size * LINE_HEIGHT
            canvas.text(x + PAD, base + 4, text, size, colour)
        for root in self.roots:
            self._draw_root(canvas, root)
        self._draw_smp(canvas)
        self._draw_direct(canvas)
        self._draw_hubs(canvas, y)
        self._draw_notes(canvas, x, y)

    def _draw_root(self, canvas: Canvas, root: BoxNode) -> None:
        if root.branch.device["kind"] == "cpu" and len(root.all()) > 1:
            bottom = max(node.y + node.height for node in root.all())
            canvas.ground(Area(root.x - GAP, root.y - 8, root.span, bottom - root.y + 16), "#f9fafb", "#d0d5dd")
        for node in root.all():
            self._draw_box(canvas, node)
            bus = node.y + node.height + LEVEL * 0.45
            for child in node.inner + node.leaves:
                self._draw_slot(canvas, node, child, bus)
            for stack in node.stacks:
                self._draw_stack(canvas, node, stack, bus)

    def _draw_box(self, canvas: Canvas, node: BoxNode) -> None:
        device = node.branch.device
        title = [
            one_line(device["id"]),
            *labels.device_details(device),
            *(["derived"] if device.get("derived") else []),
        ]
        fill = DEVICE_COLOURS[str(device["kind"])]
        canvas.box(node.area, fill, node.lines, dashed=bool(device.get("derived")), title=", ".join(title))
        if device["id"] in self.marks:
            canvas.badge(node.x + node.width - 9, node.y + 9, str(self.marks[str(device["id"])]), WARN)

    def _draw_slot(self, canvas: Canvas, node: BoxNode, child: BoxNode, bus: float) -> None:
        link = child.branch.link
        leaf = str(child.branch.device["kind"]) not in INNER
        end = child.x + DROP if leaf else child.middle
        start = _under(node, end)
        points = [(start, node.y + node.height), (start, bus), (end, bus), (end, child.y)]
        self._line(canvas, points, link)
        canvas.label(_rate(link), [(end + 6, child.y - 4)])

    def _draw_stack(self, canvas: Canvas, node: BoxNode, stack: Sequence[BoxNode], bus: float) -> None:
        spine = stack[0].x - SPINE + 4
        start = _under(node, spine)
        for child in stack:
            middle = child.y + child.height / 2
            points = [(start, node.y + node.height), (start, bus), (spine, bus), (spine, middle), (child.x, middle)]
            self._line(canvas, points, child.branch.link)
        rate = _rate(stack[0].branch.link)
        if len(stack) > 1 and len({_rate(child.branch.link) for child in stack}) == 1 and rate:
            rate += " each"
        canvas.label(rate, [(spine + 7, stack[0].y - 4)])

    def _line(self, canvas: Canvas, points: Sequence[Point], link: Document | None) -> None:
        if link is None:
            canvas.line(points, 1.0, "#98a2b3", dashed=True, title="slot unknown")
            return
        canvas.line(
            points,
            self.pens.inside(link),
            link_colour(link),
            dashed=bool(link.get("derived")),
            title=labels.link_title(link),
        )

    def _draw_smp(self, canvas: Canvas) -> None:
        links = self._smp()
        if not links:
            return
        ends = [self.nodes[str(link[key])] for link in links for key in ("a", "b")]
        if len(links) == 1 and abs(ends[0].y - ends[1].y) < 1:
            one, other = sorted(ends, key=lambda node: node.x)
            y = one.y + min(one.height, other.height) / 2
            self._line(canvas, [(one.x + one.width, y), (other.x, y)], links[0])
            rate = _rate(links[0])
            centre = (one.x + one.width + other.x) / 2
            canvas.label(rate, [(centre - text_width(rate, 9) / 2, y - 6), (centre - text_width(rate, 9) / 2, y + 14)])
            return
        lines = labels.cable_lines(links, [])[0][1]
        if len(lines) == 1:  # all alike: one bar
            left, right = min(node.x for node in ends), max(node.x + node.width for node in ends)
            bar = Area(left, ends[0].y - 36, right - left, 18)
            text = f"{labels.link_family(links[0])} {lines[0]}"
            fits = text if text_width(text, 9.5) < bar.width - 8 else labels.link_family(links[0])
            canvas.box(
                bar, DEVICE_COLOURS["switch"], [(fits, 9.5, False)], dashed=bool(links[0].get("derived")), title=text
            )
            for node in dict(zip(map(id, ends), ends, strict=True)).values():
                self._line(canvas, [(node.middle, bar.y + bar.height), (node.middle, node.y)], links[0])
            return
        for link in links:
            a, b = self.nodes[str(link["a"])], self.nodes[str(link["b"])]
            depth = -min(60.0, 14 + abs(a.middle - b.middle) / 12)
            self._arc(canvas, (a.middle, a.y), (b.middle, b.y), depth, link, None)

    def _draw_direct(self, canvas: Canvas) -> None:
        over = grouped((frozenset((a, b)), index) for index, a, b in self.rings)
        arcs: list[tuple[str, str, Document | None, int | None, int]] = []
        for link in self._direct():
            a, b = str(link["a"]), str(link["b"])
            found = sorted(set(over.get(frozenset((a, b)), [])))
            arcs += [(a, b, link, ring, i) for i, ring in enumerate(found)] or [(a, b, link, None, 0)]
        arcs += [(a, b, None, index, 0) for index, a, b in self._free_steps()]
        pins = self._pins([(a, b) for a, b, *_ in arcs])
        for number, (a, b, cable, ring, strand) in enumerate(arcs):
            start, end = pins[number, a], pins[number, b]
            depth = _depth(self.nodes[a], self.nodes[b]) - 7 * strand
            self._arc(canvas, start, end, depth, cable, ring)

    def _arc(self, canvas: Canvas, a: Point, b: Point, depth: float, link: Document | None, ring: int | None) -> None:
        colour = ring_colour(ring) if ring is not None else link_colour(link or {"type": ""})
        if link is None:
            canvas.arc(a, b, depth, 1.4, colour, dashed=True, title=f"ring {(ring or 0) + 1}, through a switch")
            return
        dashed = bool(link.get("derived"))
        x, y = canvas.arc(a, b, depth, self.pens.inside(link), colour, dashed=dashed, title=labels.link_title(link))
        text = labels.link_text(link)
        half = text_width(text, 9) / 2
        canvas.label(text, [(x - half, y + 14), (x - half, y - 7)])

    def _pins(self, pairs: Sequence[Pair]) -> dict[tuple[int, str], Point]:
        """Spread the ends of arcs along the bottom of each box in the order of their other ends, so that few cross."""
        ends: dict[str, list[tuple[float, int]]] = {}
        for number, (a, b) in enumerate(pairs):
            ends.setdefault(a, []).append((self.nodes[b].middle, number))
            ends.setdefault(b, []).append((self.nodes[a].middle, number))
        pins = {}
        for id_, found in ends.items():
            node = self.nodes[id_]
            left = sorted((x for x in found if x[0] < node.middle), reverse=True)
            right = sorted((x for x in found if x[0] >= node.middle), reverse=True)
            order = [number for _, number in (*left, *right)]
            for place, number in enumerate(order, 1):
                pins[number, id_] = (node.x + node.width * place / (len(order) + 1), node.y + node.height)
        return pins

    def _draw_hubs(self, canvas: Canvas, y: float) -> None:
        top = y + self.below + self._arcs_height() + 26
        for hub in self.inside.hubs:
            name = str(hub["id"])
            spokes = [
                (x, str(x["a"]) if str(x["b"]) == name else str(x["b"]))
                for x in self.inside.cables
                if name in (x["a"], x["b"])
            ]
            ends = [(link, self.nodes[end]) for link, end in spokes if end in self.nodes]
            text = " · ".join([one_line(name), *labels.device_details(hub)])
            left = min(node.x for _, node in ends)
            right = max(*(node.x + node.width for _, node in ends), left + text_width(text, 11, True) + 16)
            bar = Area(left, top, right - left, 24)
            canvas.box(bar, DEVICE_COLOURS["switch"], [(text, 11, True)], dashed=bool(hub.get("derived")), title=text)
            for link, node in ends:
                self._line(canvas, [(node.middle, node.y + node.height), (node.middle, top)], link)
                canvas.label(
                    _rate(link), [(node.middle + 8, top - 5), (node.middle - 8 - text_width(_rate(link), 9), top - 5)]
                )
            top += 60

    def _draw_notes(self, canvas: Canvas, x: float, y: float) -> None:
        base = y + self.height - PAD - self._notes_height() + 8
        for number, lines in self._notes():
            canvas.badge(x + PAD + 7, base + 8, str(number), WARN)
            for line in lines:
                canvas.text(x + PAD + 20, base + 11.5, line, 10, WARN)
                base += 10 * LINE_HEIGHT
            base += 6


def _rate(link: Document | None) -> str:
    return labels.format_link_rate(link.get("bandwidth"), str(link["type"])) if link else ""


def _under(node: BoxNode, x: float) -> float:
    """Return where a line to a child leaves a box: straight above it below a processor's, else in the middle."""
    if node.branch.device["kind"] == "cpu":
        return min(max(x, node.x + 6), node.x + node.width - 6)
    return node.middle


def _depth(a: BoxNode, b: BoxNode) -> float:
    return 16 + 0.55 * float(abs(a.middle - b.middle) ** 0.8)
