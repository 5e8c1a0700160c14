"""The prepared model is the user's own object; only its class changes, to a subclass made on the fly.

So `isinstance`, attributes, methods and state_dict names are the user's under every strategy, and an optimizer, a
scheduler or an EMA that holds the model holds the prepared one. The subclass waits for pending values where the model
is read as a whole (state_dict, parameters), and gives plain copies: what is copied or pickled is of the user's class,
with no part of psctl in it. (torch's FSDP2 changes a module's class in the same way.)
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import nn

from psctl.errors import UsageError

_newobj: Any = copyreg.__newobj__  # type: ignore[attr-defined]


class Door(Protocol):
    """What stands between the model's values and whoever reads them."""

    @property
    def frozen(self) -> str:
        """Why values may not be written from outside ("" when they may)."""

    def wait(self) -> None:
        """Return when every value holds every clock that has ended here."""

    def land(self) -> None:
        """Return when every value is the newest that a step may read."""

    def detached(self) -> AbstractContextManager[None]:
        """Take psctl's hooks off the model for a while."""


class Hooks(Protocol):
    """Hooks on a model's modules."""

    def detached(self) -> AbstractContextManager[None]:
        """Take them off for a while."""


def swap(model: nn.Module, door: Door, hooks: Hooks) -> None:
    """Give `model` its prepared class.

    Args:
        model: the user's.
        door: stands before its values.
        hooks: of the run, which copies do not have.

    Raises:
        UsageError: the object cannot change its class (a ScriptModule, for one).
    """
    try:
        model.__class__ = _subclass(type(model), door, hooks)
    except TypeError as error:
        raise UsageError(
            f"{type(model).__name__} cannot be prepared: {error}",
            "prepare the plain model; script, trace or quantise it afterwards",
        ) from error


def plain_class(model: nn.Module) -> type[nn.Module]:
    """Return the user's class of a prepared model (or of any other)."""
    return getattr(type(model), "_psctl_plain", type(model))


def _subclass(original: type[nn.Module], door: Door, hooks: Hooks) -> type[nn.Module]:
    @contextmanager
    def plain(model: nn.Module) -> Iterator[nn.Module]:
        door.wait()
        prepared = type(model)
        with door.detached(), hooks.detached():
            model.__class__ = original
            try:
                yield model
            finally:
                model.__class__ = prepared

    class Prepared(original):  # type: ignore[valid-type,misc]
        _psctl_plain = original

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            door.wait()
            return super().state_dict(*args, **kwargs)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            door.land()
            return super().named_parameters(*args, **kwargs)

        def parameters(self, *args: Any, **kwargs: Any) -> Any:
            door.land()
            return super().parameters(*args, **kwargs)

        def zero_grad(self, set_to_none: bool = True) -> None:
            zero = super().zero_grad
            with plain_parameters(self):  # gradients are no values: nothing to wait for
                zero(set_to_none)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            if door.frozen:
                raise UsageError(
                    f"load_state_dict of a prepared model: {door.frozen}",
                    "load the values before run.prepare; rank 0's are everyone's start values",
                )
            return super().load_state_dict(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            with plain(self):
                return copy.deepcopy(self, memo)

        def __copy__(self) -> Any:
            with plain(self):
                return copy.copy(self)

        def __reduce_ex__(self, protocol: Any) -> Any:
            made, args, *rest = copy.deepcopy(self).__reduce_ex__(protocol)
            if made is _newobj:  # which must name the class of the object at hand; the older form need not
                return copyreg._reconstructor, (original, object, None), *rest  # type: ignore[attr-defined]
            return made, args, *rest

    Prepared.__name__, Prepared.__qualname__ = original.__name__, original.__qualname__
    Prepared.__module__, Prepared.__doc__ = original.__module__, original.__doc__
    return Prepared


@contextmanager
def plain_parameters(model: nn.Module) -> Iterator[None]:
    """Let `model` be of its user's class for a while, hooks and all: its parameters are then read without waiting."""
    prepared = type(model)
    model.__class__ = plain_class(model)
    try:
        yield
    finally:
        model.__class__ = prepared
