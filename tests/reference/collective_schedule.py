"""Schedules of all collectives, proven by the same checker as psctl's all-reduces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psctl.schedule.checker import ScheduleError, check
from psctl.schedule.schedule import Schedule, Transfer
from tests.reference.contracts import contract
from tests.reference.scatter_gather import Collective


class CollectiveSchedule(Schedule, frozen=True):
    """A schedule with its collective.

    `root` sends or receives the whole; `owners` is the rank of each chunk where the contract distributes chunks
    unevenly; `members` are the ranks that take part, empty for all.
    """

    collective: Collective = "all-reduce"
    root: int = 0
    owners: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


def prove(
    name: str,
    collective: Collective,
    world: int,
    transfers: Iterable[Transfer],
    shares: Sequence[int] = (1,),
    *,
    nodes: int | None = None,
    root: int = 0,
    owners: Sequence[int] = (),
    members: Sequence[int] = (),
) -> CollectiveSchedule:
    """Return the schedule of a collective, proven; arguments as of the fields.

    Raises:
        ScheduleError: it violates its contract.
    """
    if world < 1 or not shares or any(share < 1 for share in shares):
        raise ScheduleError(f"{name}: a world of {world} and shares {list(shares)[:8]} make no schedule")
    try:
        expected = contract(collective, world, len(shares), root, owners or None, members or None)
    except ValueError as error:
        raise ScheduleError(f"{name}: {error}") from error
    some = () if tuple(members) == tuple(range(world)) else tuple(members)
    count = max(world, nodes or world)
    schedule = CollectiveSchedule(
        name, world, count, tuple(shares), tuple(sorted(transfers)), {}, collective, root, tuple(owners), some
    )
    check(schedule, expected)
    return schedule
