"""Who may say what: every message and every role against the tables, before any handler is reached."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import pytest

from psctl.agent import torch_store
from psctl.errors import MessageRefused
from psctl.job import (
    checkpoint_messages,
    membership_messages,
    process_messages,
    table_server_messages,
    training_messages,
)
from psctl.job.job_permits import COORDINATION
from psctl.job.message import JobMessage
from psctl.permits import NEW, Permits
from psctl.ps import messages as of_parameters
from psctl.ps import table_messages as of_tables
from psctl.ps.permits import PARAMETERS, RACK, TABLES
from psctl.transport.protocol.message_assembly import Codec
from psctl.types import Address, Layout, Member, Role, TensorSlice
from tests.helpers.permit_checks import PermitChecks

ROLES: tuple[Role, ...] = get_args(Role)
OF_PEERS = set(get_args(of_parameters.BetweenPeers))
"""Messages between workers that sum together; those of one host send them over a socket of theirs."""
BETWEEN_PROCESSES = {
    each for each in of_parameters.Message.__subclasses__()
    if each.__module__.startswith("psctl.") and each not in OF_PEERS - {of_parameters.Values}
}  # fmt: skip
"""Messages of servers and their workers."""
OF_TABLES = {each for each in BETWEEN_PROCESSES if each.__module__ == of_tables.__name__}
SHARED = {
    *get_args(of_tables.TableBetween),
    of_parameters.WaitQuery,
    of_parameters.WaitAnswer,
    of_parameters.Refused,
    of_parameters.SharedMemoryOffer,
    of_parameters.SharedMemoryAccepted,
}
"""Messages of both kinds of connection."""
TABLES_OF = {
    "coordination": (COORDINATION, set(JobMessage.__subclasses__())),
    "parameters": (PARAMETERS, BETWEEN_PROCESSES - OF_TABLES),
    "tables": (TABLES, OF_TABLES | SHARED),
    "rack": (RACK, OF_PEERS),
    "tunnels": (torch_store.TUNNELS, {torch_store.Carried, torch_store.NoMore}),
}
SLICE = TensorSlice("param/w", "float32", (4,), 0, 4)


class Spy:
    """A handler that notes what reaches it."""

    def __init__(self) -> None:
        self.reached: list[Any] = []

    def on_connected(self, peer: Any) -> None:
        pass

    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None:
        self.reached.append(message)
        return None

    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        self.reached.append(message)

    def on_connection_lost(self, peer: Any, error: Any) -> None:
        pass


class Caller:
    """A connection of one member to a gate."""

    def __init__(self, permits: Permits, receiver: Role, member: Member) -> None:
        self.member, self.spy = member, Spy()
        self.gate = PermitChecks(permits, receiver, self.spy)
        self.gate.on_connected(self)

    def say(self, message: Any, payload: int = 0) -> None:
        if payload:
            self.gate.receive_buffer_for(self, message, payload)
        self.gate.on_message(self, message, memoryview(bytes(payload)) if payload else None)

    def refused(self, message: Any, payload: int = 0) -> str:
        """Say a message that must not reach the handler; return why not."""
        self.spy.reached.clear()
        with pytest.raises(MessageRefused) as error:
            self.say(message, payload)
        assert self.spy.reached == []
        return error.value.message


def made(kind: type) -> Any:
    """Return a message of this kind, each field as small as its type allows."""
    built = msgspec.inspect.type_info(kind)
    return msgspec.convert(_value(built), kind, strict=False)


def _value(found: Any) -> Any:
    match found:
        case msgspec.inspect.StructType(tag_field=tag_field, tag=tag, fields=fields):
            values = {each.encode_name: _value(each.type) for each in fields if each.required}
            return {**values, tag_field: tag} if tag_field else values
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return 0
        case msgspec.inspect.BoolType():
            return False
        case msgspec.inspect.StrType():
            return ""
        case msgspec.inspect.BytesType():
            return b""
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.UnionType(types=types):
            empty = any(isinstance(each, msgspec.inspect.NoneType) for each in types)
            return None if empty else _value(types[0])
        case msgspec.inspect.DictType():
            return {}
    return []


def every() -> list[tuple[str, type]]:
    return [(name, row.message) for name, (permits, _) in TABLES_OF.items() for row in permits.rows]


@pytest.mark.parametrize("name", TABLES_OF)
def test_each_message_of_the_protocol_has_one_row(name: str) -> None:
    permits, kinds = TABLES_OF[name]
    assert len({row.message for row in permits.rows}) == len(permits.rows)
    assert {row.message for row in permits.rows} == kinds


def test_each_class_of_message_is_of_some_connection() -> None:
    listed = {row.message for permits, _ in TABLES_OF.values() for row in permits.rows}
    for room in (of_parameters, of_tables):  # all messages of a job derive from one class: the test before
        for name, found in vars(room).items():
            base = getattr(room, "Message", None)
            if isinstance(found, type) and base is not None and issubclass(found, base) and found is not base:
                assert found in listed, f"{room.__name__}.{name} is in no table"


@pytest.mark.parametrize("name", TABLES_OF)
def test_no_role_sends_a_message_without_a_row(name: str) -> None:
    """Every message by every role to every role: where there is no row, the handler is not reached."""
    permits, _ = TABLES_OF[name]
    refusals = 0
    for row in permits.rows:
        message = made(row.message)
        for receiver in ROLES:
            for sender in ROLES:
                if (sender, receiver) in row.directions:
                    continue
                why = Caller(permits, receiver, Member(sender, 0)).refused(message)
                assert f"{row.name} is no message that a {sender} may send here" in why
                assert Caller(permits, receiver, Member(sender, 0)).refused(message, payload=1)
                refusals += 1
    assert refusals > 5 * len(permits.rows)


@pytest.mark.parametrize("name", TABLES_OF)
def test_every_row_keeps_its_states_and_sizes(name: str) -> None:
    permits, _ = TABLES_OF[name]
    for row in permits.rows:
        message = made(row.message)
        for sender, receiver in row.directions:
            caller = Caller(permits, receiver, Member(sender, 0))
            allowed = row.states.get(sender, (NEW,))
            if NEW not in allowed:
                assert f"{row.name} in state 'new'" in caller.refused(message)
            for state in ("new", "joined", "prepared", "other"):
                caller.gate.of[caller].state = state
                if sender in row.states and state not in allowed:
                    assert f"in state {state!r}" in caller.refused(message)
            caller.gate.of[caller].state = allowed[0]
            assert f"with {row.payload + 1} bytes of payload" in caller.refused(message, row.payload + 1)
            if row.rank is not None and sender != "coordinator":
                other = Caller(permits, receiver, Member(sender, row.rank + 1))
                other.gate.of[other].state = allowed[0]
                assert f"is for {sender}/{row.rank} to send" in other.refused(message)


@pytest.mark.parametrize("name", TABLES_OF)
def test_messages_that_a_connection_does_not_check_are_permitted_always(name: str) -> None:
    permits, _ = TABLES_OF[name]
    always = 0
    for row in permits.rows:
        for sender, receiver in row.directions:
            gate = Caller(permits, receiver, Member(sender, 5)).gate
            (found,) = gate.of.values()
            if row.message not in found.always:
                continue
            always += 1
            message = made(row.message)
            for state in ("new", "joined", "prepared", "other"):
                found.state = state
                found.check(message, found.always[row.message])
                found.admit(message, checked=False)
                assert found.state == state
                with pytest.raises(MessageRefused, match="bytes of payload"):
                    found.check(message, found.always[row.message] + 1)
    assert always > 0


def worker(rank: int = 1, *, prepared: bool = True) -> Caller:
    caller = Caller(COORDINATION, "coordinator", Member("worker", rank))
    caller.say(training_messages.Join(1))
    if prepared:
        caller.say(training_messages.Prepare(Layout((), "", ()), ()))
    return caller


def server() -> Caller:
    caller = Caller(COORDINATION, "coordinator", Member("server", 2))
    caller.say(training_messages.Join(1))
    return caller


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (checkpoint_messages.SaveBegin(5, [SLICE], tables=True), "SaveBegin: only servers hold tables"),
        (checkpoint_messages.SavePart(5, 0, 0, tables=True), "SavePart: only servers hold tables"),
        (checkpoint_messages.SaveEnd(5, tables=True), "SaveEnd: only servers hold tables"),
        (checkpoint_messages.SaveBegin(5, [SLICE], {"step": 5}), "only worker/0 sends the state"),
        (checkpoint_messages.SaveBegin(-1, [SLICE]), "step -1"),
        (training_messages.MemberReady(Address("10.0.0.1", 1)), "a worker does not"),
        (training_messages.StartBegin([SLICE]), "StartBegin is for worker/0"),
        (training_messages.Join(1), "Join in state 'prepared'"),
        (training_messages.Prepare(Layout((), "", ()), ()), "Prepare in state 'prepared'"),
        (
            table_server_messages.TablesReady(Address("10.0.0.1", 1)),
            "TablesReady is no message that a worker may send",
        ),
        (process_messages.StopWanted(False, True, "x"), "StopWanted is no message that a worker may send"),
        (process_messages.ScaleWanted(1, 300_000, None), "ScaleWanted is no message that a worker may send"),
        (
            membership_messages.ProtocolViolation(Member("worker", 0), "x"),
            "ProtocolViolation is no message that a worker may send",
        ),
    ],
)
def test_a_worker_that_breaks_the_table_is_refused_at_the_coordinator(message: Any, why: str) -> None:
    assert why in worker().refused(message)


def test_what_the_same_rows_allow_reaches_the_handler() -> None:
    for caller, message in (
        (worker(0), checkpoint_messages.SaveBegin(5, [SLICE], {"step": 5})),
        (worker(1), checkpoint_messages.SaveBegin(5, [SLICE])),
        (server(), checkpoint_messages.SaveBegin(5, [SLICE], tables=True)),
        (server(), training_messages.MemberReady(Address("10.0.0.1", 1))),
        (worker(1), training_messages.MemberReady()),
        (worker(1, prepared=False), table_server_messages.TablesWanted()),
    ):
        caller.say(message)
        assert caller.spy.reached[-1] is message


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (of_parameters.StartValues(0), "StartValues is for worker/0"),
        (of_parameters.PutRankState(0, rank=0), "PutRankState: the state of worker/0"),
        (of_parameters.Forwarded(0, 1, 1, 1), "Forwarded is no message that a worker may send"),
        (of_parameters.Leads(1, [0]), "Leads is no message that a worker may send"),
    ],
)
def test_a_worker_that_breaks_the_table_is_refused_at_a_server(message: Any, why: str) -> None:
    assert why in Caller(PARAMETERS, "server", Member("worker", 1)).refused(message)


@pytest.mark.parametrize(
    ("permits", "sender", "handled", "before"),
    [
        (PARAMETERS, "worker", of_parameters.FromWorker, {of_parameters.SharedMemoryOffer}),
        (PARAMETERS, "server", of_parameters.BetweenServers, set()),
        (TABLES, "worker", of_tables.TableFromWorker, {of_parameters.SharedMemoryOffer, of_tables.AnswersRead}),
        (TABLES, "server", of_tables.TableBetween, set()),
    ],
)
def test_the_state_machines_of_a_server_are_given_the_messages_that_the_table_admits(
    permits: Permits, sender: Role, handled: Any, before: set[type]
) -> None:
    assert set(permits.to("server")[sender]) == set(get_args(handled)) | before


MANY = {"step": 1, "epoch": 0, "weight": 1.0, "metrics": {f"m{at}": 0.0 for at in range(1001)}}
DIMENSIONS = {"name": "w", "dtype": "float32", "shape": [1] * 65, "start": 0, "stop": 1}


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        (checkpoint_messages.SaveBegin, {"step": 1, "slices": [DIMENSIONS]}, "length <= 64"),
        (checkpoint_messages.SaveBegin, {"step": 1, "slices": [{**DIMENSIONS, "shape": [-1]}]}, ">= 0"),
        (checkpoint_messages.SaveBegin, {"step": 1 << 60, "slices": []}, "<= "),
        (
            checkpoint_messages.SaveBegin,
            {"step": 1, "slices": [{**DIMENSIONS, "shape": [], "name": "n" * 5000}]},
            "length <= 4096",
        ),
        (process_messages.ProcessStarted, {"member": {"role": "worker", "rank": -1}, "pid": 1}, ">= 0"),
        (process_messages.ScaleWanted, {"ticket": 1, "workers": 1_000_001, "servers": None}, "<= 1000000"),
        (training_messages.MemberReady, {"address": {"host": "h", "port": 70000}}, "<= 65535"),
        (membership_messages.ShardHandedOver, {"epoch": 1, "shard": -1}, ">= 0"),
        (training_messages.WorkerListens, {"address": None, "secret": bytes(65)}, "length <= 64"),
        (training_messages.WorkerReport, {"step": 1, "epoch": 0, "steps": [MANY]}, "length <= 1000"),
        (
            process_messages.OutputLines,
            {"member": {"role": "worker", "rank": 0}, "stream": "out"},
            "Invalid enum value",
        ),
    ],
)
def test_bounds_of_fields_are_refused_by_decoding(kind: type, fields: dict[str, Any], why: str) -> None:
    data = msgspec.msgpack.encode({"type": kind.__name__, **fields})
    with pytest.raises(MessageRefused, match=re.escape(why)):
        Codec(COORDINATION).decode(data)


def test_a_message_longer_than_its_kind_may_be_is_refused_by_its_first_bytes() -> None:
    codec = Codec(COORDINATION)
    data = msgspec.msgpack.encode({"type": "ProposeCut", "ticket": 1, "more": bytes(100_000)})
    with pytest.raises(MessageRefused, match="a ProposeCut of 100035 bytes, more than 65536"):
        codec.decode(data)
    with pytest.raises(MessageRefused, match="a ProposeCut of 9000000 bytes"):
        codec.admit(data[:64], 9_000_000)
    codec.admit(msgspec.msgpack.encode({"type": "Prepare"}), 9_000_000)
    with pytest.raises(MessageRefused, match="of no name"):
        codec.admit(b"\xc1" * 10, 100_000)


@pytest.mark.parametrize("payload", [None, b"payload"])
@pytest.mark.parametrize(
    ("message", "why"),
    [
        (of_parameters.StartValues(0), "StartValues is for worker/0 to send"),
        (of_parameters.PutRankState(0, rank=0), "PutRankState: the state of worker/0"),
        (of_parameters.Values(0, 1, b"", 0, 1), "Values is no message that a worker may send here"),
    ],
)
def test_a_connection_ends_before_its_handler_gets_a_message_that_no_row_permits(
    server_pair: Any, message: Any, why: str, payload: bytes | None
) -> None:
    mine, _ = server_pair.join()
    asked: list[Any] = []
    server_pair.server.receive_buffer_for = lambda peer, message, size: asked.append(message)
    permitted = of_parameters.PutRankState(1, rank=3), of_parameters.Pull(0, [0], 0, [-1])
    mine.send(permitted[0], b"state")
    mine.send(permitted[1])
    for expected in permitted:
        assert server_pair.server.next("received")[1][0] == expected
    mine.send(message, payload)
    _, error = server_pair.server.next("lost")
    assert isinstance(error, MessageRefused)
    assert f"it broke the protocol: {why}" in error.message
    assert asked == [permitted[0]]


def test_a_connection_refuses_a_payload_that_is_too_large_for_its_message(server_pair: Any) -> None:
    mine, _ = server_pair.join()
    server_pair.server.receive_buffer_for = lambda peer, message, size: pytest.fail("memory was taken")
    mine.send(of_parameters.Pull(0, [0], 0, [-1]), b"x")
    _, error = server_pair.server.next("lost")
    assert isinstance(error, MessageRefused)
    assert "Pull with 1 bytes of payload, more than 0" in error.message
