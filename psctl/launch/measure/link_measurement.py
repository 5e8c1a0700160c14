"""Measures the links between hosts, infers the network from the rates, and saves the results.

The pairs of one round are measured at the same time and share no host, so n hosts take about n rounds. Each pair is
measured from its first host: latency, then bytes/s out, then in. Further rounds follow for the pairs that
`fabric.further_measurements` names.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from psctl import errors
from psctl.launch.clusters import ChosenCluster, Progress
from psctl.launch.host_programs import GPU_COPIES, run_program
from psctl.launch.hosts.actions import FindNetwork, MeasureLinks
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import reach
from psctl.launch.measure.measurement_servers import RATES, MeasuredRates, ProbeSettings, RunningServers, serving
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell, working
from psctl.topology.findings import Finding
from psctl.topology.graph import NETWORK, Between, Link
from psctl.topology.host.link_overrides import LinkOverride, apply_overrides
from psctl.topology.network.fabric import (
    ConcurrentSamples,
    Fabric,
    PairSample,
    fastest_samples,
    further_measurements,
    infer_fabric,
)
from psctl.topology.network.measurement_rounds import Pair, rounds
from psctl.types import HostName, JsonObject
from psctl.units import format_bit_rate

PAYLOAD = 0.956
"""Share of a NIC's nominal rate that is payload, at an MTU of 1500."""

LATENCY = 1e-4
"""Seconds between a host and the network where no latency is measured."""

WIDE = 0.10
"""Range of the repeats, as a part of their median, above which a rate is reported as unreliable."""

FAST = 20e9 / 8
"""Bytes/s of a nominal speed above which one connection does not fill a port."""

STREAMS = 4
"""Parallel connections on such a port."""

TURNS = 4
"""Limit of further measurements: pairs alone, pairs whose rates varied, racks, and racks a second time."""

COPIES = 120.0
"""Time limit for the copies inside one host, in seconds."""


class MeasurementEffort(msgspec.Struct, frozen=True):
    """The duration of a pair's measurement: per direction `repeats` times `seconds`, each after `burn` seconds of
    warm-up; `pings` is the number of messages for the latency."""

    seconds: float
    burn: float
    repeats: int
    pings: int

    @property
    def round(self) -> float:
        """Return the seconds of a round, without its start."""
        return 2 * self.repeats * (self.seconds + self.burn)


QUICK = MeasurementEffort(seconds=0.15, burn=0.08, repeats=3, pings=30)
"""The effort of `up`: 1.4 s per round."""

THOROUGH = MeasurementEffort(seconds=0.6, burn=0.2, repeats=3, pings=200)
"""The effort of `topo --measure`."""


class MeasuredCopy(msgspec.Struct, frozen=True):
    """A measured path between two devices: bytes/s, seconds of a small copy, and the relative range of the repeats."""

    a: str
    b: str
    bandwidth: float
    latency: float
    spread: float


class MeasuredCopies(msgspec.Struct, frozen=True):
    """The measured copies of a host, or the reason why there are none."""

    copies: list[MeasuredCopy]
    error: str = ""


_COPIES = msgspec.json.Decoder(MeasuredCopies)


class Measurements(msgspec.Struct, frozen=True):
    """The measurements of a cluster.

    `addresses` are the addresses that were used, `machines` the identities of the hosts (`HostSite.identity`).
    `missing` holds the pairs that could not be measured, each with the reason; `inside` the copies inside hosts.
    """

    time: float
    addresses: dict[str, str]
    series: tuple[ConcurrentSamples, ...] = ()
    missing: tuple[tuple[str, str, str], ...] = ()
    inside: dict[str, tuple[Link, ...]] = {}
    machines: dict[str, str] = {}

    def fabric(self, hosts: Sequence[str], labels: Mapping[str, Mapping[str, str]] | None = None) -> Fabric:
        """Return the network between these hosts, inferred from the measurements."""
        found = infer_fabric(list(self.addresses), self.series, labels)
        edges = tuple(edge for edge in found.between if edge.a in hosts or edge.a not in self.addresses)
        return msgspec.structs.replace(found, between=edges)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(reached: ReachedCluster, progress: Progress, effort: MeasurementEffort = THOROUGH) -> Measurements:
    """Measure every pair of the hosts that were inspected.

    Args:
        reached: the cluster, after `reach.find`.
        progress: shows progress.
        effort: the duration of each pair's measurement.

    Returns:
        The measurements, with the reasons for pairs that could not be measured.

    Raises:
        InvalidFile, HostUnreachable: a host has no usable address, or no pair could be measured.
    """
    chosen, at = reached.chosen, _addresses(reached)
    hosts = [host.name for host in chosen.spec.hosts if host.name in at and host.name in reached.fleet.shells]
    if len(hosts) < 2:
        return Measurements(time.time(), at, machines=_machines(reached, at))
    work = _Work(reached, {name: at[name] for name in hosts}, effort)
    plan: Sequence[Sequence[Pair]] = rounds(hosts)
    count = f"the links between {len(hosts)} hosts: {len(plan)} round{'s' if len(plan) > 1 else ''}"
    progress("", f"measuring {count}, {effort.round + 0.5:.0f} s each")
    listen = {name: [at[name]] for name in hosts}
    with serving(reached.fleet, work.settings, listen, 60.0 + 10 * len(hosts) * (effort.round + 5)) as servers:
        shell = reached.fleet.shell(hosts[0])
        with working(shell, "", f"measuring {count}", len(plan) * (effort.round + 0.5)):
            for pairs in plan:
                work.run(servers, pairs)
        for _ in range(TURNS):
            for pairs in further_measurements(hosts, work.series, _labels(chosen)):
                progress("", f"measuring {', '.join(f'{a} - {b}' for a, b in pairs)} again")
                with working(shell, "", "measuring again", effort.round + 0.5):
                    work.run(servers, pairs)
    if not work.series:
        a, b, why = work.missing[0]
        raise errors.HostUnreachable(f"nothing could be measured: {a} - {b}: {why}", "psctl doctor shows why", a)
    return Measurements(
        time.time(), dict(work.at), tuple(work.series), tuple(work.missing), machines=_machines(reached, work.at)
    )


def _addresses(reached: ReachedCluster) -> dict[str, str]:
    return {name: one.address for name, one in reach.addresses(reached).items()}


def _machines(reached: ReachedCluster, names: Iterable[str]) -> dict[str, str]:
    return {name: reached.sites[name].identity for name in names}


class _Work:
    """One measurement in progress."""

    def __init__(self, reached: ReachedCluster, at: Mapping[str, str], effort: MeasurementEffort) -> None:
        self.at, self.effort = at, effort
        self.fleet = Fleet(reached.fleet.shells, reached.fleet.failed, len(at))  # all pairs of a round at once
        self.settings = ProbeSettings.of(reached)
        self.speeds = {name: _nominal(reached, name, address) for name, address in at.items()}
        self.series: list[ConcurrentSamples] = []
        self.missing: list[tuple[str, str, str]] = []
        self._rounds = 0

    def run(self, servers: RunningServers, pairs: Sequence[Pair]) -> None:
        """Measure pairs at the same time."""
        partners = {HostName(a): b for a, b in pairs}
        meeting = self._meeting(servers, pairs)

        def dial(name: HostName, shell: Shell) -> MeasuredRates:
            other = partners[name]
            port = servers.ports.get(other, {}).get(self.at[other])
            if port is None:
                raise errors.HostUnreachable(servers.failed.get(other, f"{other} does not listen"), where=other)
            fast = min(self.speeds[name], self.speeds[other]) >= FAST
            question = {
                "to": [self.at[other], port], "from": self.at[name], "streams": STREAMS if fast else 1,
                "meet": meeting,
                **msgspec.to_builtins(self.effort),
            }  # fmt: skip
            return self.settings.ask(shell, "dial", question, RATES, servers.token, 60 + 3 * self.effort.round)

        out, back = [], []
        for name, outcome in self.fleet.each(dial, names=list(partners)).items():
            a, b = str(name), partners[name]
            if outcome.error is not None:
                self.missing.append((a, b, outcome.error.message))
                continue
            late = outcome.value.latency
            out.append(_sample(a, b, outcome.value.out, late))
            back.append(_sample(b, a, outcome.value.inward, late))
        self.series += [ConcurrentSamples(tuple(samples)) for samples in (out, back) if samples]

    def _meeting(self, servers: RunningServers, pairs: Sequence[Pair]) -> JsonObject | None:
        """Return the server at which the hosts of a round wait for each other, so that all pairs start together."""
        self._rounds += 1
        host = pairs[0][1]
        port = servers.ports.get(host, {}).get(self.at[host])
        if len(pairs) == 1 or port is None:
            return None
        return {"to": [self.at[host], port], "count": len(pairs), "key": str(self._rounds)}


def _sample(a: str, b: str, rates: Sequence[float], late: float) -> PairSample:
    middle = statistics.median(rates)
    return PairSample(a, b, middle, late, (max(rates) - min(rates)) / middle if middle else 0.0)


def _nominal(reached: ReachedCluster, name: str, address: str) -> float:
    nics = reached.sites[name].facts.nics
    return next((nic.speed or 0.0 for nic in nics if any(text.split("/")[0] == address for text in nic.addresses)), 0.0)


def inside(reached: ReachedCluster, progress: Progress) -> dict[str, tuple[Link, ...]]:
    """Measure the copies between the GPUs of each host, and between each GPU and the host's memory.

    Args:
        reached: the cluster.
        progress: shows progress, and hosts whose torch cannot copy.

    Returns:
        Links of type "copy" between devices, by host. The bandwidth of a link is that of one copy alone. Hosts without
        GPUs are left out.
    """
    names = [HostName(host.name) for host in reached.chosen.spec.hosts if _copies(host.name, reached)]
    if not names:
        return {}
    what = f"measuring copies inside {len(names)} host{'s' if len(names) > 1 else ''}"
    progress("", what)

    def copy(name: HostName, shell: Shell) -> MeasuredCopies:
        question = {"seconds": COPIES / 2, "nodes": [gpu.numa for gpu in reached.sites[name].facts.gpus]}
        return run_program(shell, reached.python(name), GPU_COPIES, "measure", question, _COPIES, timeout=COPIES)

    found: dict[str, tuple[Link, ...]] = {}
    with working(reached.fleet.shells[names[0]], "", what):
        measured = reached.fleet.each(copy, names=names)
    for name, outcome in measured.items():
        why = outcome.error.message if outcome.error is not None else outcome.value.error
        if why:
            progress(str(name), f"no copies measured: {why}")
        else:
            for row in outcome.value.copies:
                if row.spread > WIDE:
                    progress(str(name), f"copies {row.a} - {row.b} varied by {row.spread:.0%}: a device is busy")
            found[str(name)] = tuple(
                Link(row.a, row.b, "copy", row.bandwidth, row.latency, measured=True) for row in outcome.value.copies
            )
    return found


def _copies(name: str, reached: ReachedCluster) -> bool:
    return name in reached.fleet.shells and name in reached.plans and bool(reached.sites[name].facts.gpus)


# ---- saved measurements ----------------------------------------------------------------------------------------------


def save(reached: ReachedCluster, measured: Measurements) -> None:
    """Save measurements with the cluster, except for the embedded one."""
    if not reached.chosen.embedded:
        reached.home.save_measurement("links", reached.chosen.spec.name, measured)


def load(reached: ReachedCluster) -> Measurements | None:
    """Return the saved measurements if machines and addresses are unchanged, else None; set `reached.rates`.

    Call `reach.find` or `reach.settled` first.
    """
    reached.rates = {}
    kept = reached.home.load_measurement("links", reached.chosen.spec.name, Measurements)
    try:
        at = _addresses(reached)
    except errors.PsctlError:  # a host has no usable address
        return None
    if kept is None or not at.items() <= kept.addresses.items():
        return None
    if not _machines(reached, at).items() <= kept.machines.items():  # a host was installed anew, or replaced
        return None
    reached.rates = ports(between(reached, kept), at)
    return kept


# ---- as a part of `up` -----------------------------------------------------------------------------------------------


def plan(reached: ReachedCluster) -> None:
    """Add the missing measurements to each host's actions: the network of the cluster, and the rates of its links.

    Nothing is added for fewer than two hosts, or while a job runs: measurement and job would disturb each other.

    Raises:
        InvalidFile, HostUnreachable: a host has no usable address; the cluster file's fault.
    """
    hosts = [name for name in reached.plans if name not in reached.failed]
    settled = reach.settled(reached)
    reach.addresses(reached)
    if len(hosts) < 2 or reached.chosen.embedded or any(reached.sites[name].jobs for name in hosts):
        return
    if settled and load(reached) is not None:
        return
    for name in hosts:
        reached.plans[name] += [*([] if settled else [FindNetwork()]), MeasureLinks(len(hosts) - 1)]


def carry_out(reached: ReachedCluster, progress: Progress) -> tuple[str, ...]:
    """Carry out the actions that `plan` added and save the results; return warnings, a failure among them."""
    ours = (FindNetwork, MeasureLinks)
    if not any(isinstance(action, MeasureLinks) for actions in reached.plans.values() for action in actions):
        return ()
    try:
        reach.find(reached, progress)
        measured = measure(reached, progress, QUICK)
    except errors.PsctlError as error:
        for name, actions in reached.plans.items():
            reached.plans[name] = [action for action in actions if not isinstance(action, ours)]
        return (f"the links were not measured: {error.message}",)
    save(reached, msgspec.structs.replace(measured, inside=inside_before(reached, measured)))
    load(reached)
    return tuple(f"{finding.what} ({finding.cure})" for finding in warnings(reached.chosen, measured))


def inside_before(reached: ReachedCluster, measured: Measurements) -> dict[str, tuple[Link, ...]]:
    """Return the saved copies inside the machines that are unchanged since `topo --measure`."""
    before = reached.home.load_measurement("links", reached.chosen.spec.name, Measurements)
    if before is None:
        return {}
    same = {name for name, identity in measured.machines.items() if before.machines.get(name) == identity}
    return {name: links for name, links in before.inside.items() if name in same}


# ---- links and warnings ----------------------------------------------------------------------------------------------


def between(reached: ReachedCluster, measured: Measurements | None) -> tuple[Between, ...]:
    """Return the links between the hosts: from `links:`, else measured, else with nominal rates.

    Raises:
        InvalidFile, HostUnreachable: a host has no address that others could use.
    """
    chosen, at = reached.chosen, reach.addresses(reached)
    hosts = [host.name for host in chosen.spec.hosts if host.name in at]
    if len(hosts) < 2:
        return ()
    labels = _labels(chosen)
    found = measured.fabric(hosts, labels).between if measured is not None else ()
    known = {edge.a for edge in found}
    nominal = [
        Between(name, NETWORK, _nominal(reached, name, at[name].address) * PAYLOAD or None, LATENCY)
        for name in hosts
        if name not in known
    ]
    edges = [
        msgspec.structs.replace(edge, via=at[edge.a].interface) if edge.a in at else edge for edge in (*found, *nominal)
    ]
    own = {name: labels[name] for name in hosts}
    ends = {*own, *(value for each in own.values() for value in each.values())}
    written = [
        LinkOverride(link.between[0], link.between[1], link.bandwidth, link.latency)
        for link in chosen.spec.links
        if set(link.between) <= ends
    ]
    return apply_overrides(edges, written, own)


def ports(edges: Sequence[Between], hosts: Container[str]) -> dict[str, float]:
    """Return the payload bytes/s of each host's port: the rate of the fastest link between the host and a switch."""
    found: dict[str, float] = {}
    for edge in edges:
        for host, other in ((edge.a, edge.b), (edge.b, edge.a)):
            if host in hosts and other not in hosts and edge.bandwidth:
                found[host] = max(found.get(host, 0.0), edge.bandwidth)
    return found


def warnings(chosen: ChosenCluster, measured: Measurements) -> tuple[Finding, ...]:
    """Return the findings of a measurement: rates that varied, pairs that could not be measured, and the fabric's."""
    wide = sorted(
        (each for each in fastest_samples(measured.series).values() if each.spread > WIDE), key=lambda one: -one.spread
    )
    listed = [f"{each.a} -> {each.b} by {each.spread:.0%} around {format_bit_rate(each.rate)}" for each in wide]
    others = [f"{len(listed) - 3} more"] if len(listed) > 3 else []
    scattered = [
        Finding(
            f"rates varied from repeat to repeat: {', '.join([*listed[:3], *others])}",
            "other traffic was on the links, or hosts were busy: `psctl topo --measure` measures again",
        )
    ] * bool(listed)
    lost = [
        Finding(f"{a} - {b} could not be measured: {why}", "`psctl doctor` shows whether the two reach each other")
        for a, b, why in measured.missing
    ]
    fabric = measured.fabric(list(measured.addresses), _labels(chosen))
    return (*scattered, *lost, *fabric.findings)


def _labels(chosen: ChosenCluster) -> dict[str, dict[str, str]]:
    return {host.name: dict(host.labels) for host in chosen.spec.hosts}
