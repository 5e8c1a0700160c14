"""The tables of docs/exercises.md are the output of the commands above them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.inside import psctl

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = re.findall(
    r"^    psctl (plan .*)\n\n\| strategy \| predicted \|\n\|---\|---\|\n((?:\|.*\n)+)",
    (ROOT / "docs" / "exercises.md").read_text(),
    flags=re.M,
)


@pytest.mark.parametrize(("command", "table"), PARTS, ids=[command for command, _ in PARTS])
def test_a_table_is_what_its_command_prints(tmp_path: Path, command: str, table: str) -> None:
    (tmp_path / "clusters").symlink_to(ROOT / "clusters")
    done = psctl(tmp_path, *shlex.split(command))
    printed = dict(line.split("\t")[:2] for line in done.stdout.splitlines() if "\t" in line)
    shown = dict(re.findall(r"\| ([\w-]+) \| ([^|]+) \|", table))
    assert len(shown) > 1
    assert shown == {strategy: printed[strategy] for strategy in shown}


def test_every_plan_of_the_page_has_its_table() -> None:
    assert (
        len(PARTS) == len(re.findall("^    psctl plan", (ROOT / "docs" / "exercises.md").read_text(), flags=re.M)) == 4
    )
