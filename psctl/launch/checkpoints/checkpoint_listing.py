"""Lists jobs' checkpoints: those on each job's head, and where that is not reached the copies on its other hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from psctl import errors
from psctl.launch.checkpoints import checkpoint_queries
from psctl.launch.clusters import Connect, recalled_cluster
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import HostName


class ListedCheckpoints(msgspec.Struct, frozen=True):
    """The checkpoints of some jobs.

    `rows` are those of `checkpoint list`, each with the host that holds it; `notes` say whose copies were listed
    instead; `missing` tells of which jobs no host was reached, and why its head was not.
    """

    rows: list[dict[str, Any]]
    notes: list[str]
    missing: dict[str, errors.PsctlError]


def list_all(home: Home, records: Sequence[JobRecord], connect: Connect) -> ListedCheckpoints:
    """List the checkpoints of these jobs, in their order."""
    found: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, errors.PsctlError] = {}
    for cluster, group in by_cluster(records):
        with connect(recalled_cluster(home, cluster.cluster), sorted({record.head.name for record in group})) as fleet:
            for record in group:
                try:
                    found[record.job] = _on(fleet, record.head, record)
                except errors.PsctlError as error:
                    failed[record.job] = error
    notes: list[str] = []
    for record in (each for each in records if each.job in failed):
        copies = _copies(home, record, connect)
        if copies is not None:
            found[record.job], hosts = copies
            head, message = record.head.name, failed.pop(record.job).message
            why = f"its head {head} is not reached ({message.removeprefix(f'{head}: ')})"
            notes.append(f"{record.job}: {why}; these are the copies on {', '.join(hosts)}")
    return ListedCheckpoints([row for record in records for row in found.get(record.job, [])], notes, failed)


def by_cluster(records: Sequence[JobRecord]) -> list[tuple[JobRecord, list[JobRecord]]]:
    """Return records grouped by their cluster, each group with its first."""
    groups: dict[tuple[str, str], list[JobRecord]] = {}
    for record in records:
        groups.setdefault((record.cluster.name, record.cluster.text), []).append(record)
    return [(group[0], group) for group in groups.values()]


def _copies(home: Home, record: JobRecord, connect: Connect) -> tuple[list[dict[str, Any]], list[str]] | None:
    """Return what a job's other hosts hold, and which of them answered; None when none did."""
    others = record.hosts[1:]
    if not others:
        return None
    rows: list[dict[str, Any]] = []
    answered = []
    with connect(recalled_cluster(home, record.cluster), [host.name for host in others]) as fleet:
        for host in others:
            try:
                rows += _on(fleet, host, record)
            except (errors.HostUnreachable, errors.AuthFailed, errors.HostKeyChanged, errors.CommandFailed):
                continue  # another one may have them
            answered.append(host.name)
    return (rows, answered) if answered else None


def _on(fleet: Fleet, host: HostRecord, record: JobRecord) -> list[dict[str, Any]]:
    name = HostName(host.name)
    if name in fleet.failed:
        raise fleet.failed[name]
    return rows_of(fleet.shells[name], host, record)


def rows_of(shell: Shell, host: HostRecord, record: JobRecord) -> list[dict[str, Any]]:
    """Return the checkpoints of a job that one of its hosts holds."""
    body = {"root": f"{host.workdir}/checkpoints", "job": record.job}
    rows = checkpoint_queries.question(shell, host, "list", body, checkpoint_queries.ListAnswer).checkpoints
    return [{**row, "host": host.name} for row in checkpoint_queries.rows_of(host, record.job, rows)]
