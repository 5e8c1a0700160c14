"""Texts for the entries of a topology document (rates, memory, devices, links), the same in every drawing. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from psctl.grouping import grouped
from psctl.topology.graph import bonded
from psctl.types import Document
from psctl.units import format_bit_rate, format_rate, format_seconds
from psctl.view.text import one_line

NETWORKS = ("Ethernet", "InfiniBand")
"""Types of edges whose rates are printed in bits."""

KIND_NAMES = {"cpu": "processor", "gpu": "GPU", "nic": "NIC", "switch": "switch"}
"""Names of devices of which only the kind is known."""

_NUMBERED = re.compile(r"(.*?)([0-9]+)")


def format_link_rate(bandwidth: object, kind: str = "") -> str:
    """Return bytes/s as text: in Gbit/s for networks, in GB/s otherwise, "" when unknown."""
    if not isinstance(bandwidth, int | float) or not bandwidth > 0:
        return ""
    return format_bit_rate(bandwidth) if kind in NETWORKS or kind == "nic" else format_rate(bandwidth)


def format_memory(count: object) -> str:
    """Return a size of memory as text: "80 GiB", "512 MiB"; "" when unknown."""
    if not isinstance(count, int | float) or not count > 0:
        return ""
    value, unit = (count / 2**30, "GiB") if count >= 2**30 else (count / 2**20, "MiB")
    return f"{value:,.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}".replace(".0 ", " ")


def device_details(device: Document, slot: Document | None = None) -> list[str]:
    """Return the details of a device without its id.

    Args:
        device: the device.
        slot: the edge drawn beside it, whose rate is not repeated.
    """
    name, kind = one_line(device.get("name") or ""), str(device["kind"])
    numa = device.get("numa")
    parts = [f"NUMA {numa}"] if kind == "cpu" and numa is not None else []
    parts += [name] if name and name != device["id"] else [KIND_NAMES.get(kind, kind)] if kind == "switch" else []
    if device.get("cores"):
        parts.append(f"{device['cores']} cores")
    parts.append(format_memory(device.get("memory")))
    parts.append(one_line(device.get("interface") or "") if device.get("interface") != device["id"] else "")
    parts += [one_line(address) for address in device.get("addresses") or []]
    port = format_link_rate(device.get("bandwidth"), "nic")
    parts.append(f"port {port}" if port and not (slot and slot["type"] in NETWORKS) else "")
    return [part for part in parts if part]


def host_summary(host: Document) -> list[str]:
    """Return a summary of a host: cores, memory, numbers of GPUs and NICs, labels."""
    devices = host.get("devices") or []
    gpus = [device for device in devices if device["kind"] == "gpu"]
    nics = sum(device["kind"] == "nic" for device in devices)
    names = {one_line(gpu.get("name") or "") for gpu in gpus}
    alike = f" {names.pop()}" if len(names) == 1 else ""
    parts = [f"{host['cores']} cores"] if host.get("cores") else []
    parts.append(format_memory(host.get("memory")))
    parts.append(f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}{alike.rstrip()}")
    parts.append(f"{nics} NIC{'s' * (nics != 1)}")
    parts += [f"{one_line(k)}={one_line(v)}" for k, v in (host.get("labels") or {}).items()]
    return [part for part in parts if part]


def id_ranges(ids: Iterable[str]) -> str:
    """Return ids with runs of numbers as ranges: "GPU0-GPU7", "GPU0, GPU2-GPU4"."""
    runs: list[list[str]] = []
    for name in ids:
        if runs and _is_next(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    return ", ".join(parts)


def _is_next(a: str, b: str) -> bool:
    first, second = _NUMBERED.fullmatch(a), _NUMBERED.fullmatch(b)
    return bool(first and second and first[1] == second[1] and int(first[2]) + 1 == int(second[2]))


def rate_source(link: Document) -> str:
    """Return the source of a rate: measured, derived, or nominal."""
    return "measured" if link.get("measured") else "derived" if link.get("derived") else "nominal"


def link_text(link: Document) -> str:
    """Return a link's type and rate: "NV2 50 GB/s", "PCIe 16 GB/s"."""
    return " ".join(filter(None, (one_line(link["type"]), format_link_rate(link.get("bandwidth"), str(link["type"])))))


def _family_text(link: Document) -> str:
    """Return a link's text for a list of its family: "NV2 50 GB/s", "20 GB/s, derived"."""
    carried = format_link_rate(link.get("bandwidth"), str(link["type"]))
    parts = link_text(link) if link_family(link) != link["type"] else carried or "rate not known"
    sure = rate_source(link)
    return parts if sure == "nominal" else f"{parts}, {sure}"


def link_title(link: Document) -> str:
    """Describe a link and its ends: "GPU0 - GPU1: NV2 50 GB/s, nominal"."""
    return f"{one_line(link['a'])} - {one_line(link['b'])}: {link_text(link)}, {rate_source(link)}"


def link_family(link: Document) -> str:
    """Return the family of a link: NVLink for NV1, NV2 and NVLink itself."""
    return "NVLink" if bonded(str(link["type"])) else one_line(link["type"])


def cable_lines(cables: Sequence[Document], hubs: Sequence[Document]) -> list[tuple[str, list[str]]]:
    """Describe which devices cables connect, by family, in as few lines as possible.

    A hub with its devices is one line; so are devices of which every pair has an equal cable, and separate pairs;
    otherwise one line a device, its fastest cables first.

    Returns:
        (family, lines) in the order in which the families occur.
    """
    by_family = grouped((link_family(link), link) for link in cables)
    centres = {str(hub["id"]): hub for hub in hubs}
    return [(family, list(_family_lines(links, centres))) for family, links in by_family.items()]


def _family_lines(links: Sequence[Document], centres: Mapping[str, Document]) -> Iterable[str]:
    spokes: dict[tuple[str, str], list[str]] = {}
    direct = []
    for link in links:
        a, b = str(link["a"]), str(link["b"])
        if (b in centres) != (a in centres):
            hub, end = (b, a) if b in centres else (a, b)
            spokes.setdefault((hub, _family_text(link)), []).append(end)
        else:
            direct.append(link)
    for (hub, parts), ends in spokes.items():
        name = one_line(centres[hub].get("name") or "switch")
        each = "each " if len(ends) > 1 else ""
        yield f"{id_ranges(map(one_line, ends))} on {one_line(hub)} ({name}): {each}{parts}"
    if direct:
        yield from _pair_lines(direct)


def _pair_lines(links: Sequence[Document]) -> Iterable[str]:
    partners: dict[str, list[tuple[float, str, str]]] = {}
    for link in links:
        a, b, parts = str(link["a"]), str(link["b"]), _family_text(link)
        width = float(link.get("bandwidth") or 0) or bonded(str(link["type"]))
        partners.setdefault(a, []).append((width, parts, b))
        partners.setdefault(b, []).append((width, parts, a))
    ids, sorts = list(partners), {parts for found in partners.values() for _, parts, _ in found}
    whole = all(len({other for _, _, other in found}) == len(ids) - 1 for found in partners.values())
    if whole and len(sorts) == 1 and len(ids) > 2:
        yield f"{id_ranges(map(one_line, ids))}, every pair: {sorts.pop()}"
    elif all(len(found) == 1 for found in partners.values()):
        pairs: dict[str, list[str]] = {}
        for a, found in partners.items():
            _, parts, b = found[0]
            if ids.index(a) < ids.index(b):
                pairs.setdefault(parts, []).append(f"{one_line(a)} = {one_line(b)}")
        yield from (f"{', '.join(found)}: {parts}" for parts, found in pairs.items())
    else:
        yield from (_partner_line(key, found) for key, found in partners.items())


def _partner_line(id: str, found: Sequence[tuple[float, str, str]]) -> str:
    by_text: dict[tuple[float, str], list[str]] = {}
    for width, parts, other in found:
        by_text.setdefault((width, parts), []).append(one_line(other))
    ordered = sorted(by_text.items(), key=lambda item: -item[0][0])
    signs = ("=", "-", "..")
    pieces = [f"{signs[min(i, 2)]} {', '.join(others)} ({parts})" for i, ((_, parts), others) in enumerate(ordered)]
    return f"{one_line(id)} {' '.join(pieces)}"


def copy_lines(relations: Sequence[Document]) -> list[str]:
    """Describe the measured rates of copies between two devices, equal ones together."""
    copies = [{**link, "type": "copy", "measured": False} for link in relations if link.get("measured")]
    return list(_pair_lines(copies)) if copies else []


def format_latency(link: Document) -> str:
    """Return a latency as text, "" when unknown."""
    value = link.get("latency")
    return format_seconds(float(value)) if isinstance(value, int | float) else ""


def worker_lines(host: Document) -> list[str]:
    """Return the GPU and NIC of each worker of a host; nothing where there is no choice."""
    found = []
    for worker in host.get("workers") or []:
        near = [f"NUMA {worker['numa']}"] if worker.get("numa") is not None else []
        parts = [one_line(part) for part in (worker.get("gpu"), worker.get("nic")) if part] + near
        if worker.get("gpu") and worker.get("nic"):
            found.append(f"{worker['rank']}: {', '.join(parts)}")
    return found


def findings(host: Document) -> list[tuple[str, str]]:
    """Return the problems of a host with their cures; the error of a failed host is the first."""
    found = []
    error = host.get("error")
    if isinstance(error, Mapping):
        inner = error.get("error", error)
        found.append((one_line(inner.get("message") or "failed"), one_line(inner.get("hint") or "")))
    elif error:
        found.append((one_line(error), ""))
    for problem in host.get("problems") or []:
        if isinstance(problem, Mapping):
            found.append((one_line(problem.get("what") or ""), one_line(problem.get("cure") or "")))
        else:
            found.append((one_line(problem), ""))
    return found
