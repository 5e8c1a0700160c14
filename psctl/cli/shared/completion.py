"""Tab completion from this machine's records; it contacts no host and loads neither torch nor SSH."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from psctl.launch.home import Home, JobRecord

ROLES = ("worker", "server", "reader", "coordinator")

BREAKS = re.compile(r"[@:=]+")
"""Characters that bash splits at: it passes digits-3@500 as three words."""


def jobs() -> list[str]:
    """Return the names of jobs, and the names without number."""
    records = _home().jobs()
    return [*dict.fromkeys(record.name for record in records), *(record.job for record in reversed(records))]


def checkpoints() -> list[str]:
    """Return the checkpoints of every job: latest, best, and the steps in this machine's records."""
    home = _home()
    return [name for record in reversed(home.jobs()) for name in _checkpoints(home, record)]


def topics() -> list[str]:
    """Return the topics of `psctl explain` that are one word and no command, beside the commands."""
    from psctl.cli.shared.topics import EXITS, error_codes
    from psctl.spec.key_reference import entries

    return [*dict.fromkeys(each.path for each in entries()), *error_codes(), *map(str, EXITS)]


def resumes() -> list[str]:
    """Return the values of --resume."""
    return ["auto", "latest", "never", *checkpoints()]


def clusters(incomplete: str) -> list[str]:
    """Return known clusters and cluster files."""
    return [*dict.fromkeys(("local", *_home().clusters())), *files(incomplete)]


def files(incomplete: str) -> list[str]:
    """Return YAML files and folders."""
    above, _, begun = incomplete.rpartition("/")
    folder = Path(f"{above}/" if above or incomplete.startswith("/") else ".").expanduser()
    start = f"{above}/" if "/" in incomplete else ""
    with contextlib.suppress(OSError):
        return [
            f"{start}{entry.name}{'/' if entry.is_dir() else ''}"
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name)
            if entry.name.startswith(begun) and (entry.is_dir() or entry.name.endswith((".yaml", ".yml")))
            and (begun or not entry.name.startswith("."))
        ]  # fmt: skip
    return []


def strategies() -> list[str]:
    """Return the names of strategies, and auto."""
    from psctl.types import STRATEGIES

    return ["auto", *STRATEGIES]


def templates() -> list[str]:
    """Return the names of job templates."""
    from psctl.launch.scaffold import templates as shipped

    return shipped()


def hosts(incomplete: str) -> list[str]:
    """Return the hosts of the user's SSH configuration, after those that are typed already."""
    typed, comma, _ = incomplete.rpartition(",")
    found: list[str] = []
    with contextlib.suppress(OSError):
        text = (Path.home() / ".ssh" / "config").read_text(errors="replace")
        for line in re.findall(r"(?im)^[ \t]*host[ \t=]+(.+)$", text):
            found += [name for name in re.split(r"[\s\"]+", line) if name and not re.search(r"[*?!#]", name)]
    return [f"{typed}{comma}{name}" for name in dict.fromkeys(found) if name not in typed.split(",")]


def ranks(ctx: typer.Context) -> list[str]:
    """Return roles, and the ranks of the job on the command line as last recorded."""
    records = _home().jobs()
    asked = ctx.params.get("job")
    chosen = [each for each in records if asked in (None, each.job, each.name)][-1:]
    seen = [f"{rank.role}:{rank.rank}" for record in chosen for rank in record.ranks if rank.role in ROLES]
    return [*ROLES, *seen]


def _checkpoints(home: Home, record: JobRecord) -> Iterator[str]:
    yield f"{record.job}@latest"
    yield f"{record.job}@best"
    for step in home.steps(record):
        yield f"{record.job}@{step}"


def _home() -> Home:
    from psctl.launch.home import Home

    return Home.of(os.environ)


# ---- answering the shell ---------------------------------------------------------------------------------------------


def answer(command: TyperGroup, environment: MutableMapping[str, str]) -> int:
    """Print the completions that the shell requests by environment variables; return the exit code."""
    cut = ""
    if environment.get("_PSCTL_COMPLETE") == "complete_bash" and "COMP_WORDS" in environment:
        words, at, cut = rejoined(environment["COMP_WORDS"].split("\n"), int(environment.get("COMP_CWORD", "0")))
        environment.update(COMP_WORDS="\n".join(words), COMP_CWORD=str(at))
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed):
        try:
            command.main(prog_name="psctl")
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    for line in printed.getvalue().splitlines():
        print(line.removeprefix(cut))
    return code


def rejoined(words: list[str], at: int) -> tuple[list[str], int, str]:
    """Join the words that bash split at @, : and =.

    Args:
        words: the command line as bash split it.
        at: the index of the word to complete.

    Returns:
        the words as typed, the index of the word to complete, and the part of it that bash does not replace.
    """
    found: list[str] = []
    place, cut = at, ""
    for index, word in enumerate(words):
        broken = BREAKS.fullmatch(word) or (index > 1 and BREAKS.fullmatch(words[index - 1]))
        if index > 1 and broken and found:
            before = found[-1]
            found[-1] += word
            cut = (found[-1] if BREAKS.fullmatch(word) else before) if index == at else cut
        else:
            found.append(word)
        if index == at:
            place = len(found) - 1
    return found, place, cut
