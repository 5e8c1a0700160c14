"""The input of a plan: the request of a job file and a model, and the machines with their links and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from psctl.errors import InvalidFile, UsageError
from psctl.message_costs import AS_PREDICTED, Costs, StrategyPace
from psctl.orders import HostOrder, JobOrder
from psctl.plan.simulation.cost_model import ASSUMED_RATE, FREE, engine_costs, paces_of
from psctl.plan.simulation.routes import SimulatedNetwork, places
from psctl.topology.graph import NETWORK, Between, ClusterGraph, HostGraph, HostNode
from psctl.topology.host.document import read_cluster_document
from psctl.types import PLAIN, Compression, Layout


class PlanRequest(msgspec.Struct, frozen=True):
    """The request of a job file and a model.

    Args:
        strategy: a name, or auto.
        update: auto, server or worker.
        servers: their number; None: chosen by the plan.
        optimizer: whether the optimizer is fit for servers.
        bucketed: gradients are sent in buckets, as in training; else as one vector.
        serving: a number of servers is requested, so only strategies that use servers are considered.
        staleness: clocks that the fastest worker may be ahead; 0: bsp; None: asp.
        period: local steps between two synchronisations.
        replicas: of each shard; None: one where there are two servers.
        compression: how gradients are compressed.
        sealed: psctl's own connections are encrypted (network.encryption); for the text of the reason.
        encrypted: nothing may be sent between hosts unencrypted (network.require_encryption).
        on_gpus: gradients are on GPUs; None: where the ranks are.
        hooked: gradients come from DistributedDataParallel, whose buckets collectives sum.
        bucket: bytes of a bucket of collectives; 0: measured in the first steps; None: the default.
        compute: seconds of compute of a step, forward and backward; None: not known.
        replan: the strategy may be one that `sync.replan` took; for the text of the reason.
        sums: under `ps` gradients are summed by host or by rack before they are pushed; auto: the faster.
        in_parts: `update: auto` may have each worker step a part of the parameters, where the optimizer fits.
        step_in_backward: a sharded optimizer steps some parameters while backward runs.
    """

    strategy: str = "auto"
    update: str = "auto"
    servers: int | None = None
    optimizer: bool = True
    bucketed: bool = False
    serving: bool = False
    staleness: int | None = 0
    period: int = 1
    replicas: int | None = 0
    compression: Compression = PLAIN
    encrypted: bool = False
    sealed: bool = True
    on_gpus: bool | None = None
    hooked: bool = False
    bucket: int | None = None
    compute: float | None = None
    replan: bool = False
    sums: str = "auto"
    in_parts: bool = True
    step_in_backward: bool = False

    @property
    def may_be_sharded(self) -> bool:
        """Whether each worker may step a part of the parameters without a request for it."""
        able = self.optimizer and self.compression.off and self.bucket != 0 and not self.hooked
        return self.in_parts and self.update == "auto" and able

    @property
    def halved(self) -> float:
        """The share of the gradients' bytes that collectives carry; values, which return where the optimizer is
        sharded, are not compressed."""
        return (0.75 if self.update == "sharded" else 0.5) if self.compression.halves else 1.0


def request_of_job(order: JobOrder, layout: Layout | None) -> PlanRequest:
    """Return the request of a job."""
    fit = layout is None or bool(layout.optimizer)
    serving = order.strategy == "auto" and bool(order.servers)
    return PlanRequest(
        order.strategy,
        order.update,
        order.servers,
        fit,
        bucketed=True,
        serving=serving,
        staleness=order.staleness,
        period=order.period,
        replicas=order.replicas,
        compression=order.compression,
        encrypted=order.require_encryption,
        sealed=order.sealed,
        bucket=order.bucket,
        compute=order.compute,
        replan=order.replan,
        sums=order.sums,
        in_parts=order.factor_rows is None,
        step_in_backward=order.step_in_backward,
    )


class PlanInput:
    """The machines of a plan: hosts, links, the place of each rank, and the costs of messages.

    Args:
        cluster: the graph.
        ranks: the place of each rank.
        serving: the hosts that may hold servers, in order.
        costs: of each engine's messages.
        paces: factors by which strategies were measured to differ from their predictions.
        ranks_per_core: ranks per core on the busiest host.
    """

    def __init__(
        self,
        cluster: ClusterGraph,
        ranks: Sequence[str],
        serving: Sequence[str],
        costs: Mapping[str, Costs] = FREE,
        paces: Mapping[str, StrategyPace] | None = None,
        ranks_per_core: float = 1.0,
    ) -> None:
        self.cluster = cluster
        self.network = SimulatedNetwork(cluster)
        self.ranks = tuple(ranks)
        self.serving = tuple(serving)
        self.costs = costs
        self.paces = paces or {}
        self.ranks_per_core = ranks_per_core
        names = {host.name for host in cluster.hosts}
        self.hosts = tuple(place if place in names else place.rpartition("/")[0] for place in ranks)
        """The host of each rank."""

    def pace(self, strategy: str) -> StrategyPace:
        """Return the factors by which a strategy was measured to differ from its prediction."""
        return self.paces.get(strategy, AS_PREDICTED)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def gpus(self) -> bool:
        """Whether the ranks are GPUs."""
        return any(place != host for place, host in zip(self.ranks, self.hosts, strict=True))

    @property
    def engine(self) -> str:
        """The engine whose own all-reduce `native` is."""
        return "nccl" if self.gpus else "gloo"

    @property
    def nodes(self) -> int:
        """Number of hosts that hold ranks."""
        return len(set(self.hosts))


def plan_input_of_job(order: JobOrder) -> PlanInput:
    """Return the machines of a job: its hosts in roster order, with the known links between and inside them.

    Raises:
        InvalidFile: the topology in the job's order is damaged.
    """
    names = [host.name for host in order.hosts]
    cluster = read_cluster_document(order.topology) if order.topology is not None else None
    if cluster is None or any(cluster.host(name) is None for name in names):
        cluster = nominal_cluster(order.hosts)
    ranks = [place for host in order.hosts for place in _places(host, cluster)]
    serving = [host.name for host in order.hosts if host.may_serve]
    gpus = any("/" in place for place in ranks)
    one_host = not gpus and len({host.name for host in order.hosts if host.workers}) == 1
    known = order.costs.for_ranks({host.name: host.workers for host in order.hosts if host.workers})
    costs, paces = engine_costs(gpus, known.engines, one_host=one_host), paces_of(known.paces, one_host=one_host)
    return PlanInput(cluster, ranks, serving, costs, paces, _ranks_per_core(order.hosts))


def _ranks_per_core(hosts: Sequence[HostOrder]) -> float:
    """Return the ranks per core on the busiest kernel; hosts of one kernel share its cores."""
    ranks: dict[str, int] = {}
    cores: dict[str, int] = {}
    for host in hosts:
        kernel = host.kernel or f"{host.name}'s own"
        ranks[kernel] = ranks.get(kernel, 0) + host.workers
        cores[kernel] = max(cores.get(kernel, 1), host.cores)
    return max((ranks[kernel] / cores[kernel] for kernel in ranks), default=1.0)


def plan_input_of_cluster(
    cluster: ClusterGraph, world: int | None = None, costs: Mapping[str, Costs] = FREE,
    paces: Mapping[str, StrategyPace] | None = None,
) -> PlanInput:  # fmt: skip
    """Return the machines of a described cluster; its GPUs are ranks, or its hosts where there are none.

    Args:
        cluster: the machines; hosts without the role worker hold no ranks.
        world: number of ranks, the first places; the others may be servers; None: all places.
        costs: of each engine's messages; those of a described cluster are in its links' latencies.
        paces: of strategies, where `bench` measured them.

    Raises:
        UsageError: there are fewer places than `world`, or none.
        InvalidFile: no link joins two of the ranks.
    """
    workers = ClusterGraph(tuple(host for host in cluster.hosts if "worker" in host.roles))
    found = places(workers)
    if not found or (world is not None and world > len(found)):
        raise UsageError(
            f"--world {world}: the topology has places for {len(found)} ranks"
            if found
            else "the topology has no host that may hold a worker",
            hint="ranks are its GPUs, or its hosts where there are none",
        )
    serving = [host.name for host in cluster.hosts if "server" in host.roles]
    inputs = PlanInput(cluster, found[:world], serving, costs, paces)
    _check_joined(inputs)
    return inputs


def nominal_cluster(hosts: Sequence[HostOrder]) -> ClusterGraph:
    """Return hosts on one switch, each with the rate of its port: the cluster where no topology is known."""
    return ClusterGraph(
        tuple(HostNode(host.name, HostGraph()) for host in hosts),
        tuple(Between(host.name, NETWORK, host.rate or ASSUMED_RATE) for host in hosts) if len(hosts) > 1 else (),
    )


def _places(host: HostOrder, cluster: ClusterGraph) -> list[str]:
    """Return the places of a host's ranks: a GPU each, by local rank; the host itself where there are too few GPUs."""
    node = cluster.host(host.name)
    gpus = node.graph.of_kind("gpu") if node is not None and host.gpus else ()
    if not gpus or len(gpus) < host.workers:
        return [host.name] * host.workers
    return [f"{host.name}/{gpu.id}" for gpu in gpus[: host.workers]]


def _check_joined(inputs: PlanInput) -> None:
    """Refuse ranks that no link joins."""
    for place in inputs.ranks[1:]:
        try:
            inputs.network.route(inputs.ranks[0], place)
        except KeyError as error:
            raise InvalidFile(
                f"no link of the topology joins {inputs.ranks[0]} and {place}",
                hint='"between" names the cables between hosts: [{"a": "h0", "b": "network", "bandwidth": 125e6}]',
            ) from error
