"""A coordinator that also moves shards and adds servers at random times.

Its messages are those of the job's state machine, which moves shards for balance and after losses only. So servers and
workers receive sequences of assignments that are rare in a job.
"""

from __future__ import annotations

from psctl.coordinator.policies.assignment import assign
from psctl.coordinator.policies.shard_placement import ShardPlacement
from psctl.coordinator.state import server_changes
from psctl.coordinator.state.instructions import StartMember, Tick
from tests.simulation.coordinator import Coordinator

LATE = 8.0
"""Seconds until a lost server is replaced in scenarios without replacement: longer than most runs, and shorter than
the time for which the coordinator waits for the end of a process."""


class ReassigningCoordinator(Coordinator):
    """A coordinator with methods that reassign shards."""

    def start_member(self, start: StartMember) -> None:
        replaces_servers = start.member.role == "server" and start.member.incarnation > 0 and self.machine.job.training
        if replaces_servers and not self._scenario.replaces_servers:
            self._world.after(LATE, super().start_member, start)
        else:
            super().start_member(start)

    def move(self, shard: int, server: int) -> None:
        """Make `server` the primary of a shard, if shards can move now."""
        placement = self._movable()
        if placement is None or server not in placement.places:
            return
        goal = [list(chain) for chain in placement.goal]
        chain = goal[shard % len(goal)]
        goal[shard % len(goal)] = [server, *[one for one in chain if one != server]][: len(chain)]
        self.aim(goal)

    def leave(self, server: int) -> None:
        """Move all shards away from a server."""
        placement = self._movable()
        rest = {rank: place.host for rank, place in placement.places.items() if rank != server} if placement else {}
        if placement is not None and rest:
            replicas = min(placement.replicas, len(rest) - 1)
            self.aim(assign(placement.sizes, rest, replicas, placement.chains))

    def join(self, server: int, host: int) -> None:
        """Start an additional server."""
        if self._movable() is not None:
            server_changes.start_server(self.machine.job, server, host)
            self.handle(Tick())

    def _movable(self) -> ShardPlacement | None:
        """Return the placement of shards, or None while they cannot move."""
        job = self.machine.job
        placement = job.shards.placement
        moves = job.training and not job.all_processes_end and not self.over
        return placement if moves and placement is not None and not placement.transfers else None
