"""Chooses the network between hosts, from a probe of every address from every other host.

A network consists of one address a host, all in one subnet or on interfaces of one name, at which every host reaches
every other. Of several networks, the one with the clearly highest nominal speed is chosen, else the one that moves the
most in a short measurement, else the one of psctl's SSH connections. Where no network joins all hosts, each host uses
the address that most of the others reach, the fastest of several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl.topology.network.addresses import AddressCandidate, ChosenAddress
from psctl.types import HostName
from psctl.units import format_bit_rate

CLEARLY = 1.5
"""Ratio of nominal speeds from which they decide."""

FASTER = 1.2
"""Ratio of measured rates from which they decide: short measurements scatter."""

Candidates = Mapping[HostName, Sequence[AddressCandidate]]

ProbeLatencies = Mapping[tuple[HostName, HostName, str], float]
"""Seconds one way by (from host, to host, address of the latter), without addresses that did not answer."""


class CommonNetwork(msgspec.Struct, frozen=True):
    """One address a host at which all reach each other. `name` is that of its interfaces, else of its subnet."""

    name: str
    members: dict[HostName, AddressCandidate]
    latency: float

    @property
    def speed(self) -> float | None:
        """The nominal speed of its slowest interface, bytes/s; None if one is unknown."""
        speeds = [each.speed for each in self.members.values()]
        return None if None in speeds else min(speed for speed in speeds if speed is not None)

    @property
    def ssh(self) -> bool:
        """Whether psctl's SSH connections use it."""
        return any(each.ssh for each in self.members.values())


def networks(candidates: Candidates, latencies: ProbeLatencies) -> list[CommonNetwork]:
    """Return the networks that join all hosts, first that of psctl's SSH connections, then by latency."""
    found: list[CommonNetwork] = []
    for key in ("network", "interface"):
        words = dict.fromkeys(getattr(each, key) for own in candidates.values() for each in own)
        for word in words:
            members = {
                name: each for name, own in candidates.items() for each in own if getattr(each, key) == word
            }  # fmt: skip
            if len(members) == len(candidates) and all(members != known.members for known in found):
                late = [latencies.get((a, b, members[b].address)) for a in members for b in members if a != b]
                if None not in late:
                    found.append(CommonNetwork(_name(members), members, max(one for one in late if one is not None)))
    return sorted(found, key=lambda each: (not each.ssh, each.latency))


def networks_to_measure(found: Sequence[CommonNetwork]) -> list[CommonNetwork]:
    """Return the networks whose rates must be measured to choose one; [] where nominal speeds decide."""
    speeds = [each.speed for each in found]
    known = sorted((speed for speed in speeds if speed is not None), reverse=True)
    if len(found) < 2 or (len(known) == len(found) and known[0] >= CLEARLY * known[1]):
        return []
    return list(found)


def choose_common_network(
    candidates: Candidates, latencies: ProbeLatencies, found: Sequence[CommonNetwork], rates: Sequence[float]
) -> dict[HostName, ChosenAddress]:
    """Return each host's address by the probe, without hosts that no other host reached.

    Args:
        candidates: the probed addresses.
        latencies: the results of the probe.
        found: the networks that join all hosts.
        rates: the measured rate of each network, bytes/s; empty if `networks_to_measure` returned none.
    """
    if not found:
        chosen = {name: _alone(name, own, latencies) for name, own in candidates.items()}
        return {name: one for name, one in chosen.items() if one is not None}
    if rates:
        at = next(number for number, rate in enumerate(rates) if rate * FASTER >= max(rates))
        reason = _by_rate(found, rates, at)
    else:
        at = max(range(len(found)), key=lambda each: (found[each].speed or 0.0, -each))
        reason = _by_speed(found, at)
    return {name: ChosenAddress(each.address, each.interface, reason) for name, each in found[at].members.items()}


def _by_rate(found: Sequence[CommonNetwork], rates: Sequence[float], at: int) -> str:
    others = [(network, rate) for number, (network, rate) in enumerate(zip(found, rates, strict=True)) if number != at]
    beaten = [f"{network.name} {format_bit_rate(rate)}" for network, rate in others]
    return f"all hosts reach each other on it, and it moves {format_bit_rate(rates[at])}; {', '.join(beaten)}"


def _by_speed(found: Sequence[CommonNetwork], at: int) -> str:
    others = [f"{each.name} {format_bit_rate(each.speed or 0.0)}" for each in found if each is not found[at]]
    if not others:
        return "it is the only network on which all hosts reach each other"
    return (
        f"all hosts reach each other on it, and it has {format_bit_rate(found[at].speed or 0.0)}; {', '.join(others)}"
    )


def _alone(name: HostName, own: Sequence[AddressCandidate], latencies: ProbeLatencies) -> ChosenAddress | None:
    """Return a host's address where no network joins all hosts: the one that most hosts reach, then the fastest."""
    by = {each.address: sum(to == name and at == each.address for _, to, at in latencies) for each in own}
    best = max(own, key=lambda each: (by[each.address], each.speed or 0.0, each.ssh))
    if not by[best.address]:
        return None
    count = by[best.address]
    return ChosenAddress(
        best.address, best.interface, f"{count} other host{'s reach' if count > 1 else ' reaches'} it here"
    )


def _name(members: Mapping[HostName, AddressCandidate]) -> str:
    names = {each.interface for each in members.values()}
    return names.pop() if len(names) == 1 else next(iter(members.values())).network
