"""Did you mean: the valid name that is nearest to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(written: str, valid: Iterable[str]) -> str | None:
    """Return the valid name most like `written`, or None when none is near.

    Case and the difference between `-` and `_` are ignored; a name that begins with `written` is near.
    """
    plain = {_plain(name): name for name in valid}
    close = difflib.get_close_matches(_plain(written[:100]), plain, n=1, cutoff=0.6)
    if close:
        return plain[close[0]]
    begun = [name for key, name in plain.items() if len(written) >= 2 and key.startswith(_plain(written))]
    return begun[0] if len(begun) == 1 else None


def did_you_mean(written: str, valid: Iterable[str]) -> str:
    """Return ', did you mean "x"?' for the nearest valid name, or "" when none is near."""
    name = nearest(written, valid)
    return f', did you mean "{name}"?' if name else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
