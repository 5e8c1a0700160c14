"""`make audit`: are the tested versions complete and as installed, and is any of them known to be vulnerable?

The first part needs no network. The second asks the service of known vulnerabilities, by pip-audit in an environment
of its own. A package that the service does not answer for is called "not audited"; only a known vulnerability, or pins
that are wrong, make this fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from packages import CONSTRAINTS, HOSTS, ROOT, PackageNotFoundError, asked_for, found_here, pinned

TOOL = "pip-audit==2.10.1"
TIMEOUT = 240.0
"""Seconds for the service, and for installing the tool."""


def wrong_pins() -> list[str]:
    """Return what is wrong with the pins: incomplete, other than installed, or outside the ranges of pyproject.toml."""
    pins = pinned(CONSTRAINTS)
    try:
        found = found_here()
    except PackageNotFoundError as error:
        return [f"{error.name} is not installed: make test installs it"]
    said = [f"{name} {version} is installed and not pinned" for name, version in found.items() if name not in pins]
    said += [
        f"{name} is pinned to {pins[name]}, {version} is installed"
        for name, version in found.items()
        if pins.get(name, version) != version
    ]
    said += [f"{name} is pinned, and nothing here needs it" for name in sorted(set(pins) - set(found))]
    said += [
        f"psctl asks for {asked}, {pins[asked.name.lower()]} is pinned"
        for asked in asked_for("psctl", frozenset({"dev"}))
        if asked.name.lower() in pins and not asked.specifier.contains(pins[asked.name.lower()], prereleases=True)
    ]
    said += [
        f"{HOSTS.name} has {name} {version}, {CONSTRAINTS.name} {pins.get(name)}"
        for name, version in pinned(HOSTS).items()
        if pins.get(name) != version
    ]
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return said + (checked.stdout.splitlines() if checked.returncode else [])


def vulnerabilities() -> tuple[list[str], list[str]]:
    """Return known vulnerabilities of the pinned versions, and what could not be audited, each as lines."""
    place = ROOT / ".venv" / "audit"
    tool = place / "bin" / "pip-audit"
    try:
        if not tool.exists():
            run([sys.executable, "-m", "venv", place])
            run([place / "bin" / "python", "-m", "pip", "install", "--quiet", TOOL])
        asked = [tool, "-r", CONSTRAINTS, "--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        rows = json.loads(run(asked, ends=(0, 1)))["dependencies"]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return [], [f"not audited: {TOOL} could not be asked: {said[-1]}"]
    bad = [
        f"{row['name']} {row['version']}: {each['id']}, mended in {', '.join(each['fix_versions']) or 'no version yet'}"
        for row in rows
        for each in row.get("vulns", ())
    ]
    skipped = [row for row in rows if "skip_reason" in row]
    if len(skipped) == len(rows):
        return bad, [f"not audited: the service of known vulnerabilities does not answer ({skipped[0]['skip_reason']})"]
    return bad, [f"not audited: {row['name']}: {row['skip_reason']}" for row in skipped]


def run(argv: list[object], ends: tuple[int, ...] = (0,)) -> str:
    """Run a command and return what it printed; CalledProcessError when it ended otherwise than with one of `ends`."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False, timeout=TIMEOUT)
    if done.returncode not in ends:
        raise subprocess.CalledProcessError(done.returncode, str(argv[0]), done.stdout, done.stderr)
    return done.stdout


def main() -> int:
    wrong = wrong_pins()
    print("\n".join(wrong) or f"pins: {len(pinned(CONSTRAINTS))} packages, complete and as installed")
    bad, unknown = vulnerabilities()
    print("\n".join([*bad, *unknown]) or "audit: no known vulnerability")
    return 1 if wrong or bad else 0


if __name__ == "__main__":
    sys.exit(main())
