"""The primitive of which every collective that only moves data is a case: units from sources to destinations.

Each source has `total` bytes, cut into units; each destination gets one unit from each source: the whole where a unit
is all there is, else the one at its own place. So with U the unit and T the total:

    one source,        U = T    broadcast          one source,        U < T    scatter
    one destination,   U = T    gather             many to many,      U = T    all-gather
                                                   many to many,      U < T    all-to-all

Reductions are no cases of it: there what arrives is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from psctl.schedule.contracts import Collective

Route = tuple[int, tuple[int, ...]]
"""Where a chunk is at first, and who must have it at the end."""


class ScatterGather(msgspec.Struct, frozen=True):
    """A movement of data between two sets of ranks.

    Args:
        sources: ranks that give.
        destinations: ranks that get, in the order in which units are dealt to them.
        unit: bytes that one destination gets from one source.
        total: bytes that one source gives away: the unit, or a unit for each destination.

    Raises:
        ValueError: a set is empty or names a rank twice, or the sizes do not fit; the caller's fault.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    unit: int
    total: int

    def __post_init__(self) -> None:
        for ranks in (self.sources, self.destinations):
            if not ranks or len(set(ranks)) != len(ranks):
                raise ValueError(f"sources and destinations name at least one rank, each once; not {list(ranks)}")
        if self.unit < 1 or self.total not in (self.unit, self.unit * len(self.destinations)):
            wanted = f"{self.unit} or {self.unit * len(self.destinations)}"
            raise ValueError(f"units of {self.unit} for {len(self.destinations)} need a total of {wanted}")

    @classmethod
    def case(cls, collective: Collective, ranks: Sequence[int], root: int = 0) -> ScatterGather:
        """Return the primitive's arguments that make this collective among `ranks`.

        Raises:
            ValueError: the collective reduces or moves nothing; the caller's fault.
        """
        everyone, one, count = tuple(ranks), (root,), len(ranks)
        cases = {
            "broadcast": (one, everyone, 1, 1),
            "scatter": (one, everyone, 1, count),
            "gather": (everyone, one, 1, 1),
            "all-gather": (everyone, everyone, 1, 1),
            "all-to-all": (everyone, everyone, 1, count),
        }
        if collective not in cases:
            raise ValueError(f"{collective} is no case of scatter-gather")
        return cls(*cases[collective])

    @property
    def collective(self) -> Collective:
        """Which collective this is."""
        whole = self.unit == self.total
        if len(self.sources) == 1:
            return "broadcast" if whole else "scatter"
        if len(self.destinations) == 1:
            return "gather"
        return "all-gather" if whole else "all-to-all"

    @property
    def units(self) -> int:
        """Number of different units that travel, over all sources."""
        return len(self.sources) * (self.total // self.unit)

    def routes(self, chunks: int) -> list[Route]:
        """Return the route of each chunk when all sources' data, one after the other, is cut into `chunks`.

        Raises:
            ValueError: the chunks are not a multiple of the units; the caller's fault.
        """
        if chunks < 1 or chunks % self.units:
            raise ValueError(f"{self.collective}: {chunks} chunks are no multiple of its {self.units} units")
        each, found = chunks // self.units, []
        for source in self.sources:
            wanted = [self.destinations] if self.unit == self.total else [(rank,) for rank in self.destinations]
            found += [(source, ranks) for ranks in wanted for _ in range(each)]
        return found
