"""Hosts and clusters as graphs: devices, the cables and slots between them, and the link types of a matrix.

One list has two kinds of links, as `psctl topo -o json` prints them. An *edge* is a cable or a slot: full duplex, its
bandwidth holds in each direction and is shared by all flows across it. A *relation* is a pair's link type in a
matrix (PIX, SYS, NV12 through a switch ...): its bandwidth is that of the pair without other traffic, not a capacity.
Paths and capacities are found on edges only. All links between hosts are edges; their ends are hosts or network
switches, which may have any name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Iterable
from typing import Annotated, Literal, TypeVar

import msgspec

from psctl.grouping import grouped
from psctl.topology.findings import Finding

Member = TypeVar("Member", bound=Hashable)
DeviceKind = Literal["gpu", "nic", "cpu", "switch"]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A finite number, 0 or more. `document` checks these types when it reads a document."""

EDGE_TYPES = frozenset({"PCIe", "NVLink", "xGMI", "SMP", "Ethernet", "InfiniBand"})
"""Types of edges, besides NVn that is not switched. SMP joins the processors of a host (QPI, UPI and similar links);
AMD's such links are xGMI."""

NETWORK = "network"
"""The switch that joins all hosts where nothing more is known of the network."""

_BONDED = re.compile(r"NV([1-9][0-9]?)")


class Device(msgspec.Struct, frozen=True):
    """A device of a host. `id` is its name in the host's own output: GPU0, NIC0, mlx5_0, eth0, CPU0, SW0."""

    id: Name
    kind: DeviceKind
    numa: Count | None = None
    name: str = ""  # for people: "NVIDIA A100-SXM4-80GB", "mlx5_0", "PCIe switch", "NVSwitch"
    derived: bool = False  # no output lists it: it follows from the links of others
    bus: str = ""  # PCI address: "0000:3b:00.0"
    cores: Count | None = None
    memory: Count | None = None  # bytes
    interface: str = ""  # network interface of a NIC
    addresses: tuple[str, ...] = ()
    bandwidth: Rate | None = None  # of a NIC's port, payload bytes/s in each direction


class Link(msgspec.Struct, frozen=True):
    """An edge or a relation between two devices of one host.

    `bandwidth` is payload bytes/s in each direction, 0.0 where it is unknown. `switched` is set for NVn only.
    `derived`: no output lists the link; it follows from a matrix.
    """

    a: Name
    b: Name
    type: Name
    bandwidth: Rate = 0.0
    latency: Rate | None = None  # seconds one way
    switched: bool | None = None
    measured: bool = False
    derived: bool = False

    @property
    def edge(self) -> bool:
        """Whether the link is a cable or a slot, which has a capacity; else it only describes a pair."""
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
        """The link types of pairs, from a matrix."""
        return tuple(link for link in self.links if not link.edge)

    def of_kind(self, kind: DeviceKind) -> tuple[Device, ...]:
        """Return the devices of a kind, in their order."""
        return tuple(device for device in self.devices if device.kind == kind)

    def device(self, id: str) -> Device | None:
        """Return the device with this id, None if there is none."""
        return next((device for device in self.devices if device.id == id), None)


class Between(msgspec.Struct, frozen=True):
    """A cable between two hosts, a host and a network switch, or two switches.

    `via` is the id of the NIC of host `a` that the cable is plugged into, "" where it is unknown.
    """

    a: Name
    b: Name
    bandwidth: Rate | None = None  # payload bytes/s in each direction; None: unknown
    latency: Rate | None = None  # seconds one way
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
        """Return the host with this name, None if there is none."""
        return next((host for host in self.hosts if host.name == name), None)


class Suggestion(msgspec.Struct, frozen=True):
    """The strategy that suits a topology: `strategy` of `psctl topo -o json`.

    `groups` holds the device ids of each ring in order, each preceded by its host's name and "/" where there are
    several hosts. `shares` holds the part of the bytes that each group carries; the parts sum to 1. For packed trees,
    `trees` holds the (parent, child) edges of each group's tree from its root outwards.
    """

    name: str
    reason: str
    groups: tuple[tuple[str, ...], ...] = ()
    shares: tuple[float, ...] = ()
    trees: tuple[tuple[tuple[str, str], ...], ...] = ()


def bonded(word: str) -> int:
    """Return the number of NVLinks of a link type: 12 for NV12, 0 for types other than NVn."""
    match = _BONDED.fullmatch(word)
    return int(match[1]) if match else 0


def components(members: Iterable[Member], links: Iterable[Iterable[Member]]) -> list[list[Member]]:
    """Return the connected groups of members, each in the order of the members, by their first member.

    Args:
        members: the nodes.
        links: the members that each link joins.
    """
    order = {member: index for index, member in enumerate(dict.fromkeys(members))}
    above = list(range(len(order)))  # union and find, by the first member of each group

    def first(at: int) -> int:
        while above[at] != at:
            above[at] = at = above[above[at]]
        return at

    for link in links:
        joined = {first(order[member]) for member in link}
        for each in joined:
            above[each] = min(joined)
    return list(grouped((first(index), member) for member, index in order.items()).values())
