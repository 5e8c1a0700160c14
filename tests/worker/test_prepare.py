"""The prepared model and optimizer are the user's own, and mistakes under servers are named with their cures."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from psctl.clock import SystemClock
from psctl.errors import UsageError
from psctl.sync.value_waits import wait_points
from psctl.worker import init
from psctl.worker.run import Run
from psctl.worker.standalone import StandaloneSession
from tests.helpers.job_world import Job

X = torch.linspace(-1, 1, 12).reshape(4, 3)
Y = torch.tensor([0, 1, 1, 0])


class Net(nn.Module):
    kind = "a net of mine"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 2)
        chance = torch.Generator().manual_seed(3)  # each worker of a test is a thread; torch's own generator is shared
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.uniform_(-0.5, 0.5, generator=chance)

    def forward(self, x):
        return self.layer(self.norm(x))

    def mine(self) -> str:
        return "still here"


def lone() -> Run:
    return Run(StandaloneSession(0, 1, "alone"), None, SystemClock())


def one_step(model, optimizer) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(X), Y).backward()
    optimizer.step()


def served(script, workers=1, **options):
    return Job(workers, 1, update="server", **options).run(script)


def test_prepare_returns_as_many_as_it_was_given_and_they_are_the_same_objects() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert lone().prepare(net) is net
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = lone().prepare(net, optimizer)
    assert given[0] is net
    assert given[1] is optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert len(lone().prepare(net, optimizer, scheduler)) == 3


def test_the_prepared_model_is_of_the_users_class_in_every_synchronizer_people_look() -> None:
    def script(run):
        net = Net()
        before = repr(net), list(net.state_dict())
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert isinstance(model, Net)
        assert (repr(model), list(model.state_dict())) == before
        assert type(model).__name__ == "Net"
        assert model.mine() == "still here"
        assert model.kind == "a net of mine"

    served(script)


def test_copies_and_pickles_of_the_model_are_plain_and_have_the_newest_values() -> None:
    def script(run):
        net = Net()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        one_step(model, optimizer)
        twin = copy.deepcopy(model)
        assert type(twin) is Net
        assert not any(module._forward_pre_hooks for module in twin.modules())
        torch.testing.assert_close(twin(X), model(X))
        one_step(model, optimizer)
        file = io.BytesIO()
        torch.save(model, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert type(again) is Net
        assert type(pickle.loads(pickle.dumps(model))) is Net
        model.eval(), again.eval()
        torch.testing.assert_close(again(X), model(X))
        part = copy.deepcopy(model.layer)
        one_step(model, optimizer)
        assert not torch.equal(part.weight, model.state_dict()["layer.weight"])
        part(X)
        return

    served(script)


def test_an_averaged_model_can_be_made_of_the_prepared_one() -> None:
    def script(run):
        net = Net()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        one_step(model, optimizer)
        ema.update_parameters(model)
        ema(X)
        return ema.module.layer.weight.clone(), model.state_dict()["layer.weight"].clone()

    ((average, weight),) = served(script)
    torch.testing.assert_close(average, weight)


def test_values_change_only_at_wait_points() -> None:
    def script(run):
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.1)
        held = net[2].weight
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        before = held.detach().clone()
        one_step(model, optimizer)
        assert torch.equal(held, before), "nothing asked for the new values yet"
        model.zero_grad()
        assert torch.equal(held, before), "gradients are no values"
        model[0](X)
        assert torch.equal(held, before), "another block's forward"
        run.wait()
        assert not torch.equal(held, before)
        before = held.detach().clone()
        one_step(model, optimizer)
        model[2](torch.ones(1, 4))
        assert not torch.equal(held, before), "its own block's forward"
        one_step(model, optimizer)
        before = held.detach().clone()
        list(model.parameters())
        assert not torch.equal(held, before)

    served(script)


def test_a_block_waits_for_its_subtree_and_a_plain_container_for_nothing() -> None:
    class Mine(nn.Sequential):
        pass

    tied = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(2, 2), Mine(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([tied, tied]))
    model.add_module("head", nn.Linear(2, 2))
    model[3].weight = tied.weight
    parameters = list(model.parameters())
    name = {id(parameter): name for name, parameter in model.named_parameters()}
    waits = {
        id(module): {name[id(parameters[place])] for place in places}
        for module, places in wait_points(model, parameters)
    }
    shared = {"2.0.weight"}
    assert waits[id(model)] == shared
    assert waits[id(model[0])] == {"0.weight", "0.bias"} | shared
    assert waits[id(model[1])] == {"1.0.weight", "1.0.bias"} | shared
    assert waits[id(model[2])] == shared
    assert waits[id(model[3])] == {"head.bias"} | shared


def test_attention_waits_for_the_projection_that_it_reads_without_calling() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    places = {id(module): wanted for module, wanted in wait_points(model, list(model.parameters()))}
    assert places[id(model[0])] == {0, 1, 2, 3}


def test_schedulers_made_before_and_after_prepare_work_without_a_warning() -> None:
    def script(run):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        early = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, early = run.prepare(net, optimizer, early)
        late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        one_step(model, optimizer)
        early.step()
        late.step()
        one_step(model, optimizer)
        return optimizer.param_groups[0]["lr"], run.step

    assert served(script) == [(0.025, 2)]
    assert script(lone()) == (0.025, 2)


def test_a_closure_is_evaluated_once() -> None:
    def script(run):
        net = Net()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach()), run.step

    assert served(script) == [script(lone())]


@pytest.mark.parametrize(
    ("spoil", "cure"),
    [
        (lambda m, o, r: nn.utils.clip_grad_norm_(m.parameters(), 0.1), "run.clip_grad_norm"),
        (lambda m, o, r: m.layer.weight.grad.mul_(2), "update: worker"),
        (lambda m, o, r: o.zero_grad(), "run.accumulate"),
        (lambda m, o, r: functional.cross_entropy(m(X), Y).backward(), "run.accumulate"),
    ],
    ids=["torch's clipping", "a write", "zero_grad", "a second backward"],
)
def test_a_gradient_that_changed_after_its_push_is_an_error_with_the_cures(spoil, cure) -> None:
    def script(run):
        net = Net()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        functional.cross_entropy(model(X), Y).backward()
        spoil(model, optimizer, run)
        optimizer.step()

    with pytest.raises(UsageError, match=r"parameter \w+\.(weight|bias)") as caught:
        served(script)
    assert cure in caught.value.hint


def test_what_torch_offers_works_on_the_joint_gradient_under_update_worker() -> None:
    def script(run):
        net = Net()
        model, optimizer = run.prepare(net, torch.optim.LBFGS(net.parameters(), lr=0.1))
        assert run._synchronizer.update == "worker"
        scaler = torch.amp.GradScaler("cpu")
        net2 = net

        def closure():
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(X), Y)
            loss.backward()
            nn.utils.clip_grad_norm_(net2.parameters(), 0.5)
            return loss

        optimizer.step(closure)
        del scaler
        return {name: value.clone() for name, value in model.state_dict().items()}

    two = Job(2, 1).run(script)
    one = script(lone())
    for name in one:
        torch.testing.assert_close(two[1][name], one[name])


def test_gradscaler_skips_a_step_on_every_rank_alike() -> None:
    def script(run):
        net = Net()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, float("inf") if run.rank == 0 else 1.0, 1.0):
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(X), Y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return run.step, scaler.get_scale(), model.layer.weight.detach().clone()

    (steps, scale, weight), other = Job(2, 1, update="worker").run(script)
    assert (steps, scale) == (2, 2.0) == other[:2]
    assert torch.equal(weight, other[2])


def test_accumulated_gradients_are_sent_once_and_match_one_backward() -> None:
    def script(run, pieces):
        net = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            net.weight.fill_(0.2), net.bias.zero_()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x, y = X.double(), Y
        for _ in range(3):
            optimizer.zero_grad()
            for part in range(pieces):
                size = 4 // pieces
                rows = slice(part * size, part * size + size)
                loss = functional.cross_entropy(model(x[rows]), y[rows]) / pieces
                if part < pieces - 1:
                    with run.accumulate():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    one = script(lone(), 1)
    for update in ("server", "worker"):
        for result in Job(2, 1, update=update).run(lambda run: script(run, 2)):
            torch.testing.assert_close(result["weight"], one["weight"], rtol=0, atol=1e-12)


def test_a_step_whose_backwards_were_all_accumulated_is_still_joint() -> None:
    def script(run):
        net = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            net.weight.fill_(0.2)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        with run.accumulate():
            (model(X).sum() * (run.rank + 1)).backward()
        optimizer.step()
        return model.state_dict()["weight"].clone()

    for update in ("server", "worker"):
        first, second = Job(2, 1, update=update).run(script)
        assert torch.equal(first, second)


def test_a_parameter_without_gradient_stays_and_one_of_some_ranks_counts() -> None:
    class Sides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.never = (nn.Linear(3, 2, bias=False, dtype=torch.float64) for _ in range(3))
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.fill_(0.5)

    def script(run):
        net = Sides()
        model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            side = model.left if run.rank == 0 else model.right
            side(X.double()).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    for update in ("server", "worker"):
        first, second = Job(2, 1, update=update).run(script)
        for name in first:
            assert torch.equal(first[name], second[name]), name
        assert (first["never.weight"] == 0.5).all(), "a zero gradient would have let weight decay move it"
        assert (first["left.weight"] != 0.5).all()
        assert (first["right.weight"] != 0.5).all()


def test_start_values_are_rank_0s_frozen_ones_and_buffers_too() -> None:
    def script(run):
        net = Net()
        net.extra = nn.Linear(2, 2)
        with torch.no_grad():
            for tensor in [*net.parameters(), net.norm.running_mean]:
                tensor.fill_(run.rank + 1)
        for parameter in net.extra.parameters():
            parameter.requires_grad_(False)
        net.register_buffer("mask", torch.full((2,), float(run.rank)), persistent=False)
        model, _ = run.prepare(net, torch.optim.SGD(net.layer.parameters(), lr=0.1))
        return [
            *(one.detach().clone() for one in model.parameters()),
            model.norm.running_mean.clone(),
            model.mask.clone(),
        ]

    for update in ("server", "worker"):
        results = Job(3, 2, update=update).run(script)
        for one, other, third in zip(*results, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, third)
        assert (results[2][0] == 1).all()


def test_tied_weights_and_channels_last_parameters_train_as_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 70, 3, dtype=torch.float64)
            self.inner = nn.Linear(70, 70, bias=False, dtype=torch.float64)
            self.outer = nn.Linear(70, 70, bias=False, dtype=torch.float64)
            self.outer.weight = self.inner.weight
            generator = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for one in self.parameters():
                    one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) * 0.1)
            self.to(memory_format=torch.channels_last)

        def forward(self, x):
            return self.outer(self.inner(self.conv(x).mean((2, 3))))

    def script(run):
        net = Tied()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    one = script(lone())
    for update in ("server", "worker"):
        for result in Job(2, 2, update=update, target=4096).run(script):
            for name in one:
                torch.testing.assert_close(result[name], one[name], rtol=0, atol=1e-12)


def test_without_an_optimizer_each_backward_is_a_step() -> None:
    def script(run):
        net = nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            net.weight.fill_(0.3)
        model = run.prepare(net)
        for _ in range(3):
            model.zero_grad()
            (model(X).square().mean() * (run.rank + 1)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        return run.step, model.weight.detach().clone()

    (steps, weight), (_, other) = Job(2, 1).run(script)
    assert steps == 3
    assert torch.equal(weight, other)
    assert script(lone())[0] == 3


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda r: r.prepare("net"), "no torch.nn.Module"),
        (lambda r: r.prepare(nn.ReLU()), "nothing to train"),
        (lambda r: r.prepare(Net(), Net()), r"no torch.optim.Optimizer"),
        (lambda r: r.prepare(Net(), torch.optim.SGD(Net().parameters(), lr=1.0)), "is not a parameter of Net"),
        (lambda r: (r.prepare(Net()), r.prepare(Net())), "called twice"),
        (lambda r: r.prepare(nn.LazyLinear(2)), "no shape yet"),
        (lambda r: r.clip_grad_norm(1.0), "before run.prepare"),
    ],
)
def test_what_cannot_be_prepared_is_refused_with_the_reason(give, says) -> None:
    with pytest.raises(UsageError, match=says):
        give(lone())


def test_load_state_dict_is_refused_where_servers_hold_the_values() -> None:
    def script(run):
        net = Net()
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        model.load_state_dict(net.state_dict())

    with pytest.raises(UsageError, match="servers hold its values"):
        served(script)


def test_sparse_gradients_are_refused_by_name() -> None:
    def script(run):
        net = nn.Embedding(5, 2, sparse=True)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        model(torch.tensor([1])).sum().backward()

    with pytest.raises(UsageError, match="sparse gradient"):
        served(script)


def test_a_trainable_parameter_that_cannot_be_summed_is_refused_by_name() -> None:
    def script(run):
        net = nn.Linear(2, 2, dtype=torch.complex64)
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    with pytest.raises(UsageError, match="weight is trainable and of type complex64, which cannot be summed"):
        served(script)


def test_an_optimizer_that_gained_a_group_is_reported() -> None:
    def script(run):
        net = Net()
        model, optimizer = run.prepare(net, torch.optim.SGD(net.layer.parameters(), lr=0.1))
        optimizer.add_param_group({"params": list(net.norm.parameters())})
        one_step(model, optimizer)

    with pytest.raises(UsageError, match="add_param_group"):
        served(script)


def test_under_torchrun_a_store_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="torchrun"):
        init.make_standalone_run(0, 1, "native").store()
