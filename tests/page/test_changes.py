"""Changes: applying the change between two values to the first one gives the second one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psctl.page.changes import apply_change, change_between
from psctl.page.history import JobHistory
from tests.page.sample import job_events

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "a"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_a_change_makes_the_second_value_of_the_first(before: object, after: object) -> None:
    change = change_between(before, after)
    assert (before if change is None else apply_change(before, change)) == after


def test_only_new_items_of_a_list_are_sent() -> None:
    assert change_between({"a": [1, 2], "b": 3, "c": 4}, {"a": [1, 2, 5], "b": 3}) == ["~", {"a": ["+", [5]]}, ["c"]]
    assert change_between([1], [1]) is None
    assert change_between([1, 2], [1]) == ["=", [1]]


def test_an_events_change_of_a_job_is_small() -> None:
    history = JobHistory("mine-1", "lab")
    *before, last = job_events("mine-1", 1500)
    for event in before:
        history.apply(event)
    document = history.document()
    history.apply(last)
    assert len(str(change_between(document, history.document()))) < 200 < len(str(document)) / 500
