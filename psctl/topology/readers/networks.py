"""Reads network interfaces and their addresses, from `ip` where the host has it, else from /proc.

/proc/net/fib_trie lists the host's IPv4 addresses without their interfaces; the interface of an address is the one
whose subnet in /proc/net/route contains it.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from psctl.topology.facts import Nic, NicKind

BRIDGES = re.compile(r"(docker|podman|cni|virbr|lxcbr|lxdbr|br-)[0-9a-z]*")
"""Names of interfaces that lead only to containers of this host."""


class _Sys(NamedTuple):
    """A row of /sys/class/net; `speed` is in Mbit/s."""

    state: str
    mtu: str
    speed: str
    driver: str
    kind: str
    numa: str


def read_nics(parts: Mapping[str, list[str]]) -> tuple[Nic, ...]:
    """Return the interfaces of the probe's network namespace, in the kernel's order.

    Args:
        parts: lines of the probe's sections netdev, sysnet, iplink, ipaddr, fibtrie, inet6 and route; each may be
            missing.
    """
    sys = dict(_sys_lines(parts.get("sysnet", [])))
    links = dict(_ip_links(parts.get("iplink", [])))
    addresses = _addresses(parts)
    names = [line.partition(":")[0].strip() for line in parts.get("netdev", []) if ":" in line]
    names = names or list(links) or list(sys) or list(addresses)
    return tuple(_nic(name, sys.get(name), links.get(name), addresses.get(name, ())) for name in names)


def default_interface(route: list[str]) -> str:
    """Return the interface of the default route with the lowest metric in /proc/net/route, "" if there is none."""
    lines = [line.split() for line in route]
    routes = [words for words in lines if len(words) >= 8 and words[1] == words[7] == "00000000"]
    best = min(routes, key=lambda words: int(words[6]) if words[6].isdecimal() else 0, default=None)
    return best[0] if best else ""


def _nic(name: str, sys: _Sys | None, up: bool | None, addresses: tuple[str, ...]) -> Nic:
    speed = int(sys.speed) if sys and sys.speed.isdecimal() else 0
    return Nic(
        name=name,
        addresses=addresses,
        up=(sys is None or sys.state != "down") if up is None else up,
        speed=speed * 125_000.0 if 0 < speed < 2**31 else None,
        driver=sys.driver if sys else "",
        kind=_kind(name, sys),
        numa=int(sys.numa) if sys and sys.numa.isdecimal() else None,
    )


def _kind(name: str, sys: _Sys | None) -> NicKind:
    if name == "lo":
        return "loopback"
    if BRIDGES.fullmatch(name):
        return "bridge"
    # A bridge that an administrator made (br0) has the host's address: it is not a bridge of containers.
    return next((kind for kind in get_args(NicKind) if sys and kind == sys.kind and kind != "bridge"), "virtual")


def _sys_lines(lines: list[str]) -> Iterator[tuple[str, _Sys]]:
    for line in lines:
        name, *rest = line.split("\t")
        if len(rest) == 6:
            yield name, _Sys(*(word.strip() for word in rest))


def _ip_links(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield interfaces of `ip -o link` and whether each is up: "2: eth0@if5: <BROADCAST,UP,LOWER_UP> mtu 1500 ..."."""
    for line in lines:
        match = re.match(r"[0-9]+: ([^:@\s]+)(?:@[^:]*)?: <([^>]*)>", line)
        if match:
            flags = match[2].split(",")
            yield match[1], "UP" in flags and "NO-CARRIER" not in flags


def _addresses(parts: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    """Return the addresses with prefix lengths of each interface, IPv4 first, without link-local addresses."""
    pairs = list(_from_ip(parts.get("ipaddr", [])))
    if not pairs:
        pairs = [*_from_fib(parts.get("fibtrie", []), parts.get("route", [])), *_from_inet6(parts.get("inet6", []))]
    found: dict[str, list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]] = {}
    for name, text in pairs:
        try:
            address = ipaddress.ip_interface(text)
        except ValueError:
            continue
        if not address.is_link_local and address not in found.setdefault(name, []):
            found[name].append(address)
    return {name: tuple(str(one) for one in sorted(all_, key=lambda one: one.version)) for name, all_ in found.items()}


def _from_ip(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield interfaces and addresses of `ip -o addr`: "2: eth0    inet 10.0.0.5/24 brd ...".

    On a point-to-point link the prefix length follows the peer's address.
    """
    for line in lines:
        match = re.match(r"[0-9]+:\s+(\S+?)(?:@\S+)?\s+inet6?\s+(\S+)(?: peer \S+/([0-9]+))?", line)
        if match:
            yield match[1], match[2] if "/" in match[2] or not match[3] else f"{match[2]}/{match[3]}"


def _from_fib(trie: list[str], route: list[str]) -> Iterator[tuple[str, str]]:
    """Yield interfaces and addresses of fib_trie: the line after a host's own address is "/32 host LOCAL"."""
    subnets = list(_subnets(route))
    for before, line in itertools.pairwise(trie):
        match = re.search(r"\|-- ([0-9.]+)", before)
        if match is None or "/32 host LOCAL" not in line:
            continue
        address = ipaddress.IPv4Address(match[1])
        if address.is_loopback:
            yield "lo", f"{address}/8"
            continue
        holding = [(network, name) for network, name in subnets if address in network]
        if holding:
            network, name = max(holding, key=lambda one: one[0].prefixlen)
            yield name, f"{address}/{network.prefixlen}"


def _subnets(route: list[str]) -> Iterator[tuple[ipaddress.IPv4Network, str]]:
    """Yield the directly connected subnets of /proc/net/route, whose numbers are hexadecimal and little-endian."""
    for words in (line.split() for line in route):
        if len(words) < 8 or not re.fullmatch(r"[0-9A-F]{8}", words[1]) or words[2] != "0" * 8 or words[1] == "0" * 8:
            continue
        destination, mask = (int.from_bytes(bytes.fromhex(words[index]), "little") for index in (1, 7))
        yield ipaddress.IPv4Network((destination, bin(mask).count("1")), strict=False), words[0]


def _from_inet6(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield interfaces and addresses of if_inet6: address, index, prefix length (hexadecimal), scope, flags, name."""
    for words in (line.split() for line in lines):
        if len(words) == 6 and re.fullmatch(r"[0-9a-f]{32}", words[0]):
            yield words[5], f"{ipaddress.IPv6Address(bytes.fromhex(words[0]))}/{int(words[2], 16)}"
