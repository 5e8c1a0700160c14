"""What an agent asks the coordinator for psctl: answers of all servers, late ones, none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from psctl.agent import control_socket
from psctl.agent.control_socket import (
    CLOCK_QUESTIONS,
    AgentStatus,
    ControlRefused,
    ControlRequest,
    CoordinatorQueries,
    OrdersWanted,
    answer,
)
from psctl.agent.coordinator_link import FromCoordinator
from psctl.agent.step_rings import StepRings
from psctl.job.control_answers import ControlAnswer, ProfileAnswer, RankSpans, SpansAnswer
from psctl.job.process_messages import ClockIs, HostAnswer, HostWanted, ScaleAnswer
from psctl.job.table_server_messages import ReadBy, ReadRows, ReadWanted
from psctl.orders import AgentOrders
from psctl.process.step_ring import KINDS, ProfileRequest, StepRing
from psctl.types import Member
from tests.helpers.orders import make_hosts


def rows(ticket: int, shard: int) -> ReadRows:
    return ReadRows(ticket, 0, 3, 2, [shard], ["s"], [], [])


class Coordinator:
    """Answers each question at once with these messages, whose ticket is set; and keeps what it was asked."""

    def __init__(self, *said: Any) -> None:
        self.said, self.asked = said, []  # type: ignore[var-annotated]
        self.questions = CoordinatorQueries(self.send)

    def send(self, question: Any) -> bool:
        """Answer at once."""
        self.asked.append(question)
        for make in self.said:
            self.questions.add_answer(make(question.ticket))
        return True


def test_a_reading_ends_when_all_servers_have_answered_and_former_answers_do_not_count() -> None:
    coordinator = Coordinator(
        lambda ticket: FromCoordinator(rows(ticket, 0), b"zero"),
        lambda ticket: FromCoordinator(rows(ticket - 1, 1), b"late"),
        lambda ticket: FromCoordinator(ReadBy(ticket, 2)),
        lambda ticket: FromCoordinator(rows(ticket, 1), b"one"),
    )
    for ticket in (1, 2):
        found = coordinator.questions.read("s", ["w"], [1])
        assert found.servers == 2
        assert [(each.led, each.payload) for each in found.answers] == [([0], b"zero"), ([1], b"one")]
        assert coordinator.asked[-1] == ReadWanted(ticket, "s", ["w"], [1])


def test_a_server_that_is_silent_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "READ_TIMEOUT", 0.05)
    coordinator = Coordinator(
        lambda ticket: FromCoordinator(ReadBy(ticket, 2)), lambda ticket: FromCoordinator(rows(ticket, 0))
    )
    found = coordinator.questions.read("s", [], [])
    assert (found.servers, len(found.answers)) == (2, 1)


def test_a_question_waits_for_the_connection_of_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is starting, or whose coordinator is started again."""
    coordinator, attempts = Coordinator(lambda ticket: FromCoordinator(ScaleAnswer(ticket, 2, 1, "no", "because"))), [0]

    def send(question: Any) -> bool:
        attempts[0] += 1
        return attempts[0] > 2 and coordinator.send(question)

    queries = CoordinatorQueries(send)
    coordinator.questions = queries
    assert queries.scale(3, None) == ScaleAnswer(1, 2, 1, "no", "because")
    assert attempts == [3]
    monkeypatch.setattr(control_socket, "READ_TIMEOUT", 0.05)
    with pytest.raises(ControlRefused, match="not connected"):
        CoordinatorQueries(lambda message: False).read("s", [], [])


@pytest.mark.parametrize("connected", [False, True])
def test_a_coordinator_that_does_not_answer_is_a_reason_not_to_scale(
    connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "ANSWER_TIMEOUT", 0.05)
    answer = CoordinatorQueries(lambda message: connected).scale(3, None)
    assert (answer.problem, bool(answer.hint)) == (control_socket.NO_ANSWER, True)


def test_the_hosts_of_a_job_are_requested_for_the_orders_of_one() -> None:
    (host,) = make_hosts(1)
    coordinator = Coordinator(lambda ticket: FromCoordinator(HostAnswer(ticket, [host, host], 1)))
    assert coordinator.questions.hosts(1, host).hosts == [host, host]
    assert coordinator.asked == [HostWanted(1, 1, host)]
    refuses = Coordinator(lambda ticket: FromCoordinator(HostAnswer(ticket, [], 0, "the job is ending")))
    with pytest.raises(ControlRefused, match="the job is ending"):
        refuses.questions.hosts(1, host)


def test_orders_are_of_a_host_of_a_request_that_is_whole() -> None:
    coordinator, standing = Coordinator(), AgentStatus("j", "a", None, [], "")
    folders = {"python": "p", "code": "c", "workdir": "w", "job_dir": "j", "code_dir": "d"}
    for wrong in ({"host": -1, "added": None, **folders}, {"host": 1, **folders}, {"host": 1, "added": 3, **folders}):
        with pytest.raises(ControlRefused, match=r"host|added"):
            answer(ControlRequest("orders", wrong), standing, lambda asked: None, coordinator.questions, *REST)
    whole = {"host": 1, "added": msgspec.to_builtins(make_hosts(1)[0]), **folders}
    with pytest.raises(ControlRefused, match="no orders for host 1"):
        answer(ControlRequest("orders", whole), standing, lambda asked: None, coordinator.questions, *REST)


def no_orders(wanted: OrdersWanted) -> AgentOrders:
    raise ControlRefused(f"no orders for host {wanted.host}")


RINGS = StepRings()
REST = (no_orders, RINGS, lambda rank: f"/profiles/{rank}")


def test_the_coordinators_clock_is_compared_by_the_fastest_answer() -> None:
    ahead, now = 5_000_000_000, time.monotonic_ns

    def answered_after(slow: float) -> Callable[[int], FromCoordinator]:
        def make(ticket: int) -> FromCoordinator:
            asked = now()
            return FromCoordinator(ClockIs(ticket, asked + ahead), at=asked + round(slow * 1e9))

        return make

    coordinator = Coordinator(answered_after(0.5))
    found = coordinator.questions.clock()
    assert found is not None
    offset, error = found
    assert abs(offset - ahead) <= error
    assert 0.25e9 <= error < 0.3e9
    assert len(coordinator.asked) == CLOCK_QUESTIONS


def test_times_of_steps_and_a_profile_are_those_of_workers_here() -> None:
    coordinator, standing = Coordinator(), AgentStatus("j", "a", None, [], "")

    def ask(command: str, arguments: dict[str, Any]) -> ControlAnswer:
        return answer(ControlRequest(command, arguments), standing, lambda asked: None, coordinator.questions, *REST)

    with RINGS.opened(Member("worker", 3)) as descriptor, RINGS.opened(Member("server", 0)):
        assert ask("spans", {}) == SpansAnswer([RankSpans(3, 0, 0, [])])
        ring = StepRing(os.dup(descriptor))
        for step in range(1, 6):
            ring.add(KINDS.index("step"), step, 10 * step, 10 * step + 9)
        assert ask("spans", {"first": 2, "last": 3}) == SpansAnswer(
            [RankSpans(3, 1, 5, [("step", 2, 20, 29), ("step", 3, 30, 39)])]
        )
        assert ask("profile", {"rank": 1, "steps": 5}) == ProfileAnswer("")
        assert ring.profile_request().ticket == 0
        assert ask("profile", {"rank": 3, "steps": 5}) == ProfileAnswer("/profiles/3")
        assert ask("profile", {"rank": 3, "steps": 5}) == ProfileAnswer("/profiles/3")
        assert ring.profile_request() == ProfileRequest(2, 5), "another request, not the same one"
        for wrong in ({"rank": 3, "steps": 0}, {"rank": -1, "steps": 1}, {}):
            with pytest.raises(ControlRefused):
                ask("profile", wrong)
    RINGS.ended(Member("worker", 3))
    assert ask("spans", {}) == SpansAnswer([])


def test_other_numbers_are_requested_and_an_invalid_request_is_refused() -> None:
    coordinator = Coordinator(lambda ticket: FromCoordinator(ScaleAnswer(ticket, 2, 1, "no", "because")))
    standing = AgentStatus("j", "a", None, [], "")

    def ask(command: str, arguments: dict[str, Any]) -> ControlAnswer:
        return answer(ControlRequest(command, arguments), standing, lambda asked: None, coordinator.questions, *REST)

    assert ask("scale", {"servers": 2}) == ScaleAnswer(1, 2, 1, "no", "because")
    for wrong in (
        {"store": "s", "names": [], "keys": [1 << 63]},
        {"store": "s"},
        {"store": 1, "names": [], "keys": []},
    ):
        with pytest.raises(ControlRefused):
            ask("read", wrong)
    assert len(coordinator.asked) == 1
