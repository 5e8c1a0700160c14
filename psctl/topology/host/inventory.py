"""The GPUs, NICs and processors of a host, from all its outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from psctl.topology import rates
from psctl.topology.facts import HostFacts, Nic
from psctl.topology.findings import Finding
from psctl.topology.graph import Device
from psctl.topology.host import pcie_tree
from psctl.topology.readings import (
    NVIDIA,
    GpuRow,
    GpuTable,
    Matrix,
    NcclNet,
    NcclTopology,
    NvlinkStatus,
    PciDevice,
    PciTree,
    PeerMatrix,
    RdmaPort,
    RdmaPorts,
    Reading,
    RocmTopology,
)

One = TypeVar("One")

MOST_GPUS = 128
"""GPUs of one host; a server has 16 at most, 64 where each of its eight is partitioned."""

MOST_NICS = 1024
"""NICs of one host, virtual functions included."""

MOST_FUNCTIONS = 8192
"""PCI functions of one host, virtual functions included."""

_GPU = re.compile(r"(GPU|MIG)[0-9]+(/.*)?")


class HostReadings(msgspec.Struct, frozen=True):
    """The readings of one host by kind; of outputs that should occur once, the most complete."""

    facts: HostFacts | None
    matrices: tuple[Matrix, ...]
    peers: tuple[PeerMatrix, ...]
    nvlink: NvlinkStatus
    table: GpuTable
    functions: tuple[PciDevice, ...]
    rooted: bool  # whether the functions come from a file that lists all relevant bridges
    rdma: tuple[RdmaPort, ...]
    rocm: RocmTopology
    nccl: NcclTopology
    findings: tuple[Finding, ...]

    @property
    def matrix(self) -> Matrix:
        """The matrix with the most NVLink pairs: another may show PCIe only (`topo -mp`)."""
        return self.matrices[0] if self.matrices else Matrix((), {})

    def row(self, ident: str) -> GpuRow | None:
        """Return the row of the GPU in `--query-gpu`."""
        return next((row for row in self.table.gpus if f"GPU{row.index}" == ident), None)


def sort_readings(readings: Sequence[Reading], facts: HostFacts | None) -> HostReadings:
    """Return a host's readings by kind."""
    nccl = _fullest(readings, NcclTopology, lambda one: len(one.pci)) or NcclTopology((), (), ())
    matrices = _of(readings, Matrix)
    trees = [one.devices for one in _of(readings, PciTree)]
    return HostReadings(
        facts=facts,
        matrices=tuple(sorted(matrices, key=lambda one: -sum(word.startswith("NV") for word in one.words.values()))),
        peers=tuple(_of(readings, PeerMatrix)),
        nvlink=NvlinkStatus(_unique((gpu for one in _of(readings, NvlinkStatus) for gpu in one.gpus), "index")),
        table=GpuTable(_unique((gpu for one in _of(readings, GpuTable) for gpu in one.gpus), "index")),
        functions=max(trees, key=lambda all_: (sum(one.width is not None for one in all_), len(all_)), default=())
        or nccl.pci,
        rooted=not any(trees),
        rdma=tuple(port for one in _of(readings, RdmaPorts) for port in one.ports),
        rocm=_fullest(readings, RocmTopology, lambda one: len(one.types)) or RocmTopology((), {}),
        nccl=nccl,
        findings=tuple(finding for one in readings for finding in getattr(one, "findings", ())),
    )


def is_gpu(ident: str) -> bool:
    """Return whether a name in a matrix's header is that of a GPU or of an instance of one."""
    return _GPU.fullmatch(ident) is not None


def gpu_ids(all_: HostReadings) -> list[str]:
    """Return the names of the GPUs: those of the matrix in its order, then those of the other outputs."""
    listed = [ident for ident in all_.matrix.devices if is_gpu(ident)]
    others = {
        *(ident for one in all_.matrices for ident in one.devices if is_gpu(ident)),
        *(ident for one in all_.peers for ident in one.devices),
        *all_.rocm.devices,
        *(f"GPU{row.index}" for row in all_.table.gpus),
        *(f"GPU{gpu.index}" for gpu in all_.nvlink.gpus),
        *(f"GPU{gpu.dev}" for gpu in all_.nccl.gpus),
        *(f"GPU{gpu.index}" for gpu in (all_.facts.gpus if all_.facts else ())),
    }
    if not listed and not others:
        others = {f"GPU{index}" for index, _ in enumerate(pcie_tree.gpus(all_.functions))}
    return listed + sorted(others - set(listed), key=natural)


def gpus(all_: HostReadings) -> list[Device]:
    """Return the GPUs, in the order of `gpu_ids`."""
    ids = gpu_ids(all_)
    buses = _buses(all_, ids)
    return [_gpu(ident, all_, buses.get(ident, "")) for ident in ids]


def excess(all_: HostReadings) -> Finding | None:
    """Return a finding where the outputs name more devices than one host can have, None where they do not.

    The time of later steps grows with the square of the devices or more, and the outputs may be hostile.
    """
    counts = {
        "GPUs": (len(gpu_ids(all_)), MOST_GPUS),
        "NICs": (len(all_.matrix.devices) + len(all_.rdma) + len(all_.nccl.nets), MOST_NICS),
        "PCI functions": (len(all_.functions), MOST_FUNCTIONS),
    }
    for sort, (count, most) in counts.items():
        if count > most:
            what = f"the outputs name {count:,} {sort}, more than the {most:,} that are read of one host"
            return Finding(what, "save the outputs of each host in a folder of its own")
    return None


def places_unknown(all_: HostReadings) -> bool:
    """Return whether only `nvlink -s` names GPUs: it counts links and does not show their ends."""
    elsewhere = (
        all_.facts,
        all_.matrices,
        all_.peers,
        all_.table.gpus,
        all_.functions,
        all_.rocm.devices,
        all_.nccl.gpus,
    )
    return bool(all_.nvlink.gpus) and not any(elsewhere)


def nics(all_: HostReadings) -> list[Device]:
    """Return the NICs: those of the matrix, then RDMA devices, then interfaces with addresses, each device once."""
    facts = {nic.name: nic for nic in (all_.facts.nics if all_.facts else ()) if _carries(nic)}
    ports = _unique(all_.rdma, "device")
    nets = {net.name: net for net in all_.nccl.nets}
    by_device = {port.device: port for port in ports}
    found: list[Device] = []
    names = _names(all_, [port.device for port in ports])
    for ident in (ident for ident in all_.matrix.devices if not is_gpu(ident)):
        name = names.get(ident, "")
        found.append(_nic(ident, name, by_device.pop(name, None), facts, nets.pop(name, None)))
    for port in by_device.values():
        ident = port.interface if port.interface in facts else port.device
        found.append(_nic(ident, port.device, port, facts, nets.pop(port.device, None)))
    joined = {nic.interface for nic in found}
    found += [
        _nic(name, "", None, {name: nic}, nets.pop(name, None)) for name, nic in facts.items() if name not in joined
    ]
    taken = {nic.id for nic in found}
    found += [_nic(net.name, net.name, None, {}, net) for net in nets.values() if net.name not in taken]
    if not found and not (all_.facts or all_.matrices):
        controllers = pcie_tree.nics(all_.functions)
        found = [Device(f"NIC{i}", "nic", one.numa, one.name, bus=one.address) for i, one in enumerate(controllers)]
    return found


def cpus(all_: HostReadings) -> list[Device]:
    """Return the processors that the host lists: one for each NUMA node with cores."""
    facts = all_.facts
    if facts is None:
        return [Device(f"CPU{numa}", "cpu", numa, name) for numa, name in sorted(all_.nccl.cpus.items()) if numa >= 0]
    if not facts.numa:
        return [Device("CPU0", "cpu", None, facts.cpu, cores=facts.cores, memory=facts.memory or None)]
    memory = facts.memory or None if len(facts.numa) == 1 else None
    return [
        Device(f"CPU{node.index}", "cpu", node.index, facts.cpu, cores=node.cores, memory=memory) for node in facts.numa
    ]


def natural(ident: str) -> tuple[str | int, ...]:
    """Return a sort key that puts GPU2 before GPU10."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", ident))


def _gpu(ident: str, all_: HostReadings, bus: str) -> Device:
    row = all_.row(ident)
    link = next((gpu for gpu in all_.nvlink.gpus if f"GPU{gpu.index}" == ident), None)
    fact = next((gpu for gpu in (all_.facts.gpus if all_.facts else ()) if f"GPU{gpu.index}" == ident), None)
    function = next((one for one in all_.functions if one.address == bus), None)
    numa = _number(all_.matrix.affinity[ident].numa) if ident in all_.matrix.affinity else None
    numa = _known(numa, function and function.numa, fact and fact.numa, all_.rocm.numa.get(ident))
    return Device(
        ident,
        "gpu",
        numa,
        name=(row.name if row else "") or (fact.name if fact else "") or (link.name if link else ""),
        bus=bus,
        memory=(row.memory if row else None) or (fact.memory or None if fact else None),
    )


def _buses(all_: HostReadings, ids: Sequence[str]) -> dict[str, str]:
    """Return the PCI address of each GPU. NVIDIA numbers its GPUs by address, so a list of equal length gives them."""
    found = {f"GPU{gpu.dev}": gpu.bus for gpu in all_.nccl.gpus} | all_.rocm.buses
    found |= {f"GPU{gpu.index}": gpu.bus for gpu in (all_.facts.gpus if all_.facts else ()) if gpu.bus}
    found |= {f"GPU{row.index}": row.bus for row in all_.table.gpus if row.bus}
    whole = [ident for ident in ids if "/" not in ident]
    cards = pcie_tree.gpus(all_.functions, NVIDIA) or pcie_tree.gpus(all_.functions)
    if not found and len(cards) == len(whole):
        found = {ident: card.address for ident, card in zip(sorted(whole, key=natural), cards, strict=True)}
    return found


def _names(all_: HostReadings, rdma: Sequence[str]) -> dict[str, str]:
    """Return the system's names of the matrix's NICs: by its legend, or by their order where the legend is cut off."""
    listed = [ident for ident in all_.matrix.devices if not is_gpu(ident)]
    own = {ident: ident for ident in listed if not re.fullmatch(r"NIC[0-9]+", ident)}
    if not own and not all_.matrix.legend and len(listed) == len(rdma):
        return dict(zip(listed, sorted(rdma, key=natural), strict=True))
    return own | all_.matrix.legend


def _nic(ident: str, name: str, port: RdmaPort | None, facts: Mapping[str, Nic], net: NcclNet | None) -> Device:
    interface = port.interface if port else ""
    fact = facts.get(interface) or facts.get(ident)
    bus, numa = (port.bus, port.numa) if port else ("", None)
    speed = net.speed if net else None
    bandwidth: float | None = None
    if port and port.rate:
        bandwidth = rates.infiniband(port.rate) if port.layer == "InfiniBand" else rates.ethernet(port.rate)
    elif (fact and fact.speed) or speed:
        bandwidth = rates.ethernet((fact.speed if fact else None) or speed or 0.0)
    return Device(
        ident,
        "nic",
        _known(fact and fact.numa, numa, net and net.numa),
        name=name or (fact.driver if fact else ""),
        bus=bus or (net.bus if net else ""),
        interface=interface or (fact.name if fact else ""),
        addresses=fact.addresses if fact else (),
        bandwidth=bandwidth,
    )


def _carries(nic: Nic) -> bool:
    return nic.up and bool(nic.addresses) and nic.kind in ("physical", "virtual")


def _known(*values: object) -> int | None:
    return next((value for value in values if isinstance(value, int)), None)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _of(readings: Iterable[Reading], sort: type[One]) -> list[One]:
    return [one for one in readings if isinstance(one, sort)]


def _fullest(readings: Iterable[Reading], sort: type[One], size: Callable[[One], int]) -> One | None:
    return max(_of(readings, sort), key=size, default=None)


def _unique(found: Iterable[One], key: str) -> tuple[One, ...]:
    """Return the first value of each key."""
    kept: dict[object, One] = {}
    for one in found:
        kept.setdefault(getattr(one, key), one)
    return tuple(kept.values())
