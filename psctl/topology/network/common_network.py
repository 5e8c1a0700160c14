"""The network that hosts should use, by a probe of every address from every other host.

A network is one address a host, all in one subnet or on interfaces of one name, on which every host answers every
other. Nominal speeds choose between two of them where they differ clearly, else what each of them moves in a moment;
where that is equal too, the one that psctl itself uses. Where no network joins all, each host takes the fastest of
its addresses that most of the others reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl.topology.network.addresses import AddressCandidate, ChosenAddress
from psctl.types import HostName
from psctl.units import format_bit_rate

CLEARLY = 1.5
"""Times that a nominal speed must be another's to decide."""

FASTER = 1.2
"""Times that a measured rate must be another's to decide: a moment's burst scatters."""

Candidates = Mapping[HostName, Sequence[AddressCandidate]]

ProbeLatencies = Mapping[tuple[HostName, HostName, str], float]
"""Seconds one way, from a host, to a host, at an address of it; those that did not answer are missing."""


class CommonNetwork(msgspec.Struct, frozen=True):
    """One address a host on which all of them meet. `name` is what its interfaces, or else its subnet, are called."""

    name: str
    members: dict[HostName, AddressCandidate]
    latency: float

    @property
    def speed(self) -> float | None:
        """The nominal speed of its slowest interface; None when one does not tell."""
        speeds = [each.speed for each in self.members.values()]
        return None if None in speeds else min(speed for speed in speeds if speed is not None)

    @property
    def came(self) -> bool:
        """Whether psctl reaches hosts on it."""
        return any(each.came for each in self.members.values())


def networks(candidates: Candidates, latencies: ProbeLatencies) -> list[CommonNetwork]:
    """Return the networks that join all hosts, the one that psctl came over first, then by latency."""
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
    return sorted(found, key=lambda each: (not each.came, each.latency))


def contenders(found: Sequence[CommonNetwork]) -> list[CommonNetwork]:
    """Return the networks of which a burst must choose one; [] when there is no doubt."""
    speeds = [each.speed for each in found]
    known = sorted((speed for speed in speeds if speed is not None), reverse=True)
    if len(found) < 2 or (len(known) == len(found) and known[0] >= CLEARLY * known[1]):
        return []
    return list(found)


def choose_common_network(
    candidates: Candidates, latencies: ProbeLatencies, found: Sequence[CommonNetwork], rates: Sequence[float]
) -> dict[HostName, ChosenAddress]:
    """Return each host's address, by the probe; a host that no other reached is left out.

    Args:
        candidates, latencies: the probed addresses, and the answers.
        found: the networks that join all.
        rates: what each of them moved, bytes/s; empty where `contenders` had no doubt.
    """
    if not found:
        chosen = {name: _alone(name, own, latencies) for name, own in candidates.items()}
        return {name: one for name, one in chosen.items() if one is not None}
    if rates:
        at = _fastest(rates)
        reason = _by_rate(found, rates, at)
    else:
        at = max(range(len(found)), key=lambda each: (found[each].speed or 0.0, -each))
        reason = _by_speed(found, at)
    return {name: ChosenAddress(each.address, each.interface, reason) for name, each in found[at].members.items()}


def _fastest(rates: Sequence[float]) -> int:
    """The first that no other clearly beats."""
    return next(number for number, rate in enumerate(rates) if rate * FASTER >= max(rates))


def _by_rate(found: Sequence[CommonNetwork], rates: Sequence[float], at: int) -> str:
    others = [(network, rate) for number, (network, rate) in enumerate(zip(found, rates, strict=True)) if number != at]
    beaten = [f"{network.name} {format_bit_rate(rate)}" for network, rate in others]
    return f"all hosts meet on it, and it moves {format_bit_rate(rates[at])}; {', '.join(beaten)}"


def _by_speed(found: Sequence[CommonNetwork], at: int) -> str:
    others = [f"{each.name} {format_bit_rate(each.speed or 0.0)}" for each in found if each is not found[at]]
    if not others:
        return "it is the only network on which all hosts answer each other"
    return f"all hosts meet on it, and it has {format_bit_rate(found[at].speed or 0.0)}; {', '.join(others)}"


def _alone(name: HostName, own: Sequence[AddressCandidate], latencies: ProbeLatencies) -> ChosenAddress | None:
    """The best address of a host where no network joins all: that which most reach, the faster of equals."""
    by = {each.address: sum(to == name and at == each.address for _, to, at in latencies) for each in own}
    best = max(own, key=lambda each: (by[each.address], each.speed or 0.0, each.came))
    if not by[best.address]:
        return None
    count = by[best.address]
    return ChosenAddress(
        best.address, best.interface, f"{count} other host{'s reach' if count > 1 else ' reaches'} it here"
    )


def _name(members: Mapping[HostName, AddressCandidate]) -> str:
    names = {each.interface for each in members.values()}
    return names.pop() if len(names) == 1 else next(iter(members.values())).network
