"""Which servers hold additive tables, and which shard of them which server has: deaths, joins and leaves included.

A store may be opened before `prepare`, when there is no plan yet. Then as many servers as `servers:` says, else one,
are started, on hosts without workers first; a plan that wants servers later begins with these and adds what it lacks.
All servers of a job hold tables from then on, those that come later too.

All stores are cut into the same shards, and the shards' chains are kept as those of parameters are
(shard_placement.py): one Holdings for all stores, with epochs of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from psctl.coordinator.state import server_changes
from psctl.coordinator.state.job_state import JobState, Rank
from psctl.job.shard_placement import ServerPlace, ShardPlacement
from psctl.job.table_server_messages import (
    ServeTables,
    TablesAssigned,
    TablesAt,
    TablesCaughtUp,
    TablesHandedOver,
    TablesReady,
    TablesSave,
    TablesWanted,
)
from psctl.orders import JobOrder
from psctl.types import Member, ServerAt, TensorSlice

SHARDS_A_SERVER = 4
"""So that a store's shards can be spread evenly over another number of servers."""

FEWEST = 8
"""Shards of a store at least, so that servers which come later have something to take."""

Message = TablesWanted | TablesReady | TablesCaughtUp | TablesHandedOver


def places(order: JobOrder) -> list[int]:
    """Return the host of each server that is started for tables: in turn, hosts with the fewest workers first."""
    hosts = sorted(
        (index for index, host in enumerate(order.hosts) if host.may_serve), key=lambda at: order.hosts[at].workers
    )
    count = 1 if order.servers is None else order.servers
    return [hosts[at % len(hosts)] for at in range(count)] if hosts else []


def wanted(job: JobState, rank: Rank, start: Callable[[list[int]], None]) -> None:
    """A worker wants to open a store.

    Args:
        start: starts servers on these hosts.
    """
    if job.leaving:
        return
    tables = job.tables
    tables.since = tables.since or job.now
    tables.asked.add(rank.member)
    if not tables.first:
        if not job.of("server"):
            start(places(job.order))
        tables.first = [server.member for server in job.live("server")]
    if not tables.first:
        problem, hint = _none(job.order)
        job.tell(rank.member, TablesAt([], problem=problem, hint=hint))
        tables.asked.clear()
    advance(job)


def _none(order: JobOrder) -> tuple[str, str]:
    if order.servers == 0:
        return "run.store() needs a server, and the job file says servers: 0", "servers: auto, or 1 and more"
    return "run.store() needs a server, and no host may hold one", "let a host have roles: [server] in the cluster file"


def heard(job: JobState, rank: Rank, message: TablesReady | TablesCaughtUp | TablesHandedOver) -> None:
    """A server says something of its tables."""
    holdings = job.tables.holdings
    match message:
        case TablesReady():
            job.tables.addresses[rank.member] = message.address
            if holdings is not None:
                holdings.joined(_place(job, rank))
                server_changes.abandon(job, f"{rank.member} is to hold tables")
        case TablesCaughtUp() if holdings is not None:
            holdings.caught_up(message.epoch, message.shard, message.server)
        case TablesHandedOver() if holdings is not None:
            holdings.handed_over(message.shard, rank.member.rank)
    advance(job)


def _place(job: JobState, rank: Rank) -> ServerPlace:
    member = rank.member
    return ServerPlace(ServerAt(member.rank, member.incarnation, job.tables.addresses[member]), rank.host)


def advance(job: JobState) -> None:
    """Have servers that have joined hold tables; begin when the first ones do; answer workers."""
    tables = job.tables
    if not tables.first or job.leaving:
        return
    for rank in job.live("server"):
        if rank.joined and rank.member not in tables.told and not rank.leaving:
            tables.told.add(rank.member)
            job.tell(rank.member, ServeTables())
    if tables.holdings is None and not missing(job):
        _begin(job)
    tell(job)
    _answer(job)


def _begin(job: JobState) -> None:
    tables = job.tables
    servers = [job.ranks[member] for member in tables.first]
    shards = max(FEWEST, SHARDS_A_SERVER * len(servers))
    replicas = min(server_changes.replicas(job, len(servers)), len(servers) - 1)
    tables.holdings = ShardPlacement([1] * shards, replicas, [_place(job, rank) for rank in servers])
    told = TablesAssigned(tables.holdings.assignment, True, saved(job))
    for rank in servers:
        job.tell(rank.member, told)
    for rank in job.live("server"):
        if rank.member in tables.addresses and rank not in servers:
            tables.holdings.joined(_place(job, rank))


def saved(job: JobState) -> list[TensorSlice]:
    """Return what the checkpoint that the job goes on from has of tables."""
    return [each for each in job.resume.tensors if each.name.startswith("store/")] if job.resume is not None else []


def _answer(job: JobState) -> None:
    holdings = job.tables.holdings
    if holdings is not None and not holdings.handing:
        for member in sorted(job.tables.asked):
            job.tell(member, _at(holdings))
        job.tables.answered |= job.tables.asked
        job.tables.asked.clear()


def _at(holdings: ShardPlacement) -> TablesAt:
    found = holdings.assignment
    return TablesAt(found.servers, len(found.chains), found.epoch)


def missing(job: JobState) -> list[Rank]:
    """Return the servers that a worker waits for and whose tables do not listen yet."""
    if not job.tables.asked or job.tables.holdings is not None:
        return []
    return [rank for rank in job.of("server") if rank.member in _expected(job)]


def _expected(job: JobState) -> set[Member]:
    return {member for member in job.tables.first if member not in job.tables.addresses}


# ---- deaths, moves -------------------------------------------------------------------------------------------------


def may_lose(job: JobState, servers: list[int]) -> bool:
    """Whether tables lose nothing when these servers die."""
    tables = job.tables
    if tables.holdings is None:
        return not tables.first  # those that begin have nothing yet that another could go on with
    return tables.holdings.survives(servers)


def move(job: JobState, patient: bool) -> str:
    """Go on with what moves; return which server keeps a hand-over from its end, or "".

    Args:
        patient: more may be heard at once; wait for it before a new assignment is made.
    """
    holdings = job.tables.holdings
    if holdings is None or job.leaving:
        return ""
    if not holdings.settled:
        epoch = holdings.epoch
        holdings.advance(patient)
        if holdings.epoch != epoch:
            server_changes.abandon(job, "shards of tables move")
            job.tables.handing_since = job.now
    tell(job)
    if holdings.handing and job.now - job.tables.handing_since >= server_changes.HAND_OVER:
        return f"server/{next(iter(holdings.handing.values()))}"
    return ""


def tell(job: JobState) -> None:
    """Tell servers and workers what changed: servers first."""
    holdings = job.tables.holdings
    if holdings is None:
        return
    news = holdings.news_for_servers()
    if news is not None:
        for rank in job.live("server"):
            if rank.member.rank in holdings.places and rank.member in job.tables.addresses:
                job.tell(rank.member, TablesAssigned(news))
    if holdings.news_for_workers() is not None:
        for rank in job.live("worker"):
            if rank.member in job.tables.answered:
                job.tell(rank.member, _at(holdings))
    holdings.may_go()
    server_changes.dismiss(job)


def save(job: JobState, step: int) -> None:
    """Have servers send what they hold of tables at this step."""
    holdings = job.tables.holdings
    if holdings is None:
        return
    members = {rank.member for rank in job.live("server") if rank.member.rank in holdings.places}
    if job.saves.want_tables(step, members):
        for member in sorted(members):
            job.tell(member, TablesSave(step))
