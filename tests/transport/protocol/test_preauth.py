"""Preauth: a holder of the job's secret answers any greeting; nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.transport.protocol import preauth

SECRET = preauth.new_secret()
GREETING = preauth.greet()
RIGHT = preauth.answer(SECRET, GREETING)


def test_the_holder_of_the_secret_answers_and_greetings_and_secrets_are_fresh() -> None:
    assert preauth.is_answer(SECRET, GREETING, RIGHT)
    assert len({preauth.greet() for _ in range(100)}) == len({preauth.new_secret() for _ in range(100)}) == 100
    assert (len(GREETING), len(RIGHT), len(bytes.fromhex(SECRET))) == (preauth.GREETING, preauth.ANSWER, preauth.SECRET)
    preauth.check_greeting(GREETING)


def test_a_known_answer() -> None:
    """HMAC-SHA256 by openssl dgst, so that both ends can't be wrong in the same way."""
    greeting = b"psctl 1\n" + bytes(range(16))
    assert (
        preauth.answer("0f" * 32, greeting).hex() == "c7a48217192316f3ec7f7f4a68b3b1c9febc4584b604aa998e1038fbf73b3275"
    )


@given(said=st.binary(max_size=64))
@example(said=b"")
@example(said=RIGHT[:-1])
@example(said=RIGHT + b"\0")
def test_nothing_else_is_an_answer(said: bytes) -> None:
    assert not preauth.is_answer(SECRET, GREETING, said)


@given(
    greeting=st.binary(min_size=preauth.GREETING, max_size=preauth.GREETING), bit=st.integers(0, 8 * preauth.ANSWER - 1)
)
def test_an_answer_is_for_one_greeting_and_one_secret_and_to_the_bit(greeting: bytes, bit: int) -> None:
    said = preauth.answer(SECRET, greeting)
    assert preauth.is_answer(SECRET, greeting, said)
    assert not preauth.is_answer(SECRET, GREETING, said)
    assert not preauth.is_answer(preauth.new_secret(), greeting, said)
    changed = bytearray(said)
    changed[bit // 8] ^= 1 << bit % 8
    assert not preauth.is_answer(SECRET, greeting, bytes(changed))


@given(heard=st.binary(max_size=200))
@example(heard=preauth.MAGIC)
@example(heard=preauth.MAGIC[:3])
def test_what_is_no_greeting_is_refused_at_its_first_wrong_byte(heard: bytes) -> None:
    begins = heard[: len(preauth.MAGIC)] == preauth.MAGIC[: len(heard)]
    try:
        preauth.check_greeting(heard)
    except ProtocolError:
        assert not begins
    else:
        assert begins


@pytest.mark.parametrize("secret", ["", "0f", "0f" * 31])
def test_a_secret_that_is_none_is_our_own_fault(secret: str) -> None:
    with pytest.raises(AssertionError, match="32 bytes"):
        preauth.answer(secret, GREETING)
