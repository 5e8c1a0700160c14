"""The state machine of a job: it takes inputs and returns instructions. No socket, file, clock or thread.

It decides; the coordinator's process (coordinator/main.py) sends, writes and keeps time. The same inputs at the same
times give the same instructions. This module passes each input to its topic, a module of this package, and refuses
messages that cannot be true of the job as it is: the table in job_permits.py has roles and states of connections
only.
"""

from __future__ import annotations

from collections.abc import Iterable

from psctl.coordinator.state import (
    checkpoints,
    collective_losses,
    deadlines,
    ending,
    example_division,
    joining_workers,
    losses,
    lost_workers,
    outages,
    partitions,
    plan_check,
    progress,
    reading_groups,
    restart,
    returning_hosts,
    scaling,
    script_collectives,
    server_changes,
    startup,
    table_placement,
    takeover,
)
from psctl.coordinator.state.instructions import (
    AgentsSilent,
    CheckpointCommitted,
    CheckpointCopyFailed,
    CheckpointUploadEnded,
    CloseConnection,
    CollectivesPlanned,
    Connected,
    ConnectionLost,
    Input,
    Instruction,
    LeaderWaited,
    MessageReceived,
    PlanMade,
    PlanRemade,
    ProtocolBroken,
    RestorableFound,
    ShardsMade,
    TakenOver,
    Tick,
)
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.coordinator.streams import shard_grants
from psctl.job import lifecycle
from psctl.job.checkpoint_messages import CheckpointCopyDone, CutPosition, SaveBegin, SaveEnd
from psctl.job.membership_messages import (
    LostWorkerClocks,
    MembersSet,
    NextClock,
    ProtocolViolation,
    ServerUnreachable,
    ShardCaughtUp,
    ShardHandedOver,
    StepUnfit,
)
from psctl.job.message import JobMessage
from psctl.job.process_messages import (
    AgentNotice,
    HostSample,
    HostWanted,
    OutputLines,
    ProcessExited,
    ProcessStarted,
    Register,
    ScaleWanted,
    Stacks,
    StopWanted,
)
from psctl.job.reader_messages import GroupReport
from psctl.job.session_messages import ResumeSession
from psctl.job.stream_messages import BatchTaken, ShardWanted, StreamOpened
from psctl.job.table_server_messages import ScriptOpensStore, TablesReady, TablesWanted
from psctl.job.training_messages import (
    BackwardStepsChosen,
    BucketSizeChosen,
    Heartbeat,
    Join,
    MemberReady,
    NotReplaceable,
    PlaneBroken,
    Prepare,
    RankListens,
    RanksWanted,
    Resume,
    ScriptFinished,
    WorkerListens,
    WorkerReport,
)
from psctl.orders import JobOrder
from psctl.types import Member

MOST_BYTES = 1 << 42
"""Bytes of parameters, at four bytes an element: 10^12 elements. More would be millions of shards."""

AHEAD = 1 << 20
"""Steps by which a checkpoint may be ahead of the last report: workers report a few times a second."""

MOST_WAITING = 1 << 17
"""Steps whose numbers may wait for ranks that have not reached them."""


class JobStateMachine:
    """The state machine of one job.

    Args:
        order: the job.
        grace: seconds between TERM and KILL.
        resume: where the job continues; None when it starts anew.
        now: seconds that only go forward; every later time is from the same clock.
        wall: added to them gives seconds since the epoch.
        pid: of the coordinator's process, for people.
    """

    def __init__(
        self, order: JobOrder, grace: float, resume: Resume | None, now: float, wall: float, pid: int = 0
    ) -> None:
        self.job = JobState(order, grace, resume, now, wall)
        self._pid = pid

    @property
    def state(self) -> str:
        """The job's state."""
        return self.job.state

    @property
    def over(self) -> bool:
        """Whether the last event is in the log."""
        return self.job.state in lifecycle.OVER

    def why_not_expected(self, member: Member) -> str:
        """Return why this member may not connect, or "" when it may."""
        job = self.job
        if member.role == "agent":
            known = member.rank < len(job.order.hosts)
        else:
            newest = job.newest_incarnation(member.role, member.rank)
            if newest is not None and newest != member.incarnation:
                return f"{member} is of incarnation {member.incarnation}, {newest} was started"
            known = member in job.ranks
            if known and job.ranks[member].ended:
                return f"{member} was lost"
        if member in job.refused:
            return f"{member} broke the protocol before"
        return "" if known else f"{member} is not of this job"

    def why_refused(self, member: Member, message: JobMessage) -> str:
        """Return why a message cannot be true of the job as it is, or ""; may be called on any thread."""
        job = self.job
        match message:
            case SaveBegin(step=step):
                return _save_refused(job, member, step)
            case Prepare(layout=layout):
                many = 4 * sum(each.size for each in layout.parameters) > MOST_BYTES
                return f"parameters of more than {MOST_BYTES} bytes" if many else ""
            case WorkerReport(steps=steps):
                waiting = job.progress.reports.kept + len(steps)
                return "" if waiting <= MOST_WAITING else f"numbers of {waiting} steps, more than {MOST_WAITING}"
            case LostWorkerClocks():
                return _shards_refused(job, {*message.clocks, *message.versions, *message.separate_clocks})
            case ShardCaughtUp(shard=shard, server=server, tables=tables):
                known = job.newest_incarnation("server", server) is not None
                why = _shards_refused(job, [shard], tables=tables)
                return why or ("" if known else f"server/{server}, which the job never had")
            case ShardHandedOver(shard=shard, tables=tables):
                return _shards_refused(job, [shard], tables=tables)
            case StreamOpened() | ShardWanted() | BatchTaken():
                return shard_grants.why_refused(job, member.rank, message)
            case ProtocolViolation(member=other):
                return "" if other.role in ("worker", "reader") else f"a complaint about {other}"
        return ""

    def start(self, now: float) -> list[Instruction]:
        """Begin; return the first instructions."""
        self.job.now = now
        startup.start_job(self.job, self._pid)
        return self._take_instructions()

    def handle(self, given: Input, now: float) -> list[Instruction]:
        """Take an input; return what is to be done, in order."""
        job = self.job
        before, job.now = job.now, max(job.now, now)
        if self.over:
            return []
        match given:
            case Tick():
                deadlines.on_tick(job)
            case MessageReceived(member=member, message=message):
                self._on_message(member, message)
            case Connected(member=member):
                if member in job.ranks:  # an agent counts when it registers
                    rank = job.ranks[member]
                    rank.connected, rank.lost_at, rank.last_message_at = True, None, now
                    takeover.on_connected(job, member)
            case ConnectionLost(member=member, reason=reason):
                losses.on_connection_lost(job, member, reason)
            case ProtocolBroken(member=member, reason=reason):
                losses.on_protocol_broken(job, member, reason)
            case AgentsSilent(seconds=seconds):
                for host, why in outages.on_silence(job, seconds).items():
                    losses.on_host_lost(job, host, why)
            case PlanMade():
                startup.on_plan_made(job, given)
            case PlanRemade():
                plan_check.on_remade(job, given)
            case CollectivesPlanned():
                script_collectives.on_planned(job, given)
            case ShardsMade():
                startup.on_shards_made(job, given)
            case CheckpointCommitted():
                checkpoints.on_committed(job, given)
                table_placement.on_saved(job, given)
            case CheckpointCopyFailed(step=step, agent=agent, problem=problem):
                checkpoints.on_copied(job, agent, step, problem)
            case CheckpointUploadEnded():
                checkpoints.on_uploaded(job, given)
            case RestorableFound():
                restart.on_restorable(job, given)
            case LeaderWaited(seconds=seconds):
                outages.extend_waits(job, seconds)
            case TakenOver():
                takeover.on_taken_over(job, given, job.now - before)
        self._advance(patient=not isinstance(given, Tick))
        return self._take_instructions()

    def _advance(self, patient: bool) -> None:
        """Go on with everything in progress.

        Args:
            patient: more messages may arrive at once; wait for them before shards move.
        """
        job = self.job
        failure = lost_workers.advance(job)
        if failure is not None:
            losses.fail(job, failure, counted=True)
        joining_workers.advance(job)
        shard_grants.advance(job)
        late = server_changes.advance(job, patient) or table_placement.advance(job, patient)
        if late:
            text = f"{late} did not hand its shards over within {server_changes.TRANSFER:.0f} s"
            losses.fail(job, job.failure_of(job.ranks_of("server")[0], text, code="peer-lost"))
        checkpoints.commit_complete(job)
        restart.advance(job)
        reading_groups.advance(job)
        ending.advance(job)

    def _take_instructions(self) -> list[Instruction]:
        instructions, self.job.instructions = self.job.instructions, []
        return instructions

    def _on_message(self, member: Member, message: JobMessage) -> None:
        job = self.job
        if member in job.refused:
            return  # it was sent before the connection was closed
        why = self.why_refused(member, message)
        if why:
            why = f"{type(message).__name__}: {why}"
            job.instructions.append(CloseConnection(member, why))
            losses.on_protocol_broken(job, member, why)
        elif isinstance(message, StopWanted) and member.role in ("agent", "coordinator"):
            ending.stop(job, message)
        elif member.role == "agent":
            self._on_agent_message(member, message)
        elif member in job.ranks:
            self._on_rank_message(job.ranks[member], message)

    def _on_agent_message(self, agent: Member, message: JobMessage) -> None:
        job = self.job
        match message:
            case Register(running=running, restarted=restarted):
                startup.on_register(job, agent, running, restarted=restarted)
            case ProcessExited(member=member) if agent.rank in job.lost_hosts:
                returning_hosts.on_process_ended(job, agent.rank, member)
            case ProcessStarted(member=member, pid=pid) if self._is_on_host(agent, member):
                startup.on_started(job, job.ranks[member], pid)
            case ProcessExited(member=member) if self._is_on_host(agent, member):
                progress.append_last_steps(job, job.ranks[member], message)
                takeover.on_exited(job, job.ranks[member])
                losses.on_exited(job, job.ranks[member], message)
            case OutputLines(member=member) if self._was_on_host(agent, member):
                progress.on_output(job, job.order.hosts[agent.rank].name, message)
            case Stacks(member=member) if self._is_on_host(agent, member):
                job.stalls.on_stacks(job, job.ranks[member], message)
            case AgentNotice(text=text):
                job.notice_once(("agent", text), text)
            case HostSample():
                progress.on_host_sample(job, agent, message)
            case HostWanted():
                returning_hosts.on_host_wanted(job, agent, message)
            case ScaleWanted():
                scaling.on_scale_wanted(job, agent, message)
            case CheckpointCopyDone(step=step, problem=problem):
                checkpoints.on_copied(job, agent, step, problem)
            case _:
                self._notice_unexpected(agent, message)

    def _is_on_host(self, agent: Member, member: Member) -> bool:
        """Whether this rank is on that agent's host; an agent reports its own host only."""
        return member in self.job.ranks and self.job.ranks[member].host == agent.rank

    def _was_on_host(self, agent: Member, member: Member) -> bool:
        """The same, also for an earlier incarnation, whose last lines may arrive late."""
        newest = self.job.newest_incarnation(member.role, member.rank)
        return newest is not None and self._is_on_host(agent, Member(member.role, member.rank, newest))

    def _on_rank_message(self, rank: Rank, message: JobMessage) -> None:
        job = self.job
        match message:
            case Join(pid=pid):
                startup.on_joined(job, rank, pid)
            case MemberReady():
                startup.on_ready(job, rank, message)
            case ResumeSession():
                checkpoints.drop_interrupted(job, rank, message.saving)
            case Heartbeat():
                progress.on_heartbeat(job, rank, message)
            case CutPosition():
                checkpoints.on_position(job, rank, message)
            case SaveBegin(step=step):
                if not message.tables:  # these were requested
                    checkpoints.on_part_begun(job, rank, step)
                    if (rank.member.role, rank.member.rank) == ("worker", 0):
                        table_placement.ask_parts(job, step)
            case SaveEnd(step=step):
                checkpoints.on_pause(job, rank, step, message.pause)
                checkpoints.on_part_ended(job, rank, step, of_tables=message.tables)
            case ServerUnreachable():
                partitions.on_unreachable(job, rank, message)
            case ProtocolViolation(member=other, reason=reason):
                if other in job.ranks:  # else it is an earlier incarnation, which is over
                    losses.on_protocol_broken(job, other, f"{reason} (to {rank.member})")
            case TablesWanted():
                table_placement.on_tables_wanted(job, rank)
            case GroupReport():
                reading_groups.on_report(job, rank, message)
            case _ if rank.member.role == "worker":
                self._on_worker_message(rank, message)
            case _:
                self._on_server_message(rank, message)

    def _on_worker_message(self, worker: Rank, message: JobMessage) -> None:
        job = self.job
        match message:
            case Prepare():
                startup.on_prepared(job, worker, message)
            case WorkerReport():
                progress.on_report(job, worker, message)
                example_division.on_report(job, worker, message)
                plan_check.on_report(job, worker, message)
            case NextClock():
                example_division.on_next_clock(job, worker, message)
            case WorkerListens():
                startup.on_listens(job, worker, message)
            case RanksWanted():
                script_collectives.on_wanted(job, worker)
            case RankListens():
                script_collectives.on_listens(job, worker, message)
            case ScriptOpensStore():
                job.tables.of_script = True
            case PlaneBroken():
                collective_losses.on_plane_broken(job, worker, message)
            case NotReplaceable():
                collective_losses.on_not_replaceable(job, worker, message)
            case BucketSizeChosen():
                progress.on_bucket_size(job, message)
            case BackwardStepsChosen():
                progress.on_backward_steps(job, message)
            case StepUnfit():
                restart.on_step_unfit(job, worker, message)
            case StreamOpened() | ShardWanted() | BatchTaken():
                shard_grants.on_message(job, worker, message)
            case ScriptFinished(step=step):
                progress.on_script_finished(job, worker, step)
                shard_grants.on_finished(job)
            case _:
                self._notice_unexpected(worker.member, message)

    def _on_server_message(self, server: Rank, message: JobMessage) -> None:
        job = self.job
        match message:
            case LostWorkerClocks():
                lost_workers.on_clocks(job, message)
            case ShardCaughtUp():
                server_changes.on_caught_up(job, message)
            case ShardHandedOver():
                server_changes.on_handed_over(job, server, message)
            case MembersSet():
                example_division.on_members_set(job, server, message)
            case TablesReady():
                table_placement.on_ready(job, server, message)
            case _:
                self._notice_unexpected(server.member, message)

    def _notice_unexpected(self, member: Member, message: JobMessage) -> None:
        text = f"{member} sent a {type(message).__name__}, which it may not send"
        self.job.notice_once(("unasked", str(member)), text)


def _save_refused(job: JobState, member: Member, step: int) -> str:
    """Called on the threads of connections too: it reads attributes, and copies the set in one operation."""
    reported = job.progress.reports.step
    if step > reported + AHEAD:
        return f"step {step}, where the furthest reported step is {reported}"
    sources = {source.rank for source in list(job.checkpoints.senders) if source.role == "worker"}
    rank = job.ranks.get(member)
    late = rank is not None and rank.ended  # it sent this before it was lost
    return "" if member.role == "server" or member.rank in sources or late else "it has no part in checkpoints"


def _shards_refused(job: JobState, shards: Iterable[int], *, tables: bool = False) -> str:
    placement = server_changes.placement_of(job, tables=tables)
    if placement is None or not placement.chains:
        return ""  # no shards are placed yet, or all processes start again
    count = len(placement.chains)
    return next((f"shard {shard} of {count}" for shard in sorted(shards) if not 0 <= shard < count), "")
