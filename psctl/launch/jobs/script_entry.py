"""Checks the script that a job file names: that it exists and has no syntax error; suggests similar names."""

from __future__ import annotations

import ast
import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from psctl import errors
from psctl.spec import yaml_nodes
from psctl.spec.nearest import nearest

LOOKED_AT = 2000
"""Limit of Python files of a job's folder that are searched for a similar name."""


def position(text: str, source: str, key: str) -> str:
    """Return the position of a key of a job file: file:line:column; the file alone when --set gave it."""
    node = yaml_nodes.parse(text, source)
    found = node.get(key) if isinstance(node, yaml_nodes.Mapping) else None
    return found.where if found is not None else source


def problems(text: str, source: str) -> list[errors.PsctlError]:
    """Return the errors of the script that a job file names; the file may have further errors of its own."""
    node = yaml_nodes.parse(text, source, [])
    words = {key: node.get(key) if isinstance(node, yaml_nodes.Mapping) else None for key in ("script", "workdir")}
    script, workdir = words["script"], words["workdir"]
    if not isinstance(script, yaml_nodes.Scalar) or script.null:
        return []
    folder = Path(source).parent / (Path(workdir.text).expanduser() if isinstance(workdir, yaml_nodes.Scalar) else "")
    found = missing(script.text, folder.resolve(), script.where) or unreadable(folder.resolve() / script.text)
    return [found] if found else []


def missing(script: str | None, folder: Path, where: str) -> errors.InvalidFile | None:
    """Return the error for a script that is not in the job's folder; None if it is, or if the job runs a module.

    Args:
        script, folder: the script, and the folder that the job's hosts get.
        where: the position of `script:` in the job file.
    """
    if script is None or (folder / script).is_file():
        return None
    if not folder.is_dir():
        return errors.InvalidFile(f"workdir: {folder} is no folder", "workdir is relative to the job file", where)
    found = list(itertools.islice(_scripts(folder), LOOKED_AT))
    names = {Path(name).name: name for name in reversed(found)}
    near = nearest(script, found) or names.get(nearest(Path(script).name, names) or "")
    meant = f', did you mean "{near}"?' if near else ""
    return errors.InvalidFile(f"script: {folder / script} is not there{meant}", "script is relative to workdir", where)


def unreadable(path: Path) -> errors.InvalidFile | None:
    """Return the error for a script with a syntax error, with its line; None if it has none."""
    here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    try:
        with warnings.catch_warnings(action="ignore"):  # of what the script's author wrote, not for this command
            ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        where = f"{path}:{error.lineno or 1}:{error.offset or 1}"
        line = (error.text or "").strip()
        hint = f"{here} stops at: {line}" if line else f"{here} cannot read it"
        return errors.InvalidFile(f"script: SyntaxError: {error.msg}", hint, where)
    except (OSError, ValueError) as error:  # unreadable, or null bytes
        return errors.InvalidFile(f"script: {error}", f"{here} cannot read it", str(path))
    return None


def _scripts(folder: Path) -> Iterator[str]:
    """Return the Python files below a folder, in the form of `script:`."""
    for above, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                yield os.path.relpath(os.path.join(above, name), folder)
