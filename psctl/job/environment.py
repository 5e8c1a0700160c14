"""The environment variables of a job's processes: those of torchrun (static, one agent a host) and those of psctl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from psctl.orders import HostOrder, JobOrder

SPINS = "GOMP_SPINCOUNT"

NAMES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "PSCTL_JOB", "PSCTL_ROLE", "PSCTL_HOST", "PSCTL_GROUP",
    "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", SPINS,
})  # fmt: skip
"""All variables that psctl sets; any other variable that the coordinator sends for a process is from the job file."""


def worker_places(order: JobOrder) -> dict[int, tuple[int, int]]:
    """Return by rank the (host index, local rank) of every worker; ranks are assigned in roster order."""
    return dict(enumerate((index, local) for index, host in enumerate(order.hosts) for local in range(host.workers)))


class WorkerSeats:
    """The hosts of all workers of a job.

    Args:
        places: by rank, the (host index, local rank) of every worker.
    """

    def __init__(self, places: Mapping[int, tuple[int, int]]) -> None:
        self.places = places
        self.on = Counter(host for host, _ in places.values())
        self.groups = {host: group for group, host in enumerate(sorted(self.on))}


def worker_environment(order: JobOrder, seats: WorkerSeats, rank: int, restarts: int = 0) -> dict[str, str]:
    """Return the variables that psctl sets for a worker; variables of the job file replace the tunable ones.

    The agent adds MASTER_ADDR and MASTER_PORT, which differ between hosts.

    Args:
        order: the job.
        seats: the hosts of all workers.
        rank: of the worker.
        restarts: number of restarts of the job so far.
    """
    index, local = seats.places[rank]
    host, there, world = order.hosts[index], seats.on[index], len(seats.places)
    return {
        **_tunable(host, there),
        **_yielding(order, host),
        **order.environment,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(there),
        "GROUP_RANK": str(seats.groups[index]),
        "GROUP_WORLD_SIZE": str(len(seats.groups)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": order.name,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(order.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **_own(order, "worker", host),
    }


def server_environment(order: JobOrder, host: HostOrder, servers: int) -> dict[str, str]:
    """Return the variables that psctl sets for a server on `host`, which has `servers` servers."""
    return {**_tunable(host, host.workers + servers), **order.environment, **_own(order, "server", host)}


def reader_environment(order: JobOrder, number: int, host: HostOrder) -> dict[str, str]:
    """Return the variables that psctl sets for a reader on `host`; `number` is its place in the order."""
    there = sum(each.host == order.readers[number].host for each in order.readers)
    own = _own(order, "reader", host) | {"PSCTL_GROUP": order.readers[number].group}
    return {**_tunable(host, host.workers + there), **order.environment, **own}


def _tunable(host: HostOrder, processes: int) -> dict[str, str]:
    names = {"OMP_NUM_THREADS": str(max(1, host.cores // max(1, processes))), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if host.interface:
        names["GLOO_SOCKET_IFNAME"] = names["NCCL_SOCKET_IFNAME"] = host.interface
    if host.rdma:
        names["NCCL_IB_HCA"] = host.rdma
    return names


def _yielding(order: JobOrder, host: HostOrder) -> dict[str, str]:
    """Return variables that make OpenMP's threads sleep early where a server may share their cores.

    Otherwise they spin for milliseconds at each barrier for a thread whose core runs a server: 40 ms a step instead of
    7 were measured with a worker and a server on two cores. libgomp itself uses 1000 spins when a process has more
    threads than cores. A job file that sets OMP_WAIT_POLICY takes precedence.
    """
    shared = host.may_serve and order.strategy in ("auto", "ps") and "OMP_WAIT_POLICY" not in order.environment
    return {SPINS: "1000"} if shared else {}


def _own(order: JobOrder, role: str, host: HostOrder) -> dict[str, str]:
    return {"PSCTL_JOB": order.name, "PSCTL_ROLE": role, "PSCTL_HOST": host.name, "PYTHONUNBUFFERED": "1"}
