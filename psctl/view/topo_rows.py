"""`topo` for programs that read lines: one tab-separated row a host, device, cable, finding and ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from psctl.view import labels
from psctl.view.inside import CLOSED, OPEN, inside, rings_of
from psctl.view.text import one_line

Document = Mapping[str, Any]

HEADS = ("host", "kind", "device", "at", "link", "rate", "known", "about")
"""`at` is the other end of a link: what the device hangs on, or is joined to by a cable; `known` says how the rate is
known: nominal, measured, or derived."""


def rows_of(document: Document) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a topology document, heads first; what is not known is "-"."""
    yield HEADS
    for host in document.get("hosts") or []:
        yield from _host(host)
    for link in document.get("between") or []:
        about = " ".join(
            filter(None, (labels.latency(link), f"via {labels.named(link['via'])}" if link.get("via") else ""))
        )
        yield _row(link["a"], "between", "", link["b"], _kind(link), _rate(link), labels.certainty(link), about)
    strategy = document.get("strategy")
    if strategy:
        name = one_line(str(strategy["name"]))
        yield _row("", "strategy", name, "", "", "", "", one_line(str(strategy.get("reason") or "")))
        arrow = " -> " if name in CLOSED | OPEN else ", "
        for group, share in rings_of(strategy):
            part = f"{share:.4g}" if share is not None else ""
            yield _row("", "group", name, "", "", part, "", arrow.join(map(labels.named, group)))


def _host(host: Document) -> Iterator[tuple[str, ...]]:
    name = labels.named(host["name"])
    failed = bool(host.get("error"))
    if not failed:
        yield _row(name, "host", "", "", "", "", "", ", ".join(labels.head(host)))
    arranged = inside(host)
    above = {id(child): branch.id for branch in arranged.branches() for child in branch.below}
    for branch in arranged.branches():
        device, link = branch.device, branch.link or {}
        known = labels.certainty(link) if link else ""
        about = _about(device)
        at = above.get(id(branch), "")
        yield _row(name, device["kind"], branch.id, at, _kind(link), _rate(link), known, about)
    for hub in arranged.hubs:
        yield _row(name, hub["kind"], hub["id"], "", "", "", "", _about(hub))
    for link in arranged.cables:
        yield _row(name, "link", link["a"], link["b"], _kind(link), _rate(link), labels.certainty(link), "")
    for link in arranged.relations:
        if link.get("measured"):
            yield _row(name, "copy", link["a"], link["b"], _kind(link), _rate(link), "measured", labels.latency(link))
    for told in labels.workers(host):
        yield _row(name, "worker", "", "", "", "", "", told)
    for what, cure in labels.findings(host):
        yield _row(name, "error" if failed else "problem", "", "", "", "", "", f"{what} -> {cure}" if cure else what)
        failed = False  # what follows an error are findings


def _about(device: Document) -> str:
    return ", ".join([*labels.about(device), *(["derived"] if device.get("derived") else [])])


def _kind(link: Document) -> str:
    return labels.named(link.get("type") or ("Ethernet" if link else ""))


def _rate(link: Document) -> str:
    return labels.rate(link.get("bandwidth"), str(link.get("type") or "Ethernet")) if link else ""


def _row(*cells: object) -> tuple[str, ...]:
    return tuple(one_line(str(cell)) or "-" for cell in cells)
