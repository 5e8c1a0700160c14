"""Rank 0's state (data position, random state, scheduler, tracked values) as JSON text without loss.

JSON as Python writes it: floats to the last bit, and NaN and Infinity by these names (a plateau scheduler starts at
infinity). What JSON would silently change (keys that are no text, tuples, bytes) is refused by name instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from psctl import errors
from psctl.types import State


def encode_state(state: State) -> bytes:
    """Return the state's file.

    Raises:
        UsageError: something in it is no JSON value; the message has the path to it. The script's fault.
    """
    for path, value in _foreign(state, ""):
        raise errors.UsageError(
            f"state{path} is {value}, which JSON cannot hold unchanged",
            hint="what run.track is given may hold tensors, text, numbers, booleans, None, lists and dicts",
        )
    return json.dumps(state, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")


def decode_state(data: bytes) -> State:
    """Read a state's file.

    Raises:
        ValueError, RecursionError: it is no JSON object. Its checksum proves only what its writer wrote.
    """
    value = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _foreign(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is str:
                yield from _foreign(inner, f"{path}[{key!r}]")
            else:
                yield path, f"a dict with the key {key!r}"
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _foreign(inner, f"{path}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        yield path, f"a {type(value).__name__}"
