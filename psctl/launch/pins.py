"""The versions that psctl is tested with: constraints.txt and hosts.txt of its own package, written by `make lock`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import psctl

CONSTRAINTS = "constraints.txt"

BRINGS = {"cryptography": ("cffi", "pycparser")}
"""Dependencies of a package that psctl needs on hosts; pip requires their hashes too."""


@cache
def hashed() -> dict[str, str]:
    """Return by name the pin of each package for hosts, as one line of requirements with all its hashes."""
    text = re.sub(r"\\\n\s*", "", (_folder() / "hosts.txt").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.partition("==")[0]: line for line in lines}


def version_of(line: str) -> str:
    """Return the version of a pin."""
    return re.split(r"[\s;]", line.partition("==")[2])[0]


@cache
def torch() -> str:
    """Return the version of torch that psctl is tested with."""
    return next(
        line.partition("==")[2]
        for line in (_folder() / CONSTRAINTS).read_text().splitlines()
        if line.startswith("torch==")
    )


def _folder() -> Path:
    return Path(psctl.__file__).resolve().parent
