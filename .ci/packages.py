"""The packages that psctl and its tests need, read from what is installed: names, versions, and who asks for whom."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, HOSTS = ROOT / "psctl" / "constraints.txt", ROOT / "psctl" / "hosts.txt"


def asked_for(name: str, extras: frozenset[str] = frozenset()) -> list[Requirement]:
    """Return what an installed package asks for on this machine."""
    asked = [Requirement(text) for text in distribution(name).requires or []]
    return [
        each for each in asked
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras | {""})
    ]  # fmt: skip


def found_here() -> dict[str, str]:
    """Return name and version of every package that psctl[dev] needs here, its own excluded; labels of builds left out.

    Raises:
        PackageNotFoundError: one is missing.
    """
    found: dict[str, str] = {}
    waiting = asked_for("psctl", frozenset({"dev"}))
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        if name not in found:
            found[name] = distribution(name).version.partition("+")[0]
            waiting += asked_for(name, frozenset(asked.extras))
    return found


def pinned(path: Path) -> dict[str, str]:
    """Return name and version of every pin in a file of requirements."""
    rows = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in rows}


__all__ = ["CONSTRAINTS", "HOSTS", "ROOT", "PackageNotFoundError", "asked_for", "found_here", "pinned"]
