"""Requests to tables are bounded before memory is allocated; a worker that exceeds a bound affects no other."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from psctl.errors import MessageRefused, UsageError
from psctl.ps.permits import TABLES
from psctl.ps.table_messages import (
    BagCounts,
    Fetch,
    Marker,
    OpenStore,
    ReadSection,
    RowOptimizerSpec,
    StoreSpec,
    TableSpec,
    Update,
    UpdateSection,
)
from psctl.ps.tables.row_optimizers import complete
from psctl.ps.tables.server import client_sessions, read_answers
from psctl.ps.tables.server.table_server import TableServer
from psctl.ps.tables.table_kinds import TableKind
from psctl.ps.tables.table_packing import pack
from psctl.transport.protocol.message_assembly import Codec
from tests.ps.table_world import Functions

SHARDS = 4
STORE = StoreSpec("s", 0, False, (0, 1), SHARDS)
WIDE = TableSpec("", (1 << 20,), "float32")


class Tables:
    """A server's tables, with a store opened by workers 0 and 1."""

    def __init__(self) -> None:
        self.machine = TableServer(0, Functions(), SHARDS)
        self.machine.on_assignment(0, [[0]] * SHARDS, [[]] * SHARDS, [0])
        self.machine.start_shards(restored=False)
        self.sequence = 0
        for worker in (0, 1):
            answers = self.send(worker, OpenStore(STORE, 1, -1))
        self.term = answers[-1].message.term

    def send(self, worker: int, message: Any, *arrays: Any) -> list[Any]:
        return list(self.machine.on_worker_message(worker, message, pack(arrays) if arrays else memoryview(b"")))

    def update(self, worker: int, *sections: UpdateSection, arrays: tuple[Any, ...] = ()) -> list[Any]:
        self.sequence += 1
        return self.send(worker, Update("s", 1, self.term, self.sequence, 0, list(sections)), *arrays)

    def fetch(self, worker: int, clock: int, count: int) -> list[Any]:
        keys = np.arange(count, dtype=np.int64)
        return self.send(worker, Fetch("s", 1, self.term, 1, clock, [ReadSection(0, "", count)]), keys)


def push(count: int = 1, spec: TableSpec | None = WIDE, **more: Any) -> UpdateSection:
    return UpdateSection(0, more.pop("table", ""), count, spec=spec, **more)


def test_the_number_of_stores_is_bounded_and_their_shards_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Tables()
    with pytest.raises(MessageRefused, match="of 1000000 shards, where all have 4"):
        tables.send(0, OpenStore(msgspec.structs.replace(STORE, name="t", shards=1_000_000), 1, -1))
    monkeypatch.setattr(client_sessions, "STORES", 3)
    for name in "ab":
        tables.send(0, OpenStore(msgspec.structs.replace(STORE, name=name), 1, -1))
    with pytest.raises(MessageRefused, match="more than 3 stores"):
        tables.send(0, OpenStore(msgspec.structs.replace(STORE, name="c"), 1, -1))
    assert tables.send(1, OpenStore(STORE, 2, -1))  # existing ones continue


def test_tables_of_a_store_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_sessions, "TABLES", 2)
    tables = Tables()
    key, row = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.float32)
    for name in ("a", "b", "c"):
        section = push(spec=TableSpec(name, (2,), "float32"), table=name)
        if name == "c":
            with pytest.raises(MessageRefused, match="more than 2 tables"):
                tables.update(0, section, arrays=(key, row))
        else:
            tables.update(0, section, arrays=(key, row))


@pytest.mark.parametrize(
    ("section", "why"),
    [
        (push(-1), "a push of all rows"),
        (push(-1, what="start"), "a start of all rows"),
        (push(1, table="other"), "the spec of '' for table 'other'"),
    ],
)
def test_contradictory_sections_are_refused(section: UpdateSection, why: str) -> None:
    tables = Tables()
    with pytest.raises(MessageRefused, match=why):
        tables.update(1, section)
    key, row = np.zeros(1, dtype=np.int64), np.ones(1 << 20, dtype=np.float32)
    tables.update(0, push(), arrays=(key, row))  # the store is as it was
    assert tables.machine.stores["s"].refused is None


@pytest.mark.parametrize("dtype", ["nonsense", "Tensor", "complex64", "__class__"])
def test_an_unsupported_dtype_is_refused(dtype: str) -> None:
    spec = TableSpec("t", (2,), dtype, "sum", "", None)
    with pytest.raises(UsageError, match=f"a store does not accept {dtype}"):
        TableKind(spec, Functions())


def test_the_size_of_a_row_is_bounded() -> None:
    with pytest.raises(UsageError, match=r"a row of shape \[1048576, 1048576\] has 4398046511104 bytes"):
        TableKind(TableSpec("", (1 << 20, 1 << 20), "float32"), Functions())
    assert TableKind(TableSpec("w", (1 << 20, 1 << 20), "float32"), Functions()).row_bytes == 4 * 64 * 1024


def test_the_size_of_a_read_of_absent_rows_is_bounded() -> None:
    tables = Tables()
    for worker in (0, 1):
        tables.update(worker, push(), arrays=(np.zeros(1, dtype=np.int64), np.ones(1 << 20, dtype=np.float32)))
    for worker in (0, 1):
        tables.sequence += 1
        tables.send(worker, Marker("s", 1, tables.term, list(range(SHARDS)), tables.sequence, "clock", 1))
    with pytest.raises(MessageRefused, match="a read of 4194304000 bytes of store"):
        tables.fetch(1, 0, 1000)


BAGS = BagCounts(1, 6)


@pytest.mark.parametrize(
    ("sections", "lists", "why"),
    [
        ([ReadSection(0, "", 1), ReadSection(0, "", 6, bags=BAGS)], (1, 6), "a table of a shard twice"),
        ([ReadSection(0, "", -1, 0, 9, bags=BagCounts(1, 0))], (), "bags of a range of keys"),
        ([ReadSection(0, "", 6, bags=BAGS)], (6,), "sums of rows of '', which has no optimizer"),
        ([ReadSection(0, "", 6, bags=BagCounts(1000, 6))], (6,), "a read of .* bytes of store"),
    ],
)
def test_reads_of_sums_that_no_answer_fits_are_refused(
    sections: list[ReadSection], lists: tuple[int, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_answers, "LARGEST_ANSWER", 4000)
    tables = Tables()
    sums = "optimizer" in why
    optimizer = None if sums else complete(RowOptimizerSpec("sgd", {"lr": 1.0}))
    spec = TableSpec("", (2,), "float64", optimizer=optimizer)
    for worker in (0, 1):
        tables.update(worker, push(spec=spec), arrays=(np.zeros(1, dtype=np.int64), np.ones(2)))
        tables.sequence += 1
        tables.send(worker, Marker("s", 1, tables.term, list(range(SHARDS)), tables.sequence, "clock", 1))
    arrays = [np.arange(count, dtype=np.int64) for count in lists]
    bags = sections[-1].bags
    assert bags is not None
    lengths = np.zeros(bags.bags, dtype=np.int32)
    lengths[0] = bags.places
    read = Fetch("s", 1, tables.term, 1, -1, sections)
    with pytest.raises(MessageRefused, match=why):
        tables.send(1, read, *arrays, np.arange(bags.places, dtype=np.int32), lengths)


def test_reads_that_wait_for_a_clock_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_answers, "MOST_WAITING", 5)
    tables = Tables()
    for _ in range(5):
        tables.fetch(1, 1 << 40, 1)
    with pytest.raises(MessageRefused, match="more than 5 reads of store 's' that wait for a clock"):
        tables.fetch(1, 1 << 40, 1)
    tables.fetch(0, 1 << 40, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "OpenStore", "store": {"name": "s", "staleness": 0, "eager": False, "group": [0], "shards": 1 << 40},
         "session": 1, "step": 0},
        {"type": "OpenStore", "store": {"name": "n" * 5000, "staleness": 0, "eager": False, "group": [], "shards": 1},
         "session": 1, "step": 0},
        {"type": "Update", "store": "s", "session": 1, "term": 1, "sequence": 1, "clock": 0, "size": 0,
         "sections": [{"shard": 0, "table": "", "count": -5}]},
        {"type": "Update", "store": "s", "session": 1, "term": 1, "sequence": 1, "clock": 0, "size": 0,
         "sections": [{"shard": 0, "table": "w", "count": 1,
                       "spec": {"name": "w", "shape": [1] * 65, "dtype": "float32"}}]},
        {"type": "Update", "store": "s", "session": 1, "term": 1, "sequence": 1, "clock": 0, "size": 0,
         "sections": [{"shard": 0, "table": "w", "count": 1, "digest": b"x" * 1000}]},
    ],
)  # fmt: skip
def test_fields_beyond_their_bounds_are_refused_by_decoding(fields: dict[str, Any]) -> None:
    with pytest.raises(MessageRefused, match=r"Expected .*= .* - at `.*`"):  # the field, not the kind of message
        Codec(TABLES).decode(msgspec.msgpack.encode(fields))
