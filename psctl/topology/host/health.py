"""Finds problems of a host in its outputs, each with its remedy.

Only symptoms that no healthy host has are reported: an idle GPU lowers its slot's speed, but not its width; a
management port is slow by design, but not if identical ports are faster; a card without a bridge has no NVLink up,
unless identical cards have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from psctl.grouping import grouped
from psctl.topology import rates
from psctl.topology.findings import Finding, listed
from psctl.topology.graph import Device, HostGraph, bonded
from psctl.topology.host.inventory import HostReadings, natural
from psctl.topology.host.pcie_derivation import LEVELS, PXB, SYS
from psctl.topology.readings import NvlinkGpu, PciDevice

_PEERS: dict[str, Finding] = {
    "NS": Finding(
        "not supported",
        "consumer cards without NVLink lack it by design (set NCCL_P2P_DISABLE=1); on others check the IOMMU and ACS "
        "in the BIOS, and whether a container or virtual machine hides the peer",
    ),
    "CNS": Finding(
        "the chipset is not supported",
        "switch ACS and the IOMMU off in the BIOS or on the kernel's command line, or put the GPUs below one switch",
    ),
    "GNS": Finding(
        "the GPU is not supported",
        "the driver does not offer it for these cards by design: copies go through the host's memory; set "
        "NCCL_P2P_DISABLE=1 so that NCCL does not try",
    ),
    "TNS": Finding(
        "this topology is not supported",
        "the GPUs are on processors or PCIe roots between which it does not work: put them below one processor, or "
        "pass the real PCIe tree to the virtual machine",
    ),
    "DR": Finding(
        "disabled by the driver's settings",
        "remove the key that disables it from /etc/modprobe.d (NVreg_RegistryDwords), and reload the driver",
    ),
    "U": Finding("unknown", "run nvidia-smi topo -p2p r on the host as root, and look for driver errors in dmesg"),
}
"""Codes of `nvidia-smi topo -p2p` -> their meaning and remedy."""

SLOW_PORT = 1.25e9
"""Nominal bytes/s; a port at or below it, where identical ports are much faster, has negotiated down."""


def findings(all_: HostReadings, graph: HostGraph) -> Iterator[Finding]:
    """Yield the problems of a host.

    Args:
        all_: its readings.
        graph: the graph built from them.
    """
    yield from _missing(all_, graph)
    yield from _slots(all_, graph)
    yield from _links(all_)
    yield from _fabric(all_, graph)
    yield from _peers(all_)
    yield from _mig(all_, graph)
    yield from _nics(all_, graph)
    yield from _ports(all_)
    yield from _places(graph)


def _missing(all_: HostReadings, graph: HostGraph) -> Iterator[Finding]:
    """Yield GPUs that one output has and another lacks, and functions of unknown class."""
    matrix = {ident.partition("/")[0] for ident in all_.matrix.devices if ident.startswith("GPU")}
    table = {f"GPU{row.index}" for row in all_.table.gpus}
    bare = [one.address for one in all_.functions if one.pci_class is None]
    if bare and not graph.of_kind("gpu"):
        yield Finding(
            f"{len(bare)} PCI functions have no class, so that it is not known which of them are GPUs: {_some(bare)}",
            "give the file that NCCL_TOPO_DUMP_FILE writes on the machine, or the output of lspci there",
        )
    if not matrix or not table:
        return
    cure = "look for Xid (fallen off the bus) in dmesg, then reset the GPU or power-cycle the host"
    if table - matrix:
        yield Finding(f"{_list(table - matrix)} is in the query, but not in the matrix", cure)
    if matrix - table:
        yield Finding(f"{_list(matrix - table)} is in the matrix, but not in the query", cure)


def _slots(all_: HostReadings, graph: HostGraph) -> Iterator[Finding]:
    """Yield GPUs with fewer lanes than supported, or in an older slot than GPUs of the same model."""
    functions = {one.address: one for one in all_.functions}
    best: dict[str, int] = {}
    for twin in all_.table.gpus:
        best[twin.name] = max(best.get(twin.name, 0), twin.generation_max or 0)
    for gpu in graph.of_kind("gpu"):
        row, function = all_.row(gpu.id), functions.get(gpu.bus)
        now = (row and row.width) or (function and function.width)
        most = (row and row.width_max) or (function and function.width_max)
        if now and most and now < most:
            yield Finding(
                f"{gpu.id} runs at x{now} instead of x{most}: {rates.pcie(None, now) / rates.pcie(None, most):.0%} "
                "of its PCIe bandwidth",
                "reseat the card, check its riser and how the BIOS splits the slot's lanes (an idle "
                "GPU lowers its speed, never its lanes, so this is permanent)",
            )
        if row and row.generation_max and row.generation_max < best[row.name]:
            yield Finding(
                f"{gpu.id} supports PCIe {row.generation_max}, but GPUs of its model support PCIe {best[row.name]}",
                "check the slot's generation in the BIOS, and the riser",
            )


def _links(all_: HostReadings) -> Iterator[Finding]:
    """Yield GPUs with fewer NVLinks up than GPUs of the same model."""
    # where the output only states that all are down, the reader reports it
    by_name = grouped((gpu.name, gpu) for gpu in all_.nvlink.gpus if gpu.links)
    cure = (
        "look for Xid 74 in dmesg and reset the GPU; reseat the bridge of cards with one; links are also down when "
        "the GPU at their other end is missing"
    )
    for name, twins in by_name.items():
        most = max(_up(gpu) for gpu in twins)
        count = max(len(gpu.links) for gpu in twins)
        for gpu in twins:
            if _up(gpu) < most:
                yield Finding(f"GPU{gpu.index}: {_up(gpu)} NVLinks are up, {most} on GPUs of the same model", cure)
        if most == 0 and "SXM" in name:
            yield Finding(
                f"no NVLink is up on {len(twins)} x {name}",
                "on machines with NVSwitch start nvidia-fabricmanager (of the driver's own version); else reset the "
                "GPUs; in a virtual machine they may be hidden",
            )
        elif 0 < most < count and len(twins) == 1:
            yield Finding(f"GPU{twins[0].index}: {most} of {count} NVLinks are up", cure)


def _up(gpu: NvlinkGpu) -> int:
    return sum(link is not None for link in gpu.links)


def _fabric(all_: HostReadings, graph: HostGraph) -> Iterator[Finding]:
    """Yield NVLinks that are up without a peer, and GPUs with fewer links to the switch than the others."""
    words = [word for matrix in all_.matrices for word in matrix.words.values()]
    gpus = [ident for ident in all_.matrix.devices if ident.startswith("GPU")]
    active = sum(_up(gpu) > 0 for gpu in all_.nvlink.gpus)
    if len(gpus) > 1 and active > 1 and words and not any(map(bonded, words)):
        yield Finding(
            f"NVLinks are up on {active} GPUs, yet the matrix joins no two of them by NVLink",
            "on machines with NVSwitch start nvidia-fabricmanager (of the driver's own version), then look again",
        )
    width: dict[str, int] = {}
    for link in graph.relations:
        for end in (link.a, link.b) if link.switched else ():
            width[end] = max(link.width, width.get(end, 0))
    narrow = {gpu for gpu, count in width.items() if count < max(width.values())}
    if narrow:
        yield Finding(
            f"{_list(narrow)} has fewer NVLinks to the switch than the other GPUs ({max(width.values())})",
            "look for Xid 74 in dmesg, then reset the GPU",
        )
    itself = {
        f"GPU{gpu.dev}" for gpu in all_.nccl.gpus if gpu.bus and any(target == gpu.bus for target, *_ in gpu.nvlinks)
    }
    if itself:
        yield Finding(
            f"the NVLinks of {_list(itself)} lead to itself in the topology file, so that its peers are not known",
            "a virtual machine hides them: save the output of nvidia-smi topo -m in the same folder",
        )


def _peers(all_: HostReadings) -> Iterator[Finding]:
    """Yield pairs of GPUs that cannot access each other's memory."""
    found: dict[str, list[str]] = {}
    for matrix in all_.peers:
        order = {ident: index for index, ident in enumerate(matrix.devices)}
        for (a, b), word in matrix.words.items():
            pair = f"{a}-{b}" if order.get(a, 0) < order.get(b, 0) else f"{b}-{a}"
            if word in _PEERS and pair not in found.setdefault(word, []):
                found[word].append(pair)
    for word, pairs in found.items():
        known = _PEERS[word]
        yield Finding(f"GPUs cannot copy to each other directly ({word}: {known.what}): {_some(pairs)}", known.cure)


def _mig(all_: HostReadings, graph: HostGraph) -> Iterator[Finding]:
    on = {f"GPU{row.index}" for row in all_.table.gpus if row.mig}
    on |= {gpu.id.partition("/")[0] for gpu in graph.of_kind("gpu") if "/" in gpu.id}
    if on:
        yield Finding(
            f"MIG is on for {_list(on)}: its instances reach no other by NVLink or P2P",
            "for training over several GPUs switch it off: nvidia-smi -i N -mig 0",
        )


def _nics(all_: HostReadings, graph: HostGraph) -> Iterator[Finding]:
    """Yield NICs with a slot slower than their port, and ports slower than those of the same driver."""
    functions = {one.address: one for one in all_.functions}
    for nic in graph.of_kind("nic"):
        function = functions.get(nic.bus)
        if function:
            yield from _nic_slot(nic, function)
    facts = all_.facts.nics if all_.facts else ()
    speeds = {one.name: one.speed for one in facts if one.up and one.speed and one.kind == "physical" and one.driver}
    driver = {one.name: one.driver for one in facts}
    for name, speed in speeds.items():
        twins = max(other for twin, other in speeds.items() if driver[twin] == driver[name])
        if speed <= SLOW_PORT and speed * 2 < twins:
            yield Finding(
                f"{name} runs at {_gigabits(speed)} Gbit/s, an identical one at {_gigabits(twins)}",
                "check its cable and transceiver, and the rate of the switch's port",
            )


def _nic_slot(nic: Device, function: PciDevice) -> Iterator[Finding]:
    now = rates.pcie(function.speed, function.width) if function.speed and function.width else None
    lanes = f"x{function.width} instead of x{function.width_max}" if _narrowed(function) else f"x{function.width}"
    if now and nic.bandwidth and now < nic.bandwidth:
        what = f"{nic.id}'s slot ({function.speed:g} GT/s, {lanes}) carries {now / 1e9:.1f} GB/s"
        yield Finding(f"{what}, its port {nic.bandwidth / 1e9:.1f} GB/s", "move the card to a wider or newer slot")
    elif nic.bandwidth is None and _narrowed(function):
        yield Finding(f"{nic.id} runs at {lanes}", "reseat the card, or move it to a wider slot")


def _narrowed(function: PciDevice) -> bool:
    return bool(function.width and function.width_max and function.width < function.width_max)


def _ports(all_: HostReadings) -> Iterator[Finding]:
    """Yield RDMA ports that are down, and ports slower than those of the same card model."""
    down = [f"{port.device}/{port.port}" for port in all_.rdma if not port.active]
    if down:
        yield Finding(
            f"RDMA ports are down: {_some(down)}",
            "if training is to use them, check cable, switch port and subnet manager; otherwise ignore this",
        )
    model = {one.address: (one.vendor, one.device) for one in all_.functions if one.device is not None}
    active = [(port, model[port.bus]) for port in all_.rdma if port.active and port.rate and port.bus in model]
    for port, kind in active:
        best = max(other.rate or 0.0 for other, same in active if same == kind)
        if port.rate and port.rate * 1.5 < best:
            yield Finding(
                f"{port.device} runs at {_gigabits(port.rate)} Gbit/s, an identical one at {_gigabits(best)}",
                "check its cable and transceiver, and the rate of the switch's port",
            )


def _places(graph: HostGraph) -> Iterator[Finding]:
    """Yield link types that contradict NUMA nodes; else GPUs with every NIC across processors."""
    levels = {link.ends: LEVELS[link.type] for link in graph.relations if link.type in LEVELS}
    above = {link.a: link.b for link in graph.edges if link.type == "PCIe"}
    one = [link for link in graph.relations if _root(link.a, above) == _root(link.b, above)]
    blind = [link for link in one if LEVELS.get(link.type) == SYS]
    split = [link for link in graph.relations if PXB < LEVELS.get(link.type, 0) < SYS and link not in one]
    if split:
        pairs = [f"{link.a}-{link.b}" for link in split]
        yield Finding(
            f"the matrix has {split[0].type} (within one NUMA node) for devices of different nodes: {_some(pairs)}",
            "the kernel and the driver report different nodes for devices (check the BIOS's NUMA settings): psctl uses "
            "the kernel's",
        )
    if blind:
        pairs = [f"{link.a}-{link.b}" for link in blind]
        yield Finding(
            f"the matrix has {blind[0].type} (across processors) for devices of one NUMA node: {_some(pairs)}",
            "virtual machines may show this, and may hide NUMA nodes: psctl uses the nodes; psctl topo --measure "
            "measures the rates of the links",
        )
        return
    nics = [nic.id for nic in graph.of_kind("nic")]
    far = [
        gpu.id
        for gpu in graph.of_kind("gpu")
        if (near := [level for nic in nics if (level := levels.get(frozenset((gpu.id, nic))))]) and min(near) == SYS
    ]
    if far:
        yield Finding(
            f"every NIC is across processors (SYS) from {_list(far)}",
            "put a NIC on their processor, or place workers that communicate with other hosts on the other GPUs",
        )


def _root(ident: str, above: Mapping[str, str]) -> str:
    while ident in above:
        ident = above[ident]
    return ident


def _gigabits(rate: float) -> str:
    return f"{rate * 8 / 1e9:g}"


def _some(items: Sequence[str]) -> str:
    return listed(items, 4)


def _list(items: Iterable[str]) -> str:
    return ", ".join(sorted(items, key=natural))
