"""Finds the addresses by which hosts reach each other: each host listens on all of its own, and the others connect.

An address that does not answer takes two seconds, so hosts are probed only where one of them has several addresses.
The result is saved with the cluster, together with a fingerprint of the machines and addresses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from psctl.launch.clusters import Progress
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure.measurement_servers import (
    RATES,
    REACHED,
    ProbeSettings,
    ReachedAddress,
    RunningServers,
    serving,
)
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.topology.network.addresses import (
    AddressCandidate,
    ChosenAddress,
    HostReach,
    candidates,
    choose_addresses,
    refuse_unreachable,
)
from psctl.topology.network.common_network import CommonNetwork, choose_common_network, networks, networks_to_measure
from psctl.topology.network.measurement_rounds import Pair, rounds
from psctl.types import HostName

DEAD = 2.0
"""Seconds to wait for an answer from an address."""

BURST = {"seconds": 0.15, "burn": 0.1, "repeats": 1, "pings": 5, "streams": 1}
"""A short measurement: enough to distinguish a management port from a data port."""

Candidates = Mapping[HostName, tuple[AddressCandidate, ...]]


class KeptAddresses(msgspec.Struct, frozen=True):
    """The addresses that a probe chose, and a fingerprint of the machines and of their candidate addresses."""

    fingerprint: str
    chosen: dict[str, ChosenAddress]


def settled(reached: ReachedCluster) -> bool:
    """Set the addresses of all hosts, from the cluster file and from saved ones; return whether no probe is needed."""
    asked = candidates(reaches(reached), reached.chosen.spec.network.interface)
    if not asked:
        reached.addresses = {}
        return True
    known = reached.home.load_measurement("reach", reached.chosen.spec.name, KeptAddresses)
    valid = known is not None and known.fingerprint == fingerprint(asked, reached)
    reached.addresses = known.chosen if known is not None and valid else {}
    return valid


def find(reached: ReachedCluster, progress: Progress, *, keep: bool = True) -> None:
    """Set `reached.addresses`, the addresses by which hosts reach each other; probe the hosts if none are saved.

    Args:
        reached: the cluster.
        progress: shows progress.
        keep: save the result; `doctor` does not, because it changes nothing.
    """
    if settled(reached):
        return
    chosen, hosts = reached.chosen, reaches(reached)
    asked = candidates(hosts, chosen.spec.network.interface)
    if any(name not in reached.fleet.shells for name in asked):
        return
    progress("", "finding the network by which the hosts reach each other")
    found = probe(reached.fleet, ProbeSettings.of(reached), asked)
    default = choose_addresses(hosts, chosen.spec.network.interface)
    reached.addresses = {str(name): found.get(name, default[name]) for name in hosts}
    if keep and len(found) == len(hosts) and not chosen.embedded:  # a probe that failed is no answer to remember
        kept = KeptAddresses(fingerprint(asked, reached), reached.addresses)
        reached.home.save_measurement("reach", chosen.spec.name, kept)


def reaches(reached: ReachedCluster) -> dict[HostName, HostReach]:
    """Return the inspected hosts in the form that `topology.network.addresses` takes."""
    hosts = {host.name: host for host in reached.chosen.spec.hosts}
    return {
        HostName(name): HostReach(site.facts, hosts[name].internal_address, hosts[name].local)
        for name, site in reached.sites.items()
    }


def addresses(reached: ReachedCluster) -> dict[str, ChosenAddress]:
    """Return each host's address: the one that a probe chose, else the one from its facts and the cluster file.

    Raises:
        InvalidFile, HostUnreachable: a host has no usable address; the cluster file's fault.
    """
    hosts, interface = reaches(reached), reached.chosen.spec.network.interface
    if not reached.sites.keys() <= reached.addresses.keys():
        return {str(name): one for name, one in choose_addresses(hosts, interface).items()}
    refuse_unreachable(hosts, {name: reached.addresses[name] for name in hosts})
    return {name: reached.addresses[name] for name in reached.sites}


def probe(fleet: Fleet, settings: ProbeSettings, asked: Candidates) -> dict[HostName, ChosenAddress]:
    """Make every host listen on all its candidates and every other connect to them; return the addresses that work."""
    all_hosts = Fleet(fleet.shells, fleet.failed, len(asked))
    listen = {str(name): [each.address for each in own] for name, own in asked.items()}
    with serving(fleet, settings, listen, 60.0) as servers:
        latencies = _dial(all_hosts, settings, asked, servers)
        found = networks(asked, latencies)
        rates = [_burst(all_hosts, settings, servers, network) for network in networks_to_measure(found)]
    return choose_common_network(asked, latencies, found, rates)


def _dial(
    fleet: Fleet, settings: ProbeSettings, asked: Candidates, servers: RunningServers
) -> dict[tuple[HostName, HostName, str], float]:
    def try_all(name: HostName, shell: Shell) -> dict[str, ReachedAddress]:
        to = {
            f"{other} {address}": [address, port]
            for other, ports in servers.ports.items()
            for address, port in ports.items()
            if other != name
        }
        question = {"to": to, "seconds": DEAD, "pings": 5}
        return settings.ask(shell, "reach", question, REACHED, servers.token, 30)

    latencies = {}
    for name, outcome in fleet.each(try_all, names=list(asked)).items():
        for key, answer in (outcome.value if outcome.ok else {}).items():
            other, _, address = key.partition(" ")
            if answer.latency is not None:
                latencies[name, HostName(other), address] = answer.latency
    return latencies


def _burst(fleet: Fleet, settings: ProbeSettings, servers: RunningServers, network: CommonNetwork) -> float:
    """Return the bytes/s of a network: the slowest rate of a short transfer between pairs of hosts; 0 if one failed."""
    members = network.members
    pairs: list[Pair] = list(rounds([*members])[0])
    paired = {name for pair in pairs for name in pair}
    pairs += [(pairs[0][0], name) for name in members if name not in paired]
    least = float("inf")
    for at_once in (pairs[: len(members) // 2], pairs[len(members) // 2 :]):
        partners = {HostName(a): HostName(b) for a, b in at_once}

        def move(name: HostName, shell: Shell, partners: Mapping[HostName, HostName] = partners) -> float:
            to = members[partners[name]].address
            ends = {"to": [to, servers.ports[partners[name]][to]], "from": members[name].address}
            answer = settings.ask(shell, "dial", {**BURST, **ends}, RATES, servers.token, 30)
            return min(answer.out[0], answer.inward[0])

        for outcome in fleet.each(move, names=list(partners)).values():
            least = min(least, outcome.value if outcome.ok else 0.0)
    return least


def fingerprint(asked: Candidates, reached: ReachedCluster) -> str:
    """Return a fingerprint of these machines and addresses."""
    rows = sorted(
        (name, reached.sites[name].identity, sorted((each.interface, each.address) for each in own))
        for name, own in asked.items()
    )
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
