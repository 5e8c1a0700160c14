"""A collective among some ranks of a world, or among all under other names.

Built for as many ranks as the group has, then called by the group's ranks and proven again: no other
rank takes part, and only its members' contributions are in the results.
"""

from __future__ import annotations

from psctl.schedule.phases import relabelled
from psctl.schedule.schedule import Schedule
from tests.reference.collective_schedule import CollectiveSchedule, prove
from tests.reference.contracts import Group


def within(schedule: Schedule, group: Group, world: int) -> CollectiveSchedule:
    """Return the schedule of a group's size as one among the group's ranks.

    Args:
        schedule: built for `len(group)` ranks; its helpers come after the world's ranks.
        group: the ranks, in the order in which they stand for 0, 1, 2 ...
        world: number of ranks of the whole.

    Raises:
        ValueError: the group has another size, or ranks that the world has not; the caller's fault.
    """
    Group.of(group.ranks, world)
    whole = schedule if isinstance(schedule, CollectiveSchedule) else _as_collective(schedule)
    if len(group) != schedule.world or whole.members:
        raise ValueError(f"a schedule of {schedule.world} whole ranks does not fit a group of {len(group)}")
    names = group.ranks + tuple(range(world, world + schedule.nodes - schedule.world))
    return prove(
        schedule.name, whole.collective, world, relabelled(schedule.transfers, names), schedule.shares,
        nodes=world + schedule.nodes - schedule.world, root=group.ranks[whole.root],
        owners=tuple(group.ranks[owner] for owner in whole.owners), members=group.ranks,
    )  # fmt: skip


def _as_collective(schedule: Schedule) -> CollectiveSchedule:
    return CollectiveSchedule(schedule.name, schedule.world, schedule.nodes, schedule.shares, schedule.transfers)
