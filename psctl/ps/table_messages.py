"""Messages of workers and servers about tables (`run.store()`).

A *store* is a namespace. It has tables: one a named key ("w", whose tensor is cut into blocks, the table's rows), and
one for all integer keys, whose name is "". A *shard* of a store is an equal range of hash values over all its tables.
An Update carries all that one call pushes to one server, whatever the number of keys.

table_packing.py defines the contents of a payload.

*Session* counts a worker's sessions with a server. A new one begins after a broken connection, and when the server
lacked a key list or a table that the worker named by its hash or name alone. A server that answered KeysUnknown drops
later messages of that session, so that none overtakes the messages that are sent again.

The primary of a shard changes. A worker sends a server nothing about a shard before the server has announced that it
leads the shard (StoreLeads); on every announcement the worker sends all outstanding messages for the shard, in order.
`term` is that of the newest StoreLeads that the worker has received from this server; a server ignores messages about a
shard with a term before its announcement, because earlier messages of the same worker may be lost.

Within a host long payloads of Update and Fetched are not sent: `at` is their range in the sender's shared memory
(buffer_allocator.py). SharedMemoryOffer and SharedMemoryAccepted establish that both ends share memory, as in
messages.py.

Servers exchange the messages of a shard's chain in messages.py; a shard's chain carries that shard of all stores.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from psctl.ps.messages import (
    LARGEST_COPY,
    Forward,
    Forwarded,
    LeadAccepted,
    LeadTransfer,
    Message,
    Refused,
    ReplicaQuery,
    SharedRange,
    StateCopy,
    WaitAnswer,
    WaitQuery,
)
from psctl.types import MOST_RANKS, Count, Name, Shape, Size

RowCount = Annotated[int, msgspec.Meta(ge=-1, le=1 << 32)]
"""Number of rows of a section; -1: all existing rows."""

PlainValue: TypeAlias = float | int | str | bool | None
"""An argument of a function that runs on servers."""

Digest = Annotated[bytes, msgspec.Meta(max_length=64)]

LARGEST_UPDATE = 64 << 20
"""Limit of the bytes of one Update or Fetch; a larger update is cut into several."""

LARGEST_KEYS = 64 << 20
"""Limit of the bytes of the keys of a reader's request."""

LARGEST_ANSWER = 1 << 32
"""Limit of the bytes of one Fetched."""

LARGEST_STATE = LARGEST_COPY
"""Limit of the bytes of one shard of all stores in a copy, and of one entry of its chain."""

BLOCK = 64 * 1024
"""Elements of a row of a large tensor: rows of one tensor lie on many servers."""


class RowOptimizerSpec(msgspec.Struct, frozen=True):
    """An optimizer of rows (tables/row_optimizers.py), with its first settings."""

    name: Name
    settings: dict[Name, float]


class Initialiser(msgspec.Struct, frozen=True):
    """Random start values (tables/row_initialisers.py): normal of deviation `scale`, or uniform in [-scale, scale)."""

    distribution: Literal["normal", "uniform"]
    scale: float
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class FilterSpec(msgspec.Struct, frozen=True):
    """A filter of pushed rows (tables/row_filters.py): its name, or a user's module:class, and its settings."""

    name: Name
    settings: dict[Name, PlainValue] = {}


class Admission(msgspec.Struct, frozen=True):
    """Which absent keys a push gives a row: a share of all keys, chosen by a hash, and from the `count`-th push on."""

    count: Annotated[int, msgspec.Meta(ge=1, le=255)] = 1
    probability: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class TableStats(msgspec.Struct, frozen=True):
    """Counts of one table in one shard; those of reads are of its present primary alone."""

    keys: int = 0
    bytes: int = 0
    pushed: int = 0
    pushed_found: int = 0
    admitted: int = 0
    refused: int = 0
    expired: int = 0
    evicted: int = 0
    read: int = 0
    read_found: int = 0


class TableSpec(msgspec.Struct, frozen=True):
    """A table's description, fixed by the first push or declaration; a different one is refused later.

    `shape` is that of the tensor of a named key, or of one row of integer keys. `reduce` combines pushes; `apply` (a
    module:function, or "") or `optimizer` updates the row with the combined pushes; without them the row is combined
    with the pushes. `initial` is the value of an absent row: a number, a module:function of keys, an Initialiser, or
    None: zero for a reader, the reduction's identity for a push. `admit` (None: all) are the keys that get a row,
    `expire` is the age in clocks at which a row leaves (0: never), `capacity` the bytes of all rows (0: no limit).
    `filters` choose and encode the rows that a worker sends.
    """

    name: Name
    shape: Shape
    dtype: Name  # torch's name without "torch."
    reduce: Name = "sum"
    apply: Name = ""
    initial: float | Name | Initialiser | None = None
    optimizer: RowOptimizerSpec | None = None
    admit: Admission | None = None
    expire: Size = 0
    capacity: Size = 0
    filters: Annotated[tuple[FilterSpec, ...], msgspec.Meta(max_length=16)] = ()

    @property
    def elements(self) -> int:
        """Elements of the tensor, or of a row."""
        count = 1
        for side in self.shape:
            count *= side
        return count

    @property
    def width(self) -> int:
        """Elements of a stored row."""
        return min(self.elements, BLOCK) if self.name else self.elements

    @property
    def blocks(self) -> int:
        """Rows of a named key's tensor."""
        return max(1, -(-self.elements // BLOCK))


class StoreSpec(msgspec.Struct, frozen=True):
    """A store's description; equal on all workers.

    `staleness`: None: asp; 0: bsp; s: a worker is at most s clocks ahead of the slowest of `group`, the ranks whose
    clocks count. `eager`: servers send rows that a worker has read again as soon as a finished clock has changed them.
    """

    name: Name
    staleness: Count | None
    eager: bool
    group: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_RANKS)]
    shards: Count


class BagCounts(msgspec.Struct, frozen=True):
    """The number of bags of a section (tables/row_bags.py), and of the places of keys in all of them."""

    bags: Size
    places: Size


class UpdateSection(msgspec.Struct, frozen=True):
    """An Update's change of one table in one shard. `digest`: hash of the whole key list, which then is not sent.

    `push` combines rows, `start` sets absent rows, `call` runs `function` on rows (count -1: on all), `configure` sets
    settings of the table's optimizer to `arguments` (count -1).
    `numbered`: the rows were pushed one by one (single_key_batches.py): sorted by key, pushes to the same key in their
    order, and the payload has the sequence of each.
    `coded`: the rows are in the form that the table's last filter gives them: type and elements of each.
    `bags`: the payload has bags after the keys, and a gradient for each, which the server divides among the keys.
    """

    shard: Count
    table: Name
    count: RowCount
    what: Literal["push", "start", "call", "configure"] = "push"
    spec: TableSpec | None = None
    digest: Digest = b""
    function: Name = ""
    arguments: dict[str, PlainValue] = {}
    numbered: bool = False
    coded: tuple[Name, Size] | None = None
    bags: BagCounts | None = None


class ReadSection(msgspec.Struct, frozen=True):
    """A Fetch's request to one shard and table: `count` keys, or (count -1) the existing rows of a range of keys.

    The range is start, start + step ... below stop. `bags`: the payload has bags after the keys, and the answer has a
    sum of rows for each of them.
    """

    shard: Count
    table: Name
    count: RowCount
    start: int = 0
    stop: int = 0
    step: Annotated[int, msgspec.Meta(ge=1)] = 1
    digest: Digest = b""
    bags: BagCounts | None = None


class AnswerSection(msgspec.Struct, frozen=True):
    """The rows of one shard and table in a Fetched; `keys`: the payload has the keys too.

    The rows contain all updates of `clock` clocks of all workers, and this worker's own up to `sequence`. `final`: no
    further answer of the shard follows; before, an early read gets its rows as they were. `sums`: the rows are those of
    bags.
    """

    shard: int
    table: str
    count: int
    clock: int
    sequence: int
    keys: bool = False
    final: bool = True
    sums: bool = False


class ShardProgress(msgspec.Struct, frozen=True):
    """Progress of a shard: `clock`: clocks that all workers have finished; `own`: clocks that this worker has finished;
    `sequence`: its last update.

    A worker that replaces another one resumes from these values.
    """

    shard: int
    clock: int
    own: int
    sequence: int


# ---- a reader to a server, and its answer -----------------------------------------------------------------------


class ReadKeys(Message, frozen=True):
    """Ask for the rows of these keys of a store, as they are now. Payload: the keys, int64.

    `table`: a named key, all of whose blocks are asked for, without a payload; "": the rows of integer keys.
    """

    ticket: int
    store: str
    table: str


class KeysRead(Message, frozen=True):
    """Answer to ReadKeys for the shards that the sender leads by assignment `epoch`: those in `led`, of `shards`.

    Payload: the rows of the keys of these shards, in the order of the request; start values where there is no row.
    `spec`: the description of the table; None: there is none yet. `stores`: the stores that there are. `problem`: ask
    again later ("busy"), or for fewer keys ("large").
    """

    ticket: int
    epoch: int
    shards: int
    led: list[int]
    stores: list[str]
    spec: TableSpec | None = None
    problem: str = ""


# ---- a worker to a server ----------------------------------------------------------------------------------------


class OpenStore(Message, frozen=True):
    """Requests to take part in a store, or begins a new session with it. Answered by StoreLeads.

    `step`: the newest step that this worker has marked (Marker). `after`: its later updates have larger sequences; a
    worker that has left with a larger sequence does not take part again.
    """

    store: StoreSpec
    session: int
    step: int
    after: int = -1


class Update(Message, frozen=True):
    """Payload: keys and rows. `sequence` identifies the update; of batched single pushes it is the newest's.

    The sequences of a worker ascend; a shard drops an update, or each single push of a batch, that it has already.
    """

    store: str
    session: int
    term: int
    sequence: int
    clock: int
    sections: list[UpdateSection]
    at: SharedRange | None = None


Separation: TypeAlias = Literal["clock", "mark", "common-clock", "common-mark"]


class Marker(Message, frozen=True):
    """Separates this worker's earlier updates of these shards, which were all sent before, from its later ones.

    `what`: "clock": the worker has finished `number` clocks; "mark": the earlier updates belong to the checkpoint of
    step `number`, the later ones do not. "common-clock", "common-mark": the same for all workers at once, sent when
    this one knows that all have sent their updates of the clock.
    """

    store: str
    session: int
    term: int
    shards: list[int]
    sequence: int
    what: Separation
    number: int


class Fetch(Message, frozen=True):
    """Requests rows. Payload: keys. Answered when all of the group have finished `clock` clocks (-1: at once).

    `early`: the rows as they are now are sent at once, and those that have changed since at that clock.
    """

    store: str
    session: int
    term: int
    ticket: int
    clock: int
    sections: list[ReadSection]
    early: bool = False


class DescribeTable(Message, frozen=True):
    """Requests the description and statistics of a table from these shards."""

    store: str
    session: int
    term: int
    shards: list[int]
    ticket: int
    table: str


class AnswersRead(Message, frozen=True):
    """Reports how many answers in the server's shared memory are read; counted on this connection."""

    answers: int


# ---- a server to a worker ----------------------------------------------------------------------------------------


class StoreLeads(Message, frozen=True):
    """This server leads these shards by assignment `epoch`; the worker sends all outstanding messages for them again.

    `term` counts how often the server became the primary of a shard; the worker's messages carry the newest one that it
    has received.
    """

    store: str
    session: int
    epoch: int
    term: int
    shards: list[ShardProgress]


class Done(Message, frozen=True):
    """All of the worker's updates up to `sequence` are on all replicas of these shards.

    `own`: clocks that the worker has finished there."""

    store: str
    sequence: int
    shards: list[int]
    own: int = -1


class Fetched(Message, frozen=True):
    """Payload: rows. `ticket` -1: sent without a request: rows that were read before and have changed (eager)."""

    store: str
    ticket: int
    sections: list[AnswerSection]
    at: SharedRange | None = None


class TableDescribed(Message, frozen=True):
    """Answers DescribeTable; `spec` None: the table is not in these shards. `stats`: of each of the shards."""

    store: str
    ticket: int
    table: str
    shards: list[int]
    spec: TableSpec | None
    stats: list[TableStats]


class ClocksFinished(Message, frozen=True):
    """All of the group have finished `clock` clocks, and these shards contain their updates."""

    store: str
    clock: int
    shards: list[int]


class KeysUnknown(Message, frozen=True):
    """The server lacks a key list or table of this session: the worker begins a new one and repeats all not Done."""

    store: str
    session: int


TableFromWorker = OpenStore | Update | Marker | Fetch | DescribeTable | WaitQuery
"""Messages of a worker that the state machine of the tables handles."""

TableFromServer = StoreLeads | Done | Fetched | TableDescribed | ClocksFinished | KeysUnknown | WaitAnswer | Refused
"""Messages of a server that a store handles."""

TableBetween = Forward | Forwarded | ReplicaQuery | StateCopy | LeadTransfer | LeadAccepted
"""Messages between servers about a shard's chain."""
