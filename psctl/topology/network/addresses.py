"""Chooses the address and interface at which the other hosts reach each host.

The first of these that exists is used: `internal_address:`; `network.interface:`; loopback where all hosts share one
machine's network; the result of a probe of every address from every other host, where some host has several candidates
(`candidates`, decided by `common_network`); the interface of psctl's SSH connection. A host without such a connection
(this machine, or a host behind a tunnel) uses the interface that shares a subnet with the others, else that of the
default route, else any interface that is up. Loopback and bridges of containers are never used between machines.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from psctl.errors import HostUnreachable, InvalidFile
from psctl.topology.facts import HostFacts, Nic
from psctl.topology.readings import RdmaPorts
from psctl.types import HostName


class HostReach(msgspec.Struct, frozen=True):
    """One host of the job: its facts, and its address in the cluster file."""

    facts: HostFacts
    internal_address: str | None = None
    local: bool = False  # this machine, which psctl reaches without SSH


class ChosenAddress(msgspec.Struct, frozen=True):
    """The address at which a host listens; `interface` is "" if unknown, `reason` is shown to users."""

    address: str
    interface: str
    reason: str


class AddressCandidate(msgspec.Struct, frozen=True):
    """An address that other hosts may reach. `speed` is nominal bytes/s; `ssh`: psctl's SSH connection leads to it."""

    address: str
    interface: str
    network: str  # "10.0.0.0/24"
    speed: float | None = None
    ssh: bool = False


def candidates(
    hosts: Mapping[HostName, HostReach], interface: str = "auto"
) -> dict[HostName, tuple[AddressCandidate, ...]]:
    """Return the candidate addresses of each host, or {} where no probe is needed to choose.

    Each interface has one: the address of psctl's SSH connection, else its first, IPv4 before IPv6. No probe is needed
    where the cluster file names the interface, where all hosts are one machine, or where each host has one candidate.

    Args:
        hosts: every host of the job.
        interface: `network.interface` of the cluster file.
    """
    if interface != "auto" or len(hosts) < 2 or _one_machine(hosts.values()):
        return {}
    found = {name: _candidates(host) for name, host in hosts.items()}
    return found if all(found.values()) and any(len(each) > 1 for each in found.values()) else {}


def _candidates(host: HostReach) -> tuple[AddressCandidate, ...]:
    if host.internal_address is not None:
        nic = _nic_with(host.facts, host.internal_address)
        return (_candidate(host, nic, host.internal_address),) if nic else ()
    connected = host.facts.connected
    if connected and not host.local and _nic_with(host.facts, connected) is None:
        return ()  # the SSH address belongs to a NAT or a tunnel: no process of the host can listen on it
    nics = [nic for nic in _usable(host.facts) if not _CONTAINER_INTERFACE.match(nic.name)]
    own = [[_bare(text) for text in nic.addresses] for nic in nics]
    return tuple(
        _candidate(host, nic, connected if connected in texts and ":" not in connected else texts[0])
        for nic, texts in zip(nics, own, strict=True)
    )


def _candidate(host: HostReach, nic: Nic, address: str) -> AddressCandidate:
    text = next((text for text in nic.addresses if _bare(text) == address), address)
    connected = host.facts.connected
    ssh = bool(connected) and not host.local and _nic_with(host.facts, connected) == nic
    return AddressCandidate(address, nic.name, str(ipaddress.ip_interface(text).network), nic.speed, ssh)


def _usable(facts: HostFacts) -> list[Nic]:
    return [nic for nic in facts.nics if nic.up and nic.addresses and nic.kind in ("physical", "virtual")]


_CONTAINER_INTERFACE = re.compile(r"(veth|cali|flannel|kube|weave|lxc|tunl|dummy|nodelocaldns|ifb)[-.0-9a-z]*")
"""Names of interfaces of containers and of their overlay networks, which are never used between machines."""


def choose_addresses(hosts: Mapping[HostName, HostReach], interface: str = "auto") -> dict[HostName, ChosenAddress]:
    """Return the address and interface at which the other hosts reach each host.

    Args:
        hosts: every host of the job.
        interface: `network.interface` of the cluster file.

    Raises:
        InvalidFile: a host lacks the interface that the cluster file names.
        HostUnreachable: a host has no address that another host can reach.
    """
    together = _one_machine(hosts.values())
    chosen: dict[HostName, ChosenAddress] = {}
    for name, host in hosts.items():
        found = _configured(name, host, interface) or (_loopback(host) if together else _connected(host))
        if found is not None:
            chosen[name] = found
    anchors = [one.address for one in chosen.values()]
    for name, host in hosts.items():
        if name not in chosen:
            chosen[name] = _derived(name, host, anchors)
    refuse_unreachable(hosts, chosen)
    return {name: chosen[name] for name in hosts}


def refuse_unreachable(hosts: Mapping[HostName, HostReach], chosen: Mapping[HostName, ChosenAddress]) -> None:
    """Refuse addresses at which hosts cannot reach each other: an address that two networks have, or loopback.

    Containers and virtual machines behind forwarded ports of 127.0.0.1 often have the same address.

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
            what = f"{name}: the other hosts cannot reach its address {one.address}, which is loopback ({one.reason})"
            raise HostUnreachable(what, cure, name)
        other = first.setdefault(one.address, name)
        if not _share_network(hosts[other].facts, hosts[name].facts):
            what = (
                f"{other} and {name} both have the address {one.address} on separate networks, so neither is reachable"
            )
            raise HostUnreachable(what, cure, name)


def rdma_of(facts: HostFacts, interface: str) -> str:
    """Return the RDMA ports of NCCL_IB_HCA for a host with this interface: "=mlx5_0:1,mlx5_1:1".

    If the interface is an RDMA port on Ethernet, they are its rails: all active Ethernet ports of the same rate; else
    all active InfiniBand ports. "" leaves the choice to NCCL.
    """
    found = [port for reading in facts.readings if isinstance(reading, RdmaPorts) for port in reading.ports]
    ports = [port for port in found if port.active]
    own = next((port for port in ports if interface and port.interface == interface), None)
    if own is not None and own.layer == "Ethernet":
        ports = [port for port in ports if port.layer == "Ethernet" and port.rate == own.rate]
    else:
        ports = [port for port in ports if port.layer == "InfiniBand"]
    return "=" + ",".join(f"{port.device}:{port.port}" for port in ports) if ports else ""


def _configured(name: HostName, host: HostReach, interface: str) -> ChosenAddress | None:
    """Return the address that the cluster file determines, None if it determines none."""
    if host.internal_address is not None:
        nic = _nic_with(host.facts, host.internal_address)
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
    """Return whether all hosts share a kernel and its network; containers may share only the kernel."""
    facts = [host.facts for host in hosts]
    return len(facts) == 1 or (bool(facts) and all(one.boot and _share_network(facts[0], one) for one in facts))


def _share_network(one: HostFacts, other: HostFacts) -> bool:
    """Return whether hosts have one network stack: kernel, namespace and addresses.

    Where the namespace is known one common address of a usable interface is enough: interfaces of containers come and
    go between two probes.
    """
    if (one.boot, one.netns) != (other.boot, other.netns):
        return False
    if one.netns and _addresses(_usable(one)) & _addresses(_usable(other)):
        return True
    return _addresses(one.nics) == _addresses(other.nics)


def _addresses(nics: Iterable[Nic]) -> set[str]:
    return {text for nic in nics for text in nic.addresses}


def _loopback(host: HostReach) -> ChosenAddress:
    address = host.facts.connected
    if host.local or not address or not ipaddress.ip_address(address).is_loopback:
        address = "127.0.0.1"
    return ChosenAddress(address, "lo", "all processes are on one machine")


def _connected(host: HostReach) -> ChosenAddress | None:
    """Return the address of the interface of psctl's SSH connection, None for this machine and for tunnels."""
    address = host.facts.connected
    if host.local or not address or ipaddress.ip_address(address).is_loopback:
        return None
    nic = _nic_with(host.facts, address)
    if nic is None:
        return ChosenAddress(address, "", "psctl reaches it at this address")
    if ipaddress.ip_address(address).version == 6:
        address = _bare(nic.addresses[0])  # IPv4 first, which all backends support
    return ChosenAddress(address, nic.name, "psctl reaches it on this interface")


def _derived(name: HostName, host: HostReach, anchors: list[str]) -> ChosenAddress:
    """Return the address of a host without a usable SSH connection."""
    usable = _usable(host.facts)
    for nic in usable:
        for text in nic.addresses:
            if any(ipaddress.ip_address(anchor) in ipaddress.ip_interface(text).network for anchor in anchors):
                return ChosenAddress(_bare(text), nic.name, "it shares a subnet with the other hosts")
    usable.sort(key=lambda nic: (nic.name != host.facts.default_interface, nic.kind != "physical"))
    if not usable:
        message = f"{name}: no interface has an address that another host can reach"
        raise HostUnreachable(message, "give the host an internal_address: in the cluster file", name)
    nic = usable[0]
    why = "its default route" if nic.name == host.facts.default_interface else "its first interface that is up"
    return ChosenAddress(_bare(nic.addresses[0]), nic.name, why)


def _nic_with(facts: HostFacts, address: str) -> Nic | None:
    """Return the interface with this address; 127.0.0.2 belongs to loopback, which lists only 127.0.0.1/8."""
    wanted = ipaddress.ip_address(address)
    for nic in facts.nics:
        if any(ipaddress.ip_interface(text).ip == wanted for text in nic.addresses):
            return nic
    return next((nic for nic in facts.nics if nic.kind == "loopback"), None) if wanted.is_loopback else None


def _bare(text: str) -> str:
    return text.partition("/")[0]
