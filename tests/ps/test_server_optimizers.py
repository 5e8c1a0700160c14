"""Which optimizers may step on servers, and what of them travels."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from psctl.ps.pieces import Piece
from psctl.ps.server_optimizers import FIT, PieceOptimizer, fit_name, numbers, settings, untouched
from psctl.types import Layout, ParameterInfo


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 2))


@pytest.mark.parametrize("name", FIT)
def test_the_eleven_elementwise_optimizers_are_fit(name):
    assert fit_name(FIT[name]([parameter()])) == name


def test_there_are_eleven():
    assert set(FIT) == {
        "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD",
    }  # fmt: skip


def test_what_mixes_elements_is_not():
    assert fit_name(torch.optim.LBFGS([parameter()])) == ""
    assert fit_name(torch.optim.Adafactor([parameter()])) == ""
    assert fit_name(torch.optim.SparseAdam([parameter()])) == ""


def test_a_subclass_is_not_even_under_the_same_name():
    class Mine(torch.optim.Adam):
        pass

    Mine.__name__ = "Adam"
    assert fit_name(Mine([parameter()])) == ""
    assert fit_name(torch.optim.Muon([parameter()])) == ""


def test_one_with_a_step_hook_is_not():
    before, after = torch.optim.SGD([parameter()]), torch.optim.SGD([parameter()])
    before.register_step_pre_hook(lambda *_: None)
    after.register_step_post_hook(lambda *_: None)
    assert fit_name(before) == fit_name(after) == ""


def test_nor_is_any_while_all_optimizers_have_a_hook():
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert fit_name(torch.optim.SGD([parameter()])) == ""
    finally:
        handle.remove()


def test_one_with_a_tensor_for_a_number_is_not():
    assert fit_name(torch.optim.SGD([parameter()], lr=torch.tensor(0.1))) == ""


def test_a_scheduler_does_not_make_one_unfit():
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert fit_name(optimizer) == "SGD"


def test_numbers_are_those_that_the_optimizer_knows_and_not_a_schedulers_notes():
    optimizer = torch.optim.Adam([parameter()], lr=0.1, betas=(0.5, 0.9))
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    (group,) = numbers(optimizer)
    assert "initial_lr" in optimizer.param_groups[0]
    assert "initial_lr" not in group
    assert (group["lr"], group["betas"], group["fused"]) == (0.1, [0.5, 0.9], None)


def test_settings_come_back_as_torch_takes_them_and_without_what_the_cpu_refuses():
    assert settings({"betas": [0.5, 0.9], "capturable": True, "foreach": True}) == {
        "betas": (0.5, 0.9),
        "capturable": False,
        "foreach": True,
    }


def test_state_from_the_constructor_is_untouched_and_state_after_a_step_is_not():
    one = parameter()
    optimizer = torch.optim.Adagrad([one])
    assert untouched(optimizer)
    one.grad = torch.ones(4, 2)
    optimizer.step()
    assert not untouched(optimizer)


def test_pieces_go_on_with_their_state_when_they_point_to_another_buffer():
    info = ParameterInfo("a", (6,), "float32", 0)
    layout = Layout((info,), "SGD", ({"lr": 1.0, "momentum": 0.5},))
    values = torch.zeros(6)
    optimizer = PieceOptimizer(layout, [Piece(0, 0, 0, 6)], values)
    optimizer.step(torch.ones(6), [True], layout.groups)
    other = values.clone()
    optimizer.set_values(other)
    optimizer.step(torch.ones(6), [True], layout.groups)
    assert values.eq(-1).all()
    assert other.eq(-2.5).all()  # -1 - (0.5 * 1 + 1)


def test_parameters_of_no_group_stand_still():
    layout = Layout((ParameterInfo("a", (6,), "float32", -1),), "SGD", ({"lr": 1.0},))
    values = torch.zeros(6)
    optimizer = PieceOptimizer(layout, [Piece(0, 0, 0, 6)], values)
    optimizer.step(torch.ones(6), [True], layout.groups)
    assert values.eq(0).all()
    assert optimizer.state(0) == {}
