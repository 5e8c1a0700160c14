"""Every psctl command that a document shows can be typed; those that need no cluster are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from psctl.cli.app import make_command
from tests.cli.inside import psctl

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [
    path
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("templates/*/README.md")])
    if path.parent.name != "reference"
]


def shown(path: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the code blocks of a document, without `psctl`."""
    fenced = False
    for line in path.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        found = re.match(r"(?:\$ )?psctl (.*)", line.strip()) if fenced or line.startswith("    ") else None
        if found and "..." not in found[1]:
            words = shlex.split(re.sub(r"\s>\s\S+", "", found[1]), comments=True)
            yield words


def parse(words: list[str]) -> None:
    """Parse a command line as psctl does; raises where that would be refused."""
    root = make_command()
    context = root.make_context("psctl", list(words), obj=[])
    command, rest = root, [*context._protected_args, *context.args]
    while hasattr(command, "commands"):
        command = command.commands[rest[0]]
        context = command.make_context(rest[0], rest[1:], parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_of_a_document_can_be_typed(path: Path) -> None:
    for words in shown(path):
        try:
            parse(words)
        except Exception as error:
            raise AssertionError(f"psctl {shlex.join(words)}: {error}") from error


def test_documents_show_commands() -> None:
    assert sum(len(list(shown(path))) for path in DOCUMENTS) >= 30


def test_the_first_commands_of_the_tutorial_do_what_it_says(tmp_path: Path) -> None:
    """Those that need no host: a folder is made, its files are valid, and a plan is printed."""
    commands = list(shown(ROOT / "docs" / "tutorial.md"))
    assert commands[0] == ["init", "mine", "--hosts", "node-a,node-b,node-c"]
    made = psctl(tmp_path, *commands[0])
    assert "mine/cluster.yaml" in made.stdout and "next: psctl doctor mine/cluster.yaml" in made.stderr
    checked = psctl(tmp_path, "validate", "mine/job.yaml", "mine/cluster.yaml")
    assert checked.stdout.count("valid") == 2
    assert (tmp_path / "mine" / "cluster.yaml").read_text().count("node-") == 3
    assert "strategy" in psctl(tmp_path, "explain", "sync.strategy").stdout


WITHOUT_HOSTS = [
    (path, words)
    for path in DOCUMENTS
    for words in shown(path)
    if words[0] in ("explain", "validate")
    or words[:2] in (["topo", "--from"], ["plan", "--topology"], ["init", "mine"])
    if (path.name, words[0]) != ("exercises.md", "plan")  # test_exercises.py runs them and compares their tables
]


@pytest.mark.parametrize(
    ("path", "words"), WITHOUT_HOSTS, ids=lambda each: each.stem if isinstance(each, Path) else " ".join(each)
)
def test_every_command_that_needs_no_host_is_run(tmp_path: Path, path: Path, words: list[str]) -> None:
    """In a folder that has what the document's reader has: the examples, saved output, and a hostfile."""
    (tmp_path / "clusters").symlink_to(ROOT / "clusters")
    (tmp_path / "hostfile").write_text("node-a slots=2\nnode-b slots=2\n")
    saved = next((ROOT / "tests" / "captured" / "topo-m").glob("dgx1v-*.txt"))
    (tmp_path / "dgx1v.txt").write_text(saved.read_text())
    done = psctl(tmp_path, *words)
    assert done.stdout.strip(), f"{path.name}: psctl {shlex.join(words)}"
