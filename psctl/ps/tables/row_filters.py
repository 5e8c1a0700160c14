"""Filters of the rows that a worker pushes: which rows are sent, and in which form.

    random_skip p    each row is skipped with probability p; a sent one is divided by 1 - p, so that the mean is right
                     (unbiased); skipped rows are lost
    significance v   a row is sent when its root mean square exceeds v times that of the whole push; other rows add up
                     on the worker until they do
    kkt              a row that the optimizer `proximal` has marked as inactive is not sent, except in every n-th clock
    bf16, fp16       values are rounded to 16 bits
    int8             values are rounded at random to integers in -127..127, with one scale a row: unbiased

Theory. Li and others (NIPS 2014) show that a proximal gradient method converges when gradients are skipped at random
(unbiased) and changes below a threshold that goes to zero are not sent; the threshold of `significance` is relative to
the push, so it falls as gradients do. The KKT filter changes no solution: a coordinate whose weight is zero and whose
joint gradient is within the penalty is left at zero by the proximal step, and an absent gradient does the same. One
whose gradient has grown since is noticed in the next clock that sends all rows. That requires gradients of all
examples, or nearly: with small batches a mark says little about the next batch.

Every decision is a function of the key, a number of the push and what this worker has pushed and read before, so a
worker that replays a step without a state (random_skip, int8) sends the same bytes again. The rows that
`significance` holds back are lost with their worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from psctl.errors import UsageError
from psctl.ps.table_messages import FilterSpec, Initialiser, PlainValue, TableSpec
from psctl.ps.tables.reductions import DTYPES, Array
from psctl.ps.tables.row_index import Keys, TableRows
from psctl.ps.tables.row_initialisers import initial_values


class PushNumbers(NamedTuple):
    """The position of a push: its sequence, the same when a step is replayed, and the worker's clock and rank."""

    sequence: int
    clock: int
    rank: int


class RowFilter:
    """Base class of filters, also of a user's own: a class with it as base, in a module of the job's folder.

        class Large(psctl.RowFilter):
            def __init__(self, least):                     # the settings, by name
                self.least = least

            def select(self, keys, rows, numbers):         # on the worker
                return rows.abs().amax(dim=1) > self.least, rows

        store.declare(int, shape=(16,), filters=[{"filters:Large": {"least": 0.01}}])

    Each worker has one object for each table, and each server has one for each table and worker, for `decode` alone.
    """

    def select(self, keys: torch.Tensor, rows: torch.Tensor, numbers: PushNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which rows are sent (bools), and the rows to send, one for each key. Called on the worker.

        Args:
            keys: 64-bit integers, each once.
            rows: (keys, elements of a row); not to be changed.
            numbers: the position of the push.
        """
        return torch.ones(len(keys), dtype=torch.bool), rows

    def encode(self, keys: torch.Tensor, rows: torch.Tensor, numbers: PushNumbers) -> torch.Tensor:
        """Return what is sent for these rows: a tensor (keys, any width) of any dtype. Called on the worker."""
        return rows

    def decode(self, keys: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
        """Return the rows of what `encode` made. Called on the server, and on the worker, which sees its own pushes.

        The result may depend on the arguments alone: a server that is replaced decodes again.
        """
        return coded

    def on_read(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Note rows that servers have sent to this worker; rows that do not exist are not among them."""


class FilterClasses(Protocol):
    """Finds users' filters."""

    def row_filter(self, name: str) -> type[RowFilter]:
        """Return a filter's class by its module:class."""


class RandomSkip(RowFilter):
    """See the module. Args: p: the probability; seed: of the choice."""

    def __init__(self, p: float, seed: int = 0) -> None:
        self._p, self._seed = p, seed

    def select(self, keys: torch.Tensor, rows: torch.Tensor, numbers: PushNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        draw = noise(keys.numpy(), 1, self._seed, numbers)[:, 0]
        return torch.from_numpy(draw >= self._p), rows / (1.0 - self._p)


class Significance(RowFilter):
    """See the module. Args: v: the threshold, in root mean squares of a push."""

    def __init__(self, v: float) -> None:
        self._v = v
        self._held: TableRows | None = None

    def select(self, keys: torch.Tensor, rows: torch.Tensor, numbers: PushNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        if self._held is None:
            self._held = TableRows(rows.shape[1], rows.dtype, 0)
        held = self._held
        slots = held.find(keys.numpy())
        there = slots >= 0
        if there.any():
            rows = rows.clone()
            rows[torch.from_numpy(there)] += held.lanes.values[torch.from_numpy(slots[there])]
        squares = rows.double().square().mean(dim=1)
        finite = squares.isfinite()  # a row that is not finite is sent, and is no part of later ones
        small = finite & (squares <= self._v**2 * squares[finite].mean())
        gone = slots[there & ~small.numpy()]
        if len(gone):
            held.remove(gone)
        kept = keys[small].numpy()
        places = held.find(kept)
        new = places < 0
        if new.any():
            places[new] = held.add(kept[new])
        held.lanes.values[torch.from_numpy(places)] = rows[small]
        return ~small, rows


class KktFilter(RowFilter):
    """See the module. Args: every: clocks from one that sends all rows to the next."""

    def __init__(self, every: int = 10) -> None:
        self._every = every
        self._inactive = TableRows(1, torch.uint8, 0)

    def select(self, keys: torch.Tensor, rows: torch.Tensor, numbers: PushNumbers) -> tuple[torch.Tensor, torch.Tensor]:
        if numbers.clock % self._every == 0:
            return torch.ones(len(keys), dtype=torch.bool), rows
        return torch.from_numpy(self._inactive.find(keys.numpy()) < 0), rows

    def on_read(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        marked = ((rows == 0) & rows.signbit()).all(dim=1).numpy()
        known = self._inactive.find(keys.numpy())
        gone = known[(known >= 0) & ~marked]
        if len(gone):
            self._inactive.remove(np.unique(gone))
        new = keys.numpy()[marked & (known < 0)]
        if len(new):
            self._inactive.add(new)


class Rounded(RowFilter):
    """Values of 16 bits. Args: coded: their type; dtype: of the rows."""

    def __init__(self, coded: torch.dtype, dtype: torch.dtype) -> None:
        self._coded, self._dtype = coded, dtype

    def encode(self, keys: torch.Tensor, rows: torch.Tensor, numbers: PushNumbers) -> torch.Tensor:
        return rows.to(self._coded)

    def decode(self, keys: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
        return coded.to(self._dtype)


SCALE = 4
"""Bytes of a row's scale, a float32, before its integers."""


class RandomRounding(RowFilter):
    """Integers of 8 bits: x / scale, rounded up or down at random so that the mean is x. Args: dtype: of the rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, keys: torch.Tensor, rows: torch.Tensor, numbers: PushNumbers) -> torch.Tensor:
        values = rows.double().numpy()
        count, width = values.shape
        scale = (np.abs(values).max(axis=1, initial=0.0) / 127.0).astype(np.float32)
        scale = np.where(scale * np.float32(127.0) < np.abs(values).max(axis=1, initial=0.0),
                         np.nextafter(scale, np.float32(np.inf)), scale)  # fmt: skip
        usable = np.isfinite(scale) & (scale > 0)
        parts = np.divide(values, scale[:, None], out=np.zeros_like(values), where=usable[:, None])
        whole = np.floor(parts + noise(keys.numpy(), width, 0, numbers))
        coded = np.empty((count, SCALE + width), dtype=np.uint8)
        coded[:, :SCALE] = scale.astype("<f4").view(np.uint8).reshape(count, SCALE)
        coded[:, SCALE:] = np.clip(whole, -127, 127).astype(np.int8).view(np.uint8)
        return torch.from_numpy(coded)

    def decode(self, keys: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
        array = coded.numpy()
        scale = np.ascontiguousarray(array[:, :SCALE]).view("<f4").astype(np.float64)
        with np.errstate(invalid="ignore"):  # a row that was not finite is NaN
            values = array[:, SCALE:].view(np.int8).astype(np.float64) * scale
        return torch.from_numpy(values).to(self._dtype)


def noise(keys: Keys, width: int, seed: int, numbers: PushNumbers) -> Array:
    """Return numbers in [0, 1), one for each key and element, that are functions of the arguments alone."""
    mixed = (seed * 0x9E3779B1 + numbers.rank * 0x85EBCA77 + numbers.sequence) & ((1 << 63) - 1)
    return initial_values(Initialiser("uniform", 0.5, mixed), keys, width) + 0.5


class SentRows(NamedTuple):
    """What is left of a push: which of its rows, the rows as the server decodes them, and their code (None: rows)."""

    kept: torch.Tensor
    rows: torch.Tensor
    coded: torch.Tensor | None


class FilterChain:
    """The filters of one table, in order. One of them may encode: the last.

    Args:
        spec: the table's.
        dtype: of its rows.
        classes: finds users' filters.

    Raises:
        UsageError: a filter is unknown, a setting is invalid, or a filter does not fit the table.
    """

    def __init__(self, spec: TableSpec, dtype: torch.dtype, classes: FilterClasses) -> None:
        self._filters = [_made(each, spec, dtype, classes) for each in spec.filters]
        self._names = [each.name for each in spec.filters]
        self._width, self._dtype = spec.width, dtype
        coders = [at for at, each in enumerate(self._filters) if type(each).encode is not RowFilter.encode]
        if coders and coders != [len(self._filters) - 1]:
            raise UsageError(
                f"filters={self._names}: {self._names[coders[0]]} encodes rows, and is not the last filter",
                "one filter may encode rows (bf16, fp16, int8, or a class with `encode`); write it last",
            )
        self.encodes = bool(coders)
        """Whether rows are sent in another form."""
        self.offered = self.sent = self.offered_bytes = self.sent_bytes = 0
        """Rows, and bytes of keys and rows, that the script has pushed, and those that were sent."""

    def on_push(self, keys: Keys, rows: torch.Tensor, numbers: PushNumbers) -> SentRows:
        """Return what is sent of a push.

        Raises:
            UsageError: a user's filter failed, or returned something of another form.
        """
        kept = torch.ones(len(keys), dtype=torch.bool)
        left = torch.from_numpy(keys.copy())
        self.offered, self.offered_bytes = self.offered + len(keys), self.offered_bytes + 8 * len(keys) + rows.nbytes
        for each, name in zip(self._filters, self._names, strict=True):
            try:
                chosen, rows = each.select(left, rows, numbers)
            except Exception as error:
                raise UsageError(f"filter {name} failed in select: {type(error).__name__}: {error}") from error
            self._check(name, "select", rows, len(left))
            if not isinstance(chosen, torch.Tensor) or chosen.dtype != torch.bool or chosen.shape != left.shape:
                raise UsageError(f"filter {name}: select returned no bools of shape {list(left.shape)}", SELECT)
            if not chosen.all():
                kept[kept.clone()] = chosen
                left, rows = left[chosen], rows[chosen]
        coded = None
        if self.encodes:
            try:
                coded = self._filters[-1].encode(left, rows, numbers).contiguous()
            except Exception as error:
                raise UsageError(
                    f"filter {self._names[-1]} failed in encode: {type(error).__name__}: {error}"
                ) from error
            if coded.dtype not in DTYPES or coded.ndim != 2 or len(coded) != len(left):
                raise UsageError(
                    f"filter {self._names[-1]}: encode returned {coded.dtype} of shape {list(coded.shape)}",
                    f"return a tensor of shape ({len(left)}, any width)",
                )
            rows = self.decode(left, coded)
        self.sent, self.sent_bytes = (
            self.sent + len(left),
            self.sent_bytes + 8 * len(left) + (rows if coded is None else coded).nbytes,
        )
        return SentRows(kept, rows, coded)

    def decode(self, keys: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
        """Return the rows of a code.

        Raises:
            UsageError: the filter failed, or returned something of another form.
        """
        try:
            rows = self._filters[-1].decode(keys, coded)
        except Exception as error:
            raise UsageError(f"filter {self._names[-1]} failed in decode: {type(error).__name__}: {error}") from error
        self._check(self._names[-1], "decode", rows, len(keys))
        return rows.contiguous()

    def on_read(self, keys: Keys, rows: torch.Tensor) -> None:
        """Note rows that servers have sent."""
        for each, name in zip(self._filters, self._names, strict=True):
            if type(each).on_read is not RowFilter.on_read:
                try:
                    each.on_read(torch.from_numpy(keys.copy()), rows)
                except Exception as error:
                    raise UsageError(f"filter {name} failed in on_read: {type(error).__name__}: {error}") from error

    def _check(self, name: str, method: str, rows: object, count: int) -> None:
        if isinstance(rows, torch.Tensor) and rows.dtype == self._dtype and rows.shape == (count, self._width):
            return
        form = f"{rows.dtype} of shape {list(rows.shape)}" if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise UsageError(
            f"filter {name}: {method} returned {form} as rows", f"return {self._dtype} of shape {[count, self._width]}"
        )


SELECT = "return which rows are sent, a tensor of bools with one for each key, and the rows: `return keep, rows`"

BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "random_skip": {"p": (0.0, 1.0), "seed": (0, 2.0**63)},
    "significance": {"v": (0.0, math.inf)},
    "kkt": {"every": (1, 2.0**31)},
    "bf16": {},
    "fp16": {},
    "int8": {},
}
"""By filter and setting: the least value, and what values are below."""

WHOLE = frozenset({"seed", "every"})
"""Settings that are whole numbers."""

MAIN: Mapping[str, str] = {"random_skip": "p", "significance": "v", "kkt": "every"}
"""The setting that a number alone gives: {"random_skip": 0.25}."""

FORMS = (
    'filters=[{"random_skip": P}, {"significance": V}, {"kkt": {"every": N}}, "bf16", "fp16", "int8", '
    '"module:Class", {"module:Class": {"setting": value}}]'
)


def filter_spec(given: object) -> FilterSpec:
    """Return one filter of a declaration, checked.

    Raises:
        UsageError: it has another form, is unknown, or a setting is unknown, missing or out of range.
    """
    if isinstance(given, Mapping) and len(given) != 1:
        raise UsageError(f"filter {given!r}", f"give one filter in each entry: {FORMS}")
    name, settings = next(iter(given.items())) if isinstance(given, Mapping) else (given, {})
    if not isinstance(name, str):
        raise UsageError(f"filter {given!r}", f"give {FORMS}")
    if not isinstance(settings, Mapping):
        if name not in MAIN:
            raise UsageError(f"filter {name!r} with {settings!r}", f"give its settings by name: {FORMS}")
        settings = {MAIN[name]: settings}
    found: dict[str, PlainValue] = {}
    for key, value in settings.items():
        if not isinstance(key, str) or not (value is None or isinstance(value, bool | int | float | str)):
            raise UsageError(f"{key}={value!r} of filter {name!r}", "give numbers, texts or bools")
        found[key] = value
    if ":" in name:
        return FilterSpec(name, found)
    if name not in BOUNDS:
        raise UsageError(f"no filter has the name {name!r}", f"give {FORMS}")
    bounds = BOUNDS[name]
    for key, value in found.items():
        if key not in bounds:
            known = ", ".join(bounds) or "none"
            raise UsageError(f"filter {name!r} has no setting {key!r}", f"its settings: {known}")
        least, below = bounds[key]
        number = isinstance(value, int if key in WHOLE else int | float) and not isinstance(value, bool)
        if not number or not least <= float(value) < below:  # type: ignore[arg-type]
            kind = "a whole number" if key in WHOLE else "a number"
            limit = f" and below {below:g}" if below < 2.0**31 else ""
            raise UsageError(f"{key}={value!r} of filter {name!r}", f"give {kind} from {least:g} on{limit}")
    required = [key for key in ("p", "v") if key in bounds and key not in found]
    if required:
        raise UsageError(f"filter {name!r} without {required[0]}", f'give it: {{"{name}": 0.25}}')
    return FilterSpec(name, found)


def _made(given: FilterSpec, spec: TableSpec, dtype: torch.dtype, classes: FilterClasses) -> RowFilter:
    if ":" in given.name:
        made = classes.row_filter(given.name)
        try:
            return made(**given.settings)
        except Exception as error:
            text = f"filter {given.name} with {given.settings}: {type(error).__name__}: {error}"
            raise UsageError(text, "its constructor receives the settings by name") from error
    if filter_spec({given.name: given.settings}) != given:
        raise UsageError(f"filter {given!r}", f"give {FORMS}")
    if not dtype.is_floating_point:
        raise UsageError(f"filter {given.name!r} of rows of {spec.dtype}", "declare a floating-point dtype")
    if spec.reduce != "sum" and given.name in ("random_skip", "significance"):
        raise UsageError(
            f"filter {given.name!r} with reduce={spec.reduce!r}", "rows that are left out or added up need a sum"
        )
    if given.name == "kkt" and (spec.optimizer is None or spec.optimizer.name != "proximal"):
        raise UsageError(
            'filter "kkt" without the optimizer "proximal", which marks inactive rows',
            'declare optimizer={"name": "proximal", "lr": ..., "l1": ...}',
        )
    if given.name == "random_skip":
        return RandomSkip(**given.settings)  # type: ignore[arg-type]
    if given.name == "significance":
        return Significance(**given.settings)  # type: ignore[arg-type]
    if given.name == "kkt":
        return KktFilter(**given.settings)  # type: ignore[arg-type]
    if given.name == "int8":
        return RandomRounding(dtype)
    return Rounded(torch.bfloat16 if given.name == "bf16" else torch.float16, dtype)


def filter_specs(filters: Sequence[object] | None) -> tuple[FilterSpec, ...]:
    """Return the filters of a declaration, checked.

    Raises:
        UsageError: the value is no list of filters.
    """
    if filters is None:
        return ()
    if isinstance(filters, str | Mapping) or not isinstance(filters, Sequence):
        raise UsageError(f"filters={filters!r}", f"give a list: {FORMS}")
    return tuple(filter_spec(each) for each in filters)
