"""Proofs of schedules of any collective, from transfers that a test makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psctl.schedule import checker
from psctl.schedule.contracts import Collective, contract
from psctl.schedule.schedule import Schedule, Transfer


def prove(
    name: str, collective: Collective, world: int, transfers: Iterable[Transfer], shares: Sequence[int] = (1,), *,
    nodes: int | None = None, root: int = 0,
) -> Schedule:  # fmt: skip
    """Return the proven schedule; raises ScheduleError, or ValueError where the numbers fit no contract."""
    kept = contract(collective, world, len(shares), root)
    return checker.prove(name, world, transfers, shares, nodes=nodes, contract=kept, root=root)
