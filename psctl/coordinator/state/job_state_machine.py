"""The coordinator's mind: happenings in, instructions out. No socket, file, clock or thread.

    starting    from the first agent to the first step            table     what is known, what goes out
    training    steps, numbers, checkpoints, cuts                 lifecycle the states, as tables
    losses      who is gone: survived, or the job's end           watch     deadlines
    restarting  all start again from the last checkpoint          leaving   workers that go while others still train
    surviving   losses that nothing is lost by                    cutting   a worker's death under ps
    sharding    servers that die, come and go                     holding   which server has which shard
    scaling     psctl scale: more or fewer of them                tables    which servers hold tables
    dividing    who shares the examples when there is one less    pace      how long clocks take
    late        whom a clock waits for
    ending      who failed first, stops, phases of the end

It decides; the shell (coordinator/main.py) acts: it sends, writes and keeps time. The same happenings at the same
times give the same instructions.
"""

from __future__ import annotations

from psctl.coordinator.state import (
    claim_checks,
    deadlines,
    death_cut,
    ending,
    example_division,
    losses,
    restarting,
    scaling,
    server_changes,
    stacks,
    startup,
    table_placement,
    training,
)
from psctl.coordinator.state.instructions import (
    CheckpointCommitted,
    CheckpointCopySent,
    CloseConnection,
    Connected,
    ConnectionLost,
    Input,
    Instruction,
    MessageReceived,
    PlanMade,
    ProtocolBroken,
    RestorableFound,
    ShardsMade,
    Tick,
)
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job import lifecycle
from psctl.job.checkpoint_messages import CheckpointCopyDone, CutPosition, SaveBegin, SaveEnd
from psctl.job.membership_messages import (
    LostWorkerClocks,
    NextClock,
    ProtocolViolation,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
    StepUnfit,
)
from psctl.job.message import JobMessage
from psctl.job.process_messages import (
    HostSample,
    OutputLines,
    ProcessExited,
    ProcessStarted,
    Register,
    ScaleWanted,
    Stacks,
    StopWanted,
)
from psctl.job.table_server_messages import TablesCaughtUp, TablesHandedOver, TablesReady, TablesWanted
from psctl.job.training_messages import (
    Heartbeat,
    Join,
    MemberReady,
    Prepare,
    Resume,
    ScriptFinished,
    WorkerListens,
    WorkerReport,
)
from psctl.orders import JobOrder
from psctl.types import Member


class JobStateMachine:
    """One job's mind.

    Args:
        order: the job.
        grace: seconds between TERM and KILL.
        resume: where the job goes on; None when it starts anew.
        now: seconds that only go forward; every later time is from the same clock.
        wall: what to add to them to get seconds since the epoch.
        pid: of the coordinator's process, for people.
    """

    def __init__(
        self, order: JobOrder, grace: float, resume: Resume | None, now: float, wall: float, pid: int = 0
    ) -> None:
        self._job = JobState(order, grace, resume, now, wall)
        self._pid = pid

    @property
    def state(self) -> str:
        """The job's state."""
        return self._job.state

    @property
    def over(self) -> bool:
        """Is the last event out?"""
        return self._job.state in lifecycle.OVER

    def expects(self, member: Member) -> str:
        """Return why this member may not connect, or "" when it may."""
        if member.role == "agent":
            known = member.rank < len(self._job.order.hosts)
        else:
            newest = self._job.newest(member.role, member.rank)
            if newest is not None and newest != member.incarnation:
                return f"{member} is of incarnation {member.incarnation}, {newest} was started"
            known = member in self._job.ranks
        if member in self._job.refused:
            return f"{member} broke the protocol before"
        return "" if known else f"{member} is not of this job"

    def refuses(self, member: Member, message: JobMessage) -> str:
        """Return why a member may not say this now, or ""; may be called on any thread."""
        return claim_checks.refused(self._job, member, message)

    def start(self, now: float) -> list[Instruction]:
        """Begin; return the first instructions."""
        self._job.now = now
        startup.begin(self._job, self._pid)
        return self._taken()

    def handle(self, happening: Input, now: float) -> list[Instruction]:
        """Take in what happened; return what is to be done, in order."""
        job = self._job
        job.now = max(job.now, now)
        if self.over:
            return []
        match happening:
            case Tick():
                deadlines.tick(job)
            case MessageReceived(member=member, message=message):
                self._heard(member, message)
            case Connected(member=member) if member in job.ranks:
                job.ranks[member].connected, job.ranks[member].heard = True, now
            case ConnectionLost(member=member, reason=reason):
                losses.disconnected(job, member, reason)
            case ProtocolBroken(member=member, reason=reason):
                losses.broke(job, member, reason)
            case PlanMade():
                startup.plan_made(job, happening)
            case ShardsMade():
                startup.shards_made(job, happening)
            case CheckpointCommitted():
                training.written(job, happening)
            case CheckpointCopySent():
                training.copied(job, happening)
            case RestorableFound():
                restarting.restorable(job, happening)
            case Connected():
                pass  # an agent; it counts when it registers
        self._move(isinstance(happening, Tick))
        training.commit_sent(job)
        restarting.advance(job)
        ending.advance(job)
        return self._taken()

    def _move(self, late: bool) -> None:
        """Go on with cuts and with shards that move; `late`: with what has come up to now."""
        job = self._job
        failure = death_cut.advance(job)
        if failure is not None:
            losses.fail(job, failure, counted=True)
        slow = server_changes.advance(job, patient=not late) or table_placement.move(job, patient=not late)
        if slow:
            text = f"{slow} did not hand its shards over within {server_changes.HAND_OVER:.0f} s"
            losses.fail(job, job.failure(job.of("server")[0], text, code="peer-lost"))

    def _taken(self) -> list[Instruction]:
        out, self._job.out = self._job.out, []
        return out

    def _heard(self, member: Member, message: JobMessage) -> None:
        job = self._job
        if member in job.refused:
            return  # it was on its way when the connection was closed
        why = self.refuses(member, message)
        if why:
            why = f"{type(message).__name__}: {why}"
            job.out.append(CloseConnection(member, why))
            losses.broke(job, member, why)
            return
        match message:
            case StopWanted() if member.role in ("agent", "coordinator"):
                ending.stop(job, message)
            case _ if member.role == "agent":
                self._from_agent(member, message)
            case _ if member in job.ranks:
                self._from_rank(job.ranks[member], message)

    def _from_agent(self, agent: Member, message: JobMessage) -> None:
        job = self._job
        match message:
            case Register():
                startup.register(job, agent, message)
            case ProcessStarted(member=member, pid=pid) if self._on(agent, member):
                startup.started(job, job.ranks[member], pid)
            case ProcessExited(member=member) if self._on(agent, member):
                losses.exited(job, job.ranks[member], message)
            case OutputLines(member=member) if self._was_on(agent, member):
                training.lines(job, job.order.hosts[agent.rank].name, message)
            case Stacks(member=member) if self._on(agent, member):
                stacks.heard(job, job.ranks[member], message)
            case HostSample():
                training.sample(job, agent, message)
            case ScaleWanted():
                scaling.wanted(job, agent, message)
            case CheckpointCopyDone():
                training.copied(job, message)
            case _:
                job.say_once(("unasked", str(agent)), f"{agent} sent a {type(message).__name__}, which is not its part")

    def _on(self, agent: Member, member: Member) -> bool:
        """Does this rank sit on that agent's host? An agent speaks for its own host only."""
        return member in self._job.ranks and self._job.ranks[member].host == agent.rank

    def _was_on(self, agent: Member, member: Member) -> bool:
        """The same of an earlier start of a rank, whose last lines may come late."""
        newest = self._job.newest(member.role, member.rank)
        return newest is not None and self._on(agent, Member(member.role, member.rank, newest))

    def _from_rank(self, rank: Rank, message: JobMessage) -> None:
        job = self._job
        match message:
            case Join(pid=pid):
                startup.joined(job, rank, pid)
            case Prepare() if rank.member.role == "worker":
                startup.prepared(job, rank, message)
            case MemberReady():
                startup.ready(job, rank, message)
            case WorkerReport() if rank.member.role == "worker":
                training.report(job, rank, message)
            case Heartbeat():
                training.beat(job, rank, message)
            case CutPosition():
                training.position(job, rank, message)
            case SaveBegin(step=step) if not message.tables:  # those were asked for
                training.save_begun(job, rank, step)
                if (rank.member.role, rank.member.rank) == ("worker", 0):
                    table_placement.save(job, step)
            case SaveEnd(step=step):
                training.save_ended(job, rank, step, of_tables=message.tables)
            case LostWorkerClocks() if rank.member.role == "server":
                death_cut.held(job, message)
            case NextClock() if rank.member.role == "worker":
                example_division.drawn(job, rank, message)
            case ShardCaughtUp() if rank.member.role == "server":
                server_changes.caught_up(job, message)
            case ShardHandedOver() if rank.member.role == "server":
                server_changes.handed_over(job, rank, message)
            case ServerUnreachable():
                server_changes.unreachable(job, rank, message)
            case ProtocolViolation(member=other, reason=reason) if other in job.ranks:
                losses.broke(job, other, f"{reason} (to {rank.member})")
            case ProtocolViolation():
                pass  # an earlier start of that rank, which is over
            case WorkerListens() if rank.member.role == "worker":
                startup.listens(job, rank, message)
            case TablesWanted() if rank.member.role == "worker":
                table_placement.wanted(job, rank, lambda hosts: startup.enlist(job, hosts))
            case TablesReady() | TablesCaughtUp() | TablesHandedOver() if rank.member.role == "server":
                table_placement.heard(job, rank, message)
            case SaveBegin():
                pass
            case StepUnfit() if rank.member.role == "worker":
                restarting.unfit(job, rank, message)
            case ScriptFinished(step=step) if rank.member.role == "worker":
                training.finished(job, rank, step)
            case _:
                name = type(message).__name__
                job.say_once(("unasked", str(rank.member)), f"{rank.member} sent a {name}, which is not its part")
