"""Finds evidence that the kernel killed a process for lack of memory, in counters that the kernel keeps.

The control group's own counter is asked first: it counts kills of its processes only, whoever ran out of memory. Where
there is none, the whole machine's is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

FRESH = 5.0
"""Seconds for which a counter that rose is evidence: longer than the time between two looks."""

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def counter_files(root: Path = Path("/")) -> list[Path]:
    """Return the files that may hold the counter for this process, the most telling first.

    Args:
        root: for tests; else the machine's.
    """
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for _, controllers, group in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers == "":
            found.append(root / f"sys/fs/cgroup{group}" / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(root / f"sys/fs/cgroup/memory{group}" / "memory.oom_control")
    return [*found, root / "proc/vmstat"]


def first_counter(files: list[Path]) -> tuple[str, int] | None:
    """Return the first file that holds the counter, and the counter; None when no file does."""
    for path in files:
        try:
            match = _COUNT.search(path.read_text())
        except OSError:
            continue
        if match is not None:
            return str(path), int(match[1])
    return None


class MemoryKills:
    """Watches the counter.

    Args:
        read: returns the counter and where it stands.
        now: seconds that only go forward.
    """

    def __init__(
        self,
        read: Callable[[], tuple[str, int] | None] = lambda: first_counter(counter_files()),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._now = read, now
        self._last = read()
        self._rose: tuple[float, str] | None = None

    def look(self) -> None:
        """Read the counter; call it every few seconds, so that an old kill is no evidence for a later one."""
        found, before = self._read(), self._last
        self._last = found
        if found is not None and before is not None and found[0] == before[0] and found[1] > before[1]:
            self._rose = self._now(), f"oom_kill in {found[0]} rose from {before[1]} to {found[1]}"

    def evidence(self) -> str:
        """Return what tells that the kernel has just killed a process for lack of memory, "" when nothing does."""
        self.look()
        fresh = self._rose is not None and self._now() - self._rose[0] <= FRESH
        return self._rose[1] if self._rose is not None and fresh else ""
