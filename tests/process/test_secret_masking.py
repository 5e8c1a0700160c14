"""Secrets are replaced in every form in which a library or a script may print them."""

from __future__ import annotations

import base64
import json
import os
import threading
from pathlib import Path
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.agent.log_pump import LONGEST, LogPump
from psctl.process.secret_masking import Secrets
from psctl.types import Member

PEM = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIPxyz/abc+def0123\nQAB=\n-----END PRIVATE KEY-----\n"
WORD = 'p/s "w\\ör d+1&'

FORMS = {
    "plain": lambda value: value,
    "json": json.dumps,
    "json as it is": lambda value: json.dumps(value, ensure_ascii=False),
    "json within json": lambda value: json.dumps({"a": json.dumps({"key": value})}),
    "python": repr,
    "python bytes": lambda value: repr(value.encode()),
    "url": lambda value: f"https://u:{quote(value, safe='')}@host/",
    "path of a url": quote,
    "form": lambda value: urlencode({"token": value}),
    "form with slashes": lambda value: quote_plus(value, safe="/"),
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "base64 for urls": lambda value: base64.urlsafe_b64encode(value.encode()).decode(),
    "basic authorization": lambda value: base64.b64encode(f"user:{value}".encode()).decode(),
    "in the middle of base64": lambda value: base64.b64encode(b"ab" + value.encode() + b"cd").decode(),
    "hex": lambda value: value.encode().hex(),
}


@pytest.mark.parametrize("value", [PEM, WORD, "hunter2222"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_secret_is_masked(form: str, value: str) -> None:
    written = FORMS[form](value)
    masked = Secrets([value]).mask_text(f"a line with {written} in it")
    assert "***" in masked
    left = masked.removeprefix("a line with ").removesuffix(" in it").replace("***", "", 1)
    assert len(left) <= len(FORMS[form]("")) + 4, "what stands around it, and parts of characters at its edges"
    assert masked.startswith("a line with ")
    assert masked.endswith(" in it")


@pytest.mark.parametrize("form", ["plain", "json", "python"])
def test_each_line_of_a_secret_is_masked_but_for_very_short_ones(form: str) -> None:
    secrets = Secrets([PEM])
    for line in PEM.splitlines():
        masked = secrets.mask_text(f"> {FORMS[form](line)}")
        assert (line in masked) == (line == "QAB=")
    assert Secrets(["abc\nde\nx"]).mask_text("abcd de x") == "abcd de x"


@given(value=st.text(min_size=6, max_size=60), before=st.binary(max_size=5), after=st.binary(max_size=5))
def test_base64_is_masked_wherever_the_secret_stands_in_it(value: str, before: bytes, after: bytes) -> None:
    data = value.encode()
    coded = base64.b64encode(before + data + after)
    masked = Secrets([value]).mask(coded)
    assert b"***" in masked
    assert len(masked) - 3 <= len(coded) - len(data) * 8 // 6 + 2


@given(
    parts=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=5),
    value=st.text(min_size=4, max_size=40),
)
def test_what_is_masked_does_not_hold_the_secret(parts: list[str], value: str) -> None:
    masked = Secrets([value]).mask(value.join(parts).encode())
    assert value.encode() not in masked or value in "***"


def test_a_line_that_is_cut_does_not_let_a_secret_through(tmp_path: Path) -> None:
    secret = "correct-horse-battery-staple"
    delivered, trouble = [], []
    pump = LogPump(tmp_path, 10**9, Secrets([secret]), delivered.append, trouble.append)
    reader, writer = os.pipe()
    member = Member("worker", 0)
    pump.add(member, "stdout", reader)

    def write() -> None:
        with os.fdopen(writer, "wb", buffering=0) as file:
            for _ in range(5):  # wherever a line is cut, a secret stands there
                file.write(secret.encode() * (LONGEST // len(secret)))

    writing = threading.Thread(target=write)
    writing.start()
    writing.join()
    pump.drain(member)
    pump.close(member)
    text = (tmp_path / "worker-0.stdout.log").read_text()
    assert "horse" not in text
    assert len(text) > 1000
    assert set(text) <= set("*\n")
    assert trouble == []
