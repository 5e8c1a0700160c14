"""What workers and servers say to each other about tables (`run.store()`); one small class a message.

A *store* is a namespace. It has tables: one a named key ("w", whose tensor is cut into blocks, the table's rows), and
one for all integer keys, whose name is "". A *shard* of a store is an equal range of hash values over all its tables.
An Update carries everything that one call pushes to one server, whatever the number of keys.

Long payloads travel in parts of at most LARGE bytes: the first behind the message that tells the whole `size`, the
others behind More. What is packed in a payload stands in table_packing.py.

*Session* counts how often a worker began anew with a server: after a broken connection, and when the server did not
know keys or a table that it was told only the hash or the name of. A server that answered KeysUnknown drops what still
comes of that session, so that nothing overtakes what is sent again.

Who leads a shard changes. A worker says nothing about a shard to a server before that has said that it leads it
(Leads); on every such word it sends all that is outstanding for the shard, in order. `term`: of the newest Leads that a
worker has taken in of this server; what it sent of a shard before it knew that it is led there counts for nothing, for
what it had sent before that may be lost.

Within a host long payloads of Update and Fetched are not sent: `at` says where they lie in the sender's shared memory
(lent_buffers.py). A worker and a server find out that they share one by Near and IsNear, as in messages.py.

Servers speak to each other of the chain of replicas of a shard in the words of messages.py; a shard's chain carries
that shard of all stores.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from psctl.ps.messages import (
    Forward,
    Forwarded,
    ForwardPart,
    LeadAccepted,
    LeadTransfer,
    Message,
    ReplicaQuery,
    SharedRange,
    StateCopy,
    StateEnd,
    StatePart,
)
from psctl.types import MOST_RANKS, Count, Name, Shape

RowCount = Annotated[int, msgspec.Meta(ge=-1, le=1 << 32)]
"""How many rows a section is of; -1: all that there are."""

Digest = Annotated[bytes, msgspec.Meta(max_length=64)]

BLOCK = 64 * 1024
"""Elements of a row of a large tensor: rows of one tensor lie on many servers."""


class TableSpec(msgspec.Struct, frozen=True):
    """What a table is, settled by whoever pushes or declares first; who says otherwise later is refused.

    `shape` is that of the tensor of a named key, or of one row of integer keys. `reduce` joins pushes; `apply` (a
    module:function, or "") brings what was joined into the row, which otherwise is joined itself. `initial`: what an
    absent row is: a number, a module:function of keys, or None: zero for who reads it, nothing for a reduction.
    """

    name: Name
    shape: Shape
    dtype: Name  # torch's name without "torch."
    reduce: Name = "sum"
    apply: Name = ""
    initial: float | Name | None = None

    @property
    def elements(self) -> int:
        """Elements of the tensor, or of a row."""
        count = 1
        for side in self.shape:
            count *= side
        return count

    @property
    def width(self) -> int:
        """Elements of a row as it is held."""
        return min(self.elements, BLOCK) if self.name else self.elements

    @property
    def blocks(self) -> int:
        """Rows of a named key's tensor."""
        return max(1, -(-self.elements // BLOCK))


class StoreSpec(msgspec.Struct, frozen=True):
    """What a store is; equal on all workers.

    `staleness`: None: asp; 0: bsp; s: a worker is at most s clocks ahead of the slowest of `group`, the ranks whose
    clocks count. `eager`: servers send rows that were read before as soon as a clock has made them newer.
    """

    name: Name
    staleness: Count | None
    eager: bool
    group: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_RANKS)]
    shards: Count


class UpdateSection(msgspec.Struct, frozen=True):
    """What an Update does in one shard to one table. `digest`: hash of the whole key list, which then is not sent.

    `push` joins rows, `start` sets rows that are not there yet, `call` runs `function` on rows (count -1: on all).
    `numbered`: these are single rows that were pushed one by one (single_key_batches.py): by key, of one key in
    their order, and the payload has the sequence of each.
    """

    shard: Count
    table: Name
    count: RowCount
    what: Literal["push", "start", "call"] = "push"
    spec: TableSpec | None = None
    digest: Digest = b""
    function: Name = ""
    arguments: dict[str, float | int | str | bool | None] = {}
    numbered: bool = False


class ReadSection(msgspec.Struct, frozen=True):
    """What a Fetch wants of one shard and table: `count` keys; or (count -1) the rows there are of a range of keys.

    The range is start, start + step ... below stop.
    """

    shard: Count
    table: Name
    count: RowCount
    start: int = 0
    stop: int = 0
    step: Annotated[int, msgspec.Meta(ge=1)] = 1
    digest: Digest = b""


class AnswerSection(msgspec.Struct, frozen=True):
    """What a Fetched holds of one shard and table; `keys`: the keys are in the payload too.

    The rows hold all updates of `clock` clocks of everyone, and this worker's own up to `sequence`.
    """

    shard: int
    table: str
    count: int
    clock: int
    sequence: int
    keys: bool = False


class ShardProgress(msgspec.Struct, frozen=True):
    """How far a shard is: `clock`: clocks that all have finished; `own`: that this worker has; `sequence`: its last.

    A worker that took the place of another begins where that one was.
    """

    shard: int
    clock: int
    own: int
    sequence: int


# ---- a worker to a server ----------------------------------------------------------------------------------------


class OpenStore(Message, frozen=True):
    """Take part in a store, or begin a new session with it. Answered by Leads.

    `step`: the newest step at whose end this worker has passed the place where checkpoints are taken (Mark). `after`:
    what it says from now on is numbered above this; who has taken leave under a larger number takes no part again.
    """

    store: StoreSpec
    session: int
    step: int
    after: int = -1


class Update(Message, frozen=True):
    """Payload: keys and rows. `sequence` names the update; of single pushes that leave together it is the newest's.

    Larger ones of a worker come later; what a shard has is dropped: an update, or of single pushes each that it has.
    """

    store: str
    session: int
    term: int
    sequence: int
    clock: int
    sections: list[UpdateSection]
    size: int
    at: SharedRange | None = None


class FinishClock(Message, frozen=True):
    """This worker has finished `clock` clocks: what it pushed in them to these shards was sent before."""

    store: str
    session: int
    term: int
    shards: list[int]
    sequence: int
    clock: int


class MarkStep(Message, frozen=True):
    """What this worker pushed before belongs into the checkpoint of `step`, what it pushes from now on does not."""

    store: str
    session: int
    term: int
    shards: list[int]
    sequence: int
    step: int


class Fetch(Message, frozen=True):
    """Payload: keys. Answer Fetched as soon as all of the group have finished `clock` clocks (-1: at once)."""

    store: str
    session: int
    term: int
    ticket: int
    clock: int
    sections: list[ReadSection]
    size: int


class DescribeTable(Message, frozen=True):
    """What is this table, by these shards?"""

    store: str
    session: int
    term: int
    shards: list[int]
    ticket: int
    table: str


class More(Message, frozen=True):
    """Payload: the bytes from `offset` on of the message before it."""

    offset: int


class AnswersRead(Message, frozen=True):
    """Of the answers that this server has lent on this connection, so many are read."""

    answers: int


# ---- a server to a worker ----------------------------------------------------------------------------------------


class StoreLeads(Message, frozen=True):
    """By assignment `epoch` I lead these shards: send what is outstanding for them, all of it, in order.

    `term` counts how often I came to lead a shard; you say the newest that you know in all that you send.
    """

    store: str
    session: int
    epoch: int
    term: int
    shards: list[ShardProgress]


class Done(Message, frozen=True):
    """All up to this update is in for good in these shards. `own`: clocks that the worker has finished there."""

    store: str
    sequence: int
    shards: list[int]
    own: int = -1


class Fetched(Message, frozen=True):
    """Payload: rows. `ticket` -1: nobody asked now; they were read before and are newer (eager reads)."""

    store: str
    ticket: int
    sections: list[AnswerSection]
    size: int
    at: SharedRange | None = None


class TableDescribed(Message, frozen=True):
    """Answer to Describe; None: it is not in these shards."""

    store: str
    ticket: int
    shards: list[int]
    spec: TableSpec | None


class ClocksFinished(Message, frozen=True):
    """All of the group have finished `clock` clocks, and their updates are in these shards."""

    store: str
    clock: int
    shards: list[int]


class KeysUnknown(Message, frozen=True):
    """A key list or table of this session is not known here: begin a new one and send again what is not Done."""

    store: str
    session: int


TableBetween = (
    Forward | ForwardPart | Forwarded | ReplicaQuery | StateCopy | LeadTransfer | StatePart | StateEnd | LeadAccepted
)
"""What servers send to each other about a shard's chain."""
