"""Every example once an epoch, the same ones for a clock with any number of workers, from any position."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from psctl.errors import UsageError
from psctl.process.step_ring import StepRecorder
from psctl.train_state.random_generators import RandomGenerators
from psctl.worker.loader import Loader
from tests.hypothesis_profile import examples


class Consumer:
    """A run that only counts."""

    def __init__(self, rank=0, world=1, seed=0, epoch=0, start=0) -> None:
        self.spans = StepRecorder()
        self.rank, self.world, self.seed, self.epoch, self.start = rank, world, seed, epoch, start
        self.shares: list[tuple[int, int]] = []
        self.ends = 0
        self.generators = RandomGenerators()

    def on_batch_wanted(self, loader) -> None: ...

    def begin_clock(self):
        return len(self.shares), [], tuple(range(self.world))

    def recent_batches(self, loader):
        return []

    def remember_batch(self, loader, batch) -> None: ...

    def may_extend_pass(self) -> bool:
        return False

    def on_batch(self, loader, mine, together) -> None:
        self.shares.append((mine, together))

    def epoch_of(self, loader):
        return self.epoch, self.start

    def on_exhausted(self, loader) -> None:
        self.ends += 1


def batches(count, batch, world=1, epoch=0, start=0, seed=0, **options):
    """For each clock the examples of each rank, as lists."""
    dataset = TensorDataset(torch.arange(count))
    found = []
    for rank in range(world):
        consumer = Consumer(rank, world, seed, epoch, start)
        loader = Loader(consumer, 0, dataset, batch, **options)
        found.append([examples.tolist() for (examples,) in loader])
        assert consumer.shares == [(len(mine), consumer.shares[at][1]) for at, mine in enumerate(found[-1])], (
            "the weight of a batch is its examples"
        )
    return [list(ranks) for ranks in zip(*found, strict=True)]


@settings(max_examples=examples(30))
@given(st.integers(4, 60), st.integers(4, 20), st.integers(1, 4), st.booleans())
def test_every_example_comes_once_an_epoch(count, batch, world, shuffle) -> None:
    clocks = batches(count, batch, world, shuffle=shuffle)
    seen = [example for ranks in clocks for mine in ranks for example in mine]
    assert sorted(seen) == list(range(count))
    assert all(mine for ranks in clocks for mine in ranks), "nobody is idle"


def test_the_examples_of_a_clock_do_not_depend_on_the_number_of_workers() -> None:
    alone, three = batches(50, 12), batches(50, 12, world=3)
    for one, ranks in zip(alone[:-1], three[:-1], strict=False):
        assert one[0] == [example for mine in ranks for example in mine]


def test_epochs_and_seeds_have_orders_of_their_own_and_the_same_one_again() -> None:
    assert batches(20, 20) == batches(20, 20)
    assert batches(20, 20) != batches(20, 20, epoch=1)
    assert batches(20, 20) != batches(20, 20, seed=1)
    assert batches(20, 20, shuffle=False) == [[list(range(20))]]


def test_a_pass_can_begin_in_the_middle() -> None:
    assert batches(50, 12, world=2, start=3) == batches(50, 12, world=2)[3:]
    assert batches(50, 12, start=4) == batches(50, 12)[4:]


def test_batch_size_is_everyones_unless_it_is_per_worker() -> None:
    assert [len(mine) for mine in batches(24, 6, world=3)[0]] == [2, 2, 2]
    assert [len(mine) for mine in batches(24, 6, world=3, per_worker=True)[0]] == [6, 6, 6]


def test_the_length_is_the_number_of_batches() -> None:
    assert len(Loader(Consumer(0, 3), 0, TensorDataset(torch.arange(50)), 12)) == 4, "a tail of 2 joins, for 3 workers"
    assert len(Loader(Consumer(0, 2), 0, TensorDataset(torch.arange(50)), 12)) == 5


class Noisy(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item(), random.random()])


@pytest.mark.parametrize("start", [0, 2])
def test_random_transforms_are_the_same_in_loader_processes_and_after_a_resume(start) -> None:
    def fetch(num_workers, start):
        return list(Loader(Consumer(start=start), 0, Noisy(), 4, num_workers=num_workers))

    here = fetch(0, 0)[start:]
    there = fetch(2, start)
    assert len(here) == len(there) == 3 - start
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_batch_is_reported_early_and_changes_no_random_number(num_workers) -> None:
    def run(on_next):
        found = []
        for batch in Loader(Consumer(), 0, Noisy(), 4, num_workers=num_workers, on_next=on_next):
            found += [batch, torch.rand(2), torch.tensor(random.random())]
            torch.manual_seed(len(found))  # what the script does is not seen by later fetches
        return found

    seen = []
    expected, found = run(None), run(lambda batch: seen.append(batch))
    if num_workers:  # a batch's numbers are those of its fetch, and the script's own are not seeded here
        expected, found = expected[::3], found[::3]
    assert len(expected) == len(found) and all(map(torch.equal, found, expected))
    batches = found if num_workers else found[::3]
    assert len(seen) == 2 and all(map(torch.equal, seen, batches[1:]))


def test_loader_processes_leave_the_scripts_random_numbers_alone() -> None:
    torch.manual_seed(6)
    expected = torch.rand(())
    torch.manual_seed(6)
    next(iter(Loader(Consumer(), 0, TensorDataset(torch.arange(8)), 4, num_workers=1)))
    assert torch.equal(torch.rand(()), expected)


def test_a_dataset_may_fetch_a_batch_at_once_and_a_collate_of_ones_own_is_used() -> None:
    class Bulk(Dataset):
        def __len__(self) -> int:
            return 6

        def __getitems__(self, places):
            return [place * 10 for place in places]

    loader = Loader(Consumer(), 0, Bulk(), 3, shuffle=False, collate_fn=lambda items: ("mine", items))
    assert list(loader) == [("mine", [0, 10, 20]), ("mine", [30, 40, 50])]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Shapeless(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "batch", "world", "says"),
    [
        (Endless(), 4, 1, "IterableDataset: its examples have no positions"),
        (Shapeless(), 4, 1, "has no length"),
        (TensorDataset(torch.arange(9)), 0, 1, "batch_size is 0"),
        (TensorDataset(torch.arange(9)), 2, 3, "is divided among 3 workers"),
        (TensorDataset(torch.arange(2)), 8, 3, "2 examples, fewer than the 3 workers"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(dataset, batch, world, says) -> None:
    with pytest.raises(UsageError, match=says):
        Loader(Consumer(0, world), 0, dataset, batch)
