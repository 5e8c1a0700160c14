"""A collective among some ranks of a world, or among all under other names.

Built for as many ranks as the group has, then called by the group's ranks and proven again: nobody outside it may take
part, and only its members' contributions are in the results.
"""

from __future__ import annotations

from psctl.schedule.checker import prove
from psctl.schedule.promise import Group
from psctl.schedule.spread import placed
from psctl.schedule.transfer import Schedule


def within(schedule: Schedule, group: Group, world: int) -> Schedule:
    """Return the schedule of a group's size as one among the group's ranks.

    Args:
        schedule: built for `len(group)` ranks; its helpers come after the world's ranks.
        group: the ranks, in the order in which they stand for 0, 1, 2 ...
        world: number of ranks of the whole.

    Raises:
        ValueError: the group has another size, or ranks that the world has not; the caller's fault.
    """
    Group.of(group.ranks, world)
    if len(group) != schedule.world or schedule.members:
        raise ValueError(f"a schedule of {schedule.world} whole ranks does not fit a group of {len(group)}")
    names = group.ranks + tuple(range(world, world + schedule.nodes - schedule.world))
    return prove(
        schedule.name, schedule.collective, world, placed(schedule.transfers, names), schedule.shares,
        nodes=world + schedule.nodes - schedule.world, root=group.ranks[schedule.root],
        owners=tuple(group.ranks[owner] for owner in schedule.owners), members=group.ranks, params=schedule.params,
    )  # fmt: skip
