"""The session of a run without a coordinator, alone or under torchrun: no checkpoints; progress goes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch

from psctl.clock import Clock, SystemClock
from psctl.collectives.data_plane import DataPlane
from psctl.job.training_messages import CollectiveChoice, Decision, Welcome
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.snapshot import CopiedSlice
from psctl.schedule.schedule import Schedule
from psctl.train_state.common_step import StepActions
from psctl.train_state.example_sharing import ExampleShare
from psctl.types import Layout, Member, State, TensorSlice
from psctl.worker.coordinator_session import Membership
from psctl.worker.shard_requests import LocalShards

LINE_SECONDS = 5.0
"""Seconds between two lines of progress."""


def torchrun_rank() -> tuple[int, int] | None:
    """Return (rank, world size) of torchrun's environment, or None without one."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return (int(rank), int(world)) if rank is not None and world is not None else None


class StandaloneSession:
    """Has the methods of `CoordinatorSession` for a run without a job; most do nothing.

    Args:
        rank, world: torchrun's; 0 and 1 alone.
        strategy: "native" under torchrun, else "alone".
        seed: of random numbers and of the order of examples.
    """

    is_in_job = False
    has_plane = False
    example_share: ExampleShare | None = None

    def __init__(self, rank: int, world: int, strategy: str, seed: int = 0) -> None:
        self.me = Member("worker", rank)
        self._welcome = Welcome(world=world, seed=seed, every_steps=0, report_seconds=LINE_SECONDS)
        self._strategy = strategy
        self.shards = LocalShards(world)
        """Gives the shards of streams to this worker."""

    def join(self) -> Welcome:
        return self._welcome

    def prepare(
        self, layout: Layout, buffers: tuple[str, ...], outer: bool = False, on_gpus: bool = False,
        hooked: bool = False, follows: int | None = None,
    ) -> Decision:  # fmt: skip
        return Decision(self._strategy, "worker", layout, [])

    def connect_plane(self, schedule: Schedule) -> DataPlane:
        raise AssertionError("the addresses of other ranks are not known")

    def connect_plane_again(self, schedule: Schedule, former: DataPlane | None, why: str) -> DataPlane:
        raise AssertionError("no lost worker is replaced without a job")

    def connect_ranks(self) -> tuple[DataPlane, list[CollectiveChoice]]:
        raise AssertionError("the engine connects ranks without a job")

    def report_not_replaceable(self, reason: str) -> NoReturn:
        raise AssertionError("no lost worker is replaced without a job")

    def end_sums(self) -> None:
        return

    def report_bucket_size(self, size: int, measured: Sequence[tuple[int, float]]) -> None:
        return

    def report_backward_steps(self, buckets: int, every: int, measured: Sequence[tuple[int, float]]) -> None:
        return

    def begin(self, step: int) -> None:
        return

    def listen(self, listener: Callable[[Membership], None]) -> None:
        return

    def begin_step_end(self, step: int) -> StepActions:
        return StepActions()

    @property
    def saved_before(self) -> int:
        return 0

    def finish_step_end(self, step: int) -> None:
        return

    def load(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        return self.load_slices(slices).tensors

    def load_slices(self, slices: Sequence[TensorSlice]) -> ReceivedSlices:
        assert not slices, "there is no checkpoint to resume from"
        return ReceivedSlices()

    def send_start_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        return

    def receive_start_values(self) -> dict[str, torch.Tensor]:
        return {}

    def send_checkpoint(
        self, step: int, state: State | None, copied: Sequence[CopiedSlice], pause: Callable[[], float]
    ) -> None:
        return

    def wait_saved(self, step: int, timeout: float) -> str | None:
        return ""

    def send(self, message: object, payload: memoryview | None = None) -> None:
        return

    def report_unfit(self, step: int, reason: str) -> NoReturn:
        raise AssertionError("there are no servers")

    def report_finished(self, step: int) -> None:
        return

    def close(self, reason: str) -> None:
        return


class ProgressLines:
    """Prints the progress of training, one line every few seconds and one at the end.

    Args:
        write: prints a line; default: to stderr.
        clock: the machine's time.
    """

    def __init__(self, write: Callable[[str], object] | None = None, clock: Clock | None = None) -> None:
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._clock = clock or SystemClock()
        self._began = self._last = self._clock.now()
        self._examples = 0.0
        self._printed = 0.0

    def step(self, step: int, epoch: int, examples: float, numbers: Callable[[], str]) -> None:
        """Add `examples` of one more step; prints when a line is due."""
        self._examples += examples
        now = self._clock.now()
        if now - self._last >= LINE_SECONDS:
            rate = (self._examples - self._printed) / (now - self._last)
            self._last, self._printed = now, self._examples
            self._write(_line(f"step {step}", f"epoch {epoch}", numbers(), _rate(rate)))

    def end(self, step: int, numbers: str) -> None:
        """Print the last line."""
        seconds = self._clock.now() - self._began
        rate = self._examples / seconds if seconds > 0 else 0.0
        self._write(_line(f"{step} steps in {seconds:.1f} s", numbers, _rate(rate)))


def _line(*parts: str) -> str:
    return "psctl: " + " · ".join(part for part in parts if part)


def _rate(rate: float) -> str:
    return f"{rate:.0f} examples/s" if rate else ""
