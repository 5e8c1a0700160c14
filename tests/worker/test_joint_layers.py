"""Jobs whose BatchNorm layers are joint train to the values of one process, under every kind of strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from psctl.clock import SystemClock
from psctl.collectives.group_collectives import GroupCollectives
from psctl.errors import ConnectionFailed, PeerLost, UsageError
from psctl.job.training_messages import Decision
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.sync.synchronizer import ExampleWeight
from psctl.train_state import random_generators
from psctl.types import Layout
from psctl.worker.joint_layers import join_layers
from psctl.worker.run import Run
from psctl.worker.standalone import StandaloneSession
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job, Killed

BATCH = 23
"""Not a multiple of the workers: their parts of each mean differ."""


def make_model(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Linear(16, 8), norm(8), nn.Linear(8, 3)).double()
    with torch.no_grad():
        for number, one in enumerate(model.parameters()):
            one.copy_((torch.arange(one.numel()).double() + 3 * number).sin().reshape(one.shape) / 3 + 0.1)
    return model


def train(
    run: Run, norm: Callable[[int], nn.Module] = nn.BatchNorm1d, before: Callable[[Run], None] = lambda run: None
) -> dict[str, torch.Tensor]:
    """Train a model with two layers of batch norm; return its values. `before` is called before each step."""
    model = make_model(norm)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x = torch.arange(6 * 90, dtype=torch.float64).sin().reshape(90, 6) * 3 + 1
    loader = run.loader(TensorDataset(x, (x.sum(1) > 6).long()), batch_size=BATCH)
    for _ in run.epochs(3):
        for some, labels in loader:
            before(run)
            optimizer.zero_grad()
            functional.cross_entropy(model(some), labels).backward()
            optimizer.step()
    run.wait()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    def no_servers(decision: Decision) -> Any:
        raise AssertionError("a single worker needs none")

    return train(Run(StandaloneSession(0, 1, "alone"), no_servers, SystemClock()))


@pytest.fixture(autouse=True)
def threads_as_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Workers are threads here and share the generators, so each would seem to draw numbers between steps.
    monkeypatch.setattr(random_generators.GeneratorStates, "differing", lambda self, before: {})


@pytest.fixture
def planes(tmp_path: Any) -> Any:
    made = DyingPlanes(tmp_path, (0, 1, 0), {})
    yield made
    made.close()


KINDS: dict[str, dict[str, Any]] = {
    "servers step": {"strategy": "ps", "update": "server", "servers": 2},
    "servers sum": {"strategy": "ps", "update": "worker", "servers": 2},
    "in backward": {"strategy": "ps", "update": "server", "servers": 2, "step_in_backward": True},
    "ring": {"strategy": "ring", "servers": 0},
    "sharded": {"strategy": "ring", "servers": 0, "update": "sharded"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_train_as_one_process_does(kind: str, planes: Any, alone: dict[str, torch.Tensor]) -> None:
    job = Job(workers=3, planes=planes, joint_batch_norm=True, **KINDS[kind])
    for found in job.run(train):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)


def test_synchronized_layers_of_torch_are_joint_without_the_key(planes: Any, alone: dict[str, torch.Tensor]) -> None:
    for found in Job(workers=3, servers=1, planes=planes).run(lambda run: train(run, nn.SyncBatchNorm)):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)


def test_other_layers_are_not(planes: Any, alone: dict[str, torch.Tensor]) -> None:
    first, *_ = Job(workers=3, servers=1, planes=planes).run(train)
    assert not torch.allclose(first["1.running_mean"], alone["1.running_mean"], rtol=1e-3)


def test_when_a_worker_is_lost_all_continue_from_the_checkpoint(planes: Any, alone: dict[str, torch.Tensor]) -> None:
    died: list[int] = []

    def die(run: Run) -> None:
        if run.rank == 1 and run.step == 6 and not died:
            died.append(run.rank)
            raise Killed

    def script(run: Run) -> dict[str, torch.Tensor]:
        try:
            return train(run, before=die)
        except (PeerLost, ConnectionFailed):
            raise Killed from None  # this worker's process ends too, by itself or by its agent

    job = Job(workers=3, servers=1, planes=planes, joint_batch_norm=True, every=4)
    for found in job.run(script):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-11)
    assert died
    assert [event.step for event in job.events if type(event).__name__ == "Restored"] == [4]


def test_workers_that_reach_layers_in_different_orders_are_named(planes: Any) -> None:
    def script(run: Run) -> str:
        model, _ = run.prepare(model := make_model(), torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(UsageError) as caught:
            model[4 if run.rank == 1 else 1](torch.ones(5, 8 if run.rank == 1 else 16, dtype=torch.float64))
        return caught.value.message

    expected = "collectives: ranks gave different calls: rank 1: BatchNorm layer 4; ranks 0, 2: BatchNorm layer 1"
    assert Job(workers=3, servers=1, planes=planes, joint_batch_norm=True).run(script) == [expected] * 3


@pytest.mark.parametrize(("staleness", "mode"), [(None, "asp"), (4, r"\{ssp: 4\}")])
def test_layers_that_need_all_workers_are_refused_where_each_is_at_its_own_step(
    staleness: int | None, mode: str
) -> None:
    def choose(*_: object) -> tuple[str, ScheduleOptions]:
        raise AssertionError("nothing is sent")

    decision = Decision("ps", "server", Layout((), "", ()), [], staleness=staleness)
    collectives = GroupCollectives(0, 2, lambda: pytest.fail("it connects"), choose)
    with pytest.raises(UsageError, match=rf"^layer 1 is a SyncBatchNorm.* consistency: {mode} each is at its own"):
        join_layers(make_model(nn.SyncBatchNorm), decision, collectives, ExampleWeight(2))
    join_layers(make_model(), decision, collectives, ExampleWeight(2))
