"""Gives running jobs the hosts that `up` made ready: hosts that booted, and hosts that are new in the cluster file.

The agent of the leading host issues the new agent's certificate and knows what changed since the job's start: its
hosts, which of them leads, and where its coordinator listens. A host that booted was lost to the job; the job uses it
again when its agent registers, and a new one in the same way (coordinator/state/returning_hosts.py).
"""

from __future__ import annotations

import os
import time
from pathlib import PurePosixPath

import msgspec
from msgspec.structs import replace

from psctl import errors
from psctl.job.control_answers import HelloAnswer
from psctl.launch import agent_calls, leader_search
from psctl.launch.checkpoints.checkpoint_actions import fetch_code
from psctl.launch.clusters import ChosenCluster, Progress
from psctl.launch.files import data_sets, data_transfer, url_fetch
from psctl.launch.home import Home, HostRecord, JobRecord
from psctl.launch.hosts.converge import ReachedCluster, send_archive
from psctl.launch.jobs import submit
from psctl.launch.jobs.agent_start import start_agent, write_orders
from psctl.launch.placement.cluster_snapshot import machines_of
from psctl.launch.placement.roster import spare_host
from psctl.orders import HostOrder
from psctl.remote.shell import Shell
from psctl.spec.cluster import ClusterSpec
from psctl.spec.noted_options import load_noted, split_notes
from psctl.types import HostName, JsonObject


class JoinedHost(msgspec.Struct, frozen=True):
    """A host on which an agent of a running job was started, or was not, for a reason."""

    job: str
    host: str
    new: bool  # to the job
    problem: str = ""


class _Orders(msgspec.Struct, frozen=True):
    """The answer of the leading host's agent; its orders are passed on as they are."""

    orders: JsonObject


HELLO = 30.0
"""Seconds until an agent must answer."""

_ORDERS = msgspec.json.Decoder(_Orders)
_HELLO = msgspec.json.Decoder(HelloAnswer)


def codes_of_running_jobs(home: Home, chosen: ChosenCluster) -> list[str]:
    """Return the hashes of the folders that the cluster's running jobs were started from."""
    return [record.code_hash for record in _running(home, chosen)]


def join_running_jobs(reached: ReachedCluster, progress: Progress) -> list[JoinedHost]:
    """Start the agents that the cluster's running jobs lack on its hosts; return them, and those that were refused.

    Raises:
        PsctlError: a host could not be asked, or an agent not be started; names it.
    """
    found: list[JoinedHost] = []
    for record in _running(reached.home, reached.chosen):
        known = leader_search.on_fleet(reached.fleet, record)
        leading = reached.fleet.shells.get(HostName(known.head.name))
        if leading is not None and agent_calls.call(leading, known.head, "hello", _HELLO) is not None:
            found += _RunningJob(reached, known, leading, progress).join()
    return found


def _running(home: Home, chosen: ChosenCluster) -> list[JobRecord]:
    return [record for record in home.jobs() if not record.over and record.cluster.name == chosen.spec.name]


class _RunningJob:
    """A running job, and the connection to its head."""

    def __init__(self, reached: ReachedCluster, record: JobRecord, leading: Shell, progress: Progress) -> None:
        self._reached, self._record, self._leading, self._progress = reached, record, leading, progress

    def join(self) -> list[JoinedHost]:
        """Start the agents of hosts that booted, then those of new hosts."""
        found, job = [], self._record.job
        for index, host in enumerate(self._record.hosts):
            shell = self._shell(host.name)
            if shell is not None and index != self._record.leader and not agent_calls.alive(shell, host):
                self._start(index, host, shell, None)
                found.append(JoinedHost(job, host.name, new=False))
        for new in self._new_hosts():
            problem = self._why_not()
            try:
                if not problem:
                    self._add(new)
            except errors.CommandFailed as error:
                problem = error.message
            found.append(JoinedHost(job, new.name, new=True, problem=problem))
        return found

    def _shell(self, name: str) -> Shell | None:
        return None if name in self._reached.failed else self._reached.fleet.shells.get(HostName(name))

    def _new_hosts(self) -> list[HostOrder]:
        """The hosts of the cluster that are not the job's, and have a free slot or may hold servers."""
        reached, known = self._reached, {host.name for host in self._record.hosts}
        new = [host for host in reached.chosen.spec.hosts if host.name not in known and self._shell(host.name)]
        if not new:
            return []
        machines = machines_of(reached)
        orders = [spare_host(host, machines[host.name]) for host in new if host.name in machines]
        return [order for order in orders if order.slots or order.may_serve]

    def _why_not(self) -> str:
        """Return why no host can be added to the job by this psctl and this cluster file, or ""."""
        record, spec = self._record, self._reached.chosen.spec
        if PurePosixPath(record.head.code).name != self._reached.needs.code:
            return "the job was started by another version of psctl, which must add it"
        now, before = _logins(spec), _logins(record.cluster.spec())
        moved = [host.name for host in record.hosts if now.get(host.name) != before.get(host.name)]
        names = ", ".join(moved)
        return f"in the cluster file {names}, where the job runs, is another machine or none" if moved else ""

    def _add(self, order: HostOrder) -> None:
        """Add a host to the job and start its agent there."""
        reached, record = self._reached, self._record
        shell, host = reached.fleet.shell(order.name), reached.record(record.job, order.name)
        if not reached.sites[order.name].codes.get(record.code_hash):
            self._progress(order.name, f"sending the folder of {record.job}")
            archive = fetch_code(self._leading, record.head.workdir, record.code_hash)
            send_archive(shell, reached.sites[order.name].executable, f"{host.workdir}/code", archive, keep=True)
        self._bring_data(order.name)
        self._record = replace(record, cluster=reached.chosen.known)
        self._start(len(record.hosts), host, shell, order)

    def _bring_data(self, name: str) -> None:
        """Send the job's data to a host, as the job has it.

        Raises:
            CommandFailed: it is not the same any more where it comes from.
        """
        reached, record = self._reached, self._record
        if not record.data:
            return
        text = split_notes(record.job_file)[0]
        job = load_noted(record.job_file, record.job_source)
        hashed = not all(each.path.startswith(data_sets.HERE_PREFIX) for each in record.data)
        try:
            sets = data_sets.data_sets(job, text, reached.home, None, hashed=hashed)
        except errors.InvalidFile as error:
            raise errors.CommandFailed(name, "receive the job's data", 1, error.message) from error
        variables = {**reached.chosen.spec.runtime.env, **submit.variables(job, {}, {}, os.environ)}
        variables |= submit.secrets_of(job, os.environ)
        data_transfer.send_data(reached, sets, [name], self._progress)
        sets = url_fetch.fetch_urls(reached, sets, [name], variables, self._progress)
        for link, found in zip(record.data, sets, strict=True):
            if link != found.link:
                why = f"{found.spec.source} is not as it was when the job began, and its hosts must have the same data"
                raise errors.CommandFailed(name, "receive the job's data", 1, why)

    def _start(self, index: int, host: HostRecord, shell: Shell, added: HostOrder | None) -> None:
        """Start the agent of one host, and record it; before its start too, as a psctl may be killed."""
        record = self._record
        folders = {
            "host": index, "python": host.python, "code": host.code, "workdir": host.workdir, "job_dir": host.job_dir,
            "code_dir": host.files,
            "added": None if added is None else msgspec.to_builtins(added),
        }  # fmt: skip
        answer = agent_calls.call(self._leading, record.head, "orders", _ORDERS, folders)
        if answer is None:
            raise errors.CommandFailed(self._leading.name, "orders", 1, f"the agent of {record.job} has ended")
        self._save(index, host)
        written = write_orders(
            shell, host, answer.orders, record.code_hash, record.data, claim=False, limit=record.limit
        )
        process = start_agent(shell, host, written.orders, self._reached.chosen.spec.runtime.env)
        host = replace(host, pid=process.pid, started=process.started)
        _await_agent(shell, host, record.job)
        self._save(index, host)

    def _save(self, index: int, host: HostRecord) -> None:
        hosts = [*self._record.hosts[:index], host, *self._record.hosts[index + 1 :]]
        self._record = replace(self._record, hosts=hosts)
        self._reached.home.update_record(self._record)


def _logins(cluster: ClusterSpec) -> dict[str, tuple[str, str | None, int | None, str | None]]:
    return {
        host.name: (host.address, host.user, host.port, cluster.exec or cluster.allocation) for host in cluster.hosts
    }


def _await_agent(shell: Shell, host: HostRecord, job: str) -> None:
    """Wait until an agent answers.

    Raises:
        JobFailed: it has ended; the message has the last line of its log.
        TimedOut: it does not answer in time.
    """
    deadline = time.monotonic() + HELLO
    while agent_calls.call(shell, host, "hello", _HELLO) is None:
        if not agent_calls.alive(shell, host):
            line = agent_calls.last_log_line(shell, host) or "its log is empty"
            raise errors.JobFailed(
                f"{host.name}: the agent of {job} was started and ended: {line}",
                hint="psctl doctor shows what the host lacks; psctl up tries again",
                where=host.name,
            )
        if time.monotonic() >= deadline:
            raise errors.TimedOut(
                f"{host.name}: the agent of {job} was started and did not answer within {HELLO:.0f} s",
                hint=f"its log is {host.job_dir}/agent.log there",
                where=host.name,
            )
        time.sleep(0.05)
