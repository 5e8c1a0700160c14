"""The contents of each command's output, as frozen values that are independent of files, hosts and other outputs.

Every reader is `read_X(text) -> Reading`; it never raises on what a machine may print. What could not be read, is cut,
or contradicts itself is in `findings`, for people; a value that was not read is missing.
"""

from __future__ import annotations

import msgspec

from psctl.topology.findings import Finding


class Affinity(msgspec.Struct, frozen=True):
    """The processors that a device is near, as the matrix words them; "" where it does not say."""

    cpus: str = ""  # "0-19,40-59"
    numa: str = ""  # "0", "0-1", "N/A"
    gpu_numa: str = ""  # the node that the GPU's own memory is, "N/A" for most


class Matrix(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi topo -m`, or another matrix of the same making: one word a pair of devices.

    `devices` in the order of the columns, by the words of the header: GPU0, GPU0/GI0, NIC0, mlx5_0. `words` has every
    cell that was read, by (row, column), as it stands: "NV12", "SYS", "X" left out. `legend` maps NIC0 to mlx5_0 where
    the output does; `meanings` the words to what the output itself says of them.
    """

    devices: tuple[str, ...]
    words: dict[tuple[str, str], str]
    affinity: dict[str, Affinity] = {}
    legend: dict[str, str] = {}
    meanings: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()


class PeerMatrix(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi topo -p2p r`: OK, NS, CNS, GNS, TNS, DR, U ... by (row, column)."""

    devices: tuple[str, ...]
    words: dict[tuple[str, str], str]
    findings: tuple[Finding, ...] = ()


class NvlinkGpu(msgspec.Struct, frozen=True):
    """A GPU of `nvidia-smi nvlink -s`: its links in order, bytes/s in one direction each, None for one that is down."""

    index: int
    name: str
    uuid: str
    links: tuple[float | None, ...]


class NvlinkStatus(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi nvlink -s`."""

    gpus: tuple[NvlinkGpu, ...]
    findings: tuple[Finding, ...] = ()


class GpuRow(msgspec.Struct, frozen=True):
    """A GPU of `nvidia-smi --query-gpu=... --format=csv`; None or "" for what was not asked or is N/A."""

    index: int
    name: str = ""
    uuid: str = ""
    memory: int | None = None  # bytes
    driver: str = ""
    bus: str = ""  # "0000:3b:00.0"
    generation: int | None = None  # of PCIe, now
    generation_max: int | None = None
    width: int | None = None  # lanes, now
    width_max: int | None = None
    mig: bool | None = None
    persistence: bool | None = None


class GpuTable(msgspec.Struct, frozen=True, tag=True):
    """`nvidia-smi --query-gpu=...`."""

    gpus: tuple[GpuRow, ...]
    findings: tuple[Finding, ...] = ()


class PciDevice(msgspec.Struct, frozen=True):
    """A PCI function and the slot it sits in. `path` are the addresses of the bridges above it, the root port first."""

    address: str  # "0000:3b:00.0"
    pci_class: int | None = None  # 0x030200 -> 0x0302
    vendor: int | None = None
    device: int | None = None
    name: str = ""
    path: tuple[str, ...] = ()
    speed: float | None = None  # GT/s a lane, now
    speed_max: float | None = None
    width: int | None = None  # lanes, now
    width_max: int | None = None
    numa: int | None = None


class PciTree(msgspec.Struct, frozen=True, tag=True):
    """lspci or /sys/bus/pci: bridges and devices."""

    devices: tuple[PciDevice, ...]
    findings: tuple[Finding, ...] = ()


class RdmaPort(msgspec.Struct, frozen=True):
    """A port of /sys/class/infiniband: "mlx5_0", port 1, its nominal rate, and the interface that it shows as."""

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
    """`rocm-smi --showtopo`, `amd-smi topology`: weight, hops and link type ("XGMI", "PCIE") a pair, a node a GPU."""

    devices: tuple[str, ...]  # GPU0 ...
    types: dict[tuple[str, str], str]
    weights: dict[tuple[str, str], int] = {}
    hops: dict[tuple[str, str], int] = {}
    numa: dict[str, int] = {}
    bandwidths: dict[tuple[str, str], float] = {}  # bytes/s in one direction, where the driver tells
    buses: dict[str, str] = {}  # GPU0 -> "0000:0c:00.0", from amd-smi
    findings: tuple[Finding, ...] = ()


class NcclGpu(msgspec.Struct, frozen=True):
    """A gpu element of an NCCL or RCCL topology file: its links by the target's PCI address."""

    dev: int
    bus: str
    sm: int | None = None
    nvlinks: tuple[tuple[str, int, int | None], ...] = ()  # target address, count, class of the target (0x0680: switch)
    xgmis: tuple[tuple[str, int], ...] = ()


class NcclNet(msgspec.Struct, frozen=True):
    """A net element: a NIC by its name, its nominal speed, and the PCI slot that it sits in ("" when under none)."""

    name: str
    speed: float | None  # bytes/s in one direction
    bus: str = ""
    numa: int | None = None


class NcclTopology(msgspec.Struct, frozen=True, tag=True):
    """An NCCL topology file: its PCI tree, GPUs and NICs. `cpus` are the numaid values with vendor words."""

    pci: tuple[PciDevice, ...]
    gpus: tuple[NcclGpu, ...]
    nets: tuple[NcclNet, ...]
    cpus: dict[int, str] = {}
    findings: tuple[Finding, ...] = ()


class FailedOutput(msgspec.Struct, frozen=True, tag=True):
    """The output of a command that printed errors instead of an answer, or could not be found."""

    findings: tuple[Finding, ...]


class UnknownOutput(msgspec.Struct, frozen=True, tag=True):
    """Text without any known output; `first` is its first line that is not blank."""

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
