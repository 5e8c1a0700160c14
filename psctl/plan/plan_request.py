"""What is asked of a plan: what the job file says of how gradients are synchronised, and what is known of the model."""

from __future__ import annotations

import msgspec

from psctl.orders import JobOrder
from psctl.types import PLAIN, Compression, Layout


class PlanRequest(msgspec.Struct, frozen=True):
    """What is asked of a plan.

    Args:
        strategy: one of the names, or auto.
        update: auto, server or worker.
        servers: how many; None: what the plan says.
        optimizer: whether the optimizer is fit for servers.
        bucketed: gradients travel in buckets, as training sends them; else as one vector.
        serving: servers were asked for by their number, so only what uses them is considered.
        staleness: clocks that the fastest worker may be ahead; 0: bsp; None: asp.
        period: steps that workers take alone between two synchronisations.
        replicas: of each shard; None: one, where there are two servers.
        compression: how gradients are made smaller.
        encrypted: nothing may go between hosts unencrypted (network.require_encryption).
        on_gpus: gradients lie on GPUs; None: they do where the ranks sit on GPUs.
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
    on_gpus: bool | None = None

    @property
    def halved(self) -> float:
        """What part of the gradients' bytes collectives carry."""
        return 0.5 if self.compression.halves else 1.0


def request_of_job(order: JobOrder, layout: Layout | None) -> PlanRequest:
    """Return what a job asks for."""
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
    )
