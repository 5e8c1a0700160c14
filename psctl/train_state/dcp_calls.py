"""Saving and loading by torch.distributed.checkpoint in one process alone, whatever process groups the script has.

Older versions of torch (2.6 for instance) take `no_dist` in deprecated functions only.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def save_alone(state: dict[str, Any], folder: Path) -> None:
    """Write tensors and other values into a new folder."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it warns of a single process
        if "no_dist" in inspect.signature(save).parameters:
            save(state, checkpoint_id=folder, no_dist=True)
            return
        from torch.distributed.checkpoint.state_dict_saver import save_state_dict

        warnings.simplefilter("ignore", FutureWarning)  # the function is deprecated
        save_state_dict(state, FileSystemWriter(folder), no_dist=True)


def load_alone(wanted: dict[str, Any], folder: Path) -> None:
    """Read into the tensors of `wanted`, and replace its other values, by name."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        if "no_dist" in inspect.signature(load).parameters:
            load(wanted, storage_reader=FileSystemReader(folder), no_dist=True)
            return
        from torch.distributed.checkpoint.state_dict_loader import load_state_dict

        warnings.simplefilter("ignore", FutureWarning)
        load_state_dict(wanted, FileSystemReader(folder), no_dist=True)
