"""Which of an agent's processes use the processor, with all that they have started."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

SHARE = 0.01
"""Share of one core below which a process is idle: threads that only wake to look at a timer use less."""

_TICKS = os.sysconf("SC_CLK_TCK")


class CpuUsage:
    """Compares the processor time of sessions from look to look; each child of an agent has a session of its own."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used: dict[int, float] = {}

    def look(self, sessions: Iterable[int]) -> set[int]:
        """Return the sessions that used the processor since the last look; new ones count as busy."""
        now, used = time.monotonic(), processor_seconds(set(sessions))
        least = max(SHARE * (now - self._at), 1 / _TICKS)
        found = {each for each, total in used.items() if abs(total - self._used.get(each, -1.0)) > least}
        self._at, self._used = now, used
        return found


def processor_seconds(sessions: set[int]) -> dict[int, float]:
    """Return the processor time of all processes of each session, their ended children included."""
    found = dict.fromkeys(sessions, 0.0)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        session = int(stat[3])
        if session in found:
            found[session] += sum(int(each) for each in stat[11:15]) / _TICKS
    return found
