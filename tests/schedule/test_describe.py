"""The text of schedules."""

from __future__ import annotations

from psctl.schedule import describe
from psctl.schedule.algorithms import catalog
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.groups import spans


def test_lines_name_step_ends_chunks_and_action() -> None:
    assert describe.lines(catalog.build("ring", 2)) == [
        "step 0  rank 0 -> rank 1  add chunk 0",
        "step 0  rank 1 -> rank 0  add chunk 1",
        "step 1  rank 0 -> rank 1  copy chunk 1",
        "step 1  rank 1 -> rank 0  copy chunk 0",
    ]


def test_helpers_have_their_own_names_and_columns_are_aligned() -> None:
    assert describe.lines(catalog.build("cpu", 2)) == [
        "step 0    rank 0 -> helper 0  add chunk 0",
        "step 0    rank 1 -> helper 0  add chunk 0",
        "step 1  helper 0 -> rank 0    copy chunk 0",
        "step 1  helper 0 -> rank 1    copy chunk 0",
    ]


def test_a_message_has_one_line_and_long_listings_are_cut() -> None:
    found = describe.lines(catalog.build("halving-doubling", 8), limit=3)
    assert found[0] == "step 0  rank 0 -> rank 1  add chunks 4-7" and len(found) == 4
    assert found[3] == "and 45 more"
    assert spans((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"


def test_step_numbers_are_aligned() -> None:
    found = describe.lines(catalog.build("chain", 7))
    assert found[0].startswith("step  0  ") and found[11].startswith("step 11  ")


def test_the_summary_has_steps_messages_and_bytes() -> None:
    assert describe.summary(catalog.build("ring", 4)) == (
        "ring: all-reduce among 4 ranks in 6 steps, 24 messages, at most 1.5 of the vector out of a rank"
    )
    assert describe.summary(catalog.build("ps", 4, ScheduleOptions(servers=(4, 5)))) == (
        "ps: all-reduce among 4 ranks and 2 helpers in 2 steps, 16 messages, at most 1 of the vector out of a rank"
    )
