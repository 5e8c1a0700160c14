"""Checks the script that a job file names: that it exists and has no syntax error; suggests similar names."""

from __future__ import annotations

import ast
import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from psctl import errors
from psctl.spec import yaml_nodes
from psctl.spec.job import JobSpec
from psctl.spec.nearest import nearest

LOOKED_AT = 2000
"""Limit of Python files of a job's folder that are searched for a similar name."""


class NamedScript(NamedTuple):
    """A script that a job file names: its key ("script", "groups[0].script"), its path, and the key's position."""

    key: str
    path: str
    where: str


def named(node: yaml_nodes.Node) -> list[NamedScript]:
    """Return the scripts that a job file names: the workers' one, and those of groups."""
    found: list[NamedScript] = []

    def add(holder: yaml_nodes.Node | None, prefix: str) -> None:
        script = holder.get("script") if isinstance(holder, yaml_nodes.Mapping) else None
        if isinstance(script, yaml_nodes.Scalar) and not script.null:
            found.append(NamedScript(f"{prefix}script", script.text, script.where))

    add(node, "")
    groups = node.get("groups") if isinstance(node, yaml_nodes.Mapping) else None
    for index, group in enumerate(groups.items if isinstance(groups, yaml_nodes.Sequence) else ()):
        add(group, f"groups[{index}].")
    return found


def scripts_of(job: JobSpec, text: str) -> list[NamedScript]:
    """Return the scripts of a job with their positions: file:line:column; the file alone where --set gave them."""
    places = {each.key: each.where for each in named(yaml_nodes.parse(text, job.source))}
    keys = {"script": job.script} | {f"groups[{at}].script": group.script for at, group in enumerate(job.groups)}
    return [NamedScript(key, path, places.get(key, job.source)) for key, path in keys.items() if path is not None]


def problems(text: str, source: str) -> list[errors.PsctlError]:
    """Return the errors of the scripts that a job file names; the file may have further errors of its own."""
    node = yaml_nodes.parse(text, source, [])
    workdir = node.get("workdir") if isinstance(node, yaml_nodes.Mapping) else None
    folder = Path(source).parent / (Path(workdir.text).expanduser() if isinstance(workdir, yaml_nodes.Scalar) else "")
    found = (missing(each, folder.resolve()) or unreadable(folder.resolve() / each.path) for each in named(node))
    return [error for error in found if error is not None]


def missing(named: NamedScript, folder: Path) -> errors.InvalidFile | None:
    """Return the error for a script that is not in the job's folder, which the job's hosts get; None if it is."""
    key, script, where = named
    if (folder / script).is_file():
        return None
    if not folder.is_dir():
        return errors.InvalidFile(f"workdir: {folder} is no folder", "workdir is relative to the job file", where)
    found = list(itertools.islice(_scripts(folder), LOOKED_AT))
    names = {Path(name).name: name for name in reversed(found)}
    near = nearest(script, found) or names.get(nearest(Path(script).name, names) or "")
    meant = f', did you mean "{near}"?' if near else ""
    return errors.InvalidFile(f"{key}: {folder / script} is not there{meant}", "script is relative to workdir", where)


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
