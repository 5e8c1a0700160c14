"""Opens the stores of a run: checks the options of `run.store()` and makes each store once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from psctl.client.malloc_settings import keep_freed_memory
from psctl.errors import UsageError
from psctl.kv.arguments import checked_name
from psctl.kv.store import RunPosition, Store
from psctl.kv.store_connections import StoreServers
from psctl.process.user_functions import JobFunctions
from psctl.ps.table_messages import StoreSpec

CONSISTENCIES = '"asp", "bsp", or {"ssp": s} with s from 0 on'


def staleness_of(consistency: str | Mapping[str, int]) -> int | None:
    """Return the staleness of a consistency: None for asp, 0 for bsp.

    Raises:
        UsageError: the value is no consistency.
    """
    if isinstance(consistency, str) and consistency in ("asp", "bsp"):
        return None if consistency == "asp" else 0
    if isinstance(consistency, Mapping) and list(consistency) == ["ssp"]:
        found = consistency["ssp"]
        if isinstance(found, int) and not isinstance(found, bool) and found >= 0:
            return found
    raise UsageError(f"consistency={consistency!r} of a store", f"give {CONSISTENCIES}")


def _has_clocks(spec: StoreSpec, rank: int) -> bool:
    return spec.staleness is not None and rank in spec.group


class Stores:
    """All stores of one run.

    Args:
        rank, world: this worker's rank, and the number of workers.
        connect: connects to servers, at the first store; raises PsctlError where there are none.
        at: the position of the run in its steps.
        folder: the job's code, from which users' functions are imported; "": the folder of the running script.
    """

    def __init__(
        self, rank: int, world: int, connect: Callable[[], StoreServers], at: RunPosition, folder: str = ""
    ) -> None:
        self._rank, self._world, self._at = rank, world, at
        self._connect = connect
        self._servers: StoreServers | None = None
        self._functions = JobFunctions(folder)
        self._open: dict[str, tuple[StoreSpec, Store]] = {}

    def open(self, name: str, consistency: str | Mapping[str, int], reads: str, group: Iterable[int] | None) -> Store:
        """Return the store of this name; open it if it is not open.

        Args:
            name: the name of the store.
            consistency: "asp", "bsp", or {"ssp": s} with a staleness of s clocks.
            reads: "lazy" or "eager".
            group: the ranks that push and have clocks; None: all.

        Raises:
            UsageError: an option is invalid, or the store was opened with other options before.
        """
        staleness = staleness_of(consistency)
        if reads not in ("lazy", "eager"):
            raise UsageError(f"reads={reads!r} of a store", 'give "lazy" or "eager"')
        if reads == "eager" and staleness is None:
            raise UsageError(
                "eager reads of an asp store: its reads always go to the servers",
                'omit reads="eager", or use ssp or bsp',
            )
        name = checked_name(name, "a store's name")
        ranks = self._ranks(group)
        if self._servers is None:
            keep_freed_memory()
            self._servers = self._connect()
        spec = StoreSpec(name, staleness, reads == "eager", ranks, self._servers.shards)
        after = -1
        if name in self._open:
            before, store = self._open[name]
            if before != spec:
                raise UsageError(
                    f"store {name!r} was opened with other options before in this script",
                    "use the same options, or another name",
                )
            if not store.closed:
                return store
            after = store.last_sequence
        store = Store(spec, self._rank, self._servers, self._at, self._functions, after)
        self._open[name] = (spec, store)
        return store

    def _ranks(self, group: Iterable[int] | None) -> tuple[int, ...]:
        if group is None:
            return tuple(range(self._world))
        ranks = tuple(group) if isinstance(group, Iterable) else ()
        if not ranks or not all(type(rank) is int and 0 <= rank < self._world for rank in ranks):
            raise UsageError(f"group={group!r} of a store", f"give at least one rank from 0 to {self._world - 1}")
        return tuple(sorted(set(ranks)))

    @property
    def clocks(self) -> dict[str, int]:
        """The number of finished clocks of each store in which this worker has clocks."""
        found = {name: store for name, (spec, store) in self._open.items() if _has_clocks(spec, self._rank)}
        return {name: store.clocks for name, store in found.items() if not store.closed}

    def end_clocks(self, clocks: Mapping[str, int]) -> None:
        """End the clocks that the worker which this one replaces had not ended; return when all replicas know.

        Args:
            clocks: by the store's name, the number of clocks that the other workers have finished.
        """
        for name, (spec, store) in self._open.items():
            if name in clocks and _has_clocks(spec, self._rank):
                store.wait_for_separation(store.send_clocks(clocks[name]))

    def mark(self, step: int) -> None:
        """Cut all stores for the checkpoint of `step`: earlier pushes belong to it, later ones do not."""
        for _, store in self._open.values():
            store.mark(step)

    @property
    def doing(self) -> str:
        """A description of the clock that a store waits for, for progress output; "" when no store waits."""
        return next((what for _, store in self._open.values() if (what := store.doing)), "")

    def close(self, *, failed: bool) -> None:
        """Close all stores; `failed`: without waiting for servers."""
        for _, store in self._open.values():
            store.close(failed=failed)
        if self._servers is not None:
            self._servers.close("the run is over")
