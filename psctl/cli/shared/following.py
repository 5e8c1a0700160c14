"""A job on the user's screen, from its first event to its last, with Ctrl-C in between: `train` and `attach`."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from psctl import errors
from psctl.cli.shared.context import Context, print_json
from psctl.cli.shared.interrupts import Act, Ladder, Press
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
from psctl.launch.clusters import choose, reference
from psctl.launch.home import JobRecord
from psctl.launch.jobs import job_end
from psctl.launch.jobs.event_stream import Follower
from psctl.launch.jobs.host_messages import resumed_by
from psctl.launch.jobs.prepare import split_notes
from psctl.remote.shell import Shell
from psctl.spec.job import load_job
from psctl.types import HostName
from psctl.view.console import is_live, say
from psctl.view.failure import Uncounted, draw_end
from psctl.view.live import LiveScreen
from psctl.view.plain import PlainLog

if TYPE_CHECKING:
    from psctl.remote.fleet import Fleet

HINT = "Ctrl-C detaches; the job goes on"


class Presses:
    """Signals as a queue while a job is followed; before that they end psctl as usual, by an exception."""

    def __init__(self) -> None:
        self.queue: deque[Press] = deque()
        self.following = False

    def __enter__(self) -> Presses:
        self._before = {number: signal.signal(number, self._came) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.following:
            self.queue.append("interrupt" if number == signal.SIGINT else "terminate")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Terminated


class Show:
    """Where events go: a live screen or plain lines for people, JSON lines for programs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._jsonl = context.options.output == "jsonl"
        live = is_live(context.err) and not context.options.quiet
        silent = context.options.machine or context.options.quiet
        self.screen: Any = None if silent else (LiveScreen if live else PlainLog)(context.err, HINT)
        self.checkpoint: CheckpointWritten | None = None
        self.plan: Planned | None = None
        self.printed: Log | None = None  # the last line of the lowest rank that has printed one
        self.ranks: dict[str, dict[str, Any]] = {}
        self.began: float | None = None  # the head's clock
        self.base = self.step = 0  # finished steps of the job: before this run, and until now

    def event(self, event: AnyEvent) -> None:
        """Show one event."""
        match event:
            case CheckpointWritten():
                self.checkpoint = event
            case Planned():
                self.plan = event
            case Log(stream="stdout", text=text) if text.strip():
                if self.printed is None or event.rank == self.printed.rank or event.rank == "worker/0":
                    self.printed = event
            case Started():
                self.began = event.time
            case Restored():
                self.base = self.base if self.step else event.step  # a restart of this job begins no new run
                self.step = event.step
            case Progress():
                self.step = event.step
        if isinstance(event, StateChanged) and event.role != "job":
            self.ranks[f"{event.role}/{event.rank}"] = msgspec.to_builtins(event)
        if self._jsonl and isinstance(event, PROMISED):
            print_json(msgspec.to_builtins(event))
        if self.screen is not None:
            self.screen.event(event)

    def hint(self, text: str) -> None:
        """Say what the next key does, or what became of the connection."""
        if self.screen is not None:
            self.screen.hint(text)
        elif not self._context.options.quiet:
            say(self._context.err, text)

    def __enter__(self) -> Show:
        if self.screen is not None:
            self.screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.screen is not None:
            self.screen.__exit__(None, None, None)


class Following:
    """Follows one job to its end, or until the user leaves.

    Args:
        context: of the call.
        record: the job.
        presses: Ctrl-C and SIGTERM.
        on_interrupt: --on-interrupt.
        fleet: connections that are there already, for its head at least.
        runs: the job is not known to be over.
    """

    def __init__(
        self,
        context: Context,
        record: JobRecord,
        presses: Presses,
        on_interrupt: str | None,
        fleet: Fleet | None,
        runs: bool,
    ) -> None:
        self.context, self.record, self._presses = context, record, presses
        self._fleet, self._runs = fleet, runs
        self._clock = SystemClock()
        self._unanswered: bool | None = None  # `save` of a wish to stop that nobody has heard yet
        self._ladder = Ladder(sys.stderr.isatty() and sys.stdin.isatty(), on_interrupt)
        self._acts: dict[Act, Callable[[Show], None]] = {
            "announce": self._announce, "leave": self._nothing, "save": self._save, "stop": self._stop,
            "kill": self._kill,
        }  # fmt: skip

    def run(self) -> int:
        """Follow; return the exit code."""
        follower = Follower(self.record, self._connect, self._clock, self._noticed, self._head())
        last: Finished | None = None
        with self._shown() as show:
            self._show = show
            self._presses.following = True
            try:
                for event in follower.events():
                    if isinstance(event, Finished):
                        last = event = self._own(event)
                    if event is not None:
                        show.event(event)
                    if event is None and last is None and self._unanswered is not None:
                        self._ask(save=self._unanswered)
                    if last is None and (act := self._next_act()) is not None:
                        self._acts[act](show)
                        if act in ("leave", "kill"):
                            break
            finally:
                self._presses.following = False
            if last is None and self._ladder.state == "killed":
                last = self._killed(show)
                show.event(last)
        return self._end(last, show)

    def _shown(self) -> Show:
        """Return where the events go."""
        return Show(self.context)

    def _next_act(self) -> Act | None:
        now = self._clock.now()
        if self._presses.queue:
            return self._ladder.press(self._presses.queue.popleft(), now)
        return self._ladder.press("time", now)

    # ---- the acts ------------------------------------------------------------------------------------------------

    def _announce(self, show: Show) -> None:
        job = self.record.job
        show.hint(
            f"detaching from {job}, which goes on. Come back: psctl attach {job}. Stop it: psctl stop {job}, "
            "or press Ctrl-C again within 3 s (checkpoint, then stop)"
        )

    def _save(self, show: Show) -> None:
        show.hint(f"saving a checkpoint of {self.record.job}, then stopping it; Ctrl-C once more kills it")
        self._ask(save=True)

    def _stop(self, show: Show) -> None:
        show.hint(f"stopping {self.record.job}; once more kills it")
        self._ask(save=False)

    def _kill(self, show: Show) -> None:
        show.hint(f"killing {self.record.job}")
        with self.context.connect(self.context.cluster_of(self.record), self._names()) as fleet:
            job_end.kill(fleet, self.record)

    def _nothing(self, show: Show) -> None:
        """Leaving is what the caller does."""

    def _ask(self, *, save: bool) -> None:
        """Ask the head to stop; an agent that does not listen yet is asked again at the next idle moment."""
        shell = self._head() or self._connect()
        answered = job_end.ask_to_stop(shell, self.record, save=save, by=self._ladder.by)
        self._unanswered = None if answered else save

    # ---- connections ---------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return [host.name for host in self.record.hosts]

    def _head(self) -> Shell | None:
        return self._fleet.shells.get(HostName(self.record.head.name)) if self._fleet else None

    def _connect(self) -> Shell:
        """Connect to the head anew; the old connection is dropped."""
        self._fleet = self.context.connect(self.context.cluster_of(self.record), [self.record.head.name])
        for error in self._fleet.failed.values():
            raise error
        return self._fleet.shells[HostName(self.record.head.name)]

    def _noticed(self, sentence: str) -> None:
        self._show.hint(sentence)

    # ---- the end -------------------------------------------------------------------------------------------------

    def _own(self, event: Finished) -> Finished:
        """A job that was stopped from here ends with the code of the signal; another's stop, now, is exit 1."""
        if event.failure:
            failure = resumed_by(event.failure, self.record, self._train_options())
            event = msgspec.structs.replace(event, failure=failure)
        if event.status != "stopped" or not (self._ladder.by or self._runs):
            return event
        return msgspec.structs.replace(event, exit=self._ladder.exit if self._ladder.by else 1)

    def _train_options(self) -> list[str]:
        """Return the options with which `train` runs this job again: those that it was given (variables without their
        values), and --cluster where the job's cluster is not the one that `train` would take."""
        record, own = self.record, self.context
        text, settings, variables = split_notes(record.job_file)
        words = [f"--set {shlex.quote(each)}" for each in settings]
        words += [f"--env {variable.partition('=')[0]}" for variable in variables]
        ran_on = own.cluster_of(record)
        with contextlib.suppress(errors.NoSuchCluster, errors.InvalidFile):
            job, folder = load_job(text, record.job_source, settings), Path(record.job_source).parent
            plain = choose(own.home, None, job_cluster=job.cluster, job_folder=folder, environment=own.environment)
            if plain.same(ran_on):
                return words
        return [*words, f"--cluster {reference(own.home, ran_on)}"]

    def _killed(self, show: Show) -> Finished:
        now = self._clock.wall()
        return Finished(
            time=now, status="stopped", exit=self._ladder.exit, steps=show.step - show.base,
            seconds=max(0.0, now - (show.began or now)), metrics={},
        )  # fmt: skip

    def _end(self, last: Finished | None, show: Show) -> int:
        job = self.record.job
        if last is None:
            if self.context.options.output == "json":
                print_json({"job": job, "state": "running", "detached": True})
            self.context.tell(f"detached from {job}, which goes on", f"  come back: psctl attach {job}",
                              f"  stop it:   psctl stop {job}")  # fmt: skip
            return 0
        self._settle(last, show)
        for line in self._left():
            self.context.warn(f"left running: {line}; psctl stop {job} --force ends it")
        if self.context.options.output == "json":
            print_json({"job": job, **msgspec.to_builtins(last)})
        if not self.context.options.machine:
            local = self.record.head.job_dir + "/logs" if self.context.cluster_of(self.record).embedded else ""
            if not (self.context.options.quiet and last.status == "done"):
                uncounted = Uncounted(show.printed) if show.plan is None else None
                draw_end(self.context.err, job, last, show.checkpoint, local, uncounted)
        return last.exit

    def _left(self) -> list[str]:
        """Wait until the job's processes have left the hosts that we are connected to; return those that do not."""
        return job_end.sweep(self._fleet, self.record.hosts, kill=False) if self._fleet is not None else []

    def _settle(self, last: Finished, show: Show) -> None:
        settled = msgspec.structs.replace(
            self.record, state=last.status, exit=1 if last.status == "stopped" else last.exit,
            step=job_end.last_step({"ranks": show.ranks}, last.steps),
            ranks=list(show.ranks.values()), size=show.plan.size if show.plan else self.record.size,
        )  # fmt: skip
        self.context.home.update(settled)


def follow(
    context: Context,
    record: JobRecord,
    presses: Presses,
    on_interrupt: str | None = None,
    fleet: Fleet | None = None,
    *,
    runs: bool = True,
) -> int:
    """Follow a job; return the exit code that psctl ends with: the job's own, and 1 when another stops it meanwhile.

    Args:
        context, record, presses, on_interrupt, fleet: as for `Following`.
        runs: whether the job runs; that of one which is over ends with the job's code, whoever stopped it.

    Raises:
        HostUnreachable: its head is not reached any more; the job may go on.
    """
    return Following(context, record, presses, on_interrupt, fleet, runs).run()


def check_on_interrupt(value: str | None) -> None:
    """Refuse an --on-interrupt that is none."""
    if value not in (None, "detach", "stop"):
        raise errors.UsageError(f"--on-interrupt {value}: unknown", hint="detach or stop")
