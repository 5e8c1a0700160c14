"""N workers and M servers take the trajectory of one process, for every optimizer that is fit for servers.

Two yardsticks, as promised: in float32 (and any dtype) equal to the bit to one process that adds the same
micro-gradients in rank order; in float64 equal to one worker on the joint batch, to 1e-12 in norm and 1e-9 in every
element after 200 steps.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

from psctl.errors import JobFailed
from psctl.ps.server_optimizers import FIT, numbers
from tests.helpers.ps_world import World, flat_values, make_layout

GROUPS = {  # two groups, so that numbers are seen to go where they belong
    "SGD": [{"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, {"lr": 0.02, "momentum": 0.5}],
    "Adam": [{"lr": 0.01, "amsgrad": True}, {"lr": 0.003, "betas": (0.8, 0.95), "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.01}, {"lr": 0.003, "weight_decay": 0.2}],
    "Adagrad": [
        {"lr": 0.05, "initial_accumulator_value": 0.1},
        {"lr": 0.02, "initial_accumulator_value": 0.1, "lr_decay": 0.1},
    ],
    "RMSprop": [{"lr": 0.005, "centered": True, "momentum": 0.3}, {"lr": 0.01}],
    "Adadelta": [{"lr": 1.0}, {"lr": 0.5, "rho": 0.8}],
    "Adamax": [{"lr": 0.01}, {"lr": 0.02, "betas": (0.7, 0.9)}],
    "NAdam": [{"lr": 0.01}, {"lr": 0.02, "momentum_decay": 0.01}],
    "RAdam": [{"lr": 0.01}, {"lr": 0.02, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "Rprop": [{"lr": 0.01}, {"lr": 0.02, "etas": (0.4, 1.3)}],
    "ASGD": [{"lr": 0.05, "t0": 2}, {"lr": 0.02, "lambd": 0.01}],
}  # fmt: skip

# Odd sizes, both spaces cut across shards, a scalar, an empty one, a frozen one: (shape, dtype, group).
MIXED = [
    ((7, 13), "float32", 0), ((3, 5, 7), "float64", 1), ((), "float32", 0), ((0, 4), "float32", 1),
    ((301,), "float32", 1), ((129,), "float64", 0), ((4,), "float32", None), ((5,), "float32", 0),
]  # fmt: skip
SILENT = 7  # the parameter that nobody has a gradient for
SHY = 0  # the one that the last worker has none for


def start_values(parameters):
    generator = torch.Generator().manual_seed(1)
    dtypes = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return [torch.randn(shape, generator=generator).to(dtypes[dtype]) for shape, dtype, _ in parameters]


def make_optimizer(name, parameters, values, groups=None):
    """The reference: one process's parameters and optimizer."""
    ours = [nn.Parameter(value.clone()) for value in values]
    given = [
        {"params": [p for p, (_, _, group) in zip(ours, parameters, strict=True) if group == index], **settings}
        for index, settings in enumerate(groups or GROUPS[name])
    ]
    first = {key: value for key, value in given[0].items() if key == "initial_accumulator_value"}
    return ours, FIT[name](given, **first)


def gradients(parameters, values, clock, rank, world):
    """A rank's gradients: they depend on the values, so that an error in those does not heal."""
    generator = torch.Generator().manual_seed(1000 * clock + rank)
    found = {}
    for index, ((shape, _, group), value) in enumerate(zip(parameters, values, strict=True)):
        if group is None or index == SILENT or (index == SHY and rank == world - 1):
            continue
        found[index] = value.detach() * 0.5 + torch.randn(shape, generator=generator).to(value.dtype)
    return found


def add_up(parameters, optimizer_parameters, clock, world):
    """Set `.grad` to the mean over ranks, added in rank order."""
    shares = [gradients(parameters, optimizer_parameters, clock, rank, world) for rank in range(world)]
    for index, parameter in enumerate(optimizer_parameters):
        found = [share[index].clone() for share in shares if index in share]
        total = sum(found[1:], found[0]) if found else None
        parameter.grad = None if total is None else total / world


@cache
def reference(name: str, world: int, steps: int):
    """Values after each step, in one process."""
    values = start_values(MIXED)
    ours, optimizer = make_optimizer(name, MIXED, values)
    trail = []
    for clock in range(steps):
        add_up(MIXED, ours, clock, world)
        optimizer.step()
        trail.append([parameter.detach().clone() for parameter in ours])
    return trail


def train(world, parameters, optimizer, first, steps, save=()):
    """Run the world from clock `first`; yield after each step."""
    for clock in range(first, first + steps):
        shares = []
        for rank in range(world.workers):
            values = [
                torch.zeros(shape) if group is None else world.parameter(rank, index)
                for index, (shape, _, group) in enumerate(parameters)
            ]
            shares.append(gradients(parameters, values, clock, rank, world.workers))
        world.push(clock, shares)
        world.step(clock, numbers(optimizer), save=clock + 1 in save)
        yield clock


def assert_same(world, parameters, expected):
    for rank in range(world.workers):
        for index, (_, _, group) in enumerate(parameters):
            if group is not None:
                assert torch.equal(world.parameter(rank, index), expected[index]), f"worker {rank}, parameter {index}"


OFTEN = {(1, 2), (2, 3), (3, 1), (4, 2)}
"""Workers and servers in every `make test`; all others in `make soak`."""

SHAPES = [
    pytest.param(workers, servers, marks=() if (workers, servers) in OFTEN else pytest.mark.soak)
    for workers in (1, 2, 3, 4)
    for servers in (1, 2, 3)
]


@pytest.mark.parametrize(("workers", "servers"), SHAPES)
@pytest.mark.parametrize("name", FIT)
def test_every_optimizer_on_any_number_of_workers_and_servers_equals_one_process_to_the_bit(name, workers, servers):
    values = start_values(MIXED)
    _, optimizer = make_optimizer(name, MIXED, values)
    layout = make_layout(MIXED, name, numbers(optimizer))
    with World(layout, workers, servers, target=600) as world:
        world.start(flat_values(layout, values))
        for clock in train(world, MIXED, optimizer, 0, 3):
            assert_same(world, MIXED, reference(name, workers, 3)[clock])


@pytest.mark.parametrize(
    ("name", "workers", "servers"),
    [
        ("SGD", 2, 3),
        pytest.param("AdamW", 4, 2, marks=pytest.mark.soak),
        pytest.param("Rprop", 3, 1, marks=pytest.mark.soak),
    ],
)
def test_200_steps_equal_one_process_to_the_bit(name, workers, servers):
    values = start_values(MIXED)
    _, optimizer = make_optimizer(name, MIXED, values)
    layout = make_layout(MIXED, name, numbers(optimizer))
    with World(layout, workers, servers, target=600) as world:
        world.start(flat_values(layout, values))
        for _ in train(world, MIXED, optimizer, 0, 200):
            pass
        assert_same(world, MIXED, reference(name, workers, 200)[-1])


def small_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def share_of(batch, rank, world):
    size = len(batch)
    return batch[rank * size // world : (rank + 1) * size // world]


def joint_batch(clock):
    generator = torch.Generator().manual_seed(clock)
    x = torch.randn(13, 9, generator=generator, dtype=torch.float64)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1], x[:, 2]], 1)


def layout_of(model, name, groups):
    return make_layout([(tuple(p.shape), "float64", 0) for p in model.parameters()], name, groups)


def worker_gradients(model, world, rank, clock):
    """A worker's own forward and backward, on its share of the joint batch."""
    parameters = list(model.parameters())
    for index, parameter in enumerate(parameters):
        parameter.data.copy_(world.parameter(rank, index))
    x, y = (share_of(part, rank, world.workers) for part in joint_batch(clock))
    found = torch.autograd.grad(nn.functional.mse_loss(model(x), y), parameters)
    return dict(enumerate(found)), len(x) * world.workers / 13


@pytest.mark.parametrize(
    ("name", "workers", "servers"),
    [
        ("AdamW", 3, 2),
        *(
            pytest.param(*each, marks=pytest.mark.soak)  # to the bit above, in fewer steps
            for each in (
                *((name, 1 + index % 4, 1 + index % 3) for index, name in enumerate(FIT)),
                ("Adam", 4, 3),
                ("SGD", 3, 2),
            )
        ),
    ],
)  # fmt: skip
def test_200_steps_in_float64_equal_one_worker_on_the_joint_batch(name, workers, servers):
    model = small_model()
    alone = copy.deepcopy(model)
    settings = {key: value for key, value in GROUPS[name][0].items() if key != "initial_accumulator_value"}
    optimizer = FIT[name](alone.parameters(), **settings)
    layout = layout_of(model, name, numbers(optimizer))
    with World(layout, workers, servers, target=300) as world:
        world.start(flat_values(layout, [parameter.detach() for parameter in model.parameters()]))
        for clock in range(200):
            shares = [worker_gradients(model, world, rank, clock) for rank in range(workers)]
            world.push(clock, [found for found, _ in shares], [weight for _, weight in shares])
            world.step(clock, numbers(optimizer))
            optimizer.zero_grad()
            x, y = joint_batch(clock)
            nn.functional.mse_loss(alone(x), y).backward()
            optimizer.step()
        ours = torch.cat([world.parameter(0, index).reshape(-1) for index in range(4)])
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in alone.parameters()])
    assert torch.linalg.vector_norm(ours - expected) <= 1e-12 * torch.linalg.vector_norm(expected)
    assert ((ours - expected).abs() <= 1e-9 * expected.abs().clamp(min=1)).all()


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("SGD", {"foreach": True, "maximize": True}), ("SGD", {"fused": True}),
        ("Adam", {"fused": True, "amsgrad": True}),
        ("AdamW", {"foreach": True}), ("AdamW", {"fused": True, "maximize": True}), ("Adagrad", {"fused": True}),
        ("RMSprop", {"foreach": True}), ("Adamax", {"maximize": True}), ("NAdam", {"decoupled_weight_decay": True}),
    ],
)  # fmt: skip
def test_the_users_flags_are_taken_verbatim(name, flags):
    parameters = [((33,), "float32", 0), ((70, 3), "float32", 0)]
    values = start_values(parameters)
    ours, optimizer = make_optimizer(name, parameters, values, [dict(lr=0.01, **flags)])
    layout = make_layout(parameters, name, numbers(optimizer))
    with World(layout, 2, 2, target=300) as world:
        world.start(flat_values(layout, values))
        for clock in train(world, parameters, optimizer, 0, 3):
            add_up(parameters, ours, clock, 2)
            optimizer.step()
        assert_same(world, parameters, ours)


def test_bfloat16_and_float16_travel_beside_float32():
    parameters = [((70,), "bfloat16", 0), ((33,), "float16", 0), ((9, 9), "float32", 0), ((300,), "bfloat16", 0)]
    values = start_values(parameters)
    ours, optimizer = make_optimizer("SGD", parameters, values, [{"lr": 0.125, "momentum": 0.5}])
    layout = make_layout(parameters, "SGD", numbers(optimizer))
    with World(layout, 3, 2, target=100) as world:
        world.start(flat_values(layout, values))
        for clock in train(world, parameters, optimizer, 0, 5):
            add_up(parameters, ours, clock, 3)
            optimizer.step()
        assert_same(world, parameters, ours)


def test_hundreds_of_tiny_parameters_share_a_shard():
    parameters = [((1 + index % 3,), "float32", index % 2) for index in range(400)]
    values = start_values(parameters)
    ours, optimizer = make_optimizer("AdamW", parameters, values)
    layout = make_layout(parameters, "AdamW", numbers(optimizer))
    with World(layout, 2, 1, target=1 << 20) as world:
        assert len(world.decision.shards) == 1
        world.start(flat_values(layout, values))
        for clock in train(world, parameters, optimizer, 0, 3):
            add_up(parameters, ours, clock, 2)
            optimizer.step()
        assert_same(world, parameters, ours)


def test_a_parameter_larger_than_a_part_of_a_message_arrives_whole():
    parameters = [((200_003,), "float64", 0), ((70_001,), "float64", 0)]  # 1.6 MB in one shard: four parts
    values = start_values(parameters)
    ours, optimizer = make_optimizer("SGD", parameters, values, [{"lr": 0.1}])
    layout = make_layout(parameters, "SGD", numbers(optimizer))
    with World(layout, 2, 2, target=1_700_000) as world:
        world.start(flat_values(layout, values))
        for clock in train(world, parameters, optimizer, 0, 2):
            add_up(parameters, ours, clock, 2)
            optimizer.step()
        assert_same(world, parameters, ours)


def test_a_learning_rate_scheduler_just_works_because_numbers_travel_with_the_clock():
    values = start_values(MIXED)
    ours, optimizer = make_optimizer("SGD", MIXED, values)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.05], total_steps=10)
    layout = make_layout(MIXED, "SGD", numbers(optimizer))
    with World(layout, 2, 2) as world:
        world.start(flat_values(layout, values))
        for clock in train(world, MIXED, optimizer, 0, 8):
            add_up(MIXED, ours, clock, 2)
            optimizer.step()
            scheduler.step()
        assert_same(world, MIXED, ours)


def test_clipping_by_the_joint_norm_equals_torchs_own():
    parameters = [((70, 3), "float64", 0), ((129,), "float64", 0), ((), "float64", 0)]
    values = start_values(parameters)
    ours, optimizer = make_optimizer("AdamW", parameters, values, [{"lr": 0.01}])
    layout = make_layout(parameters, "AdamW", numbers(optimizer))
    with World(layout, 3, 2) as world:
        world.start(flat_values(layout, values))
        for clock in range(20):
            seen = [world.parameter(0, index) for index in range(3)]
            shares = [gradients(parameters, seen, clock, rank, 3) for rank in range(3)]
            world.push(clock, shares)
            squares = [client.norms(clock) for client in world.clients]
            assert squares[0] == squares[1] == squares[2]
            norm = sum(squares[0].values()) ** 0.5
            for client in world.clients:
                client.step(clock, numbers(optimizer), scale=min(1.0, 0.5 / (norm + 1e-6)))
            world.pull(clock + 1)
            add_up(parameters, ours, clock, 3)
            expected = nn.utils.clip_grad_norm_(ours, 0.5)
            assert norm == pytest.approx(float(expected), rel=1e-14)
            optimizer.step()
        for index in range(3):
            torch.testing.assert_close(world.parameter(1, index), ours[index].detach(), rtol=1e-12, atol=1e-13)


def test_presence_marks_the_parameters_that_had_a_gradient_anywhere():
    values = start_values(MIXED)
    _, optimizer = make_optimizer("AdamW", MIXED, values)
    layout = make_layout(MIXED, "AdamW", numbers(optimizer))
    with World(layout, 2, 2) as world:
        world.start(flat_values(layout, values))
        for clock in train(world, MIXED, optimizer, 0, 2):
            trainable = [index for index, (_, _, group) in enumerate(MIXED) if group is not None]
            for client in world.clients:
                assert client.presence(clock) == [index != SILENT for index in trainable]


def test_a_zero_gradient_is_not_a_missing_one():
    parameters = [((5,), "float32", 0), ((6,), "float32", 0)]
    values = start_values(parameters)
    _, optimizer = make_optimizer("AdamW", parameters, values, [{"lr": 0.1, "weight_decay": 0.5}])
    layout = make_layout(parameters, "AdamW", numbers(optimizer))
    with World(layout, 2, 1) as world:
        world.start(flat_values(layout, values))
        world.push(0, [{0: torch.zeros(5)}, {0: torch.zeros(5)}])
        world.step(0, numbers(optimizer))
        assert not torch.equal(world.parameter(0, 0), values[0])  # weight decay moved it
        assert torch.equal(world.parameter(0, 1), values[1])  # nobody had a gradient: it stands still


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_under_update_worker_every_worker_gets_the_joint_mean_and_servers_only_sum(workers):
    values = start_values(MIXED)
    layout = make_layout(MIXED, "", [])
    with World(layout, workers, 3, update="worker") as world:
        world.start(flat_values(layout, values))
        for rank in range(workers):
            for index, (_, _, group) in enumerate(MIXED):
                if group is not None:
                    assert torch.equal(world.parameter(rank, index), values[index])
        for clock in range(5):
            shares = [gradients(MIXED, values, clock, rank, workers) for rank in range(workers)]
            world.push(clock, shares)
            world.step(clock, [])
            ours = [nn.Parameter(value.clone()) for value in values]
            add_up(MIXED, ours, clock, workers)
            for rank, client in enumerate(world.clients):
                present = dict(
                    zip([i for i, p in enumerate(MIXED) if p[2] is not None], client.presence(clock), strict=True)
                )
                for index, parameter in enumerate(ours):
                    if MIXED[index][2] is not None:
                        assert present[index] == (parameter.grad is not None)
                    if parameter.grad is not None:
                        assert torch.equal(world.parameter(rank, index), parameter.grad)


def test_a_joint_gradient_in_float32_is_within_8_eps_of_the_magnitudes():
    parameters = [((4099,), "float32", 0)]
    layout = make_layout(parameters, "", [])
    shares = [torch.randn(4099, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    with World(layout, 4, 2, update="worker", target=4000) as world:
        world.start(flat_values(layout, [torch.zeros(4099)]))
        world.push(0, [{0: share} for share in shares])
        world.step(0, [])
        joint = world.parameter(2, 0).double()
    exact = sum(share.double() for share in shares) / 4
    bound = 8 * torch.finfo(torch.float32).eps * sum(share.double().abs() for share in shares) / 4
    assert ((joint - exact).abs() <= bound).all()


def test_weights_make_unequal_shares_count_by_their_examples():
    parameters = [((65,), "float64", 0)]
    layout = make_layout(parameters, "", [])
    shares = [torch.full((65,), 1.0, dtype=torch.float64), torch.full((65,), 4.0, dtype=torch.float64)]
    with World(layout, 2, 1, update="worker") as world:
        world.start(flat_values(layout, [torch.zeros(65, dtype=torch.float64)]))
        world.push(0, [{0: share} for share in shares], weights=[2 * 3 / 4, 2 * 1 / 4])  # 3 examples and 1
        world.step(0, [])
        assert torch.equal(world.parameter(0, 0), torch.full((65,), 1.75, dtype=torch.float64))


@pytest.mark.parametrize("name", FIT)
def test_a_saved_job_resumes_with_another_number_of_servers_equal_to_the_bit(name):
    values = start_values(MIXED)
    _, optimizer = make_optimizer(name, MIXED, values)
    layout = make_layout(MIXED, name, numbers(optimizer))
    with World(layout, 2, 3, target=300) as world:
        world.start(flat_values(layout, values))
        for _ in train(world, MIXED, optimizer, 0, 6, save={4}):
            pass  # training went on for two steps while the checkpoint was on its way
        checkpoint = world.checkpoint(4)
    with World(layout, 2, 2, target=900, checkpoint=checkpoint, step=4) as world:
        world.start(None)
        assert_same(world, MIXED, reference(name, 2, 8)[3])
        for clock in train(world, MIXED, optimizer, 4, 4):
            assert_same(world, MIXED, reference(name, 2, 8)[clock])


def test_a_checkpoint_names_tensors_as_the_single_process_would():
    values = start_values(MIXED)
    ours, optimizer = make_optimizer("NAdam", MIXED, values)
    layout = make_layout(MIXED, "NAdam", numbers(optimizer))
    with World(layout, 2, 3, target=300) as world:
        world.start(flat_values(layout, values))
        for clock in train(world, MIXED, optimizer, 0, 2, save={2}):
            add_up(MIXED, ours, clock, 2)
            optimizer.step()
        checkpoint = world.checkpoint(2)
    expected = {f"param/layer.{index}" for index, parameter in enumerate(MIXED) if parameter[2] is not None}
    for index, parameter in enumerate(ours):
        for key, tensor in optimizer.state[parameter].items():
            expected.add(f"optim/layer.{index}/{key}")
            where, data = checkpoint[f"optim/layer.{index}/{key}"]
            assert where.shape == tuple(tensor.shape)
            assert bytes(data) == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert set(checkpoint) == expected


def test_a_rank_whose_numbers_differ_is_named_with_group_key_and_both_values():
    values = start_values(MIXED)
    _, optimizer = make_optimizer("AdamW", MIXED, values)
    layout = make_layout(MIXED, "AdamW", numbers(optimizer))
    with World(layout, 2, 2) as world:
        world.start(flat_values(layout, values))
        world.push(0, [gradients(MIXED, values, 0, rank, 2) for rank in range(2)])
        other = copy.deepcopy(numbers(optimizer))
        other[1]["lr"] = 0.5
        world.clients[0].step(0, numbers(optimizer))
        world.clients[1].step(0, other)
        for client in world.clients:
            client.pull(1)
            with pytest.raises(JobFailed, match=r"group 1: lr is 0\.003 on worker/0 and 0\.5 on worker/1"):
                client.wait(1)


def test_servers_without_shards_take_part_in_steps_saves_and_resumes():
    parameters = [((33,), "float32", 0)]
    values = start_values(parameters)
    ours, optimizer = make_optimizer("Adam", parameters, values, [{"lr": 0.1}])
    layout = make_layout(parameters, "Adam", numbers(optimizer))
    with World(layout, 2, 3, target=1000) as world:
        assert world.decision.assignment.owners == [0]
        world.start(flat_values(layout, values))
        for clock in train(world, parameters, optimizer, 0, 2, save={2}):
            add_up(parameters, ours, clock, 2)
            optimizer.step()
        checkpoint = world.checkpoint(2)
    with World(layout, 2, 2, target=1000, checkpoint=checkpoint, step=2) as world:
        world.start(None)
        for clock in train(world, parameters, optimizer, 2, 2):
            add_up(parameters, ours, clock, 2)
            optimizer.step()
        assert_same(world, parameters, ours)
