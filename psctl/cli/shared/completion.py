"""Tab completion: names that this machine's own records hold; no host is asked, and torch and SSH are not loaded."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from psctl.launch.home import Home, JobRecord

ROLES = ("worker", "server", "coordinator")

BREAKS = re.compile(r"[@:=]+")
"""What bash makes words of their own: digits-3@500 comes as three."""


def jobs() -> list[str]:
    """Names of jobs, and the names that all runs of one share."""
    records = _home().jobs()
    return [*dict.fromkeys(record.name for record in records), *(record.job for record in reversed(records))]


def checkpoints() -> list[str]:
    """Checkpoints of every job: latest, best, and the steps that are known here."""
    home = _home()
    return [name for record in reversed(home.jobs()) for name in _checkpoints(home, record)]


def resumes() -> list[str]:
    """What --resume takes."""
    return ["auto", "latest", "never", *checkpoints()]


def clusters(incomplete: str) -> list[str]:
    """Known clusters, and cluster files."""
    return [*dict.fromkeys(("local", *_home().clusters())), *files(incomplete)]


def files(incomplete: str) -> list[str]:
    """YAML files, and the folders on the way to them."""
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
    """Names of strategies, and auto."""
    from psctl.types import STRATEGIES

    return ["auto", *STRATEGIES]


def templates() -> list[str]:
    """Names of job templates."""
    from psctl.launch.scaffold import templates as shipped

    return shipped()


def ranks(ctx: typer.Context) -> list[str]:
    """Roles, and the ranks of the job that is named, as they were last seen."""
    records = _home().jobs()
    asked = ctx.params.get("job")
    chosen = [each for each in records if asked in (None, each.job, each.name)][-1:]
    seen = [f"{rank['role']}:{rank['rank']}" for record in chosen for rank in record.ranks if rank["role"] in ROLES]
    return [*ROLES, *seen]


def _checkpoints(home: Home, record: JobRecord) -> Iterator[str]:
    yield f"{record.job}@latest"
    yield f"{record.job}@best"
    for step in home.steps(record):
        yield f"{record.job}@{step}"


def _home() -> Home:
    from psctl.launch.home import Home

    return Home.of(os.environ)


ClusterOption = Annotated[str | None, typer.Option("--cluster", help="Cluster file or name.", autocompletion=clusters)]
StrategyOption = Annotated[
    str | None, typer.Option("--strategy", metavar="NAME", help="Way to synchronise.", autocompletion=strategies)
]


# ---- answering the shell ---------------------------------------------------------------------------------------------


def answer(command: Any, environment: MutableMapping[str, str]) -> int:
    """Answer the shell, which asks by variables of its own; return the exit code."""
    cut = ""
    if environment.get("_PSCTL_COMPLETE") == "complete_bash" and "COMP_WORDS" in environment:
        words, at, cut = rejoined(environment["COMP_WORDS"].split("\n"), int(environment.get("COMP_CWORD", "0")))
        environment.update(COMP_WORDS="\n".join(words), COMP_CWORD=str(at))
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said):
        try:
            command.main(prog_name="psctl")
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    for line in said.getvalue().splitlines():
        print(line.removeprefix(cut))
    return code


def rejoined(words: list[str], at: int) -> tuple[list[str], int, str]:
    """Put words together again that bash took apart at @, : and =.

    Args:
        words: the command line as bash has it.
        at: the index of the word that is being written.

    Returns:
        the words and the index as they were typed, and what of that word bash does not replace.
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
