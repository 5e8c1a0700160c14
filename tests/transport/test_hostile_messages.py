"""Random bytes and lies about sizes after the handshake: a refusal, never another error, never much memory."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psctl.agent.torch_store import TUNNELS
from psctl.errors import MessageRefused, ProtocolError
from psctl.job.job_permits import COORDINATION
from psctl.permits import Permits
from psctl.ps.permits import PARAMETERS, RACK, TABLES
from psctl.transport.protocol.message_assembly import Codec

ALL = {"coordination": COORDINATION, "parameters": PARAMETERS, "tables": TABLES, "rack": RACK, "tunnels": TUNNELS}
CODECS = {name: Codec(permits) for name, permits in ALL.items()}
BRIEF = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
values = st.recursive(
    plain | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def decoded(name: str, data: bytes) -> Any:
    """Decode as a connection does; None when it is refused."""
    try:
        return CODECS[name].decode(data)
    except MessageRefused:
        return None


@pytest.mark.parametrize("name", ALL)
@BRIEF
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(name: str, data: bytes) -> None:
    assert decoded(name, data) is None  # that random bytes have a tag does not happen


@pytest.mark.parametrize("name", ALL)
@BRIEF
@given(data=st.data())
def test_random_fields_are_a_message_or_refused(name: str, data: Any) -> None:
    row = data.draw(st.sampled_from(ALL[name].rows))
    fields = [each.encode_name for each in msgspec.structs.fields(row.message)]
    said = {"type": row.name, **{each: data.draw(values) for each in fields if data.draw(st.booleans())}}
    found = decoded(name, msgspec.msgpack.encode(said))
    assert found is None or type(found) is row.message


@pytest.mark.parametrize("name", ALL)
@BRIEF
@given(data=st.data())
def test_cut_and_flipped_messages_are_a_message_or_refused(name: str, data: Any) -> None:
    row = data.draw(st.sampled_from(ALL[name].rows))
    whole = bytearray(msgspec.msgpack.encode({"type": row.name, "step": 1, "slices": [], "ticket": 1, "shard": 0}))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    found = decoded(name, bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    assert found is None or type(found) in {each.message for each in ALL[name].rows}


HEADS = {  # msgpack's long forms, each announcing 4 GiB of what does not come
    "array": b"\xdd\xff\xff\xff\xff", "map": b"\xdf\xff\xff\xff\xff", "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
}  # fmt: skip


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("permits", ALL.values(), ids=ALL.keys())
def test_a_list_that_lies_about_its_length_takes_no_memory(permits: Permits, head: bytes) -> None:
    codec = Codec(permits)
    before = resident()
    for row in permits.rows:
        for field in msgspec.structs.fields(row.message):
            data = msgspec.msgpack.encode({"type": row.name, field.encode_name: None})[:-1] + head
            with pytest.raises(MessageRefused):
                codec.decode(data)
    assert resident() - before < 64 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nesting_without_end_is_refused() -> None:
    for head in (b"\x91", b"\x81\xa1a"):
        deep = msgspec.msgpack.encode({"type": "WorkerReport", "steps": None})[:-1] + head * 20_000
        with pytest.raises(ProtocolError):
            CODECS["coordination"].decode(deep)
        deep = msgspec.msgpack.encode({"type": "SaveBegin", "state": None})[:-1] + head * 20_000  # any JSON is let in
        with pytest.raises(ProtocolError):
            CODECS["coordination"].decode(deep)
