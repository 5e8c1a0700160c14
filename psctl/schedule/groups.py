"""Groups: some ranks of a job, among which a collective takes place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec


class Group(msgspec.Struct, frozen=True):
    """Some ranks of a job, in an order; a collective orders its results by it.

    `a | b` has the ranks of either: those of `a` in its order, then the others of `b`. `a & b` has the ranks of both,
    in the order of `a`.

    Args:
        ranks: each once.

    Raises:
        ValueError: a rank is given twice, or is negative.
    """

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = all(isinstance(rank, int) and not isinstance(rank, bool) for rank in self.ranks)
        if not whole or len(set(self.ranks)) != len(self.ranks) or any(rank < 0 for rank in self.ranks):
            raise ValueError(f"a group holds each rank once, counted from 0; not {list(self.ranks)}")

    def __or__(self, other: Group) -> Group:
        return Group(self.ranks + tuple(rank for rank in other.ranks if rank not in self.ranks))

    def __and__(self, other: Group) -> Group:
        return Group(tuple(rank for rank in self.ranks if rank in other.ranks))

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges: (0, 1, 2, 5) is "0-2, 5"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, span)) for span in found)
