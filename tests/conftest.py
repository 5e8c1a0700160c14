"""What all tests share: examples that hypothesis makes up are the same in every `make test`, others in `make soak`.

Rooms whose tests start processes come first, those with the longest files first of all: handed out file by file to
several workers, what is left at the end is then short.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.examples import load_profile

LONG = ("whole", "sync", "agent", "kv", "client", "collectives", "worker", "server", "cli", "remote", "transport")

load_profile()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts `make test` in the background has it ignored, and so would all processes of the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the rooms with long tests first; the order within a room stays."""
    tests = Path(__file__).parent
    places = {room: place for place, room in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.relative_to(tests).parts[0], len(LONG)))
