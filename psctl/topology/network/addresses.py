"""The address and interface of each host that the other hosts should use.

In this order: `internal_address:`; `network.interface:`; loopback where all hosts share one machine's network; the
result of a probe of every address from every other host, where some host has several candidates (`candidates`;
common_network.py decides); the interface of psctl's own SSH connection. A host without such a connection (this machine,
or one behind a tunnel) uses the interface that shares a subnet with the others, else the one of the default route, else
any that is up. Loopback and the bridges of containers are never taken between machines.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping

import msgspec

from psctl.errors import HostUnreachable, InvalidFile
from psctl.topology.facts import HostFacts, Nic
from psctl.topology.readings import RdmaPorts
from psctl.types import HostName


class HostReach(msgspec.Struct, frozen=True):
    """One host of the job: its facts, and what the cluster file says of it."""

    facts: HostFacts
    internal_address: str | None = None
    local: bool = False  # this machine: no SSH connection says where it was reached


class ChosenAddress(msgspec.Struct, frozen=True):
    """Where a host listens and is reached; `interface` "" when unknown, `reason` is for people."""

    address: str
    interface: str
    reason: str


class AddressCandidate(msgspec.Struct, frozen=True):
    """An address of a host that might be the right one. `speed` is nominal, bytes/s; `came`: psctl came in here."""

    address: str
    interface: str
    network: str  # "10.0.0.0/24"
    speed: float | None = None
    came: bool = False


def candidates(
    hosts: Mapping[HostName, HostReach], interface: str = "auto"
) -> dict[HostName, tuple[AddressCandidate, ...]]:
    """Return each host's addresses that might be the right one, when a probe is needed to tell; else {}.

    One an interface: the address that psctl came in at, else its first, IPv4 before IPv6. Nothing is to be probed where
    the cluster file says it all, where all hosts are one machine, or where no host has a choice.

    Args:
        hosts: every host that takes part.
        interface: `network.interface` of the cluster file.
    """
    if interface != "auto" or len(hosts) < 2 or _one_machine(hosts.values()):
        return {}
    found = {name: _candidates(host) for name, host in hosts.items()}
    return found if all(found.values()) and any(len(each) > 1 for each in found.values()) else {}


def _candidates(host: HostReach) -> tuple[AddressCandidate, ...]:
    if host.internal_address is not None:
        nic = _holding(host.facts, host.internal_address)
        return (_candidate(host, nic, host.internal_address),) if nic else ()
    came = host.facts.connected
    if came and not host.local and _holding(host.facts, came) is None:
        return ()  # it is reached at an address that is not its own, where no process can listen
    nics = [nic for nic in _usable(host.facts) if not _INNER.match(nic.name)]
    own = [[_bare(text) for text in nic.addresses] for nic in nics]
    return tuple(
        _candidate(host, nic, came if came in texts and ":" not in came else texts[0])
        for nic, texts in zip(nics, own, strict=True)
    )


def _candidate(host: HostReach, nic: Nic, address: str) -> AddressCandidate:
    text = next((text for text in nic.addresses if _bare(text) == address), address)
    came = host.facts.connected
    here = bool(came) and not host.local and _holding(host.facts, came) == nic
    return AddressCandidate(address, nic.name, str(ipaddress.ip_interface(text).network), nic.speed, here)


def _usable(facts: HostFacts) -> list[Nic]:
    return [nic for nic in facts.nics if nic.up and nic.addresses and nic.kind in ("physical", "virtual")]


_INNER = re.compile(r"(veth|cali|flannel|kube|weave|lxc|tunl|dummy|nodelocaldns|ifb)[-.0-9a-z]*")
"""Interfaces into containers, or overlays of them: never used between machines."""


def choose_addresses(hosts: Mapping[HostName, HostReach], interface: str = "auto") -> dict[HostName, ChosenAddress]:
    """Return each host's address and interface for the others to use.

    Args:
        hosts: every host that takes part.
        interface: `network.interface` of the cluster file.

    Raises:
        InvalidFile: a host lacks the interface that the cluster file names.
        HostUnreachable: a host has no address that another could use.
    """
    together = _one_machine(hosts.values())
    chosen: dict[HostName, ChosenAddress] = {}
    for name, host in hosts.items():
        told = _told(name, host, interface)
        found = told or (_loopback(host) if together else _connected(host))
        if found is not None:
            chosen[name] = found
    anchors = [one.address for one in chosen.values()]
    for name, host in hosts.items():
        if name not in chosen:
            chosen[name] = _derived(name, host, anchors)
    refuse_unreachable(hosts, chosen)
    return {name: chosen[name] for name in hosts}


def refuse_unreachable(hosts: Mapping[HostName, HostReach], chosen: Mapping[HostName, ChosenAddress]) -> None:
    """Refuse addresses by which hosts cannot reach each other: one that two networks have, or loopback.

    Containers and virtual machines behind forwarded ports of 127.0.0.1 often have the same inner address.

    Raises:
        HostUnreachable: names the hosts.
    """
    if _one_machine(hosts.values()):
        return
    cure = "give each an internal_address: that the others reach, or put the containers on one network with addresses "
    cure += "of their own (docker network create, --network host)"
    first: dict[str, HostName] = {}
    for name, one in chosen.items():
        if ipaddress.ip_address(one.address).is_loopback:
            what = f"{name}: the other hosts cannot reach it at {one.address}, which is loopback ({one.reason})"
            raise HostUnreachable(what, cure, name)
        other = first.setdefault(one.address, name)
        if _network(hosts[other].facts) != _network(hosts[name].facts):
            what = (
                f"{other} and {name} both have the address {one.address} on networks of their own, with no way between"
            )
            raise HostUnreachable(what, cure, name)


def rdma_of(facts: HostFacts, interface: str) -> str:
    """Return the RDMA ports for NCCL_IB_HCA when the others reach a host at this interface: "=mlx5_0:1,mlx5_1:1".

    Where the interface is an RDMA port on Ethernet, all active ports on Ethernet of the same rate, its rails; else all
    active InfiniBand ports. "" leaves the choice to NCCL.
    """
    found = [port for reading in facts.readings if isinstance(reading, RdmaPorts) for port in reading.ports]
    ports = [port for port in found if port.active]
    own = next((port for port in ports if interface and port.interface == interface), None)
    if own is not None and own.layer == "Ethernet":
        ports = [port for port in ports if port.layer == "Ethernet" and port.rate == own.rate]
    else:
        ports = [port for port in ports if port.layer == "InfiniBand"]
    return "=" + ",".join(f"{port.device}:{port.port}" for port in ports) if ports else ""


def _told(name: HostName, host: HostReach, interface: str) -> ChosenAddress | None:
    """What the cluster file says itself."""
    if host.internal_address is not None:
        nic = _holding(host.facts, host.internal_address)
        return ChosenAddress(host.internal_address, nic.name if nic else "", "internal_address in the cluster file")
    if interface == "auto":
        return None
    nic = next((nic for nic in host.facts.nics if nic.name == interface), None)
    if nic is None or not nic.addresses:
        has = ", ".join(nic.name for nic in host.facts.nics if nic.addresses) or "none with an address"
        what = "has no address" if nic else "does not exist"
        hint = f"it has: {has}; name one of them, or write interface: auto"
        raise InvalidFile(f"network.interface: {interface} {what} on {name}", hint, name)
    return ChosenAddress(_bare(nic.addresses[0]), nic.name, "network.interface in the cluster file")


def _one_machine(hosts: Collection[HostReach]) -> bool:
    """Do all hosts share a kernel and its network? (Containers may share the first alone.)"""
    seen = {_network(host.facts) for host in hosts}
    return len(seen) == 1 and (all(host.facts.boot for host in hosts) or len(hosts) == 1)


def _network(facts: HostFacts) -> tuple[str, str, frozenset[str]]:
    """Return what identifies a network stack: the kernel, the namespace, and its addresses."""
    return facts.boot, facts.netns, frozenset(address for nic in facts.nics for address in nic.addresses)


def _loopback(host: HostReach) -> ChosenAddress:
    address = host.facts.connected
    if host.local or not address or not ipaddress.ip_address(address).is_loopback:
        address = "127.0.0.1"
    return ChosenAddress(address, "lo", "all processes are on one machine")


def _connected(host: HostReach) -> ChosenAddress | None:
    """The interface that SSH came in at; None where that tells nothing of the way between hosts."""
    address = host.facts.connected
    if host.local or not address or ipaddress.ip_address(address).is_loopback:
        return None
    nic = _holding(host.facts, address)
    if nic is None:
        return ChosenAddress(address, "", "psctl reaches it at this address")
    if ipaddress.ip_address(address).version == 6:
        address = _bare(nic.addresses[0])  # IPv4 first: what every engine speaks
    return ChosenAddress(address, nic.name, "psctl reaches it on this interface")


def _derived(name: HostName, host: HostReach, anchors: list[str]) -> ChosenAddress:
    """An address of a host whose SSH connection tells nothing."""
    usable = _usable(host.facts)
    for nic in usable:
        for text in nic.addresses:
            if any(ipaddress.ip_address(anchor) in ipaddress.ip_interface(text).network for anchor in anchors):
                return ChosenAddress(_bare(text), nic.name, "it shares a subnet with the other hosts")
    usable.sort(key=lambda nic: (nic.name != host.facts.default_interface, nic.kind != "physical"))
    if not usable:
        message = f"{name}: no interface that another host could reach"
        raise HostUnreachable(message, "give the host an internal_address: in the cluster file", name)
    nic = usable[0]
    why = "its default route" if nic.name == host.facts.default_interface else "its first interface that is up"
    return ChosenAddress(_bare(nic.addresses[0]), nic.name, why)


def _holding(facts: HostFacts, address: str) -> Nic | None:
    """The interface that has this address; 127.0.0.2 is on loopback, which lists 127.0.0.1/8 alone."""
    wanted = ipaddress.ip_address(address)
    for nic in facts.nics:
        if any(ipaddress.ip_interface(text).ip == wanted for text in nic.addresses):
            return nic
    return next((nic for nic in facts.nics if nic.kind == "loopback"), None) if wanted.is_loopback else None


def _bare(text: str) -> str:
    return text.partition("/")[0]
