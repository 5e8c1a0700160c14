"""The time of a push and a pull under parameter servers, and of the training step around it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.orders import HostOrder
from psctl.plan.candidates import TIE
from psctl.plan.compression_cost import coding
from psctl.plan.overlap import StepTime, after_period, pushed_and_pulled, summed_in_backward, without_waiting
from psctl.plan.plan_input import PlanInput, PlanRequest
from psctl.plan.rank_orders import racks
from psctl.plan.server_placement import (
    ServingMode,
    can_sum_by_rack,
    lower_bounds,
    place_servers,
    server_placements,
    shard_count,
    time_push_pull,
)
from psctl.plan.simulation.estimates import LowerBound
from psctl.plan.simulation.schedule_timing import Timing
from psctl.plan.step_terms import StepTerm, server_terms


class ServerTiming(msgspec.Struct, frozen=True):
    """A prediction of `ps`: where the optimizer steps, the host of each server, time, steps, a rank's bytes, and
    whether gradients are summed by rack."""

    update: str
    servers: list[int]
    timing: Timing
    steps: int
    sent: float
    by_rack: bool = False

    @property
    def seconds(self) -> float:
        """Of a push and a pull."""
        return round(self.timing.seconds, 9)


class ServedSteps:
    """Times of pushes, pulls and steps under parameter servers.

    Args:
        inputs: machines, ranks, costs.
        hosts: the roster, to place servers on.
        request: of the job file and the model.
    """

    def __init__(self, inputs: PlanInput, hosts: Sequence[HostOrder], request: PlanRequest) -> None:
        self._inputs, self._hosts, self._request = inputs, hosts, request
        # The condition of coordinator/state/server_changes.py.
        self._sum_by_host = request.staleness == 0 and request.compression.off
        self._bounds: list[LowerBound] | None = None
        self.default_servers: Sequence[int] = next(iter(server_placements(hosts, request.servers)), ())
        """Hosts of servers, before their times are known; empty if no host may hold one."""

    def names(self, ps: ServerTiming) -> list[str]:
        """Return the host of each server."""
        return [self._hosts[at].name for at in ps.servers]

    def racks(self) -> tuple[str, ...]:
        """Return the rack of each host."""
        switch = racks(self._inputs)
        return tuple(switch[host.name] for host in self._hosts)

    def timing(self, size: int) -> ServerTiming:
        """Return the best prediction; the optimizer steps on servers unless that is slower by more than TIE."""
        found = [self._served(update, size, by_rack=False) for update in self._updates()]
        if not found[0].servers:
            return found[0]
        sums = self._request.sums
        if self._sum_by_host and sums != "host" and can_sum_by_rack(self._inputs):
            pairs = [(each, self._served(each.update, size, by_rack=True)) for each in found]
            found = [one if sums == "rack" or one.seconds * TIE < each.seconds else each for each, one in pairs]
        return next(each for each in found if each.seconds <= TIE * min(one.seconds for one in found))

    def least_seconds(self, size: int) -> float:
        """Return a lower bound of what `timing` predicts."""
        if self._bounds is None:
            servers = self._request.servers
            self._bounds = lower_bounds(self._inputs, self._hosts, servers, sum_by_host=self._sum_by_host)
        part = min(coding(self._request.compression, update).both for update in self._updates())
        return min(one.seconds(size * part, self._inputs.pace("ps")) for one in self._bounds)

    def step(self, size: int, ps: ServerTiming) -> StepTime | None:
        """Return the time of a step; None: the compute of a step is not known."""
        request, compute = self._request, self._request.compute
        if compute is None:
            return None
        if request.period > 1:
            return after_period(compute, ps.seconds, request.period)
        codes = coding(request.compression, ps.update)
        shards = shard_count(self._inputs, self.names(ps), size)
        if request.staleness != 0:
            return without_waiting(compute, ps.seconds)
        if ps.update == "worker":
            return summed_in_backward(compute, [1.0] * shards, [ps.seconds / shards] * shards)
        pushing = ps.seconds * codes.push / (codes.push + codes.pull)
        serving = [self._hosts[at] for at in ps.servers]
        return pushed_and_pulled(
            compute, pushing, ps.seconds - pushing, shards, in_backward=request.step_in_backward,
            apart=not any(host.workers for host in serving),
        )  # fmt: skip

    def terms(self, size: int, ps: ServerTiming, *, on_gpus: bool) -> list[StepTerm]:
        """Return the terms of a step's time, as if nothing overlapped; `on_gpus`: whether gradients are on GPUs."""
        return server_terms(
            self._inputs, self.names(ps), size, self._request.compute, coding(self._request.compression, ps.update),
            sum_by_host=self._sum_by_host, on_gpus=on_gpus, racks=racks(self._inputs) if ps.by_rack else None,
        )  # fmt: skip

    def _served(self, update: str, size: int, *, by_rack: bool) -> ServerTiming:
        """Return the prediction with the best placement of servers."""
        codes = coding(self._request.compression, update)
        mode = ServingMode(update == "worker", self._request.replicas, codes, self._sum_by_host, by_rack)
        servers = place_servers(self._inputs, self._hosts, self._request.servers, size, mode)
        if not servers:
            return ServerTiming(update, servers, Timing(0.0, "closed form"), 0, 0.0)
        names = [self._hosts[at].name for at in servers]
        return ServerTiming(update, servers, *time_push_pull(self._inputs, names, size, mode), by_rack)

    def _updates(self) -> Sequence[str]:
        """Return where the optimizer may step: on servers, which continue when a worker is lost, first. Where the
        choice is free also on workers, because then sums are pulled while others are still pushed."""
        update = self._update()
        free = self._request.strategy == self._request.update == "auto" and self._request.staleness == 0
        return ("server", "worker") if update == "server" and free and not self._request.serving else (update,)

    def _update(self) -> str:
        if self._request.update in ("server", "worker"):
            return self._request.update
        if self._request.period > 1:
            return "worker"
        return "server" if self._request.optimizer or self._request.staleness != 0 else "worker"
