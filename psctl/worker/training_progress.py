"""The progress of a run: its steps, its position in the data, and the checkpoints between steps.

    batch -> forward, backward -> optimizer.step() -> scheduler, report -> next batch
                                  the step ends                            between steps

Just before a step ends it is decided whether the step is saved and whether the run stops after it: by `every`, by the
coordinator (common_step.py), or because the last batch of the last epoch was yielded. The state is captured between
steps, when the scheduler has stepped too: where the loop requests its loader's next batch; at the end of an epoch,
where it requests the next epoch; with a loader of the script's own, in `run.report`. If a loop does none of these
before the next step ends, the state is captured just before that end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from psctl.job.examples import step_mark
from psctl.job.membership_messages import ExamplesShared
from psctl.job.training_messages import Resume, Welcome
from psctl.process.step_ring import StepRecorder
from psctl.ps.snapshot import CopiedSlice
from psctl.sync.synchronizer import ExampleWeight, Synchronizer
from psctl.train_state.common_step import StepActions
from psctl.train_state.example_sharing import Batch, DataPosition, members_after, position_from
from psctl.train_state.random_generators import RandomGenerators, rank_prefix, reseed, saved_for, saved_from
from psctl.train_state.rank_state import capture, fingerprint, restore
from psctl.train_state.training_parts import TrackedState, TrainingParts, load_saved, local_prefix
from psctl.types import State
from psctl.worker.coordinator_session import CoordinatorSession, whole_copy
from psctl.worker.loader import Loader
from psctl.worker.standalone import StandaloneSession
from psctl.worker.stream_loader import StreamLoader

Session = CoordinatorSession | StandaloneSession

AnyLoader = Loader | StreamLoader

LIBRARY_PATH = "library_path"
"""Key, in a checkpoint's state, of the path where a library has saved its own state."""

SAVE_TIMEOUT = 300.0
"""Seconds to wait at the end until the last checkpoint is complete on disk."""


class TrainingProgress:
    """Counts steps and epochs, and saves checkpoints.

    Args:
        session: of this worker.
        welcome: the coordinator's answer to joining the job.
        weight: counts the examples of every batch.
        tracked: objects given to `run.track`.
        spans: records the times of steps.
    """

    def __init__(
        self, session: Session, welcome: Welcome, weight: ExampleWeight, tracked: TrackedState, spans: StepRecorder
    ) -> None:  # fmt: skip
        self.rank, self.world, self.seed = session.me.rank, welcome.world, welcome.seed
        self.step = 0
        self.spans = spans
        self.epoch = 0
        self.examples = 0.0
        """Examples that this rank trained on."""
        self.given_total = 0
        """Steps of the whole training as the script reported them; 0: it did not."""
        self.in_step = False
        """Whether a batch was drawn, or a gradient computed, that no step has used yet."""
        self.on_save: Callable[[int], object] = lambda step: None
        """Called on every rank between a step's checkpoint and later operations."""
        self.store_clocks: Callable[[], dict[str, int]] = dict
        """Returns the number of finished clocks of each store."""
        self.taken_clocks: dict[str, int] = {}
        """Those of the state that this worker took, if it replaces a lost one."""
        self.generators = RandomGenerators()
        """The script's own random numbers, apart from those of steps."""
        self._session, self._weight, self._tracked = session, weight, tracked
        self._every = welcome.every_steps
        self._parts: TrainingParts | None = None
        self._synchronizer: Synchronizer | None = None
        self._frozen = ""
        self._sums: Mapping[str, object] = {}
        self._passed = self._saved = 0
        self._save_began = 0  # nanoseconds
        self._sent: int | None = None  # the last step whose checkpoint rank 0 has sent
        self._actions = StepActions()
        self._leaves = False  # fewer workers are wanted
        self._begin = DataPosition()
        self._resuming = False  # the first pass over the saved loader begins at its saved position
        self._loops = 0
        self._last_epoch: int | None = None  # of the current loop of epochs
        self._loaders = 0
        self._drawn_from: AnyLoader | None = None
        self._feeding: AnyLoader | None = None
        self._draws = 0
        self._step_batches = 0  # drawn in succession from one loader since the last step
        self._foreseen = 0  # steps of the whole training, from the loop of epochs and its loader
        self._batches: dict[int, list[Batch]] = {}  # by loader: the last ones, where members may change

    @property
    def last_boundary(self) -> int:
        """The last step after which `between_steps` was called: the newest possible checkpoint."""
        return self._passed

    @property
    def total(self) -> int:
        """Steps of the whole training: as reported, else as the epochs and the loader foretell; 0 while unknown."""
        return self.given_total or self._foreseen

    @property
    def step_mark(self) -> int:
        """A number that never decreases, and increases at the start and the end of each step."""
        return step_mark(self.step, inside=self.in_step)

    @property
    def shares_examples(self) -> bool:
        """Whether the last batch came from a loader of psctl, or the next one will: a resumed run's."""
        return self._drawn_from is not None or (self._resuming and self._begin.loader >= 0)

    @property
    def keeps_states(self) -> bool:
        """Whether a worker that replaces a lost one takes a state that is stored between two steps."""
        sync = self._synchronizer
        return sync is not None and sync.update == "server" and not sync.recovers_sums

    def settle(self) -> bool:
        """Where lost workers are not replaced, wait until finished steps are certain to count; return if it did."""
        share = self._session.example_share
        if self._synchronizer is None or share is None or not share.elastic:
            return False
        self._synchronizer.wait_exact()
        return True

    # ---- the start ----

    def resume(self, resume: Resume) -> None:
        """Continue after the step of a checkpoint."""
        self._continue_at(resume.step, position_from(resume.state))
        names = saved_for(self.rank, [each.name for each in resume.tensors])
        self.generators.resume(saved_from(self.rank, load_saved(resume, names, self._session.load)))

    def begin(self, parts: TrainingParts, synchronizer: Synchronizer, sums: Mapping[str, object]) -> None:
        """Begin training: the model has its start values. `sums`: the order of sums, for checkpoints."""
        self._parts, self._synchronizer, self._sums = parts, synchronizer, sums
        stores = synchronizer.update == "server" or synchronizer.recovers_sums
        self._frozen = fingerprint(parts) if stores else ""
        self._store_rank_state(self._begin)

    def new_loader(self) -> int:
        """Return the next loader's number; a loader made in every epoch has the same in each."""
        self._loaders += 1
        return self._loaders - 1

    # ---- steps ----

    def end_step(self, act: Callable[[bool], object]) -> object:
        """End a step by `act`, called with whether the step is saved; returns its result."""
        self.between_steps(late=True)
        step = self.step + 1
        actions = self._session.begin_step_end(step)
        save = actions.save or self._due(step) or self._is_last()
        self._actions = StepActions(save, actions.stop)
        began = self.spans.now()
        result = act(save)
        self.spans.updated(began)
        self.step = step
        self._session.finish_step_end(step)
        self.examples += self._weight.own_examples
        self._weight.mark_sent()
        self._feeding = self._drawn_from
        self._foreseen = self._foresee()
        self.in_step = False
        self._draws = self._step_batches = 0
        self.generators.end_step()
        if save:
            self.generators.mark_step_end()
        return result

    @property
    def is_saved(self) -> bool:
        """Whether the state after the last step is saved."""
        return self._actions.save

    def count_step(self) -> None:
        """Count a step of a loop that is not psctl's, of which nothing is saved."""
        self.step += 1
        self._passed = self._saved = self.step

    def follow(self, step: int) -> None:
        """Begin a loop of a library, which continues after `step`."""
        self.step = self._passed = self._saved = step

    def end_library_step(self, step: int) -> StepActions:
        """Count a step of a library's loop, which has ended; return what is due now."""
        before = self.step
        actions = self._session.begin_step_end(step)
        self.step = self._passed = self._saved = step
        self._session.finish_step_end(step)
        due = self._every > 0 and step // self._every > before // self._every
        return StepActions(actions.save or due, actions.stop)

    def save_library_path(self, path: str) -> None:
        """Send the checkpoint of the last step, which has nothing but the path of the library's own one."""
        began = self.spans.now()
        self.on_save(self.step)
        state: State = {
            "step": self.step, "seed": self.seed, "world": self.world, "strategy": "", "epoch": self.epoch,
            LIBRARY_PATH: path,
        }  # fmt: skip
        pause = lambda: (self.spans.now() - began) * 1e-9  # noqa: E731
        self._session.send_checkpoint(self.step, state if self.rank == 0 else None, (), pause)
        if self.rank == 0:
            self._sent = self.step

    def on_forward(self) -> None:
        """Handle a forward in training: a step begins, unless a loader's batch has begun it."""
        self.spans.forward()
        if not self.generators.in_step:
            self.generators.begin_step()
            self._reseed()

    def _due(self, step: int) -> bool:
        """Return whether `step` is the first one with equal values on all ranks at or after a multiple of `every`."""
        period = self._synchronizer.period if self._synchronizer is not None else 1
        return self._every > 0 and step % period == 0 and step // self._every > (step - period) // self._every

    def last_checkpoint(self) -> int:
        """Return the newest step, of those that were done before a replacement began, that all ranks save."""
        due = next((step for step in range(self.step, max(self.step - self._every, 0), -1) if self._due(step)), 0)
        return max(due, self._session.saved_before)

    def _is_last(self) -> bool:
        feeding = self._drawn_from
        return self._last_epoch == self.epoch and feeding is not None and feeding.complete

    def _foresee(self) -> int:
        """Return the steps of the whole training if all take as many batches as the last one; 0 where unknown."""
        feeding = self._feeding
        count = feeding.batches if feeding is not None else None
        if feeding is None or count is None or self._last_epoch is None:
            return 0
        each = max(1, self._step_batches)
        left = math.ceil(max(0, count - feeding.clock) / each)
        return self.step + left + (self._last_epoch - self.epoch) * math.ceil(count / each)

    def _reseed(self) -> None:
        reseed(self.seed, "clock", self.step, self._draws, self.rank)

    # ---- epochs and batches ----

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of one loop, from the resumed one on."""
        loop, self._loops = self._loops, self._loops + 1
        resumed = self._begin.loop
        first = 0 if loop > resumed else self._begin.epoch if loop == resumed else count
        self._last_epoch = count - 1
        made = self._loaders
        self.epoch = min(first, max(0, count - 1))  # the last one when nothing is left to train
        try:
            for epoch in range(first, count):
                self.epoch, self._loaders = epoch, made
                here = loop == resumed and epoch == first
                self.generators.begin_epoch(resumed=here, again=self._begin.loader < 0 or self._begin.clock == 0)
                yield epoch
                self.generators.end_epoch()
                self.between_steps(DataPosition(loop, epoch + 1, self._number(), 0))
        finally:
            self._last_epoch, self._loaders = None, made

    def epoch_of(self, loader: AnyLoader) -> tuple[int, int]:
        """Return the epoch of a new pass over a loader and the clock to begin at."""
        at = self._begin
        inside = self._last_epoch is not None
        epoch = self.epoch if inside else at.epoch + loader.passes
        if self._resuming and loader.index == at.loader and epoch == at.epoch:
            self._resuming = False
            return epoch, at.clock
        return epoch, 0

    def on_batch_wanted(self, loader: AnyLoader) -> None:
        """Handle the request for a loader's next batch: the step before is complete."""
        if loader is self._feeding and not loader.complete:
            self.between_steps()

    def on_batch(self, loader: AnyLoader, own: int, total: int | Callable[[], int]) -> None:
        """Handle a batch that a loader yields: `own` examples here, `total` over all ranks, or a wait for these."""
        self._step_batches = self._step_batches + 1 if loader is self._drawn_from else 1
        self._drawn_from = loader
        self._weight.add_batch(loader, own, total)
        self.in_step = True
        self._reseed()  # fetching may have used random numbers
        self._draws += 1

    def members(self) -> tuple[int, ...]:
        """Return the ranks that take part now."""
        share = self._session.example_share
        return share.members() if share is not None else tuple(range(self.world))

    def begin_clock(self) -> tuple[int, list[ExamplesShared], tuple[int, ...]]:
        """Start the clock of the next batch: return it, the changes of members up to it, and its ranks."""
        share = self._session.example_share
        changes = share.begin_clock(self.step) if share is not None else []
        ranks = members_after(changes, range(self.world))
        if self.rank not in ranks:
            self._leaves = True
            self._stop()
        self._weight.set_world(len(ranks))
        return self.step, changes, ranks

    def recent_batches(self, loader: Loader) -> list[Batch]:
        """Return the last batches of a loader, where members may change."""
        return self._batches.get(loader.index, [])

    def remember_batch(self, loader: Loader, batch: Batch) -> None:
        """Remember a batch of all ranks, where members may change."""
        share = self._session.example_share
        if share is not None and share.elastic:
            kept = [one for one in self.recent_batches(loader) if one.step > batch.step - share.span]
            self._batches[loader.index] = [*kept, batch]

    def may_extend_pass(self) -> bool:
        """Return whether a change of members may add a batch to a pass; waits until that is known."""
        share = self._session.example_share
        if share is None or not self.settle():
            return False
        share.settle()
        return True

    def on_exhausted(self, loader: AnyLoader) -> None:
        """Handle the end of a pass over a loader, and of the epoch where the script does not use run.epochs."""
        loader.passes += 1
        if loader is self._feeding:
            self.in_step = False
            if self._last_epoch is None:
                self.epoch = self._begin.epoch + loader.passes
                self.between_steps(DataPosition(max(0, self._loops - 1), self.epoch, loader.index, 0))

    def on_report(self) -> None:
        """Handle a call of `run.report`: without a loader of psctl it is between steps."""
        if self._feeding is None and not self.in_step:
            self.between_steps()

    # ---- between steps ----

    def between_steps(self, position: DataPosition | None = None, *, late: bool = False) -> None:
        """Save or stop as decided for the last step, once.

        Args:
            position: where a resumed run continues; None: at the next batch.
            late: the next step is about to end.

        Raises:
            SystemExit: a stop was requested for this step; status 0.
        """
        if self.step == self._passed:
            return
        self._passed = self.step
        if self._actions.save:
            began = self.spans.now()
            self._save(position or self._here(), late=late)
            self.spans.saved(began)
        self._store_rank_state(position or self._here())
        if self._actions.stop:
            self._stop()

    def _store_rank_state(self, position: DataPosition) -> None:
        """Store rank 0's own state, where it is needed every rank's, for a worker that joins at this step."""
        parts, sync = self._parts, self._synchronizer
        if parts is None or sync is None:
            return
        if self.rank == 0 or sync.is_asynchronous or sync.recovers_sums:
            kept = self._tracked, self.generators, position
            sync.store_rank_state(
                self.step, lambda: capture(parts, *kept, self._frozen, self._batches, self.store_clocks())
            )

    def replace_lost_worker(self, resume: Resume | None, parts: TrainingParts, synchronizer: Synchronizer) -> bool:
        """Continue at a lost worker's step, if this process replaces one; return whether it does."""
        replaces = resume is not None and not resume.checkpoint
        if resume is not None and replaces:
            own = self.rank == 0 or synchronizer.is_asynchronous
            step, stored = synchronizer.fetch_rank_state(resume.step)
            position, self._batches, self.taken_clocks = restore(stored, parts, self._tracked, self.generators, own=own)
            self._continue_at(step, position)
        return replaces

    def _continue_at(self, step: int, position: DataPosition) -> None:
        self.step = self._passed = self._saved = step
        self.spans.continue_after(step)
        self._begin = position
        self.epoch = position.epoch
        self._resuming = True

    def finish(self) -> None:
        """Save the last step at the end of the script, if it was not saved."""
        if self._synchronizer is None:
            return
        self.between_steps()
        if not self._session.is_in_job or self.step == self._saved or self._actions.stop or self._leaves:
            return
        self._synchronizer.save_last(self.step)
        self._save(self._here())

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint that was sent is complete on disk (rank 0)."""
        if self._sent is not None:
            problem = self._session.wait_saved(self._sent, SAVE_TIMEOUT)
            if problem is None:
                problem = f"no report of it in {SAVE_TIMEOUT:.0f} s"
            if problem:
                print(f"psctl: the checkpoint of step {self._sent} is incomplete: {problem}", file=sys.stderr)

    def _stop(self) -> None:
        assert self._synchronizer is not None, "steps were made"
        self._synchronizer.wait_exact()
        self._feeding = None
        raise SystemExit(0)

    def _here(self) -> DataPosition:
        feeding = self._feeding
        loop = max(0, self._loops - 1)
        return DataPosition(loop, self.epoch, self._number(), feeding.clock if feeding is not None else 0)

    def _number(self) -> int:
        return self._feeding.index if self._feeding is not None else -1

    def _save(self, position: DataPosition, *, late: bool = False) -> None:
        """Send this rank's part of the checkpoint of the last step; buffers and tracked objects are rank 0's.

        The states of the script's generators and the residuals of pushes are each rank's own; where ranks step alone,
        the others send their optimizers' state too.
        """
        self._saved = self.step
        self._save_began = self.spans.now()
        if self._session.is_in_job:
            self.on_save(self.step)
        assert self._parts is not None, "steps were made"
        if not self._session.is_in_job:
            return
        sync = self._synchronizer
        assert sync is not None, "steps were made"
        drawn = self.generators.checkpoint_tensors(marked=late, origin=self.rank == 0)
        own = {rank_prefix(self.rank) + name: one for name, one in drawn.items()} | dict(sync.residuals)
        if sync.update == "sharded":  # values of this step may be on their way
            sync.wait_exact()
        slices = sync.state_slices()
        if self.rank != 0:
            local = self._parts.optimizer_state(local_prefix(self.rank))[1] if sync.has_local_optimizer else {}
            self._send(None, local | own, slices)
            return
        parts, on_servers = self._parts, sync.update == "server"
        plain, tensors = parts.optimizer_state() if sync.update == "worker" else ({}, {})
        tracked, more = self._tracked.state()
        outer, kept = sync.checkpoint_state()
        state = {
            "step": self.step, "seed": self.seed, "world": self.world, "strategy": sync.name,
            "loop": position.loop, "epoch": position.epoch, "loader": position.loader, "clock": position.clock,
            "groups": parts.groups(), "members": parts.group_members(), "tied": parts.tied(),
            "scheduler": parts.scheduler_state(), "optimizer": plain, "tracked": tracked,
            "outer": outer, "sums": self._sums,
        }  # fmt: skip
        self._send(state, parts.values(on_servers) | tensors | more | kept | own, slices)
        self._sent = self.step

    def _send(self, state: State | None, tensors: Mapping[str, torch.Tensor], slices: Sequence[CopiedSlice]) -> None:
        copied = [*(whole_copy(name, one) for name, one in tensors.items()), *slices]
        pause = lambda: (self.spans.now() - self._save_began) * 1e-9  # noqa: E731
        self._session.send_checkpoint(self.step, state, copied, pause)
