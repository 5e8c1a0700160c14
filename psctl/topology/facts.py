"""What a probe found out about one host, as frozen values."""

from __future__ import annotations

from typing import Literal

import msgspec

from psctl.topology.findings import Finding
from psctl.topology.readings import Reading

NicKind = Literal["physical", "virtual", "bridge", "loopback"]


class Nic(msgspec.Struct, frozen=True):
    """A network interface. `addresses` are numeric with their prefix length, IPv4 first: "10.0.0.5/24"."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    mtu: int | None = None
    speed: float | None = None  # nominal, bytes/s in each direction; None where the driver does not say
    driver: str = ""
    kind: NicKind = "physical"
    numa: int | None = None


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that the driver reports."""

    index: int
    name: str
    memory: int  # bytes
    driver: str
    bus: str  # PCI address: "0000:3b:00.0"
    numa: int | None = None


class NumaNode(msgspec.Struct, frozen=True):
    """A processor with memory of its own."""

    index: int
    cores: int
    cpus: str = ""  # their numbers as the kernel lists them: "0-15,32-47"


class HostFacts(msgspec.Struct, frozen=True):
    """The facts of one host. Fields are 0, "" or None where the probe found none."""

    hostname: str
    kernel: str
    machine: str  # x86_64, aarch64
    cores: int  # that a process may use
    cpu: str  # the processor's name
    numa: tuple[NumaNode, ...]
    memory: int  # bytes, the container's limit where there is one
    memory_available: int  # bytes
    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    findings: tuple[Finding, ...]
    disk_free: int | None  # bytes, where the home folder lies
    time: float | None  # seconds since the epoch, of the probe
    default_interface: str  # of the default route
    connected: str  # the address of this host that its SSH connection came in at
    boot: str = ""  # the kernel's boot id: hosts that share it share a kernel
    netns: str = ""  # its network namespace; containers on one kernel may have equal addresses and no route between
    sockets: int = 0  # physical processors
    readings: tuple[Reading, ...] = ()  # its tools' outputs, read as saved files are
