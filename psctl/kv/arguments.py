"""Arguments and results of a store's calls: checks keys, values, shapes and tickets, and converts tensors and rows.

Every size is checked before memory is allocated for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Sized
from hashlib import blake2b
from typing import TypeAlias, TypeGuard, cast

import msgspec
import numpy as np
import torch

from psctl.errors import UsageError
from psctl.kv.tickets import Callback, Ticket
from psctl.process.user_functions import name_of
from psctl.ps.table_messages import Admission, Initialiser, PlainValue, RowOptimizerSpec, TableSpec, TableStats
from psctl.ps.tables.reductions import Array, Lanes
from psctl.ps.tables.row_index import LEAST, MOST, Keys
from psctl.ps.tables.row_optimizers import complete
from psctl.ps.tables.table_kinds import TableKind
from psctl.units import parse_size

MOST_KEYS = 1 << 26
"""Most integer keys of one push, pull or call: their list has 512 MiB, and its route a small multiple of that."""

MOST_BYTES = 16 << 30
"""Most bytes of the rows of one push or pull, and of one named key's tensor."""

NAME_BYTES = 1000
"""Most bytes of a name in UTF-8."""

_WRAP = (1 << 64) - 1

KEYS = (
    "give a name, a list of names (to push: a dict of names and values), or integers: one, a range, or a flat list, "
    "tensor or array; one call has names or integers, not both"
)

Key: TypeAlias = "str | int | range | Sequence[int] | torch.Tensor | Array"
"""A name; or integer keys: one, a range, or several in a list, tensor or array."""

Value: TypeAlias = "torch.Tensor | Array | Sequence[object] | float | tuple[object, object]"
"""A tensor, or a value that a tensor is made of; for argmin (values, indices)."""

CheckedKey: TypeAlias = "str | int | range | Keys"
"""A key that was checked."""


def checked_key(key: object) -> CheckedKey:
    """Return one key or one list of integer keys: a single integer as int, a list as an array of 64-bit integers.

    A range stays a range: a pull of it returns the keys that are there. A tensor may be on any device.

    Raises:
        UsageError: the value is no key.
    """
    if isinstance(key, str):
        return checked_name(key, "a key's name")
    if isinstance(key, range):
        return key
    if isinstance(key, bool | np.bool_):
        raise UsageError(f"the key {key} is a bool", KEYS)
    if isinstance(key, int | np.integer):
        return _in_64_bits(int(key))
    if isinstance(key, torch.Tensor):
        key = _plain(key, "keys").numpy()
    if isinstance(key, np.ndarray) and key.ndim == 0 and key.dtype.kind in "iu":
        return _in_64_bits(int(key))
    return integer_keys(key)


def checked_name(name: object, what: str) -> str:
    """Return a name that fits into messages; `what` is its description for errors.

    Raises:
        UsageError: it is no text, empty, no valid Unicode, or longer than NAME_BYTES.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"{what} is {name!r}", "give a text of at least one character")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} {name!r} is no valid Unicode text: {error.reason}", "take another name") from error
    if size > NAME_BYTES:
        raise UsageError(
            f"{what} {name[:40]!r}... has {size} bytes, the most are {NAME_BYTES}",
            "take a shorter name, or an integer key: store.key(text)",
        )
    return str(name)


def integer_keys(keys: object) -> Keys:
    """Return integer keys as an array of 64-bit integers, those of a range too.

    Raises:
        UsageError: the value is no list of integers, or has more than MOST_KEYS.
    """
    if isinstance(keys, range):
        _check_count(_length(keys))
        if keys:
            _in_64_bits(keys[0]), _in_64_bits(keys[-1])
        start, step = (np.uint64(each & _WRAP) for each in (keys.start if keys else 0, keys.step))
        return (np.arange(len(keys), dtype=np.uint64) * step + start).view(np.int64)  # modulo 2^64, as keys wrap
    if not isinstance(keys, list | tuple | np.ndarray):
        raise UsageError(f"keys are {_describe_keys(keys)}", KEYS)
    _check_count(keys.size if isinstance(keys, np.ndarray) else len(keys))
    try:
        found = np.asarray(keys)
        if found.dtype == np.uint64 and found.size and found.max() > MOST:
            raise OverflowError
    except OverflowError as error:
        raise UsageError(*_TOO_LARGE) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"keys are {_describe_keys(keys)}", KEYS) from error
    if found.dtype.kind == "O" and found.ndim == 1 and all(type(one) is int for one in found):
        found = np.array([_in_64_bits(one) for one in found], dtype=np.int64)
    if not found.size and found.ndim == 1:
        return found.astype(np.int64)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        shape = f" of shape {found.shape}" if found.ndim != 1 else ""
        raise UsageError(f"keys are {_describe_keys(keys)}{shape}", KEYS)
    return found.astype(np.int64, copy=False)


_TOO_LARGE = "a key does not fit in 64 bits with sign", "hash it: store.key(text)"


def _in_64_bits(key: int) -> int:
    if not LEAST <= key <= MOST:
        raise UsageError(*_TOO_LARGE)
    return key


def _length(keys: range) -> int:
    """Return how many integers a range has; `len` refuses above 2^63."""
    return max(0, (keys[-1] - keys[0]) // keys.step + 1) if keys else 0


def _check_count(count: int) -> None:
    if count > MOST_KEYS:
        raise UsageError(
            f"{count} integer keys in one call, the most are {MOST_KEYS}",
            "push in several calls; `pull(range(a, b))` returns the rows of a range of any length that exist",
        )


def _describe_keys(keys: object) -> str:
    """Return the type of an invalid list of keys, for messages."""
    if isinstance(keys, torch.Tensor | np.ndarray):
        return dtype_name(keys.dtype)
    if isinstance(keys, list | tuple) and keys:
        inside = " and ".join(sorted({type(one).__name__ for one in keys[:1000]}))
        return f"a {type(keys).__name__} of {inside}"
    return f"{keys!r}" if isinstance(keys, float | complex | bytes | None) else f"a {type(keys).__name__}"


def checked_spec(spec: TableSpec) -> TableSpec:
    """Return a table's specification.

    Raises:
        UsageError: one row, or a name's tensor, is larger than one call may push and pull.
    """
    check_bytes(spec, 1)
    return spec


def check_bytes(spec: TableSpec, rows: int) -> None:
    """Raise UsageError where one call pushes or pulls more than MOST_BYTES.

    Args:
        rows: number of integer keys; for a name: 1.
    """
    size = rows * spec.elements * getattr(torch, spec.dtype).itemsize
    if size > MOST_BYTES:
        what = f"key {spec.name!r} of shape {spec.shape}" if spec.name else f"{rows} rows of shape {spec.shape}"
        cure = "make it rows of integer keys" if spec.name else "push and pull in several calls"
        raise UsageError(f"{what}: {size >> 30} GiB, the most of one call are {MOST_BYTES >> 30} GiB", cure)


def checked_shape(shape: object) -> tuple[int, ...]:
    """Return the shape of a tensor or row; a single number is one side.

    Raises:
        UsageError: the value is no shape.
    """
    wrong = UsageError(f"shape={shape!r} is no shape", "give whole numbers from 0 on: shape=(3, 4)")
    if isinstance(shape, str | bytes):
        raise wrong
    try:
        given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        sides = tuple(operator.index(side) for side in given)
    except TypeError as error:
        raise wrong from error
    if any(isinstance(side, bool) for side in given) or any(not 0 <= side <= MOST for side in sides):
        raise wrong
    return sides


def checked_dtype(dtype: object) -> str:
    """Return a dtype's name without "torch.".

    Raises:
        UsageError: the value is no dtype of torch.
    """
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype={dtype!r} is no dtype of torch", "give torch.float32, torch.int64 ...")
    return dtype_name(dtype)


def checked_function(what: object, option: str) -> str:
    """Return the name of a function or reduction, as messages carry it.

    Raises:
        UsageError: the value is neither a name nor a function that servers can import.
    """
    if isinstance(what, str) or callable(what):
        return name_of(what)
    raise UsageError(f"{option}={what!r}", "give a name, or a function of a module in the job's folder")


def table_name(key: object, what: str) -> str:
    """Return the name of the table of a key: "" for `int`, the rows of integer keys.

    Args:
        what: what is done with it, for errors.

    Raises:
        UsageError: the key is neither a name nor `int`.
    """
    if key is int:
        return ""
    if not isinstance(key, str):
        raise UsageError(f"{key!r} cannot be {what}", "give a name, or int for the rows of integer keys")
    return checked_name(key, "a key's name")


def declared_rows(name: str, value: Value | None, shape: object, dtype: object) -> tuple[tuple[int, ...], str]:
    """Return the shape and the dtype's name of a declaration: those of its value, if it has one.

    Raises:
        UsageError: there is neither a value nor a shape, one is invalid, or a value is given for integer keys.
    """
    if value is None:
        if shape is None:
            raise UsageError(f"{name or int!r} is declared without a value or a shape", "give value= or shape=")
        return checked_shape(shape), checked_dtype(dtype)
    if not name:
        raise UsageError("the rows of integer keys are declared with a value", "declare them with `initial`")
    made = inferred_spec(name, value, "sum")
    return made.shape, made.dtype


def checked_initial(initial: object, dtype: str, store: str) -> float | str | Initialiser | None:
    """Return the initial value of absent rows, what makes it at random, or the name of the function that makes it.

    Raises:
        UsageError: the value is no number that the dtype holds, no distribution and no function.
    """
    if initial is None or isinstance(initial, str) or callable(initial):
        return None if initial is None else name_of(initial)
    if isinstance(initial, Mapping):
        return _initialiser(initial, dtype, store)
    if isinstance(initial, bool | int | float | np.integer | np.floating):
        kind = getattr(torch, dtype)
        if kind.is_floating_point or float(initial).is_integer():
            return float(initial)
        raise UsageError(f"initial={initial!r} of rows of {dtype}", "give a whole number, or another dtype")
    raise UsageError(
        f"initial={type(initial).__name__}",
        'give a number, {"normal": 0.01, "seed": 0}, or a function (keys, width) -> rows; of a name: its value',
    )


def _initialiser(initial: Mapping[object, object], dtype: str, store: str) -> Initialiser:
    """Return random start values; the store's name is a part of their seed."""
    wrong = UsageError(
        f"initial={dict(initial)!r}", 'give {"normal": DEVIATION, "seed": N} or {"uniform": LIMIT, "seed": N}'
    )
    scales = {name: initial[name] for name in ("normal", "uniform") if name in initial}
    seed = initial.get("seed", 0)
    if len(scales) != 1 or set(initial) - {*scales, "seed"} or not isinstance(seed, int) or isinstance(seed, bool):
        raise wrong
    ((name, scale),) = scales.items()
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise wrong
    if not getattr(torch, dtype).is_floating_point:
        raise UsageError(f"initial={dict(initial)!r} of rows of {dtype}", "declare a floating-point dtype")
    mixed = hash_of(f"{seed} {store}") & MOST
    return Initialiser("normal" if name == "normal" else "uniform", float(scale), mixed)


def checked_optimizer(optimizer: object) -> RowOptimizerSpec | None:
    """Return the optimizer of a declaration with all of its settings, or None.

    Raises:
        UsageError: there is no such optimizer, or a setting is unknown, missing or out of range.
    """
    if optimizer is None:
        return None
    given = {"name": optimizer} if isinstance(optimizer, str) else optimizer
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise UsageError(f"optimizer={optimizer!r}", 'give its name and settings: {"name": "adagrad", "lr": 0.05}')
    settings: dict[str, float] = {}
    for name, value in given.items():
        if name == "name":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise UsageError(f"{name}={value!r} of optimizer {given['name']!r}", "give a number")
        settings[str(name)] = float(value)
    return complete(RowOptimizerSpec(given["name"], settings))


def checked_admission(admit: object) -> Admission | None:
    """Return which absent keys a push gives a row; None: all.

    Raises:
        UsageError: the value has another form, or a number is out of range.
    """
    if admit is None:
        return None
    try:
        found = msgspec.convert(admit, Admission, strict=True)
        known = isinstance(admit, Mapping) and not set(admit) - set(Admission.__struct_fields__)
    except msgspec.ValidationError as error:
        raise UsageError(f"admit={admit!r}: {error}", _ADMIT) from error
    if not known or found == Admission():
        raise UsageError(f"admit={admit!r}", _ADMIT)
    return found


_ADMIT = 'give {"count": N} with N from 2 to 255, {"probability": P, "seed": N} with P above 0 and below 1, or both'


def checked_expiry(expire: object) -> int:
    """Return the age in clocks at which rows leave; 0: never.

    Raises:
        UsageError: it is no whole number from 1 on.
    """
    if expire is None:
        return 0
    if not isinstance(expire, int) or isinstance(expire, bool) or not 1 <= expire < 1 << 30:
        raise UsageError(f"expire={expire!r}", "give clocks, a whole number from 1 on")
    return expire


def checked_capacity(capacity: object) -> int:
    """Return the most bytes of a table's rows; 0: no limit.

    Raises:
        UsageError: it is no number of bytes.
    """
    if capacity is None:
        return 0
    try:
        found = parse_size(capacity) if isinstance(capacity, str) else capacity
    except ValueError as error:
        raise UsageError(f"capacity={capacity!r}: {error}", 'give bytes: "1GB"') from error
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found < 1 << 60:
        raise UsageError(f"capacity={capacity!r}", 'give bytes, a whole number or a text: "1GB"')
    return found


def total_of(stats: Sequence[TableStats]) -> dict[str, float]:
    """Return the sums of the counts of a table's shards, with the shares of keys that had a row."""
    names = TableStats.__struct_fields__
    total: dict[str, float] = {name: sum(getattr(each, name) for each in stats) for name in names}
    for what, short in (("pushed", "push"), ("read", "read")):
        total[f"{short}_hit_rate"] = total[f"{what}_found"] / total[what] if total[what] else math.nan
    return total


def checked_value(key: object, value: Value | None) -> Value:
    """Return the value of a push.

    Raises:
        UsageError: there is none.
    """
    if value is None:
        raise UsageError(f"push {describe_key(key)} without a value", "give the key and its value")
    return value


def checked_after(after: object) -> tuple[Ticket, ...]:
    """Return the tickets that a task waits for.

    Raises:
        UsageError: the value has something else than tickets.
    """
    if isinstance(after, Ticket):
        return (after,)
    return () if after is None else checked_tickets(after, "after=")


def checked_tickets(tickets: object, where: str) -> tuple[Ticket, ...]:
    """Return several tickets.

    Raises:
        UsageError: the value has something else than tickets.
    """
    if isinstance(tickets, Iterable) and not isinstance(tickets, str | Mapping):
        found = tuple(tickets)
        if all(isinstance(each, Ticket) for each in found):
            return found
    raise UsageError(f"{where}{tickets!r}", "give tickets, as push, fetch and call return them: [ticket, ...]")


def checked_callback(callback: object) -> Callback | None:
    """Return the function that is called with the result, or None.

    Raises:
        UsageError: the value is no function.
    """
    if callback is None or callable(callback):
        return callback
    raise UsageError(f"callback={callback!r} is no function", "give a function of one argument: the result")


def checked_timeout(timeout: object) -> float | None:
    """Return seconds to wait; None: no limit while servers answer.

    Raises:
        UsageError: the value is neither a number from 0 on nor None.
    """
    if timeout is None or (isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout >= 0):
        return timeout
    raise UsageError(f"timeout={timeout!r}", "give seconds from 0 on, or None")


def checked_arguments(arguments: Mapping[str, PlainValue]) -> dict[str, PlainValue]:
    """Return the arguments of a function that runs on servers.

    Raises:
        UsageError: one of them is no plain value, or an integer of more than 64 bits.
    """
    for name, value in arguments.items():
        plain = value is None or isinstance(value, bool | int | float | str)
        if not plain or (isinstance(value, int) and not LEAST <= value <= MOST):
            raise UsageError(
                f"{name}={value!r} of a function that runs on servers",
                "give numbers of 64 bits, texts, bools or None; a tensor is pushed under a key of its own",
            )
    return dict(arguments)


def tensor_of(value: object) -> torch.Tensor:
    """Return a value as a dense tensor on the CPU; it may share the script's memory.

    Raises:
        UsageError: no tensor can be made of the value.
    """
    if isinstance(value, torch.Tensor):
        return _plain(value, "a value")
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.require(value, requirements=["C", "W"]))
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"a value is no tensor: {error}", "give a tensor, an array, numbers or lists of them"
        ) from error


def _plain(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise UsageError(
            f"{what}: a tensor of layout {dtype_name(tensor.layout)}",
            "make it dense (to_dense()), or push its rows by integer keys",
        )
    if tensor.is_quantized:
        raise UsageError(f"{what}: a quantized tensor", "push tensor.dequantize()")
    if tensor.is_meta:
        raise UsageError(f"{what}: a tensor on the device meta, which has no values", "make it on the CPU or a GPU")
    return tensor.detach().cpu().resolve_neg()


# ---- values and results ----------------------------------------------------------------------------------------------


def hash_of(text: str) -> int:
    """Return a 64-bit integer key for a text: a hash. Among 2^32 texts two have the same key with probability 0.4.

    Raises:
        UsageError: the value is no text.
    """
    if not isinstance(text, str):
        raise UsageError(f"store.key({text!r})", "give a text: store.key(str(thing))")
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little", signed=True)


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype or layout without "torch."."""
    return str(dtype).removeprefix("torch.")


def inferred_spec(key: Key, value: Value, reduce: str) -> TableSpec:
    """Return the specification of a table that was not declared, from the first push to it."""
    values = tensor_of(value[0] if reduce == "argmin" and isinstance(value, tuple) else value)
    name = key if isinstance(key, str) else ""
    shape = values.shape if isinstance(key, str | int) else values.shape[1:]
    return checked_spec(TableSpec(name, tuple(shape), dtype_name(values.dtype), reduce))


def rows_of(kind: TableKind, key: Key, value: Value, count: int) -> Lanes:
    """Return the rows of a push, one a key (or block); they share the script's memory where its layout fits.

    Args:
        count: number of keys.

    Raises:
        UsageError: the value does not fit the table.
    """
    spec = kind.spec
    index, first = None, cast(object, value)
    if kind.reduction.extra == "index":
        if not isinstance(value, tuple) or len(value) != 2:
            raise UsageError(
                f"a push to {describe_table(spec)} gives no indices", "push (values, indices) with reduce='argmin'"
            )
        given = tensor_of(value[1])
        if given.is_floating_point() or given.is_complex():
            raise UsageError(f"indices of {dtype_name(given.dtype)}", "push indices of int64: (values, indices)")
        index = _as_rows(spec, key, given.to(torch.int64), count)
        first = value[0]
    values = tensor_of(first)
    if values.dtype != kind.dtype:
        if torch.result_type(values, torch.zeros(1, dtype=kind.dtype)) != kind.dtype:
            raise UsageError(
                f"{dtype_name(values.dtype)} is pushed to {describe_table(spec)}, whose values are {spec.dtype}",
                "convert it first",
            )
        values = values.to(kind.dtype)
    return kind.reduction.lanes(_as_rows(spec, key, values, count), index)


def _as_rows(spec: TableSpec, key: Key, values: torch.Tensor, count: int) -> torch.Tensor:
    """Return a value as rows of the table."""
    wanted = spec.shape if isinstance(key, str | int) else (count, *spec.shape)
    if values.ndim == 0 and wanted:
        values = values.expand(wanted)
    if tuple(values.shape) != wanted:
        raise UsageError(
            f"a value of shape {tuple(values.shape)} is pushed to {describe_table(spec)}", f"reshape it to {wanted}"
        )
    if not isinstance(key, str):
        return values.reshape(count, spec.width)
    flat = values.reshape(-1)
    if spec.blocks * spec.width > spec.elements:
        flat = torch.cat([flat, torch.zeros(spec.blocks * spec.width - spec.elements, dtype=flat.dtype)])
    return flat.view(spec.blocks, spec.width)


def result_of(kind: TableKind, key: Key, lanes: Lanes) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return rows as the script receives them: a tensor; for argmin (values, indices)."""
    found = _as_result(kind.spec, key, lanes.values)
    if kind.reduction.extra == "index" and lanes.extra is not None:
        return found, _as_result(kind.spec, key, lanes.extra)
    return found


def _as_result(spec: TableSpec, key: Key, rows: torch.Tensor) -> torch.Tensor:
    if isinstance(key, str):
        return rows.reshape(-1)[: spec.elements].reshape(spec.shape)
    if isinstance(key, int):
        return rows.reshape(spec.shape)
    return rows.reshape(len(rows), *spec.shape)


def describe_table(spec: TableSpec) -> str:
    """Return a table, for messages."""
    return f"key {spec.name!r} of shape {spec.shape}" if spec.name else f"integer keys, rows of shape {spec.shape}"


def is_group(key: object) -> TypeGuard[Sequence[str] | Mapping[str, object]]:
    """Return whether a key is a group of keys: a list or tuple of names, or a dict."""
    return isinstance(key, Mapping) or (
        isinstance(key, list | tuple) and bool(key) and all(isinstance(one, str) for one in key)
    )


def describe_key(key: object) -> str:
    """Return a key, or the number of keys, for messages."""
    if isinstance(key, str | int | range):
        return repr(key) if len(str(key)) <= 60 else f"{str(key)[:60]!r}..."
    if is_group(key):
        return f"{len(key)} names"
    return f"{len(key)} keys" if isinstance(key, Sized) else repr(key)


def single_row(kind: TableKind, key: str | int, value: Value) -> Lanes:
    """Return the row of a single-key push; it shares the memory of the script's tensor where the layout allows."""
    if (
        kind.stores_values_unchanged
        and type(value) is torch.Tensor
        and value.dtype is kind.dtype
        and value.shape == kind.spec.shape
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_neg()
    ):
        return Lanes((value.detach() if value.requires_grad else value).reshape(1, -1))
    return rows_of(kind, key, value, 1)
