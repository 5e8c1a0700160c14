"""The base class of synchronizers, itself the synchronizer of one worker, and the weight of a rank's gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from psctl.job.activity import COMPUTE
from psctl.ps.snapshot import CopiedSlice
from psctl.types import NO_PEERS, PeerBytes, State


class ExampleWeight:
    """The weight of this rank's gradient: its part of the examples behind the gradients of all ranks.

    Batches drawn since the last time gradients were sent count. Ranks that use a loader of their own count equally.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._source: object = None
        self._sent = False
        self.own_examples = 0
        """This rank's examples since gradients were last sent; 0 when unknown."""
        self._all = 0
        self._unknown: list[Callable[[], int]] = []  # waits for the examples of a batch over all ranks
        self._weight: float | None = 1.0

    @property
    def weight(self) -> float:
        """This rank's examples times world divided by all examples; exactly 1.0 when equal or unknown."""
        if self._weight is None:
            self._weight = relative_weight(self.own_examples, self.all_examples, self._world)
        return self._weight

    @property
    def all_examples(self) -> int:
        """All ranks' examples since gradients were last sent; 0 when unknown. It waits for those of a stream."""
        while self._unknown:
            self._all += self._unknown[0]()
            del self._unknown[0]
        return self._all

    def set_world(self, world: int) -> None:
        """Set the number of ranks that share the next batch."""
        self._world, self._weight = world, None

    @property
    def share(self) -> float:
        """This rank's part of the examples behind the gradients of all ranks: its gradients' part of the joint mean."""
        return self.weight / self._world

    def add_batch(self, source: object, own: int, total: int | Callable[[], int]) -> None:
        """Add a batch from the loader `source`.

        Args:
            source: the loader.
            own: examples here.
            total: examples over all ranks, or a function that waits until they are known.
        """
        if self._sent or source is not self._source:
            self.own_examples = self._all = 0
            self._unknown.clear()
        self._source, self._sent = source, False
        self.own_examples += own
        if callable(total):
            self._unknown.append(total)
        else:
            self._all += total
        self._weight = None

    def mark_sent(self) -> None:
        """Note that the gradients of these batches were sent: the next batch starts a new count."""
        self._sent = True


def relative_weight(own: int, total: int, world: int) -> float:
    """Return own * world / total; exactly 1.0 when all ranks have as many examples, or `total` is 0."""
    return 1.0 if total == 0 or own * world == total else own * world / total


class ByteMover(Protocol):
    """An object that moves a synchronizer's bytes: a reducer, or the client of parameter servers."""

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        """Bytes sent and received so far, by the peer's name ("server/0"); "": peers are not known."""

    @property
    def activity(self) -> str:
        """What this worker does now, for people: "compute", or what it waits for."""


class NoByteMover:
    """The byte mover of a single worker, which sends nothing."""

    bytes_by_peer = NO_PEERS
    activity = COMPUTE


class Synchronizer:
    """Carries out a strategy in one worker, for one model. This class is that of a single worker.

    The defaults are for workers with the same values after every step: there is nothing to wait for, and no worker
    joins during the run.

    Args:
        name: the strategy's name.
        parameters: the trainable ones, in the model's order.
        mover: moves the bytes.
    """

    update = "worker"
    """Where the optimizer steps: "server", "worker", or "sharded": each rank steps a part."""
    write_refusal = ""
    """Why the model's values may not be written by the script; "" when they may."""
    period = 1
    """Steps from one step after which all ranks have the same values to the next one. Checkpoints are taken there."""
    has_local_optimizer = False
    """Whether ranks step alone, so that each has an optimizer state of its own."""
    recovers_sums = False
    """Whether lost workers are replaced while the others keep the values, so that any rank may have to give its own
    state at the start of a step."""
    is_asynchronous = False
    """Whether no rank waits for another (asp), so that a replacement needs the state of the rank it replaces."""

    def __init__(self, name: str, parameters: Sequence[nn.Parameter], mover: ByteMover | None = None) -> None:
        self.name = name
        self._parameters = parameters
        self._mover = mover or NoByteMover()
        self._sync_seconds = 0.0
        self.before_last_bucket: Callable[[], object] = lambda: None
        """Called in each round of gradients before its last bucket is sent, see `hold_last_bucket`."""
        self.residuals: Mapping[str, torch.Tensor] = {}
        """Residuals of this rank's compressed pushes, by their names in a checkpoint."""

    @property
    def sync_seconds(self) -> float:
        """Seconds spent waiting for other processes so far."""
        return self._sync_seconds

    @property
    def in_flight_seconds(self) -> float:
        """Seconds from a step's first push until all replies had arrived, summed over steps, waited for or not."""
        return 0.0

    @property
    def bytes_by_peer(self) -> Mapping[str, PeerBytes]:
        """Bytes sent and received so far, by the peer's name ("server/0"); "": peers are not known."""
        return self._mover.bytes_by_peer

    @property
    def bytes_moved(self) -> int:
        """Bytes sent and received so far."""
        return sum(sent + received for sent, received in self.bytes_by_peer.values())

    @property
    def staleness(self) -> int:
        """Clocks missing in the values that the last step was computed from."""
        return 0

    @property
    def activity(self) -> str:
        """What this worker does now, for people: "compute", or what it waits for."""
        return self._mover.activity

    def hold_last_bucket(self, before: Callable[[], object]) -> None:
        """Call `before` in each round before its last bucket is sent: a lost worker's round counts with all or not.

        Args:
            before: sends what counts with the round; it returns when that can not be lost any more.
        """
        self.before_last_bucket = before

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up without being sent."""
        return nullcontext()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient to a 2-norm of at most `max_norm`; returns the norm before."""
        return nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def step(self, original: Callable[[], object], save: bool) -> object:
        """End the clock with an optimizer step.

        Args:
            original: the step of the user's optimizer; called where workers step.
            save: the state after this step is a checkpoint.

        Returns:
            what `original` returned; None where servers step.
        """
        self.before_last_bucket()
        return original()

    def wait_exact(self) -> None:
        """Return when every parameter holds all clocks that have ended here, whatever the staleness."""

    def wait_newest(self) -> None:
        """Return when every parameter holds the newest values that the next step may read."""

    def without_hooks(self) -> AbstractContextManager[None]:
        """Return a context in which the model's modules have no hooks of the synchronizer."""
        return nullcontext()

    def save_last(self, step: int) -> None:
        """Have servers save `step`, the last one, if it was not ordered with `save`. Every rank calls it."""

    def checkpoint_state(self) -> tuple[State, dict[str, torch.Tensor]]:
        """Return the synchronizer's part of rank 0's checkpoint: JSON values, and tensors by name."""
        return {}, {}

    def state_slices(self) -> list[CopiedSlice]:
        """Return copies of this rank's pieces of the optimizer's state, where ranks hold a part of it each."""
        return []

    def finish(self) -> None:
        """Give all ranks the same values, at the end of the script."""

    def store_rank_state(self, step: int, make_state: Callable[[], bytes]) -> None:
        """Store this rank's state at the start of clock `step`, where a replacement may need it.

        Args:
            make_state: returns the state; called at once where servers hold it, else when it is needed.
        """

    def fetch_rank_state(self, step: int) -> tuple[int, bytes]:
        """Return the clock at which this replacement continues and rank 0's state there (under asp: this rank's).

        Args:
            step: the clock that the coordinator knows, where servers hold the values.
        """
        raise AssertionError("where workers hold the values, no worker joins during the run")

    def close(self, reason: str, *, failed: bool) -> None:
        """Release connections, threads and hooks. `failed`: do not wait for other processes, which may be lost."""
