"""The script's reported numbers of steps, and the thread that sends them and heartbeats to the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import cast

import torch

from psctl.clock import Clock
from psctl.errors import UsageError
from psctl.job.training_messages import MOST_PEERS, StepReport, WorkerReport
from psctl.sync.synchronizer import Synchronizer
from psctl.worker.training_progress import TrainingProgress

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""

Metric = float | torch.Tensor
"""A reported number; a tensor is on a GPU and is read when it is sent."""


class StepReports:
    """Reported numbers by step. The main thread calls `add`, any thread calls `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, tuple[int, float, dict[str, Metric]]] = {}  # step -> epoch, weight, metrics
        self.last: dict[str, Metric] = {}
        """The newest value of every name, not yet converted."""

    def add(self, step: int, epoch: int, weight: float, numbers: Mapping[str, object]) -> None:
        """Add numbers of a step; a later value of a name replaces the earlier one of that step.

        Raises:
            UsageError: a value is not one number; names it.
        """
        held = {name: _hold(name, value) for name, value in numbers.items()}
        with self._lock:
            _, _, metrics = self._steps.setdefault(step, (epoch, weight, {}))
            metrics.update(held)
            self._steps[step] = (epoch, weight, metrics)
            self.last.update(held)

    def take(self) -> list[StepReport]:
        """Return the numbers added since the last call, converted to floats."""
        with self._lock:
            steps, self._steps = self._steps, {}
        return [
            StepReport(step, epoch, weight, {name: float(value) for name, value in metrics.items()})
            for step, (epoch, weight, metrics) in sorted(steps.items())
        ]

    def line(self) -> str:
        """Return the newest values as text: "loss 0.31 · accuracy 0.92"."""
        with self._lock:
            last = dict(self.last)
        return " · ".join(f"{name} {float(value):.4g}" for name, value in last.items())


class ReportInterval:
    """The time, examples and bytes since this rank's last report. Any thread may call `send_report`.

    Args:
        synchronizer: counts seconds and bytes.
        clock: the machine's time.
    """

    def __init__(self, synchronizer: Synchronizer, clock: Clock) -> None:
        self._synchronizer, self._clock = synchronizer, clock
        self._sending = threading.Lock()
        self._last = self._now(0.0)
        self._moved = dict(synchronizer.bytes_by_peer)

    def _now(self, examples: float) -> tuple[float, float, float, float]:
        return self._clock.now(), examples, self._synchronizer.sync_seconds, self._synchronizer.in_flight_seconds

    def _newly_moved(self) -> tuple[tuple[str, int, int], ...]:
        """Return the bytes by peer since the last call, most bytes first; those beyond MOST_PEERS as one sum."""
        before, self._moved = self._moved, dict(self._synchronizer.bytes_by_peer)
        found = []
        for peer, (sent, received) in self._moved.items():
            was_sent, was_received = before.get(peer, (0, 0))
            found.append((peer, max(0, sent - was_sent), max(0, received - was_received)))
        found.sort(key=lambda each: -each[1] - each[2])
        if rest := found[MOST_PEERS:]:
            found[MOST_PEERS:] = [("", sum(sent for _, sent, _ in rest), sum(received for _, _, received in rest))]
        return tuple(each for each in found if each[1] + each[2])

    def send_report(
        self, send: Callable[[WorkerReport], None], progress: TrainingProgress, reports: StepReports
    ) -> None:
        """Send the report of this interval and begin the next, under one lock, so that reports keep their order.

        Args:
            send: queues a message.
            progress: the run's steps.
            reports: numbers of steps.
        """
        with self._sending:
            checkpoint_step = progress.last_boundary  # read first: then all numbers up to that step are in `reports`
            steps = reports.take()
            before, self._last = self._last, self._now(progress.examples)
            seconds, done, waited, in_flight = (
                now - then for now, then in zip(self._last, before, strict=True)
            )  # fmt: skip
            send(
                WorkerReport(
                    progress.step, progress.epoch, steps, done, max(0.0, seconds - waited), waited, self._newly_moved(),
                    self._synchronizer.staleness, max(0.0, in_flight - waited), checkpoint_step,
                    progress.total,
                )
            )  # fmt: skip


class HeartbeatThread:
    """Sends heartbeats and reports on a thread of its own until `end`.

    Args:
        beat: called every second.
        report: called every `report_seconds`.
    """

    def __init__(
        self, beat: Callable[[], None], report: Callable[[], None], report_seconds: float, clock: Clock
    ) -> None:
        self._beat, self._report, self._every, self._clock = beat, report, report_seconds, clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psctl heartbeats", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop; returns when the thread has ended."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        reported = self._clock.now()
        tick = min(BEAT_SECONDS, self._every)
        beaten = self._clock.now() - BEAT_SECONDS
        while not self._over.is_set():
            now = self._clock.now()
            if now - beaten >= BEAT_SECONDS:
                beaten = now
                self._beat()
            if now - reported >= self._every:
                reported = now
                self._report()
            self._over.wait(tick)


def _hold(name: str, value: object) -> Metric:
    """Return a number's present value; one on a GPU is copied there and read later, so that reports do not wait."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"run.report({name}=...): a tensor of shape {tuple(value.shape)}, expected one element",
                "report its mean() or sum()",
            )
        return value.detach().clone() if value.device.type != "cpu" else float(value.detach())
    try:
        return float(cast(float, value))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"run.report({name}=...): {type(value).__name__} {value!r:.40}, expected a number",
            "pass a number or a tensor of one element",
        ) from error
