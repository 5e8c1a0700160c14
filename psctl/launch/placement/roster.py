"""Assigns workers to hosts, chooses the head, and makes the orders that follow from it. Pure.

Slots are what workers take: GPUs, else one a host, unless the cluster file says otherwise. A host with GPUs on which
another job runs counts as full, because it is unknown which of its GPUs that job uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.grouping import grouped
from psctl.launch.home import HostRecord
from psctl.message_costs import UNKNOWN_COSTS, MeasuredCosts
from psctl.orders import AgentOrders, CheckpointOrder, ExportOrder, HostOrder, JobOrder, ReaderOrder
from psctl.spec.cluster import ClusterSpec, HostSpec
from psctl.spec.groups import GroupSpec, Spread
from psctl.spec.job import Elastic, JobSpec, PerHost, Ssp
from psctl.types import Address, JsonObject

GRACE = 10.0
"""Seconds between TERM and KILL of a process."""


class Machine(msgspec.Struct, frozen=True):
    """A host as the roster needs it. `busy` maps running jobs to their workers there."""

    name: str
    address: str  # numeric
    interface: str
    cores: int
    gpus: int
    rate: float  # payload bytes/s of the interface, measured or nominal; 0: unknown
    busy: dict[str, int] = {}
    rdma: str = ""  # RDMA ports of the same network, as NCCL_IB_HCA has them
    kernel: str = ""  # hosts with the same one share their processors
    reason: str = ""  # why this address and interface, for people


class JobHosts(msgspec.Struct, frozen=True):
    """The hosts of a job, head first, and how many workers each has."""

    hosts: list[HostOrder]

    @property
    def world(self) -> int:
        """Number of workers."""
        return sum(host.workers for host in self.hosts)

    @property
    def names(self) -> list[str]:
        """Names of the hosts, the head's first."""
        return [host.name for host in self.hosts]


def idle(machines: Mapping[str, Machine]) -> dict[str, Machine]:
    """Return machines as if no job ran on them."""
    return {name: msgspec.structs.replace(machine, busy={}) for name, machine in machines.items()}


def slots_of(host: HostSpec, machine: Machine) -> int:
    """Return how many workers a host takes in all."""
    if "worker" not in host.roles:
        return 0
    return host.slots if host.slots is not None else machine.gpus or 1


def free_of(host: HostSpec, machine: Machine) -> int:
    """Return how many slots no running job holds."""
    slots = slots_of(host, machine)
    if machine.gpus and machine.busy:
        return 0
    return max(0, slots - sum(machine.busy.values()))


def wanted(host: HostSpec, machine: Machine, job: JobSpec) -> int:
    """Return the number of workers that `auto` or {per_host: N} means on a host."""
    slots = slots_of(host, machine)
    if isinstance(job.workers, PerHost):
        return job.workers.per_host if slots else 0
    return min(slots, machine.gpus or (2 if host.local else 1))


def assign_workers(cluster: ClusterSpec, machines: Mapping[str, Machine], job: JobSpec) -> JobHosts:
    """Give every worker a host.

    Args:
        cluster: its hosts in order; those not in `machines` are left out.
        machines: what was found on each host.
        job: has the requested numbers of workers and servers.

    Raises:
        InvalidFile: more workers than the cluster has slots; the user's fault.
        JobRunning: enough slots, but running jobs hold them.
    """
    hosts = [host for host in cluster.hosts if host.name in machines]
    if isinstance(job.workers, int):
        counts = _fill(cluster, hosts, machines, job.workers)
    elif isinstance(job.workers, Elastic):
        free = sum(free_of(host, machines[host.name]) for host in hosts)
        counts = _fill(cluster, hosts, machines, max(job.workers.min, min(job.workers.max, free)))
    else:
        counts = {host.name: wanted(host, machines[host.name], job) for host in hosts}
        _check(cluster, hosts, machines, counts)
    if not any(counts.values()):
        raise errors.InvalidFile(
            f"cluster {cluster.name}: no host may hold a worker", hint="roles: [worker] on one of them",
            where=cluster.source,
        )  # fmt: skip
    uses_servers = job.sync.strategy != "native" and job.servers != 0
    reserve = isinstance(job.workers, Elastic)  # hosts that may take workers later belong to the job too
    seated = [
        host
        for host in hosts
        if counts[host.name]
        or (uses_servers and "server" in host.roles)
        or (reserve and free_of(host, machines[host.name]))
    ]
    head = next(host for host in seated if counts[host.name])
    order = [head, *(host for host in seated if host is not head)]
    return JobHosts([_host_order(host, machines[host.name], counts[host.name]) for host in order])


def servers_of(job: JobSpec, serving: int) -> int | None:
    """Return the number of servers that the job requests on hosts that may serve; None when the plan decides."""
    if isinstance(job.servers, PerHost):
        return job.servers.per_host * serving
    return job.servers if isinstance(job.servers, int) else None


def _fill(
    cluster: ClusterSpec, hosts: Sequence[HostSpec], machines: Mapping[str, Machine], workers: int
) -> dict[str, int]:
    """Fill hosts in the file's order, each up to its free slots."""
    slots = {host.name: slots_of(host, machines[host.name]) for host in hosts}
    free = {host.name: free_of(host, machines[host.name]) for host in hosts}
    if workers > sum(slots.values()):
        raise _too_few(cluster, workers, slots)
    if workers > sum(free.values()):
        raise _held(cluster, workers, sum(free.values()), machines)
    counts, left = {}, workers
    for host in hosts:
        counts[host.name] = min(left, free[host.name])
        left -= counts[host.name]
    return counts


def _check(
    cluster: ClusterSpec, hosts: Sequence[HostSpec], machines: Mapping[str, Machine], counts: Mapping[str, int]
) -> None:
    slots = {host.name: slots_of(host, machines[host.name]) for host in hosts}
    over = {name: slots[name] for name, count in counts.items() if count > slots[name]}
    if over:
        raise _too_few(cluster, sum(counts.values()), over)
    short = [host.name for host in hosts if counts[host.name] > free_of(host, machines[host.name])]
    if short:
        free = sum(free_of(host, machines[host.name]) for host in hosts)
        raise _held(cluster, sum(counts.values()), free, {name: machines[name] for name in short})


def _too_few(cluster: ClusterSpec, workers: int, slots: Mapping[str, int]) -> errors.PsctlError:
    listed = ", ".join(f"{name} {count}" for name, count in slots.items())
    return errors.InvalidFile(
        f"{workers} workers do not fit: cluster {cluster.name} has {sum(slots.values())} slots ({listed})",
        hint="request fewer workers, or set `slots: N` of a host in the cluster file",
        where=cluster.source,
    )


def _held(cluster: ClusterSpec, workers: int, free: int, machines: Mapping[str, Machine]) -> errors.JobRunning:
    holders = grouped((job, name) for name, machine in machines.items() for job in machine.busy)
    listed = "; ".join(f"{job} on {', '.join(names)}" for job, names in holders.items())
    first = next(iter(holders), "")
    return errors.JobRunning(
        f"{workers} workers need slots that running jobs hold: {free} free on {cluster.name} ({listed})",
        hint=f"psctl stop {first}, or wait for it: psctl attach {first}",
        where=first,
    )


def spare_host(host: HostSpec, machine: Machine) -> HostOrder:
    """Return the order of a host that holds none of a job's workers yet."""
    return _host_order(host, machine, 0)


def _host_order(host: HostSpec, machine: Machine, workers: int) -> HostOrder:
    return HostOrder(
        name=host.name, address=machine.address, interface=machine.interface, cores=machine.cores, gpus=machine.gpus,
        workers=workers, may_serve="server" in host.roles, rate=machine.rate,
        slots=free_of(host, machine), kernel=machine.kernel, rdma=machine.rdma,
    )  # fmt: skip


class Resumed(msgspec.Struct, frozen=True):
    """The checkpoint that a job resumes from: its folder on the head, and its id."""

    folder: str
    id: str


def job_order(
    name: str,
    cluster: ClusterSpec,
    job: JobSpec,
    job_hosts: JobHosts,
    *,
    code_hash: str = "",
    job_file: str = "",
    environment: Mapping[str, str] | None = None,
    resume: Resumed | None = None,
    topology: JsonObject | None = None,
    costs: MeasuredCosts = UNKNOWN_COSTS,
) -> JobOrder:  # long: one line a field
    """Return the job's order for its coordinator, its agents and the plan.

    Args:
        name: "digits-3".
        cluster, job, job_hosts: the cluster, the job and its hosts.
        code_hash: of the job's folder.
        job_file: its text, for the checkpoint's manifest.
        environment: variables for every process, secrets left out.
        resume: where it resumes from.
        topology: the document of its hosts; None: nominal rates alone.
        costs: of messages, measured on this cluster.
    """
    argv = [job.script] if job.script is not None else ["-m", str(job.module)]
    return JobOrder(
        name=name,
        argv=[*argv, *job.args],
        hosts=job_hosts.hosts,
        servers=servers_of(job, sum(host.may_serve for host in job_hosts.hosts)),
        strategy=strategy_of(job),
        update=job.sync.update,
        staleness=staleness_of(job),
        period=job.sync.period,
        compression=job.sync.compressed,
        sums=job.sync.sums,
        factor_rows=job.sync.factor_rows,
        compute=job.sync.compute,
        replan=job.sync.replan,
        joint_batch_norm=job.sync.batchnorm == "sync",
        bucket=bucket_of(job),
        step_in_backward=job.sync.step_in_backward,
        share=job.loader.share,
        seed=job.seed,
        size=job.sync.size,
        start_timeout=job.timeouts.start,
        stall_timeout=job.timeouts.stall,
        total_timeout=job.timeouts.total,
        report_seconds=job.metrics.interval,
        log_limit=job.logs.max,
        ports=cluster.network.ports,
        checkpoint=_checkpoints(job),
        resume=resume.folder if resume else None,
        resume_id=resume.id if resume else None,
        code_hash=code_hash,
        job_file=job_file,
        environment=dict(environment or {}),
        congestion=cluster.network.congestion,
        sealed=cluster.network.encryption == "on",
        require_encryption=cluster.network.require_encryption,
        restarts=job.restart.max,
        elastic=(job.workers.min, job.workers.max) if isinstance(job.workers, Elastic) else None,
        restart_wait=job.restart.wait,
        replicas=job.replicas if isinstance(job.replicas, int) else None,
        on_worker_loss=job.restart.on_worker_loss,
        topology=topology,
        costs=costs,
        exports=_exports(job),
        readers=assign_readers(job, job_hosts),
    )


def assign_readers(job: JobSpec, job_hosts: JobHosts) -> list[ReaderOrder]:
    """Give every process of the job's groups a host: of its group's hosts in turn, else the one with least to do.

    Raises:
        InvalidFile: a group names a host that the job does not have; the user's fault.
    """
    found: list[ReaderOrder] = []
    load = [host.workers for host in job_hosts.hosts]
    for index, group in enumerate(job.groups):
        unknown = [name for name in group.hosts if name not in job_hosts.names]
        if unknown:
            raise errors.InvalidFile(
                f"groups[{index}].hosts: {unknown[0]} is no host of this job ({', '.join(job_hosts.names)})",
                hint="name hosts of the cluster that hold workers or servers of the job",
                where=job.source,
            )
        for rank in range(group.readers):
            if group.hosts:
                host = job_hosts.names.index(group.hosts[rank % len(group.hosts)])
            else:
                host = min(range(len(load)), key=lambda at: (load[at], -at))
            load[host] += 1
            found.append(
                ReaderOrder(
                    group.name, group.argv, rank, group.readers, host, _spread(group, job), group.parameters,
                    group.stores,
                )
            )  # fmt: skip
    return found


def _spread(group: GroupSpec, job: JobSpec) -> int | None:
    """Return the steps by which the parameters of one read of a group may differ; None: any."""
    if isinstance(group.consistency, Spread):
        return group.consistency.ssp
    asynchronous = group.consistency == "asp" or (group.consistency == "auto" and job.sync.consistency == "asp")
    return None if asynchronous else 0


def bucket_of(job: JobSpec) -> int | None:
    """Return the bytes of a bucket of gradients; 0: measured in the first steps; None: the default."""
    bucket = job.sync.bucket
    return bucket if bucket is None or isinstance(bucket, int) else 0


def strategy_of(job: JobSpec) -> str:
    """Return the strategy that the job requests: groups that read servers need some."""
    return "ps" if job.groups and job.sync.strategy == "auto" else job.sync.strategy


def staleness_of(job: JobSpec) -> int | None:
    """Return how many clocks the fastest worker may be ahead of the slowest; 0 under bsp, None under asp."""
    consistency = job.sync.consistency
    if isinstance(consistency, Ssp):
        return consistency.ssp
    return None if consistency == "asp" else 0


def _exports(job: JobSpec) -> ExportOrder:
    metrics = job.metrics
    folder = metrics.tensorboard if isinstance(metrics.tensorboard, str) else "" if metrics.tensorboard else None
    return ExportOrder(tensorboard=folder, prometheus=metrics.prometheus, mlflow=metrics.mlflow, wandb=metrics.wandb)


def _checkpoints(job: JobSpec) -> CheckpointOrder:
    every, best = job.checkpoint.every, job.checkpoint.keep_best
    return CheckpointOrder(
        to=job.checkpoint.to,
        every_steps=every.steps if every else 0,
        every_seconds=every.seconds if every else 0.0,
        every_auto=every.auto if every else False,
        keep=job.checkpoint.keep,
        keep_best=(best.metric, best.mode) if best else None,
        on_stop=job.checkpoint.on_stop,
        copies=job.checkpoint.copies,
        full_every=job.checkpoint.full_every,
    )


class AgentKeys(msgspec.Struct, frozen=True):
    """The keys and certificates of an agent; only the head has `authority_key`."""

    authority: str
    certificate: str
    key: str
    preauth_secret: str
    authority_key: str = ""


def agent_orders(
    job: JobOrder,
    index: int,
    host: HostRecord,
    keys: AgentKeys,
    coordinator: Address | None,
    secrets: Mapping[str, str],
) -> AgentOrders:
    """Return the orders of one agent.

    Args:
        job: the job; what its plan is made from goes to the head only, where the plan is made.
        index: the host's place in the job; the head's is 0.
        host: its folders.
        keys: the agent's keys.
        coordinator: the coordinator's address; None for the head, whose agent starts the coordinator.
        secrets: of the job, by name.
    """
    assert (coordinator is None) == (index == 0), "the head's agent starts the coordinator, all others reach it"
    assert bool(keys.authority_key) == (index == 0), "the authority's key goes to the head and nowhere else"
    job = job if index == 0 else msgspec.structs.replace(job, topology=None, costs=UNKNOWN_COSTS)
    return AgentOrders(
        job=job, host=index, python=host.python, paths=[host.code], workdir=host.workdir, job_dir=host.job_dir,
        code_dir=host.files, authority=keys.authority, certificate=keys.certificate,
        key=keys.key, preauth_secret=keys.preauth_secret, coordinator=coordinator, authority_key=keys.authority_key,
        secrets=dict(secrets), grace=GRACE,
    )  # fmt: skip
