"""Where values that come from servers become the model's: only at wait points, between steps.

Each module waits, before its first forward of a step, for its whole subtree: a forward may read any parameter below it
(MultiheadAttention reads out_proj's without calling it). Plain containers (exactly Sequential, ModuleList, ModuleDict)
read nothing themselves, so they are split: their children wait, each for itself, and the values of the last layers may
still travel while the first compute. Shared (tied) parameters are waited for before the first forward of anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from psctl.sync.flat_parameters import Client, FlatParameters

PLAIN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class PendingParameters:
    """The newest values on their way from the servers to the parameters."""

    def __init__(self, client: Client, flat: FlatParameters) -> None:
        self._client, self._flat = client, flat
        self._lock = threading.RLock()
        self._version = client.base
        self._pending: set[int] = set()
        self.staleness = 0
        """Clocks that the values lacked which were read before the newest step was ordered."""
        self._lacked = 0
        self._wanted: set[int] | None = None  # what is taken of what has landed; None: all
        self._left: dict[int, tuple[int, set[int]]] = {}  # shard -> a version's clocks, parameters that lack it
        self._clocks = [client.base] * len(flat.shards)  # everyone's clocks before it are in what was taken last
        if flat.direct:
            client.deliver(self._take)

    def expect(self, version: int) -> None:
        """Every parameter will change to `version`, which was pulled."""
        with self._lock:
            self.land()  # nobody read the version before; it must still be taken in order
            self._version = version
            self.staleness, self._lacked = self._lacked, 0
            self._pending = set(range(len(self._flat.parameters)))

    def land(self, places: Iterable[int] | None = None) -> None:
        """Return when these parameters (None: all) hold the newest values."""
        if not self._pending:
            return
        with self._lock:
            wanted = self._pending if places is None else self._pending.intersection(places)
            if not wanted:
                return
            shards = sorted({shard for place in wanted for shard in self._flat.shards_of[place]})
            if self._flat.direct:
                self._wanted = wanted
                try:
                    self._client.wait(self._version, shards)
                finally:
                    self._wanted = None
                held = min(self._clocks[shard] for shard in shards)
            else:
                self._client.wait(self._version, shards)
                self._flat.write(self._client.landing, wanted)
                held = self._client.held(shards)
            self._lacked = max(self._lacked, self._version - held)
            self._pending = self._pending - wanted

    def _take(self, shard: int, values: torch.Tensor, present: bytes, clocks: int) -> bool:
        """Copy values straight into the parameters that are waited for; the shard's others get them at their wait."""
        self._flat.read(shard, values, self._wanted)
        self._clocks[shard] = clocks
        if self._wanted is None:
            self._left.pop(shard, None)
            return True
        of, left = self._left.get(shard, (clocks, set(self._flat.members[shard])))
        left = (left if of == clocks else set(self._flat.members[shard])) - self._wanted
        if left:
            self._left[shard] = clocks, left
        else:
            self._left.pop(shard, None)
        return not left

    def settle(self) -> None:
        """Return when every parameter holds all clocks before the newest version, which workers apart may lack."""
        with self._lock:
            self.land()
            every = range(len(self._flat.shards))
            if self._client.held(every) < self._version:
                self._client.wait(self._version, every, exact=True)
                if not self._flat.direct:
                    self._flat.write(self._client.landing, range(len(self._flat.parameters)))


class WaitPoint:
    """A forward pre-hook that waits for some parameters. Copies of the model get one that does nothing."""

    def __init__(self, arrivals: PendingParameters | None, places: frozenset[int] = frozenset()) -> None:
        self._arrivals, self._places = arrivals, places

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._arrivals is not None:
            self._arrivals.land(self._places)

    def __deepcopy__(self, memo: dict[int, Any]) -> WaitPoint:
        return WaitPoint(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return WaitPoint, (None,)


class WaitPoints:
    """The hooks on a model's modules.

    Args:
        model: before its class changes.
        parameters: the trainable ones, in the order that `arrivals` counts them.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], arrivals: PendingParameters) -> None:
        self._points = [
            (module, WaitPoint(arrivals, frozenset(places))) for module, places in plan(model, parameters) if places
        ]
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Put the hooks on, before the user's own."""
        self._handles = [module.register_forward_pre_hook(point, prepend=True) for module, point in self._points]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Take the hooks off for a while."""
        self.remove()
        try:
            yield
        finally:
            self.attach()


def plan(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Module, set[int]]]:
    """Return for each module the parameters that its forward waits for."""
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in place:
                holders[place[id(parameter)]] = holders.get(place[id(parameter)], 0) + 1
    shared = {index for index, count in holders.items() if count > 1}
    found = []
    for module in model.modules():
        if type(module) in PLAIN:
            found.append((module, set(shared)))
        else:
            below = {place[id(one)] for one in nn.Module.parameters(module) if id(one) in place}
            found.append((module, below | shared))
    return found
