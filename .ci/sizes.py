"""Prints the modules of psctl/ that are longer than LINES: a warning, not an error."""

from __future__ import annotations

from pathlib import Path

LINES = 400

ROOT = Path(__file__).resolve().parents[1]

for path in sorted((ROOT / "psctl").rglob("*.py")):
    count = len(path.read_text().splitlines())
    if count > LINES:
        print(f"{path.relative_to(ROOT)}: {count} lines, more than {LINES}")
