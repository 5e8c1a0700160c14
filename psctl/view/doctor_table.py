"""The result of `doctor`: a grid of hosts by checks, and what is wrong beneath it."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from psctl.types import Document
from psctl.view.console import Console, Glyphs, say
from psctl.view.tables import Cell, draw_table
from psctl.view.text import one_line


def draw_doctor(console: Console, document: Document, *, details: bool = False) -> None:
    """Draw the result of `doctor`.

    At a terminal several hosts are a grid, if it fits; else the checks that passed are one line a host. A pipe gets a
    line for every check of every host.

    Args:
        console: of stdout.
        document: that `-o json` prints.
        details: the details of passed checks in place of the grid.
    """
    hosts = document["hosts"]
    checks = list(dict.fromkeys(one_line(check["check"]) for host in hosts for check in host["checks"]))
    names = [one_line(host["name"]) for host in hosts]
    width = max(map(cell_len, ["host", *names])) + sum(cell_len(check) + 2 for check in checks) + 2
    if console.is_terminal and len(hosts) > 1 and width <= console.width and not details:
        _draw_grid(console, hosts, checks)
    else:
        _draw_list(console, hosts)


def _draw_grid(console: Console, hosts: list[Document], checks: list[str]) -> None:
    """Draw hosts by checks, the details that all hosts have in common, and every failed check with its cure."""
    glyphs = Glyphs(console)
    signs: dict[bool | None, Cell] = {True: (glyphs.done, "green"), False: (glyphs.failed, "bold red"), None: "-"}
    rows: list[list[Cell]] = []
    for host in hosts:
        found = {one_line(check["check"]): bool(check["ok"]) for check in host["checks"]}
        rows.append([host["name"], *(signs[found.get(check)] for check in checks)])
    draw_table(console, ("host", *checks), rows)
    common = [f"{check} {detail}" for check in checks if (detail := _common_detail(hosts, check))]
    if common:
        say(console, Text.assemble(("on all hosts: ", "dim"), ", ".join(common)))
    for host in hosts:
        for check in host["checks"]:
            if not check["ok"]:
                say(console, Text.assemble(
                    (f"{glyphs.failed} {one_line(host['name'])}: {one_line(check['check'])}: ", "bold red"),
                    one_line(check["detail"] or "failed"),
                ))  # fmt: skip
                if check.get("cure"):
                    say(console, f"    {glyphs.cure} {one_line(check['cure'])}")


def _common_detail(hosts: list[Document], check: str) -> str:
    """Return the detail of a check that all hosts passed with the same one; "" otherwise."""
    found = [each for host in hosts for each in host["checks"] if one_line(each["check"]) == check]
    details = {one_line(each["detail"] or "") for each in found}
    same = len(found) == len(hosts) and len(details) == 1 and all(each["ok"] for each in found)
    return details.pop() if same else ""


def _draw_list(console: Console, hosts: list[Document]) -> None:
    glyphs = Glyphs(console)
    rows: list[list[Cell]] = []
    for host in hosts:
        right = [check for check in host["checks"] if check["ok"]]
        if console.is_terminal and right:
            passed = ", ".join(f"{check['check']} {check['detail'] or '-'}" for check in right)
            count = f"{len(right)} check{'s' if len(right) > 1 else ''}"
            rows.append([host["name"], (glyphs.done, "green"), count, passed])
            right = []
        for check in [*right, *(check for check in host["checks"] if not check["ok"])]:
            failed = glyphs.failed if console.is_terminal else "failed"
            sign: Cell = ("ok", "green") if check["ok"] else (failed, "bold red")
            cure = f" -> {check['cure']}" if check.get("cure") and not check["ok"] else ""
            rows.append([host["name"], sign, check["check"], f"{check['detail'] or '-'}{cure}"])
    sign_head = "" if console.is_terminal else "ok"
    draw_table(console, ("host", sign_head, "check", "detail"), rows)
