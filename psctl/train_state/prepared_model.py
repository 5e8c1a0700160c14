"""The prepared model (the user's object, with a subclass of its class), hooks on its modules, and the optimizer's step.

So `isinstance`, attributes, methods and state_dict names do not change, and an optimizer, a scheduler or an EMA that
refers to the model refers to the prepared one. The subclass waits for pending values where the whole model is read
(state_dict, parameters). Its copies and pickles are of the user's class and contain no part of
psctl. (torch's FSDP2 changes a module's class in the same way.)
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, SupportsIndex, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from psctl.errors import UsageError

_newobj: object = copyreg.__newobj__  # type: ignore[attr-defined]


class ModelValues(Protocol):
    """The methods of a synchronizer (psctl.sync.synchronizer.Synchronizer) that a prepared model calls."""

    write_refusal: str

    def wait_exact(self) -> None: ...
    def wait_newest(self) -> None: ...
    def without_hooks(self) -> AbstractContextManager[None]: ...


class PreForwardHook:
    """Base class of forward pre-hooks, which does nothing: a copy of the model has it in place of each of ours."""

    def __call__(self, module: nn.Module, inputs: object) -> None:
        """Act before the forward of `module`."""

    def __deepcopy__(self, memo: dict[int, object]) -> PreForwardHook:
        return PreForwardHook()

    def __reduce__(self) -> tuple[type[PreForwardHook], tuple[()]]:
        return PreForwardHook, ()


class ForwardHooks:
    """Forward pre-hooks on some modules, which run before the user's own.

    Args:
        hooks: modules, each with its hook.
    """

    def __init__(self, hooks: Iterable[tuple[nn.Module, PreForwardHook]]) -> None:
        self._hooks = list(hooks)
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Register the hooks."""
        self._handles = [module.register_forward_pre_hook(hook, prepend=True) for module, hook in self._hooks]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Remove the hooks within a context."""
        self.remove()
        try:
            yield
        finally:
            self.attach()


def swap_class(model: nn.Module, values: ModelValues, hooks: ForwardHooks) -> None:
    """Give `model` its prepared class.

    Args:
        model: the user's.
        values: the synchronizer, which waits for pending values.
        hooks: the run's; copies of the model have none.

    Raises:
        UsageError: the object cannot change its class (a ScriptModule, for one).
    """
    try:
        model.__class__ = _subclass(type(model), values, hooks)
    except TypeError as error:
        raise UsageError(
            f"{type(model).__name__} cannot be prepared: {error}",
            "prepare the plain model; script, trace or quantise it afterwards",
        ) from error


def plain_class(model: nn.Module) -> type[nn.Module]:
    """Return the user's class of a prepared model (or of any other)."""
    return getattr(type(model), "_psctl_plain", type(model))


def _subclass(original: type[nn.Module], values: ModelValues, hooks: ForwardHooks) -> type[nn.Module]:
    @contextmanager
    def plain(model: nn.Module) -> Iterator[nn.Module]:
        values.wait_exact()
        prepared = type(model)
        with values.without_hooks(), hooks.detached():
            model.__class__ = original
            try:
                yield model
            finally:
                model.__class__ = prepared

    class Prepared(original):  # type: ignore[valid-type,misc]
        _psctl_plain = original

        def state_dict(self, *args: object, **kwargs: object) -> object:
            values.wait_exact()
            return super().state_dict(*args, **kwargs)

        def named_parameters(self, *args: object, **kwargs: object) -> object:
            values.wait_newest()
            return super().named_parameters(*args, **kwargs)

        def parameters(self, *args: object, **kwargs: object) -> object:
            values.wait_newest()
            return super().parameters(*args, **kwargs)

        def zero_grad(self, set_to_none: bool = True) -> None:
            zero = super().zero_grad
            with plain_parameters(self):  # gradients are on this worker: there is nothing to wait for
                zero(set_to_none)

        def load_state_dict(self, *args: object, **kwargs: object) -> object:
            if values.write_refusal:
                raise UsageError(
                    f"load_state_dict of a prepared model: {values.write_refusal}",
                    "load the values before run.prepare; every rank starts with rank 0's",
                )
            return super().load_state_dict(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, object]) -> object:
            with plain(self):
                return copy.deepcopy(self, memo)

        def __copy__(self) -> object:
            with plain(self):
                return copy.copy(self)

        def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
            return reduce_as(original, copy.deepcopy(self), protocol)

    Prepared.__name__, Prepared.__qualname__ = original.__name__, original.__qualname__
    Prepared.__module__, Prepared.__doc__ = original.__module__, original.__doc__
    return Prepared


def reduce_as(original: type[nn.Module], module: nn.Module, protocol: SupportsIndex) -> tuple[object, ...]:
    """Return the form in which an object of a subclass of `original` is pickled as `module`.

    Args:
        original: the class of `module`.
        module: the state is that of this object.
        protocol: pickle's.
    """
    whole = module.__reduce_ex__(protocol)
    assert isinstance(whole, tuple), "a string names a global"
    made, args, *rest = whole
    if made is _newobj:  # it must name the class of the pickled object; the older form need not
        return copyreg._reconstructor, (original, object, None), *rest  # type: ignore[attr-defined]
    return made, args, *rest


@contextmanager
def plain_parameters(model: nn.Module) -> Iterator[None]:
    """Give `model` its user's class within a context, hooks unchanged: its parameters are then read without waiting."""
    prepared = type(model)
    model.__class__ = plain_class(model)
    try:
        yield
    finally:
        model.__class__ = prepared


def replace_step(optimizer: torch.optim.Optimizer, end_step: Callable[[Callable[[], object]], object]) -> None:
    """Make `optimizer.step()` call `end_step` with the original step, as a function of no arguments.

    A scheduler that exists already has wrapped `step` to detect calls; a later one checks for the wrapper's attribute.
    Both work with the replacement. `step(closure)` evaluates the closure once, before the step, and returns its loss,
    as optimizers do that call it once.
    """
    original: Callable[..., object] = optimizer.step
    calls_closure_itself = type(optimizer).__name__ == "LBFGS"

    @functools.wraps(original)
    def step(*args: object, **kwargs: object) -> object:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        closure = args[0] if args else kwargs.get("closure")
        if closure is None or calls_closure_itself:
            return end_step(lambda: original(*args, **kwargs))
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        with torch.enable_grad():
            loss = cast(Callable[[], object], closure)()
        end_step(lambda: original(*args[1:], **rest))
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign,assignment]
