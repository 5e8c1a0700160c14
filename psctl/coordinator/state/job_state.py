"""What the coordinator knows of its job: one table of ranks and hosts, and the instructions that are going out."""

from __future__ import annotations

from typing import Any

import msgspec

from psctl.coordinator.state.checkpoint_progress import JobCheckpoints
from psctl.coordinator.state.clock_pace import ClockPace
from psctl.coordinator.state.instructions import AppendEvent, Instruction, PlanMade, SendMessage
from psctl.coordinator.state.rank_reports import RankReports
from psctl.job import events, lifecycle
from psctl.job.environment import WorkerSeats, worker_places
from psctl.job.membership_messages import ExamplesShared
from psctl.job.message import JobMessage
from psctl.job.process_messages import ProcessFailure, Register, Stacks, StopWanted
from psctl.job.shard_placement import ShardPlacement
from psctl.job.table_server_messages import TableServers
from psctl.job.training_messages import Prepare, Resume, WorkerListens
from psctl.orders import JobOrder
from psctl.types import Address, Layout, Member, Role, Shard


class Rank(msgspec.Struct):
    """One worker or server."""

    member: Member
    host: int
    local_rank: int
    state: str = "starting"
    pid: int = 0
    step: int = 0
    told_step: int = 0  # in the last state event
    doing: str = ""
    staleness: int = 0  # of the values that its last step was computed from, in clocks
    moved: float = 0.0  # when the step last moved
    heard: float = 0.0  # when it last sent anything
    active: float = 0.0  # when it last printed a line or used the processor
    connected: bool = False
    lost_at: float | None = None  # when its connection ended
    joined: bool = False
    prepared: Prepare | None = None
    address: Address | None = None
    listens: WorkerListens | None = None  # a worker, for others of its schedule
    ready: bool = False
    finished: bool = False
    decided: bool = False  # it was told how gradients are synchronised
    leaving: bool = False  # it was told to leave, while the job goes on

    @property
    def ended(self) -> bool:
        """Has its process ended, as far as can be known?"""
        return self.state in lifecycle.ENDED


class Ending(msgspec.Struct):
    """How the job is ending."""

    outcome: str  # done | failed | stopped
    phase: str
    since: float
    deadline: float
    by: str = ""  # who stopped it
    failures: list[ProcessFailure] = msgspec.field(default_factory=list)
    first: ProcessFailure | None = None
    stopped: list[str] = msgspec.field(default_factory=list)
    saving: bool = False  # a checkpoint was asked for at the stop
    cut: int | None = None  # the step at which all workers were told to leave


class Recovery(msgspec.Struct):
    """A restart of all processes that is under way."""

    phase: str
    since: float
    deadline: float
    failures: list[ProcessFailure]
    counted: bool = False  # the first of them was known and counted when it came to this


class WorkerDeath(msgspec.Struct):
    """A worker's death, until it is known which clock of it is the last that counts."""

    worker: Rank
    since: float
    asked: int | None = None  # the epoch in which servers were asked
    clocks: dict[int, int] = {}  # shard -> the last clock that it has whole
    versions: dict[int, int] = {}
    apart: dict[int, int] = {}  # the same as clocks without what is in a sum of its host's workers, where that is less
    aside: int = -1  # the newest clock at whose start its own state is with the servers; worker/0's, under asp anyone's


class DivisionChange(msgspec.Struct):
    """A change of who shares the examples, until it is known from which clock on."""

    since: float
    waiting: set[Member] = msgspec.field(default_factory=set)  # workers that have not answered
    clock: int = 0  # the first that none of the others has begun
    lost: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> its first clock that does not count


class ExampleDivision(msgspec.Struct):
    """Who shares the examples of each clock; example_division.py."""

    ticket: int = 0
    change: DivisionChange | None = None
    shared: list[ExamplesShared] = msgspec.field(default_factory=list)  # all that workers were told
    gone: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> its first clock that does not count


class JobState:
    """The table. Rooms of the mind read and change it; `out` collects what they ask for.

    Args:
        order: the job.
        grace: seconds between TERM and KILL.
        resume: where the job goes on, None when it starts anew.
        now: seconds that only go forward; wall: what to add to get seconds since the epoch.
    """

    def __init__(self, order: JobOrder, grace: float, resume: Resume | None, now: float, wall: float) -> None:
        self.order, self.grace, self.resume = order, grace, resume
        self.now, self.began, self._wall = now, now, wall
        self.state = "submitted"
        self.first_step = self.base = resume.step if resume else 0  # of this start of all, and of the first
        self.out: list[Instruction] = []
        self.ranks: dict[Member, Rank] = {}
        self._incarnations: dict[tuple[Role, int], int] = {}
        self._roles: dict[str, list[Rank]] = {}  # as `of` returns them, until they change
        self.missing: dict[str, int] = {}  # how many workers have not reached a stage of the start
        self.seat_workers()
        self.registered: dict[int, Register] = {}
        self.lost_hosts: set[int] = set()
        self.first: dict[str, float] = {}  # when a stage of the start was first reached
        self.plan: PlanMade | None = None
        self.tables = TableServers()
        self.training = False
        self.pace: ClockPace | None = None  # of the clocks, while training
        self.ending: Ending | None = None
        self.stop_wanted: StopWanted | None = None  # a stop that waits until those that are replaced train
        self.recovery: Recovery | None = None
        self.losses = 0  # that the job has survived
        self.scalings = 0  # starts of all with another number of workers, or with `update: worker`
        self.rescaled: JobOrder | None = None  # the order after the restart that is under way
        self.last_loss: ProcessFailure | None = None
        self.lost_steps = 0  # by the last restart
        self.holdings: ShardPlacement | None = None  # under ps, from the decision on
        self.spare = 0  # how many servers may die at once, as people were told
        self.going: set[int] = set()  # servers that are to leave
        self.shards: list[Shard] = []
        self.layout: Layout | None = None
        self.handing_since = now
        self.buffers: tuple[str, ...] = ()
        self.together: tuple[tuple[int, ...], ...] | None = None  # workers that share a host and push together
        self.cuts: dict[int, int] = {}  # rank -> the last clock that counts of its start before
        self.deaths: dict[Member, WorkerDeath] = {}  # of workers, whose last clock that counts is being found
        self.division = ExampleDivision()
        self.reports = RankReports(now, self.first_step)
        self.saves = JobCheckpoints(
            order.name, order.checkpoint.every_seconds, resume.checkpoint if resume else None, now
        )
        self.refused: set[Member] = set()  # who sent what it may not send; such a start of it is not let in again
        self.noticed: set[tuple[str, object]] = set()
        self.stacks: dict[Member, Stacks] = {}  # of ranks that stood still, as last told
        self.stacks_asked: float | None = None  # when they were asked for because the job is to end
        self.progress_at = now
        self.progress_told: tuple[int, dict[str, float]] = (self.first_step, {})
        self.states_at = now

    # ---- ranks and hosts ---------------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """Do all processes end, for good or to start again? A restart that still settles is not sure to come."""
        return self.ending is not None or (self.recovery is not None and self.recovery.phase != "settling")

    @property
    def coming_to_rest(self) -> bool:
        """Do workers still go on to a common step before all processes end? Who waits for a shard must hear of it."""
        leaving = self.recovery is not None and self.recovery.phase == "leaving"
        return leaving or (self.ending is not None and self.ending.phase == "cutting")

    @property
    def replacing(self) -> list[Rank]:
        """Workers that were started in mid-run and do not train yet."""
        return [rank for rank in self.live("worker") if not rank.ready] if self.training else []

    @property
    def reached(self) -> int:
        """The furthest step that anybody has told of."""
        return max([self.reports.step, *(rank.step for rank in self.of("worker"))])

    def seat_workers(self) -> None:
        """Enter all workers, where the order has them, and nobody else."""
        self.ranks, self._roles = {}, {}
        for rank, (host, local) in enumerate(worker_places(self.order)):
            self.add("worker", rank, host, local)
        self.missing = dict.fromkeys(("started", "prepared", "ready"), len(self.ranks))

    def seats(self) -> WorkerSeats:
        """Return where all workers sit now."""
        return WorkerSeats([(rank.host, rank.local_rank) for rank in self.of("worker")])

    def reaches(self, stage: str) -> bool:
        """One more worker has reached a stage of the start; return whether it was the last."""
        self.missing[stage] -= 1
        return self.missing[stage] == 0

    def add(self, role: Role, number: int, host: int, local_rank: int) -> Rank:
        """Enter a rank that is about to be ordered, as its next incarnation."""
        incarnation = self._incarnations.get((role, number), -1) + 1
        self._incarnations[role, number] = incarnation
        member = Member(role, number, incarnation)
        self._roles.pop(role, None)
        self.ranks[member] = Rank(member, host, local_rank, step=self.first_step, moved=self.now)
        return self.ranks[member]

    def forget(self, role: Role, number: int) -> None:
        """Drop the newest start of a rank, which has ended, before it is started anew."""
        incarnation = self._incarnations.get((role, number))
        if incarnation is not None:
            self.ranks.pop(Member(role, number, incarnation), None)
            self._roles.pop(role, None)

    def newest(self, role: Role, number: int) -> int | None:
        """Return the newest incarnation of a worker or server; None when there was none."""
        return self._incarnations.get((role, number))

    def of(self, role: str) -> list[Rank]:
        """Return the ranks of one role, in rank order. The list is the table's own; it is asked for at every event."""
        if role not in self._roles:
            self._roles[role] = [rank for _, rank in sorted(self.ranks.items()) if rank.member.role == role]
        return self._roles[role]

    def live(self, role: str) -> list[Rank]:
        """Return those whose process has not ended."""
        return [rank for rank in self.of(role) if not rank.ended]

    def alive(self) -> list[Rank]:
        """Return the ranks whose process was ordered and may still run."""
        return [
            rank
            for rank in self.ranks.values()
            if not rank.ended
            and rank.host in self.registered
            and rank.host not in self.lost_hosts
            and "starting" in self.first
        ]

    def host(self, rank: Rank) -> str:
        """Return the name of a rank's host."""
        return self.order.hosts[rank.host].name

    def where(self, rank: Rank) -> str:
        """Return a rank and its host in words."""
        return f"{rank.member} on {self.host(rank)}"

    @property
    def agents(self) -> list[Member]:
        """The agents that are there."""
        return [Member("agent", host) for host in sorted(self.registered.keys() - self.lost_hosts)]

    # ---- what goes out -----------------------------------------------------------------------------------------

    @property
    def time(self) -> float:
        """Seconds since the epoch; never goes back within a job."""
        return self._wall + self.now

    def tell(self, member: Member, message: JobMessage) -> None:
        """Send a message to one member."""
        self.out.append(SendMessage(member, message))

    def append(self, event: events.AnyEvent) -> None:
        """Append an event to the log."""
        self.out.append(AppendEvent(event))

    def say(self, text: str) -> None:
        """Append a plain sentence for people."""
        self.append(events.Notice(time=self.time, text=text))

    def say_once(self, key: tuple[str, object], text: str) -> None:
        """Say a sentence unless one with the same key was said before."""
        if key not in self.noticed:
            self.noticed.add(key)
            self.say(text)

    def failure(self, rank: Rank, exception: str, **more: Any) -> ProcessFailure:
        """Describe a failure of a rank that its own agent cannot describe."""
        return ProcessFailure(
            member=str(rank.member), host=self.host(rank), status=more.pop("status", 0), time=self.time,
            step=rank.step, exception=exception, frames=[], tail=[], **more,
        )  # fmt: skip

    # ---- states ------------------------------------------------------------------------------------------------

    def move(self, trigger: str) -> None:
        """Move the job's state and tell everyone."""
        self.state = lifecycle.move(lifecycle.JOB, self.state, trigger)
        head = self.order.hosts[0].name
        step = self.reports.step
        self.append(events.StateChanged(time=self.time, role="job", rank=0, host=head, state=self.state, step=step))

    def tell_coordinator(self, state: str, pid: int = 0) -> None:
        """Append the coordinator's own state to the log."""
        head = self.order.hosts[0].name
        self.append(events.StateChanged(time=self.time, role="coordinator", rank=0, host=head, state=state, pid=pid))

    def move_rank(self, rank: Rank, trigger: str, error: str = "") -> None:
        """Move a rank's state and tell everyone."""
        rank.state = lifecycle.move(lifecycle.RANK, rank.state, trigger)
        self.tell_state(rank, error)

    def tell_state(self, rank: Rank, error: str = "") -> None:
        """Append a rank's state, with its step, to the log."""
        rank.told_step = rank.step
        self.append(
            events.StateChanged(
                time=self.time, role=rank.member.role, rank=rank.member.rank, host=self.host(rank), state=rank.state,
                pid=rank.pid, step=rank.step, last_error=error, staleness=rank.staleness,
            )
        )  # fmt: skip
