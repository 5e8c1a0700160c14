"""The leader's part in the leadership of its job: which configurations hold, and what may be carried out. Pure.

The leader sends every record of its journal to the standby, and carries out what follows from it after the standby has
stored it. Who votes, and which host is the standby, changes by configurations, which hold when a majority of the voters
before and after has accepted them. agent/leadership.py has the argument why no two coordinators ever lead at once.
"""

from __future__ import annotations

from msgspec.structs import replace

from psctl.job.leadership_messages import FEWEST_VOTERS, Configuration

UNKNOWN = -1
"""The standby that a killed coordinator may have proposed."""


class Replication:
    """The state of the copy and of the configurations of one leader. Calls must not overlap.

    Args:
        committed: the newest configuration that is known to hold, with this host as the leader.
        newest: the newest one that may be known to any agent; the leader's own agent knows it first.
        is_successor: a coordinator on this host was killed: it is unknown which configurations it had proposed.
    """

    def __init__(self, committed: Configuration, newest: Configuration, *, is_successor: bool) -> None:
        self.committed = committed
        """The newest configuration that a majority has accepted."""
        self.proposed: Configuration | None = None
        """A newer one that waits for a majority."""
        self._accepted: set[int] = set()  # of the proposed one
        self._electable: set[int] = set()  # standbys of the committed configuration, and of those proposed since
        self.copy_to: int | None = None
        """The host that stores a copy, the standby or one that becomes it."""
        self.copy = 0
        """Counts the copies that were begun."""
        self.sequence = 0
        """Of the last record that was sent to the copy."""
        self.stored = -1
        """Of the last record that the copy has confirmed; -1: not even the snapshot."""
        if is_successor:
            self.proposed = newest
            self._electable = {UNKNOWN}
            self._propose(replace(newest, standby=None))

    @property
    def newest(self) -> Configuration:
        """The configuration that agents are to have."""
        return self.proposed or self.committed

    @property
    def has_electable(self) -> bool:
        """Whether some host may be elected now: then it must have stored all that is carried out."""
        return bool(self._electable)

    def may_carry_out(self) -> bool:
        """Return whether what follows from the last record may be carried out."""
        return not self.has_electable or (self.copy_to is not None and self.stored >= self.sequence)

    # ---- configurations ------------------------------------------------------------------------------------------

    def awaited(self) -> list[int]:
        """Return the hosts whose agents are to accept the newest configuration: the leader's own before all others."""
        proposed = self.proposed
        if proposed is None:
            return []
        if proposed.leader not in self._accepted:
            return [proposed.leader]
        return [host for host in sorted({*proposed.voters, *self.committed.voters}) if host not in self._accepted]

    def accepted_by(self, host: int, term: int, version: int) -> None:
        """An agent has accepted a configuration."""
        proposed = self.proposed
        if proposed is None or (term, version) != proposed.age:
            return
        self._accepted.add(host)
        found = frozenset(self._accepted)
        if proposed.is_majority(found) and self.committed.is_majority(found):
            self.committed, self.proposed = proposed, None
            self._electable = set() if proposed.standby is None else {proposed.standby}

    def drop_standby(self) -> Configuration | None:
        """Propose to go on without the standby; return the proposal, None if there is nothing to propose."""
        self.copy_to = None
        return self._propose(replace(self.newest, standby=None)) if self.newest.standby is not None else None

    def change_voters(self, hosts: frozenset[int]) -> Configuration | None:
        """Propose other voters; return the proposal, None if there is nothing to propose now.

        Args:
            hosts: that are part of the job and not lost.
        """
        needed = {host for host in (self.committed.leader, self.committed.standby) if host is not None}
        wanted = hosts | needed
        if self.proposed is not None or wanted == set(self.committed.voters):
            return None
        return self._propose(replace(self.committed, voters=tuple(sorted(wanted))))

    def make_standby(self) -> Configuration | None:
        """Propose the host that stores the copy as the standby; None while it has not stored all that was sent."""
        if self.proposed is not None or self.committed.standby is not None or self.copy_to is None:
            return None
        if self.stored < self.sequence:
            return None
        return self._propose(replace(self.committed, standby=self.copy_to))

    def _propose(self, configuration: Configuration) -> Configuration:
        self.proposed = replace(configuration, version=self.newest.version + 1)
        self._accepted = set()
        if configuration.standby is not None:
            self._electable.add(configuration.standby)
        return self.proposed

    # ---- the copy ------------------------------------------------------------------------------------------------

    def may_copy_to(self, host: int) -> bool:
        """Return whether a copy on this host may begin: no other host may be elected meanwhile."""
        many = len(self.committed.voters) >= FEWEST_VOTERS
        return many and not self.has_electable and self.copy_to is None and host in self.committed.voters

    def begin_copy(self, host: int) -> int:
        """Begin a copy on a host; return its number."""
        self.copy_to, self.stored, self.sequence = host, -1, 0
        self.copy += 1
        return self.copy

    def next_record(self) -> int:
        """Return the sequence number of a record that is sent to the copy."""
        self.sequence += 1
        return self.sequence

    def stored_by(self, host: int, copy: int, sequence: int) -> None:
        """The host of the copy has stored all records up to this one."""
        if host == self.copy_to and copy == self.copy:
            self.stored = max(self.stored, sequence)
