"""The rows of all embeddings of a prepared model: opened with it, pushed in its steps, clocked with them.

One step: forwards pull; backward leaves the gradients of the unique rows here; they are pushed before the last bucket
of dense gradients is sent; the dense step is made; each store's clock ends. So

- a step of a lost worker that counts for the dense parameters has its rows on all replicas: `send` waits for them;
- a step that does not count is made again by the replacement, whose pushes have the same sequence numbers and so are
  applied once;
- a store's clock is the run's step: a replacement that continues at step c ends the clocks before c that the lost
  worker had not ended, and marks the checkpoint of step c, which the lost worker may not have marked.

No worker waits for the clocks of others until its next pull. Before that it has stored its own state after the step,
which a replacement takes before it ends the lost worker's clock.

Where sums are recovered (collectives), a replacement gets its state only from workers that are in the sums of the next
step, and they would not get there while the lost worker's clock, or its mark of a checkpoint, is missing. But there a
worker whose sums of a step are complete knows that all workers have pushed their rows of it. So it ends the clock, and
marks, for all of them; that is on all replicas before its next step begins.

The gradient is weighted as the dense one: under bsp and ssp by this rank's part of the joint batch, so that the sum
over ranks is the gradient of the joint mean; under asp each rank's gradient is applied alone, as a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from psctl.errors import UsageError
from psctl.kv.open_store import Stores
from psctl.sparse.embedding_modules import RowsModule
from psctl.sparse.embedding_rows import EmbeddingRows
from psctl.sync.synchronizer import ExampleWeight, Synchronizer

PREFIX = "embedding/"
"""Prefix of the names of stores that are made of a module's place in the model."""


class ModelRows:
    """The rows of a model's embeddings.

    Args:
        modules: all modules of the model that is given to `run.prepare`, by their places in it.
        weight: of this rank's gradient.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], weight: ExampleWeight) -> None:
        self._weight = weight
        self._common = False  # a step that is finished here is finished everywhere
        self._rows: dict[str, EmbeddingRows] = {}
        self._modules: list[RowsModule] = []
        for place, module in modules:
            if isinstance(module, RowsModule) and module.rows not in self._rows.values():
                self._rows[f"{PREFIX}{place or 'model'}"] = module.rows
                self._modules.append(module)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def stores(self) -> dict[str, EmbeddingRows]:
        """Return the rows of each embedding by the name of its store."""
        return {rows.options.name or place: rows for place, rows in self._rows.items()}

    def open(self, stores: Stores, seed: int) -> None:
        """Open the stores; all ranks do so before any of them trains.

        Raises:
            UsageError: two modules have one name, or an option is invalid.
        """
        named: set[str] = set()
        for place, rows in self._rows.items():
            name = rows.options.name or place
            if name in named:
                raise UsageError(
                    f"two embeddings have name={name!r}", "give each its own name, or use one module in both places"
                )
            named.add(name)
            rows.open(stores, name, seed)

    def check(self, period: int, *, outer: bool) -> None:
        """Raise UsageError where ranks step alone between the ends of periods."""
        if self._rows and (period > 1 or outer):
            raise UsageError(
                f"period: {period} or outer= with an embedding of psctl.nn, whose rows step in every step",
                "set `period: 1` under sync: in the job file and leave outer= out, or use torch.nn.Embedding",
            )

    def prefetch(self, found: object) -> None:
        """Request the rows of the next batch.

        Args:
            found: what `run.loader(keys=)` returned for the batch: the keys of all embeddings of the model, or a dict
                of embeddings and keys.

        Raises:
            UsageError: it is neither, or the model has no embedding.
        """
        if not self._modules:
            raise UsageError(
                "run.loader(keys=...) of a model without an embedding of psctl.nn",
                "leave `keys` out, or give run.prepare a model with a SparseEmbedding before the loop",
            )
        pairs = list(found.items()) if isinstance(found, Mapping) else [(module, found) for module in self._modules]
        for module, keys in pairs:
            if module not in self._modules or not isinstance(keys, torch.Tensor):
                raise UsageError(
                    f"run.loader(keys=...) returned {type(keys).__name__} for {type(module).__name__}",
                    "return a tensor of integer keys, or a dict: {model.items: keys}, of embeddings of the model",
                )
            module.prefetch(keys)

    def join(self, synchronizer: Synchronizer, step: int) -> None:
        """Send the rows with the rounds of dense gradients, and go on after `step`."""
        if self._rows:
            self._common = synchronizer.recovers_sums
            synchronizer.hold_last_bucket(self.send)
            self.end_step(step, saves=False)

    def send(self) -> None:
        """Push the gradients of the step in progress; return when all replicas have them."""
        tickets = [
            rows.send(self._weight.weight if rows.options.is_asynchronous else self._weight.share)
            for rows in self._rows.values()
        ]
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()

    def end_step(self, step: int, *, saves: bool) -> None:
        """End the clocks up to a step, which is finished here; return when all replicas know.

        Args:
            step: the step.
            saves: its state is saved.
        """
        tickets = [
            (rows.store, rows.store.send_clocks(step, common=self._common))
            for rows in self._rows.values()
            if not rows.options.is_asynchronous
        ]
        if self._common and saves:
            tickets += [(rows.store, rows.store.send_common_mark(step)) for rows in self._rows.values()]
        for store, ticket in tickets:
            store.wait_for_separation(ticket)
