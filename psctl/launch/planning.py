"""What `plan` prints: every strategy's predicted time on a cluster, before any run."""

from __future__ import annotations

from typing import Any

import msgspec

from psctl.launch import calibration, measure, reach
from psctl.launch.clusters import Chosen
from psctl.launch.converge import look_at_all
from psctl.launch.ground import machines_document
from psctl.launch.home import Home
from psctl.launch.roster import job_order, seat
from psctl.launch.submit import machines_of
from psctl.orders import JobOrder
from psctl.plan.choose import Plan, choose, winners
from psctl.remote.fleet import Fleet
from psctl.spec.job import JobSpec, load_job


def job_of(text: str, source: str) -> JobSpec:
    """Return the job of a file."""
    return load_job(text, source)


def any_job() -> JobSpec:
    """Return a job that takes what it can get."""
    return JobSpec(name="any", script="train.py")


def plan(home: Home, chosen: Chosen, fleet: Fleet, job: JobSpec, size: int | None, world: int | None) -> dict[str, Any]:
    """Return the document of `plan -o json`; what runs on the hosts now does not count.

    Args:
        home: where measured rates and the hosts' addresses are kept; what is not is nominal.
        size: bytes of gradients a worker; None adds a table of winners by size.
        world: number of ranks; None: what the job asks for.

    Raises:
        InvalidFile: more ranks than slots.
        HostUnreachable and others: the first host that could not be looked at.
    """
    state = look_at_all(chosen, fleet)
    for name, error in state.failed.items():
        if name not in state.sites:
            raise error
    reach.settled(home, chosen, state)
    measure.recall(home, chosen, state)  # sets the rates of ports
    machines = machines_of(chosen, state)
    idle = {name: msgspec.structs.replace(machine, busy={}) for name, machine in machines.items()}
    asked = job if world is None else msgspec.structs.replace(job, workers=world)
    seats = seat(chosen.spec, idle, asked)
    known = machines_document(home, chosen, state, seats.names)
    costs = calibration.recall(home, chosen, state)
    return plan_of(job_order(job.name, chosen.spec, asked, seats, topology=known, costs=costs), size)


def plan_of(order: JobOrder, size: int | None) -> dict[str, Any]:
    """Return the document of `plan`: by size where it is known, else with a table of winners by size."""
    known = size if size is not None else order.size
    document = plan_document(choose(order, known, None, decided=False))
    if known is None:
        document["winners"] = [
            {"size": each.size, "chosen": each.chosen, "seconds": _seconds(each)} for each in winners(order)
        ]
    return document


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as `plan -o json` promises it."""
    return {
        "size": plan.size, "world": plan.world, "chosen": plan.chosen, "reason": plan.reason, "decided": plan.decided,
        "candidates": msgspec.to_builtins(plan.candidates),
    }  # fmt: skip


def _seconds(plan: Plan) -> float | None:
    return next((each.seconds for each in plan.candidates if each.strategy == plan.chosen), None)
