"""The rows of one embedding: a store of its own on the job's servers, and the gradients of the step in progress.

A forward pulls the unique keys of its batch into a leaf tensor, so torch's own backward computes the gradient of the
unique rows. It is kept until the step sends it, once: the gradients of several forwards of a step are added up before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from psctl.errors import UsageError
from psctl.kv.open_store import Stores, staleness_of
from psctl.kv.store import Store
from psctl.kv.tickets import Ticket
from psctl.ps.tables.client.calls_in_flight import PooledRoute

Initial = float | str | Mapping[str, object] | None
"""The start value of rows, as `Store.declare` takes it."""


class RowsOptions(NamedTuple):
    """The description of a table of rows; equal on all ranks."""

    width: int
    dtype: torch.dtype
    optimizer: Mapping[str, object]
    initial: Initial
    consistency: str | Mapping[str, int]
    name: str
    """Of the store; "": made of the module's place in the model."""
    filters: Sequence[object] = ()
    """Of pushed gradients, as `Store.declare` takes them."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether each push is a step of its own that no rank waits for (asp)."""
        return staleness_of(self.consistency) is None


class EmbeddingRows:
    """The rows of one embedding module. A copy of the module has the same rows; a pickle of it has none.

    Args:
        options: the description of the table.
    """

    def __init__(self, options: RowsOptions) -> None:
        self.options = options
        self.frozen = False
        self._store: Store | None = None
        self._live: Callable[[torch.Tensor], torch.Tensor] | None = None  # reads rows of the store, in a reader
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # unique keys and their gradients
        self._sums: list[tuple[PooledRoute, torch.Tensor]] = []  # bags and the gradients of their sums

    def __deepcopy__(self, memo: dict[int, object]) -> EmbeddingRows:
        return self

    def __reduce__(self) -> tuple[type[EmbeddingRows], tuple[RowsOptions]]:
        return EmbeddingRows, (self.options,)

    @property
    def store(self) -> Store:
        """The store of the rows.

        Raises:
            UsageError: the module's model is not prepared.
        """
        if self._store is None:
            raise UsageError(
                "an embedding of psctl.nn was called before run.prepare: its rows are in a store of the run",
                "call run.prepare(model, optimizer) first, with a model that contains the embedding",
            )
        return self._store

    def open(self, stores: Stores, name: str, seed: int) -> None:
        """Open the store of the rows.

        Args:
            stores: the run's.
            name: the name of the store, where the options have none.
            seed: of the start values, where the options have none.

        Raises:
            UsageError: an option is invalid, or another module's rows have this name and other options.
        """
        options, initial = self.options, self.options.initial
        if isinstance(initial, Mapping) and "seed" not in initial:
            initial = {**initial, "seed": seed}
        store = stores.open(options.name or name, options.consistency, "lazy", None)
        store.declare(
            int, shape=(options.width,), dtype=options.dtype, initial=initial, optimizer=dict(options.optimizer),
            filters=list(options.filters),
        )  # fmt: skip
        self._store = store

    @property
    def is_read_only(self) -> bool:
        """Whether rows are read from a job's servers (`psctl.init_reader`), and not trained here."""
        return self._live is not None

    def read_from(self, pull: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Read rows by this function of keys from now on; they are not trained."""
        self._live = pull

    def pull(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows of these unique keys, on the keys' device; their gradient is kept for the step.

        Args:
            keys: int64, ascending.
        """
        if self._live is not None:
            return self._live(keys.cpu()).to(keys.device)
        self.store.wait_for_others()  # not when its clock ends: see model_rows.py
        rows: torch.Tensor = self.store.pull(keys).to(keys.device)
        if torch.is_grad_enabled() and not self.frozen:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: self._keep(keys, leaf))  # type: ignore[no-untyped-call]
        return rows

    def pull_sums(self, route: PooledRoute, device: torch.device) -> torch.Tensor:
        """Return the sums of bags of rows, which servers have added; their gradient is kept for the step."""
        self.store.wait_for_others()
        sums = self.store.pull_sums(route).to(device)
        if torch.is_grad_enabled() and not self.frozen:
            sums.requires_grad_()
            sums.register_post_accumulate_grad_hook(lambda leaf: self._keep_sums(route, leaf))  # type: ignore[no-untyped-call]
        return sums

    def _keep_sums(self, route: PooledRoute, leaf: torch.Tensor) -> None:
        gradient = leaf.grad
        assert gradient is not None, "torch calls the hook after it is computed"
        self._sums.append((route, gradient.detach()))
        leaf.grad = None

    def prefetch(self, keys: torch.Tensor) -> None:
        """Request the rows of the next step's unique keys, which `pull` takes then."""
        if len(keys) and self._live is None:
            self.store.prefetch(keys)

    def _keep(self, keys: torch.Tensor, leaf: torch.Tensor) -> None:
        gradient = leaf.grad
        assert gradient is not None, "torch calls the hook after it is computed"
        self._gradients.append((keys, gradient.detach()))
        leaf.grad = None  # another backward through the same rows gives a gradient of its own

    def send(self, weight: float) -> Ticket | None:
        """Push the gradients since the last call, multiplied by `weight`; None where there are none."""
        sums, self._sums = self._sums, []
        if len(sums) == 1 and not self._gradients:
            ((route, of_sums),) = sums
            return None if weight == 0.0 else self.store.push_sums(route, of_sums * weight)
        for route, of_sums in sums:  # with other gradients of the step: one push of rows
            rows = route.whole.gradients(of_sums.cpu(), len(route.keys))
            self._gradients.append((torch.from_numpy(route.keys), rows))
        if not self._gradients:
            return None
        kept, self._gradients = self._gradients, []
        keys, gradient = kept[0] if len(kept) == 1 else added_up(kept)
        if weight == 0.0 or not len(keys):  # this rank's examples do not count
            return None
        return self.store.push(keys, gradient if weight == 1.0 else gradient * weight)


def added_up(gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct keys, ascending, and the sum of the gradients of each, added in the given order."""
    every = np.unique(np.concatenate([keys.cpu().numpy() for keys, _ in gradients]))
    first = gradients[0][1]
    total = torch.zeros(len(every), first.shape[1], dtype=first.dtype)
    for keys, gradient in gradients:
        total[torch.from_numpy(np.searchsorted(every, keys.cpu().numpy()))] += gradient.cpu()
    return torch.from_numpy(every), total
