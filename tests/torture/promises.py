"""The table of docs/failures.md: what psctl promises after each failure, and the test that holds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "failures.md"
TORTURE = "torture:"
"""Begins, in the column of tests, the names of the faults of this package that test a row."""


@dataclass(frozen=True)
class Promise:
    """One row of the table."""

    failure: str
    action: str
    pause: str
    tests: str

    @property
    def faults(self) -> list[str]:
        """The names of the faults that test it."""
        found = re.search(rf"{TORTURE} ([\w, -]+)", self.tests)
        return [name.strip() for name in found[1].split(",")] if found else []


def promises(text: str | None = None) -> list[Promise]:
    """Return the rows of the first table of the page.

    Raises:
        ValueError: a row has another number of columns; names it.
    """
    rows = []
    for line in (PAGE.read_text() if text is None else text).splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) != 4:
                raise ValueError(f"docs/failures.md: a row with {len(cells)} columns instead of 4: {line[:80]}")
            rows.append(Promise(*cells))
        elif rows:
            break
    return rows[2:]  # without the heading and the line below it


def promise_of(fault: str) -> Promise:
    """Return the row that a fault tests.

    Raises:
        KeyError: no row names the fault.
    """
    for row in promises():
        if fault in row.faults:
            return row
    raise KeyError(f"no row of docs/failures.md names the fault {fault!r} after {TORTURE!r} in its last column")
