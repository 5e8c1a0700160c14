"""The table of roles is whole; what travels beside the gradients; who takes part in which clock."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from psctl.errors import ProtocolError
from psctl.ps.dense.clock_ledger import Ledger, Membership
from psctl.ps.dense.rank_state_store import Asides
from psctl.ps.messages import PART, Aside, AsideIs, AsideOf, Step
from psctl.ps.replication.chain_entries import Copying
from psctl.ps.replication.replica_roles import AFTER_HANDING, ROLES, Place, Role, place_of


def test_every_role_has_a_rule_for_every_place_and_only_who_led_hands_over():
    assert set(ROLES) == set(product(get_args(Role), get_args(Place)))
    assert set(AFTER_HANDING) == set(get_args(Place))
    for (before, place), after in ROLES.items():
        assert ("handing" in after) == (before in ("primary", "handing") and place != "head")
        assert after[1] == AFTER_HANDING[place]  # nobody to wait for: as the assignment says, at once


@pytest.mark.parametrize(("server", "place"), [(3, "head"), (4, "chain"), (5, "copy"), (6, "out")])
def test_a_place_is_read_off_the_assignment(server, place):
    assert place_of(server, [3, 4], [5]) == place


def test_copies_wait_for_one_another_and_the_largest_goes_alone():
    copying = Copying(100)
    assert copying.begin(0, 7, 60)
    assert copying.begin(0, 7, 60)  # the same one, begun anew
    assert not copying.begin(1, 7, 60)
    assert copying.begin(2, 8, 40)
    copying.end(0, 7)
    assert not copying.begin(3, 7, 500)
    copying.end(2, 8)
    assert copying.begin(3, 7, 500)


def give(asides: Asides, sender: str, clock: int, data: bytes) -> bool:
    whole = False
    for offset in range(0, max(1, len(data)), PART):
        part = data[offset : offset + PART]
        message = Aside(clock, len(data), offset)
        place = asides.place(sender, message, len(part)) if part else None
        if place is not None:
            place[:] = part
        whole = asides.filled(sender, message, len(part))
    return whole


def test_an_aside_is_kept_for_some_clocks_and_answered_when_it_comes():
    asides, data = Asides(2), bytes(range(256)) * (PART // 128)
    asides.wish(1, AsideOf(5))
    assert asides.answers() == []
    assert give(asides, "worker/0", 5, data)
    answers = asides.answers()
    assert [one.message for one in answers] == [AsideIs(5, len(data), offset) for offset in range(0, len(data), PART)]
    assert b"".join(one.payload for one in answers) == data
    assert asides.answers() == []
    assert not give(asides, "worker/0", 5, bytes(len(data)))  # it is here: the first one counts
    assert give(asides, "worker/0", 6, b"six")
    assert give(asides, "worker/0", 7, b"")
    assert [one.message.clock for one in asides.copies(2)] == [6, 7]
    assert asides.newest(0) == 7


def test_an_aside_that_breaks_off_is_begun_anew_and_one_out_of_order_is_an_error():
    asides = Asides(2)
    asides.place("worker/0", Aside(1, 8, 0), 4)[:] = b"half"
    assert not asides.filled("worker/0", Aside(1, 8, 0), 4)
    with pytest.raises(ProtocolError, match="worker/0"):
        asides.place("worker/0", Aside(1, 8, 6), 2)
    assert give(asides, "worker/0", 1, b"complete")


def test_membership_is_that_of_the_last_change_at_or_before_a_clock():
    members = Membership.first(3, 4).changed(7, [2, 0]).changed(9, [0, 2, 3])
    assert [members.at(clock) for clock in (4, 6, 7, 8, 9, 50)] == [(0, 1, 2)] * 2 + [(0, 2)] * 2 + [(0, 2, 3)] * 2
    assert members.everyone == (0, 1, 2, 3)
    assert members.changed(8, [0]).at(9) == (0,)


def test_a_rank_that_left_has_ordered_all_clocks_up_to_its_cut_and_none_after():
    members = Membership.first(2, 0)
    ledger = Ledger(members, 0, 0)
    assert ledger.add(0, Step(0, [])) == []
    assert ledger.add(1, Step(1, [])) == []
    assert [clock for clock, _ in ledger.left(1, 0)] == [0]
    assert ledger.add(0, Step(1, [])) == []
    assert ledger.missing(1) == [1]
    assert [clock for clock, _ in ledger.changed(members.changed(1, [0]))] == [1]


def test_under_asp_every_order_stands_alone():
    ledger = Ledger(Membership.first(2, 0), 0, None)
    ((clock, order),) = ledger.add(1, Step(0, [{"lr": 0.1}]))
    assert (clock, order.rank, order.groups) == (0, 1, [{"lr": 0.1}])
    assert ledger.add(0, Step(0, [{"lr": 0.2}]))[0][1].rank == 0
