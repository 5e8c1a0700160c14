"""The division of a bucket among ranks: every element once, cut where a step by pieces has the same bits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from psctl.ps.shards import ALIGN
from psctl.sync.bucket_partition import PADDING, partition

SIZES = st.lists(st.sampled_from([0, 1, 3, 63, 64, 65, 100, 1000, 4096, 7001]), min_size=1, max_size=12)
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=9)


@given(SIZES, SHARES, st.booleans())
def test_every_element_is_in_one_piece(sizes: list[int], shares: list[int], equal: bool) -> None:
    owners = [7 * place % 4 for place in range(len(shares))]
    chunks = partition([(3 * place, size) for place, size in enumerate(sizes)], owners, shares, equal=equal)
    assert [chunk.owner for chunk in chunks] == owners
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
    found: dict[int, list[tuple[int, int]]] = {3 * place: [] for place in range(len(sizes))}
    for chunk in chunks:
        at = 0
        for piece in chunk.pieces:
            assert (piece.at, piece.within % ALIGN) == (at, 0)
            at += piece.size
            found[piece.parameter].append((piece.within, piece.size))
        assert (chunk.elements, chunk.marks) == (at, chunk.start + at)
        assert chunk.marks + len(chunk.pieces) <= chunk.stop
        assert (chunk.stop - chunk.start) % PADDING == 0
    for place, size in enumerate(sizes):
        pieces = found[3 * place]
        assert [0, *(start + length for start, length in pieces)] == [*(start for start, _ in pieces), size]
        assert size == 0 or all(length for _, length in pieces)
    if equal:
        assert len({chunk.stop - chunk.start for chunk in chunks}) == 1


def test_shares_are_kept_to_within_half_of_an_alignment() -> None:
    chunks = partition([(0, 30_000), (1, 70_000)], [0, 1, 2], [1, 2, 5])
    for chunk, share in zip(chunks, (1, 2, 5), strict=True):
        assert abs(chunk.elements - 100_000 * share / 8) <= ALIGN
