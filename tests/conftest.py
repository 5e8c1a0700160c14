"""What all tests share: examples that hypothesis makes up are the same in every `make test`, others in `make soak`.

Rooms whose tests start processes come first, those with the longest files first of all: handed out file by file to
several workers, what is left at the end is then short.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

LONG = ("whole", "runtime", "cli", "remote", "net")

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the rooms with long tests first; the order within a room stays."""
    tests = Path(__file__).parent
    places = {room: place for place, room in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.relative_to(tests).parts[0], len(LONG)))
