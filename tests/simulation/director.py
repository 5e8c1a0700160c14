"""A coordinator that moves shards and starts servers whenever the scenario says so.

Its messages are those of the job's state machine, as in coordinator.py, which moves shards by balance and after losses.
This one moves them at random too, so servers and workers get sequences of assignments that are rare in a balanced job.
"""

from __future__ import annotations

from psctl.coordinator.state import server_changes
from psctl.coordinator.state.instructions import StartMember, Tick
from psctl.job.assignment import assign
from psctl.job.shard_placement import ShardPlacement
from tests.simulation.coordinator import Coordinator

LATE = 8.0
"""Seconds until a lost server is replaced in scenarios that replace none: longer than most runs take, and shorter than
the coordinator waits for the end of a process."""


class Director(Coordinator):
    """The coordinator's process."""

    def start_member(self, start: StartMember) -> None:
        replaces = start.member.role == "server" and start.member.incarnation > 0 and self.machine.job.training
        if replaces and not self._scenario.replaces:
            self._world.after(LATE, super().start_member, start)
        else:
            super().start_member(start)

    def move(self, shard: int, server: int) -> None:
        """Make `server` the primary of a shard, when that can be."""
        placement = self._movable()
        if placement is None or server not in placement.places:
            return
        goal = [list(chain) for chain in placement._goal]
        chain = goal[shard % len(goal)]
        goal[shard % len(goal)] = [server, *[one for one in chain if one != server]][: len(chain)]
        self.aim(goal)

    def leave(self, server: int) -> None:
        """Move everything away from a server."""
        placement = self._movable()
        rest = {rank: place.host for rank, place in placement.places.items() if rank != server} if placement else {}
        if placement is not None and rest:
            replicas = min(placement.replicas, len(rest) - 1)
            self.aim(assign(placement.sizes, rest, replicas, placement.chains))

    def join(self, server: int, host: int) -> None:
        """Start one more server."""
        if self._movable() is not None:
            server_changes.start_server(self.machine.job, server, host)
            self.handle(Tick())

    def _movable(self) -> ShardPlacement | None:
        """Return the shards, while they may be moved."""
        job = self.machine.job
        placement = job.shards.placement
        moves = job.training and not job.all_processes_end and not self.over
        return placement if moves and placement is not None and not placement.transfers else None
