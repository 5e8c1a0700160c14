"""Puts off the import of torch's compiler until the process uses it.

The first optimizer of a process imports torch._dynamo, the tracer of torch.compile, to have it skip its methods. That
takes as long as the import of torch itself (0.9 s of processor time, 75 MB), and few scripts compile.
internals/measurements.md has the times.

A stand-in for the module has the two functions that optimizers call. Without the tracer nothing is traced, so there is
nothing to skip and no graph to break: both do nothing. Every other use, by any attribute, submodule or caller, imports
the module itself, which takes the place of the stand-in and skips the methods that were to be skipped. So a script that
compiles finds what it would have found.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE, CHILD = "torch", "_dynamo"

NAME = f"{PACKAGE}.{CHILD}"

SKIPPER = "torch._compile"
"""torch's module whose decorator has the tracer skip a method: it keeps, for each one, what the tracer returned."""

KEPT = "__dynamo_disable"
"""Attribute of a method under which SKIPPER keeps that."""


def arm() -> None:
    """Have this process import torch's compiler at its first use."""
    sys.meta_path.insert(0, CompilerFinder())


class CompilerStandIn(ModuleType):
    """The functions that optimizers call; every other attribute is the compiler's.

    Args:
        name: NAME.
        finder: imports the compiler.
    """

    def __init__(self, name: str, finder: CompilerFinder) -> None:
        super().__init__(name)
        self._finder = finder

    def disable(self, function: Callable[..., Any] | None = None, *arguments: Any, **settings: Any) -> Any:
        """Return a method of torch as it is; for any other caller, what the compiler returns."""
        if function is not None and sys._getframe(1).f_globals.get("__name__") == SKIPPER:
            self._finder.skipped[function] = (arguments, settings)
            return function
        return self._finder.import_compiler().disable(function, *arguments, **settings)

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing: while this module is here, no graph is traced."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these while it imports and inspects modules
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        return getattr(self._finder.import_compiler(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._finder.import_compiler(), name, value)

    def __dir__(self) -> list[str]:
        return dir(self._finder.import_compiler())


class CompilerFinder(MetaPathFinder, Loader):
    """Finds the stand-in; the compiler for its submodules.

    `skipped` are the methods that SKIPPER got back as they are, with the other arguments of its call.
    """

    def __init__(self) -> None:
        self.skipped: dict[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._imported = False
        self._lock = threading.Lock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the stand-in, or of a submodule of the compiler; None for other modules."""
        if fullname == NAME:
            return ModuleSpec(NAME, self, is_package=True)
        if fullname.startswith(f"{NAME}."):
            self.import_compiler()
            return ModuleSpec(fullname, ImportedModule(importlib.import_module(fullname)))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the stand-in."""
        return CompilerStandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in is complete."""

    def import_compiler(self) -> ModuleType:
        """Import the compiler in place of the stand-in, and return it.

        Raises:
            ImportError: what its import raises; a later import raises it again.
        """
        with self._lock:
            first, self._imported = not self._imported, True
            if first:
                with contextlib.suppress(ValueError):  # the script has removed it
                    sys.meta_path.remove(self)
                sys.modules.pop(NAME, None)
                vars(sys.modules[PACKAGE]).pop(CHILD, None)
        compiler = importlib.import_module(NAME)
        if first:  # not for a use in the course of that import, when the compiler is there in part
            for function, (arguments, settings) in self.skipped.items():
                if vars(function).get(KEPT) is function:
                    setattr(function, KEPT, compiler.disable(function, *arguments, **settings))
        return compiler


class ImportedModule(Loader):
    """Loads a module that has been imported by its own loader, and leaves it as it is.

    Args:
        module: the module.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which Python has replaced."""
        module.__spec__ = self._spec
