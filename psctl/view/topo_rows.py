"""`topo` as tab-separated rows: one a host, device, cable, problem and ring."""

from __future__ import annotations

from collections.abc import Iterator

from psctl.types import Document
from psctl.view import labels
from psctl.view.device_tree import CLOSED, OPEN, device_tree, rings_of
from psctl.view.text import one_line

HEADS = ("host", "kind", "device", "at", "link", "rate", "known", "about")
"""`at` is the other end of a link: the parent of a device, or the other device of a cable; `known` is nominal, measured
or derived."""


def rows_of(document: Document) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a topology document, heads first; unknown cells are "-"."""
    yield HEADS
    for host in document.get("hosts") or []:
        yield from _host(host)
    for link in document.get("between") or []:
        about = " ".join(
            filter(None, (labels.format_latency(link), f"via {one_line(link['via'])}" if link.get("via") else ""))
        )
        yield _row(link["a"], "between", "", link["b"], _kind(link), _rate(link), labels.rate_source(link), about)
    strategy = document.get("strategy")
    if strategy:
        name = one_line(strategy["name"])
        yield _row("", "strategy", name, "", "", "", "", one_line(strategy.get("reason") or ""))
        arrow = " -> " if name in CLOSED | OPEN else ", "
        for group, share in rings_of(strategy):
            part = f"{share:.4g}" if share is not None else ""
            yield _row("", "group", name, "", "", part, "", arrow.join(map(one_line, group)))


def _host(host: Document) -> Iterator[tuple[str, ...]]:
    name = one_line(host["name"])
    failed = bool(host.get("error"))
    if not failed:
        yield _row(name, "host", "", "", "", "", "", ", ".join(labels.host_summary(host)))
    arranged = device_tree(host)
    above = {id(child): branch.id for branch in arranged.nodes() for child in branch.below}
    for branch in arranged.nodes():
        device, link = branch.device, branch.link or {}
        known = labels.rate_source(link) if link else ""
        about = _about(device)
        at = above.get(id(branch), "")
        yield _row(name, device["kind"], branch.id, at, _kind(link), _rate(link), known, about)
    for hub in arranged.hubs:
        yield _row(name, hub["kind"], hub["id"], "", "", "", "", _about(hub))
    for link in arranged.cables:
        yield _row(name, "link", link["a"], link["b"], _kind(link), _rate(link), labels.rate_source(link), "")
    for link in arranged.relations:
        if link.get("measured"):
            yield _row(
                name, "copy", link["a"], link["b"], _kind(link), _rate(link), "measured", labels.format_latency(link)
            )
    for text in labels.worker_lines(host):
        yield _row(name, "worker", "", "", "", "", "", text)
    for what, cure in labels.findings(host):
        yield _row(name, "error" if failed else "problem", "", "", "", "", "", f"{what} -> {cure}" if cure else what)
        failed = False  # the rows after an error are findings


def _about(device: Document) -> str:
    return ", ".join([*labels.device_details(device), *(["derived"] if device.get("derived") else [])])


def _kind(link: Document) -> str:
    return one_line(link.get("type") or ("Ethernet" if link else ""))


def _rate(link: Document) -> str:
    return labels.format_link_rate(link.get("bandwidth"), str(link.get("type") or "Ethernet")) if link else ""


def _row(*cells: object) -> tuple[str, ...]:
    return tuple(one_line(cell) or "-" for cell in cells)
