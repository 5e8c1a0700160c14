"""Global options mean the same before and after every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl.cli.app import make_command
from psctl.cli.shared.global_options import GlobalOptions, output_of
from psctl.errors import UsageError
from tests.cli.inside import psctl

ROOT = make_command()


def read(line: str) -> dict[str, Any]:
    """Parse a command line without running its command; return the options, and the command's own parameters."""
    arguments = line.split()
    context = ROOT.make_context("psctl", arguments, obj=arguments)
    inner: Any = context
    while getattr(inner.command, "commands", None):
        name, command, rest = inner.command.resolve_command(inner, [*inner._protected_args, *inner.args])
        context.invoked_subcommand = context.invoked_subcommand or name
        inner = command.make_context(name, rest, parent=inner)
    return {**msgspec.structs.asdict(GlobalOptions.of(inner)), "own": inner.params}


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("train job.yaml -o json", {"output": "json"}),
        ("-q train job.yaml", {"quiet": True}),
        ("train -qy job.yaml --no-color", {"quiet": True, "yes": True, "no_color": True}),
        ("up lab --timeout=30s --forks 4", {"timeout": 30.0, "forks": 4}),
        ("--forks 2 up lab --forks 4", {"forks": 4}),
        ("--forks 2 -v up lab", {"forks": 2, "verbose": 1}),
        ("logs --grep -q -f", {"quiet": False}),
        ("logs -fq", {"quiet": True}),
        ("logs -ojsonl", {"output": "jsonl"}),
        ("logs -o=jsonl", {"output": "jsonl"}),
        ("logs -- digits", {"output": "table"}),
        ("train -- -q", {"quiet": False}),
        ("checkpoint list -o json", {"output": "json"}),
        ("checkpoint -o json list", {"output": "json"}),
        ("topo --from x -o svg", {"output": "svg"}),
    ],
)
def test_global_options_are_read_before_and_after_a_command(written: str, options: dict[str, Any]) -> None:
    found = read(written)
    assert {name: found[name] for name in options} == options


def test_the_next_word_of_an_option_is_its_value_whatever_it_looks_like() -> None:
    own = read("logs --grep -q -f")["own"]
    assert (own["grep"], own["follow"]) == ("-q", True)
    assert read("train -- -q")["own"]["job"] == "-q"


def test_the_environment_gives_the_format_that_no_option_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSCTL_OUTPUT", "json")
    assert read("jobs")["output"] == "json"
    assert read("jobs -o table")["output"] == "table"
    monkeypatch.setenv("PSCTL_OUTPUT", "nonsense")
    assert read("jobs -o jsonl")["output"] == "jsonl"
    assert read("-o jsonl jobs")["output"] == "jsonl"


def test_the_format_is_known_however_wrong_the_rest_is() -> None:
    assert output_of(ROOT, ["nonsense", "--what", "-o", "json"], {}) == "json"
    assert output_of(ROOT, ["-o=jsonl"], {}) == "jsonl"
    assert output_of(ROOT, ["nonsense", "--output=jsonl"], {}) == "jsonl"
    assert output_of(ROOT, ["jobs"], {"PSCTL_OUTPUT": "json"}) == "json"
    assert output_of(ROOT, ["jobs", "-o", "table"], {"PSCTL_OUTPUT": "json"}) == "table"
    assert output_of(ROOT, ["jobs", "-o"], {}) == "table"
    assert output_of(ROOT, ["logs", "--grep", "-o", "json"], {}) == "table"
    assert output_of(ROOT, ["logs", "--", "-o", "json"], {}) == "table"


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown format"):
        GlobalOptions(output="yaml")
    for verb in ("", "jobs"):
        with pytest.raises(UsageError, match="-o svg: only topo"):
            GlobalOptions(output="svg", verb=verb)
    assert GlobalOptions(output="svg", verb="topo").output == "svg"
    assert "--timeout" in psctl(tmp_path, "jobs", "--timeout", "soon", code=2).stderr
    with pytest.raises(UsageError, match="--forks 0"):
        GlobalOptions(forks=0)
