"""The agent's connection to the coordinator: no message is lost, and none is sent before the register."""

from __future__ import annotations

import queue
import threading
from typing import Any

from psctl.agent.coordinator_link import CoordinatorLink
from psctl.errors import PeerLost
from psctl.job.process_messages import ProcessStarted, Register, ScaleWanted
from psctl.job.session_messages import SessionResumed
from psctl.types import Address, Member
from tests.helpers.running import until


class Prompt:
    """A connection to a coordinator that has its first order carried out before `send` of the Register returns."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.obeyed = threading.Thread(target=self._obey)
        self.link: CoordinatorLink | None = None

    def send(self, message: Any, *, urgent: bool = False) -> bool:
        self.said.append(message)
        if isinstance(message, Register):
            self.obeyed.start()
            self.obeyed.join(0.2)  # the agent has all the time to answer, if nothing keeps it
            threading.Thread(target=self._resume).start()
        return True

    def flush(self, timeout: float) -> None:
        pass

    def close(self, reason: str) -> None:
        pass

    def tolerate(self, silence: float) -> None:
        pass

    def silent_for(self) -> float:
        return 0.0

    def _obey(self) -> None:
        assert self.link is not None
        assert self.link.send(ProcessStarted(Member("worker", 1), 42))

    def _resume(self) -> None:
        assert self.link is not None
        self.link.on_message(self, SessionResumed(None), None)


def test_answers_to_the_first_order_are_sent_after_the_register(monkeypatch):
    peer, register = Prompt(), Register()
    peer.link = link = CoordinatorLink(None, lambda: register, 0.0, "auto", queue.SimpleQueue().put, None)
    monkeypatch.setattr("psctl.agent.coordinator_link.dial", lambda *_: peer)
    link.start(Address("127.0.0.1", 1))
    until(lambda: len(peer.said) > 1, 10)
    assert peer.said == [register, ProcessStarted(Member("worker", 1), 42)]
    link.close(1.0)
    link.on_connection_lost(peer, PeerLost("over"))


def test_a_question_before_the_session_is_refused_and_never_sent(monkeypatch):
    peer, question = Prompt(), ScaleWanted(1, 3, None)
    peer.link = link = CoordinatorLink(None, Register, 0.0, "auto", queue.SimpleQueue().put, None)
    monkeypatch.setattr("psctl.agent.coordinator_link.dial", lambda *_: peer)
    assert not link.ask(question)
    link.start(Address("127.0.0.1", 1))
    until(lambda: link.ask(question), 10)
    until(lambda: len(peer.said) > 2, 10)
    assert peer.said[0] == Register()
    assert peer.said.count(question) == 1, "the first one is not sent later"
    link.close(1.0)
    link.on_connection_lost(peer, PeerLost("over"))
