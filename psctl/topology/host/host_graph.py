"""Builds the graph of a host from all its outputs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from psctl.topology import rates
from psctl.topology.facts import HostFacts
from psctl.topology.findings import Finding
from psctl.topology.graph import Device, HostGraph, Link, bonded
from psctl.topology.host import health, inventory, nvlinks, pcie_derivation, pcie_tree, sockets
from psctl.topology.host.inventory import HostReadings
from psctl.topology.host.paths import Router
from psctl.topology.host.pcie_derivation import Pair, PcieBranch
from psctl.topology.readings import Reading

LinkTypes = dict[tuple[str, str], str]
"""The link type of each pair as an output prints it ("NV12", "PIX"), once a pair, in the order of the devices."""

SWITCH_CLASS = 0x0680
"""PCI class of an NVSwitch in NCCL's files."""

_PLACES = Finding(
    "`nvidia-smi nvlink -s` counts each GPU's links and does not show where they lead: no link is drawn",
    "save the output of `nvidia-smi topo -m` in the same folder, and give the folder",
)


def build_host_graph(readings: Sequence[Reading], facts: HostFacts | None = None) -> HostGraph:
    """Join the readings of one host into one graph.

    Args:
        readings: one of each output, in any order.
        facts: further facts that the probe found; None for saved outputs.

    Returns:
        Devices, edges, relations and problems. Every pair of a matrix is present once, with its link type; devices and
        links that no output lists are marked as derived. No output of a machine raises an error. A host with more
        devices than any real machine is returned without devices, with a finding.
    """
    all_ = inventory.sort_readings(readings, facts)
    if (excess := inventory.excess(all_)) is not None:
        return HostGraph((), (), (excess, *all_.findings))
    gpus, nics = inventory.gpus(all_), inventory.nics(all_)
    order = {ident: index for index, ident in enumerate(all_.matrix.devices)}
    ends = sorted(gpus + nics, key=lambda device: order.get(device.id, len(order)))
    types = _link_types(all_, [device.id for device in ends])
    if inventory.places_unknown(all_):
        places = (_PLACES,) if len(gpus) > 1 else ()
        graph = HostGraph(tuple(ends), (), ())
        return msgspec.structs.replace(graph, findings=(*all_.findings, *health.findings(all_, graph), *places))
    switches, cpus, slots, doubts = _slots(all_, ends, _levels(all_, types))
    virtual = {nic.name: nic.speed for nic in (facts.nics if facts else ()) if nic.kind == "virtual"}
    fabric, bundles = _bundles(all_, types, ends)
    slots = [_without_slot(link, virtual) for link in slots]
    devices = [*cpus, *switches, *fabric, *ends]
    edges = [*bundles, *_coherent(gpus, slots, cpus), *slots, *_between(cpus)]
    pairs = {frozenset(pair) for pair in types}
    rest = (link for link in edges if link.ends not in pairs)
    graph = HostGraph(tuple(devices), (*_pairs(types, devices, edges), *rest))
    found = [*(facts.findings if facts else ()), *all_.findings, *doubts, *health.findings(all_, graph)]
    return msgspec.structs.replace(graph, findings=tuple(dict.fromkeys(found)))


def _link_types(all_: HostReadings, ids: Sequence[str]) -> LinkTypes:
    """Return the link type of each pair that an output has one for: from the matrix's row, else its column."""
    printed = all_.matrix.words
    nccl = _counted(all_)
    types: LinkTypes = {}
    for a, b in itertools.combinations(ids, 2):
        word = printed.get((a, b)) or printed.get((b, a)) or all_.rocm.types.get((a, b)) or all_.rocm.types.get((b, a))
        word = word or nccl.get(frozenset((a, b)))
        if word:
            types[a, b] = word
    return types


def _levels(all_: HostReadings, types: LinkTypes) -> dict[Pair, int]:
    """Return distances by PCIe; a pair for which two matrices or two rows differ has none."""
    levels: dict[Pair, int] = {}
    for matrix in reversed(all_.matrices):
        levels |= pcie_derivation.levels_of(matrix.words)
    for a, b in types:
        both = [all_.matrix.words[pair] for pair in ((a, b), (b, a)) if pair in all_.matrix.words]
        if len(set(both)) > 1:
            levels.pop(frozenset((a, b)), None)
    return levels


def _counted(all_: HostReadings) -> dict[Pair, str]:
    """Return NVn for each pair of GPUs of an NCCL file: direct links, or links of both to a switch."""
    at = {gpu.bus: f"GPU{gpu.dev}" for gpu in all_.nccl.gpus}
    found: dict[Pair, str] = {}
    ports: dict[str, int] = {}
    for gpu in all_.nccl.gpus:
        for target, count, sort in gpu.nvlinks:
            if target in at and at[target] != at[gpu.bus]:
                found[frozenset((at[gpu.bus], at[target]))] = f"NV{count}"
            elif sort == SWITCH_CLASS:
                ports[at[gpu.bus]] = ports.get(at[gpu.bus], 0) + count
    for a, b in itertools.combinations(ports, 2):
        found.setdefault(frozenset((a, b)), f"NV{min(ports[a], ports[b])}")
    return found


def _slots(
    all_: HostReadings, ends: Sequence[Device], levels: Mapping[Pair, int]
) -> tuple[list[Device], list[Device], list[Link], list[Finding]]:
    """Return PCIe switches, processors, the slots between them, and findings on contradictions in the matrix."""
    ids = [device.id for device in ends]
    tops, doubts = _tops(all_, ends, levels)
    place = {ident: index for index, ident in enumerate(ids)}
    tops.sort(key=lambda top: min(place[leaf] for leaf in top.leaves))
    numa = {device.id: device.numa for device in ends if device.numa is not None}
    by_cores = {} if numa else sockets.by_cores(all_.matrix.affinity)
    known = inventory.cpus(all_)
    cpus, on = sockets.place(tops, numa or by_cores, levels, known, nodes=bool(numa))
    default = {ident: rate for ident in ids if (rate := _table_rate(all_, ident))}
    switches: list[Device] = []
    links: list[Link] = []
    for top, cpu in zip(tops, on, strict=True):
        _name(top, cpu, default, switches, links)
    return switches, cpus, links, doubts


def _tops(
    all_: HostReadings, ends: Sequence[Device], levels: Mapping[Pair, int]
) -> tuple[list[PcieBranch], list[Finding]]:
    """Return the branches at the processors: as the host lists them, else derived from the link types of the matrix."""
    listed = {function.address for function in all_.functions if all_.rooted or pcie_tree.rooted(function)}
    slots = {device.id: device.bus for device in ends if device.bus in listed}
    tops = pcie_tree.tree(all_.functions, slots)
    placed = list(slots)
    rest = []
    for device in ends:
        if device.id in slots:
            continue
        near = [ident for ident in placed if _distance(device.id, ident, levels) <= pcie_derivation.PXB]
        if near:
            neighbour = min(near, key=lambda ident: _distance(device.id, ident, levels))
            tops = pcie_tree.hang(tops, device.id, neighbour)
            placed.append(device.id)
        else:
            rest.append(device.id)
    within = {pair: level for pair, level in levels.items() if pair <= set(rest)}
    derived, doubts = pcie_derivation.tree(rest, within)
    return tops + derived, doubts


def _distance(a: str, b: str, levels: Mapping[Pair, int]) -> int:
    if a.partition("/")[0] == b.partition("/")[0]:
        return pcie_derivation.PIX
    return levels.get(frozenset((a, b)), pcie_derivation.SYS)


def _table_rate(all_: HostReadings, ident: str) -> float | None:
    """Return the rate of a GPU's slot by `--query-gpu`, which reports the fastest that both GPU and slot support."""
    row = all_.row(ident)
    speed = rates.speed_of(row.generation_max or row.generation) if row else None
    return rates.pcie(speed, row.width) if row and (speed or row.width) else None


def _name(
    branch: PcieBranch, above: str, default: Mapping[str, float], switches: list[Device], links: list[Link]
) -> float:
    """Name the switches of a branch, add its slots, and return the rate of its uplink."""
    ident = branch.id
    if branch.below:
        ident = f"SW{len(switches)}"
        switches.append(Device(ident, "switch", name=_title(branch), derived=branch.derived, bus=branch.bus))
    links.append(Link(ident, above, "PCIe"))  # reserves the place in the list before the links below it
    place = len(links) - 1
    below = [_name(one, ident, default, switches, links) for one in branch.below]
    rate = branch.rate or default.get(ident) or max(below, default=0.0) or rates.pcie()
    links[place] = Link(ident, above, "PCIe", rate, rates.latency("PCIe"), derived=branch.derived)
    return rate


def _title(branch: PcieBranch) -> str:
    """Return the displayed name of the switch or slot at which a branch divides."""
    if branch.name:
        return branch.name
    parents = {leaf.partition("/")[0] for leaf in branch.leaves}
    if len(parents) == 1:
        return f"slot of {parents.pop()}"  # its leaves are instances of one GPU
    return "PCIe switch" if any(map(inventory.is_gpu, branch.leaves)) else "PCIe card or switch"


def _without_slot(link: Link, virtual: Mapping[str, float | None]) -> Link:
    """Replace the slot of an interface without hardware by a link of the interface's own rate, where that is known."""
    if link.a not in virtual:
        return link
    rate = virtual[link.a]
    return Link(link.a, link.b, "Ethernet", rates.ethernet(rate) if rate else link.bandwidth, None, derived=True)


def _between(cpus: Sequence[Device]) -> list[Link]:
    """Return an edge between each two processors, since no output shows which of them are neighbours."""
    name = next((cpu.name for cpu in cpus if cpu.name), "")
    sort = "xGMI" if re.search(r"\b(AMD|EPYC|AuthenticAMD)\b", name) else "SMP"
    return [
        Link(one.id, other.id, sort, rates.smp(name), rates.latency("SMP"), derived=True)
        for one, other in itertools.combinations(cpus, 2)
    ]


def _coherent(gpus: Sequence[Device], slots: Sequence[Link], cpus: Sequence[Device]) -> Iterator[Link]:
    """Yield the NVLink-C2C edge between a GPU and its processor."""
    for gpu in gpus:
        rate = rates.coherent(gpu.name)
        cpu = next((link.b for link in slots if link.a == gpu.id and link.b in {one.id for one in cpus}), None)
        if rate and cpu:
            yield Link(gpu.id, cpu, "NVLink", rate, rates.latency("NVLink"), derived=True)


def _bundles(all_: HostReadings, types: LinkTypes, ends: Sequence[Device]) -> tuple[list[Device], list[Link]]:
    """Return NVSwitches, and the edges of NVLink and xGMI."""
    raw = {f"GPU{gpu.index}": next((link for link in gpu.links if link), None) for gpu in all_.nvlink.gpus}
    rate = {device.id: rates.nvlink(device.name, raw.get(device.id)) for device in ends}
    most: dict[str, int] = {}  # a GPU whose list is cut has as many as GPUs of the same model
    for gpu in all_.nvlink.gpus:
        most[gpu.name] = max(len(gpu.links), most.get(gpu.name, 0))
    count = {f"GPU{gpu.index}": most[gpu.name] for gpu in all_.nvlink.gpus}
    through = nvlinks.switched(types, count) | _through(all_, types)
    switches, ports = nvlinks.ports(types, through, rate)
    return switches, [*nvlinks.edges(types, through, rate), *ports, *_xgmi(all_, types, ends)]


def _through(all_: HostReadings, types: LinkTypes) -> frozenset[tuple[str, str]]:
    """Return the pairs that an NCCL file joins through a switch."""
    at = {gpu.bus for gpu in all_.nccl.gpus}
    on = {f"GPU{gpu.dev}" for gpu in all_.nccl.gpus if any(sort == SWITCH_CLASS for _, _, sort in gpu.nvlinks)}
    direct = {f"GPU{gpu.dev}" for gpu in all_.nccl.gpus if any(target in at for target, *_ in gpu.nvlinks)}
    return frozenset(pair for pair, word in types.items() if bonded(word) and set(pair) <= on - direct)


def _xgmi(all_: HostReadings, types: LinkTypes, ends: Sequence[Device]) -> Iterator[Link]:
    """Yield AMD's links: one where rocm-smi lists XGMI over one hop, else the count of an RCCL file."""
    names = {device.id: device.name for device in ends}
    at = {gpu.bus: f"GPU{gpu.dev}" for gpu in all_.nccl.gpus}
    counts = {
        frozenset((at[gpu.bus], at[target])): count
        for gpu in all_.nccl.gpus
        for target, count in gpu.xgmis
        if target in at and target != gpu.bus
    }
    for (a, b), word in types.items():
        hops = all_.rocm.hops.get((a, b), all_.rocm.hops.get((b, a), 1))
        if word.upper() == "XGMI" and hops <= 1:
            counts.setdefault(frozenset((a, b)), 1)
    for pair, count in counts.items():
        a, b = sorted(pair, key=inventory.natural)
        stated = all_.rocm.bandwidths.get((a, b), all_.rocm.bandwidths.get((b, a)))
        yield Link(a, b, "xGMI", stated or count * rates.xgmi(names.get(a, "")), rates.latency("xGMI"))


def _pairs(types: LinkTypes, devices: Sequence[Device], edges: Sequence[Link]) -> Iterator[Link]:
    """Yield each pair with a link type, in order: its edge, or a relation with the rate of its path."""
    direct = {link.ends: link for link in edges if link.type == "xGMI" or (bonded(link.type) and link.edge)}
    router = Router(devices, edges)
    for (a, b), word in types.items():
        if frozenset((a, b)) in direct:
            yield direct[frozenset((a, b))]
            continue
        path = router.pair(a, b, word)
        through = True if bonded(word) else None
        yield Link(a, b, word, path.bandwidth if path else 0.0, path.latency if path else None, through)


def with_copies(graph: HostGraph, copies: Sequence[Link]) -> HostGraph:
    """Return a host's graph with the measured rates of copies in place of nominal rates.

    A pair is measured while no other pair copies, so the measured rate belongs to its relation, or to the edge (NVn or
    a slot) that joins the two devices. A pair without a link gets a relation of type "copy". Copies between devices
    that the graph does not have are ignored.

    Args:
        graph: the devices and links inside the host.
        copies: measured links between its devices, each pair once.
    """
    known = {device.id for device in graph.devices}
    found = {copy.ends: copy for copy in copies if copy.ends <= known}
    links = [_measured(link, found[link.ends]) if link.ends in found else link for link in graph.links]
    linked = {link.ends for link in graph.links}
    return msgspec.structs.replace(graph, links=(*links, *(copy for ends, copy in found.items() if ends not in linked)))


def _measured(link: Link, copy: Link) -> Link:
    return msgspec.structs.replace(link, bandwidth=copy.bandwidth, latency=copy.latency, measured=True)
