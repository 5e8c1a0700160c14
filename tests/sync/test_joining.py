"""Workers join and leave while the others train: every example counts once, and no other worker starts again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.job_world import Job, Killed
from tests.helpers.running import until

EPOCHS = 8
EXAMPLES, BATCH = 24, 12


class Scaled:
    """A training whose number of workers changes at steps; `scales` has (step, workers), `deaths` (rank, step, place).

    Every example of a clock that counts moves its own value.
    """

    def __init__(self, *scales, deaths=(), workers=2, wait=()) -> None:
        self.scales, self.deaths, self.wait = list(scales), list(deaths), dict(wait)
        self.workers, self.job, self.taken, self.worlds, self.starts = workers, None, {}, {}, []

    def train(self, **terms):
        self.job = Job(workers=self.workers, servers=2, target=64, free=6, **terms)
        return self.job.run(self)

    def __call__(self, run):
        model = nn.Linear(EXAMPLES, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self._die(run, "before prepare")
        model, optimizer = run.prepare(model, optimizer)
        self.starts.append((run.rank, run.step))
        loader = run.loader(list(torch.eye(EXAMPLES, dtype=torch.float64)), batch_size=BATCH)
        for epoch in run.epochs(EPOCHS):
            for x in loader:
                self.taken[run.step, run.rank] = (epoch, x.argmax(1).tolist())
                self.worlds[run.step, run.rank] = run.world
                optimizer.zero_grad()
                self._die(run, "before the forward")
                model(x).mean().backward()
                self._die(run, "after the backward")
                optimizer.step()
                self._change(run)
        run.wait()
        return [-one for one in model.weight.detach().reshape(-1).tolist()]

    def _change(self, run) -> None:
        if run.rank == 0 and self.scales and run.step == self.scales[0][0]:
            _, workers = self.scales.pop(0)
            most, self.workers = self.workers, workers  # those that leave give their numbers back when they have ended
            until(lambda: len(self.job.machine.job.live("worker")) <= most, 10)
            until(lambda: all(one.shares for one in self.job.machine.job.live("worker")), 10)
            before = len(self.job.answers)
            self.job.scale(workers)
            until(lambda: len(self.job.answers) > before, 10)
        if run.rank == 0 and run.step in self.wait:  # so that the change comes within the training
            until(lambda: len(self.job.machine.job.division.shared) >= self.wait[run.step], 10)

    def _die(self, run, place: str) -> None:
        if (run.rank, run.step, place) in self.deaths:
            self.deaths.remove((run.rank, run.step, place))
            raise Killed

    def check(self, found) -> None:
        """Compare the values with the batches that count."""
        counted: dict[int, tuple[int, list[int]]] = {}
        for (clock, rank), (epoch, examples) in sorted(self.taken.items()):
            if clock < self.job.lost.get(rank, clock + 1):
                counted.setdefault(clock, (epoch, []))[1].extend(examples)
        for epoch in range(EPOCHS):
            every = sorted(one for at, some in counted.values() if at == epoch for one in some)
            assert every == list(range(EXAMPLES)), f"epoch {epoch}"
        expected = [0.0] * EXAMPLES
        for _, examples in counted.values():
            for one in examples:
                expected[one] += 1 / len(examples)
        for values in found:
            if isinstance(values, list):
                assert values == pytest.approx(expected, rel=1e-12)


def notices(job: Job) -> list[str]:
    return [event.text for event in job.events if hasattr(event, "text")]


@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_join_while_the_others_train(staleness):
    story = Scaled((3, 4), wait={5: 1})
    found = story.train(staleness=staleness)
    assert [isinstance(values, list) for values in found] == [True] * 4
    story.check(found)
    assert sorted(rank for rank, _ in story.starts) == [0, 1, 2, 3], "no other worker started again"
    (first,) = {step for rank, step in story.starts if rank > 1}
    assert {world for (step, _), world in story.worlds.items() if step >= first} == {4}
    assert len(story.taken[first, 3][1]) == BATCH // 4


@pytest.mark.parametrize("staleness", [0, 2])
def test_workers_leave_while_the_others_train(staleness):
    story = Scaled((3, 2), workers=4, wait={5: 1})
    found = story.train(staleness=staleness)
    story.check(found)
    assert found[2:] == ["stopped", "stopped"]
    assert len(story.starts) == 4, "no worker started again"
    assert story.worlds[max(story.worlds)] == 2
    assert not [text for text in notices(story.job) if "lost" in text]
    assert story.job.status == "done"
    assert set(story.job.saved) == {16}, "the checkpoint of the last step has no part of those that left"


def test_workers_leave_and_others_join_under_their_numbers():
    story = Scaled((2, 1), (6, 3), (10, 2), workers=2, wait={4: 1, 8: 2, 12: 3})
    found = story.train()
    story.check(found)
    assert sorted(rank for rank, _ in story.starts) == [0, 1, 1, 2]
    assert [shared.ranks for shared in story.job.machine.job.division.shared] == [[0], [0, 1, 2], [0, 1]]


DEATHS = [
    ([(2, 0, "before prepare")], 3),  # it never took part
    ([(3, None, "before the forward")], 4),  # in its first step
    ([(3, None, "after the backward")], 4),
    ([(1, 5, "after the backward")], 4),  # one of the others, when the new ones take part
]


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(("deaths", "workers"), DEATHS)
def test_a_worker_that_is_killed_while_others_join(deaths, workers, elastic):
    story = Scaled((3, 4), wait={5: 1})
    story.deaths = deaths = [list(one) for one in deaths]

    def die(run, place: str) -> None:
        for one in list(deaths):
            if one[0] == run.rank and one[2] == place and one[1] in (None, run.step):
                deaths.remove(one)
                if run.rank < story.workers:  # rank 0 waits for the new ones, which would wait for a replacement
                    until(lambda: story.job.machine.job.division.shared, 10)
                raise Killed

    story._die = die
    found = story.train(elastic=elastic)
    assert not deaths
    story.check(found)
    assert story.job.status == "done"
    (shared, *_) = story.job.machine.job.division.shared
    assert len(shared.ranks) == workers


def train_alone(batches):
    """Train in this process with these batches of all ranks; return the values."""
    model = nn.Linear(EXAMPLES, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parts in batches:
        optimizer.zero_grad()
        total = sum(map(len, parts))
        gradient = torch.zeros_like(model.weight)
        for part in parts:
            model.weight.grad = None
            model(torch.eye(EXAMPLES)[part]).square().mean().backward()
            gradient += model.weight.grad * (len(part) * len(parts) / total)
        model.weight.grad = gradient / len(parts)
        optimizer.step()
    return model.weight.detach()


def test_the_result_is_that_of_the_same_members_in_one_process():
    seen = {}

    class Story(Scaled):
        def __call__(self, run):
            model = nn.Linear(EXAMPLES, 1, bias=False)
            nn.init.ones_(model.weight)
            model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            self.starts.append((run.rank, run.step))
            for _ in run.epochs(EPOCHS):
                for x in run.loader(list(torch.eye(EXAMPLES)), batch_size=BATCH):
                    seen[run.step, run.rank] = x.argmax(1).tolist()
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                    self._change(run)
            run.wait()
            return model.weight.detach().clone()

    story = Story((3, 3), (9, 1), wait={5: 1, 11: 2})
    found = story.train()
    steps = sorted({step for step, _ in seen})
    expected = train_alone([[seen[key] for key in sorted(seen) if key[0] == step] for step in steps])
    assert {len([key for key in seen if key[0] == step]) for step in steps} == {1, 2, 3}
    assert torch.equal(found[0], expected), "to the bit"


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_before_the_others_have_joined(rank, elastic):
    story = Scaled((3, 4), deaths=[(rank, 5, "after the backward")])
    story.check(story.train(elastic=elastic))
    assert not story.deaths
    assert story.job.status == "done"


@pytest.mark.parametrize("deaths", [[], [(0, 5, "after the backward")]])
def test_workers_that_start_when_the_others_have_finished_fail_nothing(deaths):
    story = Scaled((3, 4), deaths=deaths)
    die = story._die

    def wait_and_die(run, place: str) -> None:
        if run.rank >= 2:
            until(lambda: len(story.job.finished) == 2, 60)
        die(run, place)

    story._die = wait_and_die
    found = story.train()
    story.check(found)
    assert [isinstance(values, list) for values in found] == [True, True, False, False]
    assert story.job.status == "done"
    assert sorted(rank for rank, _ in story.starts) == [0, *[0 for _ in deaths], 1]
