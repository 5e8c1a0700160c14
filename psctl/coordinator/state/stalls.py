"""Slow and stalled workers: how long clocks usually take, the ranks that others wait for, and their stacks.

A clock is done when the slowest worker has done it. A clock that takes LATE_FACTOR times the median of the last ones,
and at least LATE_LEAST seconds, is late. The workers at the least step that do not wait for others are then named once
a step, with their last reported activity and its age: a worker that computes sends a heartbeat every second; one that
is stopped, or whose interpreter lock is held by a library, is silent. So does a server; one that is silent meanwhile is
named too, since a primary that waits for a stopped backup is what workers report. Only `timeouts.stall` ends a job
(deadlines.py).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from psctl.job.activity import is_wait, waited_for
from psctl.job.process_messages import Stacks, StacksWanted
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

LATE_FACTOR = 5.0
"""A clock is late when it takes this many times as long as usual."""

LATE_LEAST = 2.0
"""Seconds below which no clock is late: reports arrive once a second or so."""

KEPT = 50
"""Clocks whose times are kept."""

ENOUGH = 3
"""Times that must be known before a clock can be late."""

SILENT = 3.0
"""Seconds without a message after which a rank is called silent: heartbeats arrive once a second."""

STACKS_WAIT = 4.0
"""Seconds that the end of a stalled job waits for stacks; agents give their processes 2."""

OTHER_THREAD = "another thread: "
"""Prefix, in the record of a failure, of a frame that is not of a process's main thread."""


class ClockPace:
    """How long clocks take.

    Args:
        now: when training began.
        step: the step after which it began.
    """

    def __init__(self, now: float, step: int) -> None:
        self.since = now
        self.step = step
        self.late: set[int] = set()  # workers that were named for this step
        self.silent: set[int] = set()  # and servers
        self._took: deque[float] = deque(maxlen=KEPT)

    def reach(self, now: float, step: int) -> bool:
        """Record the step of the slowest worker; return whether it is new."""
        if step == self.step:
            return False
        if step > self.step:
            self._took.append((now - self.since) / (step - self.step))
        self.since, self.step, self.late, self.silent = now, step, set(), set()
        return True

    @property
    def usual(self) -> float | None:
        """Seconds that a clock usually takes; None while too few are known."""
        return median(self._took) if len(self._took) >= ENOUGH else None

    def is_late(self, now: float, interval: float) -> bool:
        """Whether the clock in progress takes much longer than usual.

        Args:
            interval: seconds between two reports of a worker.
        """
        usual = self.usual
        return usual is not None and now - self.since >= max(LATE_LEAST, LATE_FACTOR * usual) + interval


class Stalls:
    """What is known of slow and stalled ranks."""

    def __init__(self) -> None:
        self.pace: ClockPace | None = None  # while the job trains
        self._stacks: dict[Member, Stacks] = {}  # the newest of each rank
        self._asked_at: float | None = None  # when stacks were requested because the job is to end

    def cancel_gathering(self) -> None:
        """Do not wait for stacks any more: the ranks make progress again."""
        self._asked_at = None

    def ask_stacks(self, job: JobState, ranks: list[Rank]) -> None:
        """Ask the agents of these ranks for their stacks."""
        for agent in job.agents:
            members = [rank.member for rank in ranks if rank.host == agent.rank and not rank.ended]
            if members:
                job.send(agent, StacksWanted(members))

    def gather_stacks(self, job: JobState, ranks: list[Rank]) -> bool:
        """Ask for the stacks of these ranks, once; return whether all are here or STACKS_WAIT has passed."""
        if self._asked_at is None:
            self._asked_at = job.now
            self._stacks.clear()
            self.ask_stacks(job, ranks)
        missing = [rank for rank in ranks if rank.member not in self._stacks and not rank.ended]
        return not missing or job.now - self._asked_at >= STACKS_WAIT

    def on_stacks(self, job: JobState, rank: Rank, message: Stacks) -> None:
        """Keep a rank's stacks, and show them unless the job ends and its failure will hold them."""
        self._stacks[rank.member] = message
        if self._asked_at is None and job.ending is None:
            text = " | ".join(message.main) or message.problem
            job.notice(f"stack of {job.describe(rank)}, innermost call last: {text}")

    def frames(self, member: Member) -> list[str]:
        """Return the user's own frames of a rank's main thread, outermost first; none when they are not known."""
        found = self._stacks.get(member)
        return list(found.main) if found is not None else []

    def problem(self, member: Member) -> str:
        """Return why the stack of a rank is not known after the request; "" when it is."""
        found = self._stacks.get(member)
        return "its agent did not answer" if found is None else found.problem

    def document(self) -> dict[str, list[str]] | None:
        """Return all stacks by rank, the main thread's frames first; None when the job did not end of a stall."""
        if self._asked_at is None:
            return None
        found: dict[str, list[str]] = {}
        for member, each in sorted(self._stacks.items()):
            others = [f"{OTHER_THREAD}{line}" for thread in each.others for line in thread]
            found[str(member)] = [*each.main, *others] if each.main else [each.problem]
        return found


def name_late(job: JobState) -> None:
    """Name the workers of a late clock, and those that continue after one."""
    pace = job.stalls.pace
    workers = [rank for rank in job.live("worker") if not rank.finished]
    if pace is None or not workers or job.order.staleness is None:  # under asp no worker waits for another
        return
    least = min(rank.step for rank in workers)
    late, waited = pace.late, job.now - pace.since
    if pace.reach(job.now, least):
        for rank in workers:
            if rank.member.rank in late:
                job.notice(f"{job.describe(rank)} continues: step {rank.step}, after {waited:.0f} s")
        return
    if not pace.is_late(job.now, job.order.report_seconds):
        return
    behind = [rank for rank in workers if rank.step == least]
    for rank in [each for each in behind if not is_wait(each.doing)] or behind:
        if rank.member.rank not in late:
            late.add(rank.member.rank)
            since = f"since {waited:.0f} s (usual: {pace.usual or 0.0:.2g} s)"
            job.notice(f"step {least + 1} waits for {job.describe(rank)} {since}: {last_activity(job, rank)}")
    for rank in job.live("server"):
        if rank.ready and rank.member.rank not in pace.silent and _is_silent(job, rank):
            pace.silent.add(rank.member.rank)
            seconds = job.now - rank.last_message_at
            job.notice(f"step {least + 1} may wait for {job.describe(rank)}, which is silent for {seconds:.0f} s")


def last_activity(job: JobState, rank: Rank) -> str:
    """Return what a rank last reported to do, and since when it is silent."""
    if not rank.decided:
        return "it is being started again"
    doing = rank.doing or "nothing that it reported"
    return f"{doing}, silent for {job.now - rank.last_message_at:.0f} s" if _is_silent(job, rank) else doing


def _is_silent(job: JobState, rank: Rank) -> bool:
    return job.now - rank.last_message_at >= SILENT


def blocking_ranks(job: JobState, stalled: list[Rank]) -> list[Rank]:
    """Return the ranks at the ends of the chains of waits that begin at stalled workers.

    Workers at an end come first, of these the ones with the fewest steps. When all workers wait, the silent ones are
    named, since their last reported activity may be out of date; else the servers at the ends; else the workers with
    the fewest steps. Of several equal ones all are named.

    Args:
        job: the job.
        stalled: workers whose step has not changed for too long; not empty.
    """
    workers = [rank for rank in job.live("worker") if not rank.finished]
    waiting = {rank.member for rank in workers if is_wait(rank.doing)}
    if not any(rank.member in waiting for rank in stalled):
        return _fewest_steps(stalled)
    ends = _ends_of_waits(job, workers, [rank for rank in stalled if rank.member in waiting])
    busy = _fewest_steps([rank for rank in ends if rank.member.role == "worker"])
    if not busy:
        least = min(rank.step for rank in workers)
        busy = [rank for rank in workers if rank.step == least and rank.member not in waiting]
    silent = [rank for rank in workers if _is_silent(job, rank)]
    return busy or silent or ends or _fewest_steps(workers)


def _ends_of_waits(job: JobState, workers: list[Rank], first: list[Rank]) -> list[Rank]:
    """Follow the waits from these ranks; return the ranks that are reached and wait for none."""
    live = {(rank.member.role, rank.member.rank): rank for rank in (*job.live("server"), *workers)}
    seen, to_visit = {rank.member for rank in first}, list(first)
    found = []
    while to_visit:
        rank = to_visit.pop()
        if rank.member.role == "server" or not is_wait(rank.doing):
            found.append(rank)
            continue
        names = waited_for(rank.doing)
        after = [live[name] for name in names if name in live] if names else [w for w in workers if w.step <= rank.step]
        for each in after:
            if each.member not in seen:
                seen.add(each.member)
                to_visit.append(each)
    return sorted(found, key=lambda rank: rank.member)


def _fewest_steps(ranks: list[Rank]) -> list[Rank]:
    least = min((rank.step for rank in ranks), default=0)
    return [rank for rank in ranks if rank.step == least]
