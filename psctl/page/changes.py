"""The difference of two JSON values, so that a page is sent only what is new. Pure.

A change is a list: `["=", value]` replaces, `["+", items]` appends to a list, and `["~", {key: change}, [key]]` changes
and removes keys of an object.
"""

from __future__ import annotations

Change = list[object]


def change_between(before: object, after: object) -> Change | None:
    """Return the change that makes `after` of `before`; None when they are equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        changes = {
            key: change
            for key, value in after.items()
            if (change := change_between(before[key], value) if key in before else ["=", value]) is not None
        }
        removed = [key for key in before if key not in after]
        return ["~", changes, removed] if changes or removed else None
    if before == after and type(before) is type(after):
        return None
    if isinstance(before, list) and isinstance(after, list) and before and after[: len(before)] == before:
        return ["+", after[len(before) :]]
    return ["=", after]


def apply_change(value: object, change: Change) -> object:
    """Return a value with a change made: what the page's script does."""
    kind = change[0]
    if kind == "=":
        return change[1]
    if kind == "+":
        assert isinstance(value, list) and isinstance(change[1], list)
        return value + change[1]
    assert isinstance(value, dict) and isinstance(change[1], dict) and isinstance(change[2], list)
    made: dict[str, object] = {key: each for key, each in value.items() if key not in change[2]}
    for key, each in change[1].items():
        made[key] = apply_change(made.get(key), each)
    return made
