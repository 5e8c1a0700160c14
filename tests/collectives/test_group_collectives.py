"""The collectives of scripts: the results of torch.distributed, and one error on all ranks for one rank's mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psctl.collectives.collective_links import PlaneLinks
from psctl.collectives.group_collectives import GroupCollectives
from psctl.collectives.reduce_operations import JOINS
from psctl.errors import PeerLost, UsageError
from psctl.schedule.algorithms.catalog import ScheduleOptions
from psctl.schedule.algorithms.collectives import ALGORITHMS
from psctl.schedule.contracts import Collective
from psctl.schedule.groups import Group
from tests.helpers.data_planes import DataPlanes
from tests.helpers.memory_channel import Hub, MemoryChannel
from tests.hypothesis_profile import examples

SUMS = ("ring", "one-shot", "recursive-doubling", "sharded", "halving-doubling", "pipelined-chain")

WORLDS = [(0,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 2, 3), (0, 0, 0, 1, 1)]
"""The host of each rank."""

MOVED = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


class MemoryLinks:
    """Links over channels in memory, which deliver in a random order."""

    gpu_channel = None
    shares_gpu = False

    def __init__(self, channel: MemoryChannel) -> None:
        self.channel = channel

    def space(self, size: int) -> torch.Tensor:
        return torch.full((size,), 77, dtype=torch.uint8)

    def take_back(self, space: torch.Tensor) -> None:
        space.fill_(99)  # no rank may read it any more

    def end(self, reason: str) -> None:
        self.channel.hub.end(reason)

    def why_ended(self) -> str:
        return ""

    def close(self) -> None:
        return


def chooser(seed: int) -> Callable[[Collective, int, int], tuple[str, ScheduleOptions]]:
    """Return a choice that takes every algorithm, by the seed."""

    def choose(collective: Collective, size: int, count: int) -> tuple[str, ScheduleOptions]:
        known = SUMS if collective == "all-reduce" else ALGORITHMS[collective]
        return known[seed % len(known)], ScheduleOptions(chunks=1 + seed % 4)

    return choose


Body = Callable[[GroupCollectives, int], Any]


def on_planes(hosts: tuple[int, ...], body: Body, seed: int = 0) -> list[Any]:
    """Return what each rank's calls return over real channels and shared memory, or their errors."""
    found: list[Any] = [None] * len(hosts)
    with DataPlanes(hosts) as planes:

        def run(rank: int) -> None:
            calls = GroupCollectives(rank, len(hosts), lambda: PlaneLinks(planes.planes[rank]), chooser(seed))
            found[rank] = body(calls, rank)

        errors = planes.all(run)
    return [error if error is not None else value for error, value in zip(errors, found, strict=True)]


def in_memory(world: int, body: Body, seed: int) -> list[Any]:
    """Return what each rank's calls return over channels that deliver in a random order."""
    hub = Hub(seed)
    planes = DataPlanes.__new__(DataPlanes)  # its threads only
    planes.world = world
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        calls = GroupCollectives(rank, world, lambda: MemoryLinks(MemoryChannel(hub, rank)), chooser(seed))
        found[rank] = body(calls, rank)

    errors = planes.all(run)
    return [error if error is not None else value for error, value in zip(errors, found, strict=True)]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return small whole numbers, of which sums and products are exact in every order; every other one is not dense."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.randint(-2, 3, (*shape, 2), generator=generator)
    return wide.abs().to(dtype)[..., rank % 2] if dtype in (torch.uint8, torch.bool) else wide.to(dtype)[..., rank % 2]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


SHAPES = st.one_of(st.just(()), st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5), SHAPES, st.sampled_from(sorted(JOINS)), st.integers(0, 40), st.data())
def test_reductions_are_those_of_torch(
    world: int, shape: tuple[int, ...], operation: str, seed: int, data: st.DataObject
) -> None:
    whole = operation not in ("mean",)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, *([torch.int64, torch.uint8] if whole else [])]))
    group = data.draw(st.one_of(st.none(), st.permutations(range(world)).map(lambda ranks: ranks[: 1 + seed % world])))
    ranks = list(range(world)) if group is None else group
    root = ranks[seed % len(ranks)]
    joined = fold(JOINS[operation], [values(rank, shape, dtype) for rank in ranks])
    expected = joined / len(ranks) if operation == "mean" else joined
    parts = [values(100 + at, (2, *shape), dtype)[0] for at in range(len(ranks))]

    def body(calls: GroupCollectives, rank: int) -> Any:
        if rank not in ranks:
            return None
        first, second = values(rank, shape, dtype), values(rank, shape, dtype)
        before = second.clone()
        every = calls.all_reduce(first, operation, group)
        at_root = calls.reduce(second, operation, root, group)
        part = calls.reduce_scatter([each + values(rank, shape, dtype) for each in parts], operation, group)
        return every is first, first, at_root, second, before, part

    for rank, (is_same, every, at_root, second, before, part) in (
        (rank, found) for rank, found in enumerate(in_memory(world, body, seed)) if rank in ranks
    ):
        assert is_same and same(every, expected)
        assert (at_root is second and same(second, expected)) if rank == root else same(second, before)
        mine = [parts[ranks.index(rank)] + values(each, shape, dtype) for each in ranks]
        total = fold(JOINS[operation], mine)
        assert same(part, total / len(ranks) if operation == "mean" else total)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 5), SHAPES, st.sampled_from(MOVED), st.integers(0, 40), st.data())
def test_moves_are_those_of_torch_and_shapes_may_differ(
    world: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    group = data.draw(st.one_of(st.none(), st.permutations(range(world)).map(lambda ranks: ranks[: 1 + seed % world])))
    ranks = list(range(world)) if group is None else group
    root = ranks[seed % len(ranks)]

    def of(source: int, to: int) -> torch.Tensor:
        return values(10 * source + to, (*shape, source + 2 * to), dtype)

    def body(calls: GroupCollectives, rank: int) -> Any:
        if rank not in ranks:
            return None
        calls.barrier(group)
        given = values(rank, shape, dtype)
        calls.broadcast(given, root, group)
        every = calls.all_gather(of(rank, 0), group)
        at_root = calls.gather(of(rank, 1), root, group)
        mine = calls.scatter([of(7, each) for each in ranks] if rank == root else None, root, group)
        return given, every, at_root, mine, calls.all_to_all([of(rank, each) for each in ranks], group)

    for rank, found in enumerate(in_memory(world, body, seed)):
        if rank not in ranks:
            continue
        given, every, at_root, mine, exchanged = found
        assert same(given, values(root, shape, dtype))
        assert all(map(same, every, [of(each, 0) for each in ranks]))
        assert at_root is None if rank != root else all(map(same, at_root, [of(each, 1) for each in ranks]))
        assert same(mine, of(7, rank))
        assert len(exchanged) == len(ranks) and all(map(same, exchanged, [of(each, rank) for each in ranks]))


@pytest.mark.parametrize("hosts", WORLDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_every_collective_over_real_channels(hosts: tuple[int, ...], seed: int) -> None:
    world, root = len(hosts), seed % len(hosts)
    plain = [None, {"lr": 0.1, "betas": [0.9, 0.99]}, "text" * 20_000, [1, -2.5, True], b"\0\1"]

    def body(calls: GroupCollectives, rank: int) -> Any:
        long = torch.arange(100_003, dtype=torch.float32) * (rank + 1)
        calls.all_reduce(long, "sum", None)
        return (
            long,
            calls.broadcast(plain[seed % 5] if rank == root else None, root, None),
            calls.all_gather({"rank": rank, "text": "x" * 50_000 * rank}, None),
            calls.all_to_all(torch.arange(world * 30_000).view(world, -1) + rank, None),
            calls.all_reduce(rank + 1, "prod", None), calls.all_reduce(0.5, "sum", None),
            calls.reduce_scatter(torch.full((world * 20_000,), rank + 1.0), "max", None),
        )  # fmt: skip

    for rank, found in enumerate(on_planes(hosts, body, seed)):
        long, value, gathered, exchanged, product, half, part = found
        assert same(long, torch.arange(100_003, dtype=torch.float32) * sum(range(1, world + 1)))
        assert value == plain[seed % 5]
        assert gathered == [{"rank": each, "text": "x" * 50_000 * each} for each in range(world)]
        wanted = [(torch.arange(30_000) + 30_000 * rank + each).view(1, -1) for each in range(world)]
        assert all(map(same, exchanged, wanted))
        assert product == fold(int.__mul__, range(1, world + 1)) and half == 0.5 * world
        assert same(part, torch.full((20_000,), float(world)))


def test_sums_of_fractions_have_the_same_bits_everywhere_and_every_time() -> None:
    for seed in range(6):

        def body(calls: GroupCollectives, rank: int) -> Any:
            generator = torch.Generator().manual_seed(rank)
            return calls.all_reduce(torch.randn(1003, generator=generator), "sum", None)

        first, again = in_memory(4, body, seed), in_memory(4, body, seed + 6 * 12)
        assert all(torch.equal(each, first[0]) for each in (*first, *again))


def messages(found: list[Any]) -> list[str]:
    assert all(isinstance(each, UsageError) for each in found), found
    return [each.message for each in found]


MISTAKES: dict[str, tuple[Body, str]] = {
    "shape": (
        lambda calls, rank: calls.all_reduce(torch.ones(3 + (rank == 1)), "sum", None),
        "run.all_reduce: ranks gave different shapes: rank 1: [4]; ranks 0, 2: [3]",
    ),
    "type": (
        lambda calls, rank: calls.all_gather(torch.ones(3, dtype=torch.int32 if rank == 2 else torch.float32), None),
        "run.all_gather: ranks gave different types: rank 2: int32; ranks 0-1: float32",
    ),
    "root": (
        lambda calls, rank: calls.broadcast(torch.ones(3), int(rank == 0), None),
        "run.broadcast: ranks gave different roots: rank 0: root=1; ranks 1-2: root=0",
    ),
    "no such root": (
        lambda calls, rank: calls.gather(1, 7 if rank == 1 else 0, None),
        "run.gather: rank 1: root=7 is not one of the ranks [0, 1, 2]",
    ),
    "operation": (
        lambda calls, rank: calls.all_reduce(torch.ones(3), "max" if rank else "min", None),
        "run.all_reduce: ranks gave different operations: rank 0: op='min'; ranks 1-2: op='max'",
    ),
    "no such operation": (
        lambda calls, rank: calls.reduce(torch.ones(3), "xor" if rank == 2 else "sum", 0, None),
        "run.reduce: rank 2: op='xor': expected one of sum, mean, prod, min, max",
    ),
    "mean of whole numbers": (
        lambda calls, rank: calls.all_reduce(3, "mean", None),
        "run.all_reduce: rank 0: op='mean' of int64: no such operation; convert the tensor first",
    ),
    "another collective": (
        lambda calls, rank: calls.barrier(None) if rank == 1 else calls.all_gather(1, None),
        "collectives: ranks gave different calls: rank 1: run.barrier; ranks 0, 2: run.all_gather",
    ),
    "a value instead of a tensor": (
        lambda calls, rank: calls.broadcast(torch.ones(3) if rank else 5, 1, None),
        "run.broadcast: ranks gave different values: rank 0: a plain value; ranks 1-2: a tensor",
    ),
    "too few": (
        lambda calls, rank: calls.scatter([1, 2] if rank == 0 else None, 0, None),
        "run.scatter: rank 0: it gave 2 values; expected a list with one value for each of 3 ranks",
    ),
    "no plain value": (
        lambda calls, rank: calls.all_gather(object() if rank == 1 else 1, None),
        "run.all_gather: rank 1: its value cannot be sent: Encoding objects of type object is unsupported",
    ),
    "no dense tensor": (
        lambda calls, rank: calls.all_reduce(torch.ones(3).to_sparse() if rank == 1 else torch.ones(3), "sum", None),
        "run.all_reduce: rank 1: its tensor is sparse_coo; collectives take dense tensors on the CPU or a GPU",
    ),
    "an expanded tensor": (
        lambda calls, rank: calls.broadcast(torch.ones(1).expand(3) if rank == 1 else torch.ones(3), 0, None),
        "run.broadcast: rank 1: its tensor holds elements several times (expand); give it contiguous()",
    ),
    "the order of a group": (
        lambda calls, rank: calls.all_gather(rank, [2, 1, 0] if rank == 1 else [0, 1, 2]),
        "run.all_gather: ranks gave different groups: rank 1: group [2, 1, 0]; ranks 0, 2: group [0, 1, 2]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_one_rank_is_one_error_on_all_and_the_next_call_works(mistake: str) -> None:
    body, expected = MISTAKES[mistake]

    def then(calls: GroupCollectives, rank: int) -> Any:
        try:
            body(calls, rank)
        except UsageError as error:
            return error.message, calls.all_gather(rank, None), calls.activity
        return "no error", None, None

    for hosts in ((0, 0, 0), (0, 1, 0)):
        assert on_planes(hosts, then) == [(expected, [0, 1, 2], "")] * 3


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (((0, 1), None, None), "run.barrier with group [0, 1]"),
        ((None, (0, 1), (0, 2)), "run.barrier with group [0, 2]"),
        ((None, (0, 2), None), "rank 1 called run.barrier with group (0, 2): of which it is no member"),
        ((None, None, (0, 1, 2, 3)), "rank 2 called run.barrier with group (0, 1, 2, 3): the job has ranks 0 to 2"),
        ((None, (1, 1), None), "rank 1 called run.barrier with group (1, 1): a group holds each rank once"),
    ],
)
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2)], ids=str)
def test_different_groups_are_an_error_on_every_rank(
    hosts: tuple[int, ...], groups: tuple[Any, ...], expected: str
) -> None:
    def body(calls: GroupCollectives, rank: int) -> Any:
        with pytest.raises(UsageError) as caught:
            calls.barrier(groups[rank])
        with pytest.raises(UsageError, match="different groups"):
            calls.barrier(None)  # and so is every later call
        return caught.value.message

    texts = on_planes(hosts, body)
    assert all(isinstance(each, str) and each.startswith("ranks called a coll") for each in texts), texts
    assert any(expected in each for each in texts), texts


def test_groups_that_overlap_take_turns_and_others_do_not_take_part() -> None:
    def body(calls: GroupCollectives, rank: int) -> Any:
        found = []
        for ranks in ((0, 1), (1, 2), (2, 3), (0, 3), (3, 1, 0)):
            if rank in ranks:
                found.append(calls.all_gather(rank, Group(ranks)))
        both = Group((0, 1, 2)) & Group((2, 1, 3))
        return found, calls.all_reduce(1, "sum", both | Group((3,))) if rank in (1, 2, 3) else None

    found = on_planes((0, 0, 1, 1), body)
    assert found[0] == ([[0, 1], [0, 3], [3, 1, 0]], None)
    assert found[3] == ([[2, 3], [0, 3], [3, 1, 0]], 3)


def test_a_rank_that_ends_is_named_and_no_rank_hangs() -> None:
    def body(calls: GroupCollectives, rank: int) -> Any:
        calls.barrier(None)
        if rank == 1:
            calls.close(failed=True)
            return "ended"
        calls.all_reduce(torch.ones(300_000), "sum", None)
        return None

    for hosts in ((0, 0, 0), (0, 1, 2)):
        first, ended, last = on_planes(hosts, body)
        assert ended == "ended"
        for each in (first, last):
            assert isinstance(each, PeerLost) and "run.all_reduce: a rank was lost" in each.message, each
        assert any("worker/1" in each.message for each in (first, last))


def test_the_activity_names_the_ranks_that_are_awaited() -> None:
    import threading

    seen: dict[int, str] = {}
    late, waits = threading.Event(), threading.Event()
    calls_of: dict[int, GroupCollectives] = {}

    def body(calls: GroupCollectives, rank: int) -> Any:
        calls_of[rank] = calls
        calls.barrier(None)
        if rank == 2:
            while "run.all_gather from worker/2" not in calls_of[0].activity:
                waits.wait(0.01)
            seen[0] = calls_of[0].activity
            late.set()
        calls.all_gather(rank, None)
        return calls.activity

    assert on_planes((0, 0, 1), body) == ["", "", ""]
    assert seen[0].startswith("sync: waiting for run.all_gather from ") and "worker/2" in seen[0]


def test_alone_they_are_trivial_and_mistakes_are_still_found() -> None:
    def never() -> Any:
        raise AssertionError("a rank alone connects to none")

    calls = GroupCollectives(0, 1, never, chooser(0))
    one = torch.arange(6.0).view(2, 3).t()
    assert calls.all_reduce(one, "mean", None) is one and calls.barrier(None) is None
    assert calls.broadcast([1, (2, 3)], 0, None) == [1, [2, 3]] and calls.gather("x", 0, [0]) == ["x"]
    assert same(calls.scatter([one], 0, None), one) and same(calls.reduce_scatter([one], "sum", None), one)
    for wrong in (lambda: calls.broadcast(1, 1, None), lambda: calls.all_reduce("x", "sum", None)):
        with pytest.raises(UsageError, match="rank 0"):
            wrong()
    with pytest.raises(UsageError, match="no member"):
        calls.barrier([])
