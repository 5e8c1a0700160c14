"""Messages about the servers that hold additive tables (`run.store()`), and reads from outside the job.

A worker that opens a store sends TablesWanted. The coordinator has the job's servers hold tables (ServeTables), starts
them first where there are none, and answers when the tables of each listen. Servers receive the servers of each shard
(TablesAssigned, as Reassign for parameters); workers receive the servers, which report the shards that they lead.
"""

from __future__ import annotations

import msgspec

from psctl import types
from psctl.job.message import JobMessage
from psctl.types import Address, Assignment, ServerAt, TensorSlice


class TablesWanted(JobMessage, frozen=True):
    """A worker to the coordinator: it opens a store. Answered by TablesAt."""


class ScriptOpensStore(JobMessage, frozen=True):
    """A worker to the coordinator: its script opens a store itself, whose pushes are in no step of the model."""


class ServeTables(JobMessage, frozen=True):
    """The coordinator to a server: hold tables. Answered by TablesReady.

    `full_every`: its part of a checkpoint has all rows at least once in so many checkpoints.
    """

    full_every: int = 1


class TablesReady(JobMessage, frozen=True):
    """A server to the coordinator: its tables listen here."""

    address: Address


class TablesAssigned(JobMessage, frozen=True):
    """The coordinator to servers: the servers of each shard of all stores from now on.

    `begins`: the primaries create the shards, from `saved`, the tensors of a checkpoint, if there are any.
    """

    assignment: Assignment
    begins: bool = False
    saved: list[TensorSlice] = msgspec.field(default_factory=list)


class TablesAt(JobMessage, frozen=True):
    """The coordinator to a worker: the servers that hold tables, and the number of shards; or the problem if none does.

    Sent again at each change; the one with the larger epoch is valid.
    """

    servers: list[ServerAt]
    shards: int = 0
    epoch: int = 0
    problem: str = ""
    hint: str = ""


class TablesSave(JobMessage, frozen=True):
    """The coordinator to servers: send your part of the checkpoint of `step` when all workers have marked it."""

    step: int


class TablesSaved(JobMessage, frozen=True):
    """The coordinator to servers: the checkpoint of `step` is complete, and later parts may hold the changes since it.

    -1: later parts must not continue an earlier one.
    """

    step: types.Step


class ReadWanted(JobMessage, frozen=True):
    """An agent to the coordinator, for a reader outside the job: read these keys of a store; no keys: list its tables.

    Relayed to all servers with the host of that agent; answered by ReadBy, then by each server.
    """

    ticket: int
    store: str
    names: list[str]
    keys: list[int]
    host: int = 0


class ReadBy(JobMessage, frozen=True):
    """The coordinator to an agent: the number of servers that received the request."""

    ticket: int
    servers: int


class ReadTable(msgspec.Struct, frozen=True):
    """The description of a table, and the counts of its shards; the table of integer keys has no name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    reduce: str
    optimizer: str = ""
    stats: dict[str, int] = {}


class ReadRow(msgspec.Struct, frozen=True):
    """Existing rows of a table, or blocks of a named key's tensor: `width` values each, of type `sent`."""

    table: str
    keys: list[int]
    width: int
    sent: str


class ReadRows(JobMessage, frozen=True):
    """A server's answer to ReadWanted, of the shards that it leads by assignment `epoch`. Payload: the rows.

    `problem`: "busy"; "large": the rows exceed one answer.
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
