"""Messages about the leadership of a job: which coordinator leads, its copy on the standby, and votes between agents.

The protocol is in docs/internals/coordinator.md; agent/leadership.py and coordinator/replication.py decide.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from psctl.job.message import JobMessage
from psctl.orders import JobOrder
from psctl.types import MOST_RANKS, Address, Count, Name, Size

FEWEST_VOTERS = 3
"""Hosts from which a job has a standby: of two hosts, none can tell the other's end from a broken link."""


def has_standby(job: JobOrder) -> bool:
    """Return whether a job was started on enough hosts for a standby of its coordinator."""
    return len(job.hosts) - job.added >= FEWEST_VOTERS


class Configuration(msgspec.Struct, frozen=True):
    """Which host leads a job, which one may succeed it, and which hosts vote.

    A configuration is newer than another one if its (term, version) is larger.
    """

    term: Count = 0
    """One more with each elected leader."""
    version: Count = 0
    leader: Count = 0
    """The host (its index) whose coordinator leads."""
    standby: Count | None = None
    """The host that has a copy of the coordinator's state, and may succeed; None: none does."""
    voters: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_RANKS)] = ()

    @property
    def age(self) -> tuple[int, int]:
        """By which configurations are ordered."""
        return self.term, self.version

    def is_majority(self, hosts: frozenset[int]) -> bool:
        """Return whether these hosts have more than half of the votes; the leader has two where the number is even."""
        total, given = len(self.voters), len(hosts & set(self.voters))
        if total % 2 == 0:
            total += 1
            given += self.leader in hosts
        return 2 * given > total

    def elects(self, host: int) -> Configuration:
        """Return the configuration in which `host` leads after its election under this one."""
        return Configuration(self.term + 1, self.version + 1, host, None, self.voters)


# ---- the coordinator and agents ------------------------------------------------------------------------------------


class AgentAddress(msgspec.Struct, frozen=True):
    """Where the agent of a host listens for other agents."""

    host: Count
    address: Address


class Leadership(JobMessage, frozen=True):
    """To each agent: the configuration from now on. Answered by LeadershipAccepted, with a newer one if it has one."""

    configuration: Configuration
    committed: Configuration
    """The newest one that a majority has accepted: a successor on the leader's own host needs both."""
    agents: Annotated[tuple[AgentAddress, ...], msgspec.Meta(max_length=MOST_RANKS)]


class LeadershipAccepted(JobMessage, frozen=True):
    """The agent has this configuration now."""

    term: Count
    version: Count


class MajorityMissed(JobMessage, frozen=True):
    """To the leader's own agent: most hosts do not answer; another host may lead by now."""


class ReplicaBegin(JobMessage, frozen=True):
    """To an agent: store a copy of the coordinator's state. The log, a snapshot and records follow.

    `authority_key`: PEM, with which a successor issues certificates; it stays in the agent's memory.
    """

    copy: Count
    authority_key: Annotated[str, msgspec.Meta(max_length=16_384)]


class ReplicaLog(JobMessage, frozen=True):
    """Payload: the next bytes of the event log."""

    copy: Count


class ReplicaSnapshot(JobMessage, frozen=True):
    """Payload: the next bytes of a snapshot, which begins a new journal; otherwise as ReplicaRecord."""

    copy: Count
    sequence: Size
    whole: bool
    number: Size


class ReplicaRecord(JobMessage, frozen=True):
    """Payload: the next bytes of a record of the journal; `whole`: the last ones. Answered by ReplicaStored then."""

    copy: Count
    sequence: Size
    whole: bool


class ReplicaStored(JobMessage, frozen=True):
    """All up to this record is stored; `problem`: it cannot be stored."""

    copy: Count
    sequence: Size
    problem: Name = ""


# ---- between agents --------------------------------------------------------------------------------------------------


class VoteWanted(msgspec.Struct, frozen=True, tag=True):
    """The standby of this configuration wants to lead: is its leader out of reach, and no newer configuration known?

    `binding`: the answer counts, and the voter follows no earlier leader any more. The standby asks without it first.
    """

    configuration: Configuration
    binding: bool


class VoteGiven(msgspec.Struct, frozen=True, tag=True):
    """Answer to VoteWanted. `refusal`: why not, "" when it is given; `newer`: the configuration that forbids it."""

    refusal: Name = ""
    newer: Configuration | None = None


class LeaderWanted(msgspec.Struct, frozen=True, tag=True):
    """Which is the newest configuration, and where does its coordinator listen? Answered by LeaderAt."""


class LeaderAt(msgspec.Struct, frozen=True, tag=True):
    """The newest configuration that an agent knows; `coordinator` is None while the address is not known.

    `stands`: the agent asks for votes that count.
    """

    configuration: Configuration
    coordinator: Address | None
    stands: bool = False
