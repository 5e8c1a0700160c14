"""The environment of a job's processes: what torchrun sets for a static job with one agent a host, and psctl's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psctl.orders import HostOrder, JobOrder

SPINS = "GOMP_SPINCOUNT"


NAMES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "PSCTL_JOB", "PSCTL_ROLE", "PSCTL_HOST",
    "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", SPINS,
})  # fmt: skip
"""All variables that psctl sets by itself; what else the coordinator gives a process must be the job file's."""


def worker_places(order: JobOrder) -> list[tuple[int, int]]:
    """Return (host index, local rank) of every worker, by rank: ranks are given out in roster order."""
    return [(index, local) for index, host in enumerate(order.hosts) for local in range(host.workers)]


class WorkerSeats:
    """Where all workers of a job sit.

    Args:
        places: (host index, local rank) of every worker, by rank.
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self.places = places
        self.on = Counter(host for host, _ in places)
        self.groups = {host: group for group, host in enumerate(sorted(self.on))}


def worker_environment(order: JobOrder, seats: WorkerSeats, rank: int, restarts: int = 0) -> dict[str, str]:
    """Return what psctl sets for a worker; the job's own variables win over the tunable ones.

    Its agent adds MASTER_ADDR and MASTER_PORT, which are its host's own.

    Args:
        order: the job.
        seats: of all workers.
        rank: which worker.
        restarts: how often workers were started again before.
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
    """Return what psctl sets for a server on `host`, where `servers` servers sit."""
    return {**_tunable(host, host.workers + servers), **order.environment, **_own(order, "server", host)}


def _tunable(host: HostOrder, processes: int) -> dict[str, str]:
    names = {"OMP_NUM_THREADS": str(max(1, host.cores // max(1, processes))), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if host.interface:
        names["GLOO_SOCKET_IFNAME"] = names["NCCL_SOCKET_IFNAME"] = host.interface
    if host.rdma:
        names["NCCL_IB_HCA"] = host.rdma
    return names


def _yielding(order: JobOrder, host: HostOrder) -> dict[str, str]:
    """Have OpenMP's threads sleep soon where a server may share their cores; who set how they wait has decided.

    They would spin for milliseconds at each barrier for one whose core a server has: 40 ms a step instead of 7 were
    measured with a worker and a server on two cores. 1000 turns is what libgomp itself takes when it sees more threads
    of its own process than cores.
    """
    shared = host.may_serve and order.strategy in ("auto", "ps") and "OMP_WAIT_POLICY" not in order.environment
    return {SPINS: "1000"} if shared else {}


def _own(order: JobOrder, role: str, host: HostOrder) -> dict[str, str]:
    return {"PSCTL_JOB": order.name, "PSCTL_ROLE": role, "PSCTL_HOST": host.name, "PYTHONUNBUFFERED": "1"}
