"""Starts agents again on hosts of running jobs that have none any more, because the hosts booted.

The agent of the leading host issues the new agent's certificate and knows what changed since the job's start: which
host leads, and where its coordinator listens. The job lost the host when it went down, and uses it again when its agent
registers (coordinator/state/returning_hosts.py).
"""

from __future__ import annotations

import time

import msgspec
from msgspec.structs import replace

from psctl import errors
from psctl.job.control_answers import HelloAnswer
from psctl.launch import agent_calls, leader_search
from psctl.launch.home import HostRecord, JobRecord
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.jobs.agent_start import start_agent, write_orders
from psctl.remote.shell import Shell
from psctl.types import HostName, JsonObject


class RestartedAgent(msgspec.Struct, frozen=True):
    """An agent that was started again."""

    job: str
    host: str


class _Orders(msgspec.Struct, frozen=True):
    """The answer of the leading host's agent; its orders are passed on as they are."""

    orders: JsonObject


HELLO = 30.0
"""Seconds until an agent must answer."""

_ORDERS = msgspec.json.Decoder(_Orders)
_HELLO = msgspec.json.Decoder(HelloAnswer)


def restart_agents(reached: ReachedCluster) -> list[RestartedAgent]:
    """Start the agents that are missing on hosts of the cluster's running jobs; return them.

    Raises:
        PsctlError: a host could not be asked, or an agent not be started; names it.
    """
    found: list[RestartedAgent] = []
    for record in reached.home.jobs():
        if not record.over and record.cluster.name == reached.chosen.spec.name:
            found += _restart(reached, leader_search.on_fleet(reached.fleet, record))
    return found


def _restart(reached: ReachedCluster, record: JobRecord) -> list[RestartedAgent]:
    shells = reached.fleet.shells
    leading = shells.get(HostName(record.head.name))
    if leading is None or agent_calls.call(leading, record.head, "hello", _HELLO) is None:
        return []  # it has ended, or its head is not reached
    found = []
    for index, host in enumerate(record.hosts):
        shell = shells.get(HostName(host.name))
        if shell is None or index == record.leader or host.name in reached.failed or agent_calls.alive(shell, host):
            continue
        record = _start(reached, record, index, leading, shell)
        found.append(RestartedAgent(record.job, host.name))
    return found


def _start(reached: ReachedCluster, record: JobRecord, index: int, leading: Shell, shell: Shell) -> JobRecord:
    """Start the agent of one host; return the job's record with it."""
    host = record.hosts[index]
    folders = {
        "host": index, "python": host.python, "code": host.code, "workdir": host.workdir, "job_dir": host.job_dir,
        "code_dir": f"{host.workdir}/code/{record.code_hash}",
    }  # fmt: skip
    answer = agent_calls.call(leading, record.head, "orders", _ORDERS, folders)
    if answer is None:
        return record
    written = write_orders(shell, host, answer.orders, claim=False, limit=record.limit)
    process = start_agent(shell, host, written.orders, reached.chosen.spec.runtime.env)
    host = replace(host, pid=process.pid, started=process.started)
    _await_agent(shell, host, record.job)
    hosts = list(record.hosts)
    hosts[index] = host
    record = replace(record, hosts=hosts)
    reached.home.update_record(record)
    return record


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
                f"{host.name}: the agent of {job} was started again and ended: {line}",
                hint="psctl doctor shows what the host lacks; psctl up tries again",
                where=host.name,
            )
        if time.monotonic() >= deadline:
            raise errors.TimedOut(
                f"{host.name}: the agent of {job} was started again and did not answer within {HELLO:.0f} s",
                hint=f"its log is {host.job_dir}/agent.log there",
                where=host.name,
            )
        time.sleep(0.05)
