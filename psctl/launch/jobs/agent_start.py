"""Starts the agent of a job on a host: its orders wait in the host's memory until it has read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl.launch.home import DataLink, HostRecord
from psctl.launch.host_programs import HOST_FILES, run_program
from psctl.remote.shell import Process, Shell

SLOWEST = 10.0
"""Seconds that a host waits for the start of an agent at least, even with a smaller `timeouts.start`."""


class JobFolder(msgspec.Struct, frozen=True):
    """A host's answer to a request to make a job's folder."""

    taken: bool
    """The job's name is in use there."""
    orders: str = ""
    """Path of the orders on that host."""
    disk: bool = False
    """The orders are on a disk, as the host has no file system in memory."""


_JOB_FOLDER = msgspec.json.Decoder(JobFolder)


def write_orders(
    shell: Shell, host: HostRecord, orders: object, code: str, data: Sequence[DataLink], *, claim: bool, limit: float
) -> JobFolder:
    """Make a job's folder on a host, and write the agent's orders.

    Args:
        shell: the host.
        host: the job's part there.
        orders: as JSON values, or the AgentOrders.
        code, data: the hash of the job's code, and its data; both are there.
        claim: reserve the job's name there.
        limit: seconds after which orders that no agent read are removed.
    """
    question = {
        "folder": host.job_dir, "claim": claim, "wait": limit, "files": host.files,
        "code": f"{host.workdir}/code/{code}",
        "data": [each.path for each in data], "links": [[each.to, f"{host.workdir}/data/{each.path}"] for each in data],
    }  # fmt: skip
    return run_program(
        shell, host.python, HOST_FILES, "begin", question, _JOB_FOLDER, stdin=msgspec.json.encode(orders), timeout=600
    )


def start_agent(shell: Shell, host: HostRecord, orders: str, variables: Mapping[str, str]) -> Process:
    """Start the agent of a host.

    Args:
        shell: the host.
        host: the job's part there.
        orders: the path of its orders.
        variables: of the cluster's runtime.
    """
    mark = f"{host.job_dir}/agent"  # names it as a process of this job from its start
    return shell.start(
        # The environment of a process that hides its memory can be read by root only, its command line by all.
        [host.python, "-m", "psctl.agent.main", orders, f"PSCTL_ORDERS={mark}"],
        log=f"{host.job_dir}/agent.log",
        cwd=host.job_dir,
        env={
            **variables,
            "PYTHONPATH": host.code,
            "PYTHONUNBUFFERED": "1",
            "PSCTL_ORDERS": mark,
        },
    )
