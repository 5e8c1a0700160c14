"""Finds the host that leads a job: another one than at first, if that was lost.

The agent of each host writes which host leads (process/leader_file.py). The newest answer holds.
"""

from __future__ import annotations

import time

import msgspec

from psctl import errors
from psctl.job.leadership_messages import FEWEST_VOTERS
from psctl.launch import agent_calls
from psctl.launch.clusters import Connect, recalled_cluster
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.process.leader_file import NAME, LeaderFile
from psctl.remote.fleet import Fleet
from psctl.remote.shell import Shell
from psctl.types import UNDECODABLE, HostName

ELECTION = 30.0
"""Seconds in which a standby leads after the leader's host is lost, at most."""


def may_move(record: JobRecord) -> bool:
    """Return whether another host may lead a job than this machine knows."""
    return len(record.hosts) >= FEWEST_VOTERS and not record.over


def has_moved(fleet: Fleet, record: JobRecord) -> bool:
    """Return whether other hosts must be asked: the head is not reached, or leads no more.

    Args:
        fleet: connections, to the head at least.
        record: the job.
    """
    if not may_move(record):
        return False
    shell = fleet.shells.get(HostName(record.head.name))
    if shell is None:
        return True
    try:
        known = read(shell, record.head)
        return (known is not None and known.host != record.leader) or not agent_calls.alive(shell, record.head)
    except errors.HostUnreachable:
        return True


def read(shell: Shell, host: HostRecord) -> LeaderFile | None:
    """Return what a host knows of the leader; None when it knows nothing."""
    found = shell.run(["cat", f"{host.job_dir}/{NAME}"], check=False, timeout=10)
    try:
        return msgspec.json.decode(found.stdout, type=LeaderFile) if found.status == 0 else None
    except UNDECODABLE:
        return None


def on_fleet(fleet: Fleet, record: JobRecord) -> JobRecord:
    """Return the record of a job with the leader that the connected hosts name; unchanged if none does."""
    if not may_move(record):
        return record
    by_name = {host.name: host for host in record.hosts}

    def ask(name: HostName, shell: Shell) -> LeaderFile | None:
        return read(shell, by_name[name])

    asked = fleet.each(ask, names=[name for name in by_name if name in fleet.shells])
    found = [outcome.value for outcome in asked.values() if outcome.ok and outcome.value is not None]
    newest = max(found, key=lambda each: each.term, default=None)
    if newest is None or not 0 <= newest.host < len(record.hosts):
        return record
    return record.led_by(newest.host)


def find(home: Home, record: JobRecord, connect: Connect) -> JobRecord:
    """Ask all hosts of a job which one leads; return its record with that leader, which is saved."""
    return search(home, record, connect)[0]


def search(home: Home, record: JobRecord, connect: Connect) -> tuple[JobRecord, str]:
    """Do as `find`; return also why another host may lead soon, or leads and is not reached; "" if none does."""
    if not may_move(record):
        return record, ""
    with connect(recalled_cluster(home, record.cluster), [host.name for host in record.hosts]) as fleet:
        found = on_fleet(fleet, record)
        open_question = "" if found.leader != record.leader else _successors(fleet, record)
    if found.leader != record.leader:
        home.update_record(found)
    return found, open_question


def await_leader(fleet: Fleet, record: JobRecord) -> JobRecord:
    """Wait until another host leads, if the head has ended and others have not; return the record with the leader.

    Args:
        fleet: connections to the job's hosts.
        record: the job.
    """
    until = time.monotonic() + ELECTION
    while True:
        found = on_fleet(fleet, record)
        decided = found.leader != record.leader or not has_moved(fleet, record)
        if decided or time.monotonic() >= until or not _others_alive(fleet, record):
            return found
        time.sleep(0.5)


def _successors(fleet: Fleet, record: JobRecord) -> str:
    """Return why a job whose head has ended or is not reached may go on elsewhere; "" if it may not."""
    if not has_moved(fleet, record):
        return ""
    if _others_alive(fleet, record):
        return f"its head {record.head.name} is lost, and another host is to lead"
    unreached = [host.name for host in record.hosts if host.name in fleet.failed]
    return f"{', '.join(unreached)} not reached, and may lead" if unreached else ""


def _others_alive(fleet: Fleet, record: JobRecord) -> bool:
    """Return whether an agent of the job runs on a connected host that is not the head."""
    by_name = {host.name: host for host in record.hosts if host is not record.head}

    def ask(name: HostName, shell: Shell) -> bool:
        return agent_calls.alive(shell, by_name[name])

    asked = fleet.each(ask, names=[name for name in by_name if name in fleet.shells])
    return any(outcome.ok and outcome.value for outcome in asked.values())
