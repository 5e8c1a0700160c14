"""The state of one job: its ranks and hosts, the state of each topic, and the instructions that wait to be carried out.

Each topic owns its part, a class in the topic's module; other topics read it as an attribute of `JobState`.
"""

from __future__ import annotations

import msgspec

from psctl.coordinator.policies import checkpoint_interval
from psctl.coordinator.state.checkpoints import JobCheckpoints
from psctl.coordinator.state.collective_losses import PlaneEpochs
from psctl.coordinator.state.ending import Ending
from psctl.coordinator.state.example_division import ExampleDivision
from psctl.coordinator.state.instructions import AppendEvent, Instruction, PlanMade, SendMessage
from psctl.coordinator.state.joining_workers import JoiningWorkers
from psctl.coordinator.state.losses import Losses, Restart
from psctl.coordinator.state.lost_workers import LostWorkers
from psctl.coordinator.state.outages import Outage
from psctl.coordinator.state.partitions import Partitions
from psctl.coordinator.state.plan_check import PlanCheck
from psctl.coordinator.state.progress import JobProgress
from psctl.coordinator.state.reading_groups import ReadingGroups
from psctl.coordinator.state.scaling import Scaling
from psctl.coordinator.state.script_collectives import ScriptCollectives
from psctl.coordinator.state.server_changes import Shards
from psctl.coordinator.state.stalls import Stalls
from psctl.coordinator.state.startup import Startup
from psctl.coordinator.state.sum_order import Groups
from psctl.coordinator.state.table_placement import TableServers
from psctl.coordinator.state.takeover import Takeover
from psctl.coordinator.streams.shard_grants import Streams, resumed_streams
from psctl.job import events, lifecycle
from psctl.job.environment import WorkerSeats, worker_places
from psctl.job.message import JobMessage
from psctl.job.process_messages import ProcessFailure, StopWanted
from psctl.job.training_messages import Prepare, Resume, WorkerListens
from psctl.orders import JobOrder
from psctl.types import Address, Member, Role


class Rank(msgspec.Struct):
    """One worker, server or reader."""

    member: Member
    host: int
    local_rank: int
    state: str = "starting"
    pid: int = 0
    step: int = 0
    appended_step: int = 0  # in the last state event
    doing: str = ""
    staleness: int = 0  # of the values that its last step was computed from, in clocks
    cpu: int = 0
    """Percent of one core, at the last sample of its host."""
    memory: int = 0
    """Bytes, at the last sample of its host."""
    parts: dict[str, int] = {}
    """Percent of a worker's time by `activity.PARTS`, at the last sample of its host."""
    sync: int = 0
    """Percent of its time before its last appended state that it waited for synchronization."""
    sends: float = 0.0
    """Bytes a second that it sent to other processes before its last appended state."""
    receives: float = 0.0
    """Bytes a second that it received from other processes before its last appended state."""
    gpu: int = 0
    """Percent of its GPUs' time that they were busy, at the last sample of its host."""
    gpu_memory: int = 0
    """Bytes of its GPUs that it holds, at the last sample of its host."""
    computed: float = 0.0
    """Seconds since its last appended state."""
    waited: float = 0.0
    """For synchronization, seconds since its last appended state."""
    sent: int = 0
    """Bytes since its last appended state."""
    received: int = 0
    """Bytes since its last appended state."""
    appended_usage: tuple[int, int, int] = (0, 0, 0)  # cpu, memory and GPU, as the log has them
    moved_at: float = 0.0  # when its step last changed
    last_message_at: float = 0.0
    active_at: float = 0.0  # when it last printed a line or used the processor
    connected: bool = False
    lost_at: float | None = None  # when its connection ended
    joined: bool = False
    prepared: Prepare | None = None
    address: Address | None = None
    listens: WorkerListens | None = None  # a worker, for other workers
    ready: bool = False
    finished: bool = False
    decided: bool = False  # the Decision was sent to it
    leaving: bool = False  # it leaves while the job continues
    joining: bool = False  # a worker that takes no part yet, while others train (joining_workers.py)
    idle: bool = False  # it was ordered to end, for it has nothing to do
    shares: bool = False  # a worker whose batches psctl's loader makes
    loss_appended: bool = False  # the log has the event of its loss

    @property
    def ended(self) -> bool:
        """Whether its process has ended, as far as is known."""
        return self.state in lifecycle.ENDED


class JobState:
    """The state of one job.

    Args:
        order: the job.
        grace: seconds between TERM and KILL.
        resume: where the job continues, None when it starts anew.
        now: seconds that only go forward.
        wall: added to `now` gives seconds since the epoch.
    """

    def __init__(self, order: JobOrder, grace: float, resume: Resume | None, now: float, wall: float) -> None:
        self.order = order
        self.head = 0
        """The host that leads: its agent has started this coordinator."""
        self.grace = grace
        self.resume = resume
        self.now = now
        self.began = now
        self._wall = wall
        self.state = "submitted"
        self.training = False
        self.plan: PlanMade | None = None
        self.host_groups: Groups | None = None  # workers that share a host and push together
        self.instructions: list[Instruction] = []
        self._noticed: set[tuple[str, object]] = set()

        self.registered: set[int] = set()  # hosts
        self.lost_hosts: set[int] = set()
        self.new_hosts: set[int] = set()  # lost hosts that were added, and whose agents have not registered yet
        self.returning: dict[int, set[Member]] = {}  # lost hosts whose agents are back, with processes yet to end
        self.may_serve = [host.may_serve for host in order.hosts]  # also while a host is lost
        self.refused: set[Member] = set()  # they broke the protocol; this incarnation may not connect again
        self.ranks: dict[Member, Rank] = {}
        self._by_role: dict[str, list[Rank]] = {}  # as `ranks_of` returns them, until they change
        self._incarnations: dict[tuple[Role, int], int] = {}

        step = resume.step if resume else 0
        self.startup = Startup()
        self.progress = JobProgress(now, step)
        every = order.checkpoint.every_seconds if not order.checkpoint.every_auto else checkpoint_interval.FIRST
        self.checkpoints = JobCheckpoints(order.name, resume.checkpoint if resume else None, every, now + every)
        self.shards = Shards()
        self.tables = TableServers()
        self.division = ExampleDivision()
        self.streams: Streams = resumed_streams(resume.state if resume else None)
        self.lost_workers = LostWorkers()
        self.planes = PlaneEpochs()
        self.collectives = ScriptCollectives()
        self.losses = Losses()
        self.restart: Restart | None = None
        self.outage: Outage | None = None  # of the head's link
        self.takeover: Takeover | None = None  # of the job by this coordinator, while members connect again
        self.partitions = Partitions()
        self.scaling = Scaling()
        self.plan_check = PlanCheck()
        self.joining = JoiningWorkers()
        self.reading = ReadingGroups()
        self.stalls = Stalls()
        self.ending: Ending | None = None
        self.pending_stop: StopWanted | None = None  # it waits until replaced workers train
        self.seat_workers()

    # ---- ranks and hosts ---------------------------------------------------------------------------------------

    @property
    def all_processes_end(self) -> bool:
        """Whether all processes end, for good or to start again. A restart that still settles may not come."""
        return self.ending is not None or (self.restart is not None and self.restart.phase != "settling")

    @property
    def moves_to_common_step(self) -> bool:
        """Whether workers still continue to a common step before all processes end; they may need news of shards."""
        restarts = self.restart is not None and self.restart.phase == "leaving"
        return restarts or (self.ending is not None and self.ending.phase == "cutting")

    @property
    def follows_library(self) -> bool:
        """Whether the workers' loop is a library's, which saves and resumes its own state."""
        return any(rank.prepared is not None and rank.prepared.follows is not None for rank in self.ranks_of("worker"))

    @property
    def workers_being_replaced(self) -> list[Rank]:
        """Workers that were started in mid-run and do not train yet."""
        return [rank for rank in self.live("worker") if not rank.ready] if self.training else []

    @property
    def furthest_step(self) -> int:
        """The largest step that any worker has reported."""
        return max([self.progress.reports.step, *(rank.step for rank in self.ranks_of("worker"))])

    def seat_workers(self) -> None:
        """Replace all ranks by the workers of the order, each as its next incarnation."""
        self.ranks, self._by_role = {}, {}
        self.reading.started = False
        for rank, (host, local) in worker_places(self.order).items():
            self.add_rank("worker", rank, host, local)
        self.startup.missing = dict.fromkeys(("started", "prepared", "ready"), len(self.ranks))
        self.division.world = len(self.ranks)

    def seats(self) -> WorkerSeats:
        """Return the places of all workers, those that join included."""
        ranks = [*self.ranks_of("worker"), *(self.ranks[member] for member in self.joining.members)]
        return WorkerSeats({rank.member.rank: (rank.host, rank.local_rank) for rank in ranks})

    def add_rank(self, role: Role, number: int, host: int, local_rank: int) -> Rank:
        """Add a rank that is about to be started, as its next incarnation."""
        incarnation = self._incarnations.get((role, number), -1) + 1
        self._incarnations[role, number] = incarnation
        member = Member(role, number, incarnation)
        self._by_role.pop(role, None)
        self.ranks[member] = Rank(member, host, local_rank, step=self.progress.first_step, moved_at=self.now)
        return self.ranks[member]

    def remove_rank(self, role: Role, number: int) -> None:
        """Remove the newest incarnation of a rank, which has ended, before the next one is started."""
        incarnation = self._incarnations.get((role, number))
        if incarnation is not None:
            self.ranks.pop(Member(role, number, incarnation), None)
            self._by_role.pop(role, None)

    def newest_incarnation(self, role: Role, number: int) -> int | None:
        """Return the newest incarnation of a worker or server; None when there was none."""
        return self._incarnations.get((role, number))

    def ranks_of(self, role: str) -> list[Rank]:
        """Return the ranks of one role that take part, in rank order.

        Callers must not change the list: it is kept between events.
        """
        if role not in self._by_role:
            every = [rank for _, rank in sorted(self.ranks.items()) if not rank.joining]
            self._by_role[role] = [rank for rank in every if rank.member.role == role]
        return self._by_role[role]

    def set_joining(self, rank: Rank, joining: bool) -> None:
        """Set whether a worker only joins, and takes no part yet."""
        rank.joining = joining
        self._by_role.pop(rank.member.role, None)

    def live(self, role: str) -> list[Rank]:
        """Return the ranks of one role whose process has not ended."""
        return [rank for rank in self.ranks_of(role) if not rank.ended]

    def running(self) -> list[Rank]:
        """Return the ranks whose process was ordered and may still run."""
        if "starting" not in self.startup.reached:
            return []
        hosts = self.registered - self.lost_hosts
        return [rank for rank in self.ranks.values() if not rank.ended and rank.host in hosts]

    def host_name(self, rank: Rank) -> str:
        """Return the name of a rank's host."""
        return self.order.hosts[rank.host].name

    def describe(self, rank: Rank) -> str:
        """Return a rank and its host as text: "worker/1 on node-b"."""
        return f"{rank.member} on {self.host_name(rank)}"

    @property
    def agents(self) -> list[Member]:
        """The agents that have registered and are not lost."""
        return [Member("agent", host) for host in sorted(self.registered - self.lost_hosts)]

    # ---- instructions ------------------------------------------------------------------------------------------

    @property
    def time(self) -> float:
        """Seconds since the epoch; never goes back within a job."""
        return self._wall + self.now

    def send(self, member: Member, message: JobMessage) -> None:
        """Send a message to one member."""
        self.instructions.append(SendMessage(member, message))

    def append_loss(self, rank: Rank, reason: str, *, residual: str = "") -> None:
        """Append the event of a rank's loss, once.

        Args:
            rank: the worker or server.
            reason: why it is lost.
            residual: of a worker, what is lost with it though the job continues.
        """
        if rank.loss_appended:
            return
        rank.loss_appended = True
        number, host = rank.member.rank, self.host_name(rank)
        if rank.member.role == "reader":
            return  # its notice says it
        if rank.member.role == "worker":
            self.append_event(events.WorkerLost(time=self.time, rank=number, host=host, reason=reason, lost=residual))
        else:
            self.append_event(events.ServerLost(time=self.time, rank=number, host=host, reason=reason))

    def append_event(self, event: events.AnyEvent) -> None:
        """Append an event to the log."""
        self.instructions.append(AppendEvent(event))

    def notice(self, text: str) -> None:
        """Append a sentence for people to the log."""
        self.append_event(events.Notice(time=self.time, text=text))

    def notice_once(self, key: tuple[str, object], text: str) -> None:
        """Append a sentence for people unless one with the same key was appended before."""
        if not self.has_noticed(key):
            self._noticed.add(key)
            self.notice(text)

    def has_noticed(self, key: tuple[str, object]) -> bool:
        """Whether `notice_once` was called with this key."""
        return key in self._noticed

    def failure_of(
        self, rank: Rank, exception: str, *, status: int = 0, code: str = "", exit: int = 1, hint: str = ""
    ) -> ProcessFailure:
        """Return a failure of a rank that its own agent cannot describe; the options are ProcessFailure's."""
        return ProcessFailure(
            member=str(rank.member), host=self.host_name(rank), status=status, time=self.time,
            step=rank.step, exception=exception, frames=[], tail=[], code=code, exit=exit, hint=hint,
        )  # fmt: skip

    # ---- states ------------------------------------------------------------------------------------------------

    def move(self, trigger: str) -> None:
        """Change the job's state by a trigger of `lifecycle.JOB` and append the new state to the log."""
        self.state = lifecycle.move(lifecycle.JOB, self.state, trigger)
        self._append_head_state("job", self.state, step=self.progress.reports.step)

    def append_coordinator_state(self, state: str, pid: int = 0) -> None:
        """Append the coordinator's own state to the log."""
        self._append_head_state("coordinator", state, pid=pid)

    def _append_head_state(self, role: str, state: str, *, pid: int = 0, step: int = 0) -> None:
        head = self.order.hosts[self.head].name
        self.append_event(
            events.StateChanged(time=self.time, role=role, rank=0, host=head, state=state, pid=pid, step=step)
        )

    def move_rank(self, rank: Rank, trigger: str, error: str = "") -> None:
        """Change a rank's state by a trigger of `lifecycle.RANK` and append the new state to the log."""
        rank.state = lifecycle.move(lifecycle.RANK, rank.state, trigger)
        self.append_state(rank, error)

    def append_state(self, rank: Rank, error: str = "") -> None:
        """Append a rank's state, with its step, to the log."""
        rank.appended_step, rank.appended_usage = rank.step, (rank.cpu, rank.memory, rank.gpu)
        if rank.computed + rank.waited > 0:
            rank.sync = round(100 * rank.waited / (rank.computed + rank.waited))
            rank.sends, rank.receives = (
                float(f"{moved / (rank.computed + rank.waited):.3g}") for moved in (rank.sent, rank.received)
            )
            rank.computed, rank.waited, rank.sent, rank.received = 0.0, 0.0, 0, 0
        self.append_event(
            events.StateChanged(
                time=self.time, role=rank.member.role, rank=rank.member.rank, host=self.host_name(rank),
                state=rank.state, pid=rank.pid, step=rank.step, last_error=error, staleness=rank.staleness,
                cpu=rank.cpu, memory=rank.memory, sync=rank.sync,
                sends=rank.sends, receives=rank.receives, parts=rank.parts, gpu=rank.gpu, gpu_memory=rank.gpu_memory,
            )
        )  # fmt: skip
