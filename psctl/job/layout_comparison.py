"""Compares the models of two ranks and describes the first difference."""

from __future__ import annotations

from itertools import zip_longest

from psctl.job.training_messages import Prepare
from psctl.types import Layout, ParameterInfo


def difference(first: Prepare, other: Prepare) -> str:
    """Return the first difference between the models of another rank and of rank 0; "" when they are equal."""
    for index, (ours, theirs) in enumerate(zip_longest(first.layout.parameters, other.layout.parameters)):
        if ours != theirs:
            return f"parameter {index} is {_parameter(theirs)}, on worker/0 it is {_parameter(ours)}"
    if first.layout.optimizer != other.layout.optimizer:
        ours, theirs = first.layout.optimizer or "not fit for servers", other.layout.optimizer or "not fit for servers"
        return f"the optimizer is {theirs}, on worker/0 it is {ours}"
    text = _groups(first.layout, other.layout)
    if text:
        return text
    if first.outer != other.outer:
        have = ("none", "an outer optimizer")
        return f"run.prepare was given {have[other.outer]}, on worker/0 {have[first.outer]}"
    if first.hooked != other.hooked:
        calls = ("run.prepare", "psctl.accelerate_ddp")
        return f"it called {calls[other.hooked]}, worker/0 {calls[first.hooked]}"
    if first.follows != other.follows:
        begins = [_begins(each.follows) for each in (other, first)]
        return f"its loop {begins[0]}, that of worker/0 {begins[1]}"
    for left, right in zip_longest(first.buffers, other.buffers):
        if left != right:
            return f"a buffer is {right or 'missing'}, on worker/0 it is {left or 'missing'}"
    return ""


def _begins(step: int | None) -> str:
    return "is the script's own" if step is None else f"is a library's and continues after step {step}"


def _parameter(info: ParameterInfo | None) -> str:
    if info is None:
        return "missing"
    frozen = "" if info.trainable else " frozen"
    group = f" in group {info.group}" if info.group >= 0 else " in no group of the optimizer"
    return f"{info.name} {list(info.shape)} {info.dtype}{frozen}{group}"


def _groups(first: Layout, other: Layout) -> str:
    if len(first.groups) != len(other.groups):
        return f"the optimizer has {len(other.groups)} groups, on worker/0 it has {len(first.groups)}"
    for index, (ours, theirs) in enumerate(zip(first.groups, other.groups, strict=True)):
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return f"{key} of the optimizer's group {index} is {theirs.get(key)}, on worker/0 it is {ours.get(key)}"
    return ""
