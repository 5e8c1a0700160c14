"""Every example of a stream once an epoch in what counts, with any shards, workers, losses and resumes."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from psctl.clock import SystemClock
from psctl.errors import UsageError
from psctl.worker.run import Run
from psctl.worker.standalone import StandaloneSession
from tests.helpers.dying_planes import DyingPlanes
from tests.helpers.job_world import Job, Killed
from tests.hypothesis_profile import examples

COUNT = 64


class Shards:
    """Shards of examples 0 .. COUNT-1, each a row of the identity; it records which were opened."""

    def __init__(self, sizes: list[int]) -> None:
        assert sum(sizes) <= COUNT
        self.sizes, self.opened = sizes, Counter[int]()
        self.lock = threading.Lock()

    def open(self, shard: int):
        with self.lock:
            self.opened[shard] += 1
        first = sum(self.sizes[:shard])
        return iter(torch.eye(COUNT, dtype=torch.float64)[first : first + self.sizes[shard]])

    @property
    def count(self) -> int:
        return sum(self.sizes)


def train(
    run, shards, *, epochs=2, batch=8, act=lambda run, taken: None, taken=None, drawn=lambda run: None, **options
):
    """Train a model whose values say how often, and with which weight, each example was in a step."""
    model = nn.Linear(COUNT, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loader = run.loader(run.stream(range(len(shards.sizes)), shards.open), batch_size=batch, **options)
    taken = [] if taken is None else taken
    for epoch in run.epochs(epochs):
        for x in loader:
            drawn(run)
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            taken.append((run.step, epoch, x.argmax(1).tolist(), loader.examples))
            optimizer.step()
            run.report(loss=loss)
            act(run, taken)
    run.wait()
    return {"values": [-one for one in model.weight.detach().reshape(-1).tolist()], "taken": taken, "ended": run.step}


def expected(results):
    """Return the values of a training by one machine, whose steps are means over all examples that workers took."""
    steps: dict[int, list[int]] = {}
    for each in results:
        for step, _, found, own in each["taken"]:
            steps.setdefault(step, []).extend(found[:own])
    values = [0.0] * COUNT
    for found in steps.values():
        for one in found:
            values[one] += 1 / len(found)
    return values


def check(results, shards, epochs=2):
    """Check that each example is once an epoch in a step, with the weight that one machine would give it."""
    found: dict[int, list[int]] = {}
    for each in results:
        for _, epoch, examples_, own in each["taken"]:
            found.setdefault(epoch, []).extend(examples_[:own])
    assert {epoch: sorted(each) for epoch, each in found.items()} == {
        epoch: list(range(shards.count)) for epoch in range(epochs)
    }
    assert len({each["ended"] for each in results}) == 1, "all workers take the same number of steps"
    for each in results:
        assert each["values"] == pytest.approx(expected(results), rel=1e-12, abs=1e-15)


def test_alone_it_is_a_loader_like_any_other() -> None:
    run = Run(StandaloneSession(0, 1, "alone"), None, SystemClock())
    shards = Shards([5, 0, 9, 4])
    check([train(run, shards)], shards)
    assert shards.opened == Counter(dict.fromkeys(range(4), 2))


@settings(max_examples=examples(12), deadline=None)
@given(
    st.integers(1, 4), st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any), st.sampled_from([0, 2]),
    st.booleans(),
)  # fmt: skip
def test_every_example_is_once_an_epoch_in_a_step(workers, sizes, staleness, shuffle) -> None:
    shards = Shards([min(each, COUNT // len(sizes)) for each in sizes])
    results = Job(workers, 1, staleness=staleness).run(lambda run: train(run, shards, shuffle=shuffle))
    check(results, shards)


def test_workers_that_run_out_take_part_without_weight() -> None:
    shards = Shards([40, 3])
    results = Job(2, 1).run(lambda run: train(run, shards, epochs=1, shuffle=False))
    check(results, shards, epochs=1)
    empty = [step for each in results for step, _, _, own in each["taken"] if own == 0]
    assert len(empty) == 9, "40 examples by 4 are 10 steps, 3 are one"


def test_under_bsp_the_same_shards_go_to_the_same_workers_whoever_asks_first() -> None:
    def delayed(run, taken):
        if random.random() < 0.3:
            threading.Event().wait(0.01)

    sizes = [7, 3, 9, 1, 4, 8, 2, 6]
    runs = [Job(3, 1).run(lambda run: train(run, Shards(sizes), act=delayed)) for _ in range(3)]
    for each in runs[1:]:
        assert [rank["taken"] for rank in each] == [rank["taken"] for rank in runs[0]]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("at", [2, 3, 5, 9])
def test_a_resumed_job_continues_each_shard_and_opens_no_finished_one(workers, at) -> None:
    sizes = [7, 3, 9, 1, 4, 8]
    whole = Job(2, 1, every=1)
    before = whole.run(lambda run: train(run, Shards(sizes)))
    shards = Shards(sizes)
    rest = Job(workers, 1, resume=whole.saved[at]).run(lambda run: train(run, shards))
    earlier = [{**each, "taken": [one for one in each["taken"] if one[0] < at]} for each in before]
    found: dict[int, list[int]] = {}
    for each in [*earlier, *rest]:
        for _, epoch, taken, own in each["taken"]:
            found.setdefault(epoch, []).extend(taken[:own])
    assert {epoch: sorted(each) for epoch, each in found.items()} == {0: list(range(32)), 1: list(range(32))}
    if workers == 2:
        assert [each["taken"] for each in rest] == [
            [one for one in each["taken"] if one[0] >= at] for each in before
        ], "bit-equal to the run that was not interrupted"
        assert [each["values"] for each in rest] == [each["values"] for each in before]
    if workers == 3:
        return  # a worker that never had an example opens a shard for the shape of its batch
    last = max(epoch for each in earlier for _, epoch, *_ in each["taken"])
    used = [one for each in earlier for _, epoch, taken, own in each["taken"] if epoch == last for one in taken[:own]]
    for shard, size in enumerate(sizes):
        first = sum(sizes[:shard])
        finished = {*range(first, first + size)} <= {*used}
        assert shards.opened[shard] == 2 - last - finished, "finished shards are not opened again in that epoch"


def test_under_a_collective_too(tmp_path) -> None:
    shards, planes = Shards([7, 3, 9, 1, 4, 8]), DyingPlanes(tmp_path, (0, 1), {})
    try:
        results = Job(2, 0, strategy="ring", planes=planes).run(lambda run: train(run, shards))
    finally:
        planes.close()
    check(results, shards)
    quiet = Job(2, 1).run(lambda run: train(run, Shards(shards.sizes)))
    assert [each["taken"] for each in results] == [each["taken"] for each in quiet]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", [1, 3, 4, 6])
def test_a_worker_that_is_replaced_reads_the_same_again(rank, when) -> None:
    sizes = [7, 3, 9, 1, 4, 8]
    quiet = Job(2, 1).run(lambda run: train(run, Shards(sizes)))
    job = Job(2, 1)
    killed: list[int] = []
    taken: dict[int, list] = {0: [], 1: []}

    def die(run):
        if run.rank == rank and run.step == when and not killed:
            while job.newest_state_of(0) < when:  # else all start again
                threading.Event().wait(0.001)
            killed.append(when)
            raise Killed

    found = job.run(lambda run: train(run, Shards(sizes), drawn=die, taken=taken[run.rank]))
    assert killed
    assert [each["values"] for each in found] == [each["values"] for each in quiet], "to the bit"
    again = {one[0]: one for one in found[rank]["taken"]}
    assert [again[step] for step in sorted(again)] == quiet[rank]["taken"]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("when", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("after_draw", [False, True])
def test_the_shards_of_a_worker_that_is_not_replaced_are_given_to_others(staleness, when, after_draw) -> None:
    sizes = [7, 3, 9, 1, 4, 8, 5, 6, 11, 2]
    shards = Shards(sizes)
    mine: list = []

    def die(run, _=None):
        if run.rank == 1 and run.step == when:
            raise Killed

    def script(run):
        where = {"drawn": die} if after_draw else {"act": die}
        return train(run, shards, taken=mine if run.rank == 1 else None, **where)

    job = Job(3, 1, elastic=True, staleness=staleness)
    results = [each for each in job.run(script) if each is not None]
    cut = job.lost[1]
    dead = {"taken": [one for one in mine if one[0] < cut], "ended": results[0]["ended"]}
    found: dict[int, list[int]] = {}
    for each in [*results, dead]:
        for _, epoch, taken, own in each["taken"]:
            found.setdefault(epoch, []).extend(taken[:own])
    assert {epoch: sorted(each) for epoch, each in found.items()} == {
        epoch: list(range(shards.count)) for epoch in range(2)
    }
    for each in results:
        assert each["values"] == pytest.approx(expected([*results, dead]), rel=1e-12)


def test_a_worker_that_joins_reads_too_and_one_that_leaves_returns_its_shards() -> None:
    sizes = [3] * 20
    shards = Shards(sizes)
    job = Job(2, 1, free=1)
    asked: list[int] = []

    def scale(run, taken):
        for step, workers in ((1, 3), (9, 2)):
            if run.rank == 0 and run.step == step and step not in asked:
                asked.append(step)
                job.scale(workers)
        threading.Event().wait(0.1)

    taken: dict[int, list] = {0: [], 1: [], 2: []}
    results = job.run(lambda run: train(run, shards, act=scale, taken=taken[run.rank], batch=6))
    found = [one for each in taken.values() for _, _, examples_, own in each for one in examples_[:own]]
    assert Counter(found) == Counter(dict.fromkeys(range(60), 2))
    assert taken[2], "the new worker has read"
    assert results[0]["values"] == pytest.approx(expected([{"taken": each} for each in taken.values()]), rel=1e-12)


def alone() -> Run:
    return Run(StandaloneSession(0, 1, "alone"), None, SystemClock())


@pytest.mark.parametrize("processes", [1, 2])
def test_loader_processes_read_the_same_examples(processes) -> None:
    sizes = [7, 3, 9, 1, 4, 8]
    shards = Shards(sizes)
    found = train(alone(), shards, epochs=1, num_workers=processes)
    check([found], shards, epochs=1)
    assert not shards.opened, "other processes opened them"
    if processes == 1:
        assert found["taken"] == train(alone(), Shards(sizes), epochs=1)["taken"]


def test_random_numbers_depend_on_seed_epoch_shard_and_position_alone() -> None:
    def noisy(shard):
        for at in range(6):
            yield torch.tensor([float(shard), float(at), random.random(), torch.rand(()).item()])

    def read(num_workers=0, batch=4):
        run = alone()
        loader = run.loader(run.stream(range(4), noisy), batch_size=batch, num_workers=num_workers)
        return sorted(tuple(row) for x in loader for row in x.tolist())

    assert read() == read(1) == read(2) == read(batch=7)


def _tiny():
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def test_a_stream_is_an_iterable_dataset_for_evaluations() -> None:
    run = Run(StandaloneSession(0, 1, "alone"), None, SystemClock())
    stream = run.stream(range(3), lambda shard: range(10 * shard, 10 * shard + 3), length=9)
    assert isinstance(stream, IterableDataset)
    assert list(stream) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert sorted(int(one) for batch in DataLoader(stream, 2, num_workers=2) for one in batch) == list(stream)


def test_progress_is_foreseen_from_the_length_or_the_last_epoch() -> None:
    def totals(*, anew=False, **options):
        def script(run):
            model, optimizer = run.prepare(*_tiny())
            stream = run.stream(range(4), lambda shard: [torch.zeros(1)] * 5, **options)
            loader = run.loader(stream, batch_size=4)
            for _ in run.epochs(2):
                loader = run.loader(stream, batch_size=4) if anew else loader
                for x in loader:
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
                    threading.Event().wait(0.02)
            return len(loader)

        job = Job(1, 1, report_seconds=0.01)
        assert job.run(script) == [5]
        return [report.total for _, report in job.reports if 0 < report.step < 10]

    assert set(totals(length=20)) == {10}
    assert set(totals()) == {0, 10}, "unknown in the first epoch"
    assert set(totals(anew=True)) == {0}


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda run: run.loader(Counting(), 4), "run.stream"),
        (lambda run: run.stream("data/*.txt", open), "a list"),
        (lambda run: run.stream([], open), "empty"),
        (lambda run: run.stream([1], None), "a function"),
        (lambda run: run.stream([1], open, length=0), "length"),
        (lambda run: run.loader(run.stream([1], open), 0), "batch_size"),
        (lambda run: run.loader(run.stream([1], open), 4, keys=lambda batch: batch), "keys="),
    ],
)
def test_what_is_no_stream_is_refused(make, said) -> None:
    with pytest.raises(UsageError) as error:
        make(Run(StandaloneSession(0, 1, "alone"), None, SystemClock()))
    assert said in f"{error.value.message} {error.value.hint}"


@pytest.mark.parametrize(("options", "said"), [({"staleness": None}, "asp"), ({"period": 2}, "period")])
def test_streams_that_cannot_be_exact_are_refused(options, said) -> None:
    with pytest.raises(UsageError, match=said):
        Job(2, 1, **options).run(lambda run: train(run, Shards([8, 8])))


def test_lists_that_differ_are_refused() -> None:
    with pytest.raises(UsageError, match="differs from that of another worker"):
        Job(2, 1).run(lambda run: train(run, Shards([8, 8] if run.rank else [8, 8, 8])))
    whole = Job(2, 1, every=1)
    whole.run(lambda run: train(run, Shards([8, 8])))
    with pytest.raises(UsageError, match="another list of shards"):
        Job(2, 1, resume=whole.saved[1]).run(lambda run: train(run, Shards([8, 8, 8])))
