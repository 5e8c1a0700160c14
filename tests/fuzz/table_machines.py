"""Fuzz targets of the state machines of tables: a message of a worker to a server, and of a server to a worker.

An input is the number of a table (a byte), the length of a message (two bytes), the message, and its payload.
"""

from __future__ import annotations

import copy
import functools
import random
import struct
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from psctl.errors import UsageError
from psctl.ps.outputs import ToServer, ToWorker
from psctl.ps.permits import TABLES
from psctl.ps.table_messages import (
    Fetch,
    Fetched,
    Marker,
    OpenStore,
    RowOptimizerSpec,
    StoreLeads,
    StoreSpec,
    TableSpec,
    Update,
)
from psctl.ps.tables.client.calls_in_flight import pooled_route
from psctl.ps.tables.client.table_client_state import TableClient
from psctl.ps.tables.reductions import Lanes, Reduction, reductions
from psctl.ps.tables.row_bags import RowBags
from psctl.ps.tables.row_filters import RowFilter, filter_spec
from psctl.ps.tables.row_optimizers import complete
from psctl.ps.tables.server.table_server import TableServer
from psctl.transport.protocol.message_assembly import Codec

SHARDS = 2
STORE = StoreSpec("s", 0, False, (0, 1), SHARDS)
KEYS = np.arange(6, dtype=np.int64)
LARGEST = 1 << 26
"""Bytes that an answer to an input may have."""

SUMS = TableSpec("", (2,), "float32", filters=(filter_spec("int8"),))
GRADIENTS = TableSpec("", (2,), "float64", optimizer=complete(RowOptimizerSpec("adagrad", {"lr": 0.1})), expire=3)
SPECS = (SUMS, GRADIENTS)


class Functions:
    """Reductions alone."""

    def reduction(self, name: str) -> Reduction:
        if name not in reductions():
            raise UsageError(f"no reduction {name!r}")
        return reductions()[name]

    def function(self, name: str) -> Any:
        raise UsageError(f"no function {name!r}")

    def row_filter(self, name: str) -> type[RowFilter]:
        raise UsageError(f"no filter {name!r}")


def server_with_table() -> TableServer:
    """Return a server with the store opened by two workers."""
    server = TableServer(0, Functions(), SHARDS)
    server.on_assignment(0, [[0]] * SHARDS, [[]] * SHARDS, [0])
    server.start_shards(restored=False)
    for worker in (0, 1):
        server.on_worker_message(worker, OpenStore(STORE, 1, 0), memoryview(b""))
    return server


def client_with_table(table: TableSpec) -> tuple[TableClient, list[ToServer]]:
    """Return a worker whose reads of a table are not answered yet, and all that it has sent after it opened."""
    client = TableClient(STORE, 0, Functions())
    client.start_session(0, 0)
    leads = StoreLeads("s", 1, 0, 1, [])
    machine = server_with_table()
    (output,) = [each for each in machine.on_worker_message(0, OpenStore(STORE, 1, 0), memoryview(b""))
                 if isinstance(each, ToWorker) and isinstance(each.message, StoreLeads)]  # fmt: skip
    assert isinstance(output.message, StoreLeads)
    leads = output.message
    client.on_server_message(0, leads, memoryview(b""))
    kind = client.resolve_kind(table)
    route = client.routes.route_of("", KEYS)
    outputs: list[ToServer] = []
    if table.optimizer is None:
        rows = torch.ones(len(KEYS), 2, dtype=torch.float32)
        for change in client.prepare_push([(kind, route, Lanes(rows))], 1, position=1):
            outputs += client.send_change(change, 1)
    else:
        bags = RowBags(np.array([0, 1, 2, 3, 4, 5, 5], dtype=np.int32), np.array([4, 3], dtype=np.int32))
        pooled = pooled_route(kind, route, bags)
        for change in client.prepare_sums(pooled, torch.ones(2, 2, dtype=torch.float64), 1):
            outputs += client.send_change(change, 1)
        outputs += client.start_sums(pooled, 2)[1]
    outputs += client.start_read([(kind, route)], 3, ahead=1)[1]
    outputs += client.start_read([(kind, range(0, 9, 2))], 4)[1]
    return client, outputs


@functools.cache
def sent_by_worker(number: int) -> tuple[ToServer, ...]:
    """Return what a worker sends about a table."""
    return tuple(client_with_table(SPECS[number])[1])


def _packed(message: Any, payload: memoryview | bytes | None) -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return struct.pack("<H", len(encoded)) + encoded + bytes(payload or b"")


def to_server() -> Iterable[bytes]:
    """Yield what workers send: encoded rows, gradients of bags, early reads, reads of sums."""
    for at in range(len(SPECS)):
        for output in sent_by_worker(at):
            yield bytes([at]) + _packed(output.message, output.payload)


def to_worker() -> Iterable[bytes]:
    """Yield a server's answers: rows before their clock, sums, ranges of rows."""
    for at in range(len(SPECS)):
        server = server_with_table()
        for output in sent_by_worker(at):
            payload = memoryview(bytearray(output.payload or b""))
            for answer in server.on_worker_message(0, output.message, payload):  # type: ignore[arg-type]
                if isinstance(answer, ToWorker) and answer.rank == 0:
                    yield bytes([at]) + _packed(answer.message, answer.payload)


@functools.cache
def _codec() -> Codec:
    return Codec(TABLES)


def _split(data: bytes) -> tuple[Any, memoryview]:
    """Return the message and the payload of an input behind its first byte."""
    size = struct.unpack("<H", data[:2])[0] if len(data) > 1 else 0
    return _codec().decode(data[2 : 2 + size]), memoryview(bytearray(data[2 + size :]))


def _finish_clock(server: TableServer, clock: int) -> None:
    for worker in (0, 1):
        marker = Marker("s", 1, 1 << 40, list(range(SHARDS)), (clock << 32) + 999, "clock", clock)
        server.on_worker_message(worker, marker, memoryview(b""))


def run_server(data: bytes) -> None:
    """Let a server that has rows process an input of worker 0; then the clock ends, and worker 1 reads."""
    message, payload = _split(data[1:])
    if not data or not isinstance(message, OpenStore | Update | Fetch):
        return
    server = server_with_table()
    valid = sent_by_worker(data[0] & 1)
    for sent in valid:
        server.on_worker_message(1, sent.message, memoryview(bytearray(sent.payload or b"")))  # type: ignore[arg-type]
    _finish_clock(server, 1)
    try:
        server.on_worker_message(0, message, payload)
    finally:
        _finish_clock(server, 2)
        for sent in valid:
            if isinstance(sent.message, Fetch):
                outputs = server.on_worker_message(1, sent.message, memoryview(bytearray(sent.payload or b"")))
                assert sum(len(each.payload or b"") for each in outputs if isinstance(each, ToWorker)) < LARGEST


def run_worker(data: bytes) -> None:
    """Let a worker process an answer."""
    message, payload = _split(data[1:])
    if isinstance(message, Fetched):
        client, _ = client_with_table(SPECS[data[0] & 1])
        client.on_server_message(0, message, payload)


# ---- mutations of messages, for tests without a fuzzer ---------------------------------------------------------------


VALUES: tuple[Any, ...] = (0, 1, -1, 2, 6, 7, 255, 1 << 31, (1 << 60) - 1, -(1 << 63), "", "x", "float64", "uint8", b"",
                           b"x" * 16, None, True, False, [], [1, 2], {})  # fmt: skip


def mutated(data: bytes, numbers: random.Random) -> bytes:
    """Return an input with one to three changes: of a field of the message, or of bytes of the payload."""
    head, size = data[:1], struct.unpack("<H", data[1:3])[0]
    tree, payload = msgspec.msgpack.decode(data[3 : 3 + size]), bytearray(data[3 + size :])
    for _ in range(numbers.randrange(1, 4)):
        if numbers.random() < 0.7:
            places = list(_places(tree))
            holder, at = numbers.choice(places)
            whole = holder[at]
            if isinstance(holder, list) and numbers.random() < 0.3:
                holder.append(copy.deepcopy(whole))  # a section twice
            else:
                alike = [value for value in VALUES if type(value) is type(whole)]
                holder[at] = copy.deepcopy(numbers.choice(alike if alike and numbers.random() < 0.8 else VALUES))
        elif payload:
            act, at = numbers.randrange(3), numbers.randrange(len(payload))
            if act == 0:
                payload[at] = numbers.randrange(256)
            elif act == 1:
                del payload[at:]
            else:
                payload[at:at] = bytes(8)
    encoded = msgspec.msgpack.encode(tree)
    return head + struct.pack("<H", len(encoded)) + encoded + bytes(payload)


def _places(tree: Any) -> Iterable[tuple[Any, Any]]:
    items: Iterable[tuple[Any, Any]] = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    )
    for at, inner in items:
        if at != "type":
            yield tree, at
        yield from _places(inner)
