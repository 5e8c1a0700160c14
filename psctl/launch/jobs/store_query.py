"""Reads keys of a running job's store through the head's agent (`psctl store`). Workers are not blocked.

Requests are sent in batches, each through the agent's socket to the coordinator and from there to the servers, over
open connections; each server answers for the shards of which it is the primary. A batch whose answer would be too long
is halved; a batch with shards in transfer between servers is sent again.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from psctl import errors
from psctl.clock import Clock
from psctl.job.control_answers import ReadAnswer, ServerRows
from psctl.job.table_server_messages import ReadTable
from psctl.launch import agent_calls
from psctl.launch.home import JobRecord
from psctl.remote.shell import Shell

MOST = 10_000
"""Limit of keys of one command."""

BATCH = 24_000
"""Limit of characters of the keys of one request."""

TRIES = 10
PAUSE = 0.5
"""Number of repeats of a request while shards are moved, and the seconds before each."""

Key = str | int
RowValue = float
"""An element of a row: a float, int or bool by the table's dtype."""

_ANSWER = msgspec.json.Decoder(ReadAnswer)

_CODES = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "float32": "f", "float64": "d"}


class StoreAnswer(msgspec.Struct, frozen=True):
    """The answer to one batch, merged from the primaries of all shards."""

    stores: list[str]
    tables: dict[str, ReadTable]
    rows: dict[tuple[str, int], list[RowValue]]


class StoreEntry(msgspec.Struct, frozen=True):
    """A key's value, as a flat list in which the last side of `shape` runs fastest; None: it was never pushed."""

    key: Key
    shape: tuple[int, ...]
    dtype: str
    value: list[RowValue] | None


class StoreContents(msgspec.Struct, frozen=True):
    """The contents that were read: the entries of keys; without keys, the names of stores and one store's tables."""

    job: str
    store: str
    stores: list[str]
    tables: list[ReadTable]
    entries: list[StoreEntry]


class StoreReader:
    """Reads one store of one job.

    Args:
        shell: of the job's head.
        record: the job.
        store: its name.
        clock: time.
    """

    def __init__(self, shell: Shell, record: JobRecord, store: str, clock: Clock) -> None:
        self._shell, self._record, self._store, self._clock = shell, record, store, clock

    def read(self, keys: Sequence[Key]) -> StoreContents:
        """Read keys; without keys, list the tables.

        Raises:
            UsageError: there is no such store or key, or its value is too large.
            NoSuchJob: the job has ended.
            TimedOut: a server does not answer.
        """
        wanted = list(dict.fromkeys(keys))
        if len(wanted) > MOST:
            raise errors.UsageError(
                f"{len(wanted)} keys are requested, and one request has at most {MOST}", hint="read them in parts"
            )
        entries: list[StoreEntry] = []
        answer = StoreAnswer([], {}, {})
        for batch in batches(wanted):
            for answer, part in self._fitting(batch):
                entries += [entry_of(key, answer) for key in part]
        tables = [] if wanted else [answer.tables[name] for name in sorted(answer.tables)]
        return StoreContents(self._record.job, self._store, answer.stores, tables, entries)

    def _fitting(self, batch: list[Key]) -> Iterator[tuple[StoreAnswer, list[Key]]]:
        """Read a batch, in halves where the answer would be too long."""
        answer = self._settled(batch)
        if answer is not None:
            self._check(batch, answer)
            yield answer, batch
        elif len(batch) == 1:
            key = f"key {batch[0]!r} of store {self._store!r}"
            raise errors.UsageError(
                f"{key} has more bytes than an answer to a reader may (512 KiB a server)",
                hint=f"have a worker print a part of it, or psctl checkpoint export {self._record.job}@latest OUT",
                where=self._record.job,
            )
        else:
            yield from self._fitting(batch[: len(batch) // 2])
            yield from self._fitting(batch[len(batch) // 2 :])

    def _settled(self, batch: list[Key]) -> StoreAnswer | None:
        """Send the request until all shards have answered; return None if the answer would be too long."""
        for _ in range(TRIES):
            asked = self._ask(batch)
            if asked.servers == 0:
                raise self._no_store([])
            answers = asked.answers
            problems = {each.problem for each in answers}
            if "large" in problems:
                return None
            shards = max((each.shards for each in answers), default=0)
            if asked.servers == len(answers) and not shards:
                raise self._no_store([])
            if shards and not problems - {""} and set().union(*(each.led for each in answers)) == set(range(shards)):
                return merged(answers)
            self._clock.sleep(PAUSE)
        raise errors.TimedOut(
            f"{self._record.job}: a server did not answer, or shards are moving",
            hint=f"psctl status {self._record.job}, then read again",
            where=self._record.job,
        )

    def _ask(self, batch: list[Key]) -> ReadAnswer:
        names = [key for key in batch if isinstance(key, str)]
        arguments = {"store": self._store, "names": names, "keys": [key for key in batch if isinstance(key, int)]}
        reply = agent_calls.call(self._shell, self._record.head, "read", _ANSWER, arguments)
        if reply is None:
            raise over(self._record)
        return reply

    def _check(self, batch: list[Key], answer: StoreAnswer) -> None:
        """Refuse keys and stores that do not exist, by name."""
        if self._store not in answer.stores:
            raise self._no_store(answer.stores)
        for key in batch:
            table = answer.tables.get(key if isinstance(key, str) else "")
            if table is None:
                other = "no rows of integer keys" if isinstance(key, int) else f"no key {key!r}"
                raise errors.UsageError(
                    f"store {self._store!r} of {self._record.job} has {other}",
                    hint=f"psctl store {self._record.job} --store {self._store}   lists what it has",
                    where=self._record.job,
                )

    def _no_store(self, stores: list[str]) -> errors.UsageError:
        known = ", ".join(stores) if stores else "none yet"
        return errors.UsageError(
            f"{self._record.job} has no store {self._store!r}; it has: {known}",
            hint="a store exists when the script has opened it with run.store()",
            where=self._record.job,
        )


def over(record: JobRecord) -> errors.NoSuchJob:
    """Return the error for the store of a job that has ended."""
    return errors.NoSuchJob(
        f"{record.job} has ended, and its store with it",
        hint=f"psctl checkpoint export {record.job}@latest OUT, if it wrote checkpoints",
        where=record.job,
    )


def batches(keys: Sequence[Key]) -> Iterator[list[Key]]:
    """Yield the keys in parts that fit into a request; one empty part when there are no keys."""
    part: list[Key] = []
    length = 0
    for key in keys:
        size = len(json.dumps(key)) + 2
        if part and length + size > BATCH:
            yield part
            part, length = [], 0
        part.append(key)
        length += size
    yield part


def merged(answers: Sequence[ServerRows]) -> StoreAnswer:
    """Return several servers' answers as one; where two answer for a shard, the newer assignment counts."""
    stores: set[str] = set()
    tables: dict[str, ReadTable] = {}
    rows: dict[tuple[str, int], list[RowValue]] = {}
    for answer in sorted(answers, key=lambda each: each.epoch):
        stores |= set(answer.stores)
        tables |= {table.name: _added(table, tables.get(table.name)) for table in answer.tables}
        at = 0
        for row in answer.rows:
            values: array[float] = array(_CODES[row.sent])
            end = at + len(row.keys) * row.width * values.itemsize
            values.frombytes(answer.payload[at:end])
            at = end
            if sys.byteorder == "big":
                values.byteswap()
            for index, key in enumerate(row.keys):
                rows[row.table, key] = values[index * row.width : (index + 1) * row.width].tolist()
    return StoreAnswer(sorted(stores), tables, rows)


def _added(table: ReadTable, other: ReadTable | None) -> ReadTable:
    """Return a server's description of a table with the counts of others added."""
    known = {} if other is None else other.stats
    return replace(table, stats={name: count + known.get(name, 0) for name, count in table.stats.items()})


def entry_of(key: Key, answer: StoreAnswer) -> StoreEntry:
    """Return a key's value: a row, or the blocks of a named key's tensor in order."""
    table = answer.tables[key if isinstance(key, str) else ""]
    elements = 1
    for side in table.shape:
        elements *= side
    if isinstance(key, int):
        value = answer.rows.get((table.name, key))
    else:
        blocks = sorted(block for name, block in answer.rows if name == key)
        value = [number for block in blocks for number in answer.rows[key, block]]
        value = value[:elements] if blocks and len(value) >= elements else None
    if value is not None and table.dtype == "bool":
        value = [bool(number) for number in value]
    return StoreEntry(key, table.shape, table.dtype, value)
