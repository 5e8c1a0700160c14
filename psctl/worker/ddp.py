"""`psctl.accelerate_ddp()`: has the gradients of a DistributedDataParallel summed by the job's planned strategy."""

from __future__ import annotations

import os
import sys
from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from psctl.errors import UsageError
from psctl.process.sealed_memory import ENVIRONMENT
from psctl.worker.init import current_run, join

Model = TypeVar("Model", bound=nn.Module)


def accelerate_ddp(model: Model) -> Model:
    """Have a DistributedDataParallel's gradients summed by the strategy that the plan chose.

        model = DistributedDataParallel(net)
        psctl.accelerate_ddp(model)

    The rest of the script stays as it is; also where a library's Trainer makes the DistributedDataParallel. Gradients
    are those of DistributedDataParallel up to the order of their sums, or rounded as `sync.compression` says. Each
    synchronized backward is a step of the job. Random numbers are left alone. Checkpoints stay the script's: after a
    loss all workers start again.

    Call it once, on every rank, before the first backward. Where `psctl train` did not start the script, it does
    nothing.

    Args:
        model: over all of the job's workers, without another communication hook.

    Returns:
        the same model.

    Raises:
        UsageError: it is no DistributedDataParallel, or not over all workers, or run.prepare was called; the script's
            fault. Or the job asks for something that this cannot do, such as `strategy: ps`.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"psctl.accelerate_ddp was given a {type(model).__name__}, which is no DistributedDataParallel",
            "wrap the model first, or use run.prepare instead of DistributedDataParallel",
        )
    if ENVIRONMENT not in os.environ:
        return model
    caller = sys._getframe(1)
    run = current_run() or join(f"{caller.f_code.co_filename}:{caller.f_lineno}", seeded=False)
    run.hook_ddp(model)
    return model
