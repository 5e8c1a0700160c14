"""Costs of messages on a cluster as `bench` measured them: saved, and used by every plan on the same machines."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from psctl import errors
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import reach
from psctl.plan.simulation.cost_model import PACES, WAITS
from psctl.plan.simulation.schedule_timing import Costs, StrategyPace


class FittedCosts(msgspec.Struct, frozen=True):
    """One engine's costs, and by how much predictions were off, as a median part of what was measured."""

    costs: Costs
    measurements: int
    before: float
    after: float


class Calibration(msgspec.Struct, frozen=True):
    """What was found, and on which machines: host to address, cores, GPUs and identity.

    `paces` says of strategies how many times as long as predicted their bytes flow, `waits` their messages wait.
    """

    time: float
    machines: dict[str, str]
    engines: dict[str, FittedCosts]
    paces: dict[str, float] = {}
    waits: dict[str, float] = {}


def keep(reached: ReachedCluster, engines: Mapping[str, FittedCosts], paces: Mapping[str, StrategyPace]) -> Calibration:
    """Save the results of these engines and strategies, next to those of others on the same machines."""
    machines = machines_of(reached)
    before = _kept(reached)
    known = before if before is not None and before.machines == machines else Calibration(0.0, machines, {})
    made = Calibration(
        time.time(), machines, {**known.engines, **engines},
        {**known.paces, **{name: pace.flowing for name, pace in paces.items()}},
        {**known.waits, **{name: pace.waiting for name, pace in paces.items()}},
    )  # fmt: skip
    reached.home.save_measurement("costs", reached.chosen.spec.name, made)
    return made


def recall(reached: ReachedCluster) -> dict[str, dict[str, float]]:
    """Return the kept costs by engine, and what `paces_of` reads, when all hosts are as they were then; else none.

    Call `reach.find` or `reach.settled` before.
    """
    kept = _kept(reached)
    if kept is None or not machines_of(reached).items() <= kept.machines.items():
        return {}
    found = {engine: msgspec.to_builtins(found.costs) for engine, found in kept.engines.items()}
    return {**found, **{name: each for name, each in ((PACES, kept.paces), (WAITS, kept.waits)) if each}}


def machines_of(reached: ReachedCluster) -> dict[str, str]:
    """Return what identifies each host; old costs hold only while it is unchanged."""
    try:
        at = {name: one.address for name, one in reach.addresses(reached).items()}
    except errors.PsctlError:  # a host has no address that others could use: callers that need one raise
        at = {}
    return {
        name: f"{at.get(name, '')} {site.facts.cores or site.cores} cores {len(site.facts.gpus)} gpus {site.identity}"
        for name, site in reached.sites.items()
    }


def _kept(reached: ReachedCluster) -> Calibration | None:
    try:
        return reached.home.load_measurement("costs", reached.chosen.spec.name, Calibration)
    except errors.InvalidFile:  # damaged, or of another version: there is nothing to recall
        return None
