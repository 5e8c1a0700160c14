"""A machine and a cluster as graphs: devices, the cables and slots between them, and what a matrix says of pairs.

One list has two kinds of links, as `topo -o json` prints them. An *edge* is a cable or a slot: full duplex, its
bandwidth holds in each direction and is shared by all flows across it. A *relation* is a pair's word in a
matrix (PIX, SYS, NV12 through a switch ...): its bandwidth is that of the pair alone, not a capacity.
Paths and capacities are found on edges only. Between hosts everything is an edge; its ends are hosts, or network
switches by any name.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from psctl.topology.findings import Finding

DeviceKind = Literal["gpu", "nic", "cpu", "switch"]

EDGE_TYPES = frozenset({"PCIe", "NVLink", "xGMI", "SMP", "Ethernet", "InfiniBand"})
"""Types of edges; NVn that is not switched is one too. SMP joins the processors of a machine (QPI, UPI and their kin;
where it is known to be AMD's, xGMI)."""

NETWORK = "network"
"""The switch that all hosts hang on where nothing more is known of the network."""

_BONDED = re.compile(r"NV([1-9][0-9]?)")


class Device(msgspec.Struct, frozen=True):
    """A device of a host. `id` is the word that the machine's own output uses: GPU0, NIC0, mlx5_0, eth0, CPU0, SW0."""

    id: str
    kind: DeviceKind
    numa: int | None = None
    name: str = ""  # for people: "NVIDIA A100-SXM4-80GB", "mlx5_0", "PCIe switch", "NVSwitch"
    derived: bool = False  # no output lists it: it follows from what was said of others
    bus: str = ""  # PCI address: "0000:3b:00.0"
    cores: int | None = None
    memory: int | None = None  # bytes
    interface: str = ""  # of a nic: its network interface
    addresses: tuple[str, ...] = ()
    bandwidth: float | None = None  # of a nic: its port, payload bytes/s in each direction


class Link(msgspec.Struct, frozen=True):
    """An edge or a relation between two devices of one host.

    `bandwidth` is payload bytes/s in each direction, 0.0 where nothing is known. `switched` is set for NVn alone.
    `derived`: it follows from a matrix; nothing lists it.
    """

    a: str
    b: str
    type: str
    bandwidth: float = 0.0
    latency: float | None = None  # seconds one way
    switched: bool | None = None
    measured: bool = False
    derived: bool = False

    @property
    def edge(self) -> bool:
        """Whether it is a cable or a slot, with a capacity; else it only describes a pair."""
        return self.type in EDGE_TYPES or (bonded(self.type) > 0 and self.switched is False)

    @property
    def width(self) -> int:
        """Number of NVLinks bonded; 0 for all other links."""
        return bonded(self.type)

    @property
    def ends(self) -> frozenset[str]:
        """Both devices."""
        return frozenset((self.a, self.b))


class HostGraph(msgspec.Struct, frozen=True):
    """The devices and links inside one host, and its problems."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def edges(self) -> tuple[Link, ...]:
        """The cables and slots."""
        return tuple(link for link in self.links if link.edge)

    @property
    def relations(self) -> tuple[Link, ...]:
        """What a matrix says of pairs."""
        return tuple(link for link in self.links if not link.edge)

    def of_kind(self, kind: DeviceKind) -> tuple[Device, ...]:
        """Return the devices of a kind, in their order."""
        return tuple(device for device in self.devices if device.kind == kind)

    def device(self, id: str) -> Device | None:
        """Return the device of this id."""
        return next((device for device in self.devices if device.id == id), None)


class Between(msgspec.Struct, frozen=True):
    """A cable between two hosts, or a host and a network switch, or two switches: an edge.

    `via` is the id of the nic of host `a` that it leaves through, "" where that is not known.
    """

    a: str
    b: str
    bandwidth: float | None = None  # payload bytes/s in each direction; None: not known
    latency: float | None = None  # seconds one way
    measured: bool = False
    via: str = ""
    type: str = "Ethernet"


class HostNode(msgspec.Struct, frozen=True):
    """A host as a member of a cluster."""

    name: str
    graph: HostGraph
    labels: dict[str, str] = {}
    roles: tuple[str, ...] = ("worker", "server")


class ClusterGraph(msgspec.Struct, frozen=True):
    """Hosts, and the cables between them."""

    hosts: tuple[HostNode, ...]
    between: tuple[Between, ...] = ()

    def host(self, name: str) -> HostNode | None:
        """Return the host of this name."""
        return next((host for host in self.hosts if host.name == name), None)


class Suggestion(msgspec.Struct, frozen=True):
    """Which strategy suits a topology, as `topo -o json`'s `strategy`.

    `groups` holds the device ids of each ring in order; behind a host's name and "/" where there are several hosts.
    `shares` is the part of the bytes that each group carries, as long as `groups`, summing to 1. For packed trees,
    `trees` holds the (parent, child) edges of each group's tree from its root outwards.
    """

    name: str
    reason: str
    groups: tuple[tuple[str, ...], ...] = ()
    shares: tuple[float, ...] = ()
    trees: tuple[tuple[tuple[str, str], ...], ...] = ()


def bonded(word: str) -> int:
    """Return the number of NVLinks of a matrix's word: 12 for NV12; 0 for another word."""
    match = _BONDED.fullmatch(word)
    return int(match[1]) if match else 0
