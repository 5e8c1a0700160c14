"""Words for what a topology document holds: rates, memories, devices, cables. The same in every drawing. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from psctl.topology.graph import bonded
from psctl.units import format_bit_rate, format_rate, format_seconds
from psctl.view.text import one_line

Document = Mapping[str, Any]

NETWORKS = ("Ethernet", "InfiniBand")
"""Types of edges whose rates people know in bits."""

LABELS = {"cpu": "processor", "gpu": "GPU", "nic": "NIC", "switch": "switch"}
"""What to call a device of which nothing but its kind is known."""

_NUMBERED = re.compile(r"(.*?)([0-9]+)")


def rate(bandwidth: object, kind: str = "") -> str:
    """Print bytes/s: in Gbit/s for networks, in GB/s for all else, "" where nothing is known."""
    if not isinstance(bandwidth, int | float) or not bandwidth > 0:
        return ""
    return format_bit_rate(bandwidth) if kind in NETWORKS or kind == "nic" else format_rate(bandwidth)


def gibibytes(count: object) -> str:
    """Print a memory: "80 GiB", "512 MiB"; "" where nothing is known."""
    if not isinstance(count, int | float) or not count > 0:
        return ""
    value, unit = (count / 2**30, "GiB") if count >= 2**30 else (count / 2**20, "MiB")
    return f"{value:,.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}".replace(".0 ", " ")


def named(id: object) -> str:
    """Return an id as one harmless line."""
    return one_line(str(id))


def about(device: Document, slot: Document | None = None) -> list[str]:
    """Return what is known of a device beside its id, in a person's order.

    Args:
        device: the device.
        slot: the edge that is shown beside it: what is said there is not said again.
    """
    name, kind = one_line(str(device.get("name") or "")), str(device["kind"])
    numa = device.get("numa")
    words = [f"NUMA {numa}"] if kind == "cpu" and numa is not None else []
    words += [name] if name and name != device["id"] else [LABELS.get(kind, kind)] if kind == "switch" else []
    if device.get("cores"):
        words.append(f"{device['cores']} cores")
    words.append(gibibytes(device.get("memory")))
    words.append(one_line(str(device.get("interface") or "")) if device.get("interface") != device["id"] else "")
    words += [one_line(str(address)) for address in device.get("addresses") or []]
    port = rate(device.get("bandwidth"), "nic")
    words.append(f"port {port}" if port and not (slot and slot["type"] in NETWORKS) else "")
    return [word for word in words if word]


def head(host: Document) -> list[str]:
    """Return a host in few words: cores, memory, how many GPUs and NICs, labels."""
    devices = host.get("devices") or []
    gpus = [device for device in devices if device["kind"] == "gpu"]
    nics = sum(device["kind"] == "nic" for device in devices)
    names = {one_line(str(gpu.get("name") or "")) for gpu in gpus}
    alike = f" {names.pop()}" if len(names) == 1 else ""
    words = [f"{host['cores']} cores"] if host.get("cores") else []
    words.append(gibibytes(host.get("memory")))
    words.append(f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}{alike.rstrip()}")
    words.append(f"{nics} NIC{'s' * (nics != 1)}")
    words += [f"{one_line(str(k))}={one_line(str(v))}" for k, v in (host.get("labels") or {}).items()]
    return [word for word in words if word]


def ranges(ids: Iterable[str]) -> str:
    """Return ids with runs of numbers folded: "GPU0-GPU7", "GPU0, GPU2-GPU4"."""
    runs: list[list[str]] = []
    for name in ids:
        if runs and _next(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    return ", ".join(parts)


def _next(a: str, b: str) -> bool:
    first, second = _NUMBERED.fullmatch(a), _NUMBERED.fullmatch(b)
    return bool(first and second and first[1] == second[1] and int(first[2]) + 1 == int(second[2]))


def certainty(link: Document) -> str:
    """Say how a rate is known: measured, derived, or nominal."""
    return "measured" if link.get("measured") else "derived" if link.get("derived") else "nominal"


def cable(link: Document) -> str:
    """Name a cable's sort and rate: "NV2 50 GB/s", "PCIe 16 GB/s"."""
    return " ".join(filter(None, (named(link["type"]), rate(link.get("bandwidth"), str(link["type"])))))


def _words(link: Document) -> str:
    """Name a cable within its family: "NV2 50 GB/s", "20 GB/s, derived"."""
    carried = rate(link.get("bandwidth"), str(link["type"]))
    words = cable(link) if kind_of(link) != link["type"] else carried or "rate not known"
    sure = certainty(link)
    return words if sure == "nominal" else f"{words}, {sure}"


def kind_of(link: Document) -> str:
    """Return the family of a cable: NVLink for NV1, NV2 and NVLink itself."""
    return "NVLink" if bonded(str(link["type"])) else named(link["type"])


def joined(cables: Sequence[Document], hubs: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """Say who is joined to whom by cables, families apart, as few lines as tell it all.

    A hub with its devices is one line; so are devices each pair of which is joined alike, and pairs that stand alone;
    else a line a device, its widest cables first.

    Returns:
        (family, lines) in the order in which the families occur.
    """
    by_family: dict[str, list[Document]] = {}
    for link in cables:
        by_family.setdefault(kind_of(link), []).append(link)
    centres = {str(hub["id"]): hub for hub in hubs}
    return [(family, list(_family(links, centres))) for family, links in by_family.items()]


def _family(links: Sequence[Document], centres: Mapping[str, Document]) -> Iterable[str]:
    spokes: dict[tuple[str, str], list[str]] = {}
    direct = []
    for link in links:
        a, b = str(link["a"]), str(link["b"])
        if (b in centres) != (a in centres):
            hub, end = (b, a) if b in centres else (a, b)
            spokes.setdefault((hub, _words(link)), []).append(end)
        else:
            direct.append(link)
    for (hub, words), ends in spokes.items():
        name = one_line(str(centres[hub].get("name") or "switch"))
        each = "each " if len(ends) > 1 else ""
        yield f"{ranges(map(named, ends))} on {named(hub)} ({name}): {each}{words}"
    if direct:
        yield from _direct(direct)


def _direct(links: Sequence[Document]) -> Iterable[str]:
    partners: dict[str, list[tuple[float, str, str]]] = {}
    for link in links:
        a, b, words = str(link["a"]), str(link["b"]), _words(link)
        width = float(link.get("bandwidth") or 0) or bonded(str(link["type"]))
        partners.setdefault(a, []).append((width, words, b))
        partners.setdefault(b, []).append((width, words, a))
    ids, sorts = list(partners), {words for found in partners.values() for _, words, _ in found}
    whole = all(len({other for _, _, other in found}) == len(ids) - 1 for found in partners.values())
    if whole and len(sorts) == 1 and len(ids) > 2:
        yield f"{ranges(map(named, ids))}, every pair: {sorts.pop()}"
    elif all(len(found) == 1 for found in partners.values()):
        pairs: dict[str, list[str]] = {}
        for a, found in partners.items():
            _, words, b = found[0]
            if ids.index(a) < ids.index(b):
                pairs.setdefault(words, []).append(f"{named(a)} = {named(b)}")
        yield from (f"{', '.join(found)}: {words}" for words, found in pairs.items())
    else:
        yield from (_spokes(key, found) for key, found in partners.items())


def _spokes(id: str, found: Sequence[tuple[float, str, str]]) -> str:
    by_words: dict[tuple[float, str], list[str]] = {}
    for width, words, other in found:
        by_words.setdefault((width, words), []).append(named(other))
    ordered = sorted(by_words.items(), key=lambda item: -item[0][0])
    signs = ("=", "-", "..")
    parts = [f"{signs[min(i, 2)]} {', '.join(others)} ({words})" for i, ((_, words), others) in enumerate(ordered)]
    return f"{named(id)} {' '.join(parts)}"


def copied(relations: Sequence[Document]) -> list[str]:
    """Say what measured copies between two devices carried, who is alike together."""
    copies = [{**link, "type": "copy", "measured": False} for link in relations if link.get("measured")]
    return list(_direct(copies)) if copies else []


def latency(link: Document) -> str:
    """Print a latency, "" where none is known."""
    value = link.get("latency")
    return format_seconds(float(value)) if isinstance(value, int | float) else ""


def workers(host: Document) -> list[str]:
    """Return which GPU and NIC each worker of a host gets; nothing where there is no choice."""
    found = []
    for seat in host.get("workers") or []:
        near = [f"NUMA {seat['numa']}"] if seat.get("numa") is not None else []
        parts = [one_line(str(part)) for part in (seat.get("gpu"), seat.get("nic")) if part] + near
        if seat.get("gpu") and seat.get("nic"):
            found.append(f"{seat['rank']}: {', '.join(parts)}")
    return found


def findings(host: Document) -> list[tuple[str, str]]:
    """Return what is amiss on a host and how it is mended; the error of a host that failed is the first of them."""
    found = []
    error = host.get("error")
    if isinstance(error, Mapping):
        inner = error.get("error", error)
        found.append((one_line(str(inner.get("message") or "failed")), one_line(str(inner.get("hint") or ""))))
    elif error:
        found.append((one_line(str(error)), ""))
    for problem in host.get("problems") or []:
        if isinstance(problem, Mapping):
            found.append((one_line(str(problem.get("what") or "")), one_line(str(problem.get("cure") or ""))))
        else:
            found.append((one_line(str(problem)), ""))
    return found
