"""How many examples hypothesis makes up: all in `make soak`, a part in `make test`, where they are always the same.

A test that says nothing gets what the profile says. One that says `@settings(max_examples=examples(100))` gets 150 in
`make soak` and `PART` of them in `make test`.
"""

from __future__ import annotations

import os

from hypothesis import settings

PART = 5
SEARCH = os.environ.get("HYPOTHESIS_PROFILE") == "search"


def examples(full: int) -> int:
    """Return how many of `full` examples to draw; never less than ten of them."""
    return full if SEARCH else min(full, max(10, full // PART))


def load_profile() -> None:
    """Let hypothesis be the same every time, or search."""
    settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=examples(100))
    settings.register_profile("search", deadline=None, print_blob=True, max_examples=examples(100))
    settings.load_profile("search" if SEARCH else "repeatable")
