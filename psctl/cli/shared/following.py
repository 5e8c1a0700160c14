"""Follows a job from its first event to its last, and acts on Ctrl-C: `train` and `attach`."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections import deque
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from psctl import errors
from psctl.cli.shared import outputs
from psctl.cli.shared.context import Context, head_of, print_json
from psctl.cli.shared.interrupts import Action, Input, InterruptPolicy
from psctl.cli.shared.signals import Terminated
from psctl.clock import SystemClock
from psctl.job.events import (
    PROMISED,
    AnyEvent,
    CheckpointWritten,
    Finished,
    Log,
    Planned,
    Progress,
    Restored,
    Started,
    StateChanged,
)
from psctl.launch import leader_search
from psctl.launch.clusters import choose_cluster, reference
from psctl.launch.home import JobRecord, ReportedRank
from psctl.launch.jobs import job_end
from psctl.launch.jobs.event_stream import EventReader
from psctl.launch.jobs.host_messages import resumed_by
from psctl.remote import slurm
from psctl.remote.shell import Shell
from psctl.spec.noted_options import load_noted, split_notes
from psctl.types import HostName
from psctl.view.console import say
from psctl.view.failure import UncountedSteps, draw_end
from psctl.view.job_view import last_printed
from psctl.view.live_screen import make_screen
from psctl.view.run_summary import RunSummary

if TYPE_CHECKING:
    from psctl.remote.fleet import Fleet

TERMINATED = 143
"""Exit code of a job that a SIGTERM to its processes has stopped."""

HINT = "Ctrl-C detaches; the job continues"


class SignalQueue:
    """Queues SIGINT and SIGTERM while a job is followed; before that they raise, as in any command."""

    def __init__(self) -> None:
        self.queue: deque[Input] = deque()
        self.following = False

    def __enter__(self) -> SignalQueue:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.following:
            self.queue.append("interrupt" if number == signal.SIGINT else "terminate")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Terminated


class EventOutput:
    """Shows events: on a live screen or as plain lines for people, as JSON lines for programs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._jsonl = context.options.output == "jsonl"
        silent = context.options.machine or context.options.quiet
        self.screen = None if silent else make_screen(context.err, HINT)
        self.checkpoint: CheckpointWritten | None = None
        self.plan: Planned | None = None
        self.printed: Log | None = None  # the last line of worker/0, or of the first rank that printed
        self.ranks: dict[str, ReportedRank] = {}
        self.began: float | None = None  # by the head's clock
        self.base = 0  # finished steps of the job before this run
        self.step = 0  # finished steps until now
        self.compute: float | None = None  # seconds of a step, as last reported
        self.summary = RunSummary()

    def on_event(self, event: AnyEvent) -> None:
        """Show an event, and keep what the end of the job is described by."""
        self.summary.apply(event)
        match event:
            case CheckpointWritten():
                self.checkpoint = event
            case Planned():
                self.plan = event
            case Log():
                self.printed = last_printed(self.printed, event)
            case Started():
                self.began = event.time
            case Restored():
                self.base = self.base if self.step else event.step  # a restart of this job begins no new run
                self.step = event.step
            case Progress():
                self.step, self.compute = event.step, event.compute_seconds or self.compute
        if isinstance(event, StateChanged) and event.role != "job":
            self.ranks[f"{event.role}/{event.rank}"] = msgspec.convert(event, ReportedRank, from_attributes=True)
        if self._jsonl and isinstance(event, PROMISED):
            print_json(msgspec.to_builtins(event))
        if self.screen is not None:
            self.screen.on_event(event)

    def show_hint(self, text: str) -> None:
        """Show what Ctrl-C does next, or the state of the connection."""
        if self.screen is not None:
            self.screen.set_hint(text)
        elif not self._context.options.quiet:
            say(self._context.err, text)

    def __enter__(self) -> EventOutput:
        if self.screen is not None:
            self.screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.screen is not None:
            self.screen.__exit__(None, None, None)


class JobFollower:
    """Follows one job to its end, or until the user detaches.

    Args:
        context: the call.
        record: the job.
        signals: Ctrl-C and SIGTERM.
        on_interrupt: --on-interrupt.
        fleet: open connections, to the head at least; None when there are none.
        runs: whether the job still runs, as far as is known.
    """

    def __init__(
        self,
        context: Context,
        record: JobRecord,
        signals: SignalQueue,
        on_interrupt: str | None,
        fleet: Fleet | None,
        runs: bool,
    ) -> None:
        self.context = context
        self.record = record
        self._signals = signals
        self._fleet = fleet
        self._runs = runs
        self._clock = SystemClock()
        self._outputs: outputs.JobOutputs | None = None
        self.terminated = False  # it was stopped by a SIGTERM to its processes, which this psctl did not send
        self.saved = False  # it wrote a checkpoint
        self._unanswered: bool | None = None  # `save` of a stop request that the head has not received yet
        self._policy = InterruptPolicy(sys.stderr.isatty() and sys.stdin.isatty(), on_interrupt)

    def run(self) -> int:
        """Follow; return the exit code."""
        with self._make_output() as output:
            follower = EventReader(
                self.record, self._connect, self._clock, output.show_hint, self._recorded, self._head(),
                self._find_leader,
            )  # fmt: skip
            last: Finished | None = None
            self._signals.following = True
            try:
                for event in follower.events():
                    if isinstance(event, Finished):
                        last = event = self._with_outputs(self._with_own_exit(event), output)
                    if event is not None:
                        output.on_event(event)
                    if event is None and last is None and self._unanswered is not None:
                        self._request_stop(save=self._unanswered)
                    if last is None and (action := self._next_action()) is not None:
                        self._act(action, output)
                        if action in ("leave", "kill"):
                            break
            except (OSError, RuntimeError) as error:  # of this machine, which the job does not need
                if last is None and not isinstance(error, BrokenPipeError):
                    self._tell_that_it_continues(f"{self.record.job} is not followed any more, but continues")
                raise
            finally:
                self._signals.following = False
            if last is None and self._policy.state == "killed":
                last = self._killed(output)
                output.on_event(last)
        return self._finish(last, output)

    @property
    def interrupted(self) -> bool:
        """Whether the user ended or left the job."""
        return bool(self._policy.by)

    def _make_output(self) -> EventOutput:
        return EventOutput(self.context)

    # ---- signals -------------------------------------------------------------------------------------------------

    def _next_action(self) -> Action | None:
        received: Input = self._signals.queue.popleft() if self._signals.queue else "time"
        return self._policy.next_action(received, self._clock.now())

    def _act(self, action: Action, output: EventOutput) -> None:
        job = self.record.job
        match action:
            case "announce":
                output.show_hint(
                    f"detaching from {job}, which continues. Come back: psctl attach {job}. Stop it: psctl stop {job}, "
                    "or press Ctrl-C again within 3 s (checkpoint, then stop)"
                )
            case "save":
                output.show_hint(f"saving a checkpoint of {job}, then stopping it; Ctrl-C once more kills it")
                self._request_stop(save=True)
            case "stop":
                output.show_hint(f"stopping {job}; Ctrl-C once more kills it")
                self._request_stop(save=False)
            case "kill":
                output.show_hint(f"killing {job}")
                names = [host.name for host in self.record.hosts]
                with self.context.connect(self.context.cluster_of(self.record), names) as fleet:
                    job_end.kill(fleet, self.record)
            case "leave":
                pass  # the caller stops following

    def _request_stop(self, *, save: bool) -> None:
        """Ask the head to stop the job; if its agent does not listen yet, ask again at the next idle moment."""
        shell = self._head() or self._connect()
        answered = job_end.ask_to_stop(shell, self.record, save=save, by=self._policy.by)
        self._unanswered = None if answered else save

    # ---- connections ---------------------------------------------------------------------------------------------

    def _head(self) -> Shell | None:
        return self._fleet.shells.get(HostName(self.record.head.name)) if self._fleet else None

    def _connect(self) -> Shell:
        """Connect to the head again, in place of the old connection."""
        self._fleet = self.context.connect(self.context.cluster_of(self.record), [self.record.head.name])
        return head_of(self._fleet, self.record)

    def _recorded(self) -> JobRecord:
        return self.context.home.job(self.record.job)

    def _find_leader(self) -> JobRecord:
        """Ask the job's hosts which one leads."""
        self.record = leader_search.find(self.context.home, self.record, self.context.connect)
        return self.record

    # ---- the end -------------------------------------------------------------------------------------------------

    def _with_own_exit(self, event: Finished) -> Finished:
        """Return the end of the job as seen from here.

        A stop by this process exits with the signal's code, a stop by another one while this one follows with 1.
        """
        if event.failure:
            failure = resumed_by(event.failure, self.record, self._train_options())
            event = msgspec.structs.replace(event, failure=failure)
        self.terminated = event.exit == TERMINATED and not self._policy.by
        if event.status != "stopped" or not (self._policy.by or self._runs):
            return event
        return msgspec.structs.replace(event, exit=self._policy.exit if self._policy.by else 1)

    def _with_outputs(self, last: Finished, output: EventOutput) -> Finished:
        """Fetch the job's outputs; return its end, whose exit code says where some of a done job's did not come."""
        show = output.show_hint if output.screen is not None else None
        try:
            self._outputs = outputs.fetch(self.context, self._record_ended(last, output), self._fleet, show)
        except errors.PsctlError as error:
            self._outputs = outputs.JobOutputs({**error.document()}, f"not fetched: {error.message}", error)
        if self._outputs is not None and self.context.options.output == "jsonl":
            print_json({"time": last.time, "event": "outputs", **self._outputs.document})
        if self._outputs is not None and self._outputs.error is not None and last.exit == 0:
            return msgspec.structs.replace(last, exit=self._outputs.error.exit)
        return last

    def _train_options(self) -> list[str]:
        """Return the options with which `train` runs this job again.

        They are those that it was given (variables without values), and --cluster where `train` would choose another.
        """
        record, own = self.record, self.context
        _, settings, variables = split_notes(record.job_file)
        words = [f"--set {shlex.quote(each)}" for each in settings]
        words += [f"--env {variable.partition('=')[0]}" for variable in variables]
        ran_on = own.cluster_of(record)
        with contextlib.suppress(errors.PsctlError):  # what would be chosen is unknown, broken or not reached
            job, folder = load_noted(record.job_file, record.job_source), Path(record.job_source).parent
            plain = choose_cluster(
                own.home, None, job_cluster=job.cluster, job_folder=folder, environment=own.environment
            )
            if plain.same(ran_on):
                return words
        return [*words, f"--cluster {reference(own.home, ran_on)}"]

    def _killed(self, output: EventOutput) -> Finished:
        now = self._clock.wall()
        return Finished(
            time=now, status="stopped", exit=self._policy.exit, steps=output.step - output.base,
            seconds=max(0.0, now - (output.began or now)), metrics={},
        )  # fmt: skip

    def _tell_that_it_continues(self, text: str) -> None:
        job = self.record.job
        self.context.tell(text, f"  come back: psctl attach {job}", f"  stop it:   psctl stop {job}")

    def _finish(self, last: Finished | None, output: EventOutput) -> int:
        """Record and print the end of the job, or that psctl detached from it; return the exit code."""
        job = self.record.job
        if last is None:
            if self.context.options.output == "json":
                print_json({"job": job, "state": "running", "detached": True})
            self._tell_that_it_continues(f"detached from {job}, which continues")
            return 0
        self.saved = output.checkpoint is not None
        self._record_end(last, output)
        self._warn_of_leftovers()
        if self._outputs is not None and self._outputs.error is not None:
            self.context.warn(f"{job}: {self._outputs.text}")
        if last.status == "stopped" and (why := slurm.why_ended(self.record.cluster.allocation)):
            self.context.warn(f"{job}: {why}")
        if self.context.options.output == "json":
            files = {"outputs": self._outputs.document} if self._outputs is not None else {}
            print_json({"job": job, **msgspec.to_builtins(last), **files})
        if not self.context.options.machine:
            local = self.record.head.job_dir + "/logs" if self.context.cluster_of(self.record).embedded else ""
            if not (self.context.options.quiet and last.status == "done"):
                uncounted = UncountedSteps(output.printed) if output.plan is None else None
                lines = output.summary.lines()
                if self._outputs is not None and last.status == "failed":
                    self.context.tell(f"files: {self._outputs.text}")  # before the box
                elif self._outputs is not None:
                    lines = [*lines, ("files", self._outputs.text)]
                draw_end(self.context.err, job, last, output.checkpoint, local, uncounted, lines)
        return last.exit

    def _warn_of_leftovers(self) -> None:
        """Wait until the job's processes on the connected hosts have ended; name those that could not be ended."""
        if self._fleet is not None:
            for line in job_end.sweep_ended(self._fleet, self.record.hosts):
                self.context.warn(f"left running: {line}; psctl stop {self.record.job} --force ends it")

    def _record_end(self, last: Finished, output: EventOutput) -> None:
        self.record = self._record_ended(last, output)
        self.context.home.update_record(self.record)

    def _record_ended(self, last: Finished, output: EventOutput) -> JobRecord:
        return msgspec.structs.replace(
            self.record, state=last.status, exit={"done": 0, "stopped": 1}.get(last.status, last.exit),
            step=max(job_end.worker_steps(output.ranks.values()), default=last.steps),
            ranks=list(output.ranks.values()), size=output.plan.size if output.plan else self.record.size,
            compute=output.compute or self.record.compute,
        )  # fmt: skip


def follow(
    context: Context,
    record: JobRecord,
    signals: SignalQueue,
    on_interrupt: str | None = None,
    fleet: Fleet | None = None,
    *,
    runs: bool = True,
) -> int:
    """Follow a job; return psctl's exit code: the job's own, or 1 when another process stops the job meanwhile.

    Args:
        context, record, signals, on_interrupt, fleet: as for `JobFollower`.
        runs: whether the job runs; following a job that is over ends with the job's code.

    Raises:
        HostUnreachable: the head cannot be reached any more; the job may continue.
    """
    return JobFollower(context, record, signals, on_interrupt, fleet, runs).run()


def check_on_interrupt(value: str | None) -> None:
    """Raise UsageError for an invalid --on-interrupt."""
    if value not in (None, "detach", "stop"):
        raise errors.UsageError(f"--on-interrupt {value}: unknown", hint="detach or stop")
