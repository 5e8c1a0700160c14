"""Predicts every strategy's time on a cluster before any run (`psctl plan`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import msgspec

from psctl.errors import UsageError
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import calibration, link_measurement, reach
from psctl.launch.measure.saved_output import read_saved
from psctl.launch.placement.cluster_snapshot import machines_document, machines_of
from psctl.launch.placement.roster import (
    JobHosts,
    assign_workers,
    bucket_of,
    idle,
    job_order,
    servers_of,
    staleness_of,
    strategy_of,
)
from psctl.orders import JobOrder
from psctl.plan.by_size import size_ranges, winners
from psctl.plan.capacity import VALUE, capacity
from psctl.plan.choose import UNKNOWN, Plan, Planner, planner_for_cluster, planner_for_job
from psctl.plan.plan_input import PlanRequest, plan_input_of_cluster
from psctl.schedule.algorithms import catalog
from psctl.schedule.describe import lines, summary
from psctl.spec.job import JobSpec
from psctl.spec.nearest import did_you_mean
from psctl.types import STRATEGIES, JsonObject
from psctl.units import parse_count

SHORT = 200
"""Limit of messages of a schedule that is printed for people."""


def any_job() -> JobSpec:
    """Return a job with all defaults, which fits every cluster."""
    return JobSpec(name="any", script="train.py")


class Model(msgspec.Struct, frozen=True):
    """A model by its size alone."""

    parameters: int

    @property
    def size(self) -> int:
        """Bytes of its gradients."""
        return self.parameters * VALUE


def model_of(text: str) -> Model:
    """Return the model of a number of parameters such as 1e9 or 7B.

    Raises:
        UsageError: the text is not such a number; the user's fault.
    """
    try:
        return Model(parse_count(text))
    except ValueError as error:
        raise UsageError(f"--parameters {error}", hint="such as --parameters 1e9") from None


class PlanDocument(TypedDict):
    """The document of `plan -o json`."""

    size: int
    world: int
    chosen: str
    reason: str
    decided: bool
    candidates: list[JsonObject]
    by_size: NotRequired[list[JsonObject]]
    winners: NotRequired[list[JsonObject]]
    capacity: NotRequired[JsonObject | None]
    terms: NotRequired[JsonObject]
    in_network: NotRequired[JsonObject]


def with_capacity(
    plan: Plan, document: PlanDocument, model: Model, job: JobSpec | None, rate: float, workers: Sequence[str]
) -> PlanDocument:
    """Return the document of a plan with the servers' memory for a model: `capacity`, null where there are none.

    Args:
        plan, document: for the model's size.
        model: how many parameters.
        job: its replicas and consistency count.
        rate: payload bytes/s into the head host; 0: unknown.
        workers: the host of each worker.
    """
    row = next(each for each in plan.candidates if each.strategy == "ps")
    asked = job.replicas if job is not None and isinstance(job.replicas, int) else None
    staleness = staleness_of(job) if job is not None else 0
    found = None
    if row.feasible:
        hosts = msgspec.convert(row.params["hosts"], list[str])
        found = capacity(model.parameters, workers, hosts, asked, staleness, rate)
    return {**document, "capacity": msgspec.to_builtins(found)}


def with_compute(job: JobSpec, seconds: float | None) -> JobSpec:
    """Return a job whose steps take so many seconds of compute; None: as its file says."""
    if seconds is None:
        return job
    return msgspec.structs.replace(job, sync=msgspec.structs.replace(job.sync, compute=seconds))


def check_strategy(name: str | None) -> None:
    """Refuse a name that is no strategy's.

    Raises:
        UsageError: it is none; the user's fault.
    """
    if name is not None and name not in STRATEGIES:
        near = did_you_mean(name, STRATEGIES)
        raise UsageError(f"--explain {name}: unknown strategy{near}", hint=f"one of {', '.join(STRATEGIES)}")


def plan(
    reached: ReachedCluster, job: JobSpec, size: int | None, world: int | None, model: Model | None = None,
    explain: str | None = None,
) -> tuple[Plan, PlanDocument]:  # fmt: skip
    """Return the plan for a cluster and the document of `plan -o json`; running jobs are ignored.

    Args:
        reached: the cluster; rates that were not measured are nominal.
        job: the requested job.
        size: bytes of gradients a worker; None adds a table of winners by size.
        world: number of ranks; None: that of the job.
        model: adds the memory that its servers need; `size` is that of its gradients.
        explain: adds the terms of a step with this strategy.

    Raises:
        InvalidFile: more ranks than slots.
        HostUnreachable and others: the first host that could not be inspected.
    """
    for name, error in reached.failed.items():
        if name not in reached.sites:
            raise error
    reach.settled(reached)
    link_measurement.load(reached)  # sets the rates of ports
    asked = job if world is None else msgspec.structs.replace(job, workers=world)
    job_hosts = assign_workers(reached.chosen.spec, idle(machines_of(reached)), asked)
    order = order_for_plan(reached, job.name, asked, job_hosts)
    made, document = plan_of(order, size, explain)
    if model is None:
        return made, document
    workers = [host.name for host in order.hosts for _ in range(host.workers)]
    return made, with_capacity(made, document, model, job, order.hosts[0].rate, workers)


def order_for_plan(
    reached: ReachedCluster, name: str, job: JobSpec, job_hosts: JobHosts, code_hash: str = ""
) -> JobOrder:
    """Return the parts of a job's order that a plan needs: its hosts, and their measurements."""
    return job_order(
        name, reached.chosen.spec, job, job_hosts, code_hash=code_hash,
        topology=machines_document(reached, job_hosts.names), costs=calibration.load(reached),
    )  # fmt: skip


def on_paper(
    reference: str, job: JobSpec | None, size: int | None, world: int | None, model: Model | None = None,
    explain: str | None = None,
) -> tuple[Plan, PlanDocument]:  # fmt: skip
    """Return the plan for machines that a file describes, and its document; no connection is made.

    The costs of messages are the latencies in the file, because the machines' processors are unknown. Gradients count
    as one vector, unless the compute of a step is known, with which buckets of them overlap.

    Args:
        reference: what `topo -o json` prints, one host of it, a saved matrix, or a folder of these.
        job: the requested job; None: any strategy.
        size: bytes of gradients a worker; None adds a table of winners by size.
        world: the number of places that are ranks, the first ones; later hosts may run servers; None: all.
        model: adds the memory that its servers need; `size` is that of its gradients.
        explain: adds the terms of a step with this strategy.

    Raises:
        InvalidFile: the file is none of these.
        UsageError: there are too few places for `world`, or the requested strategy is not possible.
    """
    cluster = read_saved(reference).cluster
    if world is None and job is not None and isinstance(job.workers, int):
        world = job.workers
    inputs = plan_input_of_cluster(cluster, world)
    planner = planner_for_cluster(inputs, PlanRequest() if job is None else _asked(job, len(inputs.serving)))
    plan = planner.plan(size if size is not None else UNKNOWN)
    document = _with_winners(plan, planner, explain, known=size is not None)
    return plan, document if model is None else with_capacity(plan, document, model, job, 0.0, inputs.hosts)


def _asked(job: JobSpec, serving: int) -> PlanRequest:
    return PlanRequest(
        strategy_of(job), job.sync.update, servers_of(job, serving), staleness=staleness_of(job),
        bucketed=job.sync.compute is not None, period=job.sync.period, compression=job.sync.compressed,
        compute=job.sync.compute, sums=job.sync.sums,
        bucket=bucket_of(job), in_parts=job.sync.factor_rows is None, step_in_backward=job.sync.step_in_backward,
    )  # fmt: skip


def plan_of(order: JobOrder, size: int | None, explain: str | None = None) -> tuple[Plan, PlanDocument]:
    """Return a job's plan and its document: by size where it is known, else with a table of winners by size.

    Args:
        order: the job.
        size: bytes of gradients a worker; None: those of the order.
        explain: adds the terms of a step with this strategy.
    """
    known = size if size is not None else order.size
    planner = planner_for_job(order)
    plan = planner.plan(known if known is not None else UNKNOWN)
    return plan, _with_winners(plan, planner, explain, known=known is not None)


def plan_document(plan: Plan) -> PlanDocument:
    """Return a plan in the form of `plan -o json`."""
    return {
        "size": plan.size, "world": plan.world, "chosen": plan.chosen, "reason": plan.reason, "decided": plan.decided,
        "candidates": msgspec.to_builtins(plan.candidates),
    }  # fmt: skip


def schedule_text(plan: Plan) -> list[str]:
    """Return the summary of the chosen schedule, and its messages if there are not too many.

    The result is empty for `native` and `ps`, which have no schedule.
    """
    if plan.chosen in ("native", "ps"):
        return []
    schedule = catalog.build(plan.chosen, plan.world, msgspec.convert(plan.options, catalog.ScheduleOptions))
    text = lines(schedule) if len(schedule.transfers) <= SHORT else []
    return [summary(schedule), *(text if len(text) <= SHORT else [])]


def _with_winners(plan: Plan, planner: Planner, explain: str | None, *, known: bool) -> PlanDocument:
    """Return the document with `by_size`, where the winner changes; if not `known`, also with a table of winners.

    A given compute belongs to one size, so neither is there then. `explain`: the strategy whose terms are added.
    """
    document = plan_document(plan)
    if explain is not None:
        document["terms"] = {
            "strategy": explain, "terms": msgspec.to_builtins(planner.terms(explain, plan.size))
        }  # fmt: skip
    if (switches := planner.in_network(plan.size)) is not None:
        document["in_network"] = msgspec.to_builtins(switches)
    if planner.compares_steps:
        return document
    found = winners(planner.winner)
    changes = size_ranges(planner.winner, found)
    document["by_size"] = [{"from": span.start, "chosen": span.chosen} for span in changes]
    return document if known else {**document, "winners": msgspec.to_builtins(found)}
