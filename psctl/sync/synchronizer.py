"""How a worker's gradients become joint: the seam between a run and the ways to synchronise; the way of one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from psctl.sync.compression_residuals import Residuals


class ExampleWeight:
    """How much of the examples behind the gradients is this rank's: the weight of what it sends.

    Batches drawn since the last time gradients were sent count; with a loader of one's own, ranks count equally.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._source: object = None
        self._mine = self._all = 0
        self._sent = False

    @property
    def together(self) -> int:
        """All ranks' examples since gradients were last sent; 0 when unknown."""
        return self._all

    @property
    def mine(self) -> int:
        """This rank's examples since gradients were last sent; 0 when unknown."""
        return self._mine

    def among(self, world: int) -> None:
        """Note how many ranks share the next batch."""
        self._world = world

    def drawn(self, source: object, mine: int, together: int) -> None:
        """Note a batch of `mine` examples, of `together` over all ranks, from the loader `source`."""
        if self._sent or source is not self._source:
            self._mine = self._all = 0
        self._source, self._sent = source, False
        self._mine += mine
        self._all += together

    def sent(self) -> None:
        """Note that the gradients of these batches were sent; the next batch counts anew."""
        self._sent = True

    def weight(self) -> float:
        """Return this rank's examples times world over everyone's; exactly 1.0 when shares are equal or unknown."""
        if self._all == 0 or self._mine * self._world == self._all:
            return 1.0
        return self._mine * self._world / self._all


class Synchronizer(Protocol):
    """One way to synchronise, bound to a model."""

    @property
    def name(self) -> str:
        """The strategy's name."""

    @property
    def update(self) -> str:
        """Where the optimizer steps: "server" or "worker"."""

    @property
    def frozen(self) -> str:
        """Why the model's values may not be written from outside ("" when they may)."""

    @property
    def sync_seconds(self) -> float:
        """Seconds waited for others so far."""

    @property
    def under_way_seconds(self) -> float:
        """Seconds from when a step's first gradients left until all that comes back was here, whoever waited."""

    @property
    def bytes_moved(self) -> int:
        """Bytes sent and received so far."""

    @property
    def staleness(self) -> int:
        """Clocks that the values lacked which the last step was computed from."""

    @property
    def doing(self) -> str:
        """What this worker is at, for people."""

    @property
    def period(self) -> int:
        """Steps from one at which all ranks have the same values to the next; what is saved is saved there."""

    @property
    def apart(self) -> bool:
        """Whether ranks step alone, so that each has an optimizer's state of its own."""

    @property
    def alone(self) -> bool:
        """Whether each rank goes on by itself (asp), so that who takes a rank's place needs that rank's own state."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up without being sent."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the joint gradient; returns its norm."""

    def step(self, original: Callable[[], Any], save: bool) -> Any:
        """End the clock: let the optimizer step. `original` is the user's optimizer's own step."""

    def wait(self) -> None:
        """Return when every value holds every clock that has ended here, also where workers may be apart."""

    def land(self) -> None:
        """Return when every value is the newest that a step may read."""

    def detached(self) -> AbstractContextManager[None]:
        """Take psctl's hooks off the model's modules for a while."""

    def save_late(self, step: int) -> None:
        """Have those who hold state besides the workers save `step`, the last one, which is done; every rank asks."""

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return what this way keeps that belongs into rank 0's checkpoint: JSON values, and tensors by name."""

    @property
    def residuals(self) -> Residuals | None:
        """What this rank's pushes left out, which belongs into checkpoints; None: nothing is ever left out."""

    def finish(self) -> None:
        """The script has ended: let all ranks have the same values."""

    def leave(self, step: int, state: Callable[[], bytes]) -> None:
        """Leave this rank's own state at the start of clock `step` with those who hold state too, if there are any.

        Args:
            state: makes it; called only if there is somebody.
        """

    def left(self, step: int) -> bytes:
        """Return what rank 0 (where each goes on alone: this rank) left at the start of clock `step`; waits for it."""

    def close(self, reason: str, *, failed: bool) -> None:
        """Let go of everything; `failed`: without waiting for others, who may be gone."""


class Exact:
    """What ways share that leave nothing out, until they are given what they do."""

    residuals: Residuals | None = None


class AtWorkers(Exact):
    """What ways share where the workers hold the values: none is waited for, none lands, nobody joins in mid-run."""

    def wait(self) -> None:
        return

    def land(self) -> None:
        return

    def detached(self) -> AbstractContextManager[None]:
        return nullcontext()

    def save_late(self, step: int) -> None:
        return

    def leave(self, step: int, state: Callable[[], bytes]) -> None:
        return

    def left(self, step: int) -> bytes:
        raise AssertionError("where workers hold the values nobody joins in mid-run")


class InStep(Exact):
    """What ways share whose ranks have the same values after every step."""

    period = 1
    apart = False
    alone = False

    def state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {}, {}

    def finish(self) -> None:
        return


class SingleWorker(AtWorkers, InStep):
    """One worker has nothing to synchronise.

    Args:
        parameters: the trainable ones.
        name: the strategy's name for people.
    """

    update = "worker"
    frozen = ""
    sync_seconds = under_way_seconds = 0.0
    bytes_moved = 0
    staleness = 0
    doing = "compute"

    def __init__(self, parameters: Sequence[nn.Parameter], name: str = "alone") -> None:
        self.name = name
        self._parameters = parameters

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def step(self, original: Callable[[], Any], save: bool) -> Any:
        return original()

    def close(self, reason: str, *, failed: bool) -> None:
        return
