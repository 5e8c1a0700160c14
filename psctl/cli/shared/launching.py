"""From a job file to a followed job: the common part of `train` and `checkpoint restore`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from psctl import errors
from psctl.cli.shared.context import Context, print_json
from psctl.cli.shared.following import JobFollower, SignalQueue, check_on_interrupt
from psctl.launch import cluster_hosts
from psctl.launch.checkpoints import checkpoint_actions, target_actions
from psctl.launch.clusters import ChosenCluster, in_allocation
from psctl.launch.home import JobRecord
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.jobs import prepare
from psctl.launch.jobs.submit import JobRequest
from psctl.remote import slurm
from psctl.spec.job import JobSpec
from psctl.units import parse_duration, parse_size
from psctl.view.tables import draw_dry_run

NEVER, AUTO, LATEST = "never", "auto", "latest"


class JobLaunch:
    """Starts one job and follows it.

    Args:
        context: the call.
        wanted: the job.
        chosen: the cluster.
        code: hash of code that hosts have already; None packs the job's folder.
    """

    def __init__(
        self, context: Context, wanted: prepare.RequestedJob, chosen: ChosenCluster, code: str | None = None
    ) -> None:
        self.context = context
        self.wanted = wanted
        self.chosen = chosen
        self._code = code
        self._follower: JobFollower | None = None

    def print_dry_run(self, size: int | None = None) -> None:
        """Print what would be done.

        Args:
            size: --size, in bytes.
        """
        request = self._request()
        with self._reach(request) as reached:
            known = size or request.job.sync.size or last_size(self.context, request.job.name)
            document = prepare.dry_run(reached, request, known)
        self.context.print_result(document, draw_dry_run)

    def run(
        self,
        resume: str = NEVER,
        *,
        located: prepare.Resumable | None = None,
        detach: bool = False,
        on_interrupt: str | None = None,
    ) -> int:
        """Start the job and follow it, unless detached; return the exit code.

        A job whose own allocation of Slurm ended before it continues in another one, as `restart` allows.
        """
        check_on_interrupt(on_interrupt)
        restarts = self.wanted.job.restart.max
        while True:
            with self._allocation():
                code = self._run(resume, located, detach, on_interrupt)
                why = self._ended_by_slurm() if restarts > 0 else ""
            if not why:
                return code
            restarts -= 1
            assert self._follower is not None, "only a job that was followed continues"
            if self._follower.saved:
                resume, located = f"{self._follower.record.job}@{LATEST}", None
            self._submit_again(why)

    def _ended_by_slurm(self) -> str:
        """Return why Slurm ended this job's allocation before the job, where it continues in another; else ""."""
        known, followed = self.chosen.known, self._follower
        if not known.owned or followed is None or followed.interrupted or self.wanted.job.restart.wait == 0:
            return ""
        if not (followed.terminated or followed.record.state == "failed"):
            return ""
        state = slurm.settled_state(known.allocation)
        if state in slurm.LOST_ALLOCATION:
            return slurm.why_ended(known.allocation)
        return (
            f"Slurm is about to end allocation {known.allocation}" if followed.terminated and state == "RUNNING" else ""
        )

    def _submit_again(self, why: str) -> None:
        self.context.tell(f"{why}; restart.wait lets the job continue in another allocation")
        spec, source = self.chosen.spec, self.chosen.known.source
        wait = self.wanted.job.restart.wait
        self.chosen = in_allocation(
            self.chosen, cluster_hosts.submit(spec, source, self.context.progress, patience=wait)
        )

    @contextlib.contextmanager
    def _allocation(self) -> Iterator[None]:
        """Cancel the allocation that psctl submitted, unless a job of it runs at the end."""
        known = self.chosen.known
        try:
            yield
        finally:
            if known.owned and all(
                each.over for each in self.context.home.jobs() if each.cluster.allocation == known.allocation
            ):
                cluster_hosts.release(known.allocation)

    def _run(self, resume: str, located: prepare.Resumable | None, detach: bool, on_interrupt: str | None) -> int:
        request = self._request()
        with SignalQueue() as signals, contextlib.ExitStack() as stack:
            record = None
            while record is None:
                with self.context.home.start_lock():
                    reached = stack.enter_context(self._reach(request))
                    lacking = prepare.hosts_for_data(reached, request, self.context.progress, self.context.warn)
                    if not lacking:
                        if located is None:
                            located = self._resume_from(reached, resume)
                        record = prepare.run(reached, request, located, self.context.progress, self.context.warn)
                if lacking:  # without the lock: other jobs may start meanwhile, so the slots are looked at again
                    request = prepare.place_data(reached, request, lacking, self.context.progress)
                    stack.close()
            if detach:
                self._print_detached(record)
                return 0
            self._print_started(record)
            self._follower = JobFollower(self.context, record, signals, on_interrupt, reached.fleet, runs=True)
            return self._follower.run()

    def _request(self) -> JobRequest:
        own = self.context
        request = prepare.request_of(self.wanted, self.chosen, os.environ, own.progress, self._code)
        return prepare.with_data(request, self.chosen, own.home, own.bar)

    def _reach(self, request: JobRequest) -> contextlib.AbstractContextManager[ReachedCluster]:
        own = self.context
        return prepare.reach(own.home, self.chosen, own.connect, [request.code], own.progress)

    def _resume_from(self, reached: ReachedCluster, resume: str) -> prepare.Resumable | None:
        """Return the checkpoint that --resume names, None for none."""
        if resume == NEVER:
            return None
        if resume in (AUTO, LATEST):
            found = self._newest(reached, resume)
            if found is None:
                self._report_none_found(resume)
            return found
        if target_actions.is_target(resume):
            with self.context.working(f"reading {resume}"):
                return find_at_target(self.context, resume)
        job, which = checkpoint_actions.split(resume)
        record = self.context.home.job(job)
        with self.context.working(f"verifying {resume}"):
            return checkpoint_actions.find(self.context.home, record, which, self.context.connect)

    def _newest(self, reached: ReachedCluster, resume: str) -> prepare.Resumable | None:
        """Return the newest verified checkpoint of earlier runs on this cluster; with auto, None after a done run.

        A job of the same name on another cluster may be another job.
        """
        for record in self._earlier(here=True):
            if resume == AUTO and record.state == "done":
                return None
            with prepare.source_of(reached, record, record.head.name) as shell:
                found = checkpoint_actions.newest(shell, record, self.context.warn)
            if found is not None:
                return found
        return None

    def _earlier(self, *, here: bool) -> list[JobRecord]:
        """Return the earlier jobs of this name on this cluster, or on all others; newest first."""
        named = [record for record in self.context.home.jobs() if record.name == self.wanted.job.name]
        name = self.chosen.known.name
        return [record for record in reversed(named) if (record.cluster.name == name) == here]

    def _report_none_found(self, resume: str) -> None:
        """Refuse `latest` where no job of this name has a checkpoint on this cluster; name a job on another cluster."""
        name, elsewhere = self.wanted.job.name, self._earlier(here=False)
        where = f" on cluster {self.chosen.known.name}" if elsewhere else ""
        hint = "--resume auto then starts from the beginning"
        if elsewhere:
            other = elsewhere[0]
            hint = f"{other.job} ran on cluster {other.cluster.name}; --resume {other.job}@latest continues from it"
        if resume == LATEST:
            raise errors.NoSuchCheckpoint(f"no job {name} has a checkpoint{where}", hint=hint, where=name)
        if elsewhere:
            self.context.tell(f"{name} starts from the beginning{where}: {hint}")

    def _print_started(self, record: JobRecord) -> None:
        hosts = len(record.hosts)
        where = (
            "this machine"
            if self.chosen.embedded
            else f"{hosts} host{'s' if hosts > 1 else ''} of {record.cluster.name}"
        )
        self.context.tell(f"{record.job} on {where}")

    def _print_detached(self, record: JobRecord) -> None:
        if self.context.options.machine:
            print_json({"job": record.job, "cluster": record.cluster.name})
            return
        print(record.job, flush=True)
        self.context.tell(
            f"{record.job} runs detached",
            f"  follow: psctl attach {record.job}",
            f"  logs:   psctl logs {record.job} -f",
            f"  stop:   psctl stop {record.job}",
        )


def overrides(workers: str | None, servers: str | None, strategy: str | None, settings: list[str] | None) -> list[str]:
    """Return the values of --set, then those of the options that are short for it."""
    short = {"workers": workers, "servers": servers, "sync.strategy": strategy}
    return [*(settings or []), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def folder_of(source: str) -> Path:
    """Return the folder that paths of a job file are relative to."""
    return Path(source).parent


def check_resume(context: Context, value: str) -> None:
    """Raise UsageError for an invalid --resume, NoSuchJob for one that names an unknown job."""
    if value not in (NEVER, AUTO, LATEST):
        at_url = target_actions.is_target(value)
        try:
            job = target_actions.split_target(value)[1] if at_url else checkpoint_actions.split(value)[0]
        except errors.UsageError:
            hint = "auto, latest, never, or a checkpoint: JOB@STEP, JOB@latest, JOB@best, of checkpoint.to URL/JOB@STEP"
            raise errors.UsageError(f"--resume {value}: unknown", hint) from None
        if not at_url:
            context.home.job(job)


def find_at_target(context: Context, reference: str) -> target_actions.TargetCheckpoint:
    """Return a checkpoint of a URL; warn where this machine cannot tell who wrote it."""
    found = target_actions.find(context.home, reference)
    if found.record is None or not found.record.authority:
        context.warn(f"{found.id}: this machine did not start its job, so its signature is not verified")
    return found


def parse_size_option(text: str | None) -> int | None:
    """Return --size in bytes. Raises UsageError when it is no size."""
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise errors.UsageError(f"--size {error}", hint="such as --size 160MB") from None


def known_size(context: Context, text: str | None, job: JobSpec | None) -> int | None:
    """Return the bytes of gradients of --size, else of a job's file or its last run; None: not known."""
    given = parse_size_option(text)
    return given if given is not None or job is None else job.sync.size or last_size(context, job.name)


def parse_compute_option(context: Context, text: str | None, name: str | None) -> float | None:
    """Return --compute in seconds; None: not given.

    Args:
        context: of the command.
        text: a duration, or `last`: that of the job's last run.
        name: the job's; None: there is none.

    Raises:
        UsageError: it is no duration, or no run of the job has reported its compute; the user's fault.
    """
    if text is None:
        return None
    if text == "last":
        found = [each.compute for each in context.home.jobs() if each.name == name and each.compute]
        if not found:
            whose = f"no run of {name} that this machine followed" if name else "no job is given, whose last run"
            raise errors.UsageError(f"--compute last: {whose} has reported its compute", hint="such as --compute 250ms")
        return found[-1]
    try:
        return parse_duration(text)
    except ValueError as error:
        raise errors.UsageError(f"--compute {error}", hint="such as --compute 250ms, or --compute last") from None


def last_size(context: Context, name: str) -> int | None:
    """Return the bytes of gradients that this job's last run had."""
    sizes = [record.size for record in context.home.jobs() if record.name == name and record.size]
    return sizes[-1] if sizes else None
