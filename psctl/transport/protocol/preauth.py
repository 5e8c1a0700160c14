"""The first words of a connection, before TLS: who dials shows that it was handed the job's knock, a secret.

Theory. A TLS handshake costs who is dialled a thread, some 100 KiB and half a millisecond of public-key work, and any
stranger can ask for it. So it must be earned by something cheap, as WireGuard does with the first code of its messages.
All processes of a job are handed one random secret, in the same private way as their certificates. Who is dialled
greets with fresh random bytes; who dials answers with their HMAC under the secret; one hash later it is known whether
to go on. What was overheard answers no other greeting, so replays are refused without a clock and without a memory of
what was seen.

    dialled -> GREETING: MAGIC, 16 random bytes      dials -> ANSWER: HMAC-SHA256(secret, LABEL + GREETING); then TLS

It decides who may try, and nothing else. Who somebody is, and that nobody reads along, comes from TLS and certificates
as if there were no knock: who relays an answer, or an older incarnation, which was handed the secret too, wins a
handshake that fails.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

from psctl.errors import ProtocolError

MAGIC = b"psctl 1\n"
"""What a greeting begins with: the number is that of this exchange."""
FRESH = 16
GREETING = len(MAGIC) + FRESH
ANSWER = 32
LABEL = b"psctl knock 1"
SECRET = 32


def new_secret(random: Callable[[int], bytes] = os.urandom) -> str:
    """Return the knock of a new job, hex."""
    return random(SECRET).hex()


def greet(random: Callable[[int], bytes] = os.urandom) -> bytes:
    """Return a greeting for one caller."""
    return MAGIC + random(FRESH)


def check_greeting(heard: bytes) -> None:
    """Check the first bytes of a greeting, as many as there are.

    Raises:
        ProtocolError: something else than a listener of psctl's speaks there.
    """
    if not MAGIC.startswith(heard[: len(MAGIC)]):
        raise ProtocolError(f"no listener of psctl's, for it begins with {heard[:16]!r}")


def answer(secret: str, greeting: bytes) -> bytes:
    """Return what the holder of the job's secret says to a greeting."""
    key = bytes.fromhex(secret)
    assert len(key) == SECRET, "a job's knock has 32 bytes"
    assert len(greeting) == GREETING, "all of it was heard"
    return hmac.digest(key, LABEL + greeting, "sha256")


def holds(secret: str, greeting: bytes, said: bytes) -> bool:
    """Tell whether `said` is the answer to this greeting."""
    return hmac.compare_digest(answer(secret, greeting), said)
