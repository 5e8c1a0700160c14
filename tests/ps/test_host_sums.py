"""Host sums: bitwise equal on workers and servers; gradients that are read are not written."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.ps.dense.host_sums import BLOCK, RankGradients, host_sum, in_turn, joint_weight
from psctl.ps.pieces import Piece
from tests.hypothesis_profile import examples

ENDS = (0, 3, 3, 40, BLOCK + 50, 2 * BLOCK + 77)
HELD = [Piece(i, 0, a, b - a) for i, (a, b) in enumerate(pairwise(ENDS))]
SIZE = ENDS[-1]


def part(rank: int, weight: float, present: bytes, dtype: torch.dtype = torch.float32) -> RankGradients:
    generator = torch.Generator().manual_seed(rank)
    gradients = torch.randn(SIZE, generator=generator).to(dtype)
    for piece, there in zip(HELD, present, strict=True):
        if not there:
            gradients[piece.at : piece.at + piece.size] = math.nan  # may never count
    return RankGradients(rank, weight, present, gradients)


def by_hand(parts: list[RankGradients]) -> torch.Tensor:
    """Sum whole tensors piece by piece, in rank order."""
    out = torch.zeros(SIZE, dtype=parts[0].gradients.dtype)
    for at, piece in enumerate(HELD):
        some = [one.gradients[piece.at : piece.at + piece.size] * one.weight for one in parts if one.present[at]]
        total = some[0] if some else torch.zeros(piece.size)
        for one in some[1:]:
            total = total + one
        out[piece.at : piece.at + piece.size] = total
    return out


@st.composite
def hosts_parts(draw: st.DrawFn) -> list[RankGradients]:
    ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(sorted))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    weights = st.sampled_from([1.0, 0.3, 1.7, 0.0])
    masks = st.lists(st.integers(0, 1), min_size=len(HELD), max_size=len(HELD)).map(bytes)
    return [part(rank, draw(weights), draw(st.one_of(st.just(b"\1" * len(HELD)), masks)), dtype) for rank in ranks]


@settings(max_examples=examples(60), deadline=None)
@given(hosts_parts(), st.sampled_from(["apart", "in place", "onto"]))
def test_a_host_sum_adds_in_rank_order_and_leaves_its_parts_unchanged(parts: list[RankGradients], way: str) -> None:
    expected, dtype = by_hand(parts), parts[0].gradients.dtype
    before = [one.gradients.clone() for one in parts]
    out = parts[0].gradients if way == "in place" else torch.full((SIZE,), 7.0, dtype=dtype)
    if way == "onto":
        out = torch.linspace(-1, 1, SIZE).to(dtype)
        some = [any(one.present[at] for one in parts) for at in range(len(HELD))]
        sums = out + expected
        for piece, there in zip(HELD, some, strict=True):
            if not there:
                sums[piece.at : piece.at + piece.size] = out[piece.at : piece.at + piece.size]
        expected = sums
    present = host_sum(out, HELD, parts, onto=way == "onto")
    assert out.view(torch.uint8).equal(expected.view(torch.uint8))
    assert present == bytes(any(one.present[at] for one in parts) for at in range(len(HELD)))
    for one, was in list(zip(parts, before, strict=True))[1 if way == "in place" else 0 :]:
        assert one.gradients.view(torch.uint8).equal(was.view(torch.uint8))


@pytest.mark.parametrize(
    ("hosts", "ranks", "turns"),
    [
        ((), (0, 1, 2), ((0,), (1,), (2,))),
        (((0, 1), (2, 3)), (0, 1, 2, 3), ((0, 1), (2, 3))),
        (((0, 2), (1, 3)), (0, 1, 2, 3, 4), ((0, 2), (1, 3), (4,))),
        (((0, 3),), (1, 2, 3), ((1,), (2,), (3,))),
        (((0, 2, 4),), (1, 2, 4), ((1,), (2, 4))),
    ],
)
def test_hosts_are_ordered_by_their_first_member_ranks(hosts, ranks, turns) -> None:
    assert in_turn(hosts, ranks) == turns


def test_weights_are_added_one_after_another() -> None:
    assert joint_weight([0.1] * 10) == 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 + 0.1 != 1.0
