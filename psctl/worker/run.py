"""The run: the object that `psctl.init()` returns, through which a training script uses psctl."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from psctl.client.dense_client import ParameterClient
from psctl.client.model_layout import check_given, describe
from psctl.clock import Clock
from psctl.collectives.group_collectives import GroupCollectives
from psctl.errors import UsageError
from psctl.job.table_server_messages import ScriptOpensStore
from psctl.job.training_messages import Decision, Heartbeat, Resume
from psctl.kv.open_store import Stores
from psctl.kv.store import Store
from psctl.kv.store_connections import LocalServer, StoreServers
from psctl.process.step_ring import StepRecorder
from psctl.sparse.model_rows import ModelRows
from psctl.sync.bucket_allreduce import local_device
from psctl.sync.build_synchronizer import Tools, build_ddp_hook, build_synchronizer
from psctl.sync.gradient_hooks import GradientHooks
from psctl.sync.gradient_trace import GradientTrace
from psctl.sync.local_sgd import OptimizerFactory
from psctl.sync.synchronizer import ExampleWeight, Synchronizer
from psctl.train_state.prepared_model import replace_step, swap_class
from psctl.train_state.random_generators import reseed, step_hooks
from psctl.train_state.training_parts import Stateful, TrackedState, TrainingParts, load_saved
from psctl.types import Layout
from psctl.worker.collective_calls import CollectiveCalls, ScriptLinks
from psctl.worker.followed_loop import FollowedLoop
from psctl.worker.joint_layers import join_layers
from psctl.worker.loader import Example, Loader, Minibatch
from psctl.worker.shard_stream import Shard, ShardStream
from psctl.worker.standalone import ProgressLines
from psctl.worker.step_profiler import StepProfiler
from psctl.worker.step_reports import HeartbeatThread, ReportInterval, StepReports
from psctl.worker.stream_loader import StreamLoader
from psctl.worker.training_progress import LIBRARY_PATH, Session, TrainingProgress

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Scheduler = TypeVar("Scheduler", bound=Stateful)


class Run(CollectiveCalls):
    """One worker's part in a training job; `psctl.init()` returns it.

        run = psctl.init()
        model, optimizer, scheduler = run.prepare(Net(), optimizer, scheduler)
        loader = run.loader(dataset, batch_size=64)
        for epoch in run.epochs(10):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                run.report(loss=loss)

    The same script runs under `psctl train` with every strategy, under torchrun, and alone (`python train.py`).

    Random numbers: `psctl.init` seeds python's, numpy's and torch's generators from the job's `seed`, equally on every
    rank. From then on they are yours, and saved with each checkpoint, except within steps: from a batch of `run.loader`
    (with a loader of your own: from the model's forward) to the end of `optimizer.step()` they give numbers that depend
    on (seed, step, rank) alone, so that dropout differs by rank and a step can be done again to the bit.
    """

    def __init__(
        self,
        session: Session,
        connect: Callable[[Decision], ParameterClient],
        clock: Clock,
        *,
        links: Callable[[], StoreServers] | None = None,
        trace: GradientTrace | None = None,
        lines: ProgressLines | None = None,
        folder: str = "",
        spans: StepRecorder | None = None,
        profile: str = "",
        seeded: bool = True,
    ) -> None:
        self._session, self._connect, self._clock, self._trace, self._lines = session, connect, clock, trace, lines
        self._welcome = welcome = session.join()
        self._weight = ExampleWeight(welcome.world)
        self._tracked = TrackedState()
        self._reports = StepReports()
        self._spans = spans or StepRecorder()
        self._profiler = StepProfiler(self._spans, profile)
        self._progress = TrainingProgress(session, welcome, self._weight, self._tracked, self._spans)
        self._stores = Stores(session.me.rank, welcome.world, links or LocalServer, self._progress, folder)
        self._progress.on_save = self._on_save
        self._progress.store_clocks = lambda: self._stores.clocks
        script_links = ScriptLinks(session, welcome.world)
        self._opens_stores = False  # by run.store()
        self._collectives = GroupCollectives(
            session.me.rank, welcome.world, script_links.connect, script_links.choose
        )  # fmt: skip
        self._synchronizer: Synchronizer | None = None
        self._rows = ModelRows([], self._weight)
        self._step_hooks: GradientHooks | None = None
        self._strategy = ""
        self._resumed: str | None = None
        self._interval: ReportInterval | None = None  # since the last report
        self._over = False
        if seeded:
            reseed(welcome.seed, "init")
        if welcome.resume is not None and welcome.resume.checkpoint:
            self._resume_from(welcome.resume)
        self._heartbeat: HeartbeatThread | None = None
        if session.is_in_job:
            self._heartbeat = HeartbeatThread(self._beat, self._send_report, welcome.report_seconds, clock)

    # ---- this worker ----

    @property
    def rank(self) -> int:
        """This worker's number, from 0; as RANK in the environment."""
        return self._progress.rank

    @property
    def world(self) -> int:
        """The number of workers that take part; as WORLD_SIZE in the environment at the start, 1 alone."""
        return len(self._progress.members())

    @property
    def device(self) -> torch.device:
        """The device to put model and batches on: this process's GPU (by LOCAL_RANK), or the CPU."""
        return local_device()

    @property
    def strategy(self) -> str:
        """How gradients are synchronised: a strategy's name, or "alone"; "" before `prepare`, which decides it."""
        return self._strategy

    @property
    def step(self) -> int:
        """Finished steps of the job, those before a resume included. A step ends in `optimizer.step()`."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch that is in progress, from 0."""
        return self._progress.epoch

    @property
    def library_path(self) -> str | None:
        """Where the library whose loop this job follows has saved the state to resume from; None: it starts anew.

        Raises:
            UsageError: the job resumes from a checkpoint of run.prepare; the user's fault.
        """
        resume = self._welcome.resume
        if resume is None:
            return None
        if LIBRARY_PATH not in resume.state:
            raise UsageError(
                f"{resume.checkpoint} is a checkpoint of run.prepare, from which no library's loop can resume",
                "resume with the script that wrote it, or start anew: --resume never",
            )
        return str(resume.state[LIBRARY_PATH])

    @property
    def resumed(self) -> str | None:
        """The checkpoint that the job resumed from ("digits-3@500"), or None."""
        return self._resumed

    # ---- the model ----

    @overload
    def prepare(
        self, model: Model, optimizer: None = None, scheduler: None = None, *, outer: OptimizerFactory | None = None
    ) -> Model: ...

    @overload
    def prepare(
        self, model: Model, optimizer: Optimizer, scheduler: None = None, *, outer: OptimizerFactory | None = None
    ) -> tuple[Model, Optimizer]: ...

    @overload
    def prepare(
        self, model: Model, optimizer: Optimizer, scheduler: Scheduler, *, outer: OptimizerFactory | None = None
    ) -> tuple[Model, Optimizer, Scheduler]: ...

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        *,
        outer: OptimizerFactory | None = None,
    ) -> object:
        """Register the model, its optimizer and its scheduler with the job; return as many objects as were given.

        The returned objects are your own: the model's class is replaced by a subclass of it, the optimizer's `step` by
        one that synchronises. Afterwards every rank has rank 0's values (parameters, buffers). A job that resumes from
        a checkpoint has the checkpoint's values, and the states of its optimizer and scheduler.

        Call it once, on every rank, before the first forward, with model and optimizer on the device they train on
        (`run.device`), frozen parameters frozen, and values of your own loaded.

        Common mistakes: under `update: server` and `sharded` (see the `plan` event) gradients are sent during backward,
        and new values arrive from the servers, or from the ranks, of which each steps a part. So clip with
        `run.clip_grad_norm`, not torch's; keep several backwards of one step under `run.accumulate()`; and expect new
        values only where the model is called, in `state_dict()` and `parameters()` of the model, and after
        `run.wait()`, not in a tensor that you hold. `optimizer.state` stays empty: those that step have it.

        Args:
            model: the module to train. Several modules: put them into one nn.ModuleList or nn.ModuleDict.
            optimizer: over parameters of this model. None: you update parameters yourself; a step then ends with each
                backward outside `run.accumulate()`.
            scheduler: an object with state_dict and load_state_dict; the script steps it.
            outer: for `period: H`: makes the optimizer that steps at a period's end, by the averaged change. DiLoCo's:
                `lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)`. None: values are averaged.

        Returns:
            model; or (model, optimizer); or (model, optimizer, scheduler).

        Raises:
            UsageError: the objects cannot be trained like this; the script's fault, the message has the remedy.
        """
        if self._synchronizer is not None:
            raise UsageError("run.prepare was called twice", "put all modules into one, with one optimizer")
        check_given(model, optimizer, scheduler)
        parts = TrainingParts(model, optimizer, scheduler)
        rows = self._open_rows(model)  # before any rank trains
        layout = describe(model, optimizer, apart=outer is not None)
        decision = self._session.prepare(layout, tuple(parts.buffers()), outer is not None, parts.on_gpus)
        if decision.resume is not None and decision.resume.checkpoint and self._resumed is None:
            self._resume_from(decision.resume)
        rows.check(decision.period, outer=outer is not None)
        synchronizer = build_synchronizer(parts, decision, self._tools(outer))
        replaces = self._progress.replace_lost_worker(decision.resume, parts, synchronizer)
        rows.join(synchronizer, self.step)
        join_layers(model, decision, self._collectives, self._weight)
        swap_class(model, synchronizer, step_hooks(model, self._progress.on_forward))
        if optimizer is not None:
            replace_step(optimizer, self._step)
        else:
            self._step_by_backward(parts)
        self._start(synchronizer, decision, replaces=replaces)
        self._progress.begin(parts, synchronizer, decision.sums)
        count = 3 if scheduler is not None else 2 if optimizer is not None else 1
        return (model, optimizer, scheduler)[:count] if count > 1 else model

    def track(self, **things: object) -> None:
        """Save objects with every checkpoint: `run.track(ema=ema, best=best)`.

        Each has `state_dict()` and `load_state_dict(state)`; the state may be tensors, numbers, text, None, and lists,
        tuples and dicts of them. Rank 0's is saved. When the job resumes from a checkpoint, each gets its saved state
        here (or in `prepare`, if that comes later), on every rank.

        Raises:
            UsageError: a name is taken, or a state holds something else; the script's fault.
        """
        for key, thing in things.items():
            self._tracked.add(key, thing)

    def hook_ddp(self, model: DistributedDataParallel, follows: int | None = None) -> None:
        """Sum the gradients of a DistributedDataParallel by the job's strategy; see `psctl.accelerate_ddp`.

        Args:
            model: over all workers.
            follows: the loop is a library's, which counts steps and continues after this one; None: backwards count.
        """
        if self._synchronizer is not None:
            raise UsageError(
                "psctl.accelerate_ddp after run.prepare, or a second time",
                "use one of them: run.prepare for a model of your own loop, accelerate_ddp for DistributedDataParallel",
            )
        ranks = torch.distributed.get_world_size(model.process_group)
        if ranks != self._welcome.world:
            raise UsageError(
                f"psctl.accelerate_ddp: the model is replicated over {ranks} ranks of {self._welcome.world}",
                "only a DistributedDataParallel over all workers of the job can be accelerated",
            )
        if ModelRows(model.named_modules(), self._weight):
            raise UsageError(
                "psctl.accelerate_ddp of a model with an embedding of psctl.nn, whose rows step with psctl's steps",
                "train the plain model with run.prepare(model, optimizer)",
            )
        parts = TrainingParts(model.module, None, None)
        layout = describe(model.module, None)
        decision = self._session.prepare(
            layout, tuple(parts.buffers()), on_gpus=parts.on_gpus, hooked=True, follows=follows
        )
        on_step = self._progress.count_step if follows is None else _count_nothing
        synchronizer = build_ddp_hook(parts.trainable(), decision, self._tools(None), on_step)
        if decision.joint_batch_norm:  # else torch's SyncBatchNorm has its own group
            join_layers(model.module, decision, self._collectives, self._weight)
        # torch compares a hook's annotations with its own types, and does not take them as text
        model.register_comm_hook(None, lambda _, bucket: synchronizer.sum_bucket(bucket))
        self._start(synchronizer, decision)

    def follow(self, step: int, model: DistributedDataParallel | None = None) -> FollowedLoop:
        """Follow the loop of a library, which trains, saves and resumes by itself; psctl.callbacks do this.

        Args:
            step: the steps that were finished before.
            model: has its gradients summed by the job's strategy, as by `psctl.accelerate_ddp`; None: the library's.

        Raises:
            UsageError: run.prepare, psctl.accelerate_ddp or this was called before; the script's fault.
        """
        if self._synchronizer is not None:
            raise UsageError(
                "the run follows a loop, or has a model, already",
                "give the callback to one Trainer, and call neither run.prepare nor psctl.accelerate_ddp beside it",
            )
        self._progress.follow(step)
        if model is not None:
            self.hook_ddp(model, follows=step)
        else:
            decision = self._session.prepare(Layout((), "", ()), (), follows=step)
            self._start(Synchronizer(decision.strategy, []), decision)
        return FollowedLoop(self._progress)

    # ---- data ----

    def loader(
        self,
        dataset: Dataset[Example],
        batch_size: int,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Example]], Minibatch] | None = None,
        per_worker: bool = False,
        keys: Callable[[Minibatch], object] | None = None,
    ) -> Loader | StreamLoader:
        """Return an iterable of this rank's batches: every example once an epoch over all ranks.

        Which examples a step takes depends on the job's seed, the epoch and the step alone; ranks share them evenly in
        rank order, and their gradients are weighted by examples. So N workers train as one does, and a job that resumes
        from a checkpoint continues with the next batch, whatever its number of workers. Random transforms of the
        dataset are seeded for each batch, also with `num_workers`.

        It is for the batches that steps are made of. Validate with a plain torch DataLoader.

        Args:
            dataset: has `__len__` and `__getitem__`; or a stream, see `run.stream`.
            batch_size: examples that one step consumes over *all* ranks. (torchrun's scripts give what one rank
                consumes: that is `per_worker=True`, and the run then depends on the number of workers.)
            shuffle: take the examples in another order each epoch.
            num_workers: loader processes of this rank; 0: fetch in the training process.
            collate_fn: makes a batch of a list of examples; default: torch's.
            per_worker: `batch_size` is for each rank.
            keys: returns the keys of a batch that the model's SparseEmbeddings will be called with: a tensor, for all
                of them, or a dict of embeddings and tensors. The rows of the next batch are then requested while this
                one is computed; the results are the same.

        Raises:
            UsageError: the dataset is an IterableDataset other than `run.stream`'s, or a rank would have no example;
                the script's fault.
        """
        if isinstance(dataset, ShardStream):
            if keys is not None:
                raise UsageError("run.loader(keys=) of a stream: its next batch is not known", "leave keys= out")
            return StreamLoader(
                self._progress, self._progress.new_loader(), dataset, batch_size, self._session.shards,
                shuffle=shuffle, num_workers=num_workers, collate_fn=collate_fn, per_worker=per_worker,
            )  # fmt: skip
        return Loader(
            self._progress, self._progress.new_loader(), dataset, batch_size,
            shuffle=shuffle, num_workers=num_workers, collate_fn=collate_fn, per_worker=per_worker,
            on_next=None if keys is None else lambda batch: self._rows.prefetch(keys(batch)),
        )  # fmt: skip

    def stream(
        self, shards: Iterable[Shard], open_shard: Callable[[Shard], Iterable[Example]], *, length: int | None = None
    ) -> ShardStream:
        """Return a stream, for `run.loader`: an IterableDataset whose shards are given out to the workers as tasks.

            paths = sorted(glob("data/*.jsonl"))
            loader = run.loader(run.stream(paths, open), batch_size=64, collate_fn=parse_lines)

        Each shard is read once an epoch, by one worker; a lost worker's are given to others from where its last step
        that counts stopped. A resumed job reads no finished shard again, and skips the used examples of others.
        Random numbers that `open_shard` draws are seeded for each example.

        Args:
            shards: what `open_shard` is called with: paths, URLs, numbers; the same in the same order on every rank.
            open_shard: returns the examples of a shard, in the same order whenever it is called.
            length: examples an epoch, for the time that is left; None: known after the first epoch.
        """
        return ShardStream(shards, open_shard, length)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs to train, 0 .. count-1; from where the job resumed after a resume.

        A job that resumes from its last step yields none, and the script's tail runs with the restored model. With a
        DataLoader of your own, a resumed job repeats the epoch that it was in.
        """
        return self._progress.epochs(count)

    # ---- within a step ----

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients without sending them: `with run.accumulate(): loss.backward()`.

        Run all backwards of a step but the last in this context; the last one, outside of it, sends their sum. The
        script divides the losses, as without psctl.
        """
        with ExitStack() as both:
            both.enter_context(self._prepared("run.accumulate").accumulate())
            if self._step_hooks is not None:
                both.enter_context(self._step_hooks.paused())
            yield

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale the averaged gradient down to a 2-norm of at most `max_norm`; return its norm before scaling.

        The norm is over all trainable parameters and all ranks: the same on every rank. Every rank must call it, after
        the last backward of a step and before `optimizer.step()`. Under servers, and with a sharded optimizer, the
        scaling happens where it steps; `.grad` keeps this rank's own gradient. With `period:` above 1 a rank steps
        alone, and clips its own gradient by its own norm.

        Args:
            max_norm: the largest 2-norm, in the gradient's unit; more than 0.
        """
        synchronizer = self._prepared("run.clip_grad_norm")
        if self._rows:
            raise UsageError(
                "run.clip_grad_norm with an embedding of psctl.nn: no rank has the joint gradient of its rows",
                "leave it out, or clip what the embedding gives: rows.register_hook(lambda g: g.clamp(-1, 1))",
            )
        return synchronizer.clip_grad_norm(float(max_norm))

    def wait(self) -> None:
        """Block until every parameter has its value after all steps so far, also where workers may differ.

        Needed only where parameters are read without calling the model, its `state_dict()` or its `parameters()`:
        after `optimizer.step()`, through a tensor that you hold (`weight = model.fc.weight`).
        """
        self._prepared("run.wait").wait_exact()

    def report(self, *, total: int | None = None, **numbers: object) -> None:
        """Report numbers of this step: `run.report(loss=loss, accuracy=0.93)`.

        They become the job's metrics: for each step and name, the mean over the ranks that reported it, weighted by
        their examples. Between a backward and its `optimizer.step()` they belong to the step in progress; after it, and
        outside of the loop (an evaluation at the end), to the last step. Cheap: values on a GPU are read later.

        Args:
            total: the number of steps of the whole training, for the time that is left. Only needed where the script
                does not use both `run.epochs` and `run.loader`.
            numbers: numbers, or tensors of one element.

        Raises:
            UsageError: a value is no number, or `total` no number of steps; the script's fault.
            SystemExit: a stop was requested and the checkpoint is saved; only where the loop does not use `run.loader`.
        """
        if total is not None:
            if isinstance(total, bool) or not isinstance(total, int) or not 0 < total <= 1 << 48:
                raise UsageError(
                    f"run.report(total={total!r:.40}): expected the number of steps of the whole training, 1 or more",
                    "report a metric of that name as another one: total_loss=",
                )
            self._progress.given_total = total
        step = self.step + 1 if self._progress.in_step else self.step
        self._reports.add(
            step, self.epoch, float(self._weight.own_examples if self._weight.all_examples else 1), numbers
        )
        self._progress.on_report()

    def store(
        self,
        name: str = "default",
        consistency: str | Mapping[str, int] = "asp",
        reads: str = "lazy",
        group: Iterable[int] | None = None,
    ) -> Store:
        """Return a (key, value) store that all workers share, on the job's servers or alone; see `Store`.

        Args:
            name: the name of the store; consistency: "asp", "bsp" or {"ssp": s}: when other workers see a push.
            reads: "lazy", or "eager" (bsp, ssp): servers send what was read before when it changes.
            group: ranks that push and whose clocks count; others only pull. None: all.

        Raises UsageError: an option is invalid or differs from an earlier call, or torchrun, without servers, is used.
        """
        if not self._opens_stores:
            self._opens_stores = True
            self._session.send(ScriptOpensStore())
        return self._stores.open(name, consistency, reads, group)

    # ---- the end ----

    def finish(self, failed: str = "") -> None:
        """End the run: save the last checkpoint, send the last report, leave the job. Called when the script ends.

        Args:
            failed: why the script did not reach its end; nothing is saved then.
        """
        if self._over:
            return
        self._over = True
        if not failed:
            if self._synchronizer is not None:
                self._synchronizer.finish()
            self._progress.finish()
        self._collectives.close(failed=bool(failed))
        self._stores.close(failed=bool(failed))
        if self._heartbeat is not None:
            self._heartbeat.end()
        if not failed:
            self._send_report()
            self._progress.wait_for_checkpoint()
            self._session.report_finished(self.step)
        if self._lines is not None and not failed and self._synchronizer is not None:
            self._lines.end(self.step, self._reports.line())
        if self._trace is not None:
            self._trace.flush()
        if self._synchronizer is not None:
            self._synchronizer.close(failed or "done", failed=bool(failed))
        self._session.close(failed or "done")

    def step_reached(self) -> int | None:
        """Return the last step that was finished, as `run.step` and progress count; None before `prepare`."""
        return self.step if self._synchronizer is not None else None

    # ---- internals ----

    def _open_rows(self, model: nn.Module) -> ModelRows:
        self._rows = ModelRows(model.named_modules(), self._weight)
        self._rows.open(self._stores, self._welcome.seed)
        return self._rows

    def _tools(self, outer: OptimizerFactory | None) -> Tools:
        return Tools(
            self._session, self._welcome.world, self._connect, self._weight, self._clock, self._trace, outer,
            self._spans,
        )  # fmt: skip

    def _start(self, synchronizer: Synchronizer, decision: Decision, *, replaces: bool = False) -> None:
        """Begin to train by a synchronizer, together with all ranks; `replaces`: in place of a lost worker."""
        self._strategy, self._synchronizer = decision.strategy, synchronizer
        self._session.begin(self.step)
        if replaces:  # the lost worker may not have ended a clock, nor marked a checkpoint, at which the others wait
            self._stores.end_clocks(self._progress.taken_clocks)
            self._stores.mark(self._progress.last_checkpoint())
        self._interval = ReportInterval(synchronizer, self._clock)

    def _prepared(self, what: str) -> Synchronizer:
        if self._synchronizer is None:
            raise UsageError(f"{what} before run.prepare", "call run.prepare(model, optimizer) first")
        return self._synchronizer

    def _step(self, original: Callable[[], object]) -> object:
        synchronizer = self._prepared("optimizer.step()")
        result = self._progress.end_step(lambda save: self._step_all(synchronizer, original, save))
        self._rows.end_step(self.step, saves=self._progress.is_saved)  # a returned clock is sure to count
        self._profiler.after_step()
        if self._lines is not None:
            self._lines.step(self.step, self.epoch, self._weight.own_examples, self._reports.line)
        return result

    def _step_all(self, synchronizer: Synchronizer, original: Callable[[], object], save: bool) -> object:
        self._rows.send()  # of a backward that computed no dense gradient
        return synchronizer.step(original, save)

    def _step_by_backward(self, parts: TrainingParts) -> None:
        trainable = parts.trainable()
        self._step_hooks = GradientHooks(
            list(trainable), list(trainable.values()), [],
            on_backward_end=self._on_backward_end, per_backward=True,
        )  # fmt: skip

    def _on_backward_end(self) -> None:
        assert self._step_hooks is not None, "its hooks call this"
        if self._step_hooks.outstanding:
            self._step_hooks.outstanding = False
            self._step(lambda: None)

    def _resume_from(self, resume: Resume) -> None:
        self._resumed = resume.checkpoint
        self._progress.resume(resume)
        names = [each.name for each in resume.tensors if each.name.startswith("track/")]
        self._tracked.resume(resume.state.get("tracked") or {}, load_saved(resume, names, self._session.load))

    def _beat(self) -> None:
        activity = self._synchronizer.activity if self._synchronizer is not None else "start"
        doing = self._collectives.activity or self._stores.doing or self._session.shards.activity or activity
        self._session.send(Heartbeat(self.step, doing, self._progress.shares_examples))

    def _on_save(self, step: int) -> None:
        """The checkpoint of a step is taken: send this rank's reports of the step before its part."""
        self._stores.mark(step)
        self._send_report()

    def _send_report(self) -> None:
        """Send the numbers since the last report."""
        if self._interval is not None and self._session.is_in_job:
            self._interval.send_report(self._session.send, self._progress, self._reports)


def _count_nothing() -> None:
    """Count no step: the library's loop does."""
