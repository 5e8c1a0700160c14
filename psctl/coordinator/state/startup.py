"""From the first agent to the first step.

Agents register; when all have, workers are ordered. Those that know psctl join and `prepare`; when all ranks prepared
the same model the plan is made; under ps its servers are ordered, and when all listen the shards are cut; the decision
goes to everyone; when all workers have their start values: go. A script that never calls psctl stops at "ordered".
"""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state import death_cut, losses, server_changes, sum_order, table_placement
from psctl.coordinator.state.clock_pace import ClockPace
from psctl.coordinator.state.instructions import MakePlan, MakeShards, PlanMade, ShardsMade, StartMember
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job import events
from psctl.job.environment import server_environment, worker_environment
from psctl.job.layout_comparison import difference
from psctl.job.process_messages import Register, StopProcesses
from psctl.job.training_messages import Go, Leave, MemberReady, Prepare, Welcome, WorkerAt, WorkerListens, WorkersAt
from psctl.types import NO_SERVERS, Member


def begin(job: JobState, pid: int) -> None:
    """The coordinator is up: first event, and wait for the agents."""
    hosts = [host.name for host in job.order.hosts]
    roles = [events.RoleOf("coordinator", 0, hosts[0])]
    roles += [events.RoleOf("worker", rank.member.rank, job.host(rank)) for rank in job.of("worker")]
    job.append(events.Started(time=job.time, job=job.order.name, hosts=hosts, roles=roles))
    job.tell_coordinator("running", pid)
    job.move("placed")


def register(job: JobState, member: Member, message: Register) -> None:
    """An agent is there."""
    back = member.rank in job.lost_hosts
    job.registered[member.rank] = message
    if job.ending is not None:
        job.lost_hosts.discard(member.rank)
        job.tell(member, StopProcesses(0.0, "the job is ending"))
    elif job.state == "placing" and len(job.registered) == len(job.order.hosts):
        job.move("registered")
        job.first["starting"] = job.now
        order_workers(job)
    elif back:
        job.tell(member, StopProcesses(0.0, "this host was lost to the job, which goes on without it"))


def order_workers(job: JobState) -> None:
    """Have all workers started."""
    seats = job.seats()
    for rank in job.of("worker"):
        _order(job, rank, worker_environment(job.order, seats, rank.member.rank, job.losses + job.scalings))


def order_servers(job: JobState, plan: PlanMade) -> None:
    """Have the plan's servers started; who sends parts of checkpoints is known with them."""
    job.saves.sources = {job.of("worker")[0].member}
    if plan.servers:
        enlist(job, plan.servers[len(job.of("server")) :])  # those that hold tables already serve as well
    if plan.servers and plan.update == "server":
        job.saves.sources |= {rank.member for rank in job.of("server")}


def enlist(job: JobState, hosts: list[int]) -> None:
    """Have further servers started on these hosts."""
    there = [rank.host for rank in job.of("server")]
    all_of_them = there + hosts
    for number, host in enumerate(hosts, len(there)):
        rank = job.add("server", number, host, there.count(host))
        there.append(host)
        _order(job, rank, server_environment(job.order, job.order.hosts[host], all_of_them.count(host)))


def _order(job: JobState, rank: Rank, environment: dict[str, str]) -> None:
    job.tell_state(rank)
    job.out.append(StartMember(rank.member, len(job.of("worker")), rank.host, rank.local_rank, environment))


def started(job: JobState, rank: Rank, pid: int) -> None:
    """A process runs."""
    first = rank.pid == 0
    rank.pid = pid
    rank.heard = rank.active = job.now
    if rank.state == "starting":
        job.move_rank(rank, "started")
    if first and rank.member.role == "worker" and job.reaches("started") and job.state == "starting":
        job.move("started")


def joined(job: JobState, rank: Rank, pid: int) -> None:
    """A process of the job speaks psctl."""
    rank.joined = True
    if rank.state == "starting":
        started(job, rank, pid)  # its own word was quicker than its agent's
    if job.leaving:
        job.tell(rank.member, Leave("the job is ending" if job.ending is not None else "the job starts again"))
        return
    if job.training and rank.member.role == "worker":
        death_cut.welcome(job, rank)
        return
    order = job.order
    world = len(job.of("worker"))
    every, hosts = order.checkpoint.every_steps, [each.host for each in job.of("worker")]
    welcome = Welcome(world, order.seed, every, order.report_seconds, job.resume, hosts, job.training)
    job.tell(rank.member, welcome)
    table_placement.advance(job)
    if rank.member.role == "worker":
        job.first.setdefault("joined", job.now)
        job.append(events.WorkerJoined(time=job.time, rank=rank.member.rank, host=job.host(rank)))


def prepared(job: JobState, rank: Rank, message: Prepare) -> None:
    """A worker reached `prepare`."""
    if rank.prepared is not None or not rank.joined or job.leaving:
        return
    rank.prepared = message
    job.first.setdefault("prepared", job.now)
    if rank.state == "running":
        job.move_rank(rank, "prepared")
    if job.training:  # it comes in while others train
        failure = death_cut.prepared(job, rank, message)
        if failure is not None:
            losses.fail(job, failure)
        return
    workers = job.of("worker")
    zero = workers[0].prepared
    last = job.reaches("prepared")
    if zero is None:
        return
    for each in workers if rank is workers[0] else [rank]:
        text = difference(zero, each.prepared) if each.prepared is not None else ""
        if text:
            failure = job.failure(each, f"the model on {each.member} differs from worker/0's: {text}", hint=_SAME)
            losses.fail(job, failure)
            return
    if last:
        job.first["planning"] = job.now
        if job.plan is None:
            on_gpus = any(each.prepared is not None and each.prepared.on_gpus for each in workers)
            job.out.append(MakePlan(zero.layout, job.order, on_gpus))
        else:  # a restart, of which only what was lost is new
            _shards(job)


_SAME = "build the same model and optimizer on every rank"


def plan_made(job: JobState, plan: PlanMade) -> None:
    """The strategy is chosen: order its servers, or decide at once where there are none."""
    if job.ending is not None or job.recovery is not None or "planning" not in job.first:
        return  # it was asked for before a loss
    if plan.problem or plan.event is None:
        losses.fail(job, job.failure(job.of("worker")[0], f"no plan could be made: {plan.problem}"))
        return
    job.plan = plan
    sum_order.settle(job)
    job.append(replace(plan.event, sums=sum_order.in_words(job)))
    order_servers(job, plan)
    _shards(job)


def _shards(job: JobState) -> None:
    """Decide who holds what, once all workers have prepared and all servers listen."""
    servers = job.of("server")
    zero = job.of("worker")[0].prepared
    if "planning" not in job.first or job.plan is None or zero is None or "decided" in job.first:
        return
    if not job.plan.servers:
        _decide(job, ShardsMade([], []))
    elif all(each.address for each in servers):
        hosts = {each.host for each in (*job.of("worker"), *servers)}
        job.out.append(MakeShards(zero.layout, len(servers), len(hosts) == 1))


def ready(job: JobState, rank: Rank, message: MemberReady) -> None:
    """A server listens, or a worker has its start values."""
    if job.leaving:
        return
    if rank.ready or (rank.member.role == "server" and message.address is None):
        return  # it says so once, a server with where it listens
    rank.ready, rank.address = True, message.address
    if rank.member.role == "server" and job.holdings is None and "decided" in job.first:
        return  # it holds tables alone
    if job.training:
        (server_changes if rank.member.role == "server" else death_cut).ready(job, rank)
        return
    if rank.member.role == "server":
        _shards(job)
    elif "decided" in job.first and job.reaches("ready"):
        _go(job)


def listens(job: JobState, rank: Rank, message: WorkerListens) -> None:
    """A worker listens for others: of its schedule, who are told of all once every worker does; or, under ps, of its
    host, who are told of those that do so far."""
    rank.listens = message
    workers = job.of("worker")
    if job.together:
        workers = [each for each in workers if each.host == rank.host and each.listens and not each.ended]
    if job.leaving or not all(each.listens for each in workers):
        return
    for one in workers:
        at = [
            WorkerAt(
                each.member.rank, each.member.incarnation, each.listens.address,
                each.listens.secret if each.host == one.host else b"",
            )
            for each in workers if each.listens is not None
        ]  # fmt: skip
        job.tell(one.member, WorkersAt(at))


def shards_made(job: JobState, made: ShardsMade) -> None:
    """Who holds what is settled."""
    if not job.leaving and "planning" in job.first and "decided" not in job.first:
        _decide(job, made)


def _decide(job: JobState, made: ShardsMade) -> None:
    zero = job.of("worker")[0].prepared
    assert zero is not None
    assert job.plan is not None
    job.layout, job.buffers = zero.layout, zero.buffers
    holding = job.of("server") if job.plan.servers else []  # else there may be some that hold tables alone
    assignment = server_changes.begin(job, made) if holding else NO_SERVERS
    decision = server_changes.decision(job, job.resume, assignment)
    job.saves.sources |= {rank.member for rank in job.of("worker")}  # each has its random generators' states
    job.first["decided"] = job.now
    for rank in [*holding, *job.of("worker")]:
        rank.decided = True
        job.tell(rank.member, decision)


def _go(job: JobState) -> None:
    job.training = True
    job.pace = ClockPace(job.now, job.first_step)
    job.reports.rates(job.now)  # the time before training counts for no rate
    if job.resume is not None or job.losses or job.scalings:
        name = job.resume.checkpoint if job.resume else ""
        job.append(events.Restored(time=job.time, checkpoint=name, step=job.first_step, lost=job.lost_steps))
    for rank in [*job.of("server"), *job.of("worker")]:
        job.tell(rank.member, Go())
        rank.moved, rank.step = job.now, job.first_step
        if rank.state == "waiting":
            job.move_rank(rank, "go")
