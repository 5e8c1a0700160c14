"""An agent's part in the leadership of its job: the newest configuration that it knows, its vote, and its own election.

Pure. One coordinator leads, and one host, the standby, has a copy of all that it has decided
(coordinator/replication.py). When the leader is out of reach, the standby asks the voters. Safety rests on majorities,
not on clocks:

- A voter that has given its vote follows no earlier leader any more, and confirms nothing to it.
- The leader carries out nothing that the standby has not stored. Before it goes on without the standby, a majority of
  the voters must have a newer configuration, without it; and a voter gives its vote for the newest configuration only.
  Two majorities have a voter in common, so either the election or the change of configuration fails.

So at no time do two coordinators carry out instructions, and a successor knows all that its predecessor carried out.
(Paxos made simple, Lamport 2001, has this argument; In search of an understandable consensus algorithm, Ongaro and
Ousterhout 2014, the vote that is asked for twice.) The state of a voter is in memory, so an agent that is started again
does not know what its predecessor has promised. It neither votes nor confirms before it has seen a configuration
without its host that holds and is not older than the one that it began with, the leader's newest one then: a majority
without this host has confirmed that, so earlier promises can elect nobody any more.
"""

from __future__ import annotations

from psctl.job.leadership_messages import Configuration, VoteGiven, VoteWanted


class Voter:
    """The state of one agent. Calls must not overlap.

    Args:
        me: the agent's host, its index.
        configuration: that of the job's start; for an agent that is started again, the leader's newest one.
        restarted: it is started again.
    """

    def __init__(self, me: int, configuration: Configuration, *, restarted: bool = False) -> None:
        self.me = me
        self.abstains = restarted
        """Whether it neither votes nor confirms, because it does not know what its predecessor has promised."""
        self._began = configuration.age
        self.configuration = configuration
        """The newest configuration of a leader that this agent knows."""
        self.promise: Configuration | None = None
        """That of the candidate which has this agent's vote: no older one is taken any more."""

    def adopt(self, configuration: Configuration) -> bool:
        """Take a configuration of a leader; return False, and change nothing, if a newer one is known or promised."""
        if configuration.age < (self.promise or self.configuration).age:
            return False
        self.configuration, self.promise = configuration, None
        return True

    def confirms(self, committed: Configuration) -> bool:
        """Return whether this agent may confirm configurations to a leader.

        Args:
            committed: the newest configuration that holds, as the leader says whose last one was taken.
        """
        if self.me not in committed.voters and committed.age >= self._began:
            self.abstains = False
        return not self.abstains

    def vote(self, candidate: int, wanted: VoteWanted, *, is_leader_silent: bool) -> VoteGiven:
        """Answer a candidate.

        Args:
            candidate: the host that asks.
            wanted: its question.
            is_leader_silent: whether this agent is out of reach of the leader, too.
        """
        under = wanted.configuration
        if self.abstains:
            return VoteGiven("it was started again, and has no vote yet")
        if under.elects(candidate) in (self.promise, self.configuration):
            return VoteGiven()  # it was given before, and the answer was lost
        if self.promise is not None:
            return VoteGiven(f"host {self.promise.leader} has this vote")
        if not self.adopt(under):
            return VoteGiven("a newer configuration is known", self.configuration)
        if under.standby != candidate:
            return VoteGiven("another host is the standby")
        if not is_leader_silent and not wanted.binding:  # else others have left their leader already
            return VoteGiven("the leader is in reach")
        if wanted.binding:
            self.promise = under.elects(candidate)
        return VoteGiven()

    def on_configuration(self, host: int, configuration: Configuration, *, stands: bool) -> None:
        """Take the configuration that the agent of another host has now.

        Args:
            host: the other host.
            configuration: the newest one of a leader that it knows.
            stands: whether it asks for votes that count. If the host that has this agent's vote does not any more, and
                was not elected, its election failed, and the vote counts no more.
        """
        promise = self.promise
        if promise is not None and promise.leader == host and not stands and configuration.age < promise.age:
            self.promise = None
        self.adopt(configuration)

    @property
    def may_stand(self) -> bool:
        """Whether this agent may ask for votes: it is the standby."""
        return self.configuration.standby == self.me and self.promise is None and not self.abstains

    @property
    def stands(self) -> bool:
        """Whether this agent asks for votes that count, or may have done so before it was started again."""
        return self.abstains or (self.promise is not None and self.promise.leader == self.me)


class Election:
    """The candidacy of a standby: first it asks whether it would be elected, then it asks for votes that count.

    A candidate that asked for votes at once, and did not get them, would have left its leader for nothing. The election
    fails when a majority knows a newer configuration: then no majority is left that could ever give its votes.

    Args:
        voter: this agent's own state.
    """

    def __init__(self, voter: Voter) -> None:
        assert voter.may_stand, "the standby of the newest configuration"
        self._voter = voter
        self.under = voter.configuration
        """The configuration that all votes are for."""
        self._given: dict[bool, set[int]] = {False: {voter.me}, True: set()}
        self._refused: set[int] = set()  # for good
        self._newer = self.under

    @property
    def wanted(self) -> VoteWanted:
        """What the other voters are to be asked now."""
        return VoteWanted(self.under, self.is_binding)

    @property
    def is_binding(self) -> bool:
        """Whether votes count now: a majority has said that it would give them."""
        return bool(self._given[True])

    @property
    def is_won(self) -> bool:
        """Whether this agent is elected."""
        return self.under.is_majority(frozenset(self._given[True]))

    @property
    def is_void(self) -> bool:
        """Whether the election is over without a result, because a newer configuration is known."""
        promise = self.under.elects(self._voter.me) if self.is_binding else None
        return (self._voter.configuration, self._voter.promise) != (self.under, promise)

    def on_vote(self, host: int, wanted: VoteWanted, given: VoteGiven) -> None:
        """Count the answer of a voter to what it was asked."""
        if self.is_void:
            return
        if given.newer is not None and given.newer.age > self.under.age:
            self._on_newer(host, given.newer)
        if given.refusal:
            return
        self._given[wanted.binding].add(host)
        if not self.is_binding and self.under.is_majority(frozenset(self._given[False])):
            self._voter.promise = self.under.elects(self._voter.me)
            self._given[True].add(self._voter.me)

    def _on_newer(self, host: int, newer: Configuration) -> None:
        self._refused.add(host)
        self._newer = max(self._newer, newer, key=lambda each: each.age)
        if not self.is_binding:
            self._voter.adopt(newer)
        elif self.under.is_majority(frozenset(self._refused)):
            self._voter.promise = None
            self._voter.adopt(self._newer)

    def win(self) -> Configuration:
        """Begin to lead; return the configuration."""
        assert self.is_won, "a majority has voted for it"
        elected = self.under.elects(self._voter.me)
        self._voter.adopt(elected)
        return elected
