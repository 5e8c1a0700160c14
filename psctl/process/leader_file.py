"""The file in a job's folder on each host that states which host leads, and where its coordinator listens.

The host's agent writes it. Workers and servers read it when they connect to the coordinator; psctl reads it to find the
host that has the event log.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from psctl.types import UNDECODABLE, Address

NAME = "leader.json"


class LeaderFile(msgspec.Struct, frozen=True):
    """What the file holds."""

    term: int
    host: int
    standby: int | None
    coordinator: Address | None


def write_leader(job_dir: Path, leader: LeaderFile) -> None:
    """Replace the file.

    Raises:
        OSError: the disk is full or broken.
    """
    new = job_dir / f"{NAME}.new"
    new.write_bytes(msgspec.json.encode(leader))
    new.replace(job_dir / NAME)


def read_leader(job_dir: Path) -> LeaderFile | None:
    """Return what the file holds; None when there is none."""
    try:
        return msgspec.json.decode((job_dir / NAME).read_bytes(), type=LeaderFile)
    except (OSError, *UNDECODABLE):
        return None


class CoordinatorAddress:
    """Where a member of a job finds its coordinator, which may move to another host.

    Args:
        first: the address at the process's start.
        job_dir: folder with the file; None: the coordinator does not move.
    """

    def __init__(self, first: Address, job_dir: Path | None) -> None:
        self._first, self._job_dir = first, job_dir

    @property
    def moves(self) -> bool:
        """Whether it may move."""
        return self._job_dir is not None

    def get(self) -> Address:
        """Return the address now."""
        leader = read_leader(self._job_dir) if self._job_dir is not None else None
        return leader.coordinator if leader is not None and leader.coordinator is not None else self._first
