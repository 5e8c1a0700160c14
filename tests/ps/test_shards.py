"""Shards divide the flat spaces exactly; pieces cover the parameters of their shards."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from psctl.ps.pieces import pieces
from psctl.ps.shards import ALIGN, LARGEST, LARGEST_NEAR, cut, offsets, sizes, spaces
from psctl.types import Layout, ParameterInfo, Range, Shard

_shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
_parameters = st.lists(
    st.tuples(_shapes, st.sampled_from(["float32", "float64", "bfloat16"]), st.booleans()), min_size=1, max_size=30
)


def layout_of(parameters) -> Layout:
    infos = [ParameterInfo(f"p{i}", shape, dtype, 0, trains) for i, (shape, dtype, trains) in enumerate(parameters)]
    return Layout(tuple(infos), "SGD", ({"lr": 0.1},))


@given(_parameters, st.integers(1, 5), st.integers(1, 5000))
def test_shards_hold_every_element_of_every_space_exactly_once(parameters, servers, target):
    layout = layout_of(parameters)
    shards = cut(layout, servers, target)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    for dtype, size in spaces(layout).items():
        ranges = sorted(shard.range for shard in shards if shard.dtype == dtype)
        assert ranges[0].start == 0
        assert ranges[-1].stop == size
        assert all(a.stop == b.start for a, b in pairwise(ranges))


@given(_parameters, st.integers(1, 5), st.integers(1, 5000))
def test_pieces_hold_each_element_of_trainable_parameters_exactly_once(parameters, servers, target):
    layout = layout_of(parameters)
    shards = cut(layout, servers, target)
    found: dict[int, list[Range]] = {}
    for shard, held in zip(shards, pieces(layout, shards), strict=True):
        for piece in held:
            info, start = layout.parameters[piece.parameter], offsets(layout)[piece.parameter]
            assert info.dtype == shard.dtype
            assert start + piece.within == shard.range.start + piece.at
            assert piece.at + piece.size <= len(shard.range)
            found.setdefault(piece.parameter, []).append(Range(piece.within, piece.within + piece.size))
    for index, info in enumerate(layout.parameters):
        ranges = sorted(found.get(index, []))
        if not info.trainable:
            assert not ranges
            continue
        assert ranges[0].start == 0
        assert ranges[-1].stop == info.size
        assert all(a.stop == b.start for a, b in pairwise(ranges))


@given(_parameters, st.integers(1, 5), st.integers(1, 5000))
def test_parameters_are_cut_at_aligned_elements(parameters, servers, target):
    layout = layout_of(parameters)
    shards = cut(layout, servers, target)
    for held in pieces(layout, shards):
        for piece in held:
            assert piece.within % ALIGN == 0


def test_small_parameters_share_a_shard_and_a_large_one_is_cut():
    layout = layout_of([((10,), "float32", True), ((20,), "float32", True), ((1000,), "float32", True)])
    ranges = [shard.range for shard in cut(layout, 1, target_bytes=1400)]
    assert ranges == [Range(0, 30), Range(30, 30 + 384), Range(414, 414 + 384), Range(798, 1030)]


def test_shards_follow_the_order_of_the_model_over_all_dtypes():
    layout = layout_of([((9,), "float64", True), ((9,), "float32", True), ((9,), "float64", True)])
    assert [(s.dtype, s.range) for s in cut(layout, 1, 72)] == [
        ("float64", Range(0, 9)),
        ("float32", Range(0, 9)),
        ("float64", Range(9, 18)),
    ]


def test_by_default_shards_outnumber_servers_and_are_of_bounded_size():
    layout = layout_of([((1000, 1000), "float32", True)] * 100)  # 400 MB
    shards = cut(layout, 4)
    assert len(shards) >= 32
    assert max(len(shard.range) * 4 for shard in shards) <= LARGEST


def test_one_host_has_fewer_shards_and_at_least_one_for_each_server():
    layout = layout_of([((1000, 1000), "float32", True)] * 16)  # 64 MB
    away, near = cut(layout, 2), cut(layout, 2, near=True)
    assert (len(away), len(near)) == (32, 8)
    assert max(sizes(near)) <= LARGEST_NEAR
    tiny = layout_of([((1000,), "float32", True)])
    assert len(cut(tiny, 2, near=True)) == len(cut(tiny, 2)) == 1


def test_sizes_are_in_bytes():
    assert sizes([Shard(0, "float32", Range(0, 3)), Shard(1, "float64", Range(10, 12))]) == [12, 16]
