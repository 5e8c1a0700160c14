"""A checkpoint's tensors by parameter, and the check that they match the model."""

from __future__ import annotations

import pytest

from psctl.errors import UsageError
from psctl.ps.snapshot import by_parameter, check_shapes
from psctl.types import Layout, ParameterInfo, TensorSlice


def tensor(name: str, shape: tuple[int, ...] = (4,)) -> TensorSlice:
    return TensorSlice(name, "float32", shape, 0, 4)


def layout(*parameters: ParameterInfo) -> Layout:
    return Layout(parameters, "SGD", ({},))


W = ParameterInfo("net.w", (4,), "float32", 0)
FROZEN = ParameterInfo("net.frozen", (9,), "float32", -1, trainable=False)
SAVED = [
    tensor("param/net.w"),
    tensor("optim/net.w/momentum_buffer"),
    tensor("buffer/net.mean"),
    tensor("store/s/about"),
]


def test_tensors_are_grouped_by_parameter_without_buffers_and_tables() -> None:
    assert by_parameter(SAVED) == {"net.w": SAVED[:2]}


def test_a_checkpoint_of_the_model_passes_and_frozen_parameters_need_no_tensor() -> None:
    check_shapes(layout(W, FROZEN), by_parameter(SAVED), "step-3")


def test_optimizer_state_without_values_is_not_a_parameter() -> None:
    with pytest.raises(UsageError, match=r"step-3 holds no parameter net\.w"):
        check_shapes(layout(W), by_parameter(SAVED[1:]), "step-3")


def test_a_parameter_of_another_shape_is_refused_with_both_shapes() -> None:
    saved = by_parameter([tensor("param/net.w", (2, 2))])
    with pytest.raises(UsageError, match=r"net\.w has shape \(2, 2\), the model's has \(4,\)"):
        check_shapes(layout(W), saved, "step-3")
