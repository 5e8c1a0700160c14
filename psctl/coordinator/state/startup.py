"""The start of a job, from the first agent to the first step.

Agents register; when all have, workers are started. Workers that use psctl join and `prepare`. When all ranks have
prepared the same model the plan is made; under ps its servers are started, and when all listen the shards are made. The
decision is sent to all; when all workers have their start values, they train. A script that never calls psctl stops at
"started".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from psctl.coordinator.state import (
    collective_losses,
    joining_workers,
    losses,
    lost_workers,
    outages,
    plan_check,
    reading_groups,
    returning_hosts,
    script_collectives,
    server_changes,
    sum_order,
    takeover,
)
from psctl.coordinator.state.instructions import MakePlan, MakeShards, PlanMade, ShardsMade
from psctl.coordinator.state.stalls import ClockPace
from psctl.job import events
from psctl.job.environment import worker_environment
from psctl.job.layout_comparison import difference
from psctl.job.process_messages import StopProcesses
from psctl.job.training_messages import Go, Leave, MemberReady, Prepare, Welcome, WorkerAt, WorkerListens, WorkersAt
from psctl.types import NO_SERVERS, Layout, Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

OPEN = (
    "network.encryption: off: gradients, values and stores cross between hosts unencrypted, over connections that are "
    "authenticated when they are made"
)

_SAME = "build the same model and optimizer on every rank"

LIBRARY = "native"
"""The strategy of libraries that sum gradients themselves: the engine's."""


class Startup(msgspec.Struct):
    """How far the current start of all processes is."""

    reached: dict[str, float] = msgspec.field(default_factory=dict)
    """Stage -> when it was first reached: starting, joined, prepared, planning, decided."""
    missing: dict[str, int] = msgspec.field(default_factory=dict)
    """Stage -> how many workers have not reached it: started, prepared, ready."""
    layout: Layout | None = None
    buffers: tuple[str, ...] = ()

    def count(self, stage: str) -> bool:
        """Count one more worker that has reached a stage; return whether it was the last."""
        self.missing[stage] -= 1
        return self.missing[stage] == 0


def start_job(job: JobState, pid: int) -> None:
    """Append the first event and wait for the agents."""
    hosts = [host.name for host in job.order.hosts]
    roles = [events.RoleOf("coordinator", 0, hosts[0])]
    roles += [events.RoleOf("worker", rank.member.rank, job.host_name(rank)) for rank in job.ranks_of("worker")]
    name = job.resume.checkpoint if job.resume is not None else ""
    job.append_event(events.Started(time=job.time, job=job.order.name, hosts=hosts, roles=roles, checkpoint=name))
    job.append_coordinator_state("running", pid)
    if not job.order.sealed and len(hosts) > 1:
        job.notice(OPEN)
    job.move("placed")


def on_register(job: JobState, member: Member, running: Collection[Member], *, restarted: bool = False) -> None:
    """An agent has registered; `running`: the job's processes on its host; `restarted`: its host's last one ended."""
    returned = member.rank in job.lost_hosts
    if restarted and not returned and job.ending is None:  # it dials again; its host must be no voter first
        losses.on_host_lost(job, member.rank, "its agent was started again")
        return
    outages.on_reached(job, member.rank)
    takeover.on_registered(job, member.rank)
    job.registered.add(member.rank)
    if job.ending is not None:
        job.lost_hosts.discard(member.rank)
        job.send(member, StopProcesses(0.0, "the job is ending"))
    elif job.state == "placing" and len(job.registered) == len(job.order.hosts):
        job.move("registered")
        job.startup.reached["starting"] = job.now
        order_workers(job)
    elif returned:
        returning_hosts.on_returned(job, member.rank, running)


def order_workers(job: JobState) -> None:
    """Start all workers."""
    seats, restarts = job.seats(), job.losses.survived + job.scaling.restarts
    for rank in job.ranks_of("worker"):
        server_changes.start_rank(job, rank, worker_environment(job.order, seats, rank.member.rank, restarts))


def order_servers(job: JobState, plan: PlanMade) -> None:
    """Start the plan's servers, and record the senders of checkpoints, which are known with them."""
    job.checkpoints.senders = {job.ranks_of("worker")[0].member}
    # Servers that hold tables already are used as well.
    server_changes.add_servers(job, plan.servers[len(job.ranks_of("server")) :])
    if plan.servers and plan.update == "server":
        job.checkpoints.senders |= {rank.member for rank in job.ranks_of("server")}


def on_started(job: JobState, rank: Rank, pid: int) -> None:
    """A process runs."""
    first = rank.pid == 0
    rank.pid = pid
    rank.last_message_at = rank.active_at = job.now
    if rank.state == "starting":
        job.move_rank(rank, "started")
    if first and rank.member.role == "worker" and job.startup.count("started") and job.state == "starting":
        job.move("started")


def on_joined(job: JobState, rank: Rank, pid: int) -> None:
    """A worker that uses psctl, or a server, has connected."""
    rank.joined = True
    if rank.state == "starting":
        on_started(job, rank, pid)  # its message was quicker than its agent's
    if rank.member.role == "reader":
        reading_groups.on_joined(job, rank)
        return
    if job.all_processes_end:
        job.send(rank.member, Leave("the job is ending" if job.ending is not None else "the job starts again"))
        return
    if rank.idle:
        job.send(rank.member, Leave("it has nothing to do"))  # it started after it was ordered to end
        return
    if job.training and rank.member.role == "worker":
        if collective_losses.is_collective(job):
            collective_losses.welcome_replacement(job, rank)
        else:
            (joining_workers.on_joined if rank.joining else lost_workers.welcome_replacement)(job, rank)
        return
    order, workers = job.order, job.ranks_of("worker")
    every, hosts = order.checkpoint.every_steps, [each.host for each in workers]
    job.send(
        rank.member,
        Welcome(job.division.world, order.seed, every, order.report_seconds, job.resume, hosts),
    )
    if rank.member.role == "worker":
        job.startup.reached.setdefault("joined", job.now)
        job.append_event(events.WorkerJoined(time=job.time, rank=rank.member.rank, host=job.host_name(rank)))
        script_collectives.on_joined(job, rank)


def on_prepared(job: JobState, rank: Rank, message: Prepare) -> None:
    """A worker has reached `prepare`."""
    if rank.prepared is not None or not rank.joined or job.all_processes_end:
        return
    rank.prepared = message
    job.startup.reached.setdefault("prepared", job.now)
    if rank.state == "running":
        job.move_rank(rank, "prepared")
    if rank.joining:
        joining_workers.on_prepared(job, rank, message)
        return
    if job.training:  # a replacement, while others train
        topic = collective_losses if collective_losses.is_collective(job) else lost_workers
        failure = topic.on_prepared(job, rank, message)
        if failure is not None:
            losses.fail(job, failure)
        return
    workers = job.ranks_of("worker")
    zero = workers[0].prepared
    last = job.startup.count("prepared")
    if zero is None:
        return
    for each in workers if rank is workers[0] else [rank]:
        text = difference(zero, each.prepared) if each.prepared is not None else ""
        if text:
            failure = job.failure_of(each, f"the model on {each.member} differs from worker/0's: {text}", hint=_SAME)
            losses.fail(job, failure)
            return
    if last:
        job.startup.reached["planning"] = job.now
        if zero.follows is not None:
            job.progress.begin_after(job, zero.follows)
        if job.plan is None and job.follows_library and not zero.hooked:
            _plan_library(job)
        elif job.plan is None:
            on_gpus = any(each.prepared is not None and each.prepared.on_gpus for each in workers)
            job.instructions.append(MakePlan(zero.layout, job.order, on_gpus, zero.hooked))
        else:  # after a restart, of which only the lost processes' places are new
            _make_shards(job)


def _plan_library(job: JobState) -> None:
    """Leave the sums to the library whose loop trains; no plan is announced, for nothing is chosen."""
    asked = job.order.strategy
    if asked in ("auto", LIBRARY):
        job.plan = PlanMade(LIBRARY, "worker", [], None)
        order_servers(job, job.plan)
        _make_shards(job)
        return
    text = f"sync.strategy is {asked}, but the loop is a library's, which sums gradients itself"
    hint = "give the callback the DistributedDataParallel to accelerate, or remove the strategy from the job file"
    losses.fail(job, job.failure_of(job.ranks_of("worker")[0], text, hint=hint))


def on_plan_made(job: JobState, plan: PlanMade) -> None:
    """The strategy is chosen: start its servers, or decide at once where there are none."""
    if job.ending is not None or job.restart is not None or "planning" not in job.startup.reached:
        return  # it was requested before a loss
    if plan.problem or plan.event is None:
        losses.fail(job, job.failure_of(job.ranks_of("worker")[0], f"no plan could be made: {plan.problem}"))
        return
    job.plan = plan
    sum_order.choose_groups(job)
    job.append_event(replace(plan.event, sums=sum_order.describe(job)))
    order_servers(job, plan)
    _make_shards(job)


def _make_shards(job: JobState) -> None:
    """Have shards made, once all workers have prepared and all servers listen; decide at once without servers."""
    servers, reached = job.ranks_of("server"), job.startup.reached
    zero = job.ranks_of("worker")[0].prepared
    if "planning" not in reached or job.plan is None or zero is None or "decided" in reached:
        return
    if not job.plan.servers:
        _decide(job, ShardsMade([], []))
    elif all(each.address for each in servers):
        hosts = {each.host for each in (*job.ranks_of("worker"), *servers)}
        job.instructions.append(MakeShards(zero.layout, len(servers), len(hosts) == 1))


def on_ready(job: JobState, rank: Rank, message: MemberReady) -> None:
    """A server listens, or a worker has its start values."""
    server = rank.member.role == "server"
    if job.all_processes_end or rank.ready or (server and message.address is None):
        return
    rank.ready, rank.address = True, message.address
    if server and job.shards.placement is None and "decided" in job.startup.reached:
        return  # it holds tables only
    if job.training:
        (server_changes if server else lost_workers).on_ready(job, rank)
        collective_losses.on_ready(job)
    elif server:
        _make_shards(job)
    elif "decided" in job.startup.reached and job.startup.count("ready"):
        _start_training(job)


def on_listens(job: JobState, rank: Rank, message: WorkerListens) -> None:
    """A worker listens for others: send addresses.

    Workers of a schedule receive all addresses once all workers listen; under ps, workers of a group receive those
    known so far: not those of a replacement that was moved to this host, which is of another group, and those of other
    hosts only where they listen for them, as within a rack.
    """
    if message.epoch != job.planes.epoch:
        return  # a later ConnectAgain is on its way
    rank.listens = message
    workers = job.ranks_of("worker")
    if job.host_groups:
        number = rank.member.rank
        group = next((group for group in job.host_groups if number in group), (number,))
        near = [
            each for each in workers
            if each.listens and not each.ended and (each.host == rank.host or each.listens.address is not None)
        ]  # fmt: skip
        workers = [each for each in near if each.member.rank in group]
    if job.all_processes_end or not all(each.listens for each in workers):
        return
    for one in workers:
        at = [
            WorkerAt(
                each.member.rank, each.member.incarnation, each.listens.address,
                each.listens.secret if each.host == one.host else b"",
            )
            for each in workers if each.listens is not None
        ]  # fmt: skip
        job.send(one.member, WorkersAt(at, message.epoch))


def on_shards_made(job: JobState, made: ShardsMade) -> None:
    """The shards are made: place them and decide."""
    reached = job.startup.reached
    if not job.all_processes_end and "planning" in reached and "decided" not in reached:
        _decide(job, made)


def _decide(job: JobState, made: ShardsMade) -> None:
    workers = job.ranks_of("worker")
    zero = workers[0].prepared
    assert zero is not None
    assert job.plan is not None
    job.startup.layout, job.startup.buffers = zero.layout, zero.buffers
    servers = job.ranks_of("server") if job.plan.servers else []  # else there may be some that hold tables only
    assignment = server_changes.place_shards(job, made) if servers else NO_SERVERS
    decision = server_changes.decision(job, job.resume, assignment)
    job.checkpoints.senders |= {rank.member for rank in workers}  # each has its random generators' states
    job.startup.reached["decided"] = job.now
    for rank in [*servers, *workers]:
        rank.decided = True
        job.send(rank.member, decision)


def _start_training(job: JobState) -> None:
    progress = job.progress
    job.training = True
    plan_check.begin(job)
    job.stalls.pace = ClockPace(job.now, progress.first_step)
    progress.reports.rates(job.now)  # the time before training counts for no rate
    if job.resume is not None or job.losses.survived or job.scaling.restarts:
        name = job.resume.checkpoint if job.resume else ""
        lost, reason = progress.lost_steps, job.losses.reason
        job.append_event(
            events.Restored(time=job.time, checkpoint=name, step=progress.first_step, lost=lost, reason=reason)
        )
        job.losses.reason = ""
    for rank in [*job.ranks_of("server"), *job.ranks_of("worker")]:
        job.send(rank.member, Go())
        rank.moved_at, rank.step = job.now, progress.first_step
        if rank.state == "waiting":
            job.move_rank(rank, "go")
