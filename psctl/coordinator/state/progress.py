"""Progress of training: steps, heartbeats, printed lines, and the numbers that ranks report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.state import checkpoints
from psctl.job import events
from psctl.job.activity import PARTS
from psctl.job.process_messages import HostSample, OutputLines, ProcessExited
from psctl.job.training_messages import BackwardStepsChosen, BucketSizeChosen, Heartbeat, WorkerReport
from psctl.types import Member, PeerBytes

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

STATES_EVERY = 5.0
"""Seconds between two state events of a rank that differ in its step only."""

MEMORY_FULL = 0.95
"""Share of a host's memory above which people are warned: the kernel ends processes soon after."""

NOTHING = PeerBytes(0, 0)

KEEP = 64
"""Complete steps whose numbers are kept for late reports."""


class IntervalRates(msgspec.Struct, frozen=True):
    """Rates of an interval over all ranks. Seconds are per step, means over the ranks."""

    examples_per_second: float
    bytes_per_second: float
    sync_seconds: float
    compute_seconds: float
    hidden_seconds: float  # of compute_seconds: synchronization that no rank waited for


class _Tally(msgspec.Struct):
    """One rank's sums since the last interval's end."""

    examples: float = 0.0
    compute: float = 0.0
    sync: float = 0.0
    hidden: float = 0.0
    bytes: float = 0.0
    from_step: int | None = None
    to_step: int = 0


class RankReports:
    """All reports of a job's workers.

    For each step and name the value is the mean over the ranks that reported it, weighted by their examples and added
    in rank order, so that it does not depend on the order of arrival. A step is *complete* when every live rank has
    reported it or is beyond it. A value that arrives later for a complete step (an accuracy after the last epoch) is
    added to it.
    """

    def __init__(self, start: float, first_step: int = 0) -> None:
        self._values: dict[int, dict[str, dict[int, tuple[float, float]]]] = {}  # step, name, rank: (weight, value)
        self._epochs: dict[int, int] = {}
        self._reached: dict[int, float] = {}
        self._rested: dict[int, int] = {}  # by rank: the last step of which it can report no more
        self._last: dict[str, tuple[int, float]] = {}
        self._tallies: dict[int, _Tally] = {}
        self._since = start
        self._first = first_step
        self.step = first_step
        self.epoch = 0
        self.total = 0
        """Steps of the whole training; 0: unknown."""

    def add(self, rank: int, report: WorkerReport) -> None:
        """Add one rank's report."""
        before = self._reached.get(rank, float(self._first))
        self._reached[rank] = max(before, float(report.step))
        self._rested[rank] = max(self._rested.get(rank, self._first), report.rested)
        self.step = max(self.step, report.step)
        self.epoch = max(self.epoch, report.epoch)
        self.total = report.total or self.total
        for each in report.steps:
            self._epochs[each.step] = each.epoch
            for name, value in each.metrics.items():
                self._values.setdefault(each.step, {}).setdefault(name, {})[rank] = (each.weight, value)
        tally = self._tallies.setdefault(rank, _Tally())
        tally.from_step = int(before) if tally.from_step is None and before < float("inf") else tally.from_step
        tally.to_step = report.step
        tally.examples += report.examples
        tally.compute += report.compute_seconds
        tally.sync += report.sync_seconds
        tally.hidden += report.hidden_seconds
        tally.bytes += sum(sent + received for _, sent, received in report.moved)

    def rewind(self, step: int, now: float) -> None:
        """Forget the reports of later steps: all ranks begin again after `step`."""
        self._values = {each: found for each, found in self._values.items() if each <= step}
        self._epochs = {each: found for each, found in self._epochs.items() if each <= step}
        self._last = {name: found for name, found in self._last.items() if found[0] <= step}
        self._reached, self._rested, self._tallies = {}, {}, {}
        self._first = self.step = step
        self._since = now
        self.epoch = max(self._epochs.values(), default=0)

    def finish(self, rank: int, step: int) -> None:
        """Record that a rank will report no further step."""
        self._reached[rank] = float("inf")
        self.step = max(self.step, step)

    def complete(self, live: set[int]) -> int | None:
        """Return the last step with numbers that all live ranks have passed; None when there is none.

        Its numbers, and those of the steps before it, become `last_values`.
        """
        found = None
        for step in sorted(self._values):
            if all(self._passed(rank, step) for rank in live):
                found = step
                for name, value in self.at(step).items():
                    if step >= self._last.get(name, (0, 0.0))[0]:
                        self._last[name] = (step, value)
        for step in sorted(self._values)[:-KEEP]:
            if found is not None and step < found:
                del self._values[step]
                self._epochs.pop(step, None)
        return found

    def settled(self, step: int, live: set[int]) -> bool:
        """Whether no live rank can report more of a step."""
        return all(self._rested.get(rank, self._first) >= step for rank in live)

    def at(self, step: int) -> dict[str, float]:
        """Return the numbers of one step, from the ranks that have reported it."""
        return {name: _mean(by_rank) for name, by_rank in sorted(self._values.get(step, {}).items())}

    @property
    def kept(self) -> int:
        """Number of steps whose numbers are kept."""
        return len(self._values)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step that was reported, else the newest epoch."""
        return self._epochs.get(step, self.epoch)

    def last_steps(self) -> dict[str, int]:
        """Return the step of each name's last complete value."""
        return {name: step for name, (step, _) in self._last.items()}

    def last_values(self) -> dict[str, float]:
        """Return each name's last complete value."""
        return {name: value for name, (_, value) in sorted(self._last.items())}

    def rates(self, now: float) -> IntervalRates:
        """Return the rates since the last call, and begin a new interval."""
        seconds = max(now - self._since, 1e-9)
        tallies = [each for each in self._tallies.values() if each.from_step is not None]
        steps = max(1, sum(max(0, each.to_step - (each.from_step or 0)) for each in tallies))
        found = IntervalRates(
            examples_per_second=sum(each.examples for each in tallies) / seconds,
            bytes_per_second=sum(each.bytes for each in tallies) / seconds,
            sync_seconds=sum(each.sync for each in tallies) / steps,
            compute_seconds=sum(each.compute for each in tallies) / steps,
            hidden_seconds=sum(each.hidden for each in tallies) / steps,
        )
        self._since, self._tallies = now, {}
        return found

    def _passed(self, rank: int, step: int) -> bool:
        reached = self._reached.get(rank, float(self._first))
        return reached > step or any(rank in by_rank for by_rank in self._values[step].values())


def _mean(by_rank: dict[int, tuple[float, float]]) -> float:
    weights = sum(by_rank[rank][0] for rank in sorted(by_rank))
    if weights == 0:  # no examples counted (the script has its own loader): ranks count equally
        return sum(by_rank[rank][1] for rank in sorted(by_rank)) / len(by_rank)
    return sum(by_rank[rank][0] * by_rank[rank][1] for rank in sorted(by_rank)) / weights


class JobProgress:
    """The progress of a job, and which part of it the event log has.

    Args:
        now: seconds.
        first_step: step after which the job continues.
    """

    def __init__(self, now: float, first_step: int) -> None:
        self.base_step = first_step  # of the job's first start
        self.first_step = first_step  # of the current start of all processes
        self.lost_steps = 0  # by the last restart
        self.reports = RankReports(now, first_step)
        self.appended_at = now
        self.states_at = now
        self._appended: tuple[int, dict[str, float]] = (first_step, {})
        self.traffic: dict[int, tuple[float, float]] = {}  # by host: bytes/s sent and received, since the last states
        self.appended_traffic: dict[int, tuple[float, float]] = {}
        self.moved: dict[tuple[int, str], PeerBytes] = {}  # by a worker's host and its peer, since the last states
        self.has_flows = False  # the last event of flows has some
        self.gpus: dict[int, tuple[events.GpuState, ...]] = {}  # by host, at its last sample
        self.appended_gpus: dict[int, tuple[events.GpuState, ...]] = {}
        self.bucket_size = 0  # that `sync.bucket: auto` has chosen last; 0: none yet
        self.backward_steps: int | None = None  # buckets that `sync.step_in_backward` has chosen; None: not yet
        self._appended_names: dict[str, int] = {}  # by name of a number: the step of its value in the log

    def rewind(self, job: JobState, step: int) -> None:
        """Go back to a step, from which all processes start again."""
        self.backward_steps = None  # they choose anew
        self.lost_steps = max(0, max([self.reports.step, *(rank.step for rank in job.ranks.values())]) - step)
        self.first_step = step
        self.reports.rewind(step, job.now)
        self._appended = (step, {})
        self._appended_names = {name: found for name, found in self._appended_names.items() if found <= step}

    def begin_after(self, job: JobState, step: int) -> None:
        """Begin after the step that a library's own checkpoint continues from."""
        if job.losses.survived + job.scaling.restarts == 0:
            self.base_step = step
        else:
            self.lost_steps = max(0, self.lost_steps + self.first_step - step)
        self.first_step = step
        self.reports.rewind(step, job.now)
        self._appended = (step, {})

    def reporting_ranks(self, job: JobState) -> set[int]:
        """Return the ranks of the workers that may report further steps."""
        return {rank.member.rank for rank in job.live("worker") if rank.joined and not rank.finished}

    def append(self, job: JobState) -> None:
        """Append what is new to the log: a progress event of the newest step with numbers.

        A number that is not reported at every step (an accuracy after each epoch) gets an event of its own step, before
        that of the newest one.
        """
        newest = self.reports.complete(self.reporting_ranks(job))
        step = newest if newest is not None else self.reports.step
        steps = {
            found
            for name, found in self.reports.last_steps().items()
            if self._appended_names.get(name, -1) < found < step
        }
        found = [(each, self._metrics_of(job, each)) for each in sorted(steps)]
        new = (step, self._metrics_of(job, step) if newest is not None else {})
        if new == self._appended and not found:
            return
        self._appended = new
        rates = self.reports.rates(job.now)
        for each, metrics in [*found, new]:
            job.append_event(
                events.Progress(
                    time=job.time, step=each, epoch=self.reports.epoch_of(each), metrics=metrics,
                    examples_per_second=rates.examples_per_second, bytes_per_second=rates.bytes_per_second,
                    sync_seconds=rates.sync_seconds, compute_seconds=rates.compute_seconds,
                    staleness=max((rank.staleness for rank in job.live("worker")), default=0),
                    hidden_seconds=rates.hidden_seconds, total=self.reports.total,
                )
            )  # fmt: skip

    def _metrics_of(self, job: JobState, step: int) -> dict[str, float]:
        """Return the finite numbers of a step, which count as appended from now on."""
        every = self.reports.at(step)
        metrics = _finite(every)
        for name in every.keys() - metrics.keys():
            job.notice_once(("not finite", name), f"{name} is {every[name]} at step {step}")
        self._appended_names.update(dict.fromkeys(every, step))
        return metrics

    def final_metrics(self) -> dict[str, float]:
        """Return each name's last complete value, finite ones only."""
        self.reports.complete(set())
        return _finite(self.reports.last_values())


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def append_states(job: JobState) -> None:
    """Append the states of ranks whose step has changed and the traffic of hosts, every few seconds."""
    since = job.now - job.progress.states_at
    if since < STATES_EVERY:
        return
    job.progress.states_at = job.now
    for rank in job.ranks.values():
        if not rank.ended and (rank.step != rank.appended_step or _usage_changed(rank)):
            job.append_state(rank)
    for index, rates in sorted(job.progress.traffic.items()):
        if rates != job.progress.appended_traffic.get(index):
            job.progress.appended_traffic[index] = rates
            host = job.order.hosts[index]
            job.append_event(
                events.HostTraffic(time=job.time, host=host.name, sent=rates[0], received=rates[1], capacity=host.rate)
            )
    job.progress.traffic.clear()
    _append_flows(job, since)
    for index, gpus in sorted(job.progress.gpus.items()):
        if gpus != job.progress.appended_gpus.get(index):
            job.progress.appended_gpus[index] = gpus
            job.append_event(events.HostGpus(time=job.time, host=job.order.hosts[index].name, gpus=list(gpus)))


def _append_flows(job: JobState, seconds: float) -> None:
    """Append what workers moved between hosts in the last seconds, and once when that has become nothing."""
    moved, job.progress.moved = job.progress.moved, {}
    hosts = {str(rank.member): rank.host for rank in job.ranks.values()}
    sums: dict[tuple[int, int], int] = {}
    for (host, peer), (sent, received) in moved.items():
        other = hosts.get(peer)
        if other is None or other == host:
            continue
        sums[host, other] = sums.get((host, other), 0) + sent
        if peer.startswith("server/"):  # another worker reports itself what it sends
            sums[other, host] = sums.get((other, host), 0) + received
    names = [host.name for host in job.order.hosts]
    flows = [
        events.HostFlow(names[source], names[target], float(f"{moved / seconds:.3g}"))
        for (source, target), moved in sorted(sums.items())
        if moved
    ]
    if flows or job.progress.has_flows:
        job.append_event(events.HostFlows(time=job.time, flows=flows))
    job.progress.has_flows = bool(flows)


def _add_moved(job: JobState, rank: Rank, message: WorkerReport) -> None:
    """Count the bytes of a worker's report."""
    sums = job.progress.moved
    for peer, sent, received in message.moved:
        rank.sent += sent
        rank.received += received
        before = sums.get((rank.host, peer), NOTHING)
        sums[rank.host, peer] = PeerBytes(before.sent + sent, before.received + received)


def _usage_changed(rank: Rank) -> bool:
    """Whether a process uses clearly more or less than the log has: all that is known of one that reports no steps."""
    cpu, memory, gpu = rank.appended_usage
    return abs(rank.cpu - cpu) >= 10 or abs(rank.memory - memory) > 0.1 * memory or abs(rank.gpu - gpu) >= 10


def record_step(job: JobState, rank: Rank, step: int) -> None:
    """Record the step of a rank that has sent a message."""
    rank.last_message_at = job.now
    if step > rank.step:
        rank.step, rank.moved_at = step, job.now


def on_report(job: JobState, rank: Rank, message: WorkerReport) -> None:
    """Take a worker's numbers."""
    record_step(job, rank, message.step)
    rank.staleness = message.staleness
    if math.isfinite(message.compute_seconds + message.sync_seconds):
        rank.computed += max(0.0, message.compute_seconds)
        rank.waited += max(0.0, message.sync_seconds)
        _add_moved(job, rank, message)
    job.progress.reports.add(rank.member.rank, message)


def on_heartbeat(job: JobState, rank: Rank, message: Heartbeat) -> None:
    """Take a process's step and activity."""
    record_step(job, rank, message.step)
    rank.doing = message.doing
    if rank.ready:  # until then a replacement has what its predecessor reported
        rank.shares = message.shares


def on_script_finished(job: JobState, rank: Rank, step: int) -> None:
    """A worker's script has reached its end."""
    record_step(job, rank, step)
    rank.finished = True
    job.progress.reports.finish(rank.member.rank, step)
    checkpoints.remove_worker(job, rank.member)


def on_bucket_size(job: JobState, message: BucketSizeChosen) -> None:
    """The workers have chosen the size of buckets; each reports it."""
    if job.progress.bucket_size != message.size:
        job.progress.bucket_size = message.size
        measured = [events.BucketSize(size, seconds) for size, seconds in message.measured]
        job.append_event(events.BucketChosen(time=job.time, size=message.size, measured=measured))


def on_backward_steps(job: JobState, message: BackwardStepsChosen) -> None:
    """The workers have chosen how many buckets are stepped in backward; each reports it."""
    if job.progress.backward_steps != message.buckets:
        job.progress.backward_steps = message.buckets
        measured = [events.BackwardCount(buckets, seconds) for buckets, seconds in message.measured]
        job.append_event(
            events.StepsInBackward(time=job.time, buckets=message.buckets, all=message.all, measured=measured)
        )


def on_output(job: JobState, host: str, message: OutputLines) -> None:
    """Append the lines that a process printed to the log."""
    name = str(message.member)
    if message.member in job.ranks:
        job.ranks[message.member].active_at = job.now
    lines = message.lines
    if message.dropped:
        lines = [*lines, f"... {message.dropped} lines left out here; see `psctl logs {job.order.name}`"]
    for text in lines:
        job.append_event(events.Log(time=job.time, rank=name, stream=message.stream, text=text))
    if message.unwritten:
        job.notice_once(
            ("logs", host),
            f"the disk of {host} is full: the output of {name} and others there is not kept until there is space; "
            "training continues. Free space there, or lower `logs: {max}` in the job file",
        )


def append_last_steps(job: JobState, rank: Rank, message: ProcessExited) -> None:
    """Append the parts of the last steps of a worker that has ended."""
    if not message.spans:
        return
    exact = rank.host == job.head  # all processes of a host share this clock
    offset = 0 if exact else round(job.now * 1e9) - message.at
    spans = [(kind, step, begin + offset, end + offset) for kind, step, begin, end in message.spans]
    job.append_event(
        events.LastSteps(time=job.time, rank=rank.member.rank, host=job.host_name(rank), spans=spans, exact=exact)
    )


def on_host_sample(job: JobState, agent: Member, message: HostSample) -> None:
    """Take the load of an agent's host and which of its processes used the processor."""
    for member in message.busy:
        rank = job.ranks.get(member)
        if rank is not None and rank.host == agent.rank:
            rank.active_at = job.now
    for usage in message.usage:
        rank = job.ranks.get(usage.member)
        if rank is not None and rank.host == agent.rank:
            rank.cpu, rank.memory, rank.gpu, rank.gpu_memory = usage.cpu, usage.memory, usage.gpu, usage.gpu_memory
            rank.parts = {name: share for name, share in zip(PARTS, usage.parts, strict=False) if share}
    if math.isfinite(message.sent + message.received) and min(message.sent, message.received) >= 0:
        sent, received = (float(f"{rate:.3g}") for rate in (message.sent, message.received))
        job.progress.traffic[agent.rank] = (sent, received)
    if message.gpus:
        job.progress.gpus[agent.rank] = tuple(events.GpuState(*each) for each in message.gpus)
    if message.memory >= MEMORY_FULL:
        name = job.order.hosts[agent.rank].name
        job.notice_once(("memory", name), f"{name}: {message.memory:.0%} of the memory is used")
