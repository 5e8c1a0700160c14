"""Messages about streams: the coordinator gives the shards of a stream to workers, and learns what each has read.

    worker                              coordinator
    StreamOpened(batch)   --->          at the beginning of an epoch, and where a worker continues
                          <---          StreamPosition(the shards that the worker has open)
    ShardWanted(batch)    --->
                          <---          ShardGiven, NoShardLeft (take part without more) or StreamEnded
    BatchTaken(batch)     --->          what is open after the batch
                          <---          BatchSize(examples of all workers), under bsp

A shard is named by its place in the epoch's order, which workers make of seed and epoch. Batches are counted from the
beginning of the epoch; `step` is the number of steps that were finished when the batch was drawn.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from psctl import types
from psctl.job.message import JobMessage

MOST_OPEN = 4096
"""Shards that a worker may have open."""


class ShardPosition(msgspec.Struct, frozen=True, order=True):
    """A shard by its place in the epoch's order, and how many examples of it were taken."""

    place: types.Size
    examples: types.Size = 0


OpenShards = Annotated[tuple[ShardPosition, ...], msgspec.Meta(max_length=MOST_OPEN)]


# ---- a worker to the coordinator -----------------------------------------------------------------------------------


class StreamOpened(JobMessage, frozen=True):
    """The worker begins to read, at `batch`. `shards`: their number; `names`: a digest of their names, or ""."""

    stream: types.Count
    epoch: types.Step
    batch: types.Size
    step: types.Step
    shards: Annotated[int, msgspec.Meta(ge=0, le=types.MOST_LISTED)]
    names: Annotated[str, msgspec.Meta(max_length=64)] = ""


class ShardWanted(JobMessage, frozen=True):
    """The worker wants a shard for this batch, of which it has `examples` examples already or sure to come."""

    stream: types.Count
    epoch: types.Step
    batch: types.Size
    step: types.Step
    examples: types.Size


class BatchTaken(JobMessage, frozen=True):
    """The worker has taken `examples` examples for this batch; `open`: the shards that it has open now.

    The shards that it had, or was given, and that are not in `open`, are read to their ends.
    """

    stream: types.Count
    epoch: types.Step
    batch: types.Size
    step: types.Step
    examples: types.Size
    open: OpenShards


WorkerStreamMessage = StreamOpened | ShardWanted | BatchTaken
"""What a worker sends. In all messages `stream` is the number of the stream's loader in the script."""

# ---- the coordinator to a worker -----------------------------------------------------------------------------------


class StreamPosition(JobMessage, frozen=True):
    """Answer to StreamOpened: the shards that the worker continues with.

    `sized`: BatchSize follows for each batch. `problem`: why the stream cannot be read, and `hint` the cure.
    """

    stream: types.Count
    epoch: types.Step
    batch: types.Size
    open: OpenShards = ()
    sized: bool = False
    problem: str = ""
    hint: str = ""


class ShardGiven(JobMessage, frozen=True):
    """Answer to ShardWanted: read this shard."""

    stream: types.Count
    epoch: types.Step
    batch: types.Size
    shard: ShardPosition


class NoShardLeft(JobMessage, frozen=True):
    """Answer to ShardWanted: there is none now; take part in the batch with what is there."""

    stream: types.Count
    epoch: types.Step
    batch: types.Size


class StreamEnded(JobMessage, frozen=True):
    """Answer to ShardWanted: all shards of the epoch are read; there is no such batch."""

    stream: types.Count
    epoch: types.Step
    batch: types.Size


class BatchSize(JobMessage, frozen=True):
    """The examples of a batch over all workers."""

    stream: types.Count
    epoch: types.Step
    batch: types.Size
    examples: types.Size


CoordinatorStreamMessage = StreamPosition | ShardGiven | NoShardLeft | StreamEnded | BatchSize
"""What the coordinator sends."""
