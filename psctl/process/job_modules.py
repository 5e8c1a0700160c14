"""Imports Python functions from files below the job's folder, and refuses all others before any of their code runs.

A worker may send a server any name, such as "os:kill", so only functions of the job's own files may be found. Each
module of a dotted path (packages first) is located without being executed, and is imported only when its source is
below the folder. A module that is in `sys.modules` already is checked by its file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType

from psctl.errors import UsageError

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages: not the job's code, even if a virtual environment is in the job's folder."""


def script_folder() -> str:
    """Return the folder of the running script; the working directory under `python -m` and in an interpreter."""
    main = sys.modules.get("__main__")
    file: str | None = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None:
        return os.getcwd()
    return os.path.dirname(os.path.abspath(file))


class JobModules:
    """Finds functions in the modules of one folder.

    Args:
        folder: the job's code on this host; "": the folder of the running script.
    """

    def __init__(self, folder: str = "") -> None:
        self._folder = os.path.realpath(folder or script_folder())

    def function(self, name: str) -> FunctionType:
        """Import a function by its "module:function".

        Raises:
            UsageError: there is none, or it is not a Python function that is defined below the folder.
        """
        path, _, attribute = name.partition(":")
        module = self._module(name, path)
        file = str(module.__file__)
        found = getattr(module, attribute, None)
        if found is None:
            raise UsageError(f"{name}: {file} defines no {attribute!r}", self._hint)
        if not isinstance(found, FunctionType):
            raise UsageError(f"{name} in {file} is a {type(found).__name__}, not a Python function", self._hint)
        source = inspect.unwrap(found).__code__.co_filename  # a decorator's wrapper has the decorator's file
        if found.__module__ != path or not self._holds(source):
            raise UsageError(f"{name} in {file} is imported there from {source}", self._hint)
        return found

    def class_of(self, name: str) -> type:
        """Import a class by its "module:Class".

        Raises:
            UsageError: there is none, or it is not a class that is defined below the folder.
        """
        path, _, attribute = name.partition(":")
        module = self._module(name, path)
        file = str(module.__file__)
        found = getattr(module, attribute, None)
        if not isinstance(found, type) or found.__module__ != path:
            what = "defines no class" if not isinstance(found, type) else f"imports it from {found.__module__}:"
            raise UsageError(
                f"{name}: {file} {what} {attribute!r}",
                f"define it with `class` at the top of a module in the job's folder ({self._folder})",
            )
        return found

    @property
    def _hint(self) -> str:
        return f"define it with `def` at the top of a module in the job's folder ({self._folder})"

    def _module(self, name: str, path: str) -> ModuleType:
        """Import each package of a dotted path, then the module, each only after its file was checked."""
        if self._folder not in sys.path:
            sys.path.append(self._folder)  # last, so that its modules do not hide those that psctl imports
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            self._import(name, ".".join(parts[:count]), last=count == len(parts))
        return sys.modules[path]

    def _import(self, name: str, path: str, *, last: bool) -> None:
        spec = self._spec(name, path)
        package = spec.origin is None and spec.submodule_search_locations is not None  # a namespace package: no code
        if package and not last:
            return
        if package or not spec.has_location or not self._holds(spec.origin or ""):
            where = spec.origin or "a namespace package"
            rename = f"{self._hint}; rename the module if an installed one has its name"
            raise UsageError(f"{name}: module {path!r} is {where}, which is not of the job's folder", rename)
        if not str(spec.origin).endswith(".py"):
            raise UsageError(f"{name}: {spec.origin} is no Python source file", self._hint)
        try:
            importlib.import_module(path)
        except (Exception, SystemExit) as error:
            text = f"{name}: importing {spec.origin} failed: {type(error).__name__}: {error}"
            raise UsageError(text, f"python -c 'import {path}' in the job's folder shows the whole error") from error

    def _spec(self, name: str, path: str) -> ModuleSpec:
        """Locate a module without executing it; its parent packages are imported."""
        loaded = sys.modules.get(path)
        file = getattr(loaded, "__file__", None)
        try:
            if loaded is not None and file is not None:  # also a module that was loaded without a spec
                return importlib.util.spec_from_file_location(path, file) or ModuleSpec(path, None, origin=file)
            found = importlib.util.find_spec(path)
        except (ImportError, ValueError, AttributeError) as error:
            raise UsageError(f"{name}: module {path!r} is not found: {error}", self._hint) from error
        if found is None:
            raise UsageError(f"{name}: there is no module {path!r} in {self._folder}", self._hint)
        return found

    def _holds(self, file: str) -> bool:
        real = os.path.realpath(file)
        below = os.path.commonpath((self._folder, real)) == self._folder
        return below and not INSTALLED.intersection(os.path.relpath(real, self._folder).split(os.sep))
