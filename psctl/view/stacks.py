"""The stacks of a job's processes as text: equal ones joined, the user's own frames first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from psctl.grouping import grouped
from psctl.types import Document
from psctl.view.console import Console, say
from psctl.view.rank_rows import rank_ranges
from psctl.view.text import one_line

Frames = tuple[str, ...]

_FOLDERS = re.compile(r"^/\S*?/(?:code/[0-9a-f]{40}/|site-packages/|lib/(?=python3\.\d+/(?!site-packages)))")
"""The folder of psctl's own code on a host, of installed packages, or of Python: a reader needs what follows."""


def draw_stacks(console: Console, document: Document, *, every: bool) -> None:
    """Print the document of `psctl stacks`.

    Args:
        console: of stdout.
        document: with `processes`, each with rank, host, main, threads and problem.
        every: also the threads that execute no line of the job's own code.
    """
    processes = document["processes"]
    groups = grouped((_key(process, every), process) for process in processes)
    for place, ((main, threads, hidden, problem), members) in enumerate(groups.items()):
        if place:
            say(console, "")
        hosts = list(dict.fromkeys(one_line(process["host"]) for process in members))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        ranks = rank_ranges([one_line(process["rank"]) for process in members])
        count = f": {len(members)} processes" if len(members) > 1 else ""
        say(console, Text.assemble((ranks, "bold"), f" on {where}{count}"))
        if problem:
            say(console, f"  {one_line(problem)}", style="yellow")
        _print_frames(console, main, "  ")
        for frames, number in threads:
            say(console, "  another thread:" if number == 1 else f"  {number} other threads:", style="dim")
            _print_frames(console, frames, "    ")
        if hidden:
            say(console, f"  and {hidden} threads of libraries" if hidden > 1 else "  and a thread of libraries",
                style="dim")  # fmt: skip
    if not processes:
        say(console, "no process runs now")


def _key(process: Document, every: bool) -> tuple[Frames, tuple[tuple[Frames, int], ...], int, str]:
    """Return what is shown of a process: the main thread, other threads with their numbers, how many are hidden."""
    threads = [tuple(map(str, frames)) for frames in process["threads"]]
    shown = [frames for frames in threads if every or _is_own(frames)]
    counted = grouped((frames, None) for frames in shown)
    numbers = tuple((frames, len(found)) for frames, found in counted.items())
    return tuple(map(str, process["main"])), numbers, len(threads) - len(shown), str(process["problem"])


def _is_own(frames: Sequence[str]) -> bool:
    """Return whether a thread executes the job's own code: the paths of its files are relative to its folder."""
    return any(not frame.startswith(("/", "<")) for frame in frames)


def _print_frames(console: Console, frames: Frames, indent: str) -> None:
    for place, frame in enumerate(frames):
        newest = place == len(frames) - 1
        say(
            console,
            f"{indent}{one_line(_FOLDERS.sub('', frame))}",
            style="bold" if newest else "" if _is_own([frame]) else "dim",
        )
