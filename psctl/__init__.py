"""psctl: distributed training over SSH. `import psctl` loads no torch: the names below are lazy doors to runtime/.

import psctl

run = psctl.init()
model, optimizer = run.prepare(model, optimizer)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psctl import nn as nn
    from psctl.kv.table_reader import Reader as Reader
    from psctl.ps.tables.row_filters import RowFilter as RowFilter
    from psctl.reader.group_reader import GroupReader as GroupReader
    from psctl.reader.group_reader import init_reader as init_reader
    from psctl.train_state.start_values import load_start_values as load_start_values
    from psctl.worker.ddp import accelerate_ddp as accelerate_ddp
    from psctl.worker.init import init as init
    from psctl.worker.run import Run as Run

__version__ = "0.1.0"

__all__ = [
    "GroupReader", "Reader", "RowFilter", "Run", "__version__", "accelerate_ddp", "init", "init_reader",
    "load_start_values", "nn",
]  # fmt: skip

_DOORS = {
    "accelerate_ddp": "psctl.worker.ddp",
    "init": "psctl.worker.init",
    "init_reader": "psctl.reader.group_reader",
    "GroupReader": "psctl.reader.group_reader",
    "Reader": "psctl.kv.table_reader",
    "RowFilter": "psctl.ps.tables.row_filters",
    "load_start_values": "psctl.train_state.start_values",
    "Run": "psctl.worker.run",
}


def __getattr__(name: str) -> object:
    """Open a door: the module behind it is loaded on first use."""
    if name == "nn":
        return import_module("psctl.nn")
    if name in _DOORS:
        return getattr(import_module(_DOORS[name]), name)
    raise AttributeError(f"module 'psctl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
