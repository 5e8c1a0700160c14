"""The knock: whoever holds the job's secret answers any greeting, nobody else answers one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.wire import knock

SECRET = knock.new_secret()
GREETING = knock.greet()
RIGHT = knock.answer(SECRET, GREETING)


def test_the_holder_of_the_secret_answers_and_greetings_and_secrets_are_fresh() -> None:
    assert knock.holds(SECRET, GREETING, RIGHT)
    assert len({knock.greet() for _ in range(100)}) == len({knock.new_secret() for _ in range(100)}) == 100
    assert (len(GREETING), len(RIGHT), len(bytes.fromhex(SECRET))) == (knock.GREETING, knock.ANSWER, knock.SECRET)
    knock.check_greeting(GREETING)


def test_a_known_answer() -> None:
    """HMAC-SHA256 by openssl dgst, so that both ends can't be wrong in the same way."""
    greeting = b"psctl 1\n" + bytes(range(16))
    assert knock.answer("0f" * 32, greeting).hex() == "264fb44ded78c4465ca6751d6dbe02ac995f121a7946d737002ca1e8269bae79"


@given(said=st.binary(max_size=64))
@example(said=b"")
@example(said=RIGHT[:-1])
@example(said=RIGHT + b"\0")
def test_nothing_else_is_an_answer(said: bytes) -> None:
    assert not knock.holds(SECRET, GREETING, said)


@given(greeting=st.binary(min_size=knock.GREETING, max_size=knock.GREETING), bit=st.integers(0, 8 * knock.ANSWER - 1))
def test_an_answer_is_for_one_greeting_and_one_secret_and_to_the_bit(greeting: bytes, bit: int) -> None:
    said = knock.answer(SECRET, greeting)
    assert knock.holds(SECRET, greeting, said)
    assert not knock.holds(SECRET, GREETING, said)
    assert not knock.holds(knock.new_secret(), greeting, said)
    changed = bytearray(said)
    changed[bit // 8] ^= 1 << bit % 8
    assert not knock.holds(SECRET, greeting, bytes(changed))


@given(heard=st.binary(max_size=200))
@example(heard=knock.MAGIC)
@example(heard=knock.MAGIC[:3])
def test_what_is_no_greeting_is_refused_at_its_first_wrong_byte(heard: bytes) -> None:
    begins = heard[: len(knock.MAGIC)] == knock.MAGIC[: len(heard)]
    try:
        knock.check_greeting(heard)
    except ProtocolError:
        assert not begins
    else:
        assert begins


@pytest.mark.parametrize("secret", ["", "0f", "0f" * 31])
def test_a_secret_that_is_none_is_our_own_fault(secret: str) -> None:
    with pytest.raises(AssertionError, match="32 bytes"):
        knock.answer(secret, GREETING)
