"""What a probe found out about one host, as frozen values."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from psctl.topology.findings import Finding
from psctl.topology.readings import Reading
from psctl.words import HostName

__all__ = ["Device", "Finding", "Gpu", "HostFacts", "Nic", "NicKind", "NumaNode", "devices", "host_document"]

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
    """A GPU that the driver answers for."""

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
    """One host as its probe saw it. Fields are 0, "" or None where the host did not say."""

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
    time: float | None  # seconds since the epoch, when it was asked
    default_interface: str  # of the default route
    connected: str  # the address of this host that its SSH connection came in at
    boot: str = ""  # the kernel's boot id: hosts that share it share a kernel
    sockets: int = 0  # processors that one could pull out
    readings: tuple[Reading, ...] = ()  # what its tools said of its topology, as recognise.read reads a saved file


class Device(msgspec.Struct, frozen=True):
    """A device as `topo -o json` prints it; what follows `numa` is for people."""

    id: str
    kind: Literal["gpu", "nic", "cpu", "switch"]
    numa: int | None
    name: str = ""
    cores: int | None = None
    memory: int | None = None
    addresses: tuple[str, ...] | None = None
    bandwidth: float | None = None


def devices(facts: HostFacts) -> tuple[Device, ...]:
    """Return the host's processors, GPUs, and the interfaces that can carry gradients (up, no loopback, no bridge)."""
    found = [Device(f"CPU{node.index}", "cpu", node.index, facts.cpu, node.cores) for node in facts.numa]
    if not found:
        found = [Device("CPU0", "cpu", None, facts.cpu, facts.cores, facts.memory)]
    found += [Device(f"GPU{gpu.index}", "gpu", gpu.numa, gpu.name, memory=gpu.memory) for gpu in facts.gpus]
    for nic in facts.nics:
        if nic.up and nic.addresses and nic.kind in ("physical", "virtual"):
            found.append(Device(nic.name, "nic", nic.numa, nic.driver, addresses=nic.addresses, bandwidth=nic.speed))
    return tuple(found)


def host_document(name: HostName, facts: HostFacts) -> dict[str, Any]:
    """Return the host as an entry of `topo -o json`'s `hosts`; links between devices are not known in this version."""
    listed = []
    for device in devices(facts):
        body = {key: value for key, value in msgspec.to_builtins(device).items() if value not in (None, "")}
        listed.append({"id": device.id, "kind": device.kind, "numa": device.numa} | body)
    findings = [msgspec.to_builtins(finding) for finding in facts.findings]
    about = {"cores": facts.cores, "memory": facts.memory, "problems": findings}
    return {"name": name, "devices": listed, "links": []} | about
