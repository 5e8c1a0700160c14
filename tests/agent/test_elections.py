"""Elections between agents' listeners: the standby leads when a majority does not reach the leader, and only then."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from psctl.agent.elections import Elected, Elections, LeaderFound
from psctl.job.leadership_messages import (
    AgentAddress,
    Configuration,
    Leadership,
    LeadershipAccepted,
    MajorityMissed,
    ReplicaBegin,
)
from psctl.orders import AgentOrders
from psctl.types import Address, Member
from tests.helpers.credentials import JOB, credentials
from tests.helpers.orders import make_hosts, make_order
from tests.helpers.running import until

HOSTS = 3

COORDINATOR = Address("127.0.0.1", 4711)


class SimulatedAgents:
    """The elections of all agents of a job; a test says which of them do not reach the leader."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = [replace(host, address="127.0.0.1") for host in make_hosts(*[1] * HOSTS)]
        self.silent = dict.fromkeys(range(HOSTS), 0.0)
        self.events: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(HOSTS)]
        self.elections = []
        for host in range(HOSTS):
            (folder / str(host)).mkdir()
            self.elections.append(self._make(host))
        self.addresses = tuple(AgentAddress(host, each.address) for host, each in enumerate(self.elections))

    def _make(self, host: int, restarted: Configuration | None = None) -> Elections:
        orders = AgentOrders(
            job=make_order(self.hosts, name=JOB), host=host, python="", paths=[], workdir="", code_dir="",
            job_dir=str(self.folder / str(host)), authority="", certificate="", key="", preauth_secret="",
            coordinator=None, authority_key="", secrets={}, grace=1.0,
            restarted=None if restarted is None else msgspec.to_builtins(restarted),
        )  # fmt: skip
        me = credentials(Member("agent", host))
        return Elections(orders, me, lambda: self.silent[host], self.events[host].put)

    def boot(self, host: int, known: Configuration) -> None:
        """The agent of a host is started again; `known`: the leader's newest configuration."""
        self.elections[host].close()
        self.elections[host] = self._make(host, known)
        self.addresses = tuple(AgentAddress(at, each.address) for at, each in enumerate(self.elections))

    def tell(self, host: int, configuration: Configuration) -> Any:
        return self.elections[host].on_message(Leadership(configuration, configuration, self.addresses), None)

    def elected(self, host: int) -> list[Configuration]:
        found = []
        while not self.events[host].empty():
            event = self.events[host].get()
            if isinstance(event, Elected):
                found.append(event.configuration)
        return found


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[SimulatedAgents]:
    made = SimulatedAgents(tmp_path)
    yield made
    for each in made.elections:
        each.close()


STANDBY = Configuration(0, 3, 0, 1, (0, 1, 2))


def lasting(seconds: float, holds: Callable[[], bool]) -> None:
    """Check that something holds for a while."""
    with pytest.raises(AssertionError, match="not within"):
        until(lambda: not holds(), seconds, name="a change")


def test_the_standby_leads_when_a_majority_does_not_reach_the_leader(agents: SimulatedAgents) -> None:
    for host in range(HOSTS):
        assert agents.tell(host, STANDBY) == LeadershipAccepted(0, 3)
    agents.elections[0].close()  # its host has no power
    agents.silent.update({1: 7.0, 2: 7.0})
    until(lambda: agents.elections[1].leads, 10)
    assert agents.elected(1) == [Configuration(1, 4, 1, None, (0, 1, 2))]
    agents.elections[1].coordinator_at(COORDINATOR)
    found = agents.events[2]
    until(
        lambda: not found.empty() and found.get() == LeaderFound(agents.elections[1].configurations[1], COORDINATOR), 10
    )
    assert agents.elections[2].configurations[1].leader == 1
    assert agents.tell(2, replace(STANDBY, version=9)) == LeadershipAccepted(1, 4), "an earlier leader is not heard"


def test_no_other_host_leads_while_one_of_two_voters_reaches_the_leader(agents: SimulatedAgents) -> None:
    for host in range(HOSTS):
        agents.tell(host, STANDBY)
    agents.silent[1] = 60.0  # the standby's own link is cut, towards the leader
    lasting(2.0, lambda: not agents.elections[1].leads)
    assert agents.elections[2].configurations[1] == STANDBY
    assert agents.tell(1, replace(STANDBY, version=4)) == LeadershipAccepted(0, 4), "it has left no leader for nothing"


def test_a_standby_that_the_leader_has_dropped_is_not_elected(agents: SimulatedAgents) -> None:
    for host in range(HOSTS):
        agents.tell(host, STANDBY)
    for host in (0, 2):
        agents.tell(host, replace(STANDBY, version=4, standby=None))
    agents.silent.update(dict.fromkeys(range(HOSTS), 60.0))
    until(lambda: agents.elections[1].configurations[1].standby is None, 10, name="it hears that it was dropped")
    lasting(1.0, lambda: not agents.elections[1].leads)


def test_a_leader_that_missed_the_majority_hears_of_its_successor(agents: SimulatedAgents) -> None:
    for host in range(HOSTS):
        agents.tell(host, STANDBY)
    agents.silent.update({1: 7.0, 2: 7.0})
    until(lambda: agents.elections[1].leads, 10)
    agents.elections[1].coordinator_at(COORDINATOR)
    lasting(1.0, lambda: agents.elections[0].leads)
    agents.elections[0].on_message(MajorityMissed(), None)
    until(lambda: not agents.elections[0].leads, 10)
    events = []
    while not agents.events[0].empty():
        events.append(agents.events[0].get())
    assert events[-1] == LeaderFound(Configuration(1, 4, 1, None, (0, 1, 2)), COORDINATOR)


def test_a_copy_of_an_earlier_leader_is_removed_once_another_one_is_known(agents: SimulatedAgents) -> None:
    for host in range(HOSTS):
        agents.tell(host, STANDBY)
    agents.elections[2].on_message(ReplicaBegin(1, "key"), None)
    assert agents.elections[2].replica.authority_key == "key"
    agents.silent.update({1: 7.0, 2: 7.0})
    agents.elections[0].close()
    until(lambda: agents.elections[1].leads, 10)
    agents.elections[1].coordinator_at(COORDINATOR)
    until(lambda: agents.elections[2].replica.authority_key == "", 10)


def test_an_agent_that_is_started_again_has_no_vote_until_its_absence_was_confirmed(agents: SimulatedAgents) -> None:
    """It may have promised its vote before: here host 1 needs it to be elected."""
    for host in range(HOSTS):
        agents.tell(host, STANDBY)
    agents.boot(2, STANDBY)
    assert agents.elections[2].abstains
    assert agents.tell(2, STANDBY) is None, "it confirms nothing"
    for host in (0, 1):
        agents.tell(host, STANDBY)  # where it listens now
    agents.elections[0].close()
    agents.silent.update({1: 7.0, 2: 7.0})
    lasting(2.0, lambda: not agents.elections[1].leads)
    without = Configuration(0, 2, 0, 1, (0, 1))
    assert agents.tell(2, without) is None, "older than what it began with"
    assert agents.elections[2].abstains


def test_it_votes_again_once_a_majority_has_confirmed_that_it_was_gone(agents: SimulatedAgents) -> None:
    without = Configuration(0, 4, 0, 1, (0, 1))
    agents.boot(2, without)
    again = Configuration(0, 5, 0, 1, (0, 1, 2))
    answer = agents.elections[2].on_message(Leadership(again, without, agents.addresses), None)
    assert answer == LeadershipAccepted(0, 5)
    assert not agents.elections[2].abstains
    for host in (0, 1):
        agents.tell(host, again)
    agents.elections[0].close()
    agents.silent.update({1: 7.0, 2: 7.0})
    until(lambda: agents.elections[1].leads, 10)
