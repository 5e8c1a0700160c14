"""Runs one fuzz target under atheris: `python -m tests.fuzz.fuzz TARGET FOLDER SECONDS [SEED]`.

FOLDER holds the inputs found so far; a crash leaves its input there as `crash-HASH`, a hang as `timeout-HASH`.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import atheris

LONGEST = 10
"""Seconds that one input may take."""

MEMORY = 1024
"""MiB that the process may take."""

with atheris.instrument_imports(include=["psctl"]):
    from tests.fuzz.targets import TARGETS


def main(name: str, folder: str, seconds: str, seed: str = "1") -> None:
    """Fuzz a target; the process exits with another status than 0 at the first crash."""
    target = TARGETS[name]

    def run(data: bytes) -> None:
        with contextlib.suppress(target.errors):  # refused, as promised
            target.run(data)

    for number, data in enumerate(target.inputs()):
        (Path(folder) / f"first-{number}").write_bytes(data)
    limits = [f"-max_total_time={seconds}", f"-timeout={LONGEST}", f"-rss_limit_mb={MEMORY}", "-max_len=16384"]
    options = [*limits, f"-seed={seed}", f"-artifact_prefix={folder}/", "-verbosity=0", folder]
    atheris.Setup([sys.argv[0], *options], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
