"""The profiles of hypothesis: all examples in `make soak`; in `make test` a part of them, the same in every run.

A test with `@settings(max_examples=examples(100))` draws 100 examples in `make soak` and a `PART`-th in `make test`.
"""

from __future__ import annotations

import os

from hypothesis import settings

PART = 5
"""`make test` draws one example in so many."""

SEARCH = os.environ.get("HYPOTHESIS_PROFILE") == "search"


def examples(full: int) -> int:
    """Return how many of `full` examples to draw, at least ten (or all, where there are fewer)."""
    return full if SEARCH else min(full, max(10, full // PART))


def load_profile() -> None:
    """Load the profile: repeatable, or a search when HYPOTHESIS_PROFILE is `search`."""
    settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=examples(100))
    settings.register_profile("search", deadline=None, print_blob=True, max_examples=examples(100))
    settings.load_profile("search" if SEARCH else "repeatable")
