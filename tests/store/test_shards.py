"""Shards cut the flat spaces exactly; servers get equal loads, and few shards move."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.store.pieces import pieces
from psctl.store.shards import ALIGN, LARGEST, assign, bytes_of, cut, offsets, spaces
from psctl.words import Layout, ParameterInfo, Range, Shard

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
def test_pieces_hold_every_element_of_every_trainable_parameter_exactly_once(parameters, servers, target):
    layout = layout_of(parameters)
    shards = cut(layout, servers, target)
    found: dict[int, list[Range]] = {}
    for shard, held in zip(shards, pieces(layout, shards), strict=True):
        for piece in held:
            info, start = layout.parameters[piece.parameter], offsets(layout)[piece.parameter]
            assert info.dtype == shard.dtype
            assert len(piece.at) == len(piece.within)
            assert start + piece.within.start == shard.range.start + piece.at.start
            found.setdefault(piece.parameter, []).append(piece.within)
    for index, info in enumerate(layout.parameters):
        ranges = sorted(found.get(index, []))
        if not info.trainable:
            assert not ranges
            continue
        assert ranges[0].start == 0
        assert ranges[-1].stop == info.size
        assert all(a.stop == b.start for a, b in pairwise(ranges))


@given(_parameters, st.integers(1, 5), st.integers(1, 5000))
def test_parameters_are_cut_only_where_vector_loops_do_not_notice(parameters, servers, target):
    layout = layout_of(parameters)
    shards = cut(layout, servers, target)
    for held in pieces(layout, shards):
        for piece in held:
            assert piece.within.start % ALIGN == 0


def test_small_parameters_share_a_shard_and_a_large_one_is_cut():
    layout = layout_of([((10,), "float32", True), ((20,), "float32", True), ((1000,), "float32", True)])
    ranges = [shard.range for shard in cut(layout, 1, target_bytes=1400)]
    assert ranges == [Range(0, 30), Range(30, 30 + 384), Range(414, 414 + 384), Range(798, 1030)]


def test_shards_are_in_the_models_order_over_all_dtypes():
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


def loads(shards, owners, servers):
    found = [0] * servers
    for shard, owner in zip(shards, owners, strict=True):
        found[owner] += len(shard.range) * bytes_of(shard.dtype)
    return found


_sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=60)


@given(_sizes, st.integers(1, 8))
def test_servers_are_loaded_equally_to_within_one_shard(sizes, servers):
    shards = [Shard(index, "float32", Range(0, size)) for index, size in enumerate(sizes)]
    found = loads(shards, assign(shards, servers), servers)
    assert max(found) - min(found) <= 4 * max(sizes)


@given(_sizes, st.integers(1, 8), st.integers(1, 8))
def test_when_servers_come_or_go_loads_are_equal_again_and_nothing_moves_without_need(sizes, before, after):
    shards = [Shard(index, "float32", Range(0, size)) for index, size in enumerate(sizes)]
    old = assign(shards, before)
    new = assign(shards, after, old)
    found = loads(shards, new, after)
    assert max(found) - min(found) <= 4 * max(sizes)
    if after == before:
        assert new == old


@given(st.integers(1, 40), st.integers(1, 7))
@settings(max_examples=50)
def test_one_more_server_of_equal_shards_takes_only_its_share(each, servers):
    shards = [Shard(index, "float32", Range(0, 10)) for index in range(each * servers * (servers + 1))]
    old = assign(shards, servers)
    new = assign(shards, servers + 1, old)
    moved = sum(a != b for a, b in zip(old, new, strict=True))
    assert moved <= each * servers  # its share exactly, never more


def test_a_server_that_leaves_gives_up_only_its_own_shards():
    shards = [Shard(index, "float32", Range(0, 10)) for index in range(12)]
    old = assign(shards, 3)
    new = assign(shards, 2, old)
    assert all(a == b for a, b in zip(old, new, strict=True) if a != 2)
