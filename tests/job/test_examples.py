"""Every example once an epoch, for any division among workers."""

from hypothesis import given
from hypothesis import strategies as st

from psctl.job.examples import clocks_in_epoch, positions, share
from psctl.types import Range

SIZES = st.integers(0, 3000)
BATCHES = st.integers(1, 200)
WORLDS = st.integers(1, 17)


def test_a_clock_takes_the_next_batch_and_the_last_what_is_left() -> None:
    assert clocks_in_epoch(100, 32, 4) == 4
    assert [positions(100, 32, 4, clock) for clock in range(4)] == [
        Range(0, 32), Range(32, 64), Range(64, 96), Range(96, 100),
    ]  # fmt: skip


def test_a_tail_smaller_than_the_world_joins_the_clock_before() -> None:
    assert clocks_in_epoch(99, 32, 4) == 3
    assert positions(99, 32, 4, 2) == Range(64, 99)


def test_a_data_set_smaller_than_the_world_is_still_one_clock() -> None:
    assert clocks_in_epoch(2, 32, 4) == 1
    assert [share(positions(2, 32, 4, 0), 4, rank) for rank in range(4)] == [
        Range(0, 1), Range(1, 2), Range(2, 2), Range(2, 2),
    ]  # fmt: skip


def test_an_empty_data_set_has_no_clock() -> None:
    assert clocks_in_epoch(0, 32, 4) == 0


def test_the_first_ranks_take_one_more() -> None:
    assert [share(Range(10, 21), 3, rank) for rank in range(3)] == [Range(10, 14), Range(14, 18), Range(18, 21)]


@given(SIZES, BATCHES, WORLDS)
def test_every_example_is_taken_exactly_once_an_epoch(examples: int, batch: int, world: int) -> None:
    taken: list[int] = []
    for clock in range(clocks_in_epoch(examples, batch, world)):
        for rank in range(world):
            mine = share(positions(examples, batch, world, clock), world, rank)
            taken.extend(range(mine.start, mine.stop))
    assert taken == list(range(examples))


@given(SIZES, BATCHES, WORLDS)
def test_shares_differ_by_one_example_at_most_and_none_is_empty_where_there_is_enough(
    examples: int, batch: int, world: int
) -> None:
    for clock in range(clocks_in_epoch(examples, batch, world)):
        sizes = [len(share(positions(examples, batch, world, clock), world, rank)) for rank in range(world)]
        assert max(sizes) - min(sizes) <= 1
        if examples >= world and batch >= world:
            assert min(sizes) >= 1


@given(SIZES, BATCHES, WORLDS, WORLDS)
def test_all_clocks_but_the_last_are_the_same_for_every_world(examples: int, batch: int, one: int, other: int) -> None:
    shared = min(clocks_in_epoch(examples, batch, one), clocks_in_epoch(examples, batch, other)) - 1
    for clock in range(shared):
        assert positions(examples, batch, one, clock) == positions(examples, batch, other, clock)
