"""Range clocks say of every key what a dictionary of all keys says, with few entries."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from psctl.store.clocks import Held, RangeClock, oldest
from psctl.words import Range

SIZE = 24
_ranges = st.tuples(st.integers(-3, SIZE + 3), st.integers(0, SIZE)).map(lambda at: Range(at[0], at[0] + at[1]))
_pushes = st.lists(st.tuples(_ranges, st.integers(0, 6)), max_size=30)


def keys(*ranges: Range) -> list[int]:
    return [key for each in ranges for key in range(each.start, each.stop)]


def check(clock: RangeClock, naive: dict[int, int]) -> None:
    assert {key: clock.at(key) for key in naive} == naive
    held = list(clock)
    assert keys(*(each.keys for each in held)) == sorted(naive)
    assert all(len(each.keys) for each in held)
    assert all(a.clock != b.clock for a, b in pairwise(held)), "equal neighbours are one"


@given(_pushes)
def test_set_is_a_dictionary_of_all_keys(pushes):
    clock, naive = RangeClock(Range(0, SIZE), 0), dict.fromkeys(range(SIZE), 0)
    for number, (where, time) in enumerate(pushes, 1):
        clock.set(where, time)
        naive.update({key: time for key in keys(where) if key in naive})
        check(clock, naive)
        assert len(clock) <= 2 * number + 1


@given(_pushes)
def test_take_returns_exactly_the_keys_that_are_new(pushes):
    clock, naive = RangeClock(Range(0, SIZE), -1), dict.fromkeys(range(SIZE), -1)
    for where, time in pushes:
        new = clock.take(where, time)
        assert keys(*new) == [key for key in keys(where) if key in naive and naive[key] < time]
        assert all(a.stop < b.start for a, b in pairwise(new))
        naive.update(dict.fromkeys(keys(*new), time))
        check(clock, naive)
        assert clock.take(where, time) == [], "sent again, it is dropped"


@given(_pushes, st.integers(1, SIZE - 1), _pushes)
def test_split_clocks_go_on_alone_and_come_together_again(before, key, after):
    clock, naive = RangeClock(Range(0, SIZE), 0), dict.fromkeys(range(SIZE), 0)
    for where, time in before:
        clock.set(where, time)
        naive.update({each: time for each in keys(where) if each in naive})
    low, high = clock.split(key)
    assert (low.space, high.space) == (Range(0, key), Range(key, SIZE))
    for where, time in after:
        low.set(where, time)
        high.set(where, time)
        naive.update({each: time for each in keys(where) if each in naive})
    check(low.joined(high), naive)


@given(_pushes, st.integers(0, SIZE - 1), st.integers(1, SIZE))
def test_the_oldest_of_a_range_is_the_least_of_its_keys(pushes, start, length):
    clocks = {}
    naive = {}
    for sender in range(3):
        clocks[sender] = RangeClock(Range(0, SIZE), 0)
        naive[sender] = dict.fromkeys(range(SIZE), 0)
        for where, time in pushes[sender::3]:
            clocks[sender].set(where, time)
            naive[sender].update({key: time for key in keys(where) if key in naive[sender]})
    where = Range(start, min(SIZE, start + length))
    assert oldest(clocks, where) == min(one[key] for one in naive.values() for key in keys(where))


def test_when_all_was_pushed_one_entry_is_left():
    clock = RangeClock(Range(0, 100), -1)
    for time in range(3):
        for start in range(0, 100, 10):
            clock.take(Range(start, start + 10), time)
            assert len(clock) <= 2
        assert list(clock) == [Held(Range(0, 100), time)]
