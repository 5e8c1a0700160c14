"""The course of a run: its steps, its place in the data, and the points of rest where a checkpoint is taken.

    batch -> forward, backward -> optimizer.step() -> scheduler, report -> next batch
                                  the step ends                            point of rest

Just before a step ends it is decided whether it will be saved and whether the run stops after it: by `every`, by the
coordinator (common_step.py), or because the last batch of the last epoch was handed out. State is captured at the
point of
rest after it, when the scheduler has stepped too: where the loop asks for its loader's next batch; at the end of an
epoch, where it asks for the next epoch; with a loader of one's own, in `run.report`. If a loop passes none of these
before the next step ends, the rest is taken there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from psctl.job.membership_messages import ExamplesShared
from psctl.job.training_messages import Resume, Welcome
from psctl.sync.build_synchronizer import Seat
from psctl.sync.synchronizer import ExampleWeight, Synchronizer
from psctl.train_state.common_step import StepActions
from psctl.train_state.data_position import DataPosition, place_of, position_of
from psctl.train_state.example_sharing import Batch, members_of
from psctl.train_state.random_generators import RandomGenerators, place, saved_for, saved_from
from psctl.train_state.rank_state import capture, fingerprint, restore
from psctl.train_state.step_seed import reseed
from psctl.train_state.tracked_state import TrackedState
from psctl.train_state.training_parts import TrainingParts, local, wanted
from psctl.worker.loader import Loader

SAVE_PATIENCE = 300.0
"""Seconds to wait at the end until the last checkpoint is whole on disk."""


class TrainingProgress:
    """Counts steps and epochs, and saves.

    Args:
        seat: the run's place in its job.
        welcome: what the coordinator said of the job.
        share: told of every batch.
        tracked: what else belongs into a checkpoint.
    """

    def __init__(self, seat: Seat, welcome: Welcome, share: ExampleWeight, tracked: TrackedState) -> None:
        self.rank, self.world, self.seed = seat.me.rank, welcome.world, welcome.seed
        self.step = 0
        self.epoch = 0
        self.examples = 0.0
        """Examples that this rank trained on."""
        self.in_step = False
        """A batch was drawn, or a gradient computed, that no step has used yet."""
        self.on_save: Callable[[int], Any] = lambda step: None
        """Told, on every rank, where the checkpoint of a step cuts what this rank does."""
        self.generators = RandomGenerators()
        """The script's own random numbers, apart from those of steps."""
        self._seat, self._share, self._tracked = seat, share, tracked
        self._every = welcome.every_steps
        self._parts: TrainingParts | None = None
        self._way: Synchronizer | None = None
        self._frozen = ""
        self._sums: Mapping[str, Any] = {}
        self._rested = self._saved = 0
        self._sent: int | None = None  # the last step that this rank sent its part of
        self._verdict = StepActions()
        self._begin = DataPosition()
        self._resuming = False  # the first pass over the saved loader begins where it was
        self._loops = 0
        self._last_epoch: int | None = None  # of the loop of epochs that is going on
        self._loaders = 0
        self._drawn_from: Loader | None = None
        self._feeding: Loader | None = None
        self._draws = 0
        self._batches: dict[int, list[Batch]] = {}  # by loader: the last ones, where members may change

    @property
    def marked(self) -> int:
        """The last step whose point of rest is behind."""
        return self._rested

    @property
    def place(self) -> int:
        """Where the run is: a number that never falls, and changes at the beginning and the end of each step."""
        return place_of(self.step, inside=self.in_step)

    def settle(self) -> bool:
        """Where nobody takes a lost worker's place, return True once the steps that ended here are sure to count."""
        division = self._seat.division
        if self._way is None or division is None or not division.elastic:
            return False
        self._way.wait()
        return True

    # ---- the start ----

    def resume(self, resume: Resume) -> None:
        """Go on after the step that a checkpoint holds."""
        self._go_on(resume.step, position_of(resume.state))
        names = saved_for(self.rank, [each.name for each in resume.tensors])
        tensors = self._seat.load(wanted(resume.tensors, names, resume.checkpoint))
        self.generators.resume(saved_from(self.rank, dict(zip(names, tensors, strict=True))))

    def begin(self, parts: TrainingParts, way: Synchronizer, sums: Mapping[str, Any]) -> None:
        """Take the model on: it has its start values. `sums`: the order of sums, for checkpoints."""
        self._parts, self._way, self._sums = parts, way, sums
        self._frozen = fingerprint(parts) if way.update == "server" else ""
        self._leave(self._begin)

    def new_loader(self) -> int:
        """Return the next loader's number; one made anew in every epoch has the same in each."""
        self._loaders += 1
        return self._loaders - 1

    # ---- steps ----

    def end_step(self, act: Callable[[bool], Any]) -> Any:
        """End a step. `act` is told whether the step is saved, and does it."""
        self.rest(late=True)
        step = self.step + 1
        verdict = self._seat.ending(step)
        save = verdict.save or self._due(step) or self._is_last()
        self._verdict = StepActions(save, verdict.stop)
        result = act(save)
        self.step = step
        self._seat.ended(step)
        self.examples += self._share.mine
        self._share.sent()
        self._feeding = self._drawn_from
        self.in_step = False
        self._draws = 0
        self.generators.leave()
        if save:
            self.generators.mark()
        return result

    def forward(self) -> None:
        """The model is called in training: a step begins, unless a batch of a loader's has begun it."""
        if not self.generators.inside:
            self.generators.enter()
            self._reseed()

    def _due(self, step: int) -> bool:
        """Is this the first step, of those at which ranks have the same values, at or after a multiple of `every`?"""
        period = self._way.period if self._way is not None else 1
        return self._every > 0 and step % period == 0 and step // self._every > (step - period) // self._every

    def _is_last(self) -> bool:
        feeding = self._drawn_from
        return self._last_epoch == self.epoch and feeding is not None and feeding.complete

    def _reseed(self) -> None:
        reseed(self.seed, "clock", self.step, self._draws, self.rank)

    # ---- epochs and batches ----

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of one loop, from where the run goes on."""
        loop, self._loops = self._loops, self._loops + 1
        resumed = self._begin.loop
        first = 0 if loop > resumed else self._begin.epoch if loop == resumed else count
        self._last_epoch = count - 1
        made = self._loaders
        self.epoch = min(first, max(0, count - 1))  # when nothing is left to train, it is the last one
        try:
            for epoch in range(first, count):
                self.epoch, self._loaders = epoch, made
                here = loop == resumed and epoch == first
                self.generators.epoch_begins(resumed=here, again=self._begin.loader < 0 or self._begin.clock == 0)
                yield epoch
                self.generators.epoch_ends()
                self.rest(DataPosition(loop, epoch + 1, self._number(), 0))
        finally:
            self._last_epoch, self._loaders = None, made

    def epoch_of(self, loader: Loader) -> tuple[int, int]:
        """Return the epoch of a new pass over a loader and the clock to begin at."""
        at = self._begin
        inside = self._last_epoch is not None
        epoch = self.epoch if inside else at.epoch + loader.passes
        if self._resuming and loader.index == at.loader and epoch == at.epoch:
            self._resuming = False
            return epoch, at.clock
        return epoch, 0

    def wanted(self, loader: Loader) -> None:
        """The loop asks for a loader's next batch."""
        if loader is self._feeding and not loader.complete:
            self.rest()

    def fetching(self) -> None:
        """A batch is about to be fetched: its step begins."""
        self.generators.enter()

    def passed(self) -> None:
        """A pass over a loader has ended, or was left: so has the step that it began."""
        self.generators.leave()

    def drawn(self, loader: Loader, mine: int, together: int) -> None:
        """A loader hands out a batch."""
        self._drawn_from = loader
        self._share.drawn(loader, mine, together)
        self.in_step = True
        self._reseed()  # fetching may have used random numbers
        self._draws += 1

    def members(self) -> tuple[int, ...]:
        """Return the ranks that take part now."""
        division = self._seat.division
        return division.members() if division is not None else tuple(range(self.world))

    def begin_clock(self) -> tuple[int, list[ExamplesShared], tuple[int, ...]]:
        """Begin the clock of the next batch: return it, all changes of members up to it, and who shares it."""
        division = self._seat.division
        changes = division.begin(self.step) if division is not None else []
        ranks = members_of(changes, range(self.world))
        self._share.among(len(ranks))
        return self.step, changes, ranks

    def batches(self, loader: Loader) -> list[Batch]:
        """Return the last batches of a loader, where members may change."""
        return self._batches.get(loader.index, [])

    def remember(self, loader: Loader, batch: Batch) -> None:
        """Note what a loader hands out."""
        division = self._seat.division
        if division is not None and division.elastic:
            kept = [one for one in self.batches(loader) if one.step > batch.step - division.span]
            self._batches[loader.index] = [*kept, batch]

    def pass_ends(self) -> bool:
        """The last batch of a pass was handed out: tell whether a change of members may add one, when it is known."""
        division = self._seat.division
        if division is None or not self.settle():
            return False
        division.settle()
        return True

    def exhausted(self, loader: Loader) -> None:
        """A pass over a loader has ended; the epoch too, where the script does not count epochs with run.epochs."""
        loader.passes += 1
        if loader is self._feeding:
            self.in_step = False
            if self._last_epoch is None:
                self.epoch = self._begin.epoch + loader.passes
                self.rest(DataPosition(max(0, self._loops - 1), self.epoch, loader.index, 0))

    def reported(self) -> None:
        """The script reported; without a loader of psctl's that is the point of rest."""
        if self._feeding is None and not self.in_step:
            self.rest()

    # ---- rest ----

    def rest(self, position: DataPosition | None = None, *, late: bool = False) -> None:
        """Do what was decided for the last step, once.

        Args:
            position: where the run goes on; None: at the next batch.
            late: the next step is about to end.

        Raises:
            SystemExit: the run was asked to stop here; status 0.
        """
        if self.step == self._rested:
            return
        self._rested = self.step
        if self._verdict.save:
            self._save(position or self._here(), late=late)
        self._leave(position or self._here())
        if self._verdict.stop:
            self._stop()

    def _leave(self, position: DataPosition) -> None:
        """Leave rank 0's own state, under asp every rank's, where a worker that joins at this step finds it."""
        parts, way = self._parts, self._way
        if parts is not None and way is not None and (self.rank == 0 or way.alone):
            kept = self._tracked, self.generators, position
            way.leave(self.step, lambda: capture(parts, *kept, self._frozen, self._batches))

    def take_place(self, resume: Resume | None, parts: TrainingParts, way: Synchronizer) -> None:
        """Go on where a lost worker was, if that is what this process is for: the others train already."""
        if resume is not None and not resume.checkpoint:
            own = self.rank == 0 or way.alone
            found = restore(way.left(resume.step), parts, self._tracked, self.generators, own=own)
            position, self._batches = found
            self._go_on(resume.step, position)

    def _go_on(self, step: int, position: DataPosition) -> None:
        self.step = self._rested = self._saved = step
        self._begin = position
        self.epoch = position.epoch
        self._resuming = True

    def last_rest(self) -> None:
        """The script has ended: take the rest that is due, and save the last step if nothing did."""
        if self._way is None:
            return
        self.rest()
        if not self._seat.keeps or self.step == self._saved or self._verdict.stop:
            return
        self._way.save_late(self.step)
        self._save(self._here())

    def await_saved(self) -> None:
        """Wait until the last checkpoint that was sent is whole on disk (rank 0)."""
        if self._sent is not None:
            problem = self._seat.saved(self._sent, SAVE_PATIENCE)
            if problem is None:
                problem = f"no word of it in {SAVE_PATIENCE:.0f} s"
            if problem:
                print(f"psctl: the checkpoint of step {self._sent} is not whole: {problem}", file=sys.stderr)

    def _stop(self) -> None:
        assert self._way is not None, "steps were made"
        self._way.wait()
        self._feeding = None
        raise SystemExit(0)

    def _here(self) -> DataPosition:
        feeding = self._feeding
        loop = max(0, self._loops - 1)
        return DataPosition(loop, self.epoch, self._number(), feeding.clock if feeding is not None else 0)

    def _number(self) -> int:
        return self._feeding.index if self._feeding is not None else -1

    def _save(self, position: DataPosition, *, late: bool = False) -> None:
        """Send this rank's part of the checkpoint of the last step: rank 0's, for its buffers and state count.

        The states of the script's generators and what pushes left out are each rank's own; where ranks step apart, the
        others send their optimizers' state too.
        """
        self._saved = self.step
        if self._seat.keeps:
            self.on_save(self.step)
        assert self._parts is not None, "steps were made"
        assert self._way is not None, "steps were made"
        if not self._seat.keeps:
            return
        drawn = self.generators.saved(marked=late, origin=self.rank == 0)
        own = {place(self.rank) + name: one for name, one in drawn.items()}
        own |= self._way.residuals.tensors() if self._way.residuals is not None else {}
        if self.rank != 0:
            apart = self._parts.optimizer_state(local(self.rank))[1] if self._way.apart else {}
            self._send(None, apart | own)
            return
        parts, on_servers = self._parts, self._way.update == "server"
        plain, tensors = ({}, {}) if on_servers else parts.optimizer_state()
        tracked, more = self._tracked.state()
        outer, kept = self._way.state()
        state = {
            "step": self.step, "seed": self.seed, "world": self.world, "strategy": self._way.name,
            "loop": position.loop, "epoch": position.epoch, "loader": position.loader, "clock": position.clock,
            "groups": parts.groups(), "scheduler": parts.scheduler_state(), "optimizer": plain, "tracked": tracked,
            "outer": outer, "sums": self._sums,
        }  # fmt: skip
        self._send(state, parts.values(on_servers) | tensors | more | kept | own)
        self._sent = self.step

    def _send(self, state: dict[str, Any] | None, tensors: Mapping[str, torch.Tensor]) -> None:
        copies = {name: one.detach().to("cpu", copy=True).contiguous() for name, one in tensors.items()}
        self._seat.send_checkpoint(self.step, state, copies)
