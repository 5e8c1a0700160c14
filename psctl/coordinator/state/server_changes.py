"""Servers of a running job: losses, replacements, joins, releases, and the shards of parameters that they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.policies.shard_placement import ServerPlace, ShardPlacement
from psctl.coordinator.state import checkpoints, example_division, sum_order
from psctl.coordinator.state.instructions import ShardsMade, StartMember
from psctl.job import events
from psctl.job.environment import server_environment
from psctl.job.membership_messages import Reassign, ShardCaughtUp, ShardHandedOver
from psctl.job.training_messages import Decision, Leave, Resume
from psctl.types import NO_SERVERS, Address, Assignment, ServerAt, Shard

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

TRANSFER = 30.0
"""Seconds in which a server must have transferred its shards: it has at most one clock to finish."""


class Shards(msgspec.Struct):
    """The shards of parameters and their servers, under ps from the decision on."""

    ranges: list[Shard] = msgspec.field(default_factory=list)
    placement: ShardPlacement | None = None
    tolerated_losses: int = 0  # the number of the last notice: servers that may be lost at once


def replica_count(job: JobState, servers: int) -> int:
    """Return how many copies beyond the first each shard has."""
    wanted = job.order.replicas
    return min(1, servers - 1) if wanted is None else wanted


def server_place(rank: Rank, address: Address | None, rack: str = "") -> ServerPlace:
    """Return the place of a server whose shards, of parameters or of tables, are reached at this address."""
    assert address is not None, "a server that holds shards has sent its address"
    return ServerPlace(ServerAt(rank.member.rank, rank.member.incarnation, address, rack), rank.host)


def _parameter_place(job: JobState, rank: Rank) -> ServerPlace:
    """Return the place of a server of parameters."""
    return server_place(rank, rank.address, sum_order.rack_of(job, rank))


def place_shards(job: JobState, made: ShardsMade) -> Assignment:
    """Give all shards to the servers, which listen; return the first assignment."""
    servers = job.ranks_of("server")
    before = job.shards.placement
    places = [_parameter_place(job, rank) for rank in servers]
    epoch = 0 if before is None else before.epoch + 1
    placement = ShardPlacement(made.sizes, replica_count(job, len(servers)), places, epoch)
    job.shards = Shards(made.shards, placement, placement.tolerated_losses)
    job.append_event(events.ReplicasChanged(time=job.time, replicas=placement.tolerated_losses))
    _record_senders(job, placement)
    return placement.assignment


def decision(job: JobState, resume: Resume | None, assignment: Assignment | None) -> Decision:
    """Return the decision how gradients are synchronized; `assignment`: None where no server holds parameters."""
    assert job.plan is not None
    assert job.startup.layout is not None
    order, plan = job.order, job.plan
    # Whether a lost worker's examples may be divided among the others, because it is not always replaced.
    divides = order.on_worker_loss == "continue" or (order.elastic is not None and order.staleness is not None)
    return Decision(
        strategy=plan.chosen, update=plan.update, layout=job.startup.layout, shards=job.shards.ranges,
        assignment=assignment or NO_SERVERS, resume=resume, options=plan.options, staleness=order.staleness,
        period=order.period,
        elastic=divides and plan.update == "server",
        compression=order.compression, hosts=job.host_groups or (), auto=order.update == "auto",
        sums=sum_order.record(job), factors=plan.factors, factor_rows=order.factor_rows or 0,
        bucket=order.bucket, start=plan.start, racks=sum_order.racks_by_rank(job),
        step_in_backward=order.step_in_backward, servers_apart=_servers_are_apart(job),
        joint_batch_norm=order.joint_batch_norm,
    )  # fmt: skip


def _servers_are_apart(job: JobState) -> bool:
    """Whether no server shares a host with a worker."""
    workers = {rank.host for rank in job.live("worker")}
    return all(rank.host not in workers for rank in job.live("server"))


def start_server(job: JobState, number: int, host: int) -> None:
    """Start a server in mid-run: a new one, or the next incarnation of a lost one."""
    job.remove_rank("server", number)
    local_rank = sum(rank.host == host for rank in job.live("server"))
    rank = job.add_rank("server", number, host, local_rank)
    start_rank(job, rank, server_environment(job.order, job.order.hosts[host], local_rank + 1))


def add_servers(job: JobState, hosts: list[int]) -> None:
    """Start further servers on these hosts, before training."""
    taken = [rank.host for rank in job.ranks_of("server")]
    every = taken + hosts
    for number, host in enumerate(hosts, len(taken)):
        rank = job.add_rank("server", number, host, taken.count(host))
        taken.append(host)
        start_rank(job, rank, server_environment(job.order, job.order.hosts[host], every.count(host)))


def start_rank(job: JobState, rank: Rank, environment: dict[str, str]) -> None:
    """Have a rank's process started."""
    job.append_state(rank)
    world = job.division.world
    job.instructions.append(StartMember(rank.member, world, rank.host, rank.local_rank, environment))


def emptiest_host(job: JobState) -> int | None:
    """Return the host with the fewest servers of those that may hold one; None when none may."""
    load = {agent.rank: 0 for agent in job.agents if job.order.hosts[agent.rank].may_serve}
    for each in job.live("server"):
        if each.host in load:
            load[each.host] += 1
    return min(load, key=lambda host: (load[host], host), default=None)


# ---- what happens --------------------------------------------------------------------------------------------------


def on_ready(job: JobState, rank: Rank) -> None:
    """A server that was started in mid-run listens: send it the decision and give it its share."""
    placement = job.shards.placement
    assert placement is not None
    rank.decided = True
    job.send(rank.member, decision(job, job.resume, placement.assignment))
    example_division.send_past_changes(job, rank)
    placement.add_server(_parameter_place(job, rank))
    checkpoints.drop_incomplete(job, f"{rank.member} joins")
    job.notice(f"{job.describe(rank)} takes part")
    announce(job)


def on_lost(job: JobState, ranks: list[Rank], reason: str) -> None:
    """Continue without lost servers, which are removed from all chains already, and start their replacements."""
    for rank in ranks:
        job.append_loss(rank, reason)
        job.scaling.leaving_servers.discard(rank.member.rank)
    checkpoints.drop_incomplete(job, f"{', '.join(str(rank.member) for rank in ranks)} is lost")
    if job.shards.placement is not None:
        announce(job)  # before anything else: training waits for this
    for rank in ranks:
        host = rank.host if rank.host not in job.lost_hosts else emptiest_host(job)
        if host is None:
            job.notice(f"no host is left for another {rank.member}; its shards are on the other servers")
        else:
            start_server(job, rank.member.rank, host)


def placement_of(job: JobState, *, tables: bool) -> ShardPlacement | None:
    """Return the placement of the shards of tables, or of parameters."""
    return job.tables.placement if tables else job.shards.placement


def on_caught_up(job: JobState, message: ShardCaughtUp) -> None:
    """A server that is being filled with a shard has the newest clock."""
    placement = placement_of(job, tables=message.tables)
    if placement is not None:
        placement.on_caught_up(message.epoch, message.shard, message.server)


def on_handed_over(job: JobState, rank: Rank, message: ShardHandedOver) -> None:
    """A server no longer answers for a shard that moved."""
    placement = placement_of(job, tables=message.tables)
    if placement is not None:
        placement.on_transferred(message.shard, rank.member.rank)


def advance(job: JobState, patient: bool) -> str:
    """Advance the transfers of shards; return the server whose transfer is late, or "".

    Args:
        job: the job.
        patient: more messages may arrive at once; wait for them before a new assignment is made.
    """
    placement = job.shards.placement
    if placement is None or not job.training or (job.all_processes_end and not job.moves_to_common_step):
        return ""
    # Servers can report the clocks of a lost worker only while no shard moves.
    may_move = not job.all_processes_end and not job.lost_workers.pending
    if may_move and placement.advance(patient, job.now):
        checkpoints.drop_incomplete(job, "shards move")
    announce(job)
    return placement.late_transfer(job.now, TRANSFER)


def announce(job: JobState) -> None:
    """Send a changed assignment to servers, and then to workers."""
    placement = job.shards.placement
    assert placement is not None
    if placement.announced != placement.epoch:
        _record_senders(job, placement)
        _notice_tolerated_losses(job, placement.tolerated_losses)
    for role, news in (("server", placement.news_for_servers), ("worker", placement.news_for_workers)):
        assignment = news()
        if assignment is not None:
            for rank in [*job.live(role), *(job.live("reader") if role == "worker" else ())]:
                if rank.decided:
                    job.send(rank.member, Reassign(assignment))
    placement.forget_released()
    dismiss_released(job)


def dismiss_released(job: JobState) -> None:
    """Send Leave to released servers that hold neither parameters nor tables."""
    leaving = job.scaling.leaving_servers
    if not leaving:
        return  # called at every input
    placements = [each for each in (job.shards.placement, job.tables.placement) if each is not None]
    for rank in job.live("server"):
        number = rank.member.rank
        if number in leaving and not rank.leaving and not any(number in each.places for each in placements):
            rank.leaving = True
            leaving.discard(number)
            job.send(rank.member, Leave("the job continues with fewer servers"))


def _record_senders(job: JobState, placement: ShardPlacement) -> None:
    """Make the primaries send parts of checkpoints, where the optimizer steps on servers."""
    if job.plan is None or job.plan.update != "server" or not placement.chains:
        return
    primaries = {chain[0] for chain in placement.chains}
    servers = {rank.member for rank in job.live("server") if rank.member.rank in primaries}
    workers = {each for each in job.checkpoints.senders if each.role == "worker"}
    job.checkpoints.senders = workers | servers


def _notice_tolerated_losses(job: JobState, tolerated_losses: int) -> None:
    """Append a notice when the number of copies of shards changes: the cost of the next loss depends on it."""
    if tolerated_losses == job.shards.tolerated_losses:
        return
    if tolerated_losses > job.shards.tolerated_losses:
        job.notice(f"every shard is on {tolerated_losses + 1} servers again")
    elif tolerated_losses > 0:
        job.notice(f"some shards are on {tolerated_losses + 1} servers only, until others are filled")
    else:
        back = job.checkpoints.newest_name() or "the start"
        job.notice(
            f"some shards are on one server only: if it is lost before another is filled, all ranks go back to {back}"
        )
    job.shards.tolerated_losses = tolerated_losses
    job.append_event(events.ReplicasChanged(time=job.time, replicas=tolerated_losses))
