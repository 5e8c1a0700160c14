"""What an agent's processes and its host use: processor time, memory, network; and whether the kernel killed one.

For memory, the counter of the process's own control group is read first: it counts kills of its processes only,
whichever process exhausted the memory. Where there is none, the counter of the whole machine is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from psctl.agent.supervisor import stat_fields

SHARE = 0.01
"""Share of one core below which a process is idle: threads that only wake to look at a timer use less."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class CpuUsage:
    """Compares the processor time of sessions between two calls; each child of an agent has a session of its own."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used: dict[int, float] = {}
        self.percent: dict[int, int] = {}
        """Of one core, by session, between the last two calls; sessions that were new in the last one are not here."""

    def busy_sessions(self, sessions: Iterable[int]) -> set[int]:
        """Return the sessions that used the processor since the last call; new ones count as busy."""
        now, used = time.monotonic(), processor_seconds(set(sessions))
        least = max(SHARE * (now - self._at), 1 / _TICKS)
        found = {each for each, total in used.items() if abs(total - self._used.get(each, -1.0)) > least}
        elapsed = max(now - self._at, 1 / _TICKS)
        self.percent = {
            each: round(100 * max(0.0, total - self._used[each]) / elapsed)
            for each, total in used.items()
            if each in self._used
        }
        self._at, self._used = now, used
        return found


def processor_seconds(sessions: set[int]) -> dict[int, float]:
    """Return the processor time of all processes of each session, their ended children included."""
    found = dict.fromkeys(sessions, 0.0)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended
            stat = stat_fields(int(entry.name))
            session = int(stat[3])
            if session in found:
                found[session] += sum(int(each) for each in stat[11:15]) / _TICKS
    return found


def memory_bytes(sessions: set[int]) -> dict[int, int]:
    """Return the resident memory of all processes of each session; pages that they share count for each."""
    found = dict.fromkeys(sessions, 0)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended
            stat = stat_fields(int(entry.name))
            session = int(stat[3])
            if session in found:
                found[session] += int(stat[21]) * _PAGE
    return found


def session_of(pid: int) -> int | None:
    """Return the session of a process; None when there is no such process."""
    try:
        return int(stat_fields(pid)[3])
    except OSError:
        return None


class NetworkUsage:
    """Rates of a host's network interface, from the kernel's counters.

    Args:
        interface: its name; "": all interfaces but loopback.
        read: returns the counters as the kernel writes them to /proc/net/dev.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        interface: str,
        read: Callable[[], str] = lambda: Path("/proc/net/dev").read_text(),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interface, self._read, self._now = interface, read, now
        self._last = self._counters()

    def rates(self) -> tuple[float, float]:
        """Return the bytes/s sent and received since the last call; zeros where there is no counter."""
        before, now = self._last, self._counters()
        self._last = now
        seconds = now[0] - before[0]
        if seconds <= 0:
            return 0.0, 0.0
        return max(0, now[1] - before[1]) / seconds, max(0, now[2] - before[2]) / seconds

    def _counters(self) -> tuple[float, int, int]:
        try:
            found = interface_counters(self._read())
        except OSError:
            found = {}
        names = [self._interface] if self._interface else [name for name in found if name != "lo"]
        counters = [found[name] for name in names if name in found]
        return self._now(), sum(sent for sent, _ in counters), sum(received for _, received in counters)


def interface_counters(text: str) -> dict[str, tuple[int, int]]:
    """Return the bytes sent and received by interface, from the text of /proc/net/dev."""
    rows = [line.partition(":") for line in text.splitlines()[2:]]
    fields = {name.strip(): rest.split() for name, _, rest in rows}
    return {name: (int(row[8]), int(row[0])) for name, row in fields.items() if len(row) >= 9}


FRESH = 5.0
"""Seconds for which a counter that rose is evidence: longer than the time between two looks."""

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def counter_files(root: Path = Path("/")) -> list[Path]:
    """Return the files that may hold the counter for this process, the most specific first.

    Args:
        root: another folder than / in tests.
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
        read: returns the counter's file and value.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        read: Callable[[], tuple[str, int] | None] = lambda: first_counter(counter_files()),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._now = read, now
        self._last = read()
        self._rose: tuple[float, str] | None = None

    def update(self) -> None:
        """Read the counter; call it every few seconds, so that an old kill is no evidence for a later one."""
        found, before = self._read(), self._last
        self._last = found
        if found is not None and before is not None and found[0] == before[0] and found[1] > before[1]:
            self._rose = self._now(), f"oom_kill in {found[0]} rose from {before[1]} to {found[1]}"

    def evidence(self) -> str:
        """Return the evidence that the kernel has just killed a process for lack of memory; "" without any."""
        self.update()
        fresh = self._rose is not None and self._now() - self._rose[0] <= FRESH
        return self._rose[1] if self._rose is not None and fresh else ""
