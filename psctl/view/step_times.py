"""The times of steps as a table: the critical path of each step, and how often each worker was the last."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psctl.types import Document
from psctl.units import format_seconds
from psctl.view.console import say
from psctl.view.text import one_line

SHOWN = 20
"""Steps in the table; of more, those that took longest."""


def draw_step_times(console: Console, document: Document) -> None:
    """Print the critical paths of a trace, and where the trace is."""
    paths, hosts = document["steps"], document["hosts"]
    shown = sorted(sorted(paths, key=lambda path: -path["seconds"])[:SHOWN], key=lambda path: path["step"])
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for head in ("step", "took", "last", "behind", "load", "wait", "compute", "sync, update"):
        table.add_column(head, justify="left" if head == "last" else "right", no_wrap=True)
    for path in shown:
        name = f"{path['last']} on {one_line(hosts.get(path['last'], ''))}"
        times = [format_seconds(path[key]) for key in ("behind", "load", "wait", "compute", "after")]
        table.add_row(f"{path['step']:,}", format_seconds(path["seconds"]), Text(name), *times)
    console.print(table)
    if len(paths) > len(shown):
        say(console, f"the {SHOWN} longest of {len(paths):,} steps")
    for name, count in Counter(path["last"] for path in paths).most_common(3):
        say(console, f"{name} was ready last in {count:,} of {len(paths):,} steps")
    for host, error in document["clocks"].items():
        if error is None:
            say(console, f"{one_line(host)}: its clock was not compared with the coordinator's, times may be shifted")
    known = [error for error in document["clocks"].values() if error is not None]
    if len(document["clocks"]) > 1 and known:
        say(console, f"clocks of hosts agree to {format_seconds(max(known))} or better")
    say(console, f"wrote {one_line(document['path'])}: open it in chrome://tracing or ui.perfetto.dev")
