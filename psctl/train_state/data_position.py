"""Where a run is in its data, as a checkpoint holds it: which loop, which epoch, which clock of which loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def place_of(step: int, *, inside: bool) -> int:
    """Return where a run is: a number that never falls, and changes at the beginning and the end of each step.

    Args:
        step: steps that have ended.
        inside: whether the next one has begun.
    """
    return 2 * step + inside


class DataPosition(msgspec.Struct, frozen=True):
    """The next batch to train on.

    `loop` counts the calls of run.epochs; `loader` those of run.loader, within an epoch from where its loop began (-1:
    a loader of the script's own, whose place in the epoch nobody knows); `clock` the loader's batches of the epoch.
    """

    loop: int = 0
    epoch: int = 0
    loader: int = -1
    clock: int = 0


def position_of(state: Mapping[str, Any]) -> DataPosition:
    """Read the position out of a checkpoint's state."""
    return DataPosition(*(int(state.get(name, 0)) for name in ("loop", "epoch", "loader", "clock")))
