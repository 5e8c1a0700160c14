"""The connection's state table.

Theory. A connection is one state that both ends walk through on their own; nothing here knows which end it is. An
input is either ours (what we decide to do) or theirs (what arrived). The table lists every pair that is allowed. A pair
that is missing is a fault: the peer's when the input is theirs (ProtocolError), our own bug when it is ours (assert).
Whatever the state, a fault or the end of the stream leads to ENDED, and nothing leads out of it.

    HANDSHAKE --verified--> NAMED --accept--> KEYING --their keys--> OPEN --bye--> ENDED
                              '-----refuse----'-------refusal--------------------->

HANDSHAKE   TLS 1.3, both certificates are verified against the job's authority. All bytes are TLS records.
NAMED       we know who the peer is and have not decided yet. Nothing more is read until then.
KEYING      we have sent Keys inside TLS; theirs is the one record that may come. It is the last of TLS: the very next
            byte belongs to a frame. Neither end sends a frame before it has read the other's Keys, so who reads a frame
            knows that its own key was received, by the very process that the certificate names.
OPEN        sealed frames both ways, which leave it OPEN: for each of them the code asks for the state, not for the
            table. Only now does the connection count as made.
ENDED       over, whatever the reason.
"""

from __future__ import annotations

from enum import Enum

from psctl.errors import ProtocolError


class ConnectionState(Enum):
    """Where a connection stands."""

    HANDSHAKE = "in the TLS handshake"
    NAMED = "waiting for our decision"
    KEYING = "waiting for its keys"
    OPEN = "open"
    ENDED = "ended"


class Ours(Enum):
    """What we do."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    FRAME = "frame"
    BYE = "bye"


class Theirs(Enum):
    """What the peer does."""

    VERIFIED = "a verified certificate"
    KEYS = "keys"
    REFUSED = "a refusal"
    FRAME = "a frame"
    BYE = "a goodbye"
    END = "the end of its stream"
    FAULT = "what the protocol does not allow"


S = ConnectionState
TABLE: dict[tuple[ConnectionState, Ours | Theirs], ConnectionState] = {
    (S.HANDSHAKE, Theirs.VERIFIED): S.NAMED,
    (S.NAMED, Ours.ACCEPT): S.KEYING,
    (S.NAMED, Ours.REFUSE): S.ENDED,
    (S.KEYING, Theirs.KEYS): S.OPEN,
    (S.KEYING, Theirs.REFUSED): S.ENDED,
    (S.OPEN, Theirs.FRAME): S.OPEN,
    (S.OPEN, Theirs.BYE): S.ENDED,
    (S.OPEN, Ours.FRAME): S.OPEN,
    (S.OPEN, Ours.BYE): S.ENDED,
    **{(state, Theirs.END): S.ENDED for state in S},
    **{(state, Theirs.FAULT): S.ENDED for state in S},
}


def after(state: ConnectionState, step: Ours | Theirs) -> ConnectionState:
    """Return the state that follows.

    Raises:
        ProtocolError: the peer did what it may not do in this state.
        AssertionError: we did.
    """
    follows = TABLE.get((state, step))
    if follows is not None:
        return follows
    assert isinstance(step, Theirs), f"we may not do this now: {step.value} while {state.value}"
    raise ProtocolError(f"it sent {step.value} while the connection was {state.value}")
