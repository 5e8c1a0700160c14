"""Shards of streams: who gets which, in which order, what is refused, and what a checkpoint has."""

from __future__ import annotations

import pickle
from typing import Any

from msgspec.structs import replace

from psctl.coordinator.state.instructions import CloseConnection
from psctl.coordinator.streams import shard_grants
from psctl.coordinator.streams.shard_readers import merged
from psctl.job.stream_messages import (
    BatchSize,
    BatchTaken,
    NoShardLeft,
    ShardGiven,
    ShardPosition,
    ShardWanted,
    StreamEnded,
    StreamOpened,
    StreamPosition,
)
from tests.helpers.driven_job import W0, W1, DrivenJob, sent, training

W = (W0, W1)


def opened(shards: int = 3) -> DrivenJob:
    """Return a job whose two workers have opened a stream."""
    job = DrivenJob().training()
    for worker in W:
        ((_, position),) = sent(job.receive(worker, StreamOpened(0, 0, 0, 0, shards)), StreamPosition)
        assert position.open == () and position.sized and not position.problem
    return job


def answers(new: list[Any]) -> list[tuple[int, Any]]:
    """Return the answers to requests, with the ranks that get them."""
    kinds = (ShardGiven, NoShardLeft, StreamEnded)
    return [(member.rank, each) for kind in kinds for member, each in sent(new, kind)]


def want(job: DrivenJob, rank: int, batch: int, examples: int = 0) -> list[tuple[int, Any]]:
    return answers(job.receive(W[rank], ShardWanted(0, 0, batch, batch, examples)))


def take(job: DrivenJob, rank: int, batch: int, examples: int, *shards: ShardPosition) -> list[Any]:
    return job.receive(W[rank], BatchTaken(0, 0, batch, batch, examples, shards))


def test_requests_are_granted_by_batch_and_rank_not_by_arrival() -> None:
    job = opened()
    assert want(job, 1, 0) == [], "worker/0 may still ask for this batch"
    assert want(job, 0, 0) == [(0, ShardGiven(0, 0, 0, ShardPosition(0)))]
    new = take(job, 0, 0, 4, ShardPosition(0, 4))
    assert answers(new) == [(1, ShardGiven(0, 0, 0, ShardPosition(1)))]
    assert sent(new, BatchSize) == [], "the other's examples are not known"
    new = take(job, 1, 0, 3, ShardPosition(1, 3))
    assert [(member.rank, size.examples) for member, size in sent(new, BatchSize)] == [(0, 7), (1, 7)]


def test_one_without_examples_takes_part_while_another_has_some_and_all_end_together() -> None:
    job = opened(1)
    want(job, 0, 0)
    assert want(job, 1, 0) == []
    new = take(job, 0, 0, 2, ShardPosition(0, 2))
    assert answers(new) == [(1, NoShardLeft(0, 0, 0))]
    take(job, 1, 0, 0)
    take(job, 0, 1, 2)
    assert want(job, 1, 1) == [(1, NoShardLeft(0, 0, 1))]
    take(job, 1, 1, 0)
    assert want(job, 1, 2) == []
    assert want(job, 0, 2) == [(0, StreamEnded(0, 0, 2)), (1, StreamEnded(0, 0, 2))]


def test_batches_of_a_lost_worker_that_count_keep_their_examples() -> None:
    job = opened(2)
    want(job, 0, 0)
    take(job, 0, 0, 2)
    want(job, 1, 0)
    take(job, 1, 0, 4, ShardPosition(1, 4))
    take(job, 1, 1, 3)
    shard_grants.on_divided(job.machine.job, {1: 2}, ())
    assert want(job, 0, 1) == [(0, NoShardLeft(0, 0, 1))], "it takes part in the step with weight 0"
    assert [(member.rank, size.examples) for member, size in sent(take(job, 0, 1, 0), BatchSize)] == [(0, 3)]


def test_what_a_worker_cannot_have_read_closes_its_connection() -> None:
    for shards in ([ShardPosition(2, 1)], [ShardPosition(0, 1), ShardPosition(0, 1)]):
        job = opened()
        want(job, 0, 0)
        new = take(job, 0, 0, 1, *shards)
        assert [each.member for each in new if isinstance(each, CloseConnection)] == [W[0]]


def test_a_checkpoint_has_the_position_after_its_step() -> None:
    job = opened(4)
    want(job, 0, 0)
    take(job, 0, 0, 4, ShardPosition(0, 4))
    want(job, 1, 0)
    take(job, 1, 0, 4, ShardPosition(1, 4))
    want(job, 0, 1, 2)
    take(job, 0, 1, 4, ShardPosition(2, 2))  # of the next step already
    (commit,) = job.saves(1)
    (state,) = commit.streams
    assert state["open"] == [[0, [[0, 4]]], [1, [[1, 4]]]]
    assert state["unread"] == [[2, 4]] and state["partly"] == []


def test_streams_survive_the_coordinator() -> None:
    job = opened()
    want(job, 0, 0)
    again = pickle.loads(pickle.dumps(job.machine.job.streams))
    assert again == job.machine.job.streams


def test_a_stream_is_refused_where_ranks_count_equally() -> None:
    job = training()
    rank = job.machine.job.ranks[W[0]]
    assert rank.prepared is not None
    rank.prepared = replace(rank.prepared, hooked=True)
    ((_, position),) = sent(job.receive(W[0], StreamOpened(0, 0, 0, 0, 3)), StreamPosition)
    assert "accelerate_ddp" in position.problem and position.hint


def test_ranges_are_joined() -> None:
    assert merged([(3, 5), (0, 1), (1, 2), (5, 5), (7, 9), (8, 12)]) == [(0, 2), (3, 5), (7, 12)]
