"""SparseEmbedding and SparseEmbeddingBag: torch's embeddings with their rows in a store on the job's servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from psctl.errors import UsageError
from psctl.kv.store import Store
from psctl.sparse.embedding_rows import EmbeddingRows, Initial, RowsOptions

NORMAL: Mapping[str, object] = {"normal": 1.0}
"""The start values of torch's embeddings."""


class RowsModule(nn.Module):
    """Base class of modules with rows in a store; see SparseEmbedding.

    Args: as SparseEmbedding's.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        optimizer: str | Mapping[str, object],
        initial: Initial,
        dtype: torch.dtype | None,
        consistency: str | Mapping[str, int],
        name: str,
        filters: Sequence[object],
    ) -> None:
        super().__init__()
        what = type(self).__name__
        for given, text in ((num_embeddings, "num_embeddings"), (embedding_dim, "embedding_dim")):
            whole = isinstance(given, int) and not isinstance(given, bool) and given > 0
            if not whole and not (given is None and text == "num_embeddings"):
                raise UsageError(
                    f"{what}: {text}={given!r}",
                    "give a whole number from 1 on"
                    + ("; None admits every integer of 64 bits as a key" if text == "num_embeddings" else ""),
                )
        settings = {"name": optimizer} if isinstance(optimizer, str) else dict(optimizer)
        if settings.get("name") == "ftrl" and initial is NORMAL:
            initial = None  # its rows are functions of the gradients alone
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = self._checked_padding(padding_idx)
        self.rows = EmbeddingRows(
            RowsOptions(
                embedding_dim, dtype or torch.get_default_dtype(), settings, initial, consistency, name, tuple(filters)
            )
        )  # fmt: skip

    @staticmethod
    def key(text: str) -> int:
        """Return a 64-bit key for a text: a hash, equal on all workers."""
        return Store.key(text)

    def configure(self, **settings: float) -> None:
        """Change settings of the optimizer of the rows, such as `lr`; every rank makes the same call between steps.

        Raises:
            UsageError: the optimizer has no such setting, a value is out of range, or the model is not prepared.
        """
        self.rows.store.configure(int, **settings)

    def requires_grad_(self, requires_grad: bool = True) -> RowsModule:
        """Train the rows, or freeze them. A call on a module that contains this one does not reach the rows."""
        self.rows.frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def extra_repr(self) -> str:
        options = self.rows.options
        return f"{self.num_embeddings}, {self.embedding_dim}, optimizer={options.optimizer}"

    def _checked_padding(self, padding: int | None) -> int | None:
        if padding is None or self.num_embeddings is None:
            return padding
        if not -self.num_embeddings <= padding < self.num_embeddings:
            raise UsageError(f"padding_idx={padding} of {self.num_embeddings} rows", "give the key of a row, or None")
        return padding % self.num_embeddings

    def prefetch(self, keys: torch.Tensor) -> None:
        """Request the rows of the next step's keys, of any shape; its forward takes them if it has the same keys.

        `run.loader(..., keys=)` does it for each batch.

        Raises:
            UsageError: the keys are no integers, or the model is not prepared.
        """
        unique = torch.unique(self._checked_keys(keys))
        self.rows.prefetch(_without(unique, self._padding_among(unique)))

    def _checked_keys(self, keys: torch.Tensor) -> torch.Tensor:
        if keys.dtype not in (torch.int64, torch.int32):
            raise UsageError(f"keys of {type(self).__name__} are {keys.dtype}", "give int64 or int32")
        return keys.long()

    def _padding_among(self, unique: torch.Tensor) -> int | None:
        """Return the place of the padding row's key among ascending keys; None where it is not there."""
        if self.padding_idx is None:
            return None
        at = int(torch.searchsorted(unique, self.padding_idx))
        return at if at < len(unique) and int(unique[at]) == self.padding_idx else None

    def _look_up(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the rows of the distinct keys, the place of each key among them, and the place of the padding row.

        Raises:
            UsageError: the keys are no integers.
            IndexError: a key is out of range, as in torch's embeddings.
        """
        unique, places = self._distinct(keys)
        padding = self._padding_among(unique)
        found = self.rows.pull(_without(unique, padding))  # the padding row is zero, and never pushed
        if padding is None:
            return found, places, None
        return torch.cat([found[:padding], found.new_zeros(1, found.shape[1]), found[padding:]]), places, padding

    def _distinct(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distinct keys, ascending, and the place of each key among them; raises as `_look_up`."""
        unique, places = torch.unique(self._checked_keys(keys), return_inverse=True)
        if self.num_embeddings is not None and len(unique):
            least, most = int(unique[0]), int(unique[-1])
            if least < 0 or most >= self.num_embeddings:
                raise IndexError(f"key {least if least < 0 else most} of an embedding of {self.num_embeddings} rows")
        return unique, places


def _without(unique: torch.Tensor, place: int | None) -> torch.Tensor:
    """Return keys without the one at a place."""
    return unique if place is None else torch.cat([unique[:place], unique[place + 1 :]])


class SparseEmbedding(RowsModule):
    """An embedding whose rows are on the job's servers, as torch.nn.Embedding(sparse=True) otherwise.

        items = psctl.nn.SparseEmbedding(None, 16, optimizer={"name": "adagrad", "lr": 0.05}, initial={"normal": 0.01})

    A forward pulls the rows of the batch's distinct keys, the backward's gradients of these rows are pushed with the
    step, and the servers apply `optimizer`: bytes go with the batch, not with the number of possible keys. The rows are
    no parameters of the model: the optimizer given to `run.prepare` steps the dense parameters, by the job's strategy;
    both belong to one step and one checkpoint. A row that was never pushed takes no memory and has its start value.

    It works after `run.prepare(model)`, under `psctl train` with every strategy, and alone (`python train.py`); not
    under torchrun, which has no servers. Under bsp, N workers take the trajectory of one on the joint batch.

    Differences from torch: no `weight`; `max_norm` and `scale_grad_by_freq` do not exist, because they depend on how a
    batch is divided among workers; adam counts the steps of each row (SparseAdam: of the table).

    Args:
        num_embeddings: number of rows, with keys from 0 on; None: every integer of 64 bits is a key.
        embedding_dim: elements of a row.
        padding_idx: the key whose row is zero and is not trained.
        optimizer: of the rows, on the servers: a name and settings, as `Store.declare` takes them.
        initial: the start value of rows: a number, {"normal": DEVIATION} or {"uniform": LIMIT} (with "seed": N, else
            the job's), or "module:function" of keys; default: as torch's. It depends on the key alone.
        dtype: of the rows; default: torch's default dtype.
        consistency: "bsp", {"ssp": s} or "asp": which updates of other workers a forward sees (docs/store.md).
        name: of the store that has the rows; default: "embedding/" and the module's place in the model.
        filters: which gradients of rows are sent, and in which form, as `Store.declare` takes them.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        optimizer: str | Mapping[str, object],
        initial: Initial = NORMAL,
        dtype: torch.dtype | None = None,
        consistency: str | Mapping[str, int] = "bsp",
        name: str = "",
        filters: Sequence[object] = (),
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, optimizer, initial, dtype, consistency, name, filters
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of keys of any shape: that shape, and a dimension of elements."""
        rows, places, padding = self._look_up(input)
        return functional.embedding(places, rows, padding)


class SparseEmbeddingBag(RowsModule):
    """Sums or means of bags of rows that are on the job's servers, as torch.nn.EmbeddingBag(sparse=True) otherwise.

    See SparseEmbedding.

    Args:
        num_embeddings, embedding_dim, padding_idx, optimizer, initial, dtype, consistency, name, filters: as
            SparseEmbedding's.
        mode: "sum" or "mean" of the rows of a bag.
        include_last_offset: `offsets` has the end of the last bag, too.
        pool: where rows of a bag are added: on the "server", on the "worker", or ("auto") on servers where that takes
            fewer bytes, unless rows are prefetched or `per_sample_weights` or filters are given. Results are equal up
            to rounding.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        pool: str = "auto",
        padding_idx: int | None = None,
        optimizer: str | Mapping[str, object],
        initial: Initial = NORMAL,
        dtype: torch.dtype | None = None,
        consistency: str | Mapping[str, int] = "bsp",
        name: str = "",
        filters: Sequence[object] = (),
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, optimizer, initial, dtype, consistency, name, filters
        )
        if mode not in ("sum", "mean"):
            raise UsageError(f"SparseEmbeddingBag: mode={mode!r}", 'give "sum" or "mean"')
        if pool not in ("auto", "worker", "server"):
            raise UsageError(f"SparseEmbeddingBag: pool={pool!r}", 'give "auto", "worker" or "server"')
        if pool == "server" and filters:
            raise UsageError('SparseEmbeddingBag: pool="server" with filters', "leave one of them out")
        self.mode, self.include_last_offset, self.pool = mode, include_last_offset, pool
        self._prefetches = False

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one row a bag.

        Args:
            input: keys: (bags, keys of each), or in one dimension with `offsets`.
            offsets: where each bag begins in `input`.
            per_sample_weights: weights of the keys, of the shape of `input`; for mode "sum".
        """
        if self.pool != "worker" and per_sample_weights is None and not self._prefetches:
            sums = self._sums(input, offsets)
            if sums is not None:
                return sums
        rows, places, padding = self._look_up(input)
        return functional.embedding_bag(
            places, rows, offsets.long() if offsets is not None else None, mode=self.mode,
            per_sample_weights=per_sample_weights, include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    def prefetch(self, keys: torch.Tensor) -> None:
        self._prefetches = True  # rows that come early are not waited for
        super().prefetch(keys)

    def _sums(self, keys: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor | None:
        """Return the bags, added by the servers; None where rows are to be pulled."""
        odd = keys.dim() != (2 if offsets is None else 1)
        if odd or self.rows.is_read_only or self.rows.options.filters:
            return None
        unique, places = self._distinct(keys)
        if offsets is None:
            lengths = torch.full((keys.shape[0],), keys.shape[1], device=keys.device)
        else:
            ends = (
                offsets[1:] if self.include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(keys)])])
            )
            starts = offsets[:-1] if self.include_last_offset else offsets
            lengths = (ends - starts).long()
            if (len(starts) and int(starts[0])) or int(lengths.sum()) != len(keys) or bool((lengths < 0).any()):
                return None  # torch's own call says what is wrong
        places = places.flatten()
        padding = self._padding_among(unique)
        if padding is not None:
            bags = torch.repeat_interleave(torch.arange(len(lengths), device=keys.device), lengths)
            kept = places != padding
            lengths = torch.bincount(bags[kept], minlength=len(lengths))
            places = places[kept]
            places = places - (places > padding).long()
        route = self.rows.store.route_bags(_without(unique, padding), places, lengths)
        if not len(route.keys) or (self.pool == "auto" and not route.saves):
            return None
        sums = self.rows.pull_sums(route, keys.device)
        return sums / lengths.clamp(min=1)[:, None] if self.mode == "mean" else sums
