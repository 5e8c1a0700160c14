"""Imports torch without the garbage collector, which takes a third of the time of that import to free 6 MB.

torch makes some 300,000 objects that stay until the process ends. The collector traverses them many times while they
are made, and again in each full collection later, also in the middle of a training step. So it is off during the
import, and then the objects are frozen: no later collection looks at them. internals/measurements.md has the times.

The script imports torch by itself, after it has set what torch reads at its import (os.environ). So torch is not
imported here, but found: a finder at the head of sys.meta_path gives it a loader that does all of this around torch's
own.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = ("torch", "torch._dynamo")
"""The second is torch's compiler, which torch imports when the first optimizer is made."""


def arm() -> None:
    """Have this process import torch without the garbage collector, if it imports it."""
    sys.meta_path.insert(0, TorchFinder())


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, and freeze all objects at the end; where a script has disabled it, do nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class TorchFinder(MetaPathFinder):
    """Finds torch by the other finders, with a loader that pauses the garbage collector."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of MODULES; None for others, and where no finder finds it."""
        if fullname not in MODULES:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if found is not None and found.loader is not None:
            found.loader = PausingLoader(found.loader)
        return found


class PausingLoader(Loader):
    """Executes a module by its own loader, which the module has as its loader from then on.

    Args:
        own: the module's own loader.
    """

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module while the garbage collector is paused."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        with collector_paused():
            self._own.exec_module(module)
