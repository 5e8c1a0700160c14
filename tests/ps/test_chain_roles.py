"""The table of roles is whole; what travels beside the gradients; who takes part in which clock."""

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


def test_every_role_has_a_rule_for_every_place_and_only_who_led_hands_over():
    assert set(ROLES) == set(product(get_args(Role), get_args(ChainPosition)))
    assert set(AFTER_HANDING) == set(get_args(ChainPosition))
    for (before, place), after in ROLES.items():
        assert ("demoting" in after) == (before in ("primary", "demoting") and place != "head")
        assert after[1] == AFTER_HANDING[place]  # nobody to wait for: as the assignment says, at once


@pytest.mark.parametrize(("server", "place"), [(3, "head"), (4, "chain"), (5, "copy"), (6, "out")])
def test_a_place_is_read_off_the_assignment(server, place):
    assert position_of(server, [3, 4], [5]) == place


def test_copies_wait_for_one_another_and_the_largest_goes_alone():
    copying = CopyBudget(100)
    assert copying.start(0, 7, 60)
    assert copying.start(0, 7, 60)  # the same one, begun anew
    assert not copying.start(1, 7, 60)
    assert copying.start(2, 8, 40)
    copying.finish(0, 7)
    assert not copying.start(3, 7, 500)
    copying.finish(2, 8)
    assert copying.start(3, 7, 500)


def give(asides: RankStates, sender: str, clock: int, data: bytes) -> bool:
    place = asides.receive_buffer_for(sender, PutRankState(clock), len(data)) if data else None
    if place is not None:
        place[:] = data
    return asides.add(sender, PutRankState(clock), len(data))


def test_an_aside_is_kept_for_some_clocks_and_answered_when_it_comes():
    asides, data = RankStates(2), bytes(range(256)) * 10
    asides.on_query(1, RankStateQuery(5))
    assert asides.answers() == []
    assert give(asides, "worker/0", 5, data)
    answers = asides.answers()
    assert [(one.message, one.payload) for one in answers] == [(RankStateAnswer(5), data)]
    assert asides.answers() == []
    assert not give(asides, "worker/0", 5, bytes(len(data)))  # it is here: the first one counts
    assert give(asides, "worker/0", 6, b"six")
    assert give(asides, "worker/0", 7, b"")
    assert [one.message.clock for one in asides.copies(2)] == [6, 7]
    assert asides.newest_clock(0) == 7


def test_a_rank_state_that_breaks_off_starts_again_and_a_vast_one_is_an_error():
    asides = RankStates(2)
    asides.receive_buffer_for("worker/0", PutRankState(1), 8)[:4] = b"half"
    asides.on_disconnected(0)
    with pytest.raises(ProtocolError, match="worker/0: a rank state of"):
        asides.receive_buffer_for("worker/0", PutRankState(1), LARGEST + 1)
    assert give(asides, "worker/0", 1, b"complete")


def test_membership_is_that_of_the_last_change_at_or_before_a_clock():
    members = Membership.initial(3, 4).changed(7, [2, 0]).changed(9, [0, 2, 3])
    assert [members.at(clock) for clock in (4, 6, 7, 8, 9, 50)] == [(0, 1, 2)] * 2 + [(0, 2)] * 2 + [(0, 2, 3)] * 2
    assert members.everyone == (0, 1, 2, 3)
    assert members.changed(8, [0]).at(9) == (0,)


def test_a_rank_that_left_has_ordered_all_clocks_up_to_its_cut_and_none_after():
    members = Membership.initial(2, 0)
    ledger = StepLedger(members, 0, 0)
    assert ledger.add(0, Step(0, [])) == []
    assert ledger.add(1, Step(1, [])) == []
    assert [clock for clock, _ in ledger.remove_rank(1, 0)] == [0]
    assert ledger.add(0, Step(1, [])) == []
    assert ledger.missing_ranks(1) == [1]
    assert [clock for clock, _ in ledger.set_members(members.changed(1, [0]))] == [1]


def test_under_asp_every_order_stands_alone():
    ledger = StepLedger(Membership.initial(2, 0), 0, None)
    ((clock, order),) = ledger.add(1, Step(0, [{"lr": 0.1}]))
    assert (clock, order.rank, order.groups) == (0, 1, [{"lr": 0.1}])
    assert ledger.add(0, Step(0, [{"lr": 0.2}]))[0][1].rank == 0
