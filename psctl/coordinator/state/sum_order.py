"""The order in which gradients are summed: it depends on which ranks share a host, so it is recorded, shown and kept.

Floating-point sums depend on their grouping. Under ps with `bsp` the ranks of a host, or those of a rack, are summed
first (ps/dense/host_sums.py). The groups are chosen once a job and are in every checkpoint; a job that resumes from one
with as many workers takes its groups, wherever its ranks are now. A collective sums in the order of its schedule, which
is made for the hosts; a job that resumes with another schedule appends a notice.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from psctl.grouping import grouped
from psctl.types import PLAIN

if TYPE_CHECKING:
    from psctl.coordinator.state.job_state import JobState, Rank

Groups = tuple[tuple[int, ...], ...]


def choose_groups(job: JobState) -> None:
    """Choose the groups, once a job, when the strategy is known; append a notice if they differ from the
    checkpoint's."""
    if job.host_groups is None:
        saved = _saved(job)
        job.host_groups = groups_by_place(job) if saved is None else saved
        if saved is None and _differs(job):
            job.notice(
                "gradients are summed in another order than before the checkpoint, because its strategy or its ranks' "
                "hosts were different: results may differ in the last bits"
            )


def groups_by_place(job: JobState) -> Groups:
    """Return the workers that share a host, or a rack where the plan says so, whose gradients are summed before they
    leave it (one push a host or rack): in step, as they are, and where there is another host for them to go to."""
    if not _grouped(job) or len(job.order.hosts) == 1:
        return ()
    found = grouped((rack_of(job, rank) or rank.host, rank.member.rank) for rank in job.ranks_of("worker"))
    return tuple(tuple(ranks) for ranks in found.values() if len(ranks) > 1)


def rack_of(job: JobState, rank: Rank) -> str:
    """Return the rack of a process, where gradients are summed by rack; else "". A host that was added during the run
    is in none of the others' racks."""
    racks = job.plan.racks if job.plan is not None else ()
    if not racks:
        return ""
    return racks[rank.host] if rank.host < len(racks) else f"host {rank.host}"


def racks_by_rank(job: JobState) -> tuple[str, ...]:
    """Return the rack of each worker, where each group of the order is a rack; else ()."""
    assert job.plan is not None, "it is known with the plan"
    if not job.plan.racks or (job.host_groups or ()) != groups_by_place(job):
        return ()
    return tuple(rack_of(job, rank) for rank in job.ranks_of("worker"))


def record(job: JobState) -> dict[str, object]:
    """Return what checkpoints hold of the order."""
    assert job.plan is not None, "it is known with the plan"
    return {"groups": [list(group) for group in job.host_groups or ()], "schedule": _plain(job.plan.options)}


def describe(job: JobState) -> str:
    """Return the order for people."""
    assert job.plan is not None, "it is known with the plan"
    if len(job.ranks_of("worker")) == 1:
        return "of one worker"
    if job.plan.chosen != "ps":
        return f"as {job.plan.chosen} joins them"
    if job.order.staleness is None:
        return "each push by itself"
    groups = [_group(job, group) for group in job.host_groups or ()]
    place = "rack" if job.plan.racks else "host"
    return f"by {place}, {' + '.join(groups)}, then the others in rank order" if groups else "in rank order"


def _group(job: JobState, group: tuple[int, ...]) -> str:
    hosts = {job.host_name(rank) for rank in job.ranks_of("worker") if rank.member.rank in group}
    ranks = f"({', '.join(map(str, group))})"
    return f"{hosts.pop()} {ranks}" if len(hosts) == 1 else ranks


def _grouped(job: JobState) -> bool:
    return (
        job.plan is not None and job.plan.chosen == "ps" and job.order.staleness == 0 and job.order.compression == PLAIN
    )


class SavedOrder(msgspec.Struct, frozen=True):
    """The order in a checkpoint: the ranks of each host group, and the options of the schedule."""

    groups: tuple[tuple[int, ...], ...] = ()
    schedule: object = None


def _before(job: JobState) -> SavedOrder | None:
    """Return what the checkpoint that the job resumes from holds of the order, if as many workers continue."""
    state = job.resume.state if job.resume is not None else {}
    found = state.get("sums")
    if not isinstance(found, dict) or state.get("world") != len(job.ranks_of("worker")):
        return None
    with contextlib.suppress(msgspec.ValidationError):  # another version of psctl wrote it
        return msgspec.convert(found, SavedOrder)
    return None


def _saved(job: JobState) -> Groups | None:
    """Return the checkpoint's groups, where this job sums by groups as well."""
    before = _before(job)
    if before is None or not _grouped(job) or job.resume is None or job.resume.state.get("strategy") != "ps":
        return None
    ranks = [rank for group in before.groups for rank in group]
    fit = len(set(ranks)) == len(ranks) and set(ranks) <= {rank.member.rank for rank in job.ranks_of("worker")}
    return before.groups if fit else None


def _plain(options: dict[str, object]) -> object:
    """Return a schedule's options as they come back from a checkpoint."""
    return msgspec.json.decode(msgspec.json.encode(options))


def _differs(job: JobState) -> bool:
    before = _before(job)
    if before is None or job.plan is None or job.resume is None or len(job.ranks_of("worker")) == 1:
        return False
    same = job.resume.state.get("strategy") == job.plan.chosen and before.schedule == _plain(job.plan.options)
    return not same or (job.host_groups or ()) != before.groups
