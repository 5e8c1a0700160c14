"""Readings: the contents of each command's output, as frozen values independent of files, hosts and other outputs.

Every reader is `read_X(text) -> Reading`; no output of a machine raises an error. Values that could not be read, are
cut, or contradict others are missing and reported in `findings`.
"""

from __future__ import annotations

import msgspec

from psctl.topology.findings import Finding

NVIDIA, AMD = 0x10DE, 0x1002
"""PCI vendors of GPUs."""

BRIDGE = 0x0604
"""PCI class of PCI-to-PCI bridges, which include root ports and the ports of switches."""


class Affinity(msgspec.Struct, frozen=True):
    """The processors near a device, as the matrix prints them; "" where it does not."""

    cpus: str = ""  # "0-19,40-59"
    numa: str = ""  # "0", "0-1", "N/A"
    gpu_numa: str = ""  # the NUMA node of the GPU's own memory, "N/A" for most


class Matrix(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi topo -m`: one link type a pair of devices.

    `devices` are in the order of the columns, named as in the header: GPU0, GPU0/GI0, NIC0, mlx5_0. `words` has every
    cell that was read but X, as printed, by (row, column): "NV12", "SYS". `legend` maps NIC0 to mlx5_0 where the output
    does.
    """

    devices: tuple[str, ...]
    words: dict[tuple[str, str], str]
    affinity: dict[str, Affinity] = {}
    legend: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()


class PeerMatrix(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi topo -p2p r`: OK, NS, CNS, GNS, TNS, DR, U ... by (row, column)."""

    devices: tuple[str, ...]
    words: dict[tuple[str, str], str]
    findings: tuple[Finding, ...] = ()


class NvlinkGpu(msgspec.Struct, frozen=True):
    """A GPU of `nvidia-smi nvlink -s`: the rate of each link in order, bytes/s in one direction, None where down."""

    index: int
    name: str
    uuid: str
    links: tuple[float | None, ...]


class NvlinkStatus(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi nvlink -s`."""

    gpus: tuple[NvlinkGpu, ...]
    findings: tuple[Finding, ...] = ()


class GpuRow(msgspec.Struct, frozen=True):
    """A GPU of `nvidia-smi --query-gpu=... --format=csv`; fields that were not queried or are N/A are None or ""."""

    index: int
    name: str = ""
    uuid: str = ""
    memory: int | None = None  # bytes
    driver: str = ""
    bus: str = ""  # "0000:3b:00.0"
    generation: int | None = None  # current PCIe generation
    generation_max: int | None = None
    width: int | None = None  # current lanes
    width_max: int | None = None
    mig: bool | None = None
    persistence: bool | None = None


class GpuTable(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi --query-gpu=...`."""

    gpus: tuple[GpuRow, ...]
    findings: tuple[Finding, ...] = ()


class PciDevice(msgspec.Struct, frozen=True):
    """A PCI function and its slot. `path` holds the addresses of the bridges above it, the root port first."""

    address: str  # "0000:3b:00.0"
    pci_class: int | None = None  # 0x030200 -> 0x0302
    vendor: int | None = None
    device: int | None = None
    name: str = ""
    path: tuple[str, ...] = ()
    speed: float | None = None  # current GT/s a lane
    speed_max: float | None = None
    width: int | None = None  # current lanes
    width_max: int | None = None
    numa: int | None = None


class PciTree(msgspec.Struct, frozen=True, tag=True):
    """lspci or /sys/bus/pci: bridges and devices."""

    devices: tuple[PciDevice, ...]
    findings: tuple[Finding, ...] = ()


class RdmaPort(msgspec.Struct, frozen=True):
    """A port of /sys/class/infiniband: device "mlx5_0", port 1, its nominal rate, and its network interface."""

    device: str
    port: int
    rate: float | None = None  # nominal bytes/s in one direction; None when down or unknown
    active: bool = False
    layer: str = ""  # "InfiniBand" | "Ethernet"
    bus: str = ""
    interface: str = ""
    numa: int | None = None


class RdmaPorts(msgspec.Struct, frozen=True, tag=True):
    """All RDMA ports of a host."""

    ports: tuple[RdmaPort, ...]
    findings: tuple[Finding, ...] = ()


class RocmTopology(msgspec.Struct, frozen=True, tag=True):
    """`rocm-smi --showtopo`, `amd-smi topology`: hops and link type ("XGMI", "PCIE") a pair, a NUMA node a GPU."""

    devices: tuple[str, ...]  # GPU0 ...
    types: dict[tuple[str, str], str]
    hops: dict[tuple[str, str], int] = {}
    numa: dict[str, int] = {}
    bandwidths: dict[tuple[str, str], float] = {}  # bytes/s in one direction, where the driver reports it
    buses: dict[str, str] = {}  # GPU0 -> "0000:0c:00.0", from amd-smi
    findings: tuple[Finding, ...] = ()


class NcclGpu(msgspec.Struct, frozen=True):
    """A gpu element of an NCCL or RCCL topology file, with its links by the target's PCI address."""

    dev: int
    bus: str
    nvlinks: tuple[tuple[str, int, int | None], ...] = ()  # target address, count, class of the target (0x0680: switch)
    xgmis: tuple[tuple[str, int], ...] = ()


class NcclNet(msgspec.Struct, frozen=True):
    """A net element: the name of a NIC, its nominal speed, and the address of its PCI slot ("" if it has none)."""

    name: str
    speed: float | None  # bytes/s in one direction
    bus: str = ""
    numa: int | None = None


class NcclTopology(msgspec.Struct, frozen=True, tag=True):
    """An NCCL topology file: its PCI tree, GPUs and NICs. `cpus` maps each numaid to the vendor's name."""

    pci: tuple[PciDevice, ...]
    gpus: tuple[NcclGpu, ...]
    nets: tuple[NcclNet, ...]
    cpus: dict[int, str] = {}
    findings: tuple[Finding, ...] = ()


class FailedOutput(msgspec.Struct, frozen=True, tag=True):
    """The output of a command that printed only errors or was not found."""

    findings: tuple[Finding, ...]


class UnknownOutput(msgspec.Struct, frozen=True, tag=True):
    """A text without any known output; `first` is its first line that is not blank."""

    first: str


Reading = (
    Matrix
    | PeerMatrix
    | NvlinkStatus
    | GpuTable
    | PciTree
    | RdmaPorts
    | RocmTopology
    | NcclTopology
    | FailedOutput
    | UnknownOutput
)
"""The kinds of output."""
