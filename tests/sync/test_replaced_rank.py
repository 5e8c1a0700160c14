"""A lost worker of a collective is replaced while the others keep their values: the same bits, wherever it was lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psctl.train_state import random_generators
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job, Killed
from tests.helpers.running import until

EPOCHS, EXAMPLES, BATCH = 3, 24, 6
WORLD = 3
STEPS = EPOCHS * EXAMPLES // BATCH
SMALL = 100
"""Bytes of a bucket, of which the model below has four."""

KILL_FROM = 3
"""The step after which heartbeats have reported what the coordinator must know."""


@pytest.fixture(autouse=True)
def no_numbers_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are threads here and share the generators, so each would seem to draw numbers between steps."""
    monkeypatch.setattr(random_generators.GeneratorStates, "differing", lambda self, before: {})


class Training:
    """A training; `deaths` are (rank, step, place) of the script."""

    def __init__(self, *deaths, buffers=True) -> None:
        self.deaths, self.buffers = list(deaths), buffers
        self.starts: list[tuple[int, int]] = []
        self.job: Job | None = None

    def run(self, folder, deaths=None, strategy="ring", hosts=(0, 1, 0), **terms):
        self.planes = planes = DyingPlanes(folder, hosts, deaths or {}, shared=terms.pop("shared", False))
        options = terms.pop("options", {})
        self.job = Job(workers=WORLD, servers=0, strategy=strategy, planes=planes, **({"bucket": SMALL} | terms))
        self.job.options = options
        try:
            return self.job.run(self)
        except BaseException:
            print(*[str(each)[:200] for each in self.job.events if type(each).__name__ != "StateChanged"], sep="\n")
            raise
        finally:
            planes.close()

    def __call__(self, run):
        middle = nn.BatchNorm1d(5) if self.buffers else nn.Identity()
        model = nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 5), nn.Linear(5, 2)).double()
        with torch.no_grad():  # without random numbers: workers are threads, which share the generator
            for number, one in enumerate(model.parameters()):
                one.copy_((torch.arange(one.numel()).double() + 3 * number).sin().reshape(one.shape) / 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        self._die(run, "before prepare")
        model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
        self.starts.append((run.rank, run.step))
        points = torch.arange(4 * EXAMPLES, dtype=torch.float64).reshape(EXAMPLES, 4).sin()
        loader = run.loader(list(points), batch_size=BATCH)
        for _ in run.epochs(EPOCHS):
            for x in loader:
                if run.step == KILL_FROM:
                    until(self._may_lose, 10)
                    self.planes.arm()
                optimizer.zero_grad()
                self._die(run, "before the forward")
                loss = model(x).square().mean()
                self._die(run, "after the forward")
                loss.backward()
                self._die(run, "after the backward")
                optimizer.step()
                self._die(run, "after the step")
                scheduler.step()
        state = {name: one.clone() for name, one in model.state_dict().items()}
        return run.step, state, [one["momentum_buffer"].clone() for one in optimizer.state.values()]

    def _may_lose(self) -> bool:
        job = self.job.machine.job
        return bool(job.losses.survived) or all(one.shares for one in job.live("worker"))

    def _die(self, run, place: str) -> None:
        if (run.rank, run.step, place) in self.deaths:
            self.deaths.remove((run.rank, run.step, place))
            raise Killed

    def replaced(self) -> int:
        """Return how many starts of workers the job had beyond the first ones."""
        return len(self.starts) - WORLD


_EXPECTED: dict = {}


def expected(folder, strategy: str, *, buffers: bool = True):
    """Return what an undisturbed run gives; made once for each strategy."""
    key = strategy, buffers
    if key not in _EXPECTED:
        (folder / "undisturbed").mkdir()
        _EXPECTED[key] = Training(buffers=buffers).run(folder / "undisturbed", strategy=strategy)
    return _EXPECTED[key]


def check(found, wanted) -> None:
    for rank, ((step, state, momenta), (steps, right, wanted_momenta)) in enumerate(zip(found, wanted, strict=True)):
        assert step == steps == STEPS
        assert all(one.isfinite().all() for one in right.values())
        for name, value in right.items():
            if rank == 0 or not name.startswith("1."):  # only rank 0's running statistics are the job's
                assert torch.equal(state[name], value), (rank, name)
        assert all(map(torch.equal, momenta, wanted_momenta)), rank


@pytest.mark.parametrize("place", ["before the forward", "after the forward", "after the backward", "after the step"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_between_sums_is_replaced(tmp_path, rank: int, place: str) -> None:
    training = Training((rank, 5, place))
    found = training.run(tmp_path)
    check(found, expected(tmp_path, "ring"))
    assert training.replaced() == 1, "nobody else started again"
    assert training.starts[-1][0] == rank
    # After its step, a rank counts the next one, while the sums of others may still be incomplete in the former.
    possible = (4, 5, 6) if place in ("before the forward", "after the step") else (5, 6)
    assert training.starts[-1][1] in possible, "it continues in the step in which it was lost, or a neighbour's"


@pytest.mark.parametrize("calls", [0, 2, 9])
@pytest.mark.parametrize(("strategy", "rank"), [("ring", 0), ("ring", 2), ("tree", 1), ("sharded", 1)])
def test_a_worker_that_is_killed_within_a_sum_is_replaced(tmp_path, strategy: str, rank: int, calls: int) -> None:
    training = Training()
    found = training.run(tmp_path, {(rank, 0): calls}, strategy=strategy)
    check(found, expected(tmp_path, strategy))
    assert training.replaced() == 1


@pytest.mark.soak
@pytest.mark.parametrize("calls", range(40))
@pytest.mark.parametrize("strategy", ["ring", "tree", "halving-doubling", "double-tree", "sharded"])
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_worker_that_is_killed_at_any_call_is_replaced(tmp_path, strategy: str, rank: int, calls: int) -> None:
    training = Training()
    found = training.run(tmp_path, {(rank, 0): calls}, strategy=strategy)
    check(found, expected(tmp_path, strategy))


@pytest.mark.parametrize("calls", [0, 3, 7, 12, 20])
def test_a_second_loss_while_the_first_worker_is_replaced_changes_nothing(tmp_path, calls: int) -> None:
    """The replacement itself is killed, when it takes the state or right after."""
    training = Training()
    found = training.run(tmp_path, {(1, 0): 2, (1, 1): calls})
    check(found, expected(tmp_path, "ring"))
    assert training.job.machine.job.losses.survived >= 1


@pytest.mark.parametrize("calls", [0, 4, 9])
def test_two_workers_that_are_lost_at_once_are_replaced(tmp_path, calls: int) -> None:
    training = Training(buffers=False)
    found = training.run(tmp_path, {(0, 0): 3, (2, 0): calls})
    check(found, expected(tmp_path, "ring", buffers=False))


def test_processes_of_one_host_that_share_memory(tmp_path) -> None:
    training = Training((2, 5, "after the backward"), (0, 8, "after the forward"))
    found = training.run(tmp_path, hosts=(0, 0, 0), shared=True)
    check(found, expected(tmp_path, "ring"))
    assert training.replaced() == 2
