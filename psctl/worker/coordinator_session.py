"""A worker's session with its job's coordinator: requests, answers, and all waits for answers.

The network thread receives messages, and answers at once those that must not wait for the main thread (ProposeCut,
NextClockWanted). The main thread waits here for answers, each wait on one condition. A lost coordinator ends the
process, because nothing else would end it. The coordinator owns the deadlines of the waits for other workers
(timeouts.start, timeouts.stall).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch

from psctl.collectives.data_plane import DataPlane
from psctl.errors import ConnectionFailed, JobFailed, PsctlError, UsageError
from psctl.job.checkpoint_messages import (
    CheckpointSaved,
    CutAt,
    CutPosition,
    LoadEnd,
    LoadPart,
    LoadWanted,
    ProposeCut,
    SaveBegin,
    SaveEnd,
    SavePart,
)
from psctl.job.membership_messages import ExamplesShared, NextClock, NextClockWanted, Reassign, StepUnfit
from psctl.job.message import JobMessage
from psctl.job.stream_messages import CoordinatorStreamMessage
from psctl.job.table_server_messages import TablesAt, TablesWanted
from psctl.job.training_messages import (
    BackwardStepsChosen,
    BucketSizeChosen,
    CollectiveChoice,
    ConnectAgain,
    Decision,
    Go,
    Join,
    Leave,
    ListenForRanks,
    MemberReady,
    NotReplaceable,
    Prepare,
    RanksAt,
    ScriptFinished,
    StartBegin,
    StartEnd,
    StartPart,
    Welcome,
    WorkersAt,
)
from psctl.process import bootstrap
from psctl.process.coordinator_connection import MemberConnection
from psctl.ps.pieces import bytes_view
from psctl.ps.received_slices import ReceivedSlices
from psctl.ps.snapshot import CopiedSlice
from psctl.schedule.schedule import Schedule
from psctl.train_state.common_step import StepActions, StepAgreement
from psctl.train_state.example_sharing import ExampleShare
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Layout, Member, State, TensorSlice
from psctl.worker.plane_connections import Connect, PlaneConnections
from psctl.worker.rank_connections import RankConnections
from psctl.worker.shard_requests import ShardRequests

PART = 512 * 1024
"""Bytes of one part of a tensor that travels to or from the coordinator."""

T = TypeVar("T")

Membership = Reassign | ExamplesShared | WorkersAt
"""Changes while a job trains: of the shards' servers, of the members, of the workers that listen on this host."""

_steps: list[Callable[[], int | None]] = []
"""The function that returns the step of the process's run; psctl.init sets it, the bootstrap calls it on a failure."""


def step_reached() -> int | None:
    """Return the last step that this process's run finished; None before `prepare` or without a run."""
    return _steps[0]() if _steps else None


def set_step_reached(step: Callable[[], int | None]) -> None:
    """Set the function that `step_reached` calls."""
    _steps[:] = [step]


def leave_process(why: PsctlError) -> NoReturn:
    """End this process at once, from any thread, when its job is over; report a lost connection to the agent."""
    print(f"psctl: this worker ends: {why.message}", file=sys.stderr, flush=True)
    if isinstance(why, ConnectionFailed):
        bootstrap.write_failure(why, None, os.getcwd())
    os._exit(1)


class CoordinatorSession:
    """One worker's session; the handler of its connection to the coordinator.

    Args:
        me: this worker, as its certificate names it.
        leave: ends the process, with the reason; called from the network thread.
        connect: connects to the workers of a schedule, given their hosts and how to learn their addresses.
        connect_ranks: the same, for the collectives of the script.
    """

    is_in_job = True
    """Whether a job saves checkpoints and collects reports."""

    def __init__(
        self, me: Member, leave: Callable[[PsctlError], object] = leave_process, connect: Connect | None = None,
        connect_ranks: Connect | None = None,
    ) -> None:  # fmt: skip
        self.me = me
        self._leave = leave
        self._changed = threading.Condition()
        self._connection: MemberConnection | None = None
        self._closing = False
        self._welcome: Welcome | None = None
        self._decision: Decision | None = None
        self._go = False
        self._agreement: StepAgreement | None = None
        self._early: list[ProposeCut] = []
        self._saved: dict[int, str] = {}
        self._lost: ConnectionFailed | None = None
        self._loading = ReceivedSlices()
        self._ticket = 0
        self._loaded: dict[int, str] = {}
        self._listener: Callable[[Membership], None] | None = None
        self._early_changes: list[Membership] = []
        self._starting = ReceivedSlices()
        self._started = False
        self._tables: TablesAt | None = None
        self._tables_moved: Callable[[TablesAt], None] | None = None
        self._planes = PlaneConnections(connect, self.send, self._wait) if connect is not None else None
        self._ranks = (
            RankConnections(connect_ranks, self.send, self._wait, self._notify) if connect_ranks is not None else None
        )
        self.shards = ShardRequests(self.send, self._wait)
        """Gives the shards of streams to this worker."""
        self.example_share: ExampleShare | None = None
        """The ranks that share the examples of each clock; None before the decision."""

    # ---- the handler: network thread ----

    def on_connected(self, peer: PeerConnection) -> None:
        """Do nothing: `use_connection` comes first."""

    def receive_buffer_for(self, peer: PeerConnection, message: JobMessage, size: int) -> memoryview | None:
        """Return the buffer for a part of a tensor: the tensor's own memory."""
        if isinstance(message, LoadPart | StartPart):
            where = self._loading if isinstance(message, LoadPart) else self._starting
            return where.part(message.index, message.offset, size)
        return None

    def on_message(self, peer: PeerConnection, message: JobMessage, payload: memoryview | None) -> None:
        """Handle one message."""
        if isinstance(message, WorkersAt | ConnectAgain) and self._planes is not None:
            self._planes.on_message(message)
            with self._changed:
                self._changed.notify_all()
        if isinstance(message, ListenForRanks | RanksAt):
            assert self._ranks is not None, "it was given a way to connect"
            self._ranks.on_message(message)
            self._notify()
            return
        if isinstance(message, CoordinatorStreamMessage):
            with self._changed:
                self.shards.on_message(message)
                self._changed.notify_all()
            return
        if isinstance(message, Membership):
            with self._changed:
                if isinstance(message, ExamplesShared) and self.example_share is not None:
                    self.example_share.add_change(message)
                listener = self._listener
                if listener is None:
                    self._early_changes.append(message)
            if listener is not None:
                listener(message)
            return
        with self._changed:
            match message:
                case Welcome():
                    self._welcome = message
                case Decision():
                    self._decision, self.example_share = message, self._make_example_share(message)
                case NextClockWanted() if self.example_share is not None:
                    self.send(NextClock(message.ticket, self.example_share.next_clock(message.ticket)))
                case Go():
                    self._go = True
                case ProposeCut():
                    self._answer(message)
                case CutAt():
                    assert self._agreement is not None, "a cut before any step"
                    self._agreement.add_cut(message.ticket, message.step, StepActions(message.save, message.stop))
                case CheckpointSaved():
                    self._saved[message.step] = message.problem
                case LoadEnd():
                    self._loaded[message.ticket] = message.problem
                case StartBegin():
                    self._starting = ReceivedSlices(message.slices)
                case StartEnd():
                    self._started = True
                case TablesAt():
                    self._tables = message
                    if self._tables_moved is not None:
                        self._tables_moved(message)
                case Leave():
                    self._closing = True
                    self._leave(JobFailed(message.reason))
                case _:
                    pass  # parts of tensors: received in place
            self._changed.notify_all()

    def on_connection_lost(self, peer: PeerConnection, error: ConnectionFailed) -> None:
        """Handle the loss of the coordinator's connection."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()
            if self._closing:
                return
        self._leave(ConnectionFailed(f"the connection to the coordinator is lost: {error.message}"))

    def _make_example_share(self, decision: Decision) -> ExampleShare:
        assert self._welcome is not None, "the coordinator sends it before any decision"
        first = decision.resume.step if decision.resume is not None else 0
        return ExampleShare(self._welcome.world, first, elastic=decision.elastic, staleness=decision.staleness or 0)

    def _answer(self, propose: ProposeCut) -> None:
        if self._agreement is None:
            self._early.append(propose)
            return
        self.send(CutPosition(propose.ticket, self._agreement.position(propose.ticket)))

    # ---- the worker: main thread ----

    def use_connection(self, connection: MemberConnection) -> None:
        """Send on this connection from now on."""
        with self._changed:
            self._connection = connection

    def send(self, message: JobMessage, payload: memoryview | None = None) -> None:
        """Queue one message without waiting for the network; dropped after the coordinator is lost."""
        if self._connection is not None and self._lost is None:
            try:
                self._connection.send(message, payload)
            except ConnectionFailed:
                if not self._closing:
                    raise

    def join(self) -> Welcome:
        """Join the job; returns the coordinator's answer."""
        self.send(Join(os.getpid()))
        return self._wait(lambda: self._welcome)

    def prepare(
        self, layout: Layout, buffers: tuple[str, ...], outer: bool = False, on_gpus: bool = False,
        hooked: bool = False, follows: int | None = None,
    ) -> Decision:  # fmt: skip
        """Send the model's layout; returns the decision, made when every worker has sent the same layout."""
        self.send(Prepare(layout, buffers, outer, on_gpus, hooked, follows))
        return self._wait(lambda: self._decision)

    def tables(self) -> TablesAt:
        """Return the servers that hold tables; they are started where there are none.

        Raises:
            UsageError: there can be none; the message has the reason.
        """
        with self._changed:
            self._tables = None
        self.send(TablesWanted())
        found = self._wait(lambda: self._tables)
        if found.problem:
            raise UsageError(found.problem, found.hint)
        return found

    def follow_tables(self, moved: Callable[[TablesAt], None]) -> None:
        """Call `moved` at every change of the servers that hold tables; it must not block."""
        with self._changed:
            self._tables_moved = moved
            if self._tables is not None:
                moved(self._tables)

    @property
    def has_plane(self) -> bool:
        """Whether workers can connect to each other without the engine."""
        return self._planes is not None and self._welcome is not None and bool(self._welcome.hosts)

    def connect_plane(self, schedule: Schedule) -> DataPlane:
        """Connect to the workers of a schedule.

        Args:
            schedule: what is to be played.

        Raises:
            ConnectionFailed: a worker cannot be reached.
        """
        assert self._planes is not None, "`has_plane` is true"
        assert self._welcome is not None, "`has_plane` is true"
        return self._planes.connect(schedule, self._welcome.hosts)

    def connect_plane_again(self, schedule: Schedule, former: DataPlane | None, why: str) -> DataPlane:
        """Connect to the workers of a schedule anew, when the coordinator has all of them do so.

        Args:
            schedule: what is played.
            former: the data plane that has ended for the reason `why`; None: this worker replaces a lost one.
            why: for people.
        """
        assert self._planes is not None, "there was a plane"
        return self._planes.connect_again(schedule, former, why)

    def end_sums(self) -> None:
        """Note that this worker makes no sums any more."""
        if self._planes is not None:
            self._planes.end()

    def connect_ranks(self) -> tuple[DataPlane, list[CollectiveChoice]]:
        """Connect to all workers for the collectives of the script; return the data plane and the plan for these."""
        assert self._ranks is not None, "it was given a way to connect"
        return self._ranks.connected()

    def begin(self, step: int) -> None:
        """Report that this worker has its start values; wait until all have. `step` steps were done before."""
        with self._changed:
            self._agreement = StepAgreement(step, period=self._decision.period if self._decision is not None else 1)
            early, self._early = self._early, []
            for propose in early:
                self._answer(propose)
        self.send(MemberReady())
        self._wait(lambda: self._go or None)

    def listen(self, listener: Callable[[Membership], None]) -> None:
        """Call `listener` with every change of membership: earlier ones now, later ones on another thread."""
        while True:
            with self._changed:
                early, self._early_changes = self._early_changes, []
                if not early:
                    self._listener = listener
                    return
            for message in early:
                listener(message)

    def begin_step_end(self, step: int) -> StepActions:
        """Return the actions due after `step`; called just before it ends."""
        assert self._agreement is not None, "begin() comes first"
        return self._agreement.begin_step_end(step)

    @property
    def saved_before(self) -> int:
        """The newest common step that was saved before this worker, a replacement, began; 0: none that is known."""
        return self._agreement.saved_before if self._agreement is not None else 0

    def finish_step_end(self, step: int) -> None:
        """Note the end of a step."""
        assert self._agreement is not None, "begin() comes first"
        self._agreement.finish_step_end(step)

    def load(self, slices: Sequence[TensorSlice]) -> list[torch.Tensor]:
        """Return these whole tensors of the checkpoint that the job resumes from.

        Raises:
            JobFailed: the head host could not read them.
        """
        return self.load_slices(slices).whole_tensors()

    def load_slices(self, slices: Sequence[TensorSlice]) -> ReceivedSlices:
        """Return these slices of the checkpoint that the job resumes from.

        Raises:
            JobFailed: the head host could not read them.
        """
        with self._changed:
            self._ticket += 1
            ticket = self._ticket
            self._loading = ReceivedSlices(slices)
        if slices:
            self.send(LoadWanted(ticket, list(slices)))
            problem = self._wait(lambda: self._loaded.get(ticket))
            if problem:
                raise JobFailed(
                    f"the checkpoint could not be read: {problem}",
                    "run psctl checkpoint verify to find the damaged part",
                )
        loaded, self._loading = self._loading, ReceivedSlices()
        return loaded

    def send_start_values(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send start values to all other workers (rank 0)."""
        copies = [tensor.detach().to("cpu", copy=True).reshape(-1).contiguous() for tensor in tensors.values()]
        self.send(StartBegin([whole_slice(name, tensor) for name, tensor in tensors.items()]))
        for index, copy in enumerate(copies):
            for offset, part in parts_of(bytes_view(copy)):
                self.send(StartPart(index, offset), part)
        self.send(StartEnd())

    def receive_start_values(self) -> dict[str, torch.Tensor]:
        """Return rank 0's start values by name (other ranks)."""
        self._wait(lambda: self._started or None)
        values, self._starting = self._starting, ReceivedSlices()
        return values.by_name()

    def send_checkpoint(
        self, step: int, state: State | None, copied: Sequence[CopiedSlice], pause: Callable[[], float]
    ) -> None:
        """Send this worker's part of a checkpoint.

        Args:
            step: the step that it belongs to.
            state: what is not a tensor, as JSON values; None: another rank sends it.
            copied: slices of tensors, whose bytes do not change any more.
            pause: returns the seconds for which training has stopped so far.
        """
        self.send(SaveBegin(step, [one.slice for one in copied], state))
        for index, one in enumerate(copied):
            for offset, part in parts_of(one.data):
                self.send(SavePart(step, index, offset), part)
        self.send(SaveEnd(step, pause=pause()))

    def wait_saved(self, step: int, timeout: float) -> str | None:
        """Wait until the checkpoint of `step` is complete; return its problem ("": none), None after `timeout` s."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._saved or self._lost is not None, timeout)
            return self._saved.get(step)

    def report_unfit(self, step: int, reason: str) -> NoReturn:
        """Report that servers cannot take the step after `step`, and wait: the job ends this process."""
        self.send(StepUnfit(step, reason))
        self._wait(lambda: None)
        raise AssertionError("the wait ends with the process, or with the coordinator's loss")

    def report_not_replaceable(self, reason: str) -> NoReturn:
        """Report that no worker has the state for a lost one's replacement, and wait: the job ends this process."""
        self.send(NotReplaceable(reason))
        self._wait(lambda: None)
        raise AssertionError("the wait ends with the process, or with the coordinator's loss")

    def report_bucket_size(self, size: int, measured: Sequence[tuple[int, float]]) -> None:
        """Report the size of buckets that was chosen, and the sizes that were tried with their seconds."""
        self.send(BucketSizeChosen(size, tuple(measured)))

    def report_backward_steps(self, buckets: int, every: int, measured: Sequence[tuple[int, float]]) -> None:
        """Report how many buckets, of all, are stepped in backward, and the numbers that were tried."""
        self.send(BackwardStepsChosen(buckets, every, tuple(measured)))

    def report_finished(self, step: int) -> None:
        """Report to the coordinator that the script has reached its end."""
        self.send(ScriptFinished(step))

    def close(self, reason: str) -> None:
        """Close the connection; messages sent before still arrive."""
        with self._changed:
            self._closing = True
            connection = self._connection
        if connection is not None and self._lost is None:
            try:
                connection.deliver(10.0)
            except PsctlError as error:
                print(f"psctl: while the connection to the coordinator was closed: {error}", file=sys.stderr)
            connection.close(reason)
            connection.join(10.0)  # a thread inside torch when the interpreter ends would abort the process

    def _notify(self) -> None:
        """Wake the threads that wait."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, look: Callable[[], T | None]) -> T:
        """Wait until `look` returns something; the coordinator owns the deadline and its loss ends the wait."""
        with self._changed:
            while (found := look()) is None:
                if self._lost is not None:
                    raise self._lost
                self._changed.wait(1.0)
            return found


def whole_slice(name: str, tensor: torch.Tensor) -> TensorSlice:
    """Return the slice that is all of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSlice(name, dtype, tuple(tensor.shape), 0, tensor.numel())


def whole_copy(name: str, tensor: torch.Tensor) -> CopiedSlice:
    """Return all of a tensor, copied, as a slice of a checkpoint."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return CopiedSlice(whole_slice(name, copy), bytes_view(copy.reshape(-1)))


def parts_of(data: memoryview) -> list[tuple[int, memoryview]]:
    """Return bytes in parts, each with its offset."""
    return [(offset, data[offset : offset + PART]) for offset in range(0, len(data), PART)]
