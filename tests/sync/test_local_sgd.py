"""`period: H`: ranks step alone, synchronize every H steps, and continue from the joint change; H = 1 is bsp."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from psctl.client.model_layout import describe
from psctl.clock import SystemClock
from psctl.errors import UsageError
from psctl.job.training_messages import Decision
from psctl.sync.build_synchronizer import Tools, build_synchronizer
from psctl.sync.synchronizer import ExampleWeight
from psctl.train_state.training_parts import TrainingParts
from psctl.worker.run import Run
from psctl.worker.standalone import StandaloneSession
from tests.helpers.job_world import Job

ROWS, BATCH = 64, 8  # 8 steps an epoch, 4 examples a rank


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (ROWS,), generator=generator))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(6, 16, dtype=torch.float64)
        self.second = nn.Linear(16, 3, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02)


def averaging(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(run: Run, make=adam, outer=None, epochs=2, at=lambda run: None):
    model = Net()
    model, optimizer = run.prepare(model, make(model.parameters()), outer=outer)
    loader = run.loader(data(), batch_size=BATCH)
    for _ in run.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            at(run)
    return [parameter.detach().clone() for parameter in model.parameters()], run._synchronizer.bytes_moved


def play(make=adam, outer=None, epochs=2, at=lambda run: None, **options):
    job = Job(workers=2, servers=2, update="worker", **options)
    return job, job.run(lambda run: train(run, make, outer, epochs, at))


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def near(one, other, tolerance=1e-12) -> bool:
    return all((a - b).abs().max() <= tolerance for a, b in zip(one, other, strict=True))


def test_all_ranks_have_the_same_values_at_the_end() -> None:
    for period in (3, 4):  # 16 steps: with 3 the last period is cut short
        _, results = play(period=period)
        assert equal(results[0][0], results[1][0])


def test_with_one_step_a_period_it_is_bsp() -> None:
    _, bsp = play(make=sgd)
    _, one = play(make=sgd, outer=averaging)
    assert near(bsp[0][0], one[0][0])


class Whole(nn.Module):
    """Its gradients and steps are multiples of 1/8, so sums are exact whatever their order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(50, dtype=torch.float64))


def exact(run: Run, outer=None):
    model = Whole()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25), outer=outer)
    x = torch.arange(50, dtype=torch.float64)
    for step in range(6):
        optimizer.zero_grad()
        ((x - run.rank) * (step + 1) * model.weight + (model.weight * 2) ** 2 / 8).sum().backward()
        optimizer.step()
    return model.weight.detach().clone()


def test_with_one_step_a_period_it_is_bsp_to_the_bit_where_sums_are_exact() -> None:
    bsp = Job(workers=2, servers=1, update="worker").run(exact)
    one = Job(workers=2, servers=1, update="worker").run(lambda run: exact(run, averaging))
    assert torch.equal(bsp[0], one[0])
    assert bsp[0].abs().max() > 10


def test_it_is_local_sgd_by_hand() -> None:
    period, outer = 4, nesterov
    _, results = play(make=sgd, outer=outer, period=period)
    shared = Net()
    slow = outer(list(shared.parameters()))
    batches: list[list[list[torch.Tensor]]] = [[], []]
    Job(workers=2, servers=1, update="worker").run(lambda one: batches[one.rank].extend(drawn(one)))
    for begin in range(0, 16, period):
        changes = []
        for rank in range(2):
            local = Net()
            local.load_state_dict(shared.state_dict())
            quick = sgd(local.parameters())
            for x, y in batches[rank][begin : begin + period]:
                quick.zero_grad()
                functional.cross_entropy(local(x), y).backward()
                quick.step()
            changes.append(
                [a.detach() - b.detach() for a, b in zip(shared.parameters(), local.parameters(), strict=True)]
            )
        for parameter, one, other in zip(shared.parameters(), *changes, strict=True):
            parameter.grad = (one + other) / 2
        slow.step()
    assert near(results[0][0], [parameter.detach() for parameter in shared.parameters()])


def drawn(run: Run):
    """The batches that a rank is given, without training."""
    model = Net()
    model, optimizer = run.prepare(model, sgd(model.parameters()))
    for _ in run.epochs(2):
        for x, y in run.loader(data(), batch_size=BATCH):
            yield x, y
            optimizer.step()


def test_bytes_fall_by_the_period() -> None:
    moved = {period: play(period=period)[1][0][1] for period in (1, 4, 8)}
    assert moved[1] == pytest.approx(4 * moved[4], rel=0.35)  # start values and messages beside
    pushed = moved[1] - moved[4]
    assert pushed / (moved[4] - moved[8]) == pytest.approx(12 / 2, rel=0.02)


@pytest.mark.parametrize("outer", [None, nesterov])
def test_a_resumed_job_equals_the_undisturbed_one_to_the_bit(outer) -> None:
    job, whole = play(outer=outer, period=4, every=6)
    assert sorted(job.saved) == [8, 12, 16]  # the first period's end at or after 6 and 12, and the last step
    names = set(job.saved[8].tensors)
    assert "local/1/first.weight/exp_avg" in names
    assert ("outer/first.weight/momentum_buffer" in names) == (outer is not None)
    _, again = play(outer=outer, period=4, every=6, resume=job.saved[8])
    assert equal(whole[0][0], again[0][0])
    assert equal(whole[1][0], again[1][0])


def test_a_common_step_is_a_periods_end() -> None:
    job = Job(workers=2, servers=1, update="worker", period=4)
    first = iter([True])

    def at(run: Run) -> None:
        if run.rank == 0 and run.step == 1 and next(first, False):
            job.propose(save=True, stop=True)

    assert job.run(lambda run: train(run, adam, None, 40, at)) == ["stopped", "stopped"]
    (step,) = job.saved
    assert step % 4 == 0
    assert set(job.finished.values()) == {step}


def test_a_script_with_a_loader_of_its_own_may_end_within_a_period() -> None:
    def script(run: Run):
        torch.manual_seed(run.rank)
        model = Net()
        model, optimizer = run.prepare(model, sgd(model.parameters()))
        for x, y in DataLoader(data(), batch_size=10, shuffle=True):  # 7 steps
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            run.report()
        return model

    job = Job(workers=2, servers=1, update="worker", period=4)
    models = job.run(script)
    ends = [[parameter.detach() for parameter in model.parameters()] for model in models]
    assert equal(*ends)
    assert torch.equal(job.saved[7].tensor("param/first.weight"), ends[0][0])


def test_uneven_shares_weigh_by_examples() -> None:
    """Three rows a step for two ranks: two and one."""

    def script(run: Run):
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        rows = torch.arange(6, dtype=torch.float64)[:, None]
        for _ in run.epochs(1):
            for (x,) in run.loader(TensorDataset(rows), batch_size=3, shuffle=False):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        return model.weight.item()

    results = Job(workers=2, servers=1, update="worker", period=2).run(script)
    first, second = (0 + 1) / 2 + (3 + 4) / 2, 2 + 5  # what each rank's two steps subtract
    assert results == [pytest.approx(-(4 * first + 2 * second) / 6)] * 2


@pytest.mark.soak
def test_digits_are_read_as_well_with_eight_steps_a_period() -> None:
    digits = runpy.run_path(str(Path(__file__).parents[2] / "templates" / "digits" / "train.py"))
    training, held_out = digits["digits"]()

    def script(run: Run) -> tuple[float, int]:
        net = digits["Net"]()
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
        for _ in run.epochs(20):
            for pixels, labels in run.loader(training, batch_size=64):
                optimizer.zero_grad()
                functional.cross_entropy(model(pixels), labels).backward()
                optimizer.step()
            scheduler.step()
        return digits["accuracy"](model, held_out, run.device), run._synchronizer.bytes_moved

    jobs = {period: Job(workers=2, servers=1, update="worker", target=1 << 20, period=period) for period in (1, 8)}
    (bsp, all_bytes), (local, few_bytes) = (jobs[period].run(script)[0] for period in (1, 8))
    assert bsp > 0.97
    assert local > bsp - 0.01
    assert few_bytes < all_bytes / 7


def test_alone_the_outer_optimizer_steps_on_its_own_change() -> None:
    run = Run(StandaloneSession(0, 1, "alone", 0), None, SystemClock())
    values, moved = train(run, sgd, averaging)
    run.finish()
    plain = Run(StandaloneSession(0, 1, "alone", 0), None, SystemClock())
    assert near(values, train(plain, sgd)[0])
    assert moved == 0


def test_what_cannot_be_is_refused_with_a_cure() -> None:
    with pytest.raises(UsageError, match=r"given no optimizer"):
        Job(workers=2, servers=1, update="worker", period=4).run(lambda run: run.prepare(Net()))
    with pytest.raises(UsageError, match=r"no torch.optim.Optimizer"):
        play(outer=lambda parameters: parameters)
    with pytest.raises(UsageError, match=r"other parameters"):
        play(outer=lambda parameters: sgd(parameters[:1]))
    parts = TrainingParts(Net(), None, None)
    with pytest.raises(UsageError, match=r"which lets workers step alone"):
        build_synchronizer(
            parts, Decision("ps", "server", describe(parts.model, None), []),
            Tools(StandaloneSession(0, 1, "ps"), 1, None, ExampleWeight(1), SystemClock(), None, nesterov),
        )  # fmt: skip
