"""Which servers hold additive tables: those of the plan where it has some, else servers started for tables alone.

A store may be opened before `prepare`, when there is no plan yet. Then as many servers as `servers:` says, else one,
are started, on hosts without workers first; a plan that wants servers later begins with these and adds what it lacks.
Which servers hold tables is settled when the first store is opened, for all stores and workers alike.
"""

from __future__ import annotations

from collections.abc import Callable

from psctl.job.stores import ServeTables, TablesAt, TablesReady
from psctl.job.table import Job, Rank
from psctl.orders import JobOrder
from psctl.words import ServerAt


def places(order: JobOrder) -> list[int]:
    """Return the host of each server that is started for tables: in turn, hosts with the fewest workers first."""
    hosts = sorted(
        (index for index, host in enumerate(order.hosts) if host.may_serve), key=lambda at: order.hosts[at].workers
    )
    count = 1 if order.servers is None else order.servers
    return [hosts[at % len(hosts)] for at in range(count)] if hosts else []


def wanted(job: Job, rank: Rank, start: Callable[[list[int]], None]) -> None:
    """A worker wants to open a store.

    Args:
        start: starts servers on these hosts.
    """
    if job.leaving:
        return
    job.tables.since = job.tables.since or job.now
    job.tables.asked.add(rank.member)
    if not job.tables.holders:
        if not job.of("server"):
            start(places(job.order))
        job.tables.holders = [server.member for server in job.of("server")]
    if not job.tables.holders:
        _answer(job, *_none(job.order))
    advance(job)


def _none(order: JobOrder) -> tuple[str, str]:
    if order.servers == 0:
        return "run.store() needs a server, and the job file says servers: 0", "servers: auto, or 1 and more"
    return "run.store() needs a server, and no host may hold one", "let a host have roles: [server] in the cluster file"


def ready(job: Job, rank: Rank, message: TablesReady) -> None:
    """A server's tables listen."""
    job.tables.addresses[rank.member] = message.address
    advance(job)


def advance(job: Job) -> None:
    """Tell servers that have joined to hold tables; answer workers when all do."""
    if not job.tables.asked:
        return
    for rank in _holders(job):
        if rank.joined and rank.member not in job.tables.told:
            job.tables.told.add(rank.member)
            job.tell(rank.member, ServeTables())
    if not missing(job):
        _answer(job)


def _holders(job: Job) -> list[Rank]:
    return [job.ranks[member] for member in job.tables.holders]


def _answer(job: Job, problem: str = "", hint: str = "") -> None:
    found = [
        ServerAt(rank.member.rank, rank.member.incarnation, job.tables.addresses[rank.member]) for rank in _holders(job)
    ]
    for member in sorted(job.tables.asked):
        job.tell(member, TablesAt(found, problem, hint))
    job.tables.asked.clear()


def missing(job: Job) -> list[Rank]:
    """Return the servers that a worker waits for and whose tables do not listen yet."""
    return [rank for rank in _holders(job) if job.tables.asked and rank.member not in job.tables.addresses]
