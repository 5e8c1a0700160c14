"""What all tests share: examples that hypothesis makes up are the same in every `make test`, others in `make soak`.

The longest files come first, then folders whose tests start processes: handed out file by file to several workers, what
is left at the end is then short.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.hypothesis_profile import load_profile

LONGEST = (
    "whole/test_agents.py", "whole/test_faults.py", "agent/test_agent.py", "whole/test_restore_numbers.py",
    "whole/test_random_numbers.py", "whole/test_update_auto.py", "remote/test_login_shell.py", "whole/test_measure.py",
    "cli/test_jobs_here.py", "whole/test_rendezvous.py", "whole/test_hosts_job.py", "whole/test_managed.py",
)  # fmt: skip
LONG = ("whole", "sync", "agent", "kv", "client", "collectives", "worker", "server", "cli", "remote", "transport")

load_profile()

gc.disable()
"""Until all tests are imported: what that makes stays, torch's 300,000 objects too, and collections traverse it."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts `make test` in the background has it ignored, and so would all processes of the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


WHOLE_LIMIT = 420
"""Seconds for a test with real processes: the longest takes 60 s on two quiet cores, and 140 s on slow, busy ones."""


STDERR = pytest.StashKey[int]()
"""A descriptor of this process's stderr, which tests capture."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep stderr for stacks."""
    config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """At a test's limit print all stacks and end the process, also where its output is captured or it runs under xdist.

    By a thread that needs no interpreter lock, in place of pytest-timeout's.
    """
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=item.config.stash[STDERR])
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> bool:
    """End the timer."""
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_enter_pdb() -> None:
    """Let a debugger take its time."""
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish() -> None:
    """Collect from now on, but not what the imports made."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, then folders with long ones; the order within a folder stays. Limit whole tests."""
    tests = Path(__file__).parent
    for item in items:
        if item.get_closest_marker("whole") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_LIMIT))

    def place(item: pytest.Item) -> tuple[int, int]:
        file = item.path.relative_to(tests)
        first = LONGEST.index(file.as_posix()) if file.as_posix() in LONGEST else len(LONGEST)
        return first, LONG.index(file.parts[0]) if file.parts[0] in LONG else len(LONG)

    items.sort(key=place)
