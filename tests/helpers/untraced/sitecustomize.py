"""A stand-in for `torch._dynamo` in the jobs of tests: the tracer of `torch.compile`, which no test's job uses.

Python imports this module at its start where its folder is on PYTHONPATH. The first optimizer of a process imports the
tracer, to hide itself from it; that is half of the processor time that a worker or server takes to start (1.5 s of 3).
A process that uses more of it imports the real module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Untraced(ModuleType):
    """The functions that optimizers call; every other attribute comes from the real module."""

    def disable(self, function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Return the function: no tracer is there to skip it."""
        return function

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_real(), name)


class Finder(MetaPathFinder, Loader):
    """Finds the stand-in for the tracer, and the real module for its submodules."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name == NAME:
            return ModuleSpec(name, self, is_package=True)
        return PathFinder.find_spec(name, import_real().__path__) if name.startswith(f"{NAME}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Untraced(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


FINDER = Finder()


def import_real() -> ModuleType:
    """Import the real module in place of the stand-in."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        sys.modules.pop(NAME, None)
    return importlib.import_module(NAME)


sys.meta_path.insert(0, FINDER)
