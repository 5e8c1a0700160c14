"""The costs of messages that `up` and `bench` measured on a cluster, saved for plans on the same machines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from psctl import errors
from psctl.launch.hosts.actions import MeasureMessages
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.measure import reach
from psctl.message_costs import UNKNOWN_COSTS, Costs, MeasuredCosts, MeasuredRanks, RanksCosts, StrategyPace


class FittedCosts(msgspec.Struct, frozen=True):
    """The costs of one engine, and the median relative error of predictions before and after the fit."""

    costs: Costs
    measurements: int
    before: float
    after: float


class MeasuredSum(msgspec.Struct, frozen=True):
    """The median time of a strategy, with the options of its schedule, for vectors of `bytes`; `before` is the time
    that was predicted then."""

    strategy: str
    bytes: int
    seconds: float
    options: dict[str, object] = {}
    before: float | None = None


class RanksCalibration(msgspec.Struct, frozen=True):
    """Times that were measured with the same `ranks`, by host, and the costs and factors that fit them."""

    time: float
    ranks: dict[str, int]
    sums: tuple[MeasuredSum, ...]
    engines: dict[str, FittedCosts]
    paces: dict[str, StrategyPace]

    @property
    def costs(self) -> MeasuredRanks:
        """What a plan needs of it."""
        engines = {name: each.costs for name, each in self.engines.items()}
        return MeasuredRanks(self.ranks, RanksCosts(engines, self.paces))


class Calibration(msgspec.Struct, frozen=True):
    """What was measured on `machines` (by host: address, cores, GPUs and identity), once for each set of ranks."""

    machines: dict[str, str]
    groups: tuple[RanksCalibration, ...]


def save(
    reached: ReachedCluster, ranks: Mapping[str, int], sums: Sequence[MeasuredSum],
    engines: Mapping[str, FittedCosts], paces: Mapping[str, StrategyPace],
) -> None:  # fmt: skip
    """Save a calibration in place of an earlier one of the same ranks, of which the costs of other engines are kept."""
    kept = _saved(reached)
    groups = {tuple(each.ranks.items()): each for each in kept.groups}
    before = groups.get(tuple(ranks.items()))
    known = before.engines if before is not None else {}
    groups[tuple(ranks.items())] = RanksCalibration(
        time.time(), dict(ranks), tuple(sums), {**known, **engines}, dict(paces)
    )
    made = Calibration({**kept.machines, **machines_of(reached)}, tuple(groups.values()))
    reached.home.save_measurement("costs", reached.chosen.spec.name, made)


def sums_of(reached: ReachedCluster, ranks: Mapping[str, int]) -> tuple[MeasuredSum, ...]:
    """Return the saved times of the same machines with the same ranks."""
    return next((each.sums for each in _saved(reached).groups if each.costs.is_of(ranks)), ())


def load(reached: ReachedCluster) -> MeasuredCosts:
    """Return the saved costs; nothing when a host has changed since.

    Call `reach.find` or `reach.settled` first.
    """
    return MeasuredCosts(tuple(each.costs for each in _saved(reached).groups))


def _saved(reached: ReachedCluster) -> Calibration:
    """Return what is saved; nothing when one of the hosts that were reached has changed since."""
    kept = reached.home.load_measurement("costs", reached.chosen.spec.name, Calibration)
    return kept if kept is not None and machines_of(reached).items() <= kept.machines.items() else Calibration({}, ())


def plan(reached: ReachedCluster) -> None:
    """Add a measurement to each host's actions, where none is saved for these machines.

    Nothing is added for fewer than two hosts of workers, where a host cannot be made ready or has no torch, while a job
    runs, or where the cluster file says so (`network.measure_messages`). Call `reach.settled` first.
    """
    needs, plans, spec = reached.needs, reached.plans, reached.chosen.spec
    several = sum(host.name in plans and "worker" in host.roles for host in spec.hosts) > 1
    if not several or reached.failed or reached.chosen.embedded or not spec.network.measure_messages:
        return
    sites = [reached.sites[name] for name in plans]
    torch = needs.managed and needs.torch is not None
    if any(site.jobs or not (torch or site.modules.get("torch")) for site in sites) or load(reached) != UNKNOWN_COSTS:
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
