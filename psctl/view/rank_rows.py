"""Many ranks in few rows: failed and lost ones stay single, the others are grouped by role and state. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from psctl.grouping import grouped
from psctl.job.activity import PARTS
from psctl.view.job_view import JobView, RankView

_ORDER = ("failed", "lost", "stopped", "starting", "waiting", "running", "done")
_ROLES = ("worker", "server", "reader", "coordinator", "agent")


@dataclass(frozen=True)
class RankRow:
    """One row of the table of ranks; `rank` and `steps` may cover several."""

    rank: str
    host: str
    state: str
    steps: tuple[int, int]
    rate: float
    pid: int
    error: str
    staleness: int = 0
    cpu: int = 0  # percent of one core; the mean of several
    memory: int = 0  # bytes; the most of several
    sync: int = 0  # percent of the time; the most of several
    sends: float = 0.0  # bytes a second; the sum of several
    receives: float = 0.0
    gpu: int = 0  # percent of the time that its GPUs are busy; the mean of several
    gpu_memory: int = 0  # bytes; the most of several
    parts: Mapping[str, int] = field(default_factory=dict)  # percent of the time; the mean of several


def rank_rows(state: JobView, rows: int) -> list[RankRow]:
    """Return at most `rows` rows (at least one): one a rank if they fit, else groups."""
    ranks = sorted(state.ranks.values(), key=lambda r: (_order_of(_ROLES, r.role), r.role, r.rank))
    if len(ranks) <= rows:
        return [_single(state, rank) for rank in ranks]
    trouble = [rank for rank in ranks if rank.state in ("failed", "lost")]
    groups = grouped(((rank.role, rank.state), rank) for rank in ranks)
    if len(groups) + len(trouble) <= rows:
        singles = trouble
        groups = {key: found for key, found in groups.items() if key[1] not in ("failed", "lost")}
    else:
        singles = []
    order = sorted(groups.items(), key=lambda item: (_order_of(_ROLES, item[0][0]), _order_of(_ORDER, item[0][1])))
    shown = [_single(state, rank) for rank in singles] + [_group(state, found) for _, found in order]
    return shown[: max(1, rows)]


def _order_of(order: tuple[str, ...], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _single(state: JobView, rank: RankView) -> RankRow:
    step = state.step_of(rank)
    steps = (step, step)
    return RankRow(
        rank.name, rank.host, rank.state, steps, state.rate_of(rank), rank.pid, rank.last_error, rank.staleness,
        rank.cpu, rank.memory, rank.sync, rank.sends, rank.receives, rank.gpu, rank.gpu_memory, rank.parts,
    )  # fmt: skip


def _group(state: JobView, ranks: list[RankView]) -> RankRow:
    if len(ranks) == 1:
        return _single(state, ranks[0])
    steps = [state.step_of(rank) for rank in ranks]
    hosts = {rank.host for rank in ranks}
    slowest = min(ranks, key=state.step_of)
    behind = f"slowest {slowest.name} on {slowest.host}" if min(steps) < max(steps) else ""
    errors = [f"{rank.name}: {rank.last_error}" for rank in ranks if rank.last_error]
    return RankRow(
        rank=f"{len(ranks)} {ranks[0].role}s",
        host=f"{len(hosts)} hosts" if len(hosts) > 1 else next(iter(hosts)),
        state=ranks[0].state,
        steps=(min(steps), max(steps)),
        rate=sum(state.rate_of(rank) for rank in ranks) / len(ranks),
        pid=0,
        error=(errors or [behind])[0],
        staleness=max(rank.staleness for rank in ranks),
        cpu=round(sum(rank.cpu for rank in ranks) / len(ranks)),
        memory=max(rank.memory for rank in ranks),
        sync=max(rank.sync for rank in ranks),
        sends=sum(rank.sends for rank in ranks),
        receives=sum(rank.receives for rank in ranks),
        gpu=round(sum(rank.gpu for rank in ranks) / len(ranks)),
        gpu_memory=max(rank.gpu_memory for rank in ranks),
        parts={name: sum(rank.parts.get(name, 0) for rank in ranks) // len(ranks) for name in PARTS},
    )


def rank_ranges(members: list[str]) -> str:
    """Return names as ranges: worker/0-5, server/1."""
    ranks: dict[str, set[int]] = {}
    others = []
    for member in members:
        role, _, rank = member.partition("/")
        if rank.isdecimal():
            ranks.setdefault(role, set()).add(int(rank))
        else:
            others.append(member)
    texts = []
    for role, found in ranks.items():
        starts = sorted(rank for rank in found if rank - 1 not in found)
        stops = sorted(rank for rank in found if rank + 1 not in found)
        for start, stop in zip(starts, stops, strict=True):
            texts.append(f"{role}/{start}" if start == stop else f"{role}/{start}-{stop}")
    return ", ".join(texts + others)
