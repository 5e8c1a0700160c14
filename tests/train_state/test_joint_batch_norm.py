"""Joint BatchNorm layers against torch's own on the whole batch, with workers as threads."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psctl.train_state.joint_batch_norm import join_batch_norm, requested


class Workers:
    """Sums over threads, in the order of ranks; a rank that fails ends the waits of the others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.vectors = [torch.zeros(0)] * world
        self.sums = 0
        self.barrier = threading.Barrier(world)

    def run(self, work: Callable[[int], None]) -> None:
        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            for done in [pool.submit(guarded, rank) for rank in range(self.world)]:
                done.result(60)


class OneOfThem:
    """The sums of one rank; `part` of the examples times the number of workers."""

    def __init__(self, workers: Workers, rank: int, part: float) -> None:
        self.workers, self.rank, self.part = workers, rank, part

    def sum_ranks(self, vector: torch.Tensor, name: str) -> None:
        assert vector.dtype == torch.float64
        self.workers.vectors[self.rank] = vector.clone()
        if self.workers.barrier.wait(30) == 0:
            self.workers.sums += 1
        total = torch.stack(self.workers.vectors).sum(0)
        self.workers.barrier.wait(30)
        vector.copy_(total)


class Alone:
    """The sums of a single worker, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.part = 1.0

    def sum_ranks(self, vector: torch.Tensor, name: str) -> None:
        self.names.append(name)


class BatchNormRelu(nn.BatchNorm2d):
    """A layer that does more, as those of model libraries do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        training = self.training or not self.track_running_stats
        return F.relu(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training, 0.1, self.eps)
        )


@contextmanager
def joined(model: nn.Module) -> Iterator[Alone]:
    """Join all layers of a model over one worker."""
    sums = Alone()
    join_batch_norm(requested(model, every=True), sums)
    yield sums


def small(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rows": (lambda: nn.BatchNorm1d(6), (6,)),
    "sequences": (lambda: nn.BatchNorm1d(6), (6, 7)),
    "images": (lambda: nn.BatchNorm2d(6), (6, 3, 4)),
    "volumes": (lambda: nn.BatchNorm3d(6), (6, 2, 3, 2)),
    "no parameters": (lambda: nn.BatchNorm2d(6, affine=False), (6, 3, 4)),
    "no running values": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (6, 3, 4)),
    "cumulative": (lambda: nn.BatchNorm2d(6, momentum=None), (6, 3, 4)),
    "with an activation": (lambda: BatchNormRelu(6), (6, 3, 4)),
    "of torch, for process groups": (lambda: nn.SyncBatchNorm(6), (6, 3, 4)),
}


@pytest.mark.parametrize(
    "cuts", [(0, 4, 8, 12), (0, 7, 8, 12), (0, 12, 12, 12)], ids=["equal", "unequal", "one has all"]
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16], ids=lambda one: str(one)[6:])
@pytest.mark.parametrize("name", LAYERS)
def test_workers_get_the_values_and_gradients_of_the_whole_batch(
    name: str, kind: torch.dtype, cuts: tuple[int, ...]
) -> None:
    torch.manual_seed(7)
    make, shape = LAYERS[name]
    whole_model = small(make(), nn.Flatten())
    for parameter in whole_model.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    models = [copy.deepcopy(whole_model) for _ in cuts[1:]]
    if name.startswith("of torch"):  # torch's own wants a process group; BatchNorm2d is the same function of a batch
        whole_model = small(nn.BatchNorm2d(6), nn.Flatten())
        whole_model.load_state_dict(models[0].state_dict())
    if kind == torch.float64:
        whole_model, models = whole_model.double(), [model.double() for model in models]
    batch = (torch.randn(12, *shape) * 3 + 50).to(kind)
    target = torch.randn(12, batch[0].numel()).to(kind)

    def step(model: nn.Module, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the gradient of the input of a mean over these examples, times their part."""
        given = batch[first:end].clone().requires_grad_()
        out = model(given)
        (((out.float() - target[first:end].float()).square().sum() / 12).to(torch.float64)).backward()
        assert given.grad is not None
        return out.detach(), given.grad

    expected_out, expected_gradient = zip(*(step(whole_model, 0, 12) for _ in range(2)), strict=True)
    for parameter in whole_model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    workers = Workers(len(models))
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def work(rank: int) -> None:
        # The loss above is each worker's part of the joint one already, so all parts weigh the same.
        sums = OneOfThem(workers, rank, 1.0)
        join_batch_norm(requested(models[rank], every=True), sums)
        found[rank] = [step(models[rank], cuts[rank], cuts[rank + 1]) for _ in range(2)]

    workers.run(work)
    loose = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}[kind]
    for turn in range(2):
        for at, expected in ((0, expected_out), (1, expected_gradient)):
            together = torch.cat([found[rank][turn][at] for rank in range(len(models))])
            scale = expected[turn].abs().max().item()
            torch.testing.assert_close(together, expected[turn], rtol=loose, atol=loose * scale)
    for one, parameter in dict(whole_model.named_parameters()).items():
        total = sum(dict(model.named_parameters())[one].grad for model in models) / 2
        torch.testing.assert_close(total, parameter.grad, rtol=2e-2 if kind == torch.bfloat16 else 1e-4, atol=1e-3)
    for one, buffer in dict(whole_model.named_buffers()).items():
        each = [dict(model.named_buffers())[one] for model in models]
        assert all(torch.equal(each[0], other) for other in each), "the same on every worker, to the bit"
        torch.testing.assert_close(each[0], buffer, rtol=1e-5, atol=1e-6)


def test_gradients_of_unequal_parts_are_those_of_the_mean_over_all_examples() -> None:
    torch.manual_seed(3)
    cuts, world = (0, 6, 7, 12), 3
    whole = small(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    models = [copy.deepcopy(whole) for _ in range(world)]
    batch, target = torch.randn(12, 3, 8, 8), torch.randn(12, 64)
    F.mse_loss(whole(batch), target).backward()
    workers = Workers(world)

    def work(rank: int) -> None:
        first, end = cuts[rank : rank + 2]
        part = (end - first) * world / 12
        join_batch_norm(requested(models[rank], every=True), OneOfThem(workers, rank, part))
        F.mse_loss(models[rank](batch[first:end]), target[first:end]).backward()
        for parameter in models[rank].parameters():
            assert parameter.grad is not None
            parameter.grad *= part / world

    workers.run(work)
    for one, parameter in dict(whole.named_parameters()).items():
        total = sum(dict(model.named_parameters())[one].grad for model in models)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-4, atol=1e-6)
    assert workers.sums == 4, "one sum a layer and direction"


def test_a_channel_with_one_value_is_refused_on_every_worker() -> None:
    workers = Workers(2)
    refused: list[str] = []

    def work(rank: int) -> None:
        layer = nn.BatchNorm1d(3)
        join_batch_norm(requested(layer, every=True), OneOfThem(workers, rank, 1.0))
        with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
            layer(torch.zeros(1 - rank, 3))
        refused.append(str(caught.value))

    workers.run(work)
    assert len(refused) == 2


def test_a_mean_far_from_zero_leaves_the_variance_right() -> None:
    torch.manual_seed(1)
    layer = nn.BatchNorm1d(4, momentum=1.0)
    batch = torch.randn(4096, 4) + 1e4  # in float32 the squares are 1e8, and a variance of 1 is below their rounding
    with joined(layer):
        layer(batch)
    torch.testing.assert_close(layer.running_var, batch.double().var(0).float(), rtol=1e-5, atol=0)


def test_evaluation_uses_the_running_values_and_no_sums() -> None:
    model = small(nn.BatchNorm1d(4))
    with joined(model) as sums:
        model.eval()
        batch = torch.randn(1, 4)
        assert torch.allclose(model(batch), batch / (1 + 1e-5) ** 0.5)
    assert sums.names == []


def test_a_layer_whose_input_needs_no_gradient_sends_nothing_in_backward() -> None:
    model = small(nn.BatchNorm1d(4))
    with joined(model) as sums:
        model(torch.randn(8, 4)).sum().backward()
    assert sums.names == ["BatchNorm layer 0"]
    assert model[0].weight.grad is not None


def test_copies_and_pickles_are_of_the_users_class() -> None:
    model = small(nn.BatchNorm2d(3), BatchNormRelu(3))
    keys = list(model.state_dict())
    with joined(model):
        assert isinstance(model[0], nn.BatchNorm2d)
        assert repr(model[0]).startswith("BatchNorm2d(3, ")
        assert list(model.state_dict()) == keys
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        for one in (copy.deepcopy(model), read, [copy.copy(layer) for layer in model]):
            assert [type(layer) for layer in one] == [nn.BatchNorm2d, BatchNormRelu]
        assert type(model[0]) is not nn.BatchNorm2d, "the layer itself is still joint"


def test_only_layers_of_torchs_own_synchronized_kind_are_joint_unasked() -> None:
    model = nn.ModuleDict(
        {"plain": nn.BatchNorm2d(2), "sync": nn.SyncBatchNorm(2), "group": nn.SyncBatchNorm(2),
         "instance": nn.InstanceNorm2d(2), "layer": nn.LayerNorm(2)}
    )  # fmt: skip
    model["group"].process_group = object()
    assert [name for name, _ in requested(model, every=False)] == ["sync"]
    assert [name for name, _ in requested(model, every=True)] == ["plain", "sync", "group"]


def test_a_compiled_model_calls_the_sums() -> None:
    torch.manual_seed(2)
    model = small(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    batch = torch.randn(16, 4)
    plain(batch).sum().backward()
    with joined(model) as sums:
        torch.compile(model, backend="eager")(batch).sum().backward()
    assert sums.names == ["BatchNorm layer 1", "backward of BatchNorm layer 1"]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
