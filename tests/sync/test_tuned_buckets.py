"""`sync.bucket: auto`: all ranks try and choose the same sizes, and a worker that is lost meanwhile changes no bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from psctl.clock import Clock
from psctl.collectives.allreduce_backends import EngineAllReduce
from psctl.job.events import BucketChosen
from psctl.sync import build_synchronizer, choice_tuner
from psctl.sync.bucket_allreduce import BucketReducer
from psctl.sync.bucket_layout import SIZES, BucketSpace, buckets, different_sizes
from psctl.sync.choice_tuner import ROUNDS, ChoiceTuner
from psctl.train_state import random_generators
from psctl.types import BUCKET
from tests.sync.test_replaced_rank import Training, check

TRIED = (100, 40, 400)


class Ranks:
    """Tuners of several ranks, whose clocks are those of the given durations, by size."""

    def __init__(self, *seconds: dict[int, float], sizes=SIZES, dtype=torch.float32) -> None:
        self.seconds, self.dtype = list(seconds), dtype
        self.clocks = [Moving() for _ in seconds]
        self.tuners = [ChoiceTuner(sizes, clock, len(seconds), "ring", None) for clock in self.clocks]
        self.rounds: list[int] = []

    def round(self, lost: int | None = None, late: float = 0.0) -> None:
        """Make a round; of the rank `lost`, only what its replacement knows; a loss takes `late` seconds."""
        size = self.tuners[0].choice
        assert {each.choice for each in self.tuners} == {size}, "all ranks divide alike"
        self.rounds.append(size)
        vectors = [torch.zeros(3, dtype=self.dtype) for _ in self.tuners]
        if lost is not None:
            giver = self.tuners[(lost + 1) % len(self.tuners)]
            fresh = ChoiceTuner(giver.choices, self.clocks[lost], len(self.tuners), "ring", None)
            fresh.load(giver.state())
            self.tuners[lost] = fresh
            for each in self.tuners:
                each.forget()
        for tuner, clock, vector, seconds in zip(self.tuners, self.clocks, vectors, self.seconds, strict=True):
            tuner.write(vector)
            clock.time += seconds[size] + late
        total = sum(each.double() for each in vectors).to(self.dtype).tolist()
        for tuner in self.tuners:
            tuner.end_round(total)

    def run(self, *lost: tuple[int, int]) -> int:
        """Make rounds until a size is chosen; `lost` are (round, rank)."""
        while self.tuners[0].measures:
            rank = dict(lost).get(len(self.rounds))
            self.round(rank, 50.0 if rank is not None else 0.0)
        assert len({each.choice for each in self.tuners}) == 1
        return self.tuners[0].choice


class Moving(Clock):
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def times(**changes: float) -> dict[int, float]:
    return dict.fromkeys(SIZES, 1.0) | {int(size[1:]): seconds for size, seconds in changes.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_size_with_the_least_mean_of_all_ranks_is_chosen(dtype) -> None:
    ranks = Ranks(times(_1000000=0.5, _4000000=0.7), times(_1000000=1.1, _4000000=0.7), dtype=dtype)
    assert ranks.run() == 4_000_000
    assert len(ranks.rounds) == ROUNDS * (len(SIZES) + 3), "the usual one and those near the best are tried again"
    measured = dict(ranks.tuners[1].medians)
    assert measured[4_000_000] == pytest.approx(0.7, rel=1e-4)
    assert measured[1_000_000] == pytest.approx(0.8, rel=1e-4)


def test_the_usual_size_is_kept_where_others_save_little() -> None:
    assert Ranks(times(_1000000=0.98)).run() == BUCKET
    assert Ranks(times(_1000000=0.96)).run() == 1_000_000


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 5, 9, 17, 23])
def test_a_loss_changes_neither_the_sizes_tried_nor_the_choice(at: int, rank: int) -> None:
    seconds = [times(_10000000=0.6), times(_10000000=0.7), times(_10000000=0.65)]
    undisturbed = Ranks(*seconds)
    assert undisturbed.run() == 10_000_000
    disturbed = Ranks(*seconds)
    assert disturbed.run((at, rank)) == 10_000_000
    assert disturbed.rounds == undisturbed.rounds
    assert max(one for _, one in disturbed.tuners[0].medians) < 2, "the delay by the loss does not count"


def test_a_choice_goes_on_from_a_checkpoint_of_the_same_world_only() -> None:
    ranks = Ranks(times(_1000000=0.5))
    for _ in range(7):
        ranks.round()
    saved = ranks.tuners[0].state()
    assert ChoiceTuner(SIZES, Moving(), 1, "ring", saved).state() == saved
    for world, strategy, sizes in [(2, "ring", SIZES), (1, "tree", SIZES), (1, "ring", SIZES[:3])]:
        assert ChoiceTuner(sizes, Moving(), world, strategy, saved).state()["rounds"] == 0
    assert ChoiceTuner(SIZES, Moving(), 1, "ring", {"rounds": "many"}).state()["rounds"] == 0
    chosen = ranks.run()
    done = ChoiceTuner(SIZES, Moving(), 1, "ring", ranks.tuners[0].state())
    assert (done.choice, done.measures) == (chosen, False)


def test_one_division_needs_no_choice() -> None:
    parameters = [nn.Parameter(torch.zeros(10))]
    sizes = different_sizes(parameters, SIZES)
    assert sizes == (BUCKET,)
    tuner = ChoiceTuner(sizes, Moving(), 2, "ring", None)
    assert (tuner.choice, tuner.measures) == (BUCKET, False)
    reported: list[tuple[int, object]] = []
    BucketReducer(None, Summing(), parameters, tuner=tuner, on_chosen=lambda *report: reported.append(report))
    assert reported == [(BUCKET, [])], "the check of the plan waits for it"


def test_sizes_that_divide_alike_are_tried_once() -> None:
    parameters = [nn.Parameter(torch.zeros(300_000)) for _ in range(10)]  # 1.2 MB each
    assert different_sizes(parameters, SIZES) == (BUCKET, 1_000_000, 4_000_000)
    assert len(buckets(parameters, size=1_000_000)) == 10
    assert len(buckets(parameters, size=4_000_000)) == 4


class Summing(EngineAllReduce):
    """One rank's sums, which keep account of memory."""

    takes_parts = True

    def __init__(self) -> None:
        self.world, self.made = 1, []

    def buffer(self, length, dtype, device):
        self.made.append(length * dtype.itemsize)
        return torch.zeros(length, dtype=dtype)

    def put(self, vector):
        return self

    def wait(self) -> None:
        return


def test_all_divisions_share_one_memory(monkeypatch) -> None:
    monkeypatch.setattr(choice_tuner, "ROUNDS", 2)
    parameters = [nn.Parameter(torch.ones(9, dtype=dtype)) for dtype in (torch.float64, torch.float32) * 4]
    clock, summing, chosen = Moving(), Summing(), []
    tuner = ChoiceTuner(different_sizes(parameters, TRIED), clock, 1, "ring", None)
    reducer = BucketReducer(None, summing, parameters, tuner=tuner, on_chosen=lambda *told: chosen.append(told))
    made, divisions = list(summing.made), set()
    for number in range(20):
        divisions.add(len(reducer.buckets))
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, number + 0.25)
        for bucket in range(len(reducer.buckets)):
            reducer.send(bucket, 1.0)
        clock.time += len(reducer.buckets)
        reducer.finish()
        assert all(torch.equal(one.grad, torch.full_like(one, number + 0.25)) for one in parameters)
    assert len(divisions) == 3
    assert summing.made == made, "no memory was taken for further divisions"
    assert [size for size, _ in chosen] == [400]
    assert {size for size, _ in chosen[0][1]} == set(TRIED)


def test_vectors_of_a_space_do_not_overlap() -> None:
    space = BucketSpace(Summing(), {torch.device("cpu"): 3 * 64})
    for _ in range(2):
        space.begin()
        found = [space.vector(n, torch.float64, torch.device("cpu")) for n in (1, 8, 2)]
        for number, each in enumerate(found):
            each.fill_(number)
        assert [each.unique().tolist() for each in found] == [[0.0], [1.0], [2.0]]


# ---- whole trainings with losses -----------------------------------------------------------------------------------


@pytest.fixture
def short_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rounds try three sizes, and the second is chosen, whatever is measured."""
    monkeypatch.setattr(random_generators.GeneratorStates, "differing", lambda self, before: {})  # ranks are threads
    monkeypatch.setattr(build_synchronizer, "SIZES", TRIED)
    monkeypatch.setattr(choice_tuner, "ROUNDS", 2)
    monkeypatch.setattr(choice_tuner, "worth_another", lambda times: (0, 1))
    monkeypatch.setattr(choice_tuner, "best", lambda times: 1)


_EXPECTED: dict = {}


def expected(folder, strategy: str):
    if strategy not in _EXPECTED:
        (folder / "undisturbed").mkdir()
        training = Training()
        _EXPECTED[strategy] = training.run(folder / "undisturbed", strategy=strategy, bucket=0)
        assert chosen(training) == [40]
    return _EXPECTED[strategy]


def chosen(training: Training) -> list[int]:
    return [each.size for each in training.job.events if isinstance(each, BucketChosen)]


@pytest.mark.usefixtures("short_choice")
@pytest.mark.parametrize(
    ("rank", "step", "place"),
    [
        pytest.param(rank, step, place, marks=[] if at % 3 == turn % 3 else pytest.mark.soak)
        for at, (rank, step) in enumerate([(0, 4), (1, 4), (2, 5), (0, 7), (1, 9), (2, 10)])
        for turn, place in enumerate(["before the forward", "after the backward", "after the step"])
    ],
)
def test_a_worker_lost_between_sums_is_replaced_with_the_same_bits(tmp_path, rank, step, place) -> None:
    training = Training((rank, step, place))
    found = training.run(tmp_path, bucket=0)
    check(found, expected(tmp_path, "ring"))
    assert training.replaced() == 1
    assert chosen(training) == [40]


@pytest.mark.usefixtures("short_choice")
@pytest.mark.parametrize("calls", [0, 8, 29, 60])
@pytest.mark.parametrize(("strategy", "rank"), [("ring", 2), ("tree", 1)])
def test_a_worker_lost_within_a_sum_is_replaced_with_the_same_bits(tmp_path, strategy, rank, calls) -> None:
    training = Training()
    found = training.run(tmp_path, {(rank, 0): calls}, strategy=strategy, bucket=0)
    check(found, expected(tmp_path, strategy))
    assert chosen(training) == [40]


@pytest.mark.soak
@pytest.mark.usefixtures("short_choice")
@pytest.mark.parametrize("calls", range(120))
@pytest.mark.parametrize("strategy", ["ring", "tree", "halving-doubling", "sharded"])
@pytest.mark.parametrize("rank", range(3))
def test_a_worker_lost_at_any_call_is_replaced_with_the_same_bits(tmp_path, strategy, rank, calls) -> None:
    found = Training().run(tmp_path, {(rank, 0): calls}, strategy=strategy, bucket=0)
    check(found, expected(tmp_path, strategy))


@pytest.mark.usefixtures("short_choice")
@pytest.mark.parametrize("calls", [0, 7, 20])
def test_a_replacement_lost_in_turn_is_replaced(tmp_path, calls: int) -> None:
    training = Training()
    check(training.run(tmp_path, {(1, 0): 12, (1, 1): calls}, bucket=0), expected(tmp_path, "ring"))


@pytest.mark.usefixtures("short_choice")
def test_processes_of_one_host_share_the_memory_of_all_divisions(tmp_path) -> None:
    training = Training((2, 5, "after the backward"), (0, 9, "after the forward"))
    found = training.run(tmp_path, hosts=(0, 0, 0), shared=True, bucket=0)
    check(found, expected(tmp_path, "ring"))
