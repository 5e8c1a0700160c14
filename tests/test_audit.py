"""`make audit` fails on what is wrong, and never says that all is well when it could not ask."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "audit.py"
ASKED = {"name": "msgspec", "version": "0.22.0", "vulns": []}
BAD = {**ASKED, "vulns": [{"id": "PYSEC-1", "fix_versions": ["0.23"]}]}
UNKNOWN = {"name": "numpy", "skip_reason": "not found"}


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("psctl_audit", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "wrong_pins", list)
    return module


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        ([ASKED], 0, ["audit: no known vulnerability"]),
        ([ASKED, BAD], 1, ["msgspec 0.22.0: PYSEC-1, mended in 0.23"]),
        ([ASKED, UNKNOWN], 0, ["not audited: numpy: not found"]),
        ([BAD, UNKNOWN], 1, ["msgspec 0.22.0: PYSEC-1, mended in 0.23", "not audited: numpy: not found"]),
        ([UNKNOWN], 0, ["not audited: the service of known vulnerabilities does not answer (not found)"]),
        (None, 0, ["not audited: pip-audit==2.10.1 could not be asked: no network"]),
    ],
)
def test_what_is_known_fails_and_what_is_not_is_called_so(
    audit: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: Any,
    status: int,
    said: list[str],
) -> None:
    def run(argv: list[object], ends: tuple[int, ...] = (0,)) -> str:
        if rows is None:
            raise subprocess.CalledProcessError(2, "pip-audit", "", "trying\nno network\n")
        return json.dumps({"dependencies": rows})

    monkeypatch.setattr(audit, "run", run)
    assert audit.main() == status
    assert capsys.readouterr().out.splitlines()[1:] == said


def test_pins_that_are_incomplete_or_not_as_installed_fail(tmp_path: Path) -> None:
    lines = (SCRIPT.parents[1] / "psctl" / "constraints.txt").read_text().splitlines()
    wrong = [line for line in lines if not line.startswith(("mpmath==", "rich=="))]
    (tmp_path / "constraints.txt").write_text("\n".join([*wrong, "rich==9.0", "left-over==1.0"]) + "\n")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\nimport pathlib, audit\n"
        f"audit.CONSTRAINTS = pathlib.Path({str(tmp_path / 'constraints.txt')!r})\n"
        "print('\\n'.join(audit.wrong_pins()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert [line for line in said if line.startswith("mpmath ") and line.endswith("is installed and not pinned")]
    assert [line for line in said if line.startswith("rich is pinned to 9.0, ")]
    assert [line for line in said if line.startswith("psctl asks for rich") and line.endswith("9.0 is pinned")]
    assert "left-over is pinned, and nothing here needs it" in said
