"""What a member says that cannot be, as the job is now: refused before the coordinator acts on it or keeps it.

The table of permits.py knows roles and states of connections; what stands here needs the job: its shards, its ranks,
who has a part in checkpoints.
"""

from __future__ import annotations

from typing import Any

from psctl.coordinator.state.job_state import JobState
from psctl.job.checkpoint_messages import SaveBegin
from psctl.job.membership_messages import LostWorkerClocks, ProtocolViolation, ShardCaughtUp, ShardHandedOver
from psctl.job.table_server_messages import TablesCaughtUp, TablesHandedOver
from psctl.job.training_messages import Prepare, WorkerReport
from psctl.types import Layout, Member

MOST_BYTES = 1 << 42
"""Bytes of parameters, at four bytes an element: 10^12 elements. More would be millions of shards."""

AHEAD = 1 << 20
"""Steps by which a checkpoint may be ahead of what was told of: workers report a few times a second."""

MOST_WAITING = 1 << 17
"""Steps whose numbers may wait for ranks that have not reached them."""


def refused(job: JobState, member: Member, message: Any) -> str:
    """Return why a message is refused, or ""."""
    match message:
        case SaveBegin(step=step):
            return _save(job, member, step)
        case Prepare():
            return _layout(message.layout)
        case WorkerReport():
            waiting = job.reports.waiting + len(message.steps)
            return "" if waiting <= MOST_WAITING else f"numbers of {waiting} steps, more than {MOST_WAITING}"
        case LostWorkerClocks():
            shards = {*message.clocks, *message.versions, *message.apart}
            return _shard(max(shards, default=0), len(job.shards)) or _shard(min(shards, default=0), len(job.shards))
        case ShardCaughtUp(shard=shard, server=server):
            return _shard(shard, len(job.shards)) or _server(job, server)
        case ShardHandedOver(shard=shard):
            return _shard(shard, len(job.shards))
        case TablesCaughtUp(shard=shard, server=server):
            return _shard(shard, _of_tables(job)) or _server(job, server)
        case TablesHandedOver(shard=shard):
            return _shard(shard, _of_tables(job))
        case ProtocolViolation():
            return "" if message.member.role == "worker" else f"a complaint about {message.member}"
    return ""


def _save(job: JobState, member: Member, step: int) -> str:
    """Asked on the threads of connections too: it reads one attribute, and copies the set in one operation."""
    told = job.reports.step
    if step > told + AHEAD:
        return f"step {step}, where the furthest step told of is {told}"
    sources = {source.rank for source in list(job.saves.sources) if source.role == "worker"}
    return "" if member.role == "server" or member.rank in sources else "it has no part in checkpoints"


def _layout(layout: Layout) -> str:
    total = 0
    for each in layout.parameters:
        total += 4 * each.size
        if total > MOST_BYTES:
            return f"parameters of more than {MOST_BYTES} bytes"
    return ""


def _of_tables(job: JobState) -> int:
    holdings = job.tables.holdings
    return len(holdings.assignment.chains) if holdings is not None else 0


def _shard(index: int, shards: int) -> str:
    if not shards:
        return ""  # nothing is settled yet, or all start again: it says nothing then
    return "" if 0 <= index < shards else f"shard {index} of {shards}"


def _server(job: JobState, rank: int) -> str:
    return "" if job.newest("server", rank) is not None else f"server/{rank}, which the job never had"
