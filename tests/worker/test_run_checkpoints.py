"""A job that continues from a checkpoint is where it was: values, optimizer, scheduler, data, tracked state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from psctl.errors import CheckpointIncomplete, UsageError
from tests.helpers.job_world import Job


def data(count=48) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator), torch.arange(count))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.norm = nn.Linear(6, 16, dtype=torch.float64), nn.BatchNorm1d(16, dtype=torch.float64)
        self.norm.requires_grad_(False)  # its statistics are rank 0's: values must not depend on them here
        self.second = nn.Linear(16, 3, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)

    def forward(self, x):
        self.norm(self.first(x).detach())
        return self.second(torch.tanh(self.first(x)))


class Mean:
    """Tracked state of the script's own."""

    def __init__(self) -> None:
        self.total, self.best, self.seen = torch.zeros(2), math.inf, {}

    def state_dict(self):
        return {"total": self.total, "best": self.best, "seen": self.seen}

    def load_state_dict(self, state) -> None:
        self.total, self.best, self.seen = state["total"], state["best"], state["seen"]


def make_optimizer(net):
    return torch.optim.AdamW(
        [{"params": net.first.parameters(), "lr": 0.05}, {"params": net.second.parameters(), "lr": 0.02}]
    )


def train(run, epochs=3, batch=8, stop_after=None, make=make_optimizer, seen=None, act=lambda run: None, inside=False):
    net, mean = Net(), Mean()
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05][: len(optimizer.param_groups)], 40)
    run.track(mean=mean)
    model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
    loader = run.loader(data(), batch_size=batch)
    began = run.step
    for epoch in run.epochs(epochs):
        if inside:
            loader = run.loader(data(), batch_size=batch)
        for x, y, which in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            mean.total += torch.tensor([1.0, float(epoch)])
            mean.best = min(mean.best, 3.0 - run.step / 100)
            mean.seen[run.step] = epoch
            if seen is not None:
                seen.append((run.step, run.rank, which.tolist()))
            run.report(loss=loss)
            act(run)
            if stop_after is not None and run.step == stop_after:
                return "broke off"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {
        "model": state, "lr": [group["lr"] for group in optimizer.param_groups], "mean": mean.state_dict(),
        "began": began, "ended": run.step, "scheduler": scheduler.last_epoch,
    }  # fmt: skip


def assert_same(one, other, tolerance=1e-12) -> None:
    for name in one["model"]:
        if "norm" not in name:
            torch.testing.assert_close(one["model"][name], other["model"][name], rtol=0, atol=tolerance)
    torch.testing.assert_close(one["mean"]["total"], other["mean"]["total"])
    for key in ("lr", "ended", "scheduler"):
        assert one[key] == other[key], key
    assert one["mean"]["seen"] == other["mean"]["seen"]
    assert one["mean"]["best"] == other["mean"]["best"]


WAYS = [("ps", "server"), ("ps", "worker")]


@pytest.mark.parametrize("at", [4, 8, 12, 16])
def test_a_loader_made_in_every_epoch_continues_where_it_was(at) -> None:
    whole = Job(2, 1, every=4)
    expected = whole.run(lambda run: train(run, inside=True))
    seen: list = []
    rest = Job(2, 1, resume=whole.saved[at]).run(lambda run: train(run, inside=True, seen=seen))
    for result, other in zip(rest, expected, strict=True):
        assert_same(result, other)
    for epoch in range(at // 6, 3):  # epochs have 6 steps: those that are left of this one, and all of the later
        left = range(max(at, 6 * epoch) + 1, 6 * epoch + 7)
        taken = [one for step, _, examples in seen if step in left for one in examples]
        assert len(set(taken)) == len(taken) == 8 * len(left)


@pytest.mark.parametrize(("strategy", "update"), WAYS)
def test_a_resumed_job_takes_the_same_steps_on_another_number_of_workers(strategy, update) -> None:
    whole_seen: list = []
    whole = Job(2, 2, strategy, update).run(lambda run: train(run, seen=whole_seen))
    first = Job(2, 1, strategy, update, every=4)
    first.run(train)
    assert sorted(first.saved) == [4, 8, 12, 16, 18]
    for workers, servers in ((2, 2), (3, 1), (1, 1)):
        seen: list = []
        rest = Job(workers, servers, strategy, update, resume=first.saved[8]).run(
            lambda run, to=seen: train(run, seen=to)
        )
        assert rest[0]["began"] == 8
        for result in rest:
            assert_same(result, whole[0])
        assert joined(seen) == {step: which for step, which in joined(whole_seen).items() if step > 8}


def joined(seen):
    found: dict[int, list[int]] = {}
    for step, _, which in sorted(seen):
        found.setdefault(step, []).extend(which)
    return found


def test_the_same_number_of_workers_continues_to_the_bit() -> None:
    whole = Job(2, 1, update="server").run(train)[0]
    first = Job(2, 1, update="server", every=5)
    first.run(train)
    rest = Job(2, 2, update="server", resume=first.saved[5]).run(train)[0]
    for name, value in whole["model"].items():
        assert torch.equal(value, rest["model"][name]), name


@pytest.mark.parametrize(
    ("before", "after"), [(("ps", "server"), ("ps", "worker")), (("ps", "worker"), ("ps", "server"))]
)
def test_a_checkpoint_of_one_strategy_resumes_under_another(before, after) -> None:
    whole = Job(2, 1, *before).run(train)[0]
    first = Job(2, 1, *before, every=7)
    first.run(train)
    assert_same(Job(2, 2, *after, resume=first.saved[7]).run(train)[0], whole)


@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_checkpoint_of_the_last_step_gives_no_more_steps_and_the_tail_runs_with_its_values(update) -> None:
    first = Job(2, 1, update=update)
    whole = first.run(train)
    assert list(first.saved) == [18], "the last step is saved without being asked"
    assert first.finished == {0: 18, 1: 18}
    second = Job(3, 2, update=update, resume=first.saved[18])
    for result in second.run(train):
        assert result["began"] == 18
        assert_same(result, whole[0])
        for name in ("norm.running_mean", "norm.num_batches_tracked"):
            assert torch.equal(result["model"][name], whole[0]["model"][name])
    assert not second.saved, "nothing new to save"


def test_a_checkpoint_holds_everything_by_name() -> None:
    job = Job(2, 2, update="server")
    job.run(train)
    saved = job.saved[18]
    assert {"param/first.weight", "param/norm.weight", "optim/first.weight/exp_avg", "optim/second.bias/step",
            "buffer/norm.running_mean", "track/mean/total"} <= set(saved.tensors)  # fmt: skip
    assert {"step": 18, "epoch": 3, "clock": 0, "world": 2, "seed": 0}.items() <= saved.state.items()
    assert saved.state["groups"][1]["lr"] > 0
    assert saved.state["scheduler"]["last_epoch"] == 18
    assert saved.tensor("track/mean/total").tolist() == [18.0, 6 * 1.0 + 6 * 2.0]


def test_things_tracked_after_prepare_are_restored_too() -> None:
    def script(run):
        net = Net()
        run.prepare(net, make_optimizer(net))
        mean = Mean()
        run.track(mean=mean)
        return mean.total.tolist()

    first = Job(1, 1)
    first.run(train)
    assert Job(2, 1, resume=first.saved[18]).run(script) == [[18.0, 18.0]] * 2


@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_loop_that_is_left_early_still_saves_its_last_step(update) -> None:
    whole = Job(2, 1, update=update).run(train)[0]
    job = Job(2, 2, update=update)
    job.run(lambda run: train(run, stop_after=5))
    assert list(job.saved) == [5]
    assert_same(Job(2, 1, update=update, resume=job.saved[5]).run(train)[0], whole)


def test_a_proposed_cut_saves_the_same_step_everywhere_and_training_continues() -> None:
    job = Job(3, 2, update="server")
    job.run(lambda run: train(run, act=lambda r: job.propose() if (r.step, r.rank) == (6, 1) else None))
    assert len(job.saved) == 2
    assert all(len(saved.ended) == 5 for saved in job.saved.values()), "all ranks and both servers sent the same steps"
    assert 7 <= min(job.saved) <= 9
    assert job.finished == {0: 18, 1: 18, 2: 18}


@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_stop_saves_and_leaves_and_the_next_job_resumes(update) -> None:
    whole = Job(2, 1, update=update).run(train)[0]
    job = Job(2, 1, update=update)
    results = job.run(
        lambda run: train(run, act=lambda r: job.propose(stop=True) if (r.step, r.rank) == (9, 0) else None)
    )
    assert results == ["stopped", "stopped"]
    (step,) = job.saved
    assert job.finished == {0: step, 1: step}
    assert_same(Job(1, 2, update=update, resume=job.saved[step]).run(train)[0], whole)


def test_a_stop_without_saving_saves_nothing() -> None:
    job = Job(2, 1)
    job.run(
        lambda run: train(
            run, act=lambda r: job.propose(save=False, stop=True) if r.step == 9 and r.rank == 0 else None
        )
    )
    assert not job.saved


def test_with_a_loader_of_ones_own_reports_are_the_points_of_rest() -> None:
    def script(run, stop=False):
        net = Net()
        model, optimizer = run.prepare(net, make_optimizer(net))
        for _ in run.epochs(2):
            for x, y, _ in DataLoader(data(), batch_size=16):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                run.report(loss=loss)
                if stop and run.step == 3 and run.rank == 0:
                    job.propose(stop=True)
        return run.step

    job = Job(2, 1, every=2)
    assert job.run(script) == [6, 6]
    assert sorted(job.saved) == [2, 4, 6]
    job = Job(2, 1)
    assert job.run(lambda run: script(run, stop=True)) == ["stopped", "stopped"]
    assert next(iter(job.saved)) in (4, 5, 6)  # who computes ahead learns of it a step later


def test_a_scheduler_step_at_the_end_of_an_epoch_is_in_its_checkpoint() -> None:
    def script(run):
        net = Net()
        optimizer = make_optimizer(net)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.1)
        model, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
        loader = run.loader(data(), batch_size=16)
        rates = []
        for _ in run.epochs(3):
            for x, y, _ in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                rates.append(round(optimizer.param_groups[0]["lr"], 6))
            scheduler.step()
        return rates

    job = Job(2, 1, every=3)
    rates = job.run(script)[0]
    assert rates == [0.05] * 3 + [0.005] * 3 + [0.0005] * 3
    assert Job(2, 1, resume=job.saved[3]).run(script)[0] == rates[3:]


def test_another_model_or_optimizer_than_the_checkpoints_is_named() -> None:
    job = Job(1, 1, update="worker")
    job.run(train)

    def other_model(run):
        net = nn.Linear(3, 3)
        run.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))

    def other_groups(run):
        net = Net()
        run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1.0))

    with pytest.raises(CheckpointIncomplete, match="job-1@18 has no param/weight"):
        Job(1, 1, update="worker", resume=job.saved[18]).run(other_model)
    with pytest.raises(UsageError, match=r"has 2 groups, the script.s 1"):
        Job(1, 1, update="worker", resume=job.saved[18]).run(other_groups)


def test_metrics_are_means_weighted_by_examples_and_late_ones_belong_to_the_last_step() -> None:
    def script(run):
        net = nn.Linear(1, 1)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for (x,) in run.loader(TensorDataset(torch.arange(7.0).reshape(7, 1)), batch_size=5, shuffle=False):
                optimizer.zero_grad()
                model(x).mean().backward()
                run.report(early=x.mean())
                optimizer.step()
                run.report(late=x.mean())
        run.report(accuracy=0.25 * (1 + run.rank))

    job = Job(2, 1)
    job.run(script)
    metrics = job.metrics()
    assert metrics[1] == {"early": pytest.approx(2.0), "late": pytest.approx(2.0)}
    assert metrics[2] == {"early": pytest.approx(5.5), "late": pytest.approx(5.5), "accuracy": pytest.approx(0.375)}
    assert sum(report.examples for _, report in job.reports) == 7
    assert all(
        report.sync_seconds >= 0 and all(min(each[1:]) >= 0 for each in report.moved) for _, report in job.reports
    )


def test_what_a_rank_reported_of_a_step_is_sent_before_its_checkpoint() -> None:
    def script(run):
        net = nn.Linear(1, 1)
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for (x,) in run.loader(TensorDataset(torch.arange(12.0).reshape(12, 1)), batch_size=2, shuffle=False):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                run.report(at=run.step)

    job = Job(2, 1, every=2, report_seconds=3600.0)
    job.run(script)
    assert sorted(job.reported) == [2, 4, 6]
    for step, of_step in job.reported.items():
        assert of_step == (step, {"at": float(step)}), "rank 0's, when its part of the checkpoint began"
    for rank in range(2):
        assert {report.rested for sender, report in job.reports if sender == rank} >= {2, 4, 6}
