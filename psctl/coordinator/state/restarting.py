"""A loss that the whole job survives by starting again: the way of every strategy, and the last one under ps.

All workers and servers are ended; when none is left, new incarnations of all are ordered, with an empty store behind
MASTER_PORT and TORCHELASTIC_RESTART_COUNT one higher, and go on from the newest checkpoint whose every byte is right,
or from the start values where there is none. The phases are the table RECOVERY in lifecycle.py.

Why this is right whatever was lost, and when:
- *Nothing of before reaches after.* The new incarnations are ordered only when every old process has ended (its agent
  says so) or its host is lost; a process on a lost host may live on, but is of an older incarnation, which nobody lets
  in. What was on its way of a checkpoint is given up before the newest one is chosen, so the choice does not change.
- *The steps after the checkpoint are done again, not twice:* parameters, optimizer, data position and random state are
  all of one step, and what was reported of later ones is forgotten. How many were lost is in the `restored` event.
- *It ends.* Every phase has a deadline; every restart uses up one of `restart.max`; a failure that comes again at the
  same step, and was no signal from outside, ends the job at once: starting again would not help.

`psctl scale --workers` goes this way too, from a checkpoint that is made for it at a common step, so that none is lost;
so does a job under ps whose script changes gradients in its first step, where `update: auto` took servers (`unfit`).

A lost host's workers move to hosts of the job that have slots left; hosts keep their places in the roster, so ranks are
given out anew in roster order and the plan is made again. Without slots enough the job ends of the loss.
"""

from __future__ import annotations

from msgspec.structs import replace

from psctl.coordinator.state import ending, losses, startup, table_placement, training
from psctl.coordinator.state.instructions import DiscardCheckpoint, FindRestorable, RestorableFound
from psctl.coordinator.state.job_state import ExampleDivision, JobState, Rank, Recovery
from psctl.job import events, failures, lifecycle
from psctl.job.membership_messages import StepUnfit
from psctl.job.process_messages import EndProcesses, HoldSlots, ProcessFailure, RenewStore
from psctl.job.table_server_messages import TableServers
from psctl.job.training_messages import Resume
from psctl.orders import HostOrder
from psctl.types import Member


def advance(job: JobState) -> None:
    """Go on with a restart as far as possible now; called after everything that happens."""
    while job.recovery is not None and _advance_once(job, job.recovery):
        pass


def _advance_once(job: JobState, recovery: Recovery) -> bool:
    late = job.now >= recovery.deadline
    if recovery.phase == "settling":
        if not (failures.settled(recovery.failures, recovery.since, job.now) or late or not job.alive()):
            return False
        _verdict(job, recovery)
    elif recovery.phase == "leaving":
        if (job.live("worker") or job.saves.open) and not late:
            return False
        if late:
            job.say("the workers did not come to a common step in time: all go back to the last checkpoint")
        _end(job, recovery)
    elif recovery.phase == "ending":
        left = [rank for rank in job.ranks.values() if rank.connected] or job.alive()
        if left and not late:
            return False
        if job.alive():
            names = ", ".join(job.where(rank) for rank in job.alive())
            _give_up(job, recovery, f"{names} did not end when it was told to")
            return False
        _to(recovery, "gone", job.now + ending.DRAIN)
        job.out.append(FindRestorable())
    elif recovery.phase == "choosing" and late:
        _give_up(job, recovery, "its checkpoints could not be read in time")
        return False
    else:
        return False
    return True


def _to(recovery: Recovery, trigger: str, deadline: float) -> None:
    recovery.phase = lifecycle.move(lifecycle.RECOVERY, recovery.phase, trigger)
    recovery.deadline = deadline


def _give_up(job: JobState, recovery: Recovery, why: str) -> None:
    losses.give_up(job, [replace(recovery.failures[0], hint=why)])


def _verdict(job: JobState, recovery: Recovery) -> None:
    """All that was heard are losses: end everything that is left, unless starting again would not help."""
    first = recovery.failures[0] if recovery.counted else ending.cause(job, recovery.failures)
    if not failures.is_death(first):
        losses.give_up(job, [first, *recovery.failures])
        return
    if failures.same(job.last_loss, first):
        text = "the same came again at the same step after a restart, so another one would not help"
        losses.give_up(job, [replace(first, hint=first.hint or text)])
        return
    job.last_loss = first
    recovery.failures = [first]
    if not recovery.counted:
        _count(job, first)
    count = f"restart {job.losses} of {job.order.restarts}"
    job.say(f"{first.member} was lost at step {first.step}: all processes start again ({count})")
    _end(job, recovery)


def _count(job: JobState, first: ProcessFailure) -> None:
    job.losses += 1
    for rank in job.ranks.values():
        if str(rank.member) == first.member or rank.state == "lost":
            kind = events.WorkerLost if rank.member.role == "worker" else events.ServerLost
            job.append(kind(time=job.time, rank=rank.member.rank, host=job.host(rank), reason=first.exception))


def _end(job: JobState, recovery: Recovery) -> None:
    """Have everything ended that is left."""
    training.commit_sent(job, at_once=True)
    for step in job.saves.again(job.now):
        job.out.append(DiscardCheckpoint(step))
    _to(recovery, "end", job.now + job.grace + ending.SLACK)
    for agent in job.agents:
        there = [rank.member for rank in job.alive() if rank.host == agent.rank]
        if there:
            job.tell(agent, EndProcesses(there, job.grace, "the job starts again"))


ON_SERVERS = "clip with run.clip_grad_norm(...) and accumulate under `with run.accumulate():`"


def unfit(job: JobState, rank: Rank, message: StepUnfit) -> None:
    """Servers cannot take a worker's first step: start again with the optimizer on workers.

    A step is applied when every rank's push is there, so none was. It is no loss, and counts as none.
    """
    if job.recovery is not None or job.ending is not None:
        return
    first = job.failure(rank, message.reason, hint=f"{ON_SERVERS}, or set `update: worker` under sync: in the job file")
    plan, auto = job.plan, job.order.update == "auto" and job.order.staleness == 0
    if plan is None or plan.update != "server" or not auto or not job.training or message.step != job.first_step:
        losses.give_up(job, [first])
        return
    job.say(
        f"{message.reason}. No step was applied yet, so all start again with `update: worker`, where .grad holds the "
        f"mean of all ranks after backward; to keep the optimizer on servers, {ON_SERVERS}"
    )
    job.rescaled = replace(job.order, update="worker", strategy=plan.chosen)
    job.recovery = Recovery("leaving", job.now, job.now, [first])
    _end(job, job.recovery)


def restorable(job: JobState, found: RestorableFound) -> None:
    """It is known where the job goes on: order everyone anew."""
    recovery = job.recovery
    if recovery is None or recovery.phase != "choosing":
        return
    for text in found.skipped:
        job.say(text)
    if job.rescaled is not None:
        job.order, job.rescaled = job.rescaled, None
        job.scalings, job.plan = job.scalings + 1, None
    hosts = _seats(job)
    if found.problem:
        _give_up(job, recovery, f"it cannot be started again: {found.problem}")
    elif hosts is None:
        _give_up(job, recovery, "the hosts that are left have no slots for its workers")
    else:
        _to(recovery, "ordered", job.now)
        job.recovery = None
        _again(job, found.resume, hosts)


def _seats(job: JobState) -> list[HostOrder] | None:
    """Return the hosts with the workers of lost ones spread over the others' slots; None when there are too few."""
    homeless = 0
    hosts = []
    for index, host in enumerate(job.order.hosts):
        if index in job.lost_hosts:
            homeless += host.workers
            host = replace(host, workers=0, may_serve=False)
        hosts.append(host)
    for index, host in enumerate(hosts):
        more = 0 if index in job.lost_hosts else min(homeless, max(0, host.slots - host.workers))
        hosts[index] = replace(host, workers=host.workers + more)
        homeless -= more
    return None if homeless else hosts


def _again(job: JobState, resume: Resume | None, hosts: list[HostOrder]) -> None:
    step = resume.step if resume else 0
    moved = hosts != job.order.hosts
    before = job.ranks
    job.order = replace(job.order, hosts=hosts)
    job.lost_steps = max(0, max([job.reports.step, *(rank.step for rank in before.values())]) - step)
    job.resume, job.first_step, job.training = resume, step, False
    job.first = {"starting": job.now}
    job.deaths, job.cuts, job.division = {}, {}, ExampleDivision()
    if job.tables.first and not table_placement.saved(job):
        job.say("what stores held (run.store()) is lost: there is no checkpoint of it")
    job.tables, job.going = TableServers(), set()
    job.reports.rewind(step, job.now)
    job.progress_told = (step, {})
    job.move("again")
    job.tell(Member("agent", 0), RenewStore())
    job.seat_workers()
    for agent in job.agents:
        job.tell(agent, HoldSlots(hosts[agent.rank].workers))
    startup.order_workers(job)
    if moved:
        job.plan = None
    elif job.plan is not None:
        startup.order_servers(job, job.plan)
