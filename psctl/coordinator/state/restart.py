"""Restart of all processes after a loss: the only way of collectives, and the last one under ps.

All workers and servers are ended; then new incarnations of all are started, with an empty store behind MASTER_PORT and
TORCHELASTIC_RESTART_COUNT one higher. They resume from the newest checkpoint whose every byte is verified, or from the
start values where there is none. The phases are the table RECOVERY in lifecycle.py.

Why this is right after any loss:
- *No old process reaches a new one.* New incarnations are started only when every old process has ended (its agent
  reports it) or its host is lost; a process on a lost host may live on, but is of an older incarnation, which is
  refused. Incomplete checkpoints are given up before the newest one is chosen, so the choice does not change.
- *The steps after the checkpoint are done again, not twice:* parameters, optimizer, data position and random state are
  all of one step, and reports of later steps are forgotten. The `restored` event has the number of lost steps.
- *It ends.* Every phase has a deadline; every restart uses up one of `restart.max`; a failure that comes again at the
  same step, and was no signal from outside, ends the job at once: another restart would not help.

`psctl scale --workers` restarts from a checkpoint that is made for it at a common step, so that no step is lost. A job
with `update: auto` whose optimizer steps piece by piece, on servers or in the workers' parts, restarts when its script
changes gradients in its first step (`on_step_unfit`).

Workers of a lost host move to free slots of the job's other hosts; hosts keep their order, so ranks are numbered anew
in that order and the plan is made again. Without enough slots the job waits `restart.wait` for lost hosts to return
(returning_hosts.py), then ends of the loss. An elastic job goes on with as many workers as have slots, its fewest or
more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from psctl.coordinator.state import checkpoints, ending, losses, startup, table_placement
from psctl.coordinator.state.collective_losses import PlaneEpochs
from psctl.coordinator.state.example_division import ExampleDivision
from psctl.coordinator.state.instructions import FindRestorable, RestorableFound
from psctl.coordinator.state.losses import Restart
from psctl.coordinator.state.lost_workers import LostWorkers
from psctl.coordinator.state.script_collectives import ScriptCollectives
from psctl.coordinator.state.table_placement import TableServers
from psctl.coordinator.streams.shard_grants import resumed_streams
from psctl.job import events, failures
from psctl.job.membership_messages import StepUnfit
from psctl.job.process_messages import EndProcesses, HoldSlots, RenewStore
from psctl.job.training_messages import Resume
from psctl.orders import HostOrder
from psctl.types import Member

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

NO_SLOTS = "the hosts that are left have too few slots for its workers"

PIECEWISE = "clip with run.clip_grad_norm(...) and accumulate under `with run.accumulate():`"


def advance(job: JobState) -> None:
    """Go on with a restart as far as possible now; called after every input."""
    while job.restart is not None and job.outage is None and _advance_once(job, job.restart):
        pass


def _advance_once(job: JobState, restart: Restart) -> bool:
    late = job.now >= restart.deadline
    if restart.phase == "settling":
        if not (failures.settled(restart.failures, restart.since, job.now) or late or not job.running()):
            return False
        _decide(job, restart)
    elif restart.phase == "leaving":
        if (job.live("worker") or job.checkpoints.open) and not late:
            return False
        if late:
            job.notice("the workers did not reach a common step in time: all go back to the last checkpoint")
        _end_processes(job, restart)
    elif restart.phase == "ending":
        running = job.running()
        if not late and (running or any(rank.connected for rank in job.ranks.values())):
            return False
        if running:
            names = ", ".join(job.describe(rank) for rank in running)
            _give_up(job, restart, f"{names} did not end when it was ordered to")
            return False
        _choose_or_wait(job, restart)
    elif restart.phase == "waiting" and _hosts_without_lost(job) is not None:
        job.append_event(events.Recovered(time=job.time))
        _choose_or_wait(job, restart)
    elif restart.phase == "waiting" and late:
        job.append_event(events.Recovered(time=job.time))
        _give_up(job, restart, f"{NO_SLOTS}; none came back within {job.order.restart_wait:.0f} s (restart.wait)")
        return False
    elif restart.phase == "choosing" and late:
        _give_up(job, restart, "its checkpoints could not be read in time")
        return False
    else:
        return False
    return True


def _choose_or_wait(job: JobState, restart: Restart) -> None:
    """Search the checkpoint to resume from; without enough slots, wait for lost hosts first."""
    if _hosts_without_lost(job) is not None or not job.order.restart_wait:
        restart.move("gone", job.now + ending.DRAIN)
        job.instructions.append(FindRestorable())
        return
    restart.move("short", job.now + job.order.restart_wait)
    names = [job.order.hosts[host].name for host in sorted(job.lost_hosts)]
    until = job.time + job.order.restart_wait
    job.append_event(events.Recovering(time=job.time, hosts=names, since=job.time, until=until))
    job.notice(
        f"{NO_SLOTS}: the job waits up to {job.order.restart_wait:.0f} s (restart.wait) until {', '.join(names)} "
        f"{'is' if len(names) == 1 else 'are'} back"
    )


def _give_up(job: JobState, restart: Restart, why: str) -> None:
    losses.end_with(job, [replace(restart.failures[0], hint=why)])


def _decide(job: JobState, restart: Restart) -> None:
    """End all processes that are left if all failures are losses, unless a restart would not help."""
    first = restart.failures[0] if restart.counted else ending.cause(job, restart.failures)
    if not failures.is_death(first):
        losses.end_with(job, [first, *restart.failures])
        return
    # A counted failure follows from a loss that the job had survived at first, and says nothing of that loss's cause.
    if not restart.counted and failures.same(job.losses.last, first):
        text = "the same failure came again at the same step after a restart, so another restart would not help"
        losses.end_with(job, [replace(first, hint=first.hint or text)])
        return
    job.losses.last, job.losses.reason = first, f"{first.member} on {first.host}: {first.exception}"
    job.losses.rolled_back += 1
    restart.failures = [first]
    if not restart.counted:
        job.losses.survived += 1
        ending.append_losses(job, first)
    count = f"restart {job.losses.survived} of {job.order.restarts}"
    why = f": {first.exception}" if restart.counted else ""  # else the event of the loss says it
    job.notice(f"{first.member} was lost at step {first.step}: all processes start again ({count}){why}")
    _end_processes(job, restart)


def _end_processes(job: JobState, restart: Restart) -> None:
    checkpoints.commit_complete(job, at_once=True)
    checkpoints.restart(job)
    restart.move("end", job.now + job.grace + ending.SLACK)
    running = job.running()
    for agent in job.agents:
        members = [rank.member for rank in running if rank.host == agent.rank]
        if members:
            job.send(agent, EndProcesses(members, job.grace, "the job starts again"))


def on_step_unfit(job: JobState, rank: Rank, message: StepUnfit) -> None:
    """A worker's first step cannot be made piece by piece: start again with the optimizer in the workers' scripts.

    A step is applied when every rank's push is there, so none was. It is no loss, and does not count as one.
    """
    if job.restart is not None or job.ending is not None:
        return
    hint = f"{PIECEWISE}, or set `update: worker` under sync: in the job file"
    first = job.failure_of(rank, message.reason, hint=hint)
    plan, auto = job.plan, job.order.update == "auto" and job.order.staleness == 0
    at_start = job.training and message.step == job.progress.first_step
    if plan is None or plan.update not in ("server", "sharded") or not auto or not at_start:
        losses.end_with(job, [first])
        return
    job.notice(
        f"{message.reason}. No step was applied yet, so all start again with `update: worker`, where .grad holds the "
        f"mean of all ranks after backward; to keep the optimizer "
        f"{'on servers' if plan.update == 'server' else 'sharded'}, {PIECEWISE}"
    )
    job.scaling.new_order = replace(job.order, update="worker", strategy=plan.chosen)
    job.restart = Restart("leaving", job.now, job.now, [first])
    _end_processes(job, job.restart)


def on_restorable(job: JobState, found: RestorableFound) -> None:
    """The checkpoint to resume from is known: start all processes."""
    restart = job.restart
    if restart is None or restart.phase != "choosing":
        return
    for text in found.skipped:
        job.notice(text)
    last = job.checkpoints.last_step
    if not found.problem and last is not None and (found.resume is None or found.resume.step < last):
        job.notice(f"the checkpoint of step {last} is not on {job.order.hosts[job.head].name}, which leads now")
    scaling = job.scaling
    if scaling.new_order is not None:
        job.order, scaling.new_order = scaling.new_order, None
        job.plan = None
        scaling.restarts += 1
    hosts = _hosts_without_lost(job)
    if found.problem:
        _give_up(job, restart, f"it cannot be started again: {found.problem}")
    elif hosts is None and job.order.restart_wait:
        _choose_or_wait(job, restart)
    elif hosts is None:
        _give_up(job, restart, NO_SLOTS)
    else:
        restart.move("ordered", job.now)
        job.restart = None
        _start_again(job, found.resume, hosts)


def _hosts_without_lost(job: JobState) -> list[HostOrder] | None:
    """Return the hosts with the workers of lost ones spread over free slots of the others; None if too few.

    The workers of an elastic job are as many as have slots.
    """
    elastic = job.order.elastic
    wanted = elastic[1] if elastic is not None else sum(host.workers for host in job.order.hosts)
    homeless = wanted - sum(host.workers for index, host in enumerate(job.order.hosts) if index not in job.lost_hosts)
    hosts = []
    for index, host in enumerate(job.order.hosts):
        if index in job.lost_hosts:
            hosts.append(replace(host, workers=0, may_serve=False))
            continue
        more = max(0, min(homeless, host.slots - host.workers))
        hosts.append(replace(host, workers=host.workers + more))
        homeless -= more
    enough = homeless <= 0 if elastic is None else wanted - homeless >= elastic[0]
    return hosts if enough else None


def _start_again(job: JobState, resume: Resume | None, hosts: list[HostOrder]) -> None:
    job.progress.rewind(job, resume.step if resume else 0)
    moved = hosts != job.order.hosts
    job.order = replace(job.order, hosts=hosts)
    job.resume = resume
    job.training = False
    job.startup.reached = {"starting": job.now}
    job.lost_workers = LostWorkers()
    job.planes = PlaneEpochs()
    job.collectives = ScriptCollectives()
    job.division = ExampleDivision()
    job.streams = resumed_streams(resume.state if resume else None)
    job.partitions.reported.clear()
    job.partitions.last.clear()
    if job.tables.first and not table_placement.saved_tensors(job):
        job.notice("the contents of stores (run.store()) are lost: there is no checkpoint of them")
    job.tables = TableServers()
    job.scaling.leaving_servers.clear()
    job.joining.members.clear()
    job.move("again")
    job.send(Member("agent", job.head), RenewStore())
    job.seat_workers()
    for agent in job.agents:
        job.send(agent, HoldSlots(hosts[agent.rank].workers))
    startup.order_workers(job)
    if moved:
        job.plan = None
    elif job.plan is not None:
        startup.order_servers(job, job.plan)
