"""The room's front door: what other rooms call to write, read, prove, find, copy and remove checkpoints."""

from __future__ import annotations

from psctl.checkpoint.copies import Receiver, copy, outgoing, parts
from psctl.checkpoint.export import Exported, export
from psctl.checkpoint.manifest import Manifest, whole
from psctl.checkpoint.reader import (
    Found,
    Newest,
    folder_name,
    found,
    is_step,
    listing,
    manifest_bytes,
    newest_verified,
    open_checkpoint,
    read,
    read_state,
    verify,
)
from psctl.checkpoint.shelf import prune, remove, resolve
from psctl.checkpoint.writer import EXPORT, Writer, sweep, sweep_beside

__all__ = [
    "EXPORT",
    "Exported",
    "Found",
    "Manifest",
    "Newest",
    "Receiver",
    "Writer",
    "copy",
    "export",
    "folder_name",
    "found",
    "is_step",
    "listing",
    "manifest_bytes",
    "newest_verified",
    "open_checkpoint",
    "outgoing",
    "parts",
    "prune",
    "read",
    "read_state",
    "remove",
    "resolve",
    "sweep",
    "sweep_beside",
    "verify",
    "whole",
]
