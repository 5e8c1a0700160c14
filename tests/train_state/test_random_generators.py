"""Random generators of the script: unchanged outside of steps, saved and restored; psctl seeds those of steps."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from psctl.train_state.random_generators import (
    GeneratorStates,
    RandomGenerators,
    SavedGenerators,
    has_devices,
    mix,
    reseed,
    saved_for,
    saved_from,
)
from tests.helpers.job_world import Job


def drawn() -> tuple[float, float, float]:
    """Return one number of each generator."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_a_seed_gives_the_numbers_of_the_libraries_own() -> None:
    reseed(3, "clock", 5)
    found = drawn(), drawn()
    random.seed(mix(3, "clock", 5))
    np.random.seed(mix(3, "clock", 5) % 2**32)
    torch.manual_seed(mix(3, "clock", 5))
    assert found == (drawn(), drawn())


@pytest.mark.parametrize(
    ("kind", "initialized", "devices", "called"),
    [
        ("cuda", True, 1, "manual_seed_all"), ("cuda", False, 1, "manual_seed"), ("cuda", False, 0, ""),
        ("xpu", False, 0, "manual_seed"),
    ],
)  # fmt: skip
def test_generators_of_devices_are_seeded_where_there_are_some(
    monkeypatch, kind: str, initialized: bool, devices: int, called: str
) -> None:
    seeds: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: seeds.append(("manual_seed_all", seed)))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(("manual_seed", seed)))
    has_devices.cache_clear()
    try:
        reseed(3)
    finally:
        has_devices.cache_clear()
    assert seeds == ([(called, mix(3))] if called else [])
    found = torch.rand(())
    torch.default_generator.manual_seed(mix(3))
    assert found == torch.rand(())


def test_torch_2_6_raises_where_there_is_no_device(monkeypatch) -> None:
    def none() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    has_devices.cache_clear()
    try:
        assert not has_devices()
    finally:
        has_devices.cache_clear()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        self.seen = self.dropout(torch.ones(8)).tolist()
        return self.layer(x)


class Log:
    """The numbers that a script drew: before its loop, in steps, after steps, between epochs."""

    def __init__(self) -> None:
        self.split: list[int] = []
        self.steps: dict[int, tuple] = {}
        self.after: dict[int, tuple] = {}
        self.epochs: dict[int, tuple] = {}
        self.shuffles: dict[int, list[int]] = {}


def script(run, log: Log, *, epochs=3, own_loader=False) -> None:
    seed(5)
    model, optimizer = run.prepare(net := Net(), torch.optim.SGD(net.parameters(), lr=0.1))
    log.split = torch.randperm(20).tolist()
    data = TensorDataset(torch.arange(16.0))
    loader = DataLoader(data, batch_size=4, shuffle=True) if own_loader else run.loader(data, batch_size=4)
    for epoch in run.epochs(epochs):
        log.epochs[epoch] = drawn()
        taken = []
        for (which,) in loader:
            taken += which.tolist()
            optimizer.zero_grad()
            model(torch.ones(4)).sum().backward()
            log.steps[run.step] = (net.seen, *drawn())
            optimizer.step()
            log.after[run.step] = drawn()
        log.shuffles[epoch] = taken
        log.epochs[epoch] += drawn()


@pytest.mark.parametrize("strategy", ["ps", "alone"])
@pytest.mark.parametrize("at", [4, 6, 8])
def test_a_resumed_script_draws_the_same_random_numbers(strategy, at) -> None:
    whole, rest = Log(), Log()
    first = Job(1, 1, strategy, every=2)
    first.run(lambda run: script(run, whole))
    Job(1, 1, strategy, resume=first.saved[at]).run(lambda run: script(run, rest))
    assert rest.split == whole.split
    assert rest.steps == {step: found for step, found in whole.steps.items() if step >= at}
    assert rest.after == {step: found for step, found in whole.after.items() if step > at}
    assert rest.epochs == {epoch: found for epoch, found in whole.epochs.items() if epoch >= at // 4}
    assert len({found[1:] for found in whole.steps.values()}) == 12


def test_a_script_loader_shuffles_by_the_script_generator_and_repeats_an_epoch_equally() -> None:
    plain, whole, rest = [], Log(), Log()
    first = Job(1, 1, every=2)
    first.run(lambda run: script(run, whole, own_loader=True))
    seed(5)
    Net()
    torch.randperm(20)
    for _ in range(3):
        drawn()
        for (which,) in DataLoader(TensorDataset(torch.arange(16.0)), batch_size=4, shuffle=True):
            plain += which.tolist()
            drawn()
        drawn()
    assert [place for epoch in range(3) for place in whole.shuffles[epoch]] == plain, "as a script without psctl"
    Job(1, 1, resume=first.saved[6]).run(lambda run: script(run, rest, own_loader=True))
    assert rest.split == whole.split
    assert rest.shuffles == {epoch: whole.shuffles[epoch] for epoch in (1, 2)}
    assert rest.epochs == {epoch: whole.epochs[epoch] for epoch in (1, 2)}


def test_a_step_begins_only_with_a_forward_in_training_mode() -> None:
    def act(run):
        model, optimizer = run.prepare(net := Net(), torch.optim.SGD(net.parameters(), lr=0.1))
        seed(5)
        expected = [drawn() for _ in range(3)]
        seed(5)
        with torch.no_grad():
            model(torch.ones(4))
        seed(5)
        found = [drawn()]
        for _ in range(2):
            model(torch.ones(4)).sum().backward()
            drawn()
            optimizer.step()
            found.append(drawn())
        assert found == expected
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not other._forward_pre_hooks
        optimizer.zero_grad()
        assert model._forward_pre_hooks

    Job(1, 1, update="worker").run(act)


def test_leaving_a_pass_early_restores_the_generators() -> None:
    def act(run):
        run.prepare(net := Net(), torch.optim.SGD(net.parameters(), lr=0.1))
        loader = run.loader(TensorDataset(torch.arange(16.0)), batch_size=4)
        seed(5)
        expected = drawn()
        seed(5)
        for _ in loader:
            drawn()
            break
        assert drawn() == expected
        seed(5)
        next(iter(loader))
        assert drawn() == expected
        with pytest.raises(TypeError):
            sum(loader)
        seed(5)
        assert drawn() == expected

    Job(1, 1).run(act)


def test_generator_states_survive_conversion_to_tensors() -> None:
    seed(1)
    random.gauss(), np.random.standard_normal(), torch.randn(3)  # the second numbers of pairs are kept too
    states = GeneratorStates.now()
    expected = drawn(), random.gauss(), np.random.standard_normal(), torch.randn(3).tolist()
    seed(2)
    GeneratorStates.now().with_saved(states.tensors()).apply()
    assert (drawn(), random.gauss(), np.random.standard_normal(), torch.randn(3).tolist()) == expected
    states.apply()
    assert GeneratorStates.now().differing(states) == {}
    random.random()
    assert set(GeneratorStates.now().differing(states)) == {"python"}


def loop(generators: RandomGenerators, steps: int) -> list[tuple]:
    """Return the numbers drawn after each step, with one drawn before."""
    found = []
    for step in range(steps):
        generators.begin_step()
        seed(1000 + step)
        drawn()
        generators.end_step()
        found.append(drawn())
    return found


@pytest.mark.parametrize("apart", [False, True])
def test_a_replacement_continues_as_rank_0_unless_the_script_seeds_each_rank(apart) -> None:
    seed(1)
    zero = RandomGenerators()
    loop(zero, 3)
    left, expected = zero.for_replacement(), drawn()
    seed(2 if apart else 1)
    own, taking = GeneratorStates.now(), RandomGenerators()
    taking.resume(SavedGenerators(*left))
    assert loop(taking, 1)[0] == (expected if not apart else (own.apply(), drawn())[1])


def test_a_process_resumed_between_epochs_begins_the_next_equally() -> None:
    seed(1)
    zero = RandomGenerators()
    zero.begin_epoch(resumed=False, again=True)
    loop(zero, 3)
    zero.end_epoch()
    left, expected = zero.for_replacement(), drawn()
    seed(1)
    taking = RandomGenerators()
    taking.resume(SavedGenerators(*left))
    taking.begin_epoch(resumed=True, again=True)
    assert drawn() == expected


def test_a_script_without_draws_saves_no_state() -> None:
    seed(1)
    generators = RandomGenerators()
    generators.begin_epoch(resumed=False, again=True)
    generators.begin_step()
    generators.end_step()
    assert generators.for_replacement() == ({}, {}, {})


def test_a_rank_loads_its_own_states_and_a_new_rank_those_of_rank_0() -> None:
    found = {}
    for rank in range(2):
        seed(rank)
        generators = RandomGenerators()
        loop(generators, 1)
        parts = generators.checkpoint_tensors(marked=False, origin=rank == 0)
        found |= {f"random/{rank}/{name}": one for name, one in parts.items()}
    for rank, origin in ((0, None), (1, None), (2, {"python", "numpy", "torch"})):
        names = saved_for(rank, ["param/w", *found])
        saved = saved_from(rank, {name: found[name] for name in names})
        assert saved is not None
        assert (saved.origin and set(saved.origin)) == origin
        assert torch.equal(saved.now["torch"], found[f"random/{rank % 2}/now/torch"])
    assert saved_from(0, {}) is None
