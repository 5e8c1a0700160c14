"""Members that say anything that their rows allow, with any values that decode: the state machine never fails."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psctl.coordinator.state.instructions import MessageReceived
from psctl.job.job_permits import COORDINATION, JOINED, PREPARED
from psctl.permits import why_refused
from psctl.types import Member, Role
from tests.helpers.driven_job import A0, A1, W0, W1, DrivenJob, S, training
from tests.hypothesis_profile import examples

MEMBERS = [A0, A1, W0, W1, *S]
STATES = {"agent": JOINED, "server": JOINED, "worker": PREPARED}
FEW = st.integers(-2, 8)


def of_type(found: Any) -> st.SearchStrategy[Any]:
    """Return values of a field's type: small numbers that may name what is there, and the bounds of the type."""
    match found:
        case msgspec.inspect.StructType(cls=cls):
            return of_struct(cls)
        case msgspec.inspect.IntType(ge=least, le=most):
            low, high = -(1 << 63) if least is None else least, (1 << 63) - 1 if most is None else most
            return FEW.filter(lambda value: low <= value <= high) | st.sampled_from([low, high])
        case msgspec.inspect.FloatType(ge=least):
            return st.floats(0, 1e9) if least is not None else st.floats(width=32)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType():
            return st.sampled_from(["", "w", "worker/1", "stdout", "loss"])
        case msgspec.inspect.BytesType():
            return st.binary(max_size=4)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(list(values))
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([of_type(each) for each in types])
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key), of_type(value), max_size=2)
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(of_type(item), max_size=2)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(of_type(item), max_size=2).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*map(of_type, items))
        case msgspec.inspect.AnyType():
            return st.none() | st.integers() | st.text(max_size=3)
    raise AssertionError(f"no values for {found}")


def of_struct(kind: type) -> st.SearchStrategy[Any]:
    if kind is Member:
        return st.sampled_from(MEMBERS) | st.builds(
            Member, st.sampled_from(get_args(Role)), st.integers(0, 5), st.integers(0, 2)
        )
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return st.builds(kind, **{each.name: of_type(each.type) for each in fields})


def said_by(member: Member) -> st.SearchStrategy[Any]:
    rows = list(COORDINATION.to("coordinator")[member.role].values())
    return st.sampled_from(rows).flatmap(lambda row: of_struct(row.message))


SPEECH = st.lists(
    st.sampled_from(MEMBERS).flatmap(lambda member: st.tuples(st.just(member), said_by(member))),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(speech=SPEECH, seconds=st.sampled_from([0.0, 0.2, 40.0]))
def test_a_job_that_trains_survives_anything_that_may_be_said(speech: list[tuple[Member, Any]], seconds: float) -> None:
    job = training()
    listen(job, speech, seconds)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(speech=SPEECH, seconds=st.sampled_from([0.0, 0.2, 40.0]))
def test_a_job_that_starts_survives_anything_that_may_be_said(speech: list[tuple[Member, Any]], seconds: float) -> None:
    listen(DrivenJob().running(), speech, seconds)


def listen(job: DrivenJob, speech: list[tuple[Member, Any]], seconds: float) -> None:
    """Bring all that a connection lets through; nothing is raised, and every answer can be sent."""
    rows = COORDINATION.to("coordinator")
    for member, message in speech:
        row = rows[member.role][type(message)]
        if not why_refused(row, member, message, STATES[member.role], 0) or row.states.get(member.role) == ("new",):
            job.handle(MessageReceived(member, message))
            job.wait(seconds)
    for each in job.instructions:
        msgspec.msgpack.encode(each)
