"""Codes of gradients: their error, the residuals of error feedback, and refused codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.ps.compression.codecs import BLOCK, Int8, OneBit, Raw
from psctl.ps.compression.error_feedback import Coder, coder, residual_dtype
from psctl.ps.compression.sparsification import chosen, top
from psctl.ps.pieces import Piece
from psctl.types import PLAIN, Compression

WITH_FEEDBACK = [
    Compression("int8"),
    Compression("onebit"),
    Compression("topk", share=0.1),
    Compression("none", significance=0.5),
    Compression("bf16", significance=0.9),
    Compression("fp16", significance=0.3),
    Compression("int8", significance=0.9),
    Compression("topk", share=0.3, significance=0.5),
]
LUCKY = [
    Compression("none", skip=0.5),
    Compression("bf16", skip=0.25),
    Compression("onebit", skip=0.5),
    Compression("topk", share=0.2, skip=0.5, significance=0.2),
]
EVERY = [Compression("bf16"), Compression("fp16"), *WITH_FEEDBACK, *LUCKY]

sizes = st.sampled_from([1, 2, 7, 8, 9, 63, 200, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
seeds = st.integers(0, 2**32 - 1)
scales = st.sampled_from([1e-30, 1e-6, 1.0, 3e4, 1e20])


def drawn(seed: int, size: int, scale: float = 1.0) -> torch.Tensor:
    """Return numbers of very different magnitudes, some of them zero."""
    luck = np.random.default_rng(seed)
    values = luck.standard_normal(size) * np.exp(2 * luck.standard_normal(size)) * scale
    values[luck.random(size) < 0.1] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def held(*counts: int) -> list[Piece]:
    """Return consecutive pieces of these sizes."""
    found, at = [], 0
    for number, count in enumerate(counts):
        found.append(Piece(number, 0, at, count))
        at += count
    return found


def sent(one: Coder, values: torch.Tensor, pieces: list[Piece], present: list[bool], residual: torch.Tensor | None,
         seed: tuple[int, ...] = ()) -> torch.Tensor:  # fmt: skip
    """Return the checked bytes of a push."""
    out = torch.zeros(one.limit(pieces), dtype=torch.uint8)
    data = out[: one.encode(values, pieces, present, residual, out, seed)]
    one.check(data, pieces, list(map(int, present)))
    return data


def read(one: Coder, data: torch.Tensor, pieces: list[Piece], present: list[bool], weight: float = 1.0) -> torch.Tensor:
    """Return the values that these bytes add to a sum of zeros."""
    total = torch.zeros(sum(piece.size for piece in pieces), dtype=one.dtype)
    one.add(data, pieces, list(map(int, present)), total, weight)
    return total


@given(seeds, sizes, scales)
def test_decoded_values_are_within_the_error_bound(seed: int, size: int, scale: float) -> None:
    values = drawn(seed, size, scale)
    for dtype, eps in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        out = torch.zeros(2 * size, dtype=torch.uint8)
        Raw(dtype).encode(values, out)
        fits = values.abs() < torch.finfo(dtype).max
        off = (Raw(dtype).decode(out, size, 0, size).float() - values).abs()
        assert bool((off <= values.abs() * eps + torch.finfo(dtype).tiny)[fits].all())
    rows = [values[at : at + BLOCK] for at in range(0, size, BLOCK)]
    eight, one = Int8(), OneBit()
    out = torch.zeros(eight.size(size), dtype=torch.uint8)
    eight.encode(values, out)
    for at, row in enumerate(rows):
        off = (eight.decode(out, size, at * BLOCK, at * BLOCK + len(row)) - row).abs()
        assert float(off.max()) <= float(row.abs().max()) / 127 * 0.501
    out = torch.zeros(one.size(size), dtype=torch.uint8)
    one.encode(values, out)
    for at, row in enumerate(rows):
        came = one.decode(out, size, at * BLOCK, at * BLOCK + len(row)).double()
        energy = float(row.double().square().sum())
        assert float((came - row.double()).square().sum()) <= energy * (1 + 1e-6)
        assert torch.equal(came >= 0, row >= 0) or not float(row.abs().sum())


@given(seeds, st.lists(sizes, min_size=1, max_size=3), st.sampled_from(WITH_FEEDBACK), scales)
def test_decoded_values_plus_residual_equal_the_input(
    seed: int, counts: list[int], how: Compression, scale: float
) -> None:
    one, pieces = Coder(how, torch.float32), held(*counts)
    size = sum(counts)
    residual = torch.zeros(size)
    total, went_in = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    magnitudes = torch.zeros(size, dtype=torch.float64)
    for clock in range(4):
        values, present = drawn(seed + clock, size, scale), [(seed >> clock + at) % 4 != 0 for at in range(len(counts))]
        before = residual.clone()
        came = read(one, sent(one, values, pieces, present, residual), pieces, present)
        for piece, there in zip(pieces, present, strict=True):
            where = slice(piece.at, piece.at + piece.size)
            if there:
                went_in[where] += values[where]
            else:
                assert torch.equal(residual[where], before[where])
                assert not came[where].any()
        total += came
        magnitudes += values.abs() + came.abs() + residual.abs()
    off = (total + residual - went_in).abs()
    assert bool((off <= 8 * 2**-23 * magnitudes + 1e-37).all())


@given(seeds, st.sampled_from(EVERY))
def test_encoding_is_deterministic(seed: int, how: Compression) -> None:
    one, pieces, values = Coder(how, torch.float32), held(200, 3), drawn(seed, 203)
    residuals = [drawn(seed + 1, 203) if how.feedback else None for _ in range(2)]
    first, second = (sent(one, values, pieces, [True, True], each, (seed, 1)) for each in residuals)
    assert torch.equal(first, second)
    assert first.numel() <= one.limit(pieces)
    if how.feedback:
        assert torch.equal(*residuals)  # type: ignore[arg-type]


@given(seeds, st.sampled_from(EVERY), st.sampled_from([0.0, 0.5, 2.0]))
def test_a_sum_in_rank_order_equals_separate_additions(seed: int, how: Compression, weight: float) -> None:
    one, pieces = Coder(how, torch.float32), held(1500, 40)
    total = drawn(seed, 1540)
    data = sent(one, drawn(seed + 1, 1540), pieces, [True, True], torch.zeros(1540) if how.feedback else None)
    want = total + weight * read(one, data, pieces, [True, True])
    one.add(data, pieces, [1, 1], total, weight)
    torch.testing.assert_close(total, want, rtol=1e-6, atol=1e-6)


def test_random_skip_is_unbiased_and_drops_skipped_elements() -> None:
    one, pieces, values = Coder(Compression("none", skip=0.75), torch.float32), held(400), drawn(3, 400)
    pushes = [read(one, sent(one, values, pieces, [True], None, (n,)), pieces, [True]) for n in range(400)]
    assert {round(float(each), 3) for each in (pushes[0] / values)[values != 0]} == {0.0, 4.0}
    mean = torch.stack(pushes).mean(dim=0)
    assert float(((mean - values).abs() / values.abs().clamp(min=1e-3)).median()) < 0.1


def test_topk_sends_the_largest_elements() -> None:
    one, pieces = Coder(Compression("topk", share=0.25), torch.float32), held(8)
    values = torch.tensor([1.0, -9, 2, 3, 8, -4, 5, 0])
    came = read(one, sent(one, values, pieces, [True], torch.zeros(8)), pieces, [True])
    assert came.tolist() == [0, -9, 0, 0, 8, 0, 0, 0]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.06])
def test_topk_of_many_elements_samples_first_and_sends_the_largest(share: float) -> None:
    one, size = Compression("topk", share=share), 100_000
    values, count = drawn(7, size), top(share, size)
    clustered = torch.cat([torch.zeros(size - 2 * count), drawn(8, 2 * count)])
    for each in (values, clustered, torch.ones(size)):
        places = chosen(one, each, None)
        assert places is not None
        assert places.numel() == count == places.unique().numel()
        assert float(each[places].abs().min()) >= float(each.abs().topk(count + 1).values[-1])


def test_significance_sends_elements_above_the_threshold() -> None:
    one, pieces = Coder(Compression("none", significance=0.9), torch.float32), held(4)
    residual = torch.zeros(4)
    values = torch.tensor([1.0, 1.0, 1.0, 9.0])
    came = read(one, sent(one, values, pieces, [True], residual), pieces, [True])
    assert came.tolist() == [0, 0, 0, 9]
    assert residual.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_a_non_finite_gradient_reaches_the_sum_and_not_the_residual(how: Compression) -> None:
    one, pieces = Coder(how, torch.float32), held(50)
    values = drawn(1, 50)
    values[:] = float("inf")
    residual = drawn(2, 50) if how.feedback else None
    before = None if residual is None else residual.clone()
    came = read(one, sent(one, values, pieces, [True], residual, (5,)), pieces, [True])
    assert not bool(came.isfinite().all())
    if residual is not None and before is not None:
        assert torch.equal(residual, before)


@settings(max_examples=60)
@given(seeds, st.sampled_from(EVERY), st.integers(0, 63), st.integers(-40, 40))
def test_invalid_codes_are_refused_or_read_within_their_piece(seed: int, how: Compression, at: int, more: int) -> None:
    one, pieces = Coder(how, torch.float32), held(120, 9)
    data = sent(one, drawn(seed, 129), pieces, [True, True], torch.zeros(129) if how.feedback else None)
    bad = torch.cat([data, torch.zeros(40, dtype=torch.uint8)])[: max(0, data.numel() + more)].clone()
    if at < bad.numel():
        bad[at] = (int(bad[at]) + seed) % 256
    try:
        one.check(bad, pieces, [1, 1])
    except ValueError:
        return
    read(one, bad, pieces, [True, True])


def test_complex_and_narrow_dtypes_are_sent_uncoded() -> None:
    assert coder(PLAIN, torch.float32) is None
    assert coder(Compression("int8"), torch.complex64) is None
    narrow = coder(Compression("bf16"), torch.float16)
    assert narrow is not None
    values = torch.arange(4, dtype=torch.float16)
    assert torch.equal(read(narrow, sent(narrow, values, held(4), [True], None), held(4), [True]), values)
    assert residual_dtype(torch.bfloat16) == torch.float32
