"""Saves the costs of messages that `bench` measured on a cluster, and loads them for plans on the same machines."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from psctl import errors
from psctl.launch.hosts.actions import MeasureMessages
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import reach
from psctl.plan.simulation.cost_model import PACES, WAITS
from psctl.plan.simulation.schedule_timing import Costs, StrategyPace


class FittedCosts(msgspec.Struct, frozen=True):
    """The costs of one engine, and the median relative error of predictions before and after the fit."""

    costs: Costs
    measurements: int
    before: float
    after: float


class Calibration(msgspec.Struct, frozen=True):
    """Measured costs, and the machines that they were measured on (by host: address, cores, GPUs and identity).

    `paces` and `waits` hold, by strategy, measured time over predicted time: of transfers, and of waits for messages.
    """

    time: float
    machines: dict[str, str]
    engines: dict[str, FittedCosts]
    paces: dict[str, float] = {}
    waits: dict[str, float] = {}


def save(reached: ReachedCluster, engines: Mapping[str, FittedCosts], paces: Mapping[str, StrategyPace]) -> Calibration:
    """Save results by engine and by strategy; earlier results of other ones on the same machines are kept."""
    machines = machines_of(reached)
    before = reached.home.load_measurement("costs", reached.chosen.spec.name, Calibration)
    known = before if before is not None and before.machines == machines else Calibration(0.0, machines, {})
    made = Calibration(
        time.time(), machines, {**known.engines, **engines},
        {**known.paces, **{name: pace.flowing for name, pace in paces.items()}},
        {**known.waits, **{name: pace.waiting for name, pace in paces.items()}},
    )  # fmt: skip
    reached.home.save_measurement("costs", reached.chosen.spec.name, made)
    return made


def load(reached: ReachedCluster) -> dict[str, dict[str, float]]:
    """Return the saved costs by engine, and the saved paces for `paces_of`; {} when a host has changed since.

    Call `reach.find` or `reach.settled` first.
    """
    kept = reached.home.load_measurement("costs", reached.chosen.spec.name, Calibration)
    if kept is None or not machines_of(reached).items() <= kept.machines.items():
        return {}
    found = {engine: msgspec.to_builtins(found.costs) for engine, found in kept.engines.items()}
    return {**found, **{name: each for name, each in ((PACES, kept.paces), (WAITS, kept.waits)) if each}}


def plan(reached: ReachedCluster) -> None:
    """Add a measurement to each host's actions, where none is saved for these machines.

    Nothing is added for fewer than two hosts, where a host cannot be made ready or has no torch, while a job runs, or
    where the cluster file says so (`network.measure_messages`). Call `reach.settled` first.
    """
    needs, plans = reached.needs, reached.plans
    if len(plans) < 2 or reached.failed or reached.chosen.embedded or not reached.chosen.spec.network.measure_messages:
        return
    sites = [reached.sites[name] for name in plans]
    torch = needs.managed and needs.torch is not None
    if any(site.jobs or not (torch or site.modules.get("torch")) for site in sites) or load(reached):
        return
    for actions in plans.values():
        actions.append(MeasureMessages())


def planned(reached: ReachedCluster) -> bool:
    """Return whether `plan` has added the measurement, and no host has failed since."""
    actions = [action for each in reached.plans.values() for action in each]
    return not reached.failed and any(isinstance(action, MeasureMessages) for action in actions)


def drop(reached: ReachedCluster) -> None:
    """Remove the measurement, which was not made, from the actions of the hosts."""
    for name, actions in reached.plans.items():
        reached.plans[name] = [action for action in actions if not isinstance(action, MeasureMessages)]


def machines_of(reached: ReachedCluster) -> dict[str, str]:
    """Return a text that identifies each host; saved costs are valid while it is unchanged."""
    try:
        at = {name: one.address for name, one in reach.addresses(reached).items()}
    except errors.PsctlError:  # a host has no address that others can use: callers that need one raise
        at = {}
    return {
        name: f"{at.get(name, '')} {site.facts.cores or site.cores} cores {len(site.facts.gpus)} gpus {site.identity}"
        for name, site in reached.sites.items()
    }
