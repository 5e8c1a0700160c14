"""Replaces the step of the user's own optimizer object: schedulers and the loop keep what they hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def replace_step(optimizer: torch.optim.Optimizer, ending: Callable[[Callable[[], Any]], Any]) -> None:
    """Let `optimizer.step()` call `ending` with the step that it had, as a function of no arguments.

    A scheduler made before has wrapped `step` on the object already, to see that it is called; one made later looks
    for that wrapper's mark. Both find what they look for. `step(closure)` evaluates the closure first, once, and
    returns its loss, as every optimizer does that calls it once.
    """
    original = optimizer.step
    calls_closure_itself = type(optimizer).__name__ == "LBFGS"

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        closure = args[0] if args else kwargs.get("closure")
        if closure is None or calls_closure_itself:
            return ending(lambda: original(*args, **kwargs))
        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        with torch.enable_grad():
            loss = closure()
        ending(lambda: original(*args[1:], **rest))
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
