"""Shares of a clock's examples: with any loss of workers each example is in one batch that counts."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.errors import TimedOut
from psctl.job.membership_messages import ExamplesShared
from psctl.train_state.example_sharing import Batch, ExampleShare, returned_examples, slice_ranges
from psctl.types import Range

RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=4).map(
    lambda found: tuple(Range(100 * at + start, 100 * at + start + size) for at, (start, size) in enumerate(found))
)


def places(ranges) -> list[int]:
    return [place for one in ranges for place in range(one.start, one.stop)]


@given(RANGES, st.sets(st.integers(0, 9), min_size=1))
def test_shares_divide_the_examples_evenly_in_rank_order(ranges, ranks) -> None:
    batch = Batch(0, 0, ranges, tuple(sorted(ranks)))
    shares = [places(batch.of(rank)) for rank in sorted(ranks)]
    assert [place for share in shares for place in share] == places(ranges)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert batch.of(10) == ()


@given(RANGES, st.integers(0, 20), st.integers(0, 20))
def test_a_slice_of_ranges_is_the_slice_of_their_elements(ranges, start, more) -> None:
    assert places(slice_ranges(ranges, start, start + more)) == places(ranges)[start : start + more]


@given(st.data())
def test_every_example_is_in_exactly_one_batch_that_counts(data) -> None:
    """Clocks 0 .. 11 of six examples each; ranks are lost at any clock, the others are up to three clocks ahead."""
    left, gone = list(range(data.draw(st.integers(2, 5)))), dict[int, int]()
    changes: list[ExamplesShared] = []
    clock = 0
    while len(left) > 1 and data.draw(st.booleans()):
        first = data.draw(st.integers(min(11, max(0, clock - 3)), 11))
        clock = min(12, max(clock, first + data.draw(st.integers(0, 3))))
        rank = data.draw(st.sampled_from(left))
        left.remove(rank)
        gone[rank] = first
        changes.append(ExamplesShared(len(changes), clock, list(left), {rank: first}))
    batches: list[Batch] = []
    for at in range(13):
        known = [each for each in changes if each.clock <= at]
        new = [each for each in known if batches and each.clock > batches[-1].step]
        own = (Range(6 * at, 6 * at + 6),) if at < 12 else ()
        ranks = tuple(known[-1].ranks) if known else tuple(range(len(left) + len(gone)))
        batches.append(Batch(at, 0, own + returned_examples(new, batches, 0), ranks))
    counted = [
        place
        for batch in batches
        for rank in batch.ranks
        if batch.step < gone.get(rank, 99)
        for place in places(batch.of(rank))
    ]
    assert sorted(counted) == list(range(72))


def test_an_announced_change_is_waited_for_and_nothing_else() -> None:
    example_share = ExampleShare(3, first=5, elastic=True)
    assert example_share.begin_clock(5) == []
    assert example_share.next_clock(1) == 6
    assert example_share.begin_clock(5) == []  # it is begun
    found: list[list[ExamplesShared]] = []
    waiting = threading.Thread(target=lambda: found.append(example_share.begin_clock(6)))
    waiting.start()
    shared = ExamplesShared(1, 7, [0, 2], {1: 6})
    example_share.add_change(shared)
    waiting.join(10)
    assert found == [[]]  # the change comes with clock 7
    assert example_share.members() == (0, 1, 2)
    assert example_share.begin_clock(7) == [shared]
    assert example_share.members() == (0, 2)


def test_a_missing_announced_change_times_out() -> None:
    example_share = ExampleShare(2, timeout=0.01)
    example_share.next_clock(1)
    with pytest.raises(TimedOut, match="which clocks are begun"):
        example_share.settle()
