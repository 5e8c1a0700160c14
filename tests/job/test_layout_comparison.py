"""The first difference between what two ranks prepared, as it is shown to users."""

from __future__ import annotations

import msgspec
import pytest

from psctl.job.layout_comparison import difference
from psctl.job.training_messages import Prepare
from psctl.types import Layout, ParameterInfo

WEIGHT = ParameterInfo("weight", (2, 3), "float32", 0)
BIAS = ParameterInfo("bias", (3,), "float32", 0, trainable=False)
RANK0 = Prepare(Layout((WEIGHT, BIAS), "SGD", ({"lr": 0.1, "momentum": 0.9},)), ("running_mean",))


def with_parameters(*parameters: ParameterInfo) -> Prepare:
    return with_layout(parameters=parameters)


def with_layout(**changes: object) -> Prepare:
    return msgspec.structs.replace(RANK0, layout=msgspec.structs.replace(RANK0.layout, **changes))


def test_equal_models_have_no_difference() -> None:
    assert difference(RANK0, msgspec.structs.replace(RANK0)) == ""


def test_ranks_may_differ_in_where_their_parameters_are() -> None:
    assert difference(RANK0, msgspec.structs.replace(RANK0, on_gpus=True)) == ""


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            with_parameters(WEIGHT, msgspec.structs.replace(BIAS, shape=(4,))),
            "parameter 1 is bias [4] float32 frozen in group 0, on worker/0 it is bias [3] float32 frozen in group 0",
        ),
        (
            with_parameters(msgspec.structs.replace(WEIGHT, group=-1), BIAS),
            (
                "parameter 0 is weight [2, 3] float32 in no group of the optimizer, "
                "on worker/0 it is weight [2, 3] float32 in group 0"
            ),
        ),
        (with_parameters(WEIGHT), "parameter 1 is missing, on worker/0 it is bias [3] float32 frozen in group 0"),
        (
            with_parameters(WEIGHT, BIAS, WEIGHT),
            "parameter 2 is weight [2, 3] float32 in group 0, on worker/0 it is missing",
        ),
        (with_layout(optimizer="Adam"), "the optimizer is Adam, on worker/0 it is SGD"),
        (with_layout(optimizer=""), "the optimizer is not fit for servers, on worker/0 it is SGD"),
        (with_layout(groups=()), "the optimizer has 0 groups, on worker/0 it has 1"),
        (
            with_layout(groups=({"lr": 0.2, "momentum": 0.9},)),
            "lr of the optimizer's group 0 is 0.2, on worker/0 it is 0.1",
        ),
        (
            with_layout(groups=({"lr": 0.1, "momentum": 0.9, "nesterov": True},)),
            "nesterov of the optimizer's group 0 is True, on worker/0 it is None",
        ),
        (
            msgspec.structs.replace(RANK0, outer=True),
            "run.prepare was given an outer optimizer, on worker/0 none",
        ),
        (
            msgspec.structs.replace(RANK0, buffers=("running_var",)),
            "a buffer is running_var, on worker/0 it is running_mean",
        ),
        (msgspec.structs.replace(RANK0, buffers=()), "a buffer is missing, on worker/0 it is running_mean"),
        (
            msgspec.structs.replace(RANK0, buffers=("running_mean", "count")),
            "a buffer is count, on worker/0 it is missing",
        ),
    ],
)
def test_the_first_difference_is_named_with_both_sides(other: Prepare, text: str) -> None:
    assert difference(RANK0, other) == text


def test_a_parameter_is_named_before_the_optimizer() -> None:
    other = msgspec.structs.replace(with_parameters(WEIGHT), buffers=())
    assert difference(RANK0, other).startswith("parameter 1 is missing")
