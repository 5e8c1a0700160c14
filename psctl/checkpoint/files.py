"""The room's front door: what other rooms call to write, read, prove, find, copy and remove checkpoints."""

from __future__ import annotations

from psctl.checkpoint.copies import Receiver, copy, outgoing, parts
from psctl.checkpoint.export import export
from psctl.checkpoint.manifest import Manifest, whole
from psctl.checkpoint.reader import (
    Found,
    Newest,
    folder_name,
    listing,
    newest_verified,
    open_checkpoint,
    read,
    read_state,
    verify,
)
from psctl.checkpoint.shelf import prune, remove, resolve
from psctl.checkpoint.writer import Writer, sweep

__all__ = [
    "Found",
    "Manifest",
    "Newest",
    "Receiver",
    "Writer",
    "copy",
    "export",
    "folder_name",
    "listing",
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
    "verify",
    "whole",
]
