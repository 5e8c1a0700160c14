"""The BatchNorm layers of a run that normalise with the batches of all workers, and the sums that they need."""

from __future__ import annotations

import torch
from torch import nn

from psctl.collectives.group_collectives import GroupCollectives
from psctl.errors import UsageError
from psctl.job.training_messages import Decision
from psctl.sync.synchronizer import ExampleWeight
from psctl.train_state import joint_batch_norm
from psctl.types import consistency


def join_layers(model: nn.Module, decision: Decision, collectives: GroupCollectives, weight: ExampleWeight) -> None:
    """Have BatchNorm layers normalise with the batches of all workers, as the job or the model asks for it.

    Args:
        model: the user's, before its class changes.
        decision: how gradients are synchronized.
        collectives: over all workers.
        weight: of this rank's gradient.

    Raises:
        UsageError: the model has SyncBatchNorm layers, and workers need not be at the same step; the user's fault.
    """
    layers = joint_batch_norm.requested(model, every=decision.joint_batch_norm)
    if not layers or collectives.world == 1:
        return
    if decision.staleness != 0:
        raise UsageError(
            f"layer {layers[0][0]} is a SyncBatchNorm, whose statistics are of all workers in the same step, and under "
            f"consistency: {consistency(decision.staleness)} each is at its own",
            "use nn.BatchNorm, or set `consistency: bsp` under sync: in the job file",
        )
    joint_batch_norm.join_batch_norm(layers, WorkerSums(collectives, weight))


class WorkerSums:
    """The sums of joint layers, over all workers of a job.

    Args:
        collectives: of this worker.
        weight: of its gradient.
    """

    def __init__(self, collectives: GroupCollectives, weight: ExampleWeight) -> None:
        self._collectives, self._weight = collectives, weight

    def sum_ranks(self, vector: torch.Tensor, name: str) -> None:
        """Sum a vector over all workers, in place; `name` is of the sum, for people."""
        self._collectives.all_reduce(vector, "sum", None, name)

    @property
    def part(self) -> float:
        """This worker's part of the examples of the step, times the number of workers."""
        return self._weight.weight
