"""A member's connection to the coordinator: made again, without losing or repeating a numbered message."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from psctl.errors import ConnectionFailed, PeerLeft, ProtocolError, TimedOut
from psctl.job.checkpoint_messages import LoadEnd, LoadWanted, SaveBegin, SaveEnd, SavePart
from psctl.job.message import JobMessage
from psctl.job.session_messages import MessagesReceived, ResumeSession, SessionResumed
from psctl.job.training_messages import Go, Heartbeat, ScriptFinished
from psctl.process.coordinator_connection import CoordinatorConnection
from tests.helpers.running import until

BROKEN = ConnectionFailed("reset by peer")


class Peer:
    """One connection, with all that was sent on it."""

    def __init__(self) -> None:
        self.sent: list[JobMessage] = []
        self.closed = ""

    def send(self, message: JobMessage, payload: Any = None, *, urgent: bool = False) -> bool:
        assert urgent is not isinstance(message, SaveBegin | SavePart | SaveEnd | LoadWanted), (
            "numbered messages stay in order"
        )
        self.sent.append(message)
        return True

    def tolerate(self, silence: float) -> None: ...

    def flush(self, timeout: float | None) -> None:
        if self.closed:
            raise BROKEN

    def close(self, reason: str) -> None:
        self.closed = reason

    def join(self, timeout: float | None) -> None: ...


class Coordinator:
    """Is dialled; and the handler of the member's messages."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.received: list[JobMessage] = []
        self.lost: list[ConnectionFailed] = []
        self.refuses: list[Exception] = []
        """Errors of the next attempts."""

    def dial(self, handler: Any) -> Peer:
        if self.refuses:
            raise self.refuses.pop(0)
        self.peers.append(Peer())
        handler.on_connected(self.peers[-1])
        return self.peers[-1]

    def on_message(self, peer: Peer, message: JobMessage, payload: memoryview | None) -> None:
        self.received.append(message)

    def receive_buffer_for(self, peer: Peer, message: JobMessage, size: int) -> memoryview | None:
        return None

    def on_connection_lost(self, peer: Peer, error: ConnectionFailed) -> None:
        self.lost.append(error)

    def breaks(self, connection: CoordinatorConnection) -> Peer:
        """The present connection breaks; return the next one."""
        count = len(self.peers)
        connection.on_connection_lost(self.peers[-1], BROKEN)
        until(lambda: len(self.peers) > count and self.peers[-1].sent, 10)
        return self.peers[-1]


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def connection(coordinator: Coordinator) -> CoordinatorConnection:
    return CoordinatorConnection(coordinator, coordinator.dial, 1.0)


def test_messages_that_were_not_received_are_sent_again(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    for step in range(4):
        connection.send(ScriptFinished(step))
    connection.on_message(coordinator.peers[0], MessagesReceived(1), None)
    second = coordinator.breaks(connection)
    assert second.sent == [ResumeSession(0, ())]
    connection.send(ScriptFinished(4))
    assert len(second.sent) == 1, "nothing before the session is resumed"
    connection.on_message(second, SessionResumed(2), None)
    assert second.sent[1:] == [ScriptFinished(2), ScriptFinished(3), ScriptFinished(4)]
    connection.send(ScriptFinished(5))
    assert second.sent[-1] == ScriptFinished(5)
    assert coordinator.lost == []


def test_the_count_of_received_messages_outlasts_a_connection(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    for _ in range(3):
        connection.on_message(coordinator.peers[0], Go(), None)
    assert coordinator.peers[0].sent == [MessagesReceived(count) for count in (1, 2, 3)]
    assert coordinator.breaks(connection).sent == [ResumeSession(3, ())]
    assert coordinator.received == [Go()] * 3


def test_what_a_later_message_replaces_is_not_kept(coordinator: Coordinator, connection: CoordinatorConnection) -> None:
    assert connection.send(Heartbeat(1, ""))
    second = coordinator.breaks(connection)
    assert not connection.send(Heartbeat(2, ""))
    connection.on_message(second, SessionResumed(0), None)
    assert connection.send(Heartbeat(3, ""))
    assert second.sent[1:] == [Heartbeat(3, "")]


def test_the_rest_of_an_interrupted_checkpoint_is_dropped_and_its_step_is_named(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    assert connection.send(SaveBegin(7, []))
    assert connection.send(SavePart(7, 0, 0), memoryview(b"a"))
    second = coordinator.breaks(connection)
    assert second.sent == [ResumeSession(0, (7,))]
    connection.on_message(second, SessionResumed(0), None)
    assert not connection.send(SavePart(7, 0, 1), memoryview(b"b"))
    assert not connection.send(SaveEnd(7))
    assert connection.send(SaveBegin(9, []))
    assert connection.send(SaveEnd(9))
    assert second.sent[1:] == [SaveBegin(9, []), SaveEnd(9)]


def test_a_checkpoint_begins_when_the_session_is_resumed(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    second = coordinator.breaks(connection)
    sender = threading.Thread(target=connection.send, args=(SaveBegin(7, []),))
    sender.start()
    sender.join(0.2)
    assert sender.is_alive()
    connection.on_message(second, SessionResumed(0), None)
    sender.join(10)
    assert second.sent[1:] == [SaveBegin(7, [])]


def test_tensors_of_a_checkpoint_whose_answer_is_lost_are_requested_again(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    connection.send(LoadWanted(1, []))
    connection.send(LoadWanted(2, []))
    connection.on_message(coordinator.peers[0], LoadEnd(1), None)
    second = coordinator.breaks(connection)
    assert connection.send(LoadWanted(3, [])), "does not block the thread that resumes the session"
    connection.on_message(second, SessionResumed(0), None)
    assert second.sent[1:] == [LoadWanted(2, []), LoadWanted(3, [])]
    connection.on_message(second, LoadEnd(2), None)
    connection.on_message(second, LoadEnd(3), None)
    third = coordinator.breaks(connection)
    connection.on_message(third, SessionResumed(0), None)
    assert third.sent == [ResumeSession(0, ())]


def test_the_coordinator_is_dialled_until_it_is_there_again(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    coordinator.refuses = [ConnectionFailed("refused")] * 5
    assert coordinator.breaks(connection).sent == [ResumeSession(0, ())]


def test_after_the_patience_the_first_loss_is_reported(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    coordinator.refuses = [ConnectionFailed("refused")] * 1000
    connection.on_connection_lost(coordinator.peers[0], BROKEN)
    until(lambda: coordinator.lost, 10)
    assert coordinator.lost == [BROKEN]
    assert not connection.send(ScriptFinished(1))
    with pytest.raises(ConnectionFailed, match="reset by peer"):
        connection.deliver(1)


@pytest.mark.parametrize("error", [PeerLeft("the job is over"), ProtocolError("an unknown message")])
def test_an_end_in_good_order_and_a_broken_protocol_are_final(
    coordinator: Coordinator, connection: CoordinatorConnection, error: ConnectionFailed
) -> None:
    connection.on_connection_lost(coordinator.peers[0], error)
    assert (coordinator.lost, len(coordinator.peers)) == ([error], 1)


def test_a_coordinator_that_refuses_the_member_is_lost(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    refusal = ProtocolError("worker/1 was lost")
    coordinator.refuses = [refusal]
    connection.on_connection_lost(coordinator.peers[0], BROKEN)
    until(lambda: coordinator.lost, 10)
    assert coordinator.lost == [refusal]


def test_a_closed_connection_is_not_made_again(coordinator: Coordinator, connection: CoordinatorConnection) -> None:
    connection.close("done")
    connection.on_connection_lost(coordinator.peers[0], BROKEN)
    assert (coordinator.peers[0].closed, coordinator.lost, len(coordinator.peers)) == ("done", [BROKEN], 1)


def test_deliver_waits_for_the_acknowledgement_of_the_last_message(
    coordinator: Coordinator, connection: CoordinatorConnection
) -> None:
    connection.send(ScriptFinished(1))
    with pytest.raises(TimedOut, match=r"did not acknowledge all messages within 0\.1 s"):
        connection.deliver(0.1)
    waits = threading.Thread(target=connection.deliver, args=(10,))
    waits.start()
    second = coordinator.breaks(connection)
    assert waits.is_alive()
    connection.on_message(second, SessionResumed(1), None)
    waits.join(10)
    assert not waits.is_alive()


def test_flush_bears_a_connection_that_breaks(coordinator: Coordinator, connection: CoordinatorConnection) -> None:
    connection.flush(1)
    coordinator.peers[0].closed = "broken"
    connection.flush(1)
    connection.close("done")
    with pytest.raises(ConnectionFailed):
        connection.flush(1)


def test_a_coordinator_that_cannot_be_reached_at_first_is_an_error(coordinator: Coordinator) -> None:
    coordinator.refuses = [ConnectionFailed("refused")] * 1000
    with pytest.raises(ConnectionFailed, match="refused"):
        CoordinatorConnection(coordinator, coordinator.dial, 0.2)
