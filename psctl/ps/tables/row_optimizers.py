"""Optimizers of rows, which servers apply to the rows that a push has gradients for, and to no others.

The state of a row lies with it: some arrays as wide as the row, and some single numbers. It begins when the first
gradient of the row arrives. Adam counts the steps of each row, so its bias corrections are those of the row's own
steps. A weight decay is added to the gradient, so it decays a row only when the row is pushed.

    sgd                lr, momentum 0, weight_decay 0
    adagrad            lr, eps 1e-10, initial_accumulator 0, weight_decay 0      (Duchi and others 2011)
    rowwise-adagrad    the same, with one accumulator a row: of the mean of the squares of its gradient
    adam               lr, beta1 0.9, beta2 0.999, eps 1e-8, weight_decay 0      (Kingma and Ba 2015)
    ftrl               alpha, beta 1, l1 0, l2 0: FTRL-proximal                  (McMahan and others 2013, algorithm 1)
    proximal           lr, l1 0, l2 0, slack 0: proximal gradient; a coordinate that stays at zero, with a gradient of
                       at most (1 - slack) l1, becomes -0.0, the mark of the KKT filter (row_filters.py)

Replicas apply the same entries and must arrive at the same bits, whatever the number and order of a call's rows. So
only operations that IEEE 754 rounds exactly are used, on arrays of numpy, which fuses none of them: no pow, exp or
log. Rows of 16 bits are converted to float32 for the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch

from psctl.errors import UsageError
from psctl.ps.table_messages import RowOptimizerSpec
from psctl.ps.tables.reductions import Array

Settings = Mapping[str, float]

Step = Callable[[Array, Array, Array, Settings], None]
"""Changes rows and their state in place: (rows, gradients, state, settings); wide arrays are first in the state."""


class SettingBounds(msgspec.Struct, frozen=True):
    """The values that a setting may have: from `least` (or above it, if `open`) to below `below`; None: required."""

    default: float | None
    least: float = 0.0
    below: float = math.inf
    above: bool = False

    def check(self, optimizer: str, name: str, value: float) -> None:
        """Check a value.

        Raises:
            UsageError: it is out of range.
        """
        fits = math.isfinite(value) and self.least <= value < self.below and not (self.above and value == self.least)
        if not fits:
            low = f"above {self.least:g}" if self.above else f"from {self.least:g} on"
            high = f" and below {self.below:g}" if self.below < math.inf else ""
            raise UsageError(f"{name}={value!r} of optimizer {optimizer!r}", f"give a number {low}{high}")


class RowRule(msgspec.Struct, frozen=True):
    """An optimizer of rows.

    Args:
        settings: its numbers.
        wide: the arrays of its state that are as wide as the row.
        single: the single numbers of its state.
        step: applies gradients.
        first: the setting with which the state of a new row is filled; "": zero.
        keeps_initial: whether a row's step begins at its initial value.
    """

    settings: dict[str, SettingBounds]
    wide: int
    single: int
    step: Step
    first: str = ""
    keeps_initial: bool = True


class RowOptimizer:
    """The optimizer of a table.

    Args:
        spec: its name and its first settings, complete (`complete`).
        width: elements of a row.
        dtype: of a row.
    """

    def __init__(self, spec: RowOptimizerSpec, width: int, dtype: torch.dtype) -> None:
        self._rule = rule_named(spec.name)
        if complete(spec) != spec:
            raise UsageError(f"optimizer {spec.name!r} without {', '.join(_missing(spec))}", "give all of its settings")
        self.settings = dict(spec.settings)
        self.state_width = self._rule.wide * width + self._rule.single
        """Numbers of a row's state."""
        self.state_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def new_state(self, count: int, settings: Settings) -> torch.Tensor:
        """Return the state of rows without a gradient."""
        value = settings[self._rule.first] if self._rule.first else 0.0
        return torch.full((count, self.state_width), value, dtype=self.state_dtype)

    def step(
        self, values: torch.Tensor, gradients: torch.Tensor, state: torch.Tensor, settings: Settings
    ) -> torch.Tensor:
        """Return the rows after one step; `state` is changed in place.

        Args:
            values: the rows; may be changed.
            gradients: one for each row; not changed.
            state: of the rows.
            settings: those in use now.
        """
        rows, given = (each.to(self.state_dtype).numpy() for each in (values, gradients))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # infinite gradients make NaN, as in torch
            self._rule.step(rows, given, state.numpy(), settings)
        return torch.from_numpy(rows).to(values.dtype)


def rule_named(name: str) -> RowRule:
    """Return an optimizer's rule.

    Raises:
        UsageError: there is none of this name.
    """
    known = rules()
    if name not in known:
        raise UsageError(f"no optimizer of rows has the name {name!r}", f"use one of: {', '.join(known)}")
    return known[name]


def complete(spec: RowOptimizerSpec) -> RowOptimizerSpec:
    """Return a specification with all of the optimizer's settings, the defaults where none is given.

    Raises:
        UsageError: the optimizer or a setting is unknown, out of range, or missing.
    """
    rule = rule_named(spec.name)
    check_settings(spec.name, spec.settings)
    missing = [name for name in _missing(spec) if rule.settings[name].default is None]
    if missing:
        raise UsageError(
            f"optimizer {spec.name!r} without {missing[0]}", f'give it: {{"name": "{spec.name}", "{missing[0]}": ...}}'
        )
    given = {name: spec.settings.get(name, bounds.default) for name, bounds in rule.settings.items()}
    return RowOptimizerSpec(spec.name, {name: float(value) for name, value in given.items() if value is not None})


def _missing(spec: RowOptimizerSpec) -> list[str]:
    return [name for name in rule_named(spec.name).settings if name not in spec.settings]


def check_settings(optimizer: str, settings: Settings) -> None:
    """Check some of an optimizer's settings.

    Raises:
        UsageError: one is unknown or out of range.
    """
    known = rule_named(optimizer).settings
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"optimizer {optimizer!r} has no setting {name!r}", f"its settings: {', '.join(known)}")
        known[name].check(optimizer, name, value)


def rules() -> dict[str, RowRule]:
    """Return all optimizers by name."""
    rate, fraction, none = SettingBounds(None), SettingBounds(0.0, below=1.0), SettingBounds(0.0)
    adagrad = {"lr": rate, "eps": SettingBounds(1e-10), "initial_accumulator": none, "weight_decay": none}
    return {
        "sgd": RowRule({"lr": rate, "momentum": fraction, "weight_decay": none}, 1, 0, _sgd),
        "adagrad": RowRule(adagrad, 1, 0, _adagrad, "initial_accumulator"),
        "rowwise-adagrad": RowRule(adagrad, 0, 1, _rowwise_adagrad, "initial_accumulator"),
        "adam": RowRule(
            {"lr": rate, "beta1": SettingBounds(0.9, below=1.0), "beta2": SettingBounds(0.999, below=1.0),
             "eps": SettingBounds(1e-8), "weight_decay": none}, 2, 1, _adam),
        "ftrl": RowRule(
            {"alpha": SettingBounds(None, above=True), "beta": SettingBounds(1.0), "l1": none, "l2": none},
            2, 0, _ftrl, keeps_initial=False),
        "proximal": RowRule({"lr": rate, "l1": none, "l2": none, "slack": fraction}, 0, 0, _proximal),
    }  # fmt: skip


def _decayed(rows: Array, gradients: Array, settings: Settings) -> Array:
    decay = settings["weight_decay"]
    return gradients + rows * rows.dtype.type(decay) if decay else gradients


def _sgd(rows: Array, gradients: Array, state: Array, settings: Settings) -> None:
    step = _decayed(rows, gradients, settings)
    if settings["momentum"]:
        state *= rows.dtype.type(settings["momentum"])
        state += step
        step = state
    rows -= step * rows.dtype.type(settings["lr"])


def _adagrad(rows: Array, gradients: Array, state: Array, settings: Settings) -> None:
    gradients = _decayed(rows, gradients, settings)
    state += gradients * gradients
    _scaled_step(rows, gradients, state, settings)


def _rowwise_adagrad(rows: Array, gradients: Array, state: Array, settings: Settings) -> None:
    gradients = _decayed(rows, gradients, settings)
    total = np.zeros(len(rows), dtype=rows.dtype)
    for element in range(rows.shape[1]):  # in this order, whatever the number of rows
        total += gradients[:, element] * gradients[:, element]
    state[:, 0] += total / rows.dtype.type(max(1, rows.shape[1]))
    _scaled_step(rows, gradients, state, settings)


def _scaled_step(rows: Array, gradients: Array, sums: Array, settings: Settings) -> None:
    scale = np.sqrt(sums)
    scale += rows.dtype.type(settings["eps"])
    step = gradients * rows.dtype.type(settings["lr"])
    rows -= np.divide(step, scale, out=np.zeros_like(step), where=(scale != 0) | (step != 0))


def _adam(rows: Array, gradients: Array, state: Array, settings: Settings) -> None:
    width, number = rows.shape[1], rows.dtype.type
    gradients = _decayed(rows, gradients, settings)
    beta1, beta2 = settings["beta1"], settings["beta2"]
    mean, square, steps = state[:, :width], state[:, width : 2 * width], state[:, 2 * width]
    steps += 1
    mean += (gradients - mean) * number(1.0 - beta1)
    square *= number(beta2)
    square += gradients * gradients * number(1.0 - beta2)
    count = steps.astype(np.int64)
    rate = (settings["lr"] / (1.0 - powers(beta1, count))).astype(rows.dtype)[:, None]
    correction = np.sqrt(1.0 - powers(beta2, count)).astype(rows.dtype)[:, None]
    scale = np.sqrt(square) / correction
    scale += number(settings["eps"])
    rows -= np.divide(mean, scale, out=np.zeros_like(mean), where=(scale != 0) | (mean != 0)) * rate


def powers(base: float, exponents: Array) -> Array:
    """Return `base` to the power of each exponent by repeated squaring: exact rounding of each product."""
    found, square = np.ones(len(exponents)), base
    left = exponents.copy()
    while len(left) and left.max() > 0:
        found[left & 1 == 1] *= square
        left >>= 1
        square *= square
    return found


def _ftrl(rows: Array, gradients: Array, state: Array, settings: Settings) -> None:
    width, number = rows.shape[1], rows.dtype.type
    sums, squares = state[:, :width], state[:, width:]
    before = np.sqrt(squares)
    squares += gradients * gradients
    root = np.sqrt(squares)
    alpha, l1 = number(settings["alpha"]), number(settings["l1"])
    sums += gradients - (root - before) / alpha * rows
    scale = (root + number(settings["beta"])) / alpha + number(settings["l2"])
    shrunk = np.sign(sums) * l1 - sums
    shrunk[np.abs(sums) <= l1] = 0.0
    rows[:] = np.divide(shrunk, scale, out=np.zeros_like(shrunk), where=scale != 0)


def _proximal(rows: Array, gradients: Array, state: Array, settings: Settings) -> None:
    number = rows.dtype.type
    lr, l1 = number(settings["lr"]), number(settings["l1"])
    inactive = (rows == 0) & (np.abs(gradients) <= l1 * number(1.0 - settings["slack"]))
    moved = rows - gradients * lr
    left = np.abs(moved) - lr * l1
    shrunk = np.sign(moved) * left / (number(1.0) + lr * number(settings["l2"]))
    rows[:] = np.where(left > 0, shrunk, np.where(np.isnan(moved), moved, number(0.0)))
    rows[inactive] = number(-0.0)
