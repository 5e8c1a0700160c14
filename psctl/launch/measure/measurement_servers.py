"""Runs servers of the link probe on many hosts during a measurement: starts them, reads their ports, stops them."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from psctl import errors
from psctl.launch.host_programs import LINK_PROBE, OBJECT, run_program
from psctl.launch.hosts.converge import ReachedCluster
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName

T = TypeVar("T")

READY = 5.0
"""Seconds in which a server must report its ports."""


class RunningServers(msgspec.Struct):
    """Running servers: their ports by host and address, and the errors of hosts without one."""

    token: str
    ports: dict[str, dict[str, int]]
    failed: dict[str, str]


class ListeningPorts(msgspec.Struct, frozen=True):
    """The ports of a host's server by address, and the errors of addresses on which it does not listen."""

    ports: dict[str, int]
    failed: dict[str, str]


class MeasuredRates(msgspec.Struct, frozen=True):
    """The rates that a client measured to a server: latency in seconds, bytes/s of each repeat out and in."""

    latency: float
    out: list[float]
    inward: list[float] = msgspec.field(name="in")


class ReachedAddress(msgspec.Struct, frozen=True):
    """The latency to an address in seconds, or the reason why it was not reached."""

    latency: float | None = None
    error: str = ""


_PORTS = msgspec.json.Decoder(ListeningPorts)
RATES = msgspec.json.Decoder(MeasuredRates)
REACHED: msgspec.json.Decoder[dict[str, ReachedAddress]] = msgspec.json.Decoder(dict[str, ReachedAddress])


class ProbeSettings(msgspec.Struct, frozen=True):
    """Settings of the link probe: the hosts' interpreters, and the network settings of the cluster file."""

    pythons: Mapping[str, str]
    span: tuple[int, int] | None
    congestion: str

    @classmethod
    def of(cls, reached: ReachedCluster) -> ProbeSettings:
        """Return the settings for the hosts of a cluster."""
        network = reached.chosen.spec.network
        return cls({name: site.executable for name, site in reached.sites.items()}, network.ports, network.congestion)

    def ask(
        self,
        shell: Shell,
        verb: str,
        question: Mapping[str, object],
        answer: msgspec.json.Decoder[T],
        token: str,
        timeout: float,
    ) -> T:
        """Run a verb of the probe on a host; return its answer. The token travels on standard input."""
        asked = {"name": shell.name, "congestion": self.congestion, **question}
        python = self.pythons[shell.name]
        return run_program(
            shell, python, LINK_PROBE, verb, asked, answer, stdin=token.encode() + b"\n", timeout=timeout
        )


@contextlib.contextmanager
def serving(
    fleet: Fleet, settings: ProbeSettings, listen: Mapping[str, Sequence[str]], seconds: float
) -> Iterator[RunningServers]:
    """Run a server on each host while the block runs.

    Args:
        fleet: connections to the hosts.
        settings: settings of the probe.
        listen: the numeric addresses on which each host's server listens, by host.
        seconds: time after which the servers end by themselves.
    """
    token = secrets.token_hex(16)
    names = [HostName(name) for name in listen]
    threads = [
        threading.Thread(target=_serve, args=(fleet.shells[name], settings, listen[name], seconds, token), daemon=True)
        for name in names
    ]  # `Fleet.each` limits the number of parallel calls, but all servers run for the whole time
    for thread in threads:
        thread.start()
    try:
        yield _ready(fleet, settings, names, token)
    finally:
        fleet.each(lambda _, shell: settings.ask(shell, "stop", {"seconds": 0.0}, OBJECT, token, READY), names=names)
        for thread in threads:
            thread.join(READY)


def _serve(shell: Shell, settings: ProbeSettings, addresses: Sequence[str], seconds: float, token: str) -> None:
    """Run one server until it ends; its error appears when `_ready` reads its ports."""
    question = {"listen": list(addresses), "ports": settings.span, "seconds": seconds}
    with contextlib.suppress(errors.PsctlError):
        settings.ask(shell, "serve", question, OBJECT, token, seconds + READY)


def _ready(fleet: Fleet, settings: ProbeSettings, names: Sequence[HostName], token: str) -> RunningServers:
    found = fleet.each(
        lambda _, shell: settings.ask(shell, "ports", {"seconds": READY}, _PORTS, token, READY + 20),
        names=names,
    )
    serving = RunningServers(token, {}, {})
    for name, outcome in found.items():
        if outcome.error is not None:
            serving.failed[name] = outcome.error.message
            continue
        serving.ports[name] = outcome.value.ports
        if outcome.value.failed:
            serving.failed[name] = "; ".join(f"{host}: {why}" for host, why in outcome.value.failed.items())
    return serving
