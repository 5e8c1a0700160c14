"""Why a strategy is not possible for a request on given machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psctl.plan.plan_input import PlanInput, PlanRequest
from psctl.plan.reasons import by_engine, engine
from psctl.plan.server_placement import can_sum_by_rack
from psctl.types import DIVISIBLE, consistency

ONE_WORKER = "one worker has nothing to synchronise"


class Feasibility:
    """Decides which strategies are possible.

    Args:
        inputs: machines, ranks, costs.
        request: of the job file and the model.
        on_gpus: whether gradients are on GPUs.
        no_schedule: returns why a strategy has no schedule on these machines, or None.
    """

    def __init__(
        self, inputs: PlanInput, request: PlanRequest, no_schedule: Callable[[str], str | None], *, on_gpus: bool
    ) -> None:
        self._inputs, self._request, self._gpus, self._no_schedule = inputs, request, on_gpus, no_schedule

    def why_not(self, name: str, servers: Sequence[int]) -> str | None:
        """Return why a strategy is not possible; None if it is.

        Args:
            name: the strategy.
            servers: hosts of servers; empty if none can be placed.
        """
        request = self._request
        if request.hooked and request.period > 1:
            return f"period: {request.period} is requested, but DistributedDataParallel sums at every step"
        if request.update == "sharded" and self._inputs.world > 1 and (why := self._why_undivided(name)) is not None:
            return why
        if name == "ps":
            return self._why_unserved(servers)
        if request.staleness != 0:
            return f"consistency: {consistency(request.staleness)} is requested, but collectives are bsp"
        if request.update == "server":
            return "update: server is requested, but collectives update on workers"
        if not request.compression.off and not request.compression.halves:
            return f"compression: {request.compression} is requested, which only servers support"
        if request.serving:
            return f"servers: {request.servers} is requested, but collectives use none"
        if self._inputs.world == 1 and name != "native":
            return ONE_WORKER
        return self._why_unencrypted(name) or self._no_schedule(name)

    def _why_undivided(self, name: str) -> str | None:
        if self._request.hooked:
            return "update: sharded is requested, but DistributedDataParallel leaves the optimizer to the script"
        if name == "ps":
            return "update: sharded is requested, but under ps the servers step"
        if name not in DIVISIBLE:
            return "update: sharded is requested, which needs a sum that is divided among the workers"
        return None

    def _why_unserved(self, servers: Sequence[int]) -> str | None:
        if self._request.hooked:
            return "gradients come from DistributedDataParallel (psctl.accelerate_ddp), which servers do not sum"
        if not servers:
            return "servers: 0 is requested" if self._request.servers == 0 else "no host may hold a server (roles)"
        if self._request.sums == "rack" and not can_sum_by_rack(self._inputs):
            return "sums: rack is requested, which needs several racks, one worker a host, and 64 at most"
        return None

    def _why_unencrypted(self, name: str) -> str | None:
        """Return why a strategy is excluded where all traffic between hosts must be encrypted."""
        gpus = self._gpus
        if not (self._request.encrypted and self._inputs.nodes > 1 and by_engine(name, gpus=gpus)):
            return None
        return f"network: require_encryption: true, and between hosts it goes over {engine(gpus=gpus)}, which is not"
