"""The table of replica roles, the limit on copies, rank states, and the members of each clock."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from psctl.errors import ProtocolError
from psctl.ps.dense.clock_ledger import Membership, StepLedger
from psctl.ps.dense.rank_state_store import RankStates
from psctl.ps.messages import LARGEST, PutRankState, RankStateAnswer, RankStateQuery, Step
from psctl.ps.replication.chain_entries import CopyBudget
from psctl.ps.replication.replica_roles import AFTER_HANDING, ROLES, ChainPosition, Role, position_of


def test_every_role_has_a_rule_for_every_position_and_only_primaries_transfer_the_lead():
    assert set(ROLES) == set(product(get_args(Role), get_args(ChainPosition)))
    assert set(AFTER_HANDING) == set(get_args(ChainPosition))
    for (before, place), after in ROLES.items():
        assert ("demoting" in after) == (before in ("primary", "demoting") and place != "head")
        assert after[1] == AFTER_HANDING[place]  # no other server to wait for: by the assignment, immediately


@pytest.mark.parametrize(("server", "place"), [(3, "head"), (4, "chain"), (5, "copy"), (6, "out")])
def test_position_follows_from_the_assignment(server, place):
    assert position_of(server, [3, 4], [5]) == place


def test_copies_share_a_budget_and_the_largest_runs_alone():
    copying = CopyBudget(100)
    assert copying.start(0, 7, 60)
    assert copying.start(0, 7, 60)  # the same one, started again
    assert not copying.start(1, 7, 60)
    assert copying.start(2, 8, 40)
    copying.finish(0, 7)
    assert not copying.start(3, 7, 500)
    copying.finish(2, 8)
    assert copying.start(3, 7, 500)


def give(states: RankStates, sender: str, clock: int, data: bytes) -> bool:
    place = states.receive_buffer_for(sender, PutRankState(clock), len(data)) if data else None
    if place is not None:
        place[:] = data
    return states.add(sender, PutRankState(clock), len(data))


def test_rank_states_are_kept_for_some_clocks_and_late_queries_are_answered():
    states, data = RankStates(2), bytes(range(256)) * 10
    states.on_query(1, RankStateQuery(5))
    assert states.answers() == []
    assert give(states, "worker/0", 5, data)
    answers = states.answers()
    assert [(one.message, one.payload) for one in answers] == [(RankStateAnswer(5), data)]
    assert states.answers() == []
    assert not give(states, "worker/0", 5, bytes(len(data)))  # it has arrived already: the first one counts
    assert give(states, "worker/0", 6, b"six")
    assert give(states, "worker/0", 7, b"")
    assert [one.message.clock for one in states.copies(2)] == [6, 7]
    assert states.newest_clock(0) == 7


def test_an_interrupted_rank_state_is_sent_again_and_a_too_large_one_is_refused():
    states = RankStates(2)
    states.receive_buffer_for("worker/0", PutRankState(1), 8)[:4] = b"half"
    states.on_disconnected(0)
    with pytest.raises(ProtocolError, match="worker/0: a rank state of"):
        states.receive_buffer_for("worker/0", PutRankState(1), LARGEST + 1)
    assert give(states, "worker/0", 1, b"complete")


def test_membership_of_a_clock_is_the_last_change_at_or_before_it():
    members = Membership.initial(3, 4).changed(7, [2, 0]).changed(9, [0, 2, 3])
    assert [members.at(clock) for clock in (4, 6, 7, 8, 9, 50)] == [(0, 1, 2)] * 2 + [(0, 2)] * 2 + [(0, 2, 3)] * 2
    assert members.everyone == (0, 1, 2, 3)
    assert members.changed(8, [0]).at(9) == (0,)


def test_a_removed_rank_counts_as_ordering_clocks_up_to_its_cut_only():
    members = Membership.initial(2, 0)
    ledger = StepLedger(members, 0, 0)
    assert ledger.add(0, Step(0, [])) == []
    assert ledger.add(1, Step(1, [])) == []
    assert [clock for clock, _ in ledger.remove_rank(1, 0)] == [0]
    assert ledger.add(0, Step(1, [])) == []
    assert ledger.missing_ranks(1) == [1]
    assert [clock for clock, _ in ledger.set_members(members.changed(1, [0]))] == [1]


def test_under_asp_each_order_is_independent():
    ledger = StepLedger(Membership.initial(2, 0), 0, None)
    ((clock, order),) = ledger.add(1, Step(0, [{"lr": 0.1}]))
    assert (clock, order.rank, order.groups) == (0, 1, [{"lr": 0.1}])
    assert ledger.add(0, Step(0, [{"lr": 0.2}]))[0][1].rank == 0
