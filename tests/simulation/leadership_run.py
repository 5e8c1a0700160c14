"""One run of hosts that elect a successor when their leader is lost: shipped voters and leaders, and an oracle.

Leaders take inputs, send them to the copy on the standby, and carry them out. Connections break, links are cut,
coordinators are killed and started again, hosts lose their power, and boot without memory of their votes. Messages
between a leader and an agent arrive in order until their connection breaks; questions for votes, and answers, are lost
or late. The oracle keeps what was carried out:

- no two leaders carry out different inputs at the same place of the job's history;
- a leader's state has all that any leader carried out before it;
- once the faults are over, and no host was lost, the job goes on.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from psctl.agent.leadership import Election, Voter
from psctl.coordinator.replication import Replication
from psctl.job.leadership_messages import Configuration, VoteWanted
from tests.simulation.kernel import Violation
from tests.simulation.outcome import Outcome, outcome_of

ACTIONS = 1500
"""Random actions of a run, before the faults are over."""

CALM = 6000
"""Actions after it in which the job must go on."""


@dataclass
class Copy:
    """What an agent stores of the leader's state."""

    number: int = -1
    sequence: int = 0
    records: list[int] = field(default_factory=list)


@dataclass
class Host:
    """An agent with its vote and its copy, and what it last accepted as committed."""

    voter: Voter
    committed: Configuration
    alive: bool = True
    copy: Copy = field(default_factory=Copy)
    election: Election | None = None
    silent: bool = False


class Leader:
    """A coordinator: its history, how much of it is carried out, and its channels to agents."""

    def __init__(self, host: int, history: list[int], core: Replication) -> None:
        self.host, self.history, self.core = host, history, core
        self.carried = len(history)
        self.down: dict[int, deque[tuple[object, ...]]] = {}  # to agents that are connected
        self.up: dict[int, deque[tuple[object, ...]]] = {}
        self.sent: dict[int, tuple[int, int]] = {}  # the age of the configuration that was sent on this connection
        self.known: dict[int, tuple[int, int]] = {}  # and of the one that its agent has accepted

    @property
    def copy(self) -> int:
        """The number of the copy; of two leaders these differ, for an agent takes a begin before any record."""
        return self.number_of(self.core.copy)

    def number_of(self, copy: int) -> int:
        return 1000 * self.core.committed.term + copy


class LeadershipRun:
    """One seed."""

    def __init__(self, seed: int, traced: bool = False) -> None:
        self.chance = random.Random(seed)
        count = self.chance.choice((3, 3, 4, 5))
        first = Configuration(voters=tuple(range(count)))
        self.hosts = [Host(Voter(host, first), first) for host in range(count)]
        self.leaders = [Leader(0, [], Replication(first, first, is_successor=False))]
        self.cut: set[frozenset[int]] = set()
        self.votes: list[tuple[int, int, VoteWanted]] = []  # questions in flight: (from, to, question)
        self.history: list[int] = []  # what was carried out
        self.next_input = 0
        self.power_losses = 0
        self.hosts_die = self.chance.random() < 0.4
        self.traced, self.trace = traced, list[str]()
        self.checked = 0
        self.elections = 0

    def run(self) -> None:
        for _ in range(ACTIONS):
            self.act(faults=True)
        self.cut.clear()
        done = len(self.history)
        for _ in range(CALM):
            self.act(faults=False)
            if len(self.history) > done + 3:
                return
        if not self.power_losses:
            states = [(host.voter.configuration, host.election is not None) for host in self.hosts]
            raise Violation("liveness", f"nothing is carried out any more: {states}")

    # ---- actions ---------------------------------------------------------------------------------------------------

    def act(self, *, faults: bool) -> None:
        usual = [self.take_input, self.carry_out, *[self.deliver] * 6, *[self.maintain] * 2, *[self.vote] * 3,
                 self.stand, *[self.connect] * 2, self.notice_silence, self.ask]  # fmt: skip
        unusual = [self.break_connection, self.cut_link, self.heal_link, self.kill_coordinator]
        if self.hosts_die and sum(not host.alive for host in self.hosts) <= 1:
            unusual.append(self.kill_host)
        if any(not host.alive for host in self.hosts):
            unusual += [self.boot_host] * 2
        if faults and self.chance.random() < 0.01:
            self.chance.choice(unusual)()
        else:
            self.chance.choice(usual)()

    def note(self, text: str) -> None:
        if self.traced:
            self.trace.append(text)

    def pick(self) -> Leader | None:
        return self.chance.choice(self.leaders) if self.leaders else None

    def take_input(self) -> None:
        leader = self.pick()
        if leader is None or leader.carried < len(leader.history) or not leader.core.may_carry_out():
            return
        self.next_input += 1
        leader.history.append(self.next_input)
        self.note(f"leader {leader.host} takes {self.next_input}")
        to = leader.core.copy_to
        if to is not None:
            sequence = leader.core.next_record()
            if to in leader.down:
                leader.down[to].append(("record", leader.copy, sequence, self.next_input))

    def carry_out(self) -> None:
        leader = self.pick()
        if leader is None or leader.carried == len(leader.history) or not leader.core.may_carry_out():
            return
        leader.carried = len(leader.history)
        self.note(f"leader {leader.host} carries out up to {leader.history[-1]}")
        if self.history[: len(leader.history)] == leader.history:
            return  # late, and the same as its successor: messages to members are numbered
        self.check(leader, "two leaders")
        self.history = list(leader.history)

    def check(self, leader: Leader, invariant: str) -> None:
        self.checked += len(self.history)
        if leader.history[: len(self.history)] != self.history:
            raise Violation(
                invariant, f"host {leader.host} has {leader.history}, though {self.history} was carried out"
            )

    def deliver(self) -> None:
        leader = self.pick()
        if leader is None:
            return
        channels = [(each, True) for each in leader.down.items()] + [(each, False) for each in leader.up.items()]
        full = [(host, queue, down) for (host, queue), down in channels if queue]
        if not full:
            return
        host, queue, down = self.chance.choice(full)
        message = queue.popleft()
        (self.at_agent if down else self.at_leader)(leader, host, message)

    def at_agent(self, leader: Leader, index: int, message: tuple[object, ...]) -> None:
        host, answers = self.hosts[index], leader.up[index]
        known = host.voter.configuration
        match message:
            case ("leadership", Configuration() as newest, Configuration() as committed):
                confirms = not host.voter.abstains
                if host.voter.adopt(newest):
                    host.committed = committed
                    confirms = host.voter.confirms(committed)
                if confirms:
                    answers.append(("accepted", *host.voter.configuration.age))
            case ("begin", int(copy), list(records)) if known.leader == leader.host:
                host.copy = Copy(copy, 0, list(records))
                answers.append(("stored", copy, 0))
            case ("record", int(copy), int(sequence), int(value)) if known.leader == leader.host:
                if copy == host.copy.number and sequence == host.copy.sequence + 1:
                    host.copy.sequence = sequence
                    host.copy.records.append(value)
                    answers.append(("stored", copy, sequence))
            case _ if not host.voter.abstains:
                answers.append(("accepted", *known.age))

    def at_leader(self, leader: Leader, index: int, message: tuple[object, ...]) -> None:
        match message:
            case ("accepted", int(term), int(version)):
                leader.known[index] = (term, version)
                leader.core.accepted_by(index, term, version)
                if (term, version) != leader.core.newest.age:  # it was refused, and is sent again
                    leader.sent.pop(index, None)
            case ("stored", int(copy), int(sequence)):
                leader.core.stored_by(index, copy % 1000, sequence)

    def maintain(self) -> None:
        """What a leader does now and then: propose, copy, send configurations."""
        leader = self.pick()
        if leader is None:
            return
        core = leader.core
        if core.copy_to is not None and (core.copy_to not in leader.down or self.chance.random() < 0.01):
            core.drop_standby()  # its connection broke, or it is slow
        elif core.copy_to is None and core.newest.standby is not None:
            core.drop_standby()
        if self.chance.random() < 0.3:
            voters, age = core.committed.voters, core.committed.age
            core.change_voters(
                frozenset(host for host in leader.down if host in voters or leader.known.get(host) == age)
            )
        if self.chance.random() < 0.5:
            core.make_standby()
        host = self.chance.choice(list(leader.down)) if leader.down else leader.host
        if host != leader.host and leader.carried == len(leader.history) and core.may_copy_to(host):
            leader.down[host].append(("begin", leader.number_of(core.begin_copy(host)), list(leader.history)))
        others = [] if core.proposed is not None else [host for host in leader.down if host not in core.newest.voters]
        for host in [*core.awaited(), *others]:
            if host in leader.down and leader.sent.get(host) != core.newest.age:
                leader.sent[host] = core.newest.age
                leader.down[host].append(("leadership", core.newest, core.committed))

    # ---- votes -----------------------------------------------------------------------------------------------------

    def is_leader_silent(self, index: int) -> bool:
        host = self.hosts[index]
        follows = host.voter.configuration.leader
        return not any(
            leader.host == follows and leader.core.committed.term == host.voter.configuration.term
            and index in leader.down for leader in self.leaders
        )  # fmt: skip

    def notice_silence(self) -> None:
        for index, host in enumerate(self.hosts):
            host.silent = host.alive and self.is_leader_silent(index)

    def stand(self) -> None:
        index = self.chance.randrange(len(self.hosts))
        host = self.hosts[index]
        if not host.alive:
            return
        if host.election is not None and host.election.is_void:
            self.note(f"the election of host {index} has failed")
            host.election = None
        if host.election is None and host.voter.may_stand and host.silent:
            host.election = Election(host.voter)
        election = host.election
        if election is None:
            return
        for other in election.under.voters:
            if other != index and self.are_linked(index, other):
                self.votes.append((index, other, election.wanted))
        if election.is_won:
            host.election = None
            new = election.win()
            host.committed = new
            leader = Leader(index, list(host.copy.records), Replication(new, new, is_successor=False))
            self.note(f"host {index} is elected: {new}")
            self.elections += 1
            self.leaders.append(leader)
            self.check(leader, "forgotten")

    def vote(self) -> None:
        if not self.votes:
            return
        source, target, wanted = self.votes.pop(self.chance.randrange(len(self.votes)))
        host, candidate = self.hosts[target], self.hosts[source]
        if self.chance.random() < 0.2 or not (host.alive and candidate.alive and self.are_linked(source, target)):
            return
        given = host.voter.vote(source, wanted, is_leader_silent=host.silent)
        self.note(f"host {target} answers {source}: {given.refusal or 'yes'} (binding: {wanted.binding})")
        if wanted.binding and not given.refusal:
            for leader in self.leaders:  # it follows no earlier leader any more
                if leader.core.committed.term < host.voter.configuration.term and self.chance.random() < 0.5:
                    self.disconnect(leader, target)
        if candidate.election is not None and self.chance.random() < 0.9:
            candidate.election.on_vote(target, wanted, given)

    def ask(self) -> None:
        """A host asks another one which configuration it has."""
        index, other = (self.chance.randrange(len(self.hosts)) for _ in range(2))
        host, asked = self.hosts[index], self.hosts[other]
        if index == other or not (host.alive and asked.alive and self.are_linked(index, other)):
            return
        known = asked.voter.configuration
        host.voter.on_configuration(other, known, stands=asked.voter.stands)
        newer = any(each.host == known.leader and each.core.committed.term == known.term for each in self.leaders)
        for leader in list(self.leaders):
            if leader.host == index and newer and known.term > leader.core.committed.term:
                self.note(f"leader {index} is deposed")
                self.leaders.remove(leader)

    # ---- connections and faults ------------------------------------------------------------------------------------

    def are_linked(self, one: int, other: int) -> bool:
        return one == other or frozenset((one, other)) not in self.cut

    def connect(self) -> None:
        leader, index = self.pick(), self.chance.randrange(len(self.hosts))
        host = self.hosts[index]
        if leader is None or not host.alive or index in leader.down or not self.are_linked(leader.host, index):
            return
        if host.voter.abstains and index in leader.core.newest.voters:
            return  # its host counts as lost first
        leader.down[index], leader.up[index] = deque(), deque()
        leader.sent.pop(index, None)
        leader.known.pop(index, None)

    def disconnect(self, leader: Leader, index: int) -> None:
        leader.down.pop(index, None)
        leader.up.pop(index, None)

    def break_connection(self) -> None:
        leader = self.pick()
        if leader is not None and leader.down:
            self.disconnect(leader, self.chance.choice(list(leader.down)))

    def cut_link(self) -> None:
        leader = self.pick()
        index = self.chance.randrange(len(self.hosts))
        if leader is not None and self.chance.random() < 0.7:
            index = leader.host
        others = [other for other in range(len(self.hosts)) if other != index]
        for other in others if self.chance.random() < 0.6 else [self.chance.choice(others)]:
            self.cut.add(frozenset((index, other)))
        self.note(f"cut: {sorted(map(sorted, self.cut))}")
        for leader in self.leaders:
            for index in list(leader.down):
                if not self.are_linked(leader.host, index):
                    self.disconnect(leader, index)

    def heal_link(self) -> None:
        if self.chance.random() < 0.15:
            self.cut.clear()

    def kill_coordinator(self) -> None:
        leader = self.pick()
        if leader is None:
            return
        host = self.hosts[leader.host]
        self.leaders.remove(leader)
        known = host.voter.configuration
        if host.alive and known.leader == leader.host:
            core = Replication(host.committed, known, is_successor=True)
            self.note(f"coordinator {leader.host} is killed and starts again")
            self.leaders.append(Leader(leader.host, leader.history, core))

    def kill_host(self) -> None:
        index = self.chance.randrange(len(self.hosts))
        self.note(f"host {index} loses its power")
        self.power_losses += 1
        self.hosts[index].alive = False
        for leader in list(self.leaders):
            self.disconnect(leader, index)
            if leader.host == index:
                self.leaders.remove(leader)

    def boot_host(self) -> None:
        """A host without power boots; psctl asks a host that leads, as far as it knows, for its agent's orders."""
        index = self.chance.choice([at for at, host in enumerate(self.hosts) if not host.alive])
        leader = self.pick()
        if leader is None or not self.hosts[leader.host].alive:
            return
        known = self.hosts[leader.host].voter.configuration
        self.note(f"host {index} boots, and its agent begins with {known}")
        self.hosts[index] = Host(Voter(index, known, restarted=True), known)


def run_leadership(seed: int, *, traced: bool = False) -> Outcome:
    """Run one seed."""
    run = LeadershipRun(seed, traced)
    outcome = outcome_of(seed, run.run)
    outcome.values_checked, outcome.trace = run.checked, run.trace
    return outcome
