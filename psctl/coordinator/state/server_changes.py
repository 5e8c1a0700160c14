"""Servers of a running job: deaths with replicas, replacements, joins, leaves. What shards do then is
shard_placement.py's."""

from __future__ import annotations

from psctl.coordinator.state import example_division, sum_order, training
from psctl.coordinator.state.instructions import DiscardCheckpoint, ShardsMade, StartMember
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job import events
from psctl.job.environment import server_environment
from psctl.job.membership_messages import Reassign, ServerUnreachable, ShardCaughtUp, ShardHandedOver
from psctl.job.shard_placement import ServerPlace, ShardPlacement
from psctl.job.training_messages import Decision, Leave, Resume
from psctl.types import Assignment, Member, ServerAt

HAND_OVER = 30.0
"""Seconds in which a server must have handed its shards over: it has at most one clock to finish."""


def replicas(job: JobState, servers: int) -> int:
    """Return how many copies beyond the first each shard has."""
    wanted = job.order.replicas
    return min(1, servers - 1) if wanted is None else wanted


def begin(job: JobState, made: ShardsMade) -> Assignment:
    """Give all shards to the servers, which listen; return the first assignment."""
    servers = job.of("server")
    before = -1 if job.holdings is None else job.holdings.epoch
    job.shards = made.shards
    job.holdings = ShardPlacement(made.sizes, replicas(job, len(servers)), map(place_of, servers), before + 1)
    job.spare = job.holdings.spare
    _note_senders(job, job.holdings)
    return job.holdings.assignment


def leaves_out(job: JobState) -> bool:
    """Whether workers keep what their pushes leave out, which belongs into checkpoints."""
    return job.plan is not None and job.plan.chosen == "ps" and job.order.compression.feedback


def place_of(rank: Rank) -> ServerPlace:
    """Return where a server that listens is."""
    assert rank.address is not None, "it has said where it listens"
    return ServerPlace(ServerAt(rank.member.rank, rank.member.incarnation, rank.address), rank.host)


def decision(job: JobState, resume: Resume | None, assignment: Assignment) -> Decision:
    """Return how gradients are synchronised, as a rank is told."""
    assert job.plan is not None
    assert job.layout is not None
    return Decision(
        strategy=job.plan.chosen, update=job.plan.update, layout=job.layout, shards=job.shards, assignment=assignment,
        resume=resume, options=job.plan.options, staleness=job.order.staleness, period=job.order.period,
        elastic=job.order.on_worker_loss == "continue" and job.plan.update == "server",
        compression=job.order.compression, hosts=job.together or (), auto=job.order.update == "auto",
        sums=sum_order.recorded(job),
    )  # fmt: skip


def order(job: JobState, number: int, host: int) -> Rank:
    """Have a server started in mid-run: a new one, or the next incarnation of one that died."""
    job.forget("server", number)
    there = [rank for rank in job.live("server") if rank.host == host]
    rank = job.add("server", number, host, len(there))
    job.tell_state(rank)
    environment = server_environment(job.order, job.order.hosts[host], len(there) + 1)
    job.out.append(StartMember(rank.member, len(job.of("worker")), host, rank.local_rank, environment))
    return rank


def ready(job: JobState, rank: Rank) -> None:
    """A server that was started in mid-run listens: it is told what is so, and gets its share."""
    assert job.holdings is not None
    rank.decided = True
    job.tell(rank.member, decision(job, job.resume, job.holdings.assignment))
    example_division.newcomer(job, rank)
    job.holdings.joined(place_of(rank))
    abandon(job, f"{rank.member} joins")
    job.say(f"{job.where(rank)} takes part")
    tell(job)


def lost(job: JobState, ranks: list[Rank], reason: str) -> None:
    """Servers died, and each of their shards has another member (`ShardPlacement.lost`): go on, replace them."""
    for rank in ranks:
        job.append(events.ServerLost(time=job.time, rank=rank.member.rank, host=job.host(rank), reason=reason))
        job.going.discard(rank.member.rank)
    abandon(job, f"{', '.join(str(rank.member) for rank in ranks)} died")
    if job.holdings is not None:
        tell(job)  # before anything else: training waits for this
    for rank in ranks:
        host = _host_for(job, rank)
        if host is None:
            job.say(f"no host is left for another {rank.member}; its shards lie on the others")
        else:
            order(job, rank.member.rank, host)


def _host_for(job: JobState, rank: Rank) -> int | None:
    return rank.host if rank.host not in job.lost_hosts else emptiest(job)


def emptiest(job: JobState) -> int | None:
    """Return the host with the fewest servers of those that may hold one; None when none may."""
    load = {agent.rank: 0 for agent in job.agents if job.order.hosts[agent.rank].may_serve}
    for each in job.live("server"):
        if each.host in load:
            load[each.host] += 1
    return min(load, key=lambda host: (load[host], host), default=None)


def caught_up(job: JobState, message: ShardCaughtUp) -> None:
    """A server has all of a shard that it is to hold."""
    if job.holdings is not None:
        job.holdings.caught_up(message.epoch, message.shard, message.server)


def handed_over(job: JobState, rank: Rank, message: ShardHandedOver) -> None:
    """A server answers nothing any more for a shard that moved."""
    if job.holdings is not None:
        job.holdings.handed_over(message.shard, rank.member.rank)


def unreachable(job: JobState, rank: Rank, message: ServerUnreachable) -> None:
    """A rank lost a server. If that is dead, its agent tells; else the two try again and people are told."""
    server = Member("server", message.server, message.incarnation)
    if server in job.ranks and not job.ranks[server].ended:
        text = f"{job.where(rank)} does not reach {server}, which runs: {message.reason}"
        job.say_once(("unreachable", (rank.member, server)), text)


def advance(job: JobState, patient: bool) -> str:
    """Go on with what moves; return which server keeps a hand-over from its end, or "".

    Args:
        patient: more may be heard at once; wait for it before a new assignment is made.
    """
    holdings = job.holdings
    if holdings is None or not job.training or (job.leaving and not job.coming_to_rest):
        return ""
    if not job.leaving and not job.deaths and not holdings.settled:  # a cut needs its shards to stay where they are
        epoch = holdings.epoch
        holdings.advance(patient)
        if holdings.epoch != epoch:
            abandon(job, "shards move")
            job.handing_since = job.now
    tell(job)
    if holdings.handing and job.now - job.handing_since >= HAND_OVER:
        return f"server/{next(iter(holdings.handing.values()))}"
    return ""


def tell(job: JobState) -> None:
    """Tell servers and workers what changed: servers first."""
    assert job.holdings is not None
    if job.holdings.servers_told != job.holdings.epoch:
        _note_senders(job, job.holdings)
        _tell_spare(job, job.holdings.spare)
    for role, news in (("server", job.holdings.news_for_servers), ("worker", job.holdings.news_for_workers)):
        assignment = news()
        if assignment is not None:
            for rank in job.live(role):
                if rank.decided:
                    job.tell(rank.member, Reassign(assignment))
    job.holdings.may_go()
    dismiss(job)


def dismiss(job: JobState) -> None:
    """Let servers go that were to leave, and hold neither parameters nor tables any more."""
    if not job.going:
        return  # asked at every event
    holding = [each.places for each in (job.holdings, job.tables.holdings) if each is not None]
    for rank in job.live("server"):
        number = rank.member.rank
        if number in job.going and not rank.leaving and not any(number in places for places in holding):
            rank.leaving = True
            job.going.discard(number)
            job.tell(rank.member, Leave("the job goes on with fewer servers"))


def _note_senders(job: JobState, holdings: ShardPlacement) -> None:
    """Enter who must send a part of each checkpoint: where servers step, those that lead a shard."""
    if job.plan is None or job.plan.update != "server" or not holdings.chains:
        return
    leading = {chain[0] for chain in holdings.chains}
    servers = {rank.member for rank in job.live("server") if rank.member.rank in leading}
    job.saves.sources = {each for each in job.saves.sources if each.role == "worker"} | servers


def _tell_spare(job: JobState, spare: int) -> None:
    """Say how many copies shards have, when that changes: it is what the next death costs."""
    if spare == job.spare:
        return
    if spare > job.spare:
        job.say(f"every shard is on {spare + 1} servers again")
    elif spare > 0:
        job.say(f"some shards are on {spare + 1} servers only, until others are filled")
    else:
        back = job.saves.checkpoint() or "the start"
        job.say(f"some shards are on one server only: were it to die before another is filled, all go back to {back}")
    job.spare = spare


def abandon(job: JobState, why: str) -> None:
    """Checkpoints whose parts are on their way would mix what was before and after a move: give them up."""
    for step in job.saves.abandon():
        job.out.append(DiscardCheckpoint(step))
        job.say(f"the checkpoint of step {step} is given up: {why}")
        training.saved(job, step, why)
