"""`topo` in a terminal: the tree of each host, its cables and problems, the network between hosts, the suggestion.

Nothing is truncated: text that does not fit a line continues in the next one, under its own column. A pipe gets
tab-separated rows (`psctl/view/topo_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from psctl.types import Document
from psctl.view import labels
from psctl.view.console import Glyphs, say
from psctl.view.device_tree import CLOSED, OPEN, DeviceNode, DeviceTree, device_tree, fold_alike_hosts, rings_of
from psctl.view.text import one_line
from psctl.view.topo_matrix import draw_matrix
from psctl.view.topo_rows import rows_of

STYLES = {"gpu": "bold green", "nic": "cyan", "cpu": "bold", "switch": ""}
"""Styles of device ids."""

RING_STYLES = ("green", "magenta", "cyan", "yellow", "blue", "red")
"""Styles of rings, in turn."""

MIN_COLUMN = 24
"""Cells that the details of a device need beside it; with less they are printed below it."""

FOOT = "Rates are payload in each direction, nominal unless marked otherwise."
DERIVED = "derived: not listed by any tool, inferred from the rest."


def draw_topo(console: Console, document: Document, matrix: bool = False) -> None:
    """Draw the result of `topo`.

    Args:
        console: of stdout.
        document: as `topo -o json` prints it.
        matrix: draw the matrices in place of the trees.
    """
    if not console.is_terminal and not matrix:
        say(console, *("\t".join(row) for row in rows_of(document)))
        return
    drawing = _Drawing(console)
    hosts = document.get("hosts") or []
    for host in fold_alike_hosts(hosts):
        drawing.draw_host(host, matrix)
    drawing.draw_network(document.get("between") or [], {str(host["name"]) for host in hosts})
    drawing.draw_strategy(document.get("strategy"))
    if not matrix:
        drawing.draw_notes(document)


class _Drawing:
    """Prints a topology document on a terminal, part by part."""

    def __init__(self, console: Console) -> None:
        self.console, self.glyphs = console, Glyphs(console)
        self.width = console.width if console.is_terminal else 10**6

    def draw_host(self, host: Document, matrix: bool) -> None:
        title = Text(one_line(host["name"]), style="bold reverse")
        failed = bool(host.get("error"))
        summary = "" if failed else f" {self.glyphs.dot} ".join(labels.host_summary(host))
        self.print_columns(Text.assemble(title, " " if summary else ""), Text(summary), "")
        if not failed:
            arranged = device_tree(host)
            if matrix:
                draw_matrix(self.console, host, self.width)
            else:
                self.draw_tree(arranged)
                self.draw_cables(arranged)
                self.draw_workers(host)
        for what, cure in labels.findings(host):
            self.draw_finding(what, cure, failed)
        self.print_line(Text(""))

    def draw_tree(self, arranged: DeviceTree) -> None:
        rows = list(self._rows(arranged.roots, ""))
        first = max((cell_len(lead) + cell_len(branch.id) for lead, _, branch in rows), default=0) + 2
        links = {id(branch): labels.link_text(branch.link) if branch.link else "" for _, _, branch in rows}
        second = max(map(len, links.values()), default=0) + 2
        for lead, rest, branch in rows:
            line = Text(lead, style="dim")
            line.append(branch.id, style=f"not dim {STYLES.get(str(branch.device['kind']), '')}")
            line.append(" " * (first - cell_len(line.plain)))
            if branch.link is not None:
                line.append(f"{links[id(branch)]:<{second}}", style="dim" if branch.link.get("derived") else "not dim")
            details = Text(f" {self.glyphs.dot} ".join(labels.device_details(branch.device, branch.link)))
            if branch.device.get("derived"):
                details.append(" derived" if details.plain else "derived", style="dim italic")
            if branch.link is not None and branch.link.get("measured"):
                details.append(" measured" if details.plain else "measured", style="green")
            self.print_columns(line, details, rest)

    def _rows(self, branches: Sequence[DeviceNode], lead: str) -> Iterator[tuple[str, str, DeviceNode]]:
        """Yield the text before a device, the text before its further lines, and the device."""
        for index, branch in enumerate(branches):
            last = index == len(branches) - 1
            under = lead + (" " * len(self.glyphs.stem) if last else self.glyphs.stem)
            rest = under + (self.glyphs.stem if branch.below else "")
            yield lead + (self.glyphs.corner if last else self.glyphs.tee), rest, branch
            yield from self._rows(branch.below, under)

    def print_columns(self, line: Text, details: Text, rest: str) -> None:
        """Print text at the right of a line, wrapped in its own column; on the next line where there is no space."""
        indent = cell_len(line.plain)
        if not details.plain:
            line.rstrip()
            self.print_line(line)
            return
        if self.width - indent < min(MIN_COLUMN, cell_len(details.plain)):
            line.rstrip()
            self.print_line(line)
            indent = min(cell_len(rest) + 4, self.width // 2)
            line = Text(rest, style="dim").append(" " * (indent - cell_len(rest)))
        for part in details.wrap(self.console, max(8, self.width - indent), overflow="fold"):
            part.rstrip()
            self.print_line(Text.assemble(line, part))
            line = Text(rest, style="dim").append(" " * max(0, indent - cell_len(rest)))

    def draw_cables(self, arranged: DeviceTree) -> None:
        for family, lines in [
            *labels.cable_lines(arranged.cables, arranged.hubs),
            ("copies, measured", labels.copy_lines(arranged.relations)),
        ]:
            head = Text(f"{family}  ", style="bold")
            for line in lines:
                self.print_columns(head, Text(line), "")
                head = Text(" " * cell_len(head.plain))

    def draw_workers(self, host: Document) -> None:
        text = labels.worker_lines(host)
        if text:
            self.print_columns(Text("workers  ", style="bold"), Text(f" {self.glyphs.dot} ".join(text)), "")

    def draw_finding(self, what: str, cure: str, failed: bool) -> None:
        style = "red" if failed else "yellow"
        self.print_columns(Text(f"{self.glyphs.warning} ", style=f"bold {style}"), Text(what, style=style), "  ")
        if cure:
            self.print_columns(Text(f"  {self.glyphs.cure} ", style="dim"), Text(cure), "    ")

    def draw_network(self, links: Sequence[Document], hosts: Set[str]) -> None:
        if not links:
            return
        self.print_line(Text("between hosts", style="bold reverse"))
        rows = [_cable_row(ends, other, link) for ends, other, link in _bundles(links, hosts)]
        widths = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            left, right, carried, *more = (cell + " " * (widths[i] - cell_len(cell)) for i, cell in enumerate(row))
            line = Text.assemble((left, "bold"), f" {self.glyphs.cable} ", right, "  ", (carried, "bold"), "  ")
            style = "green" if row[-1].startswith("measured") else "dim"
            details = Text("  ".join(more[:-1]) + "  ").append(row[-1], style=style)
            if cell_len(left) > self.width // 2:
                self.print_columns(Text(""), Text(row[0], style="bold"), "")
                line = Text.assemble(f" {self.glyphs.cable} ", right, "  ", (carried, "bold"), "  ")
            self.print_columns(line, details, "")
        self.print_line(Text(""))

    def draw_strategy(self, strategy: Document | None) -> None:
        if not strategy:
            return
        name, reason = one_line(strategy["name"]), one_line(strategy.get("reason") or "")
        self.print_columns(
            Text.assemble(("suggestion ", "bold reverse"), " ", (name, "bold green"), "  "), Text(reason), ""
        )
        arrow = f" {self.glyphs.arrow} "
        for index, (group, share) in enumerate(rings_of(strategy)):
            members = [one_line(member) for member in group]
            if name in CLOSED and len(members) > 2:
                members.append(members[0])
            text = arrow.join(members) if name in CLOSED | OPEN else labels.id_ranges(members)
            part = f"{share:>4.0%}" if share is not None else "  - "
            style = RING_STYLES[index % len(RING_STYLES)]
            chain = Text(text, style=style)
            self.print_columns(Text(f"  {part}  ", style=f"bold {style}"), chain, "")
        self.print_line(Text(""))

    def draw_notes(self, document: Document) -> None:
        hosts = document.get("hosts") or []
        things = [thing for host in hosts for key in ("devices", "links") for thing in host.get(key) or []]
        if any(thing.get("bandwidth") for thing in [*things, *(document.get("between") or [])]):
            self.print_columns(Text(""), Text(FOOT, style="dim"), "")
        if any(thing.get("derived") for thing in things):
            self.print_columns(Text(""), Text(DERIVED, style="dim"), "")

    def print_line(self, line: Text) -> None:
        """Print a line, wrapped when not even its first column fits."""
        line.rstrip()
        parts = line.wrap(self.console, self.width, overflow="fold") if cell_len(line.plain) > self.width else [line]
        for part in parts:
            part.rstrip()
            say(self.console, part)


def _bundles(links: Sequence[Document], hosts: Set[str]) -> list[tuple[list[str], str, Document]]:
    """Group the hosts with equal links to one switch, so that 16 equal hosts are one line."""
    bundles: dict[tuple[str, ...], tuple[list[str], str, Document]] = {}
    for link in links:
        a, b = str(link["a"]), str(link["b"])
        a, b = (b, a) if b in hosts and a not in hosts else (a, b)
        key = (b, *_cable_row([""], b, link)[2:]) if a in hosts and b not in hosts else (a, b, str(len(bundles)))
        bundles.setdefault(key, ([], b, link))[0].append(a)
    return list(bundles.values())


def _cable_row(ends: Sequence[str], other: str, link: Document) -> list[str]:
    kind = str(link.get("type") or "Ethernet")
    via = f"via {one_line(link['via'])}" if link.get("via") else ""
    carried = labels.format_link_rate(link.get("bandwidth"), kind) or "rate not known"
    names = labels.id_ranges([one_line(end) for end in ends])
    return [
        names,
        one_line(other),
        carried,
        labels.format_latency(link) or "-",
        kind,
        via,
        labels.rate_source(link),
    ]
