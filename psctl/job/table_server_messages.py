"""Messages about the servers that hold additive tables (`run.store()`), and reads from outside the job.

A worker that opens a store sends TablesWanted. The coordinator has the job's servers hold tables (ServeTables), starts
them first where there are none, and answers when the tables of each listen. Servers receive the servers of each shard
(TablesAssigned, as Reassign for parameters); workers receive the servers, which report the shards that they lead.
"""

from __future__ import annotations

import msgspec

from psctl.job.message import JobMessage
from psctl.types import Address, Assignment, ServerAt, TensorSlice


class TablesWanted(JobMessage, frozen=True):
    """A worker to the coordinator: it opens a store. Answered by TablesAt."""


class ServeTables(JobMessage, frozen=True):
    """The coordinator to a server: hold tables. Answered by TablesReady."""


class TablesReady(JobMessage, frozen=True):
    """A server to the coordinator: its tables listen here."""

    address: Address


class TablesAssigned(JobMessage, frozen=True):
    """The coordinator to servers: the servers of each shard of all stores from now on.

    `begins`: those that lead begin the shards; with `saved`, the tensors of a checkpoint, where there are some.
    """

    assignment: Assignment
    begins: bool = False
    saved: list[TensorSlice] = msgspec.field(default_factory=list)


class TablesAt(JobMessage, frozen=True):
    """The coordinator to a worker: these servers hold tables, of so many shards. Or why none does.

    Sent again when it changes; of two, that with the larger epoch holds.
    """

    servers: list[ServerAt]
    shards: int = 0
    epoch: int = 0
    problem: str = ""
    hint: str = ""


class TablesSave(JobMessage, frozen=True):
    """The coordinator to servers: send your part of the checkpoint of `step`, when all workers have marked it."""

    step: int


class ReadWanted(JobMessage, frozen=True):
    """An agent to the coordinator, for a reader outside the job: these keys of a store; none: what there is.

    Handed on to all servers, with the host of that agent; answered by ReadBy, then by each of them.
    """

    ticket: int
    store: str
    names: list[str]
    keys: list[int]
    host: int = 0


class ReadBy(JobMessage, frozen=True):
    """The coordinator to an agent: so many servers were asked."""

    ticket: int
    servers: int


class ReadTable(msgspec.Struct, frozen=True):
    """What a table is; that of integer keys has no name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    reduce: str


class ReadRow(msgspec.Struct, frozen=True):
    """Rows of a table that are there, or blocks of a named key's tensor: `width` values each, of type `sent`."""

    table: str
    keys: list[int]
    width: int
    sent: str


class ReadRows(JobMessage, frozen=True):
    """A server's answer to ReadWanted, of the shards that it leads by assignment `epoch`. Payload: the rows.

    `problem`: busy; large: more than one answer holds.
    """

    ticket: int
    host: int
    epoch: int
    shards: int
    led: list[int]
    stores: list[str]
    tables: list[ReadTable]
    rows: list[ReadRow]
    problem: str = ""
