"""Workers that send any permitted message: servers accept or refuse it, and fail in no other way."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.permits import NEW, why_refused
from psctl.ps.messages import SharedMemoryOffer
from psctl.ps.permits import PARAMETERS, TABLES
from psctl.ps.table_messages import AnswersRead, StoreSpec, TableSpec, UpdateSection
from psctl.types import Member
from tests.coordinator.test_hostile_members import of_struct
from tests.hypothesis_profile import examples
from tests.ps.test_table_bounds import STORE, Tables
from tests.ps.world import World

HOSTILE = Member("worker", 1)
BRIEF = settings(max_examples=examples(350), deadline=None, suppress_health_check=list(HealthCheck))

SPECS = st.sampled_from(
    [None, TableSpec("", (2,), "float32"), TableSpec("w", (3,), "int64"), TableSpec("w", (3,), "float32", "mean"),
     TableSpec("w", (2,), "nonsense"), TableSpec("w", (1 << 60,), "float32"), TableSpec("", (0,), "bool", "most")]
)  # fmt: skip
SECTIONS = st.builds(
    UpdateSection, st.integers(-1, 5), st.sampled_from(["", "w"]), st.integers(-1, 3),
    st.sampled_from(["push", "start", "call"]), SPECS, st.sampled_from([b"", b"x" * 16]), st.just("mine:none"),
    st.just({}), st.booleans(),
)  # fmt: skip


def messages_of(permits: Any) -> st.SearchStrategy[Any]:
    kinds = [
        row.message
        for row in permits.to("server")["worker"].values()
        if row.message not in (SharedMemoryOffer, AnswersRead)
    ]
    return st.sampled_from(kinds).flatmap(of_struct)


def of_this_store(message: Any, sections: list[UpdateSection], sequence: int) -> Any:
    """Return a message with the fields of an open session, so that it passes the first check."""
    fields = {each.name for each in msgspec.structs.fields(message)}
    known = {"store": "s", "session": 1, "term": 4, "sequence": sequence, "at": None}
    known |= {"sections": sections} if type(message).__name__ == "Update" else {}
    if type(message).__name__ == "OpenStore":
        known["store"] = STORE  # type: ignore[assignment]
    return msgspec.structs.replace(message, **{name: value for name, value in known.items() if name in fields})


@BRIEF
@given(
    sent=st.lists(st.tuples(messages_of(TABLES), st.lists(SECTIONS, max_size=2), st.binary(max_size=64)), max_size=10),
    known=st.booleans(),
)
def test_table_servers_survive_any_permitted_message(sent: list[Any], known: bool) -> None:
    tables = Tables()
    rows = TABLES.to("server")["worker"]
    for number, (message, sections, payload) in enumerate(sent):
        if known:
            message = of_this_store(message, sections, number)
        if why_refused(rows[type(message)], HOSTILE, message, NEW, len(payload)):
            continue
        try:
            tables.machine.on_worker_message(1, message, memoryview(bytearray(payload)))
        except ProtocolError:
            tables.machine.on_worker_disconnected(1)
    opened = tables.machine.stores["s"]
    if opened.refused is None:
        section = UpdateSection(0, "good", 1, spec=TableSpec("good", (2,), "float32"))
        tables.update(0, section, arrays=(np.zeros(1, dtype=np.int64), np.ones(2, dtype=np.float32)))
        assert opened.refused is None
    assert isinstance(opened.spec, StoreSpec)


def of_this_shard(message: Any, shard: int) -> Any:
    """Return a message about a held shard and near clocks, so that it passes the first check."""
    fields = {each.name for each in msgspec.structs.fields(message)}
    known = {"shard": shard, "shards": [shard], "have": [-1], "at": None, "covers": ()}
    return msgspec.structs.replace(message, **{name: value for name, value in known.items() if name in fields})


@BRIEF
@given(
    sent=st.lists(st.tuples(messages_of(PARAMETERS), st.integers(0, 2), st.integers(0, 600)), max_size=12),
    known=st.booleans(),
)
def test_dense_servers_survive_any_permitted_message(sent: list[Any], known: bool) -> None:
    world = World(seed=1, servers=1, workers=2, clocks=2)
    machine = world.servers[0]
    rows = PARAMETERS.to("server")["worker"]
    for message, shard, size in sent:
        said_now = of_this_shard(message, shard) if known else message
        if why_refused(rows[type(said_now)], HOSTILE, said_now, NEW, size):
            size = 0
            if why_refused(rows[type(said_now)], HOSTILE, said_now, NEW, 0):
                continue
        try:
            place = machine.receive_buffer_for(1, said_now, size) if size else None
            assert place is None or len(place) == size
            machine.on_worker_message(1, said_now, size)
        except ProtocolError:
            machine.on_worker_disconnected(1)
    version = machine.shards[0].version
    assert version is None or version <= 2
