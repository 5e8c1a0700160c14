"""Sparsification: selects the elements of a gradient that are sent: at random, the significant ones, or the largest.

    random_skip p    each element is skipped with probability p; a sent one is divided by 1 - p, so that the mean is
                     right (unbiased); skipped elements are lost
    significance v   only elements whose magnitude exceeds v times the root mean square are sent; others accumulate
    topk k           only the fraction k of the elements with the largest magnitudes is sent; others accumulate

Theory. The elements that significance omits have less than v^2 of the whole energy, those that topk omits at most 1 -
k: each is a contraction, so with error feedback (error_feedback.py) training converges as without (Stich and others
2018). A threshold relative to the gradient falls as gradients do, and needs no schedule over the steps as a fixed one
would. Random skip is not a contraction, but unbiased, and error feedback would cancel it: so it is applied first, and
skipped elements are in no residual.

The places of sent elements are coded as numbers (4 bytes each) or as a bit mask (one bit an element), the shorter one.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from psctl.types import Compression

_NUMBER = 4  # bytes

_MANY, _SAMPLE = 16, 1024
"""topk of more than _MANY times the selected elements takes a threshold from about _MANY * _SAMPLE of them first."""


def places_size(count: int, total: int) -> int:
    """Return the bytes of the places of `count` of `total` elements; all of them need none."""
    return 0 if count == total else min(_NUMBER * count, _marks(total))


def write_places(places: torch.Tensor, total: int, out: torch.Tensor) -> None:
    """Write ascending places into `out`, `places_size` bytes."""
    if _numbered(places.numel(), total):
        out.view(torch.int32).copy_(places)
        return
    marks = np.zeros(total, dtype=np.bool_)
    marks[places.numpy()] = True
    out.copy_(torch.from_numpy(np.packbits(marks)))


def read_places(data: torch.Tensor, count: int, total: int) -> torch.Tensor:
    """Return the places of a code.

    Raises:
        ValueError: it does not hold `count` places below `total`.
    """
    if _numbered(count, total):
        places = data.view(torch.int32).to(torch.int64)
        if count and (int(places.min()) < 0 or int(places.max()) >= total):
            raise ValueError(f"places outside of {total} elements")
        return places
    marked = torch.from_numpy(np.flatnonzero(np.unpackbits(data.numpy(), count=total)))
    if marked.numel() != count:
        raise ValueError(f"{marked.numel()} places where {count} are announced")
    return marked


def _marks(total: int) -> int:
    return -(-total // 8)


def _numbered(count: int, total: int) -> bool:
    return _NUMBER * count < _marks(total)


def most(how: Compression, total: int) -> int:
    """Return the largest number of `total` elements that are sent."""
    return top(how.share, total) if how.kind == "topk" else total


def top(share: float, total: int) -> int:
    """Return the number of `total` elements that topk sends: at least one."""
    return min(total, max(1, math.ceil(share * total)))


def kept(how: Compression, total: int, seed: tuple[int, ...]) -> torch.Tensor | None:
    """Return which elements random_skip sends, the same for the same seed; None: all."""
    if not how.skip:
        return None
    draw = np.random.Generator(np.random.PCG64(seed)).random(total, dtype=np.float32)
    return torch.from_numpy(draw >= how.skip)


def chosen(how: Compression, values: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor | None:
    """Return the ascending places of the elements to send; None: all of them."""
    if kept is None and not how.significance and how.kind != "topk":
        return None
    size = values.abs()
    if how.significance:
        limit = how.significance * values.to(torch.float64).square().mean().sqrt()
        large = size > limit
        kept = large if kept is None else kept & large
    if how.kind != "topk":
        assert kept is not None, "some filter chose"
        return kept.nonzero().view(-1)
    if kept is not None:
        size = torch.where(kept, size, -1.0)
    return _largest(size, top(how.share, values.numel()))


def _largest(size: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ascending places of the `count` largest elements; negative ones are left out."""
    among = None
    if size.numel() > _MANY * max(count, 4 * _SAMPLE):  # a sample gives a threshold that nearly all are below
        sample = size[:: size.numel() // (_MANY * _SAMPLE) + 1]
        rank = max(1, min(sample.numel(), 2 * count * sample.numel() // size.numel() + 3))
        among = (size >= torch.topk(sample, rank).values[-1]).nonzero().view(-1)
        among = among if among.numel() >= count else None
    found, places = torch.topk(size if among is None else size[among], count, sorted=False)
    places = places if among is None else among[places]
    return places[found >= 0].sort().values
