"""Assignments of shards for tests."""

from __future__ import annotations

from collections.abc import Sequence

from psctl.types import Address, Assignment, ServerAt


def first_assignment(owners: Sequence[int], addresses: Sequence[Address]) -> Assignment:
    """Return the assignment of servers 0, 1 ... that were just started, without replicas."""
    at = [ServerAt(rank, 0, address) for rank, address in enumerate(addresses)]
    return Assignment(0, [[owner] for owner in owners], [[] for _ in owners], at)
