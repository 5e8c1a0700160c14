"""The facts that a probe found about one host, as frozen values."""

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
    speed: float | None = None  # nominal, bytes/s in each direction; None where the driver does not report it
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
    cpus: str = ""  # numbers of the cores as the kernel lists them: "0-15,32-47"


class HostFacts(msgspec.Struct, frozen=True):
    """The facts of one host. Unknown facts are 0, "" or None."""

    machine: str  # x86_64, aarch64
    cores: int  # available to a process
    cpu: str  # name of the processor
    numa: tuple[NumaNode, ...]
    memory: int  # bytes; the container's limit where there is one
    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    findings: tuple[Finding, ...]
    time: float | None  # of the probe, seconds since the epoch
    default_interface: str  # interface of the default route
    connected: str  # the address of this host to which psctl's SSH connection leads
    boot: str = ""  # boot id of the kernel: hosts with the same id share a kernel
    netns: str = ""  # network namespace: containers on one kernel may have equal addresses and no route between them
    sockets: int = 0  # physical processors
    readings: tuple[Reading, ...] = ()  # the outputs of its tools, read like saved files
