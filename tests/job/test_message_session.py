"""A session of messages: each is handled once, whatever connections break."""

from __future__ import annotations

import pickle
import random

import pytest

from psctl.job.message_session import BULK, REPLACED, MessageSession, is_numbered
from psctl.job.process_messages import Register, StopWanted
from psctl.job.training_messages import Heartbeat, Join, ScriptFinished
from psctl.permits import WireMessage


def finished(*steps: int) -> list[WireMessage]:
    return [ScriptFinished(step) for step in steps]


def session(count: int) -> MessageSession[WireMessage]:
    """A session in which messages 0 to count - 1 were sent."""
    made: MessageSession[WireMessage] = MessageSession()
    for message in finished(*range(count)):
        made.keep(message)
    return made


def test_messages_are_kept_until_they_are_acknowledged() -> None:
    ours = session(5)
    assert (ours.next, ours.waiting) == (5, 5)
    ours.acknowledge(3)
    assert (ours.next, ours.unacknowledged()) == (5, finished(3, 4))
    ours.acknowledge(2)  # late
    assert ours.unacknowledged() == finished(3, 4)
    with pytest.raises(ValueError, match="6 messages are acknowledged, 5 were sent"):
        ours.acknowledge(6)


def test_a_session_that_begins_again_keeps_later_messages_and_a_users_stop() -> None:
    ours = session(3)
    stop = StopWanted(False, True, "Ctrl-C")
    ours.keep(stop)
    for message in finished(4, 5):
        ours.keep(message)
    ours.received = 9
    ours.begin_again(5)
    assert (ours.unacknowledged(), ours.next, ours.received) == ([stop, *finished(5)], 2, 0)


def test_a_copy_continues_the_session() -> None:
    ours = session(4)
    ours.acknowledge(1)
    ours.received = 7
    copy = pickle.loads(pickle.dumps(ours))
    assert (copy.unacknowledged(), copy.next, copy.received) == (finished(1, 2, 3), 4, 7)
    copy.keep(ScriptFinished(4))
    assert ours.next == 4


def test_messages_that_a_later_one_replaces_and_bulk_data_are_not_numbered() -> None:
    assert not is_numbered(Heartbeat(1, ""))
    assert not is_numbered(Join(1))
    assert not is_numbered(Register())
    assert is_numbered(ScriptFinished(1))
    assert is_numbered(StopWanted(False, True, ""))
    assert len(set(REPLACED + BULK)) == len(REPLACED + BULK)


@pytest.mark.parametrize("seed", range(200))
def test_each_message_is_handled_once_and_in_order_over_connections_that_break(seed: int) -> None:
    """One direction: a connection delivers a prefix of what is sent on it, and acknowledgements are lost with it."""
    chance = random.Random(seed)
    sender, handled, acknowledged = session(0), list[WireMessage](), 0
    wire: list[WireMessage] = []
    for number in range(200):
        sender.keep(ScriptFinished(number))
        wire.append(ScriptFinished(number))
        while wire and chance.random() < 0.6:
            handled.append(wire.pop(0))
        if chance.random() < 0.3:
            acknowledged = chance.randint(acknowledged, len(handled))
            sender.acknowledge(acknowledged)
        if chance.random() < 0.1:  # a new connection: the receiver tells how many it has
            sender.acknowledge(len(handled))
            wire = sender.unacknowledged()
    assert handled + wire == finished(*range(200))
