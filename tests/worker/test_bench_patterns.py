"""The vectors by which bench finds a wrong sum."""

from __future__ import annotations

import pytest
import torch

from psctl.worker.bench_patterns import BLOCK, bits, close, exact, fractions, repeat_block, whole

LENGTHS = (1, 250, BLOCK, 3 * BLOCK + 7)


def summed(block, world: int, length: int) -> torch.Tensor:
    total = torch.zeros(length)
    for rank in range(world):
        total += repeat_block(block(rank), length)
    return total


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("world", [1, 2, 5, 33])
def test_true_sums_and_means_are_right(world: int, length: int) -> None:
    assert exact(summed(whole, world, length), world)
    assert exact(summed(whole, world, length) / world, world, mean=True)
    assert close(summed(fractions, world, length), world)
    assert close(summed(fractions, world, length) / world * world, world, 2)


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_a_rank_left_out_counted_twice_or_in_the_wrong_place_is_found(length: int) -> None:
    good = summed(whole, 4, length)
    for bad in (good - repeat_block(whole(2), length), good + repeat_block(whole(2), length), good.roll(1)):
        assert not exact(bad, 4)
        assert not exact(bad / 4, 4, mean=True)
    fine = summed(fractions, 4, length)
    for bad in (fine - repeat_block(fractions(1), length), fine.roll(1)):
        assert not close(bad, 4)


def test_one_wrong_element_anywhere_is_found() -> None:
    length = 2 * BLOCK + 5
    for place in (0, BLOCK, length - 1):
        bad = summed(whole, 3, length)
        bad[place] += 1
        assert not exact(bad, 3)
        fine = summed(fractions, 3, length)
        fine[place] += 1e-3
        assert not close(fine, 3)


def test_one_bit_changes_the_number() -> None:
    one = summed(fractions, 3, 1000)
    other = one.clone()
    other[999] = torch.nextafter(other[999], torch.tensor(9.0))
    assert bits(one) == bits(one.clone())
    assert bits(one) != bits(other)
