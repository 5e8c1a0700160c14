"""Global options mean the same before and after every command."""

from __future__ import annotations

import pytest

from psctl.cli.shared.global_options import Options, hoist, output_of
from psctl.errors import UsageError


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("train job.yaml -o json", "-o json train job.yaml"),
        ("-q train job.yaml", "-q train job.yaml"),
        ("train -qy job.yaml --no-color", "-q -y --no-color train job.yaml"),
        ("up lab --timeout=30s --forks 4", "--timeout=30s --forks 4 up lab"),
        ("logs --grep -q -f", "logs --grep -q -f"),
        ("logs -ojsonl", "--output=jsonl logs"),
        ("logs -o=jsonl", "--output=jsonl logs"),
        ("logs -- -o json", "logs -- -o json"),
        ("checkpoint list -o json", "-o json checkpoint list"),
    ],
)
def test_global_options_are_moved_to_the_front(written: str, read: str) -> None:
    assert hoist(written.split()) == read.split()


def test_the_format_is_known_however_wrong_the_rest_is() -> None:
    assert output_of(["nonsense", "--what", "-o", "json"], {}) == "json"
    assert output_of(["-o=jsonl"], {}) == "jsonl"
    assert output_of(["jobs"], {"PSCTL_OUTPUT": "json"}) == "json"
    assert output_of(["jobs", "-o", "table"], {"PSCTL_OUTPUT": "json"}) == "table"
    assert output_of(["jobs", "-o"], {}) == "table"
    assert output_of(["logs", "--grep", "-o", "json"], {}) == "table"


def test_options_that_mean_nothing_are_refused() -> None:
    assert Options(timeout="30s").timeout == 30.0
    with pytest.raises(UsageError, match="unknown format"):
        Options(output="yaml")
    for verb in ("", "jobs"):
        with pytest.raises(UsageError, match="-o svg: only topo"):
            Options(output="svg", verb=verb)
    assert Options(output="svg", verb="topo").output == "svg"
    with pytest.raises(UsageError, match="--timeout"):
        Options(timeout="soon")
    with pytest.raises(UsageError, match="--forks 0"):
        Options(forks=0)
