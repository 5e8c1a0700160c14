"""Messages between workers and servers of dense parameters: one class a message.

Clocks count from 0: clock c is the c-th step of the job. *Version* v of a shard holds the clocks 0 .. v-1, so version 0
is the start values and a pull at clock c is answered by version c-s or newer (s: staleness, 0 under bsp).
The docstring of a message states its payload, if it has one. A message carries all of its bytes, however many: the
transport sends them in pieces, into the receiver's buffer. If the connection breaks, the whole message is sent again.

A push is sent to the shard's *primary*. When all of it has arrived there, the primary sends PushStaged; when it is
applied on every member of the shard's chain of replicas, the primary sends Pushed (Values of a version that holds the
clock imply Pushed, under bsp and ssp). The worker keeps the bytes until Pushed. A worker sends nothing about a shard to
a server that has not sent Leads for it on this connection; on every Leads everything outstanding is sent again
(dense_client_state.py).
"""

from __future__ import annotations

import msgspec

from psctl.types import Number

PART = 512 * 1024
"""Bytes of one part of a checkpoint."""

LARGEST = 1 << 30
"""Limit of the bytes of one shard's gradients or values, and of one rank state; the receiver knows the exact size."""

LARGEST_COPY = 1 << 36
"""Limit of the bytes of a shard's state in a copy; the receiver knows a lower one."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the class's name is its tag on the wire."""


class SharedRange(msgspec.Struct, frozen=True):
    """Bytes [offset, offset + size) of the sender's shared memory number `segment`; see buffer_allocator.py."""

    segment: int
    offset: int
    size: int


# ---- a worker to a server ----------------------------------------------------------------------------------------


class StartValues(Message, frozen=True):
    """Payload: start values of the shard. Rank 0 alone sends them."""

    shard: int


class Push(Message, frozen=True):
    """A worker's gradients of one shard at one clock. Payload: the gradients, or their code (error_feedback.py).

    `present` has one byte a piece, 1 where this worker had a gradient; there is no payload when all are 0.
    `landed` is the newest version of the shard that this worker holds completely: older ones may be overwritten.
    `at`: there is no payload; the bytes are at this place.
    Where workers step (`Terms.pushes_ask`) it is answered as a Pull of the version that holds it would be.
    `covers`: the bytes are a host sum (host_sums.py) of these ranks' gradients, each times its weight; the sender is
    one of them. `weight` is the sum of their weights, `present` the union of theirs. (): the sender's gradients alone.
    """

    shard: int
    clock: int
    weight: float
    present: bytes
    landed: int
    at: SharedRange | None = None
    covers: tuple[int, ...] = ()


class Step(Message, frozen=True):
    """Order the step of `clock` with these numbers, a dict for each parameter group.

    Sent when the worker's pushes of `clock` to other servers are staged (PushStaged), after its pushes to this server.
    A push in another worker's host sum is sent on that worker's connection: it must be staged on any server first.

    Sent to every server, where servers step (`update: server`). So when all ranks' orders of a clock are at any one
    server, every shard holds every push of it: a lost worker's clocks can then be cut consistently.
    The mean gradient is multiplied by `scale` first (clipping); None: unchanged. `save`: the result is a checkpoint.
    """

    clock: int
    groups: list[dict[str, Number]]
    scale: float | None = None
    save: bool = False


class StepInBackward(Message, frozen=True):
    """Order the step of `clock` for these shards as soon as all of their own pushes are in, with the numbers of `Step`.

    Sent before the clock's pushes, only where `Terms.in_backward` is set, and never again: a shard whose server lacks
    it, or has withdrawn it because a worker is lost, steps by `Step`, which follows in any case.
    """

    clock: int
    shards: list[int]
    groups: list[dict[str, Number]]


class SaveNow(Message, frozen=True):
    """Make a checkpoint of version `version`, which no step ordered to be saved.

    Any number of ranks may send it; under asp all must, each before it pushes clock `version`.
    """

    version: int


class NormsQuery(Message, frozen=True):
    """Request NormsAnswer of `clock` for each shard led by the receiver, once all pushes have arrived."""

    clock: int


class Pull(Message, frozen=True):
    """Request these shards, in order of priority: each at version `oldest` or newer that is also newer than `have`.

    Under asp versions count pushes: there the values hold this worker's own pushes of all clocks before `clock`, and
    all workers' pushes of all clocks before `oldest`.
    """

    clock: int
    shards: list[int]
    oldest: int
    have: list[int]


class WaitQuery(Message, frozen=True):
    """Requests the ranks of the workers that the sender waits for; the answer also proves that the server is alive.

    Parameters: the sender waits for the version that `clock` reads. Tables: it waits until all of the group of `store`
    have finished `clock` clocks.
    """

    clock: int
    store: str = ""


class PutRankState(Message, frozen=True):
    """Payload: a rank's state outside the gradients (buffers, tracked state) at the start of `clock`.

    Sent to the primary of shard 0, which sends it down its chain. `rank`: the state's rank; under bsp and ssp only
    rank 0's is used, under asp each rank sends its own.
    """

    clock: int
    rank: int = 0


class RankStateQuery(Message, frozen=True):
    """Request the rank state of `rank` at `clock`, once it is there. Sent to the primary of shard 0."""

    clock: int
    rank: int = 0


class SharedMemoryOffer(Message, frozen=True):
    """Offer shared memory of this number: a receiver that can map it is on the same host, and needs no payloads."""

    segment: int


# ---- a reader to a server, and its answers -------------------------------------------------------------------------


class ReadShards(Message, frozen=True):
    """Ask for these shards, each at `version`, or at the newest one where that is newer already.

    Answered by ShardRead of each when the version is on all of its chain. A later request for a shard replaces it.
    """

    ticket: int
    shards: list[int]
    version: int


class ShardRead(Message, frozen=True):
    """A shard at one version, all of it the same version; all workers' clocks before `clocks` are in it.

    Payload: the values.
    """

    ticket: int
    shard: int
    version: int
    clocks: int


class ReadRankState(Message, frozen=True):
    """Ask the primary of shard 0 for rank 0's state at `clock`, or for the newest one. Answered by RankStateRead."""

    ticket: int
    clock: int


class RankStateRead(Message, frozen=True):
    """Payload: rank 0's state at the start of `clock`; -1: there is none."""

    ticket: int
    clock: int


# ---- a worker to another of its host (host_collection.py) ---------------------------------------------------------


class HostPush(Message, frozen=True):
    """Offer a shard's gradients to its collector, for the sum of the host or the rack.

    They stay at this place until they are Pushed; None: between hosts of a rack, the payload has them.
    """

    shard: int
    clock: int
    weight: float
    present: bytes
    at: SharedRange | None


class PushAlone(Message, frozen=True):
    """Exclude a shard's gradients of a clock from the host sum: each worker pushes its own."""

    shard: int
    clock: int


class ValuesWanted(Message, frozen=True):
    """Ask the collector of these shards, which is in this rack, for the values that a Pull would ask a server for.

    Answered by Values of each shard with `oldest` of all workers' clocks at least.
    """

    clock: int
    shards: list[int]
    oldest: int


# ---- a server to a worker ----------------------------------------------------------------------------------------


class SharedMemoryAccepted(Message, frozen=True):
    """Accept a SharedMemoryOffer: from now on both sides send places in each other's memory instead of payloads."""


class Leads(Message, frozen=True):
    """The sender is the primary of these shards, by assignment `epoch` or a newer one: send all that is outstanding."""

    epoch: int
    shards: list[int]


class PushStaged(Message, frozen=True):
    """The push of this clock has arrived completely at the primary. Its bytes must still be kept."""

    shard: int
    clock: int


class Pushed(Message, frozen=True):
    """The effect of the push of this clock is on every member of the chain: its bytes may be released."""

    shard: int
    clock: int


class NormsAnswer(Message, frozen=True):
    """Squares of the 2-norm of the mean gradient of each piece, in piece order; None where no worker had a gradient."""

    shard: int
    clock: int
    squares: list[float | None]


class Values(Message, frozen=True):
    """A shard at one version, all of it the same version; answers the Pull at `clock`. Payload: the values.

    `present` has a byte for each piece: whether any worker had a gradient at the clock that made this version.
    `clocks`: all workers' clocks before it are in the values; except under asp it is the version itself.
    `at`: there is no payload; the bytes are at this place.
    """

    shard: int
    version: int
    present: bytes
    clock: int
    clocks: int
    at: SharedRange | None = None


class RankStateAnswer(Message, frozen=True):
    """Answer to RankStateQuery. Payload: the state."""

    clock: int


class WaitAnswer(Message, frozen=True):
    """Answer to WaitQuery: the ranks whose pushes, step orders or clocks are missing (none: they are being applied)."""

    clock: int
    workers: list[int]
    store: str = ""


class Refused(Message, frozen=True):
    """The job (tables: this store) cannot go on, for example because two ranks ordered different steps."""

    reason: str
    hint: str
    store: str = ""


# ---- a server to a server: the chain of one shard (replica_chain.py) ---------------------------------------------


class Forward(Message, frozen=True):
    """Entry `number` of the shard, which makes version number+1 of version `number`. Payload: that of the entry.

    `head` describes the entry in the encoding of the replicated state.
    """

    shard: int
    number: int
    epoch: int
    head: bytes


class Forwarded(Message, frozen=True):
    """The sender and all servers after it have every entry below `version`; the sender those below `has` (-1: none).

    `epoch`: the newest assignment that the sender has received. `copy`: the last copy that it restored. `missed`: it
    ignored an entry because it lacks earlier ones, or a copy because it did not expect one at that time.
    """

    shard: int
    version: int
    has: int
    epoch: int
    copy: str = ""
    missed: bool = False


class ReplicaQuery(Message, frozen=True):
    """Request a report (Forwarded) from a server that follows the sender by assignment `epoch`."""

    shard: int
    epoch: int


class StateCopy(Message, frozen=True):
    """Payload: the whole state of the shard at `version`; it replaces all state of the receiver. Newer entries follow.

    `copy` is its name.
    """

    shard: int
    version: int
    epoch: int
    head: bytes
    copy: str


class LeadTransfer(Message, frozen=True):
    """Transfer the lead. Payload: the state that is staged and not applied at `version`."""

    shard: int
    version: int
    epoch: int
    head: bytes


class LeadAccepted(Message, frozen=True):
    """The sender has a LeadTransfer, or needs none, and leads the shard."""

    shard: int
    epoch: int


FromWorker = (
    StartValues | Push | Step | StepInBackward | SaveNow | NormsQuery | Pull | WaitQuery | PutRankState | RankStateQuery
)  # fmt: skip
FromServer = (
    Leads | PushStaged | Pushed | NormsAnswer | Values | RankStateAnswer | WaitAnswer | Refused | SharedMemoryAccepted
)
BetweenServers = Forward | Forwarded | ReplicaQuery | StateCopy | LeadTransfer | LeadAccepted | PutRankState
"""Messages between servers."""

FromReader = ReadShards | ReadRankState
BetweenPeers = HostPush | PushAlone | ValuesWanted | Values
"""Messages between workers of one host."""
