"""Users' functions by name, `module:function`, imported from the job's folder on every process that needs them.

A name can stand for a Python function that a file below the job's folder defines (job_modules.py).

Only the name of a function is sent over the network, so closures, lambdas and functions of the script itself
(`__main__`, which servers do not run) are refused. A reduction is tested first: its result must not depend on order or
grouping, exactly for integers, and up to 8 eps of the magnitudes for floats.
"""

from __future__ import annotations

import re
from types import FunctionType

import torch

from psctl.errors import UsageError
from psctl.process.job_modules import JobModules
from psctl.ps.tables.reductions import Reduction, custom, reductions
from psctl.ps.tables.row_filters import RowFilter
from psctl.ps.tables.table_kinds import UserFunction
from psctl.schedule.operation_check import ValueMeasure, check_operation

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

WHOLE = (-3, -1, 0, 1, 2, 5)
FLOATS = (-2.7, -0.3, 0.0, 0.1, 1.0, 1e3)


def name_of(function: str | UserFunction) -> str:
    """Return the name by which other processes find a function.

    Raises:
        UsageError: other processes cannot import it; the script's fault.
    """
    if isinstance(function, str):
        return function
    hint = "define it at the top of a module in the script's folder, and give it or 'module:function'"
    if not isinstance(function, FunctionType):
        raise UsageError(f"{function!r} is not a function", hint)
    if function.__module__ == "__main__":
        raise UsageError(f"{function.__name__} is defined in the script, which servers do not run", hint)
    if not function.__qualname__.isidentifier():
        raise UsageError(f"{function.__qualname__} is not defined at the top of a module", hint)
    return f"{function.__module__}:{function.__name__}"


class JobFunctions:
    """Finds reductions and functions by name, and caches them.

    Args:
        folder: the job's code on this host; "": the folder of the running script.
    """

    def __init__(self, folder: str = "") -> None:
        self._modules = JobModules(folder)
        self._found: dict[str, UserFunction] = {}
        self._known = reductions()

    def function(self, name: str) -> UserFunction:
        """Return a function by its name.

        Raises:
            UsageError: there is no such function.
        """
        if name not in self._found:
            self._found[name] = self._import(name)
        return self._found[name]

    def _import(self, name: str) -> UserFunction:
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name[:80]!r} names no function", "write module:function, of a module in the job's folder"
            )
        if name.startswith("__main__:"):
            raise UsageError(f"{name}: servers do not run the script", "define it in a module of the script's folder")
        return self._modules.function(name)

    def row_filter(self, name: str) -> type[RowFilter]:
        """Return a filter's class by its "module:class".

        Raises:
            UsageError: there is no such class, or it is no filter.
        """
        if not NAME.fullmatch(name):
            raise UsageError(f"{name[:80]!r} names no class", "write module:Class, of a module in the job's folder")
        if name.startswith("__main__:"):
            raise UsageError(f"{name}: servers do not run the script", "define it in a module of the script's folder")
        found = self._modules.class_of(name)
        if not issubclass(found, RowFilter):
            raise UsageError(f"{name} is no filter", f"write `class {found.__name__}(psctl.RowFilter):`")
        return found

    def reduction(self, name: str) -> Reduction:
        """Return a reduction by its name or module:function.

        Raises:
            UsageError: there is none.
        """
        if name in self._known:
            return self._known[name]
        if ":" not in name:
            known = ", ".join(self._known)
            raise UsageError(f"no reduction has the name {name!r}", f"use one of: {known}; or module:function")
        self._known[name] = custom(name, self.function(name))
        return self._known[name]

    def check(self, name: str, dtype: torch.dtype, width: int) -> None:
        """Test a user's reduction on rows of this dtype and width.

        Raises:
            UsageError: it depends on order or grouping (with the rows that show it), or it raised an exception.
        """
        if name in reductions():
            return
        numbers = FLOATS if dtype.is_floating_point else (False, True) if dtype is torch.bool else WHOLE
        samples = [
            torch.tensor([[numbers[(start + at) % len(numbers)] for at in range(width)]], dtype=dtype)
            for start in range(len(numbers))
        ]
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        try:
            found = check_operation(self.function(name), samples, ValueMeasure(_same, _distance, _magnitude, eps))
        except Exception as error:
            raise UsageError(f"{name} failed on rows of {str(dtype)[6:]}: {type(error).__name__}: {error}") from error
        if found is not None:
            raise UsageError(
                f"{name} cannot reduce pushes: it is {found}", "pushes arrive in any order, and in any grouping"
            )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    gap = (one.double() - other.double()).abs()
    return float(torch.where(one == other, 0.0, gap).nan_to_num(nan=float("inf")).max())


def _magnitude(value: torch.Tensor) -> float:
    return float(value.double().abs().nan_to_num(nan=0.0, posinf=0.0).max())
