"""Compares TCP's congestion controls on a cluster: which ones all hosts allow, and which is fastest for pushes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.launch.clusters import ChosenCluster
from psctl.launch.hosts.converge import ReachedCluster
from psctl.types import JsonObject

ALLOWED = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
"""The file that lists the congestion controls that an unprivileged socket may choose."""

KNOWN = ("auto", "reno", "cubic", "bbr")
"""What `network.congestion` may be; `auto` is always allowed."""

TURNS = 3
"""Jobs under each control; they run in turn, so that disturbances on the hosts affect all alike."""

CLEAR = 0.05
"""How much faster another control must be than the cluster's own to be recommended; their ranges may not overlap."""


def controls_of(text: str | None) -> list[str]:
    """Read --congestion: `all` or names. Empty: nothing is compared.

    Raises:
        UsageError: a name is unknown.
    """
    names = [] if text is None else list(KNOWN) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KNOWN:
            raise errors.UsageError(f"--congestion {name}: unknown", hint=f"all, or of these: {', '.join(KNOWN)}")
    return list(dict.fromkeys(names))


def allowed(reached: ReachedCluster, wished: Sequence[str]) -> list[str]:
    """Return those of the wished controls that every host allows.

    Raises:
        PsctlError: a host did not answer.
    """
    found = list(wished)
    for outcome in reached.fleet.each(lambda _, shell: shell.run(["cat", ALLOWED]).stdout).values():
        here = {"auto", *outcome.value.decode().split()}
        found = [name for name in found if name in here]
    return found


def under(chosen: ChosenCluster, control: str) -> ChosenCluster:
    """Return the cluster with `congestion: CONTROL`."""
    network = msgspec.structs.replace(chosen.spec.network, congestion=control)
    return msgspec.structs.replace(chosen, spec=msgspec.structs.replace(chosen.spec, network=network))


def compared(times: Mapping[str, Sequence[float]], now: str) -> JsonObject:
    """Return the comparison of the measurements.

    Args:
        times: seconds by control, in the order in which they were measured.
        now: the control in the cluster's file.
    """
    medians = {name: statistics.median(some) for name, some in times.items()}
    best = min(medians, key=lambda name: medians[name])
    keep = now in medians and (medians[now] <= (1 + CLEAR) * medians[best] or min(times[now]) <= max(times[best]))
    return {
        "now": now, "recommended": now if keep else best,
        "measured": [
            {"congestion": name, "seconds": {"min": min(some), "median": medians[name], "max": max(some)}}
            for name, some in times.items()
        ],
    }  # fmt: skip
