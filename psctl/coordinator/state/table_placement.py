"""The servers that hold additive tables (`run.store()`), and the servers of each of their shards.

A store may be opened before `prepare`, when there is no plan yet. Then the number of servers in `servers:`, else one,
are started, on hosts without workers first; a later plan with servers takes these first and adds the missing
ones. All servers of a job hold tables from then on, also those that are started later.

All stores are cut into the same shards. One placement serves all stores, with epochs of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from psctl.coordinator.policies.shard_placement import ServerPlace, ShardPlacement
from psctl.coordinator.state import checkpoints, server_changes
from psctl.coordinator.state.instructions import CheckpointCommitted
from psctl.job.table_server_messages import (
    ServeTables,
    TablesAssigned,
    TablesAt,
    TablesReady,
    TablesSave,
    TablesSaved,
)
from psctl.orders import JobOrder
from psctl.types import Address, Member, TensorSlice

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

SHARDS_A_SERVER = 4
"""So that a store's shards can be spread evenly over another number of servers."""

FEWEST = 8
"""Shards of a store at least, so that servers that are added later can hold some."""


class TableServers(msgspec.Struct):
    """The servers that hold tables."""

    since: float = 0.0
    """When the first worker wanted to open a store."""
    asked: set[Member] = msgspec.field(default_factory=set)
    """Workers without an answer."""
    answered: set[Member] = msgspec.field(default_factory=set)
    """Workers that receive changes."""
    of_script: bool = False
    """Whether the script opened a store itself; else tables hold rows of embeddings, which step with the model."""
    first: list[Member] = msgspec.field(default_factory=list)
    """The servers that begin."""
    ordered: set[Member] = msgspec.field(default_factory=set)
    """Servers that were ordered to hold tables."""
    addresses: dict[Member, Address] = msgspec.field(default_factory=dict)
    placement: ShardPlacement | None = None
    """The servers of each shard, once all of the first listen."""


JOINED = "run.store() opens the first store after workers have joined, which no group of a store has"


def on_tables_wanted(job: JobState, rank: Rank) -> None:
    """Record a worker's request to open a store; `advance` answers it."""
    tables = job.tables
    if rank.member.role == "reader":  # no servers are started for it, and it may come when all else has ended
        if job.ending is not None and tables.placement is not None:
            job.send(rank.member, _tables_at(tables.placement))
        tables.asked.add(rank.member)
        return
    if job.all_processes_end:
        return
    if not tables.first and any(term.member for term in job.division.terms):
        job.send(rank.member, TablesAt([], problem=JOINED, hint="open the script's stores before run.prepare"))
        return
    tables.since = tables.since or job.now
    tables.asked.add(rank.member)
    if not tables.first:
        if not job.ranks_of("server"):
            server_changes.add_servers(job, hosts_for_tables(job.order))
        tables.first = [server.member for server in job.live("server")]
    if not tables.first:
        problem, hint = _no_server(job.order)
        job.send(rank.member, TablesAt([], problem=problem, hint=hint))
        tables.asked.clear()


def hosts_for_tables(order: JobOrder) -> list[int]:
    """Return the host of each server that is started for tables: in turn, hosts with the fewest workers first."""
    hosts = sorted(
        (index for index, host in enumerate(order.hosts) if host.may_serve), key=lambda at: order.hosts[at].workers
    )
    count = 1 if order.servers is None else order.servers
    return [hosts[at % len(hosts)] for at in range(count)] if hosts else []


def _no_server(order: JobOrder) -> tuple[str, str]:
    if order.servers == 0:
        return "run.store() needs a server, but the job file has servers: 0", "servers: auto, or 1 and more"
    return "run.store() needs a server, and no host may hold one", "let a host have roles: [server] in the cluster file"


def on_ready(job: JobState, rank: Rank, message: TablesReady) -> None:
    """The tables of a server listen."""
    job.tables.addresses[rank.member] = message.address
    if job.tables.placement is not None:
        job.tables.placement.add_server(server_changes.server_place(rank, message.address))
        checkpoints.drop_incomplete(job, f"{rank.member} is to hold tables")


def advance(job: JobState, patient: bool) -> str:
    """Go on with the start of tables and with shards that move; return the server whose transfer is late, or "".

    Servers that have joined receive the order to hold tables; when the first ones do, shards are placed; then
    workers with open requests get their answers.

    Args:
        job: the job.
        patient: more messages may arrive at once; wait for them before a new assignment is made.
    """
    tables = job.tables
    if not tables.first or job.all_processes_end:
        return ""
    for rank in job.live("server"):
        if rank.joined and rank.member not in tables.ordered and not rank.leaving:
            tables.ordered.add(rank.member)
            job.send(rank.member, ServeTables(job.order.checkpoint.full_every))
    if tables.placement is None and not awaited_servers(job):
        _place_shards(job)
    placement = tables.placement
    if placement is None:
        return ""
    if placement.advance(patient, job.now):
        checkpoints.drop_incomplete(job, "shards of tables move")
    announce(job)
    if not placement.transfers:
        for member in sorted(tables.asked):
            job.send(member, _tables_at(placement))
        tables.answered |= tables.asked
        tables.asked.clear()
    return placement.late_transfer(job.now, server_changes.TRANSFER)


def _place_shards(job: JobState) -> None:
    tables = job.tables

    def place(rank: Rank) -> ServerPlace:
        return server_changes.server_place(rank, tables.addresses[rank.member])

    servers = [job.ranks[member] for member in tables.first]
    shards = max(FEWEST, SHARDS_A_SERVER * len(servers))
    replicas = min(server_changes.replica_count(job, len(servers)), len(servers) - 1)
    tables.placement = ShardPlacement([1] * shards, replicas, map(place, servers))
    begin = TablesAssigned(tables.placement.assignment, True, saved_tensors(job))
    for rank in servers:
        job.send(rank.member, begin)
    for rank in job.live("server"):
        if rank.member in tables.addresses and rank not in servers:
            tables.placement.add_server(place(rank))


def saved_tensors(job: JobState) -> list[TensorSlice]:
    """Return the tensors of tables in the checkpoint that the job resumes from."""
    return [each for each in job.resume.tensors if each.name.startswith("store/")] if job.resume is not None else []


def _tables_at(placement: ShardPlacement) -> TablesAt:
    found = placement.assignment
    return TablesAt(found.servers, len(found.chains), found.epoch)


def awaited_servers(job: JobState) -> list[Rank]:
    """Return the servers that a worker waits for and whose tables do not listen yet."""
    tables = job.tables
    if not tables.asked or tables.placement is not None:
        return []
    expected = set(tables.first) - tables.addresses.keys()
    return [rank for rank in job.ranks_of("server") if rank.member in expected]


# ---- losses, moves, checkpoints ------------------------------------------------------------------------------------


def may_lose(job: JobState, servers: list[int]) -> bool:
    """Whether tables lose nothing with these servers."""
    tables = job.tables
    if tables.placement is None:
        return not tables.first  # the first servers hold nothing yet that another could continue with
    return tables.placement.survives(servers)


def announce(job: JobState) -> None:
    """Send a changed assignment to servers, and then to workers."""
    placement = job.tables.placement
    if placement is None:
        return
    news = placement.news_for_servers()
    if news is not None:
        for rank in job.live("server"):
            if rank.member.rank in placement.places and rank.member in job.tables.addresses:
                job.send(rank.member, TablesAssigned(news))
    if placement.news_for_workers() is not None:
        for rank in [*job.live("worker"), *job.live("reader")]:
            if rank.member in job.tables.answered:
                job.send(rank.member, _tables_at(placement))
    placement.forget_released()
    server_changes.dismiss_released(job)


def on_saved(job: JobState, answer: CheckpointCommitted) -> None:
    """Tell the servers which checkpoint is the newest complete one, which later parts may continue."""
    placement = job.tables.placement
    if placement is None or job.order.checkpoint.full_every == 1 or (answer.problem and answer.can_continue):
        return
    step = answer.step if answer.can_continue and not answer.problem else -1
    for rank in job.live("server"):
        if rank.member.rank in placement.places:
            job.send(rank.member, TablesSaved(step))


def ask_parts(job: JobState, step: int) -> None:
    """Ask the servers for their tables at this step, for its checkpoint."""
    placement, save = job.tables.placement, job.checkpoints.open.get(step)
    if placement is None or save is None or save.tables is not None:
        return
    save.tables = {rank.member for rank in job.live("server") if rank.member.rank in placement.places}
    for member in sorted(save.tables):
        job.send(member, TablesSave(step))
