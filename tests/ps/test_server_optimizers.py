"""The optimizers that may step on servers, and the settings that are sent."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from psctl.ps.pieces import Piece
from psctl.ps.server_optimizers import FIT, PieceOptimizer, fit_name, numbers, settings, untouched
from psctl.types import Layout, ParameterInfo


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 2))


@pytest.mark.parametrize("name", FIT)
def test_the_eleven_elementwise_optimizers_can_step_on_servers(name):
    assert fit_name(FIT[name]([parameter()])) == name


def test_there_are_eleven():
    assert set(FIT) == {
        "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD",
    }  # fmt: skip


def test_an_optimizer_that_mixes_elements_is_refused():
    assert fit_name(torch.optim.LBFGS([parameter()])) == ""
    assert fit_name(torch.optim.Adafactor([parameter()])) == ""
    assert fit_name(torch.optim.SparseAdam([parameter()])) == ""


def test_a_subclass_is_refused_even_under_the_same_name():
    class Mine(torch.optim.Adam):
        pass

    Mine.__name__ = "Adam"
    assert fit_name(Mine([parameter()])) == ""
    assert fit_name(torch.optim.Muon([parameter()])) == ""


def test_an_optimizer_with_a_step_hook_is_refused():
    before, after = torch.optim.SGD([parameter()]), torch.optim.SGD([parameter()])
    before.register_step_pre_hook(lambda *_: None)
    after.register_step_post_hook(lambda *_: None)
    assert fit_name(before) == fit_name(after) == ""


def test_every_optimizer_is_refused_under_a_global_hook():
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert fit_name(torch.optim.SGD([parameter()])) == ""
    finally:
        handle.remove()


def test_an_optimizer_with_a_tensor_as_a_number_is_refused():
    assert fit_name(torch.optim.SGD([parameter()], lr=torch.tensor(0.1))) == ""


def test_an_optimizer_with_a_scheduler_is_accepted():
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert fit_name(optimizer) == "SGD"


def test_numbers_exclude_keys_that_schedulers_add():
    optimizer = torch.optim.Adam([parameter()], lr=0.1, betas=(0.5, 0.9))
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    (group,) = numbers(optimizer)
    assert "initial_lr" in optimizer.param_groups[0]
    assert "initial_lr" not in group
    assert (group["lr"], group["betas"], group["fused"]) == (0.1, [0.5, 0.9], None)


def test_settings_are_restored_for_torch_without_options_that_the_cpu_refuses():
    assert settings({"betas": [0.5, 0.9], "capturable": True, "foreach": True}) == {
        "betas": (0.5, 0.9),
        "capturable": False,
        "foreach": True,
    }


def test_state_of_the_constructor_counts_as_fresh_and_state_after_a_step_does_not():
    one = parameter()
    optimizer = torch.optim.Adagrad([one])
    assert untouched(optimizer)
    one.grad = torch.ones(4, 2)
    optimizer.step()
    assert not untouched(optimizer)


def test_pieces_keep_their_state_in_another_buffer():
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


def test_parameters_without_a_group_do_not_change():
    layout = Layout((ParameterInfo("a", (6,), "float32", -1),), "SGD", ({"lr": 1.0},))
    values = torch.zeros(6)
    optimizer = PieceOptimizer(layout, [Piece(0, 0, 0, 6)], values)
    optimizer.step(torch.ones(6), [True], layout.groups)
    assert values.eq(0).all()
    assert optimizer.state(0) == {}


WITHOUT_COMPILER = """
import sys
import torch
from psctl.ps.pieces import Piece
from psctl.ps.server_optimizers import FIT, PieceOptimizer, numbers
from psctl.types import Layout, ParameterInfo

gradients = [torch.linspace(step, -1, 40) for step in range(4)]
found = {}
for name in FIT:
    values = torch.linspace(-1, 1, 40)
    layout = Layout((ParameterInfo("a", (40,), "float32", 0),), name, ({"lr": 0.1},))
    optimizer = PieceOptimizer(layout, [Piece(0, 0, 0, 40)], values)
    for gradient in gradients:
        optimizer.step(gradient.clone(), [True], layout.groups)
    found[name] = values
assert "torch._dynamo" not in sys.modules
for name, kind in FIT.items():
    values = torch.nn.Parameter(torch.linspace(-1, 1, 40))
    optimizer = kind([values], lr=0.1)
    for gradient in gradients:
        values.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(found[name], values), name
"""


def test_servers_step_as_torch_does_and_import_no_compiler():
    """In a process of its own: other tests of this one have imported the compiler."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
