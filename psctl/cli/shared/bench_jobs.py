"""One call of `psctl bench`: its jobs, one after another, and their results."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from psctl import errors
from psctl.cli.shared.context import Context
from psctl.cli.shared.following import EventOutput, JobFollower, SignalQueue
from psctl.job.bench_messages import BenchAnswer, BenchProgress, BenchRow, collective_of, from_line
from psctl.job.events import AnyEvent, Finished, Log
from psctl.launch.bench import bench_runs, congestion, cost_fitting, message_bench
from psctl.launch.clusters import ChosenCluster
from psctl.launch.home import JobRecord
from psctl.launch.hosts.converge import ReachedCluster
from psctl.launch.jobs import job_end, prepare
from psctl.remote.fleet import Fleet
from psctl.types import UNDECODABLE, JsonObject
from psctl.units import format_bytes, format_seconds


class BenchCall:
    """One call of `psctl bench`.

    Args:
        context: the call.
        chosen: the cluster.
        bench_request: the options of the command line.
    """

    def __init__(self, context: Context, chosen: ChosenCluster, bench_request: bench_runs.BenchRequest) -> None:
        self._context = context
        self._chosen = chosen
        self._bench_request = bench_request
        self._results: list[bench_runs.BenchResult] = []
        self._outlook: bench_runs.BenchPlan | None = None
        self._parts: list[bench_runs.BenchPlan] = []  # for some of its ranks
        self._controls: list[str] = []
        self._control: str | None = None  # congestion control of the current job, when controls are compared
        self._times: dict[str, list[float]] = {}  # by congestion control

    def run(self) -> int:
        """Measure; return 0, or the exit code of an interrupt, after which `document` has the results so far.

        Raises:
            PsctlError: a host cannot be used, slots are held, or a job failed.
        """
        with SignalQueue() as signals:
            reached = self._predict()
            assert self._outlook is not None, "set by _predict"
            jobs = self._outlook.jobs(self._bench_request, self._parts)
            turns = [(job, control) for _ in range(congestion.TURNS) for job in jobs[-1:] for control in self._controls]
            for job, self._control in [*((job, None) for job in jobs), *turns]:
                code = self._measure(job, signals)
                if code:
                    return code
        if collective_of(self._bench_request.operation) is None:  # costs are fitted to predictions of these
            for outlook in (self._outlook, *self._parts):
                own = [each for each in self._results if each.row.world == outlook.inputs.world]
                self._tell(*cost_fitting.describe(cost_fitting.calibrate(reached, outlook, own), outlook.inputs.world))
        return 0

    def document(self) -> JsonObject:
        """Return the document that `bench -o json` prints: the records, and the winner of each size."""
        assert self._outlook is not None, "after run"
        found: JsonObject = {
            "cluster": self._chosen.spec.name,
            "results": [each.document() for each in self._results],
            "sizes": bench_runs.sizes_document(self._outlook, self._results),
        }
        if self._times:
            found["congestion"] = congestion.compared(self._times, self._chosen.spec.network.congestion)
        return found

    def _predict(self) -> ReachedCluster:
        """Connect to all hosts, make them ready and predict the times."""
        own = self._context
        with prepare.reach(own.home, self._chosen, own.connect, [], self._progress) as reached:
            prepare.make_ready(reached, self._progress, own.warn)
            self._bench_request = self._request_on(reached)
            self._outlook = bench_runs.plan_of(reached, self._bench_request)
            self._parts = self._parts_on(reached, self._outlook)
            self._controls = congestion.allowed(reached, self._bench_request.controls)
            return reached

    def _measure(self, job: bench_runs.BenchJob, signals: SignalQueue) -> int:
        own, control = self._context, self._control
        chosen = self._chosen if control is None else congestion.under(self._chosen, control)
        with tempfile.TemporaryDirectory(prefix="psctl-bench-") as folder, contextlib.ExitStack() as stack:
            asked = bench_runs.wanted(Path(folder), self._bench_request, job)
            request = prepare.request_of(asked, chosen, os.environ, self._detail)
            with own.home.start_lock():
                reached = stack.enter_context(
                    prepare.reach(own.home, chosen, own.connect, [request.code], self._detail)
                )
                record = prepare.run(reached, request, None, self._detail, own.warn)
            return self._follow(BenchFollower(own, record, signals, reached.fleet, self._on_answer), reached.fleet)

    def _request_on(self, reached: ReachedCluster) -> bench_runs.BenchRequest:
        """Return the request for the hosts that were reached."""
        return self._bench_request

    def _parts_on(self, reached: ReachedCluster, outlook: bench_runs.BenchPlan) -> list[bench_runs.BenchPlan]:
        """Return the plans for some of the ranks, which measure once more."""
        return []

    def _follow(self, follower: BenchFollower, fleet: Fleet) -> int:
        """Follow a job to its end; return the exit code."""
        return follower.run()

    def _tell(self, *lines: str) -> None:
        """Print results."""
        self._context.tell(*lines)

    def _progress(self, host: str, sentence: str) -> None:
        """Print an action on a host."""
        self._context.progress(host, sentence)

    def _detail(self, host: str, sentence: str) -> None:
        self._context.detail(f"{host}: {sentence}" if host else sentence)

    def _on_answer(self, answer: BenchAnswer) -> None:
        """Keep and print an answer of rank 0."""
        assert self._outlook is not None, "set by _predict"
        outlook = next((each for each in self._parts if each.inputs.world == answer.world), self._outlook)
        match answer:
            case BenchProgress():
                some = "" if outlook is self._outlook else f", {answer.world} ranks"
                self._tell(f"{format_bytes(answer.bytes)}{some}: {', '.join(answer.strategies)}")
            case BenchRow() if self._control is not None:
                self._times.setdefault(self._control, []).append(statistics.median(answer.times))
                self._tell(f"  congestion {self._control}: {format_seconds(statistics.median(answer.times))}")
            case BenchRow():
                result = bench_runs.BenchResult(answer, outlook.predicted(answer.strategy, answer.bytes))
                self._results.append(result)
                predicted = "" if result.predicted is None else f", predicted {format_seconds(result.predicted)}"
                wrong = "" if answer.correct else ", and its result is WRONG"
                took = format_seconds(result.median)
                self._tell(f"  {answer.strategy} took {took}{predicted}{wrong}")


class MessageMeasurement(BenchCall):
    """The bench of `up`: a short job on all hosts, of which nothing is kept but the costs of messages.

    Args:
        context, chosen: as for `BenchCall`.
    """

    def __init__(self, context: Context, chosen: ChosenCluster) -> None:
        super().__init__(context, chosen, message_bench.MESSAGES)

    def run(self) -> int:
        """Measure and save the costs; return and raise as `BenchCall.run`."""
        with self._context.working("measuring the cost of messages: a short job on all hosts"):
            return super().run()

    def _request_on(self, reached: ReachedCluster) -> bench_runs.BenchRequest:
        return msgspec.structs.replace(self._bench_request, workers=str(message_bench.workers_of(reached)))

    def _parts_on(self, reached: ReachedCluster, outlook: bench_runs.BenchPlan) -> list[bench_runs.BenchPlan]:
        count = message_bench.part_of(outlook.inputs.hosts)
        if count is None:
            return []
        return [bench_runs.plan_of(reached, msgspec.structs.replace(self._bench_request, workers=str(count)))]

    def _follow(self, follower: BenchFollower, fleet: Fleet) -> int:
        """Follow a job and remove it, however it ends."""
        try:
            return follower.run()
        except BaseException:
            job_end.kill(fleet, follower.record)
            raise
        finally:
            job_end.discard(self._context.home, fleet, follower.record)

    def _tell(self, *lines: str) -> None:
        self._context.detail(*lines)

    def _progress(self, host: str, sentence: str) -> None:
        self._detail(host, sentence)

    def _on_answer(self, answer: BenchAnswer) -> None:
        super()._on_answer(answer)
        if isinstance(answer, BenchRow) and not answer.correct:
            self._context.warn(f"{answer.strategy}: the sum of {format_bytes(answer.bytes)} is wrong")


class BenchFollower(JobFollower):
    """Follows a job of a bench and passes its answers on; nothing else is shown.

    Args:
        context, record, signals, fleet: as for `JobFollower`.
        on_answer: called with each answer.
    """

    def __init__(
        self,
        context: Context,
        record: JobRecord,
        signals: SignalQueue,
        fleet: Fleet,
        on_answer: Callable[[BenchAnswer], None],
    ) -> None:
        super().__init__(context, record, signals, "stop", fleet, runs=True)
        self._on_answer = on_answer

    def _make_output(self) -> EventOutput:
        return _AnswerOutput(self.context, self._on_answer)

    def _with_outputs(self, last: Finished, output: EventOutput) -> Finished:
        return last  # the script of a bench writes no files

    def _finish(self, last: Finished | None, output: EventOutput) -> int:
        assert last is not None, "an interrupt stops the job, so it ends"
        self._record_end(last, output)
        self._warn_of_leftovers()
        if last.status == "failed":
            failure = last.failure or {}
            raise errors.JobFailed(
                f"{failure.get('member', self.record.job)} failed: {failure.get('exception', 'no reason is known')}",
                hint=f"psctl logs {self.record.job}", where=self.record.job,
            )  # fmt: skip
        return last.exit


class _AnswerOutput(EventOutput):
    """Finds the answers among a job's events."""

    def __init__(self, context: Context, on_answer: Callable[[BenchAnswer], None]) -> None:
        super().__init__(context)
        self.screen = None
        self._jsonl = False
        self._on_answer = on_answer

    def on_event(self, event: AnyEvent) -> None:
        super().on_event(event)
        if isinstance(event, Log) and event.rank == "worker/0" and event.stream == "stdout":
            try:
                answer = from_line(event.text)
            except UNDECODABLE as error:
                raise errors.ProtocolError(
                    f"worker/0 printed an answer that this psctl cannot read: {error}",
                    hint="run psctl up, which installs this version on the hosts",
                ) from error
            if answer is not None:
                self._on_answer(answer)
