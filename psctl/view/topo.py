"""`topo` in a terminal: each host as a tree of slots, its cables, what lies between hosts, what is amiss, the choice.

Nothing is cut: what does not fit a line goes on in the next one, under its own column. Elsewhere than at a terminal it
is one table of tab-separated rows (`view/topo_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from psctl.view import labels
from psctl.view.console import Glyphs, say
from psctl.view.inside import CLOSED, OPEN, Branch, Inside, folded, inside, rings_of
from psctl.view.text import one_line
from psctl.view.topo_matrix import draw_matrix
from psctl.view.topo_rows import rows_of

Document = Mapping[str, Any]

STYLES = {"gpu": "bold green", "nic": "cyan", "cpu": "bold", "switch": ""}
"""Of the ids of devices."""

RING_STYLES = ("green", "magenta", "cyan", "yellow", "blue", "red")
"""Of rings, by turns."""

ROOM = 24
"""Cells that words about a device need beside it; with less they stand below it."""

FOOT = "Rates are payload in each direction, nominal unless said otherwise."
DERIVED = "derived: nothing lists it; it follows from what was said of others."


def draw_topo(console: Console, document: Document, matrix: bool = False) -> None:
    """Draw the result of `topo`.

    Args:
        console: where to.
        document: as `topo -o json` prints it.
        matrix: what the matrices say of pairs, in place of the trees.
    """
    if not console.is_terminal and not matrix:
        say(console, *("\t".join(row) for row in rows_of(document)))
        return
    drawing = _Drawing(console)
    hosts = document.get("hosts") or []
    for host in folded(hosts):
        drawing.host(host, matrix)
    drawing.between(document.get("between") or [], {str(host["name"]) for host in hosts})
    drawing.strategy(document.get("strategy"))
    if not matrix:
        drawing.foot(document)


class _Signs:
    """What trees, cables and rings are drawn with, as far as the encoding has it."""

    def __init__(self, console: Console) -> None:
        fancy = console.encoding.lower().startswith("utf")
        self.dot = Glyphs(console).dot
        self.tee, self.corner, self.bar = ("├─ ", "└─ ", "│  ") if fancy else ("|- ", "`- ", "|  ")
        self.arrow, self.warning, self.cure = ("→", "▲", "→") if fancy else (">", "!", "->")
        self.cable = "──" if fancy else "--"


class _Drawing:
    def __init__(self, console: Console) -> None:
        self.console, self.signs = console, _Signs(console)
        self.width = console.width if console.is_terminal else 10**6

    def host(self, host: Document, matrix: bool) -> None:
        title = Text(labels.named(host["name"]), style="bold reverse")
        failed = bool(host.get("error"))
        words = "" if failed else f" {self.signs.dot} ".join(labels.head(host))
        self.columns(Text.assemble(title, " " if words else ""), Text(words), "")
        if not failed:
            arranged = inside(host)
            if matrix:
                draw_matrix(self.console, host, self.width)
            else:
                self.tree(arranged)
                self.cables(arranged)
                self.workers(host)
        for what, cure in labels.findings(host):
            self.finding(what, cure, failed)
        self.put(Text(""))

    def tree(self, arranged: Inside) -> None:
        rows = list(self._rows(arranged.roots, ""))
        first = max((cell_len(lead) + cell_len(branch.id) for lead, _, branch in rows), default=0) + 2
        links = {id(branch): _slot(branch) for _, _, branch in rows}
        second = max(map(len, links.values()), default=0) + 2
        for lead, rest, branch in rows:
            line = Text(lead, style="dim")
            line.append(branch.id, style=f"not dim {STYLES.get(str(branch.device['kind']), '')}")
            line.append(" " * (first - cell_len(line.plain)))
            if links[id(branch)]:
                line.append(f"{links[id(branch)]:<{second}}", style=_sure(branch.link))
            words = Text(f" {self.signs.dot} ".join(labels.about(branch.device, branch.link)))
            if branch.device.get("derived"):
                words.append(" derived" if words.plain else "derived", style="dim italic")
            if branch.link is not None and branch.link.get("measured"):
                words.append(" measured" if words.plain else "measured", style="green")
            self.columns(line, words, rest)

    def _rows(self, branches: Sequence[Branch], lead: str) -> Iterator[tuple[str, str, Branch]]:
        """Yield what stands before a device, what before its further lines, and the device."""
        for index, branch in enumerate(branches):
            last = index == len(branches) - 1
            under = lead + (" " * len(self.signs.bar) if last else self.signs.bar)
            rest = under + (self.signs.bar if branch.below else "")
            yield lead + (self.signs.corner if last else self.signs.tee), rest, branch
            yield from self._rows(branch.below, under)

    def columns(self, line: Text, words: Text, rest: str) -> None:
        """Put words at the right of a line, folded under their own column; on the next line where there's no room."""
        indent = cell_len(line.plain)
        if not words.plain:
            line.rstrip()
            self.put(line)
            return
        if self.width - indent < min(ROOM, cell_len(words.plain)):
            line.rstrip()
            self.put(line)
            indent = min(cell_len(rest) + 4, self.width // 2)
            line = Text(rest, style="dim").append(" " * (indent - cell_len(rest)))
        for part in words.wrap(self.console, max(8, self.width - indent), overflow="fold"):
            part.rstrip()
            self.put(Text.assemble(line, part))
            line = Text(rest, style="dim").append(" " * max(0, indent - cell_len(rest)))

    def cables(self, arranged: Inside) -> None:
        for family, lines in [
            *labels.joined(arranged.cables, arranged.hubs),
            ("copies, measured", labels.copied(arranged.relations)),
        ]:
            head = Text(f"{family}  ", style="bold")
            for line in lines:
                self.columns(head, Text(line), "")
                head = Text(" " * cell_len(head.plain))

    def workers(self, host: Document) -> None:
        told = labels.workers(host)
        if told:
            self.columns(Text("workers  ", style="bold"), Text(f" {self.signs.dot} ".join(told)), "")

    def finding(self, what: str, cure: str, failed: bool) -> None:
        style = "red" if failed else "yellow"
        self.columns(Text(f"{self.signs.warning} ", style=f"bold {style}"), Text(what, style=style), "  ")
        if cure:
            self.columns(Text(f"  {self.signs.cure} ", style="dim"), Text(cure), "    ")

    def between(self, links: Sequence[Document], hosts: Set[str]) -> None:
        if not links:
            return
        self.put(Text("between hosts", style="bold reverse"))
        rows = [_cable_row(ends, other, link) for ends, other, link in _bundles(links, hosts)]
        widths = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            left, right, carried, *more = (cell + " " * (widths[i] - cell_len(cell)) for i, cell in enumerate(row))
            line = Text.assemble((left, "bold"), f" {self.signs.cable} ", right, "  ", (carried, "bold"), "  ")
            style = "green" if row[-1].startswith("measured") else "dim"
            words = Text("  ".join(more[:-1]) + "  ").append(row[-1], style=style)
            if cell_len(left) > self.width // 2:
                self.columns(Text(""), Text(row[0], style="bold"), "")
                line = Text.assemble(f" {self.signs.cable} ", right, "  ", (carried, "bold"), "  ")
            self.columns(line, words, "")
        self.put(Text(""))

    def strategy(self, strategy: Document | None) -> None:
        if not strategy:
            return
        name, reason = one_line(str(strategy["name"])), one_line(str(strategy.get("reason") or ""))
        self.columns(Text.assemble(("suggestion ", "bold reverse"), " ", (name, "bold green"), "  "), Text(reason), "")
        arrow = f" {self.signs.arrow} "
        for index, (group, share) in enumerate(rings_of(strategy)):
            members = [labels.named(member) for member in group]
            if name in CLOSED and len(members) > 2:
                members.append(members[0])
            told = arrow.join(members) if name in CLOSED | OPEN else labels.ranges(members)
            part = f"{share:>4.0%}" if share is not None else "  - "
            style = RING_STYLES[index % len(RING_STYLES)]
            chain = Text(told, style=style)
            self.columns(Text(f"  {part}  ", style=f"bold {style}"), chain, "")
        self.put(Text(""))

    def foot(self, document: Document) -> None:
        hosts = document.get("hosts") or []
        things = [thing for host in hosts for key in ("devices", "links") for thing in host.get(key) or []]
        if any(thing.get("bandwidth") for thing in [*things, *(document.get("between") or [])]):
            self.columns(Text(""), Text(FOOT, style="dim"), "")
        if any(thing.get("derived") for thing in things):
            self.columns(Text(""), Text(DERIVED, style="dim"), "")

    def put(self, line: Text) -> None:
        """Print a line, folded when not even its first column fits."""
        line.rstrip()
        parts = line.wrap(self.console, self.width, overflow="fold") if cell_len(line.plain) > self.width else [line]
        for part in parts:
            part.rstrip()
            say(self.console, part)


def _sure(link: Document | None) -> str:
    """Return the style of an edge's words: dim when it is derived."""
    return "dim" if link and link.get("derived") else "not dim"


def _slot(branch: Branch) -> str:
    """Return the edge above a device: "PCIe 16 GB/s"."""
    return labels.cable(branch.link) if branch.link is not None else ""


def _bundles(links: Sequence[Document], hosts: Set[str]) -> list[tuple[list[str], str, Document]]:
    """Join the hosts that hang on one switch alike, so that 16 equal hosts are one line."""
    bundles: dict[tuple[str, ...], tuple[list[str], str, Document]] = {}
    for link in links:
        a, b = str(link["a"]), str(link["b"])
        a, b = (b, a) if b in hosts and a not in hosts else (a, b)
        key = (b, *_cable_row([""], b, link)[2:]) if a in hosts and b not in hosts else (a, b, str(len(bundles)))
        bundles.setdefault(key, ([], b, link))[0].append(a)
    return list(bundles.values())


def _cable_row(ends: Sequence[str], other: str, link: Document) -> list[str]:
    kind = str(link.get("type") or "Ethernet")
    via = f"via {labels.named(link['via'])}" if link.get("via") else ""
    carried = labels.rate(link.get("bandwidth"), kind) or "rate not known"
    names = labels.ranges([labels.named(end) for end in ends])
    return [names, labels.named(other), carried, labels.latency(link) or "-", kind, via, labels.certainty(link)]
