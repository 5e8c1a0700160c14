"""Preauth: a challenge before TLS. The connecting end proves that it holds the job's secret.

A TLS handshake costs the accepting end a thread, some 100 KiB and half a millisecond of public-key work, and any
process can ask for one. Preauth makes it conditional on something cheap, as WireGuard's first message code does. All
processes of a job receive one random secret in the same private way as their certificates. The accepting end sends
fresh random bytes, the connecting end answers with their HMAC under the secret, and one hash decides whether the
handshake begins. An overheard answer fits no other greeting, so replays are refused without a clock or a record of
earlier connections.

    acceptor -> GREETING: MAGIC, 16 random bytes      dialer -> ANSWER: HMAC-SHA256(secret, LABEL + GREETING); then TLS

Preauth decides which processes may try a handshake and nothing else: identity and secrecy come from TLS and
certificates as if there were no preauth. A relayed answer, or that of an older incarnation, which has the secret too,
leads to a handshake that fails.

Workers of one host prove themselves to each other by the same challenge, with a secret of their own
(`psctl/transport/unix_channel.py`).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

from psctl.errors import ProtocolError

MAGIC = b"psctl 1\n"
"""The first bytes of a greeting: the number is that of this exchange."""
FRESH = 16
GREETING = len(MAGIC) + FRESH
ANSWER = 32
LABEL = b"psctl preauth 1"
SECRET = 32


def new_secret(random: Callable[[int], bytes] = os.urandom) -> str:
    """Return the preauth secret of a new job, in hex."""
    return random(SECRET).hex()


def greet(random: Callable[[int], bytes] = os.urandom) -> bytes:
    """Return a greeting for one connection."""
    return MAGIC + random(FRESH)


def check_greeting(received: bytes) -> None:
    """Check the first bytes of a greeting, as many as have arrived.

    Raises:
        ProtocolError: the other end is not a listener of psctl.
    """
    if not MAGIC.startswith(received[: len(MAGIC)]):
        raise ProtocolError(f"not a listener of psctl: it begins with {received[:16]!r}")


def answer(secret: str, greeting: bytes) -> bytes:
    """Return the answer of a holder of the secret to a greeting."""
    key = bytes.fromhex(secret)
    assert len(key) == SECRET, "a preauth secret has 32 bytes"
    assert len(greeting) == GREETING, "a whole greeting is answered"
    return hmac.digest(key, LABEL + greeting, "sha256")


def is_answer(secret: str, greeting: bytes, received: bytes) -> bool:
    """Return whether `received` is the right answer to this greeting."""
    return hmac.compare_digest(answer(secret, greeting), received)
