"""What an agent asks the coordinator for psctl: answers of all servers, late ones, none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from psctl.agent import control_socket
from psctl.agent.control_socket import (
    AgentStatus,
    ControlRefused,
    ControlRequest,
    CoordinatorQueries,
    OrdersWanted,
    answer,
)
from psctl.agent.coordinator_link import FromCoordinator
from psctl.job.control_answers import ControlAnswer
from psctl.job.process_messages import HostAnswer, HostWanted, ScaleAnswer
from psctl.job.table_server_messages import ReadBy, ReadRows, ReadWanted
from psctl.orders import AgentOrders
from tests.helpers.orders import make_hosts


def rows(ticket: int, shard: int) -> ReadRows:
    return ReadRows(ticket, 0, 3, 2, [shard], ["s"], [], [])


class Coordinator:
    """Answers each question at once with these messages, whose ticket is set; and keeps what it was asked."""

    def __init__(self, *said: Any) -> None:
        self.said, self.asked = said, []  # type: ignore[var-annotated]
        self.questions = CoordinatorQueries(self._send)

    def _send(self, question: Any) -> bool:
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
            answer(ControlRequest("orders", wrong), standing, lambda asked: None, coordinator.questions, no_orders)
    whole = {"host": 1, "added": msgspec.to_builtins(make_hosts(1)[0]), **folders}
    with pytest.raises(ControlRefused, match="no orders for host 1"):
        answer(ControlRequest("orders", whole), standing, lambda asked: None, coordinator.questions, no_orders)


def no_orders(wanted: OrdersWanted) -> AgentOrders:
    raise ControlRefused(f"no orders for host {wanted.host}")


def test_other_numbers_are_requested_and_an_invalid_request_is_refused() -> None:
    coordinator = Coordinator(lambda ticket: FromCoordinator(ScaleAnswer(ticket, 2, 1, "no", "because")))
    standing = AgentStatus("j", "a", None, [], "")

    def ask(command: str, arguments: dict[str, Any]) -> ControlAnswer:
        return answer(
            ControlRequest(command, arguments), standing, lambda asked: None, coordinator.questions, no_orders
        )

    assert ask("scale", {"servers": 2}) == ScaleAnswer(1, 2, 1, "no", "because")
    for wrong in (
        {"store": "s", "names": [], "keys": [1 << 63]},
        {"store": "s"},
        {"store": 1, "names": [], "keys": []},
    ):
        with pytest.raises(ControlRefused):
            ask("read", wrong)
    assert len(coordinator.asked) == 1
    with pytest.raises(ControlRefused, match="not connected"):
        CoordinatorQueries(lambda message: False).read("s", [], [])
